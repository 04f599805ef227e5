package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead/internal/model"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 && os.Getenv("FAIRLEAD_NO_ROOT") == "1" {
		fmt.Println("FAIRLEAD_NO_ROOT=1: nothing is tried")
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func build(t *testing.T, c Config) *World {
	t.Helper()
	w, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func call(from *Actor, proto model.Proto, dst string) Call {
	return Call{From: from, Proto: proto, Dst: netip.MustParseAddrPort(dst)}
}

func serveAll(t *testing.T, w *World, port uint16) {
	t.Helper()
	for _, a := range w.Actors() {
		if a.Kind != Pod {
			continue
		}
		for _, network := range []string{"tcp", "udp"} {
			if _, err := a.Serve(network, netip.AddrPortFrom(netip.IPv6Unspecified(), port)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Everybody reaches every pod, in both families and protocols, and is seen as itself.
func TestReachEachOther(t *testing.T) {
	for _, bridge := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge=%v", bridge), func(t *testing.T) {
			c := Common()
			c.Bridge = bridge
			w := build(t, c)
			serveAll(t, w, 8080)
			for _, from := range w.Actors() {
				for _, to := range []string{"p1a", "p1b", "p2a"} {
					if from.Kind == lanSwitch || from.Name == to {
						continue
					}
					for _, v6 := range []bool{false, true} {
						for _, proto := range []model.Proto{model.TCP, model.UDP} {
							dst := netip.AddrPortFrom(w.Must(to).Addr(v6), 8080)
							a := Call{From: from, Proto: proto, Dst: dst}.Do()
							if a.Outcome != Answered || a.By != to || a.Port != 8080 || a.Seen != a.Local && from.Kind != Node {
								t.Errorf("%s -> %s/%s: %s, sent from %s", from.Name, dst, proto, a, a.Local)
							}
							if ok, err := from.Owns(a.Seen.Addr()); err != nil || !ok {
								t.Errorf("%s -> %s/%s was seen as %s, which it does not own (%v)", from.Name, dst, proto, a.Seen, err)
							}
						}
					}
				}
			}
		})
	}
}

// A refusal and a silence are told apart, and what kind of refusal it is.
func TestOutcomes(t *testing.T) {
	w := build(t, Common())
	ext, n1 := w.Must("ext"), w.Must("n1")
	for _, rule := range []string{
		"-A INPUT -p tcp --dport 1001 -j REJECT --reject-with tcp-reset",
		"-A INPUT -p tcp --dport 1002 -j REJECT",
		"-A INPUT -p udp --dport 1002 -j REJECT",
		"-A INPUT -p tcp --dport 1003 -j DROP",
		"-A INPUT -p udp --dport 1003 -j DROP",
		"-A OUTPUT -p udp --dport 1004 -j DROP",
		"-A OUTPUT -p udp --dport 1005 -j REJECT",
		"-A OUTPUT -p tcp --dport 1005 -j REJECT --reject-with tcp-reset",
	} {
		mustExec(t, n1, "", "iptables", strings.Fields(rule)...)
		mustExec(t, n1, "", "ip6tables", strings.Fields(rule)...)
	}
	for _, tt := range []struct {
		from  *Actor
		proto model.Proto
		port  uint16
		want  Outcome
	}{
		{ext, model.TCP, 1000, Reset}, {ext, model.UDP, 1000, Unreachable}, // nobody listens
		{ext, model.TCP, 1001, Reset},
		{ext, model.TCP, 1002, Unreachable}, {ext, model.UDP, 1002, Unreachable},
		{ext, model.TCP, 1003, Silence}, {ext, model.UDP, 1003, Silence},
		{n1, model.UDP, 1004, Silence},
		{n1, model.UDP, 1005, Unreachable}, {n1, model.TCP, 1005, Reset},
	} {
		for _, v6 := range []bool{false, true} {
			dst := netip.AddrPortFrom(n1.Addr(v6), tt.port)
			if tt.from == n1 {
				dst = netip.AddrPortFrom(w.Must("n2").Addr(v6), tt.port)
			}
			a := Call{From: tt.from, Proto: tt.proto, Dst: dst, Wait: 400 * time.Millisecond}.Do()
			if a.Outcome != tt.want {
				t.Errorf("%s -> %s/%s: %s, want %s", tt.from.Name, dst, tt.proto, a, tt.want)
			}
		}
	}
}

func mustExec(t *testing.T, a *Actor, stdin, name string, args ...string) string {
	t.Helper()
	out, err := a.Exec(context.Background(), strings.NewReader(stdin), name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

// handWritten is what kube-proxy would write for one ClusterIP with two endpoints: the stand-in for an agent.
//
// The filter rule keeps the kernel tracking when the nat table is flushed: its last user gone, conntrack rests, and no
// flow is translated any more.
const handWritten = `*filter
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
-A PREROUTING -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.1.10:8080
-A OUTPUT -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.244.2.10:8080
-A PREROUTING -d 10.96.0.10/32 -p udp -m udp --dport 80 -j DNAT --to-destination 10.244.2.10:8080
-A POSTROUTING -s 10.244.1.10/32 -d 10.244.1.10/32 -j MASQUERADE
-A POSTROUTING ! -s 10.244.0.0/16 -m conntrack --ctorigdst 10.96.0.10/32 -j MASQUERADE
COMMIT
`

// The lab sees what rules do: who answers, and whom the backend sees.
func TestHandWrittenService(t *testing.T) {
	w := build(t, Common())
	serveAll(t, w, 8080)
	n1 := w.Must("n1")
	mustExec(t, n1, handWritten, "iptables-restore", "--noflush")
	for _, tt := range []struct{ from, by, as string }{
		{"p1b", "p1a", "p1b"}, {"p1a", "p1a", "n1"}, {"n1", "p2a", "n1"}, {"ext", "p1a", "n1"},
	} {
		a := call(w.Must(tt.from), model.TCP, "10.96.0.10:80").Do()
		seenAs, err := w.Must(tt.as).Owns(a.Seen.Addr())
		if a.Outcome != Answered || a.By != tt.by || err != nil || !seenAs {
			t.Errorf("%s -> VIP: %s; want %s to see %s", tt.from, a, tt.by, tt.as)
		}
	}
	flow, err := call(w.Must("p1b"), model.TCP, "10.96.0.10:80").Open()
	if err != nil {
		t.Fatal(err)
	}
	defer flow.Close()
	mustExec(t, n1, "", "iptables", "-t", "nat", "-F")
	if a := flow.Ask(); a.Outcome != Answered || a.By != "p1a" {
		t.Errorf("the flow did not survive the flush: %s", a)
	}
	entries, err := n1.Conntrack()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(entries, func(e Entry) bool {
		return e.Src == flow.First().Local && e.Dst.String() == "10.96.0.10:80" && e.ReplySrc.String() == "10.244.1.10:8080"
	}) {
		t.Errorf("conntrack does not show the flow of %s: %v", flow.First().Local, entries)
	}
}

func TestLoadAndStream(t *testing.T) {
	w := build(t, Common())
	serveAll(t, w, 8080)
	p1a, n1 := w.Must("p1a"), w.Must("n1")
	mustExec(t, n1, handWritten, "iptables-restore", "--noflush")
	good := func(a Answer) bool { return a.Outcome == Answered }
	load := call(p1a, model.TCP, "10.96.0.10:80").StartLoad(200, good)
	c := call(p1a, model.UDP, "10.96.0.10:80")
	c.Src = netip.AddrPortFrom(netip.Addr{}, 5000)
	stream, err := c.StartStream(20 * time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the load and the stream to get answers", func() bool { return load.Calls() > 20 && len(stream.Since(time.Time{})) > 5 })
	if r := load.Stop(); r.BadCount != 0 || r.By["p1a"] != r.Calls {
		t.Errorf("load: %s", r)
	}
	if last := stream.Since(time.Time{})[0]; last.By != "p2a" || last.Seen != netip.MustParseAddrPort("10.244.1.10:5000") {
		t.Errorf("stream: %s", last)
	}
	w.Must("p2a").StopServing()
	gone := time.Now()
	eventually(t, "the stream to be refused by a pod that stopped serving", func() bool {
		return slices.ContainsFunc(stream.Since(gone), func(a Answer) bool { return a.Outcome == Unreachable })
	})
	stream.Stop()

	closed := call(p1a, model.TCP, "10.244.1.11:1").StartLoad(100, good)
	eventually(t, "the bad load to have tries", func() bool { return closed.Calls() > 5 })
	if r := closed.Stop(); r.BadCount != r.Calls || r.Outcomes[Reset] != r.Calls {
		t.Errorf("a load on a closed port must report every call as bad: %s", r)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 10 s for %s", what)
		}
	}
}

// The namespace of the program is not touched, and nothing is left: no namespace, no link, no process, no file.
func TestNothingIsLeft(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // other tests may have worlds at the same time
	before := census(t)
	var pid int
	func() {
		defer func() { recover() }()
		w, err := New(Common())
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		serveAll(t, w, 8080)
		during := census(t)
		if !slices.Equal(before.links, during.links) {
			t.Errorf("the lab made links in the program's own namespace: %v, before %v", during.links, before.links)
		}
		cmd := exec.Command("sleep", "1000")
		p, err := w.Must("n1").Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		pid = p.Pid()
		if _, err := call(w.Must("ext"), model.TCP, "10.244.1.10:8080").Open(); err != nil {
			t.Fatal(err)
		}
		panic("a story that panics")
	}()
	if processAlive(pid) {
		t.Errorf("process %d outlived its world", pid)
	}
	eventually(t, "descriptors and namespaces to be as before", func() bool {
		after := census(t)
		return after.files <= before.files && after.namespaces == before.namespaces && slices.Equal(after.links, before.links)
	})
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "fairlead-lab-*")); len(left) > 0 {
		t.Errorf("files left: %v", left)
	}
}

func processAlive(pid int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}

type counted struct {
	files, namespaces int
	links             []string
}

// census counts what a world could leave behind in this program.
func census(t *testing.T) (c counted) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	c.files = len(fds)
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "net:[") {
			c.namespaces++
		}
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		c.links = append(c.links, l.Name)
	}
	return c
}

func TestUnknownActorsAndNames(t *testing.T) {
	w := build(t, Config{Nodes: []string{"n1"}})
	if _, err := w.Actor("nobody"); err == nil {
		t.Error("an unknown actor was found")
	}
	if _, err := w.AddPod("p", "nobody"); err == nil {
		t.Error("a pod was put on an unknown node")
	}
	if _, err := w.AddPod("a-name-that-is-far-too-long", "n1"); err == nil {
		t.Error("a pod got a name that no interface can have")
	}
	if _, err := w.AddPod("p1a", "n1"); err != nil {
		t.Error(err)
	}
	if _, err := w.AddPod("p1a", "n1"); err == nil {
		t.Error("two pods have one name")
	}
}
