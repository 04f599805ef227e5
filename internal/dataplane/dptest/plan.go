package dptest

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"fairlead/internal/model"
)

// family is the address plan of the suite, for one family.
type family struct{ v6 bool }

var families = []family{{false}, {true}}

func (f family) String() string {
	if f.v6 {
		return "v6"
	}
	return "v4"
}

// ip gives the n-th address of a network.
func (f family) ip(net4, net6 string, n int) netip.Addr {
	if f.v6 {
		return netip.MustParseAddr(fmt.Sprintf("%s%x", net6, n))
	}
	return netip.MustParseAddr(fmt.Sprintf("%s%d", net4, n))
}

func (f family) clusterIP(n int) netip.Addr { return f.ip("10.96.0.", "fd00:96::", n) }
func (f family) vip(n int) netip.Addr       { return f.ip("192.0.2.", "2001:db8:2::", n) }
func (f family) localPod(n int) netip.Addr  { return f.ip("10.244.0.", "fd00:244::", n) }
func (f family) remotePod(n int) netip.Addr { return f.ip("10.244.1.", "fd00:244:1::", n) }
func (f family) client(n int) netip.Addr    { return f.ip("203.0.113.", "2001:db8:113::", n) }
func (f family) stranger() netip.Addr       { return f.ip("198.51.100.", "2001:db8:51::", 9) }
func (f family) node(n int) netip.Addr      { return f.ip("192.168.7.", "fd00:7::", n) }
func (f family) bridge() netip.Addr         { return f.localPod(1) }
func (f family) loopback() netip.Addr       { return f.ip("127.0.0.", "::", 1) }

// prefix gives a network of the plan.
func (f family) prefix(net4, net6 string) netip.Prefix {
	if f.v6 {
		return netip.MustParsePrefix(net6)
	}
	return netip.MustParsePrefix(net4)
}

func (f family) clients() netip.Prefix { return f.prefix("203.0.113.0/24", "2001:db8:113::/48") }
func (f family) pods() netip.Prefix    { return f.prefix("10.244.0.0/16", "fd00:244::/32") }
func (f family) nodes() netip.Prefix   { return f.prefix("192.168.7.0/24", "fd00:7::/64") }

// The interfaces that packets come in by.
const (
	podInterface     = "veth-a"
	outsideInterface = "eth0"
)

// Node is the node of the suite, without a detector of local traffic: its addresses, of both families.
func Node() model.Node {
	n := model.Node{Name: "node"}
	for _, f := range families {
		n.Addrs = append(n.Addrs, f.loopback(), f.bridge(), f.node(1), f.node(2))
	}
	slices.SortFunc(n.Addrs, netip.Addr.Compare)
	return n
}

func podRanges(n model.Node) model.Node {
	n.Pods = []netip.Prefix{families[0].pods(), families[1].pods()}
	return n
}

func podInterfaces(n model.Node) model.Node {
	n.PodInterfaces = []string{"veth+"}
	return n
}

func oneNodePortAddress(n model.Node) model.Node {
	n.NodePorts = []netip.Prefix{netip.PrefixFrom(families[0].node(1), 32), netip.PrefixFrom(families[1].node(1), 128)}
	return n
}

func localhostPorts(n model.Node) model.Node {
	n.LocalhostPort = true
	return n
}

// serviceCIDRs keeps the ranges for ClusterIPs that those of the suite are in. Beside them, since no range is sacred, those
// of the nodes and of pods elsewhere: this node's own addresses are its own all the same, and Services reach their backends.
func serviceCIDRs(n model.Node) model.Node {
	for _, f := range families {
		n.ServiceCIDRs = append(n.ServiceCIDRs, f.prefix("10.96.0.0/16", "fd00:96::/112"), f.nodes(), f.prefix("10.244.1.0/24", "fd00:244:1::/64"))
	}
	slices.SortFunc(n.ServiceCIDRs, netip.Prefix.Compare)
	return n
}

// step is a moment of a story: everything that should be true.
type step struct {
	node          model.Node
	masqueradeAll bool
	services      []service
}

// now is a step on a node that knows pods by their addresses.
func now(services ...service) step { return on(podRanges(Node()), services...) }

func on(n model.Node, services ...service) step { return step{node: n, services: services} }

// service is one port of a Service and its endpoints, in one family. Its methods return changed copies.
type service struct {
	family
	name, port                   string
	proto                        model.Proto
	fronts                       []front
	internalLocal, externalLocal bool
	here, elsewhere, leaving     []int // endpoints: pods on this node, on others, and terminating ones on this node
	stick                        time.Duration
	health                       uint16
}

type front struct {
	kind  model.Kind
	ip    netip.Addr
	port  uint16
	allow []netip.Prefix
}

func (f family) service(name string) service {
	return service{family: f, name: "ns/" + name, port: "p", proto: model.TCP}
}

func (s service) at(f front) service {
	s.fronts = append(slices.Clone(s.fronts), f)
	return s
}

func (s service) clusterIP(n int) service {
	return s.at(front{model.ClusterIP, s.family.clusterIP(n), 80, nil})
}

func (s service) nodePort(port uint16) service {
	return s.at(front{model.NodePort, model.Unspecified(s.v6), port, nil})
}

func (s service) externalIP(ip netip.Addr, port uint16) service {
	return s.at(front{model.ExternalIP, ip, port, nil})
}

func (s service) balancer(n int, allow ...netip.Prefix) service {
	return s.at(front{model.LoadBalancer, s.vip(n), 80, allow})
}

// everywhere gives the service one frontend of each kind.
func (s service) everywhere(n int) service {
	return s.clusterIP(n).nodePort(uint16(30000+n)).externalIP(s.vip(100+n), 80).balancer(n, s.clients())
}

func (s service) over(p model.Proto) service     { s.proto = p; return s }
func (s service) local(n ...int) service         { s.here = n; return s }
func (s service) remote(n ...int) service        { s.elsewhere = n; return s }
func (s service) draining(n ...int) service      { s.leaving = n; return s }
func (s service) sticky(d time.Duration) service { s.stick = d; return s }
func (s service) internally(local bool) service  { s.internalLocal = local; return s }
func (s service) externally(local bool) service  { s.externalLocal = local; return s }
func (s service) healthPort(port uint16) service { s.health = port; return s }
func (s service) id(scope model.Scope) model.PoolID {
	return model.PoolID{Service: s.name, Port: s.port, Proto: s.proto, V6: s.v6, Scope: scope}
}
func (s service) backends(ns []int, l bool) (out []model.Backend) {
	for _, n := range ns {
		ip := s.remotePod(n)
		if l {
			ip = s.localPod(n)
		}
		out = append(out, model.Backend{Addr: netip.AddrPortFrom(ip, 8080), Local: l})
	}
	return out
}

// state is what resolve would make of a step. It follows the table of internal/resolve's package comment.
func (st step) state() *model.State {
	out := model.NewState()
	out.Node = st.node
	for _, s := range st.services {
		for _, f := range s.fronts {
			fe := model.Frontend{Key: model.Key{IP: f.ip, Port: f.port, Proto: s.proto}, Allow: f.allow,
				Owned: f.kind == model.ClusterIP, About: model.About{Service: s.name, Port: s.port, Kind: f.kind}}
			fe.Routes = s.routes(f.kind, st.node.Detects(s.v6), st.masqueradeAll)
			if _, taken := out.Frontends[fe.Key]; taken {
				continue // the older Service has it
			}
			out.Frontends[fe.Key] = fe
			for _, r := range fe.Routes {
				out.Pools[r.Pool] = s.pool(r.Pool)
			}
		}
		if s.health != 0 {
			out.Checks[s.name] = model.Check{Service: s.name, Port: s.health, Ready4: len(s.here)}
		}
	}
	return out
}

func (s service) pool(id model.PoolID) model.Pool {
	p := model.Pool{ID: id, Backends: s.backends(s.here, true), Draining: s.backends(s.leaving, true), Sticky: s.stick}
	if id.Scope == model.Cluster {
		p.Backends = append(p.Backends, s.backends(s.elsewhere, false)...)
	}
	slices.SortFunc(p.Backends, model.Backend.Compare)
	return p
}

func (s service) routes(k model.Kind, detects, masqueradeAll bool) [3]model.Route {
	cluster := model.Route{Pool: s.id(model.Cluster), Else: model.Reject}
	local := model.Route{Pool: s.id(model.Local), Else: model.Reject}
	if len(s.here)+len(s.elsewhere) > 0 {
		local.Else = model.Drop
	}
	if k == model.ClusterIP {
		pod := cluster
		if s.internalLocal {
			pod = local
		}
		other := pod
		pod.SNAT, other.SNAT = masqueradeAll, masqueradeAll || detects
		return [3]model.Route{pod, other, other}
	}
	hidden := cluster
	hidden.SNAT = true
	switch {
	case !s.externalLocal:
		return [3]model.Route{hidden, hidden, hidden}
	case !detects:
		return [3]model.Route{local, hidden, local}
	}
	return [3]model.Route{cluster, hidden, local}
}

// diff is the smallest delta from one state to another.
func diff(from, to *model.State) model.Delta {
	d := model.Delta{}
	d.Frontends, d.GoneFrontends = diffMap(from.Frontends, to.Frontends)
	d.Pools, d.GonePools = diffMap(from.Pools, to.Pools)
	d.Checks, d.GoneChecks = diffMap(from.Checks, to.Checks)
	if !reflect.DeepEqual(from.Node, to.Node) {
		n := to.Node
		d.Node = &n
	}
	return d
}

func diffMap[K comparable, V any](from, to map[K]V) (set []V, gone []K) {
	for _, k := range sortedKeys(to) {
		if old, ok := from[k]; !ok || !reflect.DeepEqual(old, to[k]) {
			set = append(set, to[k])
		}
	}
	for _, k := range sortedKeys(from) {
		if _, ok := to[k]; !ok {
			gone = append(gone, k)
		}
	}
	return set, gone
}

// sortedKeys keeps histories the same from run to run.
func sortedKeys[K comparable, V any](m map[K]V) []K {
	return slices.SortedFunc(maps.Keys(m), func(a, b K) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
}
