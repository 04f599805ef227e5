package resolve

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// Input is everything that exists.
type Input struct {
	Services map[types.NamespacedName]*corev1.Service
	Slices   map[types.NamespacedName]*discoveryv1.EndpointSlice
	Nodes    map[string]*corev1.Node
	Addrs    []netip.Addr // of this machine's interfaces
	CIDRs    map[string]*networkingv1.ServiceCIDR
}

// All resolves everything from scratch, without an index: the dumb twin of [Resolver]. Tests hold the two together; it is
// also the way to ask about a set of manifests once.
func All(c Config, in Input) *model.State {
	state, _, _ := all(c, in)
	return state
}

func all(c Config, in Input) (*model.State, []model.Notice, NoLocal) {
	state := model.NewState()
	crowd := newCrowd(c, in)
	var own nodeFacts
	if n := in.Nodes[c.NodeName]; n != nil {
		own = readNode(n)
	}
	here := place(c, own, cleanAddrs(in.Addrs))
	cidrs := map[string]serviceCIDR{}
	for name, cidr := range in.CIDRs {
		if cidr != nil {
			cidrs[name] = readServiceCIDR(cidr)
		}
	}
	here.keep(cidrs)
	state.Node = here.node

	notices := nodeNotices(c, cidrs)
	var noLocal NoLocal
	for _, s := range crowd.services {
		rows, said := here.resolve(s, crowd)
		notices = append(notices, said...)
		noLocal.add(rows.noLocal, 1)
		for _, f := range rows.fronts {
			state.Frontends[f.key] = f.frontend(s.name)
		}
		for _, p := range rows.pools {
			state.Pools[p.ID] = p
		}
		if rows.check != nil {
			state.Checks[s.name] = *rows.check
		}
	}
	slices.SortFunc(notices, compareNotices)
	return state, notices, noLocal
}

// crowd answers questions about all others by asking each of them.
type crowd struct {
	config   Config
	services []*service
	nodes    map[string][]netip.Addr // by name in words
}

func newCrowd(c Config, in Input) *crowd {
	w := &crowd{config: c, nodes: map[string][]netip.Addr{}}
	for nn, obj := range in.Services {
		if obj == nil {
			continue
		}
		s := &service{name: nn.String(), facts: readService(obj)}
		for at, slice := range in.Slices {
			if slice != nil && at.Namespace == nn.Namespace && nn.Name != "" && slice.Labels[discoveryv1.LabelServiceName] == nn.Name {
				s.slices = append(s.slices, readSlice(slice))
			}
		}
		slices.SortFunc(s.slices, compareSliceNames)
		w.services = append(w.services, s)
	}
	for name, n := range in.Nodes {
		if n != nil {
			w.nodes["node "+name] = readNode(n).addrs
		}
	}
	return w
}

func (w *crowd) clusterIPOf(ip netip.Addr, s *service) (string, bool) {
	var owners []string
	for _, o := range w.services {
		for _, wish := range w.config.wishes(o.facts, nil) {
			if o != s && wish.kind == kindClusterIP && wish.key.IP == ip {
				owners = append(owners, o.name)
			}
		}
	}
	if len(owners) == 0 {
		return "", false
	}
	return slices.Min(owners), true
}

func (w *crowd) nodeOf(ip netip.Addr) (string, bool) {
	var names []string
	for name, addrs := range w.nodes {
		if slices.Contains(addrs, ip) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "", false
	}
	return slices.Min(names), true
}

func (w *crowd) wishers(k model.Key) []claim {
	var out []claim
	for _, o := range w.services {
		for _, wish := range w.config.wishes(o.facts, nil) {
			if wish.key == k {
				out = append(out, claim{o, wish.kind})
			}
		}
	}
	return out
}

func (w *crowd) winner(k model.Key) *service {
	ranked := slices.SortedFunc(slices.Values(w.wishers(k)), func(a, b claim) int {
		if a.beats(b) {
			return -1
		}
		return 1
	})
	return ranked[0].by
}

func (w *crowd) healthLoser(port uint16, s *service) (string, bool) {
	for _, v6 := range [...]bool{false, true} {
		if k := (model.Key{IP: model.Unspecified(v6), Port: port, Proto: model.TCP}); len(w.wishers(k)) > 0 {
			return "the node port of " + w.winner(k).name, true
		}
	}
	var rivals []*service
	for _, o := range w.services {
		if w.config.healthPort(o.facts, nil) == port {
			rivals = append(rivals, o)
		}
	}
	oldest := slices.MinFunc(rivals, compareSeniority)
	return oldest.name, oldest != s
}
