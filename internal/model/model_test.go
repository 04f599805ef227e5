package model

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Few names, so that deltas speak of the same things.
var (
	anyKey   = rapid.SampledFrom([]Key{key("10.96.0.1:80", TCP), key("10.96.0.1:80", UDP), key("[fd00::1]:80", TCP), key("0.0.0.0:30080", TCP)})
	anyPool  = rapid.SampledFrom([]PoolID{{Service: "a/a", Proto: TCP}, {Service: "a/a", Proto: TCP, Scope: Local}, {Service: "a/b", Port: "x", Proto: UDP, V6: true}})
	anyCheck = rapid.SampledFrom([]string{"a/a", "a/b", "b/a"})
	anyName  = rapid.SampledFrom([]string{"one", "two", "three"})
)

func key(addrPort string, p Proto) Key {
	ap := netip.MustParseAddrPort(addrPort)
	return Key{ap.Addr(), ap.Port(), p}
}

// anyDelta draws a delta as a resolver would make it: nothing is mentioned twice.
func anyDelta(t *rapid.T) Delta {
	var d Delta
	d.Full = rapid.IntRange(0, 5).Draw(t, "full") == 0
	d.Frontends, d.GoneFrontends = split(t, d.Full, anyKey, func(k Key) Frontend { return Frontend{Key: k, About: About{Service: anyName.Draw(t, "service")}} })
	d.Pools, d.GonePools = split(t, d.Full, anyPool, func(id PoolID) Pool {
		return Pool{ID: id, Sticky: time.Duration(rapid.IntRange(0, 2).Draw(t, "sticky"))}
	})
	d.Checks, d.GoneChecks = split(t, d.Full, anyCheck, func(s string) Check { return Check{Service: s, Port: uint16(rapid.IntRange(0, 2).Draw(t, "port"))} })
	if rapid.Bool().Draw(t, "node") {
		d.Node = &Node{Name: anyName.Draw(t, "node")}
	}
	if rapid.Bool().Draw(t, "since") {
		d.Since = []time.Time{time.Unix(int64(rapid.IntRange(0, 9).Draw(t, "at")), 0)}
	}
	return d
}

func split[K comparable, V any](t *rapid.T, full bool, keys *rapid.Generator[K], value func(K) V) (set []V, gone []K) {
	for _, k := range rapid.SliceOfNDistinct(keys, 0, 3, rapid.ID[K]).Draw(t, "keys") {
		if full || rapid.Bool().Draw(t, "set") {
			set = append(set, value(k))
		} else {
			gone = append(gone, k)
		}
	}
	return set, gone
}

func apply(ds ...Delta) *State {
	s := NewState()
	for _, d := range ds {
		s.Apply(d)
	}
	return s
}

// The laws that the engine lives by: what was not applied yet may be put together, in any grouping, and applied again.
func TestDeltaLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before, a, b, c := anyDelta(t), anyDelta(t), anyDelta(t), anyDelta(t)
		want := apply(before, a, b)
		same := func(law string, want, got *State) {
			if !reflect.DeepEqual(want, got) {
				t.Fatalf("%s:\n%s\nis not\n%s", law, got.Table(), want.Table())
			}
		}
		same("a.Then(b) is a, then b", want, apply(before, a.Then(b)))
		same("applied twice is applied once", want, apply(before, a.Then(b), a.Then(b)))
		same("a failed a, then a.Then(b)", want, apply(before, a, a.Then(b)))
		same("Then is associative", apply(before, a.Then(b).Then(c)), apply(before, a.Then(b.Then(c))))
		same("nothing before", apply(before, a), apply(before, Delta{}.Then(a)))
		same("nothing after", apply(before, a), apply(before, a.Then(Delta{})))
		same("Full is all of it", want, apply(before, c, want.Full()))
		if got := len(a.Then(b).Since); got != len(a.Since)+len(b.Since) {
			t.Fatalf("%d times of %d and %d", got, len(a.Since), len(b.Since))
		}
		noneTwice(t, a.Then(b))
	})
}

// noneTwice fails if a delta names one thing twice, or names something as gone under Full.
func noneTwice(t *rapid.T, d Delta) {
	seen := map[string]bool{}
	for _, line := range d.Lines() {
		name := strings.TrimLeft(line, "+- ")
		if seen[name] || d.Full && strings.HasPrefix(line, "- ") {
			t.Fatalf("twice, or gone under full: %q in %v", line, d.Lines())
		}
		seen[name] = true
	}
}

// A state that is cloned does not follow its origin.
func TestClone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := apply(anyDelta(t))
		c, want := s.Clone(), s.Full()
		s.Apply(anyDelta(t))
		if !reflect.DeepEqual(c.Full(), want) {
			t.Fatal("the clone changed")
		}
	})
}

func prefixes(texts ...string) (out []netip.Prefix) {
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func addrs(texts ...string) (out []netip.Addr) {
	for _, text := range texts {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

// town is a state with a Service of each sort: "web" at a ClusterIP, NodePort and (closed) load-balancer address with policy
// Local and an endpoint elsewhere only; "gone" without endpoints.
func town() *State {
	s := NewState()
	s.Node = Node{Name: "n1", Addrs: addrs("127.0.0.1", "192.0.2.11", "192.0.2.111", "10.244.1.1", "::1", "2001:db8::11"), Pods: prefixes("10.244.0.0/16", "fd00:10::/32"), PodInterfaces: []string{"br0", "veth+"}}
	web := PoolID{Service: "demo/web", Proto: TCP}
	local := web
	local.Scope = Local
	web6, local6 := web, local
	web6.V6, local6.V6 = true, true
	hidden, open, here := Route{web, true, Reject}, Route{web, false, Reject}, Route{local, false, Drop}
	gone := Route{Pool: PoolID{Service: "demo/gone", Proto: UDP}, Else: Reject}
	about := func(k Kind) About { return About{Service: "demo/web", Kind: k} }
	for _, f := range []Frontend{
		{Key: key("10.96.0.1:80", TCP), Routes: [3]Route{open, hidden, hidden}, Owned: true, About: about(ClusterIP)},
		{Key: key("0.0.0.0:30080", TCP), Routes: [3]Route{open, hidden, here}, About: about(NodePort)},
		{Key: key("[::]:30080", TCP), Routes: [3]Route{{web6, false, Reject}, {web6, true, Reject}, {local6, false, Drop}}, About: about(NodePort)},
		{Key: key("203.0.113.1:80", TCP), Routes: [3]Route{open, hidden, here}, Allow: prefixes("198.51.100.0/24", "192.0.2.11/32"), About: about(LoadBalancer)},
		{Key: key("203.0.113.2:80", TCP), Routes: [3]Route{open, hidden, here}, Allow: []netip.Prefix{}, About: about(LoadBalancer)},
		{Key: key("10.96.0.2:80", UDP), Routes: [3]Route{gone, gone, gone}, Owned: true, About: About{Service: "demo/gone", Kind: ClusterIP}},
	} {
		s.Frontends[f.Key] = f
	}
	s.Pools[web] = Pool{ID: web, Backends: []Backend{{Addr: netip.MustParseAddrPort("10.244.2.10:8080")}}}
	s.Pools[web6] = Pool{ID: web6, Backends: []Backend{{Addr: netip.MustParseAddrPort("[fd00:10::1]:8080")}}}
	s.Pools[local], s.Pools[local6] = Pool{ID: local}, Pool{ID: local6}
	return s
}

// nodePorts adds to the town what TestTable's lines do without: node ports of UDP, one without endpoints and of policy Local
// also for the node, and one that not everybody may use.
func nodePorts(s *State) {
	web, web6 := PoolID{Service: "demo/web", Proto: TCP}, PoolID{Service: "demo/web", Proto: TCP, V6: true}
	local := web
	local.Scope = Local
	for _, f := range []Frontend{
		{Key: key("0.0.0.0:30053", UDP), Routes: [3]Route{{web, true, Reject}, {web, true, Reject}, {web, true, Reject}}},
		{Key: key("[::]:30053", UDP), Routes: [3]Route{{web6, true, Reject}, {web6, true, Reject}, {web6, true, Reject}}},
		{Key: key("0.0.0.0:30090", TCP), Routes: [3]Route{{web, true, Reject}, {local, true, Drop}, {web, true, Reject}}},
		{Key: key("0.0.0.0:30091", TCP), Routes: [3]Route{{web, true, Reject}, {web, true, Reject}, {web, true, Reject}}, Allow: prefixes("127.0.0.1/32")},
	} {
		f.About = About{Service: "demo/web", Kind: NodePort}
		s.Frontends[f.Key] = f
	}
}

func TestDecide(t *testing.T) {
	all := func(n *Node) { n.NodePorts = nil }
	some := func(n *Node) { n.NodePorts = prefixes("192.0.2.11/32") }
	none := func(n *Node) { n.NodePorts = []netip.Prefix{} }
	localhost := func(n *Node) { n.LocalhostPort = true }
	relay4 := func(n *Node) { n.LocalhostRelay, n.NodePorts = addrs("127.0.0.1"), nil }
	relay6 := func(n *Node) { n.LocalhostRelay, n.NodePorts = addrs("::1"), nil }
	relay := func(n *Node) { n.LocalhostRelay, n.NodePorts = addrs("127.0.0.1", "::1"), nil }
	blind := func(n *Node) { n.Pods, n.PodInterfaces = nil, nil }
	ranges := func(n *Node) {
		n.ServiceCIDRs = prefixes("10.96.0.0/16", "192.0.2.0/24", "203.0.113.0/24", "fd00:96::/112")
	}
	for _, c := range []struct {
		what     string
		set      func(*Node)
		src, via string
		dst      string
		proto    Proto
		want     string
	}{
		{"a pod, by its address", all, "10.244.1.10", "eth0", "10.96.0.1:80", TCP, "pod forward"},
		{"a pod, by the name of its interface", all, "172.16.0.1", "br0", "10.96.0.1:80", TCP, "pod forward"},
		{"a pod, by the start of the name", all, "172.16.0.1", "veth0a", "10.96.0.1:80", TCP, "pod forward"},
		{"no start of a name", all, "172.16.0.1", "br01", "10.96.0.1:80", TCP, "outside forward snat"},
		{"the node", all, "192.0.2.11", "", "10.96.0.1:80", TCP, "node forward snat"},
		{"the node, by an address in the pods' range", all, "10.244.1.1", "", "10.96.0.1:80", TCP, "pod forward"},
		{"the node, over its own loopback interface", all, "192.0.2.11", "lo", "10.96.0.1:80", TCP, "node forward snat"},
		{"the node, from an address it does not tell", all, "198.18.0.1", "", "10.96.0.1:80", TCP, "node forward snat"},
		{"outside", all, "192.0.2.100", "eth0", "10.96.0.1:80", TCP, "outside forward snat"},
		{"a pod where nothing tells pods", blind, "10.244.1.10", "eth0", "10.96.0.1:80", TCP, "outside forward snat"},
		{"another port of a ClusterIP", all, "10.244.1.10", "eth0", "10.96.0.1:81", TCP, "pod reject"},
		{"another protocol of a ClusterIP", all, "192.0.2.11", "", "10.96.0.1:80", UDP, "node reject"},
		{"a port of a node port at a ClusterIP", all, "192.0.2.100", "eth0", "10.96.0.1:30080", TCP, "outside reject"},
		{"no endpoint", all, "192.0.2.100", "eth0", "10.96.0.2:80", UDP, "outside reject"},
		{"nobody's address", all, "10.244.1.10", "eth0", "10.96.0.99:80", TCP, "pod pass"},
		{"nobody's address in a Service range, from a pod", ranges, "10.244.1.10", "eth0", "10.96.0.99:80", TCP, "pod drop"},
		{"nobody's address in a Service range, from the node", ranges, "192.0.2.11", "", "10.96.0.99:80", UDP, "node drop"},
		{"nobody's address in a Service range, IPv6", ranges, "2001:db8::100", "eth0", "[fd00:96::9]:80", TCP, "outside drop"},
		{"nobody's address beside a Service range", ranges, "10.244.1.10", "eth0", "10.97.0.1:80", TCP, "pod pass"},
		{"a ClusterIP in a Service range", ranges, "10.244.1.10", "eth0", "10.96.0.1:80", TCP, "pod forward"},
		{"another port of a ClusterIP in a Service range", ranges, "10.244.1.10", "eth0", "10.96.0.1:81", TCP, "pod reject"},
		{"a load-balancer address in a Service range", ranges, "192.0.2.11", "", "203.0.113.1:80", TCP, "node forward snat"},
		{"another port of a load-balancer address in a Service range", ranges, "192.0.2.11", "", "203.0.113.1:22", TCP, "node drop"},
		{"the node's own address in a Service range", ranges, "192.0.2.100", "eth0", "192.0.2.11:22", TCP, "outside pass"},
		{"another port of a load-balancer address", all, "192.0.2.11", "", "203.0.113.1:22", TCP, "node pass"},
		{"policy Local, from outside", all, "198.51.100.7", "eth0", "203.0.113.1:80", TCP, "outside drop"},
		{"policy Local, from the node", all, "192.0.2.11", "", "203.0.113.1:80", TCP, "node forward snat"},
		{"a source that is not allowed", all, "192.0.2.100", "eth0", "203.0.113.1:80", TCP, "outside drop"},
		{"a pod is not allowed either", all, "10.244.1.10", "eth0", "203.0.113.1:80", TCP, "pod drop"},
		{"nobody is allowed", all, "192.0.2.11", "", "203.0.113.2:80", TCP, "node drop"},
		{"a node port, from a pod", all, "10.244.1.10", "eth0", "192.0.2.11:30080", TCP, "pod forward"},
		{"a node port, from outside", all, "192.0.2.100", "eth0", "192.0.2.11:30080", TCP, "outside drop"},
		{"a node port, IPv6", all, "2001:db8::11", "", "[2001:db8::11]:30080", TCP, "node forward snat"},
		{"a node port at an address of another node", all, "192.0.2.100", "eth0", "192.0.2.12:30080", TCP, "outside pass"},
		{"a node port at an address that is left out", some, "192.0.2.100", "eth0", "192.0.2.111:30080", TCP, "outside pass"},
		{"a node port at an address that is not", some, "192.0.2.11", "", "192.0.2.11:30080", TCP, "node forward snat"},
		{"no address takes node ports", none, "192.0.2.11", "", "192.0.2.11:30080", TCP, "node pass"},
		{"a node port at localhost", localhost, "127.0.0.1", "", "127.0.0.1:30080", TCP, "node forward snat"},
		{"a node port at another address of localhost", localhost, "127.0.0.1", "", "127.1.2.3:30080", TCP, "node forward snat"},
		{"a node port at localhost, where it is off", all, "127.0.0.1", "", "127.0.0.1:30080", TCP, "node pass"},
		{"a node port at localhost, IPv6 (never)", localhost, "::1", "", "[::1]:30080", TCP, "node pass"},
		{"relay: a node port at localhost", relay, "127.0.0.1", "", "127.0.0.1:30080", TCP, "node forward snat"},
		{"relay: from another address of the node", relay, "192.0.2.11", "lo", "127.0.0.1:30080", TCP, "node forward snat"},
		{"relay: from an address in the pods' range", relay, "10.244.1.1", "", "127.0.0.1:30080", TCP, "node forward snat"},
		{"relay: IPv6", relay, "::1", "", "[::1]:30080", TCP, "node forward snat"},
		{"relay: another address of localhost", relay, "127.0.0.1", "", "127.1.2.3:30080", TCP, "node pass"},
		{"relay: UDP is refused", relay, "127.0.0.1", "", "127.0.0.1:30053", UDP, "node reject"},
		{"relay: UDP is refused at another address of localhost", relay, "127.0.0.1", "", "127.1.2.3:30053", UDP, "node reject"},
		{"relay: UDP is refused, IPv6", relay, "::1", "", "[::1]:30053", UDP, "node reject"},
		{"relay: nobody's port", relay, "127.0.0.1", "", "127.0.0.1:30081", TCP, "node pass"},
		{"relay: a node port's number by another protocol", relay, "127.0.0.1", "", "127.0.0.1:30080", UDP, "node pass"},
		{"relay: without an endpoint, whatever the policy's silence", relay, "127.0.0.1", "", "127.0.0.1:30090", TCP, "node reject"},
		{"relay: a source that is allowed", relay, "127.0.0.1", "", "127.0.0.1:30091", TCP, "node forward snat"},
		{"relay: a source that is not allowed", relay, "127.0.0.2", "", "127.0.0.1:30091", TCP, "node reject"},
		{"relay: a neighbour that forges a source", relay, "127.0.0.1", "eth0", "127.0.0.1:30080", TCP, "node drop"},
		{"relay: other addresses are for rules", relay, "192.0.2.100", "eth0", "192.0.2.11:30080", TCP, "outside drop"},
		{"relay of IPv6 alone: IPv6", relay6, "::1", "", "[::1]:30080", TCP, "node forward snat"},
		{"relay of IPv6 alone: TCP of IPv4", relay6, "127.0.0.1", "", "127.0.0.1:30080", TCP, "node pass"},
		{"relay of IPv6 alone: UDP of IPv4", relay6, "127.0.0.1", "", "127.0.0.1:30053", UDP, "node pass"},
		{"relay of IPv4 alone: TCP of IPv6", relay4, "::1", "", "[::1]:30080", TCP, "node pass"},
		{"relay of IPv4 alone: UDP of IPv6", relay4, "::1", "", "[::1]:30053", UDP, "node pass"},
		{"a node port's number by another protocol", all, "192.0.2.100", "eth0", "192.0.2.11:30080", UDP, "outside pass"},
	} {
		t.Run(c.what, func(t *testing.T) {
			s := town()
			c.set(&s.Node)
			nodePorts(s)
			p := Packet{Src: netip.AddrPortFrom(netip.MustParseAddr(c.src), 40000), Dst: netip.MustParseAddrPort(c.dst), Proto: c.proto, Interface: c.via}
			d := s.Decide(p)
			got := d.Origin.String() + " " + d.Verdict.String()
			if d.SNAT {
				got += " snat"
			}
			if got != c.want {
				t.Errorf("%v: %s (%s), want %s", p, got, d.Why, c.want)
			}
			if d.Why == "" || (d.Verdict == Forward) != (len(d.Backends) > 0) {
				t.Errorf("%v: %+v", p, d)
			}
		})
	}
}

// The lines that people read. More of them are in the stories of package resolve.
func TestTable(t *testing.T) {
	s := town()
	s.Node.NodePorts, s.Node.LocalhostRelay = prefixes("192.0.2.0/24"), addrs("127.0.0.1", "::1")
	s.Node.ServiceCIDRs = prefixes("10.96.0.0/16", "fd00:96::/112")
	s.Checks["demo/web"] = Check{Service: "demo/web", Port: 32000, Ready4: 2}
	id := PoolID{Service: "demo/many", Port: "http", Proto: TCP}
	many := Pool{ID: id, Sticky: 10 * time.Second}
	for i := range 20 {
		many.Backends = append(many.Backends, Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 8), Local: i == 0})
	}
	s.Pools[id] = many
	want := `node       n1
addresses  127.0.0.1 192.0.2.11 192.0.2.111 10.244.1.1 ::1 2001:db8::11
nodeports  192.0.2.0/24, relayed from 127.0.0.1 ::1
pods       10.244.0.0/16 fd00:10::/32 interface br0 veth+
services   10.96.0.0/16 fd00:96::/112

FRONTEND            SERVICE    KIND          POD      NODE          OUTSIDE       ALLOW
0.0.0.0:30080/tcp   demo/web   NodePort      cluster  cluster+snat  local/drop
10.96.0.1:80/tcp    demo/web   ClusterIP     cluster  cluster+snat  cluster+snat
10.96.0.2:80/udp    demo/gone  ClusterIP     cluster  cluster       cluster
203.0.113.1:80/tcp  demo/web   LoadBalancer  cluster  cluster+snat  local/drop    198.51.100.0/24 192.0.2.11/32
203.0.113.2:80/tcp  demo/web   LoadBalancer  cluster  cluster+snat  local/drop    nobody
[::]:30080/tcp      demo/web   NodePort      cluster  cluster+snat  local/drop

POOL                           BACKENDS                                        STICKY
demo/many:http/tcp v4 cluster  ` + manyText + `  10s
demo/web/tcp v4 cluster        10.244.2.10:8080
demo/web/tcp v4 local          none
demo/web/tcp v6 cluster        [fd00:10::1]:8080
demo/web/tcp v6 local          none

CHECK        SERVICE   READY V4  READY V6
*:32000/tcp  demo/web  2         0
`
	want = strings.Replace(want, strings.Repeat(" ", 40)+"STICKY", strings.Repeat(" ", len(manyText)-len("BACKENDS")+2)+"STICKY", 1)
	if got := s.Table(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

// manyText is a list that was cut.
const manyText = "10.0.0.0:8* 10.0.0.1:8 10.0.0.2:8 10.0.0.3:8 10.0.0.4:8 10.0.0.5:8 10.0.0.6:8 10.0.0.7:8 " +
	"10.0.0.8:8 10.0.0.9:8 10.0.0.10:8 10.0.0.11:8 10.0.0.12:8 10.0.0.13:8 10.0.0.14:8 10.0.0.15:8 and 4 more"

// What a Dump can't tell shows, and what is unusual shows.
func TestRow(t *testing.T) {
	k := key("10.96.0.1:80", TCP)
	for want, f := range map[string]Frontend{
		"":               {Key: k},
		"owned":          {Key: k, Owned: true},
		"ClusterIP":      {Key: k, Owned: true, About: About{Kind: ClusterIP}},
		"NodePort owned": {Key: k, Owned: true, About: About{Kind: NodePort}},
	} {
		if got := f.Row()[2]; got != want {
			t.Errorf("kind %q, want %q", got, want)
		}
	}
	other := PoolID{Service: "a/other", Port: "p", Proto: UDP, V6: true, Scope: Local}
	f := Frontend{Key: k, Routes: [3]Route{{Pool: other, SNAT: true, Else: Drop}}}
	if got, want := f.Row()[3], "a/other:p/udp v6 local+snat/drop"; got != want {
		t.Errorf("route %q, want %q", got, want)
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct {
		got  fmt.Stringer
		want string
	}{
		{key("10.96.0.1:443", TCP), "10.96.0.1:443/tcp"},
		{key("[fd00::1]:53", UDP), "[fd00::1]:53/udp"},
		{SCTP, "sctp"}, {Proto(7), "proto7"},
		{PoolID{Service: "a/b", Port: "p", Proto: TCP}, "a/b:p/tcp v4 cluster"},
		{PoolID{Service: "a/b", Proto: UDP, V6: true, Scope: Local}, "a/b/udp v6 local"},
		{Packet{Src: netip.MustParseAddrPort("1.2.3.4:5"), Dst: netip.MustParseAddrPort("6.7.8.9:10"), Proto: TCP}, "1.2.3.4:5 -> 6.7.8.9:10/tcp"},
	} {
		if c.got.String() != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

// What was read back says of an empty pool only what is met in its place.
func TestNamePools(t *testing.T) {
	s := NewState()
	k := Key{IP: netip.MustParseAddr("fd00::1"), Port: 80, Proto: UDP}
	named := PoolID{Service: "ns/b"}
	s.Frontends[k] = Frontend{Key: k, About: About{Service: "ns/a", Port: "dns"}, Routes: [3]Route{{Else: Reject}, {Else: Drop}, {Pool: named, Else: Drop}}}
	s.NamePools()
	got := s.Frontends[k].Routes
	id := PoolID{Service: "ns/a", Port: "dns", Proto: UDP, V6: true}
	local := id
	local.Scope = Local
	if got[0].Pool != id || got[1].Pool != local || got[2].Pool != named {
		t.Errorf("pools %v", got)
	}
}
