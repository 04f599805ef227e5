package iptables

import (
	"bytes"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// samples is a rule for each thing a Rule can say, and for the borders of it, by table.
func samples(v6 bool) map[Table][]Rule {
	p := netip.MustParsePrefix
	pick := func(a, b string) netip.Prefix {
		if v6 {
			return p(b)
		}
		return p(a)
	}
	host, dst := pick("10.96.0.1/32", "fd00:96::1/128"), netip.MustParseAddrPort("10.244.1.2:8080")
	if v6 {
		dst = netip.MustParseAddrPort("[fd00:244::2]:8080")
	}
	jump := Target{Action: Jump, Chain: "KUBE-SVC-TARGET"}
	filter := []Rule{
		{},
		{Comment: "only a comment"},
		{Comment: "word"},
		{Comment: "ns/name:port cluster IP -> 10.0.0.1:80", Target: jump},
		{Comment: strings.Repeat("c", maxUserComment), Target: jump},
		{Comment: strings.Repeat("c", maxUserComment+1), Target: jump},
		{Comment: strings.Repeat("long ", 51), Target: jump},
		{Comment: "!", Target: jump},
		{Comment: "--option", Target: jump},
		{Comment: "* ( ) [ ] { } | & ; < > $ ` # % ~ ^", Target: jump},
		{Src: host, Target: jump},
		{Dst: host, Target: jump},
		{Src: host, NotSrc: true, Dst: host, NotDst: true, Target: jump},
		{Src: pick("10.0.0.0/8", "fd00::/8"), Target: jump},
		{Src: pick("10.1.0.0/16", "fd00::/16"), Dst: pick("10.1.2.0/24", "fd00::/64"), Target: jump},
		{Dst: pick("10.0.0.0/20", "fd00:0:1000::/36"), Target: jump},
		{Dst: pick("128.0.0.0/1", "8000::/1"), NotDst: true, Target: jump},
		{Dst: pick("10.0.0.2/31", "fd00::2/127"), Target: jump},
		{In: "eth0", Target: jump},
		{In: "veth+", Target: jump},
		{In: "eth0", NotIn: true, Target: jump},
		{In: "cali+", NotIn: true, Target: jump},
		{In: "fifteen-letters", Target: jump},
		{In: "fifteen-letter+", Target: jump},
		{Proto: model.TCP, Target: jump},
		{Proto: model.UDP, Target: jump},
		{Proto: model.SCTP, Target: jump},
		{Proto: model.TCP, Port: 80, Target: jump},
		{Proto: model.UDP, Port: 53, Target: jump},
		{Proto: model.SCTP, Port: 36412, Target: jump},
		{Proto: model.TCP, Port: 30000, PortEnd: 32767, Target: jump},
		{Proto: model.UDP, Port: 1, PortEnd: 65535, Target: jump},
		{Proto: model.SCTP, Port: 256, PortEnd: 511, Target: jump},
		{Dst: host, Proto: model.TCP, Port: 443, Comment: "a b", Target: jump},
		{State: StateInvalid, Target: Target{Action: DropIt}},
		{State: StateInvalid, NFAcct: "ct_state_invalid_dropped_pkts", Target: Target{Action: DropIt}},
		{State: StateNew, Comment: "kubernetes service portals", Target: jump},
		{State: StateRelated | StateEstablished, Target: Target{Action: Accept}},
		{State: StateRelated | StateEstablished | StateDNAT, NotState: true, Src: host, NotSrc: true, Target: Target{Action: DropIt}},
		{State: StateInvalid | StateNew | StateRelated | StateEstablished | StateDNAT, Target: jump},
		{SrcLocal: true, Target: jump},
		{DstLocal: true, Target: jump},
		{SrcLocal: true, DstLocal: true, Proto: model.TCP, Port: 1, Target: jump},
		{Mark: 0x4000, MarkMask: 0x4000, Target: Target{Action: Accept}},
		{Mark: 0x4000, MarkMask: 0x4000, NotMark: true, Target: Target{Action: Return}},
		{Mark: 0, MarkMask: 0x80000000, Target: jump},
		{Mark: 7, MarkMask: 0xffffffff, Target: jump},
		{Recent: Recent{List: "KUBE-SEP-AAAAAAAAAAAAAAAA", Since: 3 * time.Hour}, Target: jump},
		{Recent: Recent{List: "KUBE-SEP-AAAAAAAAAAAAAAAA", Set: true}, Target: jump},
		{Recent: Recent{List: "KUBE-SEP-AAAAAAAAAAAAAAAA"}, Target: jump},
		{Chance: 1 << 30, Target: jump},
		{Chance: 715827883, Target: jump},
		{Chance: 1, Target: jump},
		{Chance: 0x7fffffff, Target: jump},
		{NFAcct: "localhost_nps_accepted_pkts", Target: jump},
		{Target: Target{Action: Goto, Chain: "KUBE-SVC-TARGET"}},
		{Target: Target{Action: Accept}},
		{Target: Target{Action: Return}},
		{Proto: model.TCP, Target: Target{Action: RejectReset}},
		{Dst: host, Proto: model.TCP, Port: 80, Comment: "ns/name has no endpoints", Target: Target{Action: RejectReset}},
		{Target: Target{Action: RejectPort}},
		{Proto: model.UDP, Port: 53, Target: Target{Action: RejectPort}},
		{Src: host, Dst: pick("10.0.0.0/12", "fd00::/12"), In: "eth+", Proto: model.TCP, Port: 5, PortEnd: 6, State: StateNew,
			SrcLocal: true, Mark: 1, MarkMask: 3, Recent: Recent{List: "x", Since: time.Second}, Chance: 12345, Comment: "all of it", Target: jump},
	}
	nat := []Rule{
		{Proto: model.TCP, Target: Target{Action: DNAT, To: dst}},
		{Proto: model.UDP, Comment: "ns/name", Recent: Recent{List: "KUBE-SEP-B", Set: true}, Target: Target{Action: DNAT, To: dst}},
		{Proto: model.SCTP, Port: 9, Target: Target{Action: DNAT, To: dst}},
		{Target: Target{Action: DNAT, To: netip.AddrPortFrom(dst.Addr(), 0)}},
		{Comment: "kubernetes service traffic requiring SNAT", Target: Target{Action: Masquerade}},
		{Target: Target{Action: OrMark, Mark: 0x4000}},
		{Target: Target{Action: XorMark, Mark: 0x4000}},
		{Target: Target{Action: OrMark, Mark: 0xffffffff}},
	}
	return map[Table][]Rule{Filter: filter, Nat: nat}
}

// sampleChanges are the chains that hold the samples.
func sampleChanges(v6 bool) []change {
	var out []change
	for _, t := range []Table{Nat, Filter} {
		out = append(out, change{Chain: ChainID{v6, t, "KUBE-SVC-TARGET"}},
			change{Chain: ChainID{v6, t, "KUBE-SAMPLES"}, Rules: samples(v6)[t]})
	}
	return out
}

// inNS runs f in a network namespace of its own that has the nfacct counters of the samples.
func inNS(t testing.TB, f func(ns *kernel.NS)) {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		acct, err := openAccounts()
		if err != nil {
			return err
		}
		defer acct.Close()
		f(ns)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a program in the namespace of the calling thread and returns what it prints.
func run(t testing.TB, stdin string, name string, args ...string) string {
	t.Helper()
	out, err := try(stdin, name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func try(stdin string, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

// tool is a program of iptables for a family and a flavour: tool("nft", false, "save") is iptables-nft-save.
func tool(flavour string, v6 bool, what string) string {
	name := "iptables-" + flavour
	if v6 {
		name = "ip6tables-" + flavour
	}
	if what != "" {
		name += "-" + what
	}
	return name
}

func linesOf(out, prefix string) []string {
	var lines []string
	for l := range strings.Lines(out) {
		if strings.HasPrefix(l, prefix) {
			lines = append(lines, strings.TrimRight(l, "\n"))
		}
	}
	return lines
}

func families() []bool { return []bool{false, true} }
