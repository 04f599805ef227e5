package iptables

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// kubeProxyRules is what a kube-proxy gives to iptables-restore, and what it means.
var kubeProxyRules = []struct {
	table Table
	text  string
	want  Rule
}{
	{Nat, `-m comment --comment "ns1/svc1:p80 cluster IP" -m tcp -p tcp -d 172.30.0.41 --dport 80 -j KUBE-SVC-XPGD46QRK7WJZT7O`,
		Rule{Comment: "ns1/svc1:p80 cluster IP", Dst: netip.MustParsePrefix("172.30.0.41/32"), Proto: model.TCP, Port: 80, Target: Target{Action: Jump, Chain: "KUBE-SVC-XPGD46QRK7WJZT7O"}}},
	{Nat, `-m comment --comment "ns1/svc1:p80 cluster IP" -m tcp -p tcp -d 172.30.0.41 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ`,
		Rule{Comment: "ns1/svc1:p80 cluster IP", Src: netip.MustParsePrefix("10.0.0.0/8"), NotSrc: true, Dst: netip.MustParsePrefix("172.30.0.41/32"), Proto: model.TCP, Port: 80, Target: markMasq}},
	{Nat, `-m comment --comment "ns1/svc1:p80 -> 10.180.0.1:80" -m statistic --mode random --probability 0.3333333333 -j KUBE-SEP-SXIVWICOYRO3J4NJ`,
		Rule{Comment: "ns1/svc1:p80 -> 10.180.0.1:80", Chance: 715827883, Target: Target{Action: Jump, Chain: "KUBE-SEP-SXIVWICOYRO3J4NJ"}}},
	{Nat, `-m comment --comment ns1/svc1:p80 -m recent --name KUBE-SEP-SXIVWICOYRO3J4NJ --rcheck --seconds 10800 --reap -j KUBE-SEP-SXIVWICOYRO3J4NJ`,
		Rule{Comment: "ns1/svc1:p80", Recent: Recent{List: "KUBE-SEP-SXIVWICOYRO3J4NJ", Since: 3 * time.Hour}, Target: Target{Action: Jump, Chain: "KUBE-SEP-SXIVWICOYRO3J4NJ"}}},
	{Nat, `-m comment --comment ns1/svc1:p80 -s 10.180.0.1 -j KUBE-MARK-MASQ`,
		Rule{Comment: "ns1/svc1:p80", Src: netip.MustParsePrefix("10.180.0.1/32"), Target: markMasq}},
	{Nat, `-m comment --comment ns1/svc1:p80 -m recent --name KUBE-SEP-SXIVWICOYRO3J4NJ --set -m tcp -p tcp -j DNAT --to-destination 10.180.0.1:80`,
		Rule{Comment: "ns1/svc1:p80", Recent: Recent{List: "KUBE-SEP-SXIVWICOYRO3J4NJ", Set: true}, Proto: model.TCP, Target: Target{Action: DNAT, To: netip.MustParseAddrPort("10.180.0.1:80")}}},
	{Nat, `-m comment --comment ns1/svc1:u -m udp -p udp -j DNAT --to-destination 10.180.0.1:80`,
		Rule{Comment: "ns1/svc1:u", Proto: model.UDP, Target: Target{Action: DNAT, To: netip.MustParseAddrPort("10.180.0.1:80")}}},
	{Nat, `-m comment --comment ns1/svc1:s -m sctp -p sctp -j DNAT --to-destination 10.180.0.1:80`,
		Rule{Comment: "ns1/svc1:s", Proto: model.SCTP, Target: Target{Action: DNAT, To: netip.MustParseAddrPort("10.180.0.1:80")}}},
	{Nat, `-m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL ! -d 127.0.0.0/8 -j KUBE-NODEPORTS`,
		Rule{Comment: "kubernetes service nodeports; NOTE: this must be the last rule in this chain", Dst: loopback4, NotDst: true, DstLocal: true, Target: Target{Action: Jump, Chain: "KUBE-NODEPORTS"}}},
	{Nat, `-m mark ! --mark 0x00004000/0x00004000 -j RETURN`, Rule{Mark: 0x4000, MarkMask: 0x4000, NotMark: true, Target: Target{Action: Return}}},
	{Nat, `-j MARK --xor-mark 0x00004000`, Rule{Target: Target{Action: XorMark, Mark: 0x4000}}},
	{Nat, `-j MARK --or-mark 0x00004000`, Rule{Target: Target{Action: OrMark, Mark: 0x4000}}},
	{Nat, `-m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`,
		Rule{Comment: "kubernetes service traffic requiring SNAT", Target: Target{Action: Masquerade}}},
	{Filter, `-m comment --comment "ns1/svc1 has no endpoints" -m tcp -p tcp -d 172.30.0.41 --dport 80 -j REJECT`,
		Rule{Comment: "ns1/svc1 has no endpoints", Dst: netip.MustParsePrefix("172.30.0.41/32"), Proto: model.TCP, Port: 80, Target: Target{Action: RejectPort}}},
	{Filter, `-m comment --comment "block incoming localnet connections" -d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`,
		Rule{Comment: "block incoming localnet connections", Src: loopback4, NotSrc: true, Dst: loopback4, State: StateRelated | StateEstablished | StateDNAT, NotState: true, Target: Target{Action: DropIt}}},
	{Filter, `-m conntrack --ctstate INVALID -m nfacct --nfacct-name ct_state_invalid_dropped_pkts -j DROP`,
		Rule{State: StateInvalid, NFAcct: acctInvalid, Target: Target{Action: DropIt}}},
	{Filter, `-m comment --comment "kubernetes forwarding rules" -m mark --mark 0x00004000/0x00004000 -j ACCEPT`,
		Rule{Comment: "kubernetes forwarding rules", Mark: 0x4000, MarkMask: 0x4000, Target: Target{Action: Accept}}},
	{Filter, `-m comment --comment "other traffic to ns1/svc1 will be dropped by KUBE-PROXY-FIREWALL"`,
		Rule{Comment: "other traffic to ns1/svc1 will be dropped by KUBE-PROXY-FIREWALL"}},
}

// Both back ends understand all of kube-proxy's rules, so that taking over from it knows what is there.
func TestReadsKubeProxy(t *testing.T) {
	for _, flavour := range []string{"nft", "legacy"} {
		t.Run(flavour, func(t *testing.T) {
			inNS(t, func(*kernel.NS) {
				var be backend
				if flavour == "nft" {
					be = openTestNFT(t)
				} else {
					be = openTestLegacy(t)
				}
				text := ""
				want := map[ChainID][]Rule{}
				for _, table := range []Table{Filter, Nat} {
					text += "*" + table.String() + "\n"
					for _, name := range []string{"KUBE-X", "KUBE-NODEPORTS", "KUBE-MARK-MASQ", "KUBE-SEP-SXIVWICOYRO3J4NJ", "KUBE-SVC-XPGD46QRK7WJZT7O"} {
						text += ":" + name + " - [0:0]\n"
						want[ChainID{false, table, name}] = nil
					}
					for _, r := range kubeProxyRules {
						if r.table == table {
							text += "-A KUBE-X " + r.text + "\n"
							id := ChainID{false, table, "KUBE-X"}
							want[id] = append(want[id], r.want)
						}
					}
					text += "COMMIT\n"
				}
				run(t, text, tool(flavour, false, "restore"), "-w", "5", "--noflush", "--counters")
				got, err := readAll(t.Context(), be, false)
				if err != nil {
					t.Fatal(err)
				}
				for id, rules := range want {
					if f, ok := got[id]; !ok || !f.Exact || !slices.Equal(f.Rules, rules) {
						t.Errorf("%s: exact %v", where(id), f.Exact)
						for i := range max(len(rules), len(f.Rules)) {
							if at(rules, i) != at(f.Rules, i) {
								t.Errorf("rule %d\nwant %+v\n got %+v", i, at(rules, i), at(f.Rules, i))
							}
						}
					}
				}
			})
		})
	}
}

// Versions of iptables-nft before 1.8.8 wrote ports and marks as xtables matches, and comments always so.
func TestReadsOlderIptables(t *testing.T) {
	ports := func(size int, srcFirst, srcLast, first, last uint16) []byte {
		b := make([]byte, size)
		for i, p := range []uint16{srcFirst, srcLast, first, last} {
			binary.NativeEndian.PutUint16(b[2*i:], p)
		}
		return b
	}
	mark := binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 0x4000), 0xc000)
	flagged := ports(16, 0, 65535, 80, 80)
	flagged[9] = 0x17 // --tcp-flags
	for _, c := range []struct {
		name, match string
		rev         uint32
		info        []byte
		proto       model.Proto
		want        Rule
		exact       bool
	}{
		{"port", "tcp", 0, ports(16, 0, 65535, 80, 80), model.TCP, Rule{Proto: model.TCP, Port: 80}, true},
		{"ports", "udp", 0, ports(16, 0, 65535, 80, 90), model.UDP, Rule{Proto: model.UDP, Port: 80, PortEnd: 90}, true},
		{"any port", "tcp", 0, ports(16, 0, 65535, 0, 65535), model.TCP, Rule{Proto: model.TCP}, true},
		{"source port", "tcp", 0, ports(16, 53, 53, 80, 80), model.TCP, Rule{Proto: model.TCP}, false},
		{"flags", "tcp", 0, flagged, model.TCP, Rule{Proto: model.TCP, Port: 80}, false},
		{"other protocol", "tcp", 0, ports(16, 0, 65535, 80, 80), model.UDP, Rule{Proto: model.UDP}, false},
		{"mark", "mark", 1, append(slices.Clone(mark), 0, 0, 0, 0), 0, Rule{Mark: 0x4000, MarkMask: 0xc000}, true},
		{"not mark", "mark", 1, append(slices.Clone(mark), 1, 0, 0, 0), 0, Rule{Mark: 0x4000, MarkMask: 0xc000, NotMark: true}, true},
		{"comment", "comment", 0, append([]byte("a b"), make([]byte, 253)...), 0, Rule{Comment: "a b"}, true},
		{"unknown", "owner", 1, make([]byte, 32), 0, Rule{}, false},
		{"short", "conntrack", 3, make([]byte, 8), 0, Rule{}, false},
	} {
		b, at := kernel.BeginNest(nil, unix.NFTA_RULE_EXPRESSIONS)
		if c.proto != 0 {
			b = appendCmp(appendMeta(b, unix.NFT_META_L4PROTO), false, []byte{byte(c.proto)})
		}
		b = kernel.EndNest(appendMatch(b, c.match, c.rev, c.info), at)
		if got, exact := cutRule(b).rule(false); got != c.want || exact != c.exact {
			t.Errorf("%s: exact %v, %+v", c.name, exact, got)
		}
	}
}
