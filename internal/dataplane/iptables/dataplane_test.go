package iptables

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/model"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// world draws random tables that resolve could make, and some that it never would.
type world struct {
	t  *rapid.T
	v6 bool
}

func (w world) ip(net4, net6 string, n int) netip.Addr {
	net := net4
	if w.v6 {
		net = net6
	}
	a := netip.MustParseAddr(net)
	for range n {
		a = a.Next()
	}
	return a
}

func (w world) frontend(i int) model.Frontend {
	t := w.t
	proto := rapid.SampledFrom([]model.Proto{model.TCP, model.TCP, model.UDP, model.SCTP}).Draw(t, "proto")
	port := rapid.SampledFrom([]uint16{80, 443}).Draw(t, "port")
	f := model.Frontend{About: model.About{Service: fmt.Sprintf("ns/svc%d", i%7), Port: rapid.SampledFrom([]string{"", "http"}).Draw(t, "name")}}
	pool := func(s model.Scope) model.PoolID {
		return model.PoolID{Service: f.About.Service, Port: f.About.Port, Proto: proto, V6: w.v6, Scope: s}
	}
	scopes := []model.Scope{model.Cluster, model.Cluster, model.Cluster}
	switch i % 4 {
	case 0:
		f.About.Kind, f.Owned = model.ClusterIP, true
		f.Key.IP = w.ip("10.96.0.1", "fd00:96::1", i)
		if rapid.Bool().Draw(t, "local") {
			scopes = []model.Scope{model.Local, model.Local, model.Local}
		}
	case 1:
		f.About.Kind = model.NodePort
		f.Key.IP, port = model.Unspecified(w.v6), uint16(30000+i)
	default:
		f.About.Kind = model.LoadBalancer
		f.Key.IP = w.ip("203.0.113.1", "2001:db8::1", i)
		if rapid.IntRange(0, 2).Draw(t, "ranged") == 0 {
			f.Allow = []netip.Prefix{host(w.ip("192.0.2.100", "2001:db8:2::100", 0))}
			if rapid.Bool().Draw(t, "none") {
				f.Allow = []netip.Prefix{}
			}
		}
	}
	if i%4 != 0 && rapid.Bool().Draw(t, "localpolicy") {
		scopes[model.FromOutside] = model.Local
	}
	f.Key.Port, f.Key.Proto = port, proto
	for o := range f.Routes {
		f.Routes[o] = model.Route{Pool: pool(scopes[o]), SNAT: rapid.Bool().Draw(t, "snat"),
			Else: rapid.SampledFrom([]model.Verdict{model.Reject, model.Drop}).Draw(t, "else")}
	}
	return f
}

func (w world) pools(f model.Frontend) []model.Pool {
	var out []model.Pool
	sticky := rapid.SampledFrom([]time.Duration{0, 0, 10 * time.Second}).Draw(w.t, "sticky")
	for _, scope := range []model.Scope{model.Cluster, model.Local} {
		id := f.Routes[0].Pool
		id.Scope = scope
		p := model.Pool{ID: id, Sticky: sticky}
		for i := range rapid.IntRange(0, 3).Draw(w.t, "backends") {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(w.ip("10.244.1.10", "fd00:244:1::10", i), 8080), Local: scope == model.Local})
		}
		out = append(out, p)
	}
	return out
}

func (w world) node() model.Node {
	n := model.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.11"),
		netip.MustParseAddr("198.51.100.11"), netip.MustParseAddr("::1"), netip.MustParseAddr("2001:db8:2::11")}}
	switch rapid.IntRange(0, 3).Draw(w.t, "detect") {
	case 0:
		n.Pods = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
	case 1:
		n.Pods = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/17"), netip.MustParsePrefix("10.245.0.0/16"), netip.MustParsePrefix("fd00:244::/32")}
	case 2:
		n.PodInterfaces = []string{"veth+"}
	}
	if rapid.Bool().Draw(w.t, "nodeports") {
		n.NodePorts = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("2001:db8:2::/48")}
	}
	n.LocalhostPort = rapid.Bool().Draw(w.t, "localhost")
	if rapid.Bool().Draw(w.t, "serviceCIDRs") { // addresses of load balancers and of the node lie in such ranges too
		n.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("192.0.2.0/27"), netip.MustParsePrefix("203.0.113.0/24"),
			netip.MustParsePrefix("2001:db8::/112"), netip.MustParsePrefix("2001:db8:2::/120"), netip.MustParsePrefix("fd00:96::/112")}
	}
	return n
}

func (w world) packets(s *model.State) []model.Packet {
	srcs := []struct {
		a  netip.Addr
		in string
	}{
		{w.ip("10.244.1.10", "fd00:244:1::10", 0), "veth1"},
		{w.ip("192.0.2.11", "2001:db8:2::11", 0), ""},
		{w.ip("192.0.2.100", "2001:db8:2::100", 0), "eth0"},
		{w.ip("192.0.2.101", "2001:db8:2::101", 0), "eth0"},
		{w.ip("127.0.0.1", "::1", 0), ""},
	}
	var out []model.Packet
	for _, src := range srcs[:4] { // to addresses that no Service ever has, the second one the node's
		for _, dst := range []netip.Addr{w.ip("10.96.0.200", "fd00:96::200", 0), w.ip("192.0.2.11", "2001:db8:2::11", 0), w.ip("192.0.2.12", "2001:db8:2::12", 0)} {
			out = append(out, model.Packet{Src: netip.AddrPortFrom(src.a, 4444), Dst: netip.AddrPortFrom(dst, 2222), Proto: model.TCP, Interface: src.in})
		}
	}
	for _, f := range s.SortedFrontends() {
		k := f.Key
		if k.V6() != w.v6 {
			continue
		}
		dsts := []netip.Addr{k.IP}
		if k.NodePort() {
			dsts = []netip.Addr{w.ip("192.0.2.11", "2001:db8:2::11", 0), w.ip("198.51.100.11", "2001:db8:2::11", 0), w.ip("127.0.0.1", "::1", 0)}
		}
		for _, src := range srcs {
			for _, dst := range dsts {
				if src.in == "" && src.a.IsLoopback() != dst.IsLoopback() {
					continue // the node talks to its loopback addresses from one of them
				}
				for _, port := range []uint16{k.Port, 2222} {
					out = append(out, model.Packet{Src: netip.AddrPortFrom(src.a, 4444), Dst: netip.AddrPortFrom(dst, port), Proto: k.Proto, Interface: src.in})
				}
			}
		}
	}
	return out
}

// Over random histories with failing writes and restarts, packets meet what the model says, the rules read back are the
// tables, and nothing is left after Remove.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := world{rt, rapid.Bool().Draw(rt, "v6")}
		k := newFakeKernel()
		before := maps.Clone(k.chains)
		rnd := rand.New(rand.NewPCG(1, uint64(rapid.IntRange(0, 1000).Draw(rt, "seed"))))
		k.fail = func() (bool, bool) { return rnd.IntN(10) == 0, rnd.IntN(10) == 0 }
		cfg := Config{V4: true, V6: true, MasqueradeBit: 14}
		d := newDataplane(cfg, k)
		want := model.NewState()
		n := w.node()
		delta := model.Delta{Full: true, Node: &n}
		for range rapid.IntRange(1, 12).Draw(rt, "rounds") {
			want.Apply(delta)
			applyTillDone(rt, d, delta)
			checkPackets(rt, w, k, want, rnd)
			checkDump(rt, d, want)
			if rapid.Bool().Draw(rt, "slim") {
				d.Slim()
			}
			delta = w.change(want)
			if rapid.IntRange(0, 5).Draw(rt, "restart") == 0 {
				want.Apply(delta)
				d, delta = newDataplane(cfg, k), want.Full()
			}
		}
		for d.Remove(context.Background()) != nil {
		}
		if diff := cmp.Diff(before, k.chains, cmp.Comparer(func(a, b []Rule) bool { return slices.Equal(a, b) })); diff != "" {
			rt.Fatalf("Remove leaves something: %s", diff)
		}
	})
}

func (w world) change(s *model.State) model.Delta {
	var d model.Delta
	keys := slices.SortedFunc(maps.Keys(s.Frontends), model.Key.Compare)
	for range rapid.IntRange(1, 4).Draw(w.t, "ops") {
		if len(keys) > 0 && rapid.IntRange(0, 3).Draw(w.t, "gone") == 0 {
			k := rapid.SampledFrom(keys).Draw(w.t, "key")
			d = d.Then(model.Delta{GoneFrontends: []model.Key{k}})
			continue
		}
		f := w.frontend(rapid.IntRange(0, 80).Draw(w.t, "i"))
		d = d.Then(model.Delta{Frontends: []model.Frontend{f}, Pools: w.pools(f)})
	}
	if rapid.IntRange(0, 9).Draw(w.t, "node") == 0 {
		n := w.node()
		d.Node = &n
	}
	return d
}

func applyTillDone(t *rapid.T, d *Dataplane, delta model.Delta) {
	for range 200 {
		err := d.Apply(context.Background(), delta)
		if err == nil {
			return
		}
		if err.Error() == "" || !errorsIsFake(err) {
			t.Fatalf("Apply: %v", err)
		}
	}
	t.Fatal("Apply never succeeds")
}

func checkPackets(t *rapid.T, w world, k *fakeKernel, want *model.State, rnd *rand.Rand) {
	for _, p := range w.packets(want) {
		dec := want.Decide(p)
		hit := map[netip.AddrPort]bool{}
		for range 400 {
			clear(k.recent)
			got := k.trace(want.Node, p, rnd)
			if got.Verdict != dec.Verdict {
				t.Fatalf("%s (in %q): %s, want %s: %s", p, p.Interface, got.Verdict, dec.Verdict, dec.Why)
			}
			if got.Verdict != model.Forward || len(hit) == len(dec.Backends) {
				break
			}
			snat := dec.SNAT || got.To.Addr() == p.Src.Addr()
			if !slices.ContainsFunc(dec.Backends, func(b model.Backend) bool { return b.Addr == got.To }) || got.SNAT != snat {
				t.Fatalf("%s (in %q): to %s snat %v, want one of %v snat %v", p, p.Interface, got.To, got.SNAT, dec.Backends, snat)
			}
			hit[got.To] = true
		}
		if dec.Verdict == model.Forward && len(hit) != len(dec.Backends) {
			t.Fatalf("%s: only %d of %d backends met", p, len(hit), len(dec.Backends))
		}
	}
}

// visible reduces a state to what rules can tell.
func visible(s *model.State) *model.State {
	out := model.NewState()
	for id, p := range s.Pools {
		used := false
		for _, f := range s.Frontends {
			used = used || f.About.Service == id.Service && f.About.Port == id.Port && f.Key.Proto == id.Proto && f.Key.V6() == id.V6
		}
		if len(p.Backends) == 0 || !used {
			continue
		}
		p.Draining, p.Backends = nil, slices.Clone(p.Backends)
		for i := range p.Backends {
			p.Backends[i].Local = id.Scope == model.Local
		}
		out.Pools[id] = p
	}
	for k, f := range s.Frontends {
		f.Routes = [3]model.Route{}
		f.About.Kind = ""
		out.Frontends[k] = f
	}
	return out
}

func checkDump(t *rapid.T, d *Dataplane, want *model.State) {
	got, err := d.Dump(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(visible(want), visible(got), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
		t.Fatalf("Dump (-want +got):\n%s", diff)
	}
	if !slices.Equal(got.Node.ServiceCIDRs, want.Node.ServiceCIDRs) {
		t.Fatalf("Dump tells of %v, want %v", got.Node.ServiceCIDRs, want.Node.ServiceCIDRs)
	}
}

// A change writes only the chains that it changes, at any size.
func TestCostFollowsTheChange(t *testing.T) {
	for _, n := range []int{10, 100, 5000} {
		k := newFakeKernel()
		d := newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k)
		all := dptest.Many(n, 4)
		apply := func(delta model.Delta, want int, what string) {
			t.Helper()
			if err := d.Apply(context.Background(), delta); err != nil {
				t.Fatal(err)
			}
			if want > 0 && len(k.wrote) > want {
				t.Errorf("%d Services, %s: %d chains written, want at most %d: %v", n, what, len(k.wrote), want, k.wrote)
			}
		}
		apply(all, 0, "all")
		p := all.Pools[n/2]
		moved := p
		moved.Backends = append(slices.Clone(p.Backends[:3]), model.Backend{Addr: netip.MustParseAddrPort("10.244.255.1:80")})
		apply(model.Delta{Pools: []model.Pool{moved}}, 3, "an endpoint moves") // KUBE-SVC, the new KUBE-SEP, the old one
		k.wrote = nil
		apply(model.Delta{Pools: []model.Pool{moved}}, 1, "nothing changes")
		if len(k.wrote) > 0 {
			t.Errorf("%d Services: a delta that changes nothing writes %v", n, k.wrote)
		}
		f := all.Frontends[n/2]
		apply(model.Delta{GoneFrontends: []model.Key{f.Key}, GonePools: []model.PoolID{p.ID}}, 12, "a Service goes")
		apply(model.Delta{Frontends: []model.Frontend{f}, Pools: []model.Pool{p}}, 12, "a Service comes")
	}
}

// Everything again, and a restart, write nothing where nothing changed.
func TestFullWritesNothingAgain(t *testing.T) {
	k := newFakeKernel()
	k.chains[ChainID{Table: Mangle, Name: "FORWARD"}] = nil
	cfg := Config{V4: true, V6: true, MasqueradeBit: 14}
	d, all := newDataplane(cfg, k), dptest.Many(100, 2)
	for _, life := range []string{"first", "again", "after a restart"} {
		if life == "after a restart" {
			d = newDataplane(cfg, k)
		}
		k.writes = 0
		if err := d.Apply(context.Background(), all); err != nil {
			t.Fatal(err)
		}
		if life != "first" && k.writes > 0 {
			t.Errorf("%s: %d writes, of %v", life, k.writes, k.wrote)
		}
	}
}

// A rule of somebody else that leads to a chain which must go keeps nothing from being served.
func TestForeignReference(t *testing.T) {
	k := newFakeKernel()
	d := newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k)
	all := dptest.Many(2, 1)
	if err := d.Apply(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	stale := ChainID{Table: Nat, Name: poolChain(all.Pools[0].ID)}
	foreign := ChainID{Table: Nat, Name: "FOREIGN"}
	k.chains[foreign] = []Rule{{Target: Target{Action: Jump, Chain: stale.Name}}}
	extra := dptest.Many(3, 1)
	change := model.Delta{GoneFrontends: []model.Key{all.Frontends[0].Key}, GonePools: []model.PoolID{all.Pools[0].ID},
		Frontends: extra.Frontends[2:], Pools: extra.Pools[2:]}
	if err := d.Apply(context.Background(), change); err != nil {
		t.Fatal(err)
	}
	if rules, ok := k.chains[stale]; !ok || len(rules) > 0 {
		t.Errorf("the chain that is in use holds %v, want it empty", rules)
	}
	if _, ok := k.chains[ChainID{Table: Nat, Name: poolChain(extra.Pools[2].ID)}]; !ok {
		t.Error("the new Service is not served")
	}
	delete(k.chains, foreign)
	all.Frontends, all.Pools = extra.Frontends[1:], extra.Pools[1:]
	if err := d.Apply(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	if _, ok := k.chains[stale]; ok {
		t.Error("the chain stays after nobody refers to it any more")
	}
}

// Nor does it keep a clean-up from taking out all the rest.
func TestForeignReferenceCleanup(t *testing.T) {
	k := newFakeKernel()
	d := newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k)
	if err := d.Apply(context.Background(), dptest.Many(40, 2)); err != nil {
		t.Fatal(err)
	}
	foreign := ChainID{Table: Nat, Name: "FOREIGN"}
	k.chains[foreign] = []Rule{{Target: markMasq}}
	err := d.Remove(context.Background())
	if err == nil || !strings.Contains(err.Error(), chainMarkMasq) {
		t.Errorf("error %v, want one that names %s", err, chainMarkMasq)
	}
	for id, rules := range k.chains {
		if len(rules) > 0 && id != foreign || strings.HasPrefix(id.Name, "KUBE-") && id.Name != chainMarkMasq {
			t.Errorf("%s is left with %v", id.Name, rules)
		}
	}
}
