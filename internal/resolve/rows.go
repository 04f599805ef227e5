package resolve

import (
	"net/netip"
	"slices"

	"fairlead/internal/model"
)

// service is what is known of one name: the Service, its slices, and what was last emitted for it.
type service struct {
	name   string        // namespace/name
	facts  *serviceFacts // nil: there is none, or it is not for us
	slices []*sliceFacts // sorted by name
	rows   rows
	dirty  dirt
}

// rows is what one Service is to a dataplane.
type rows struct {
	fronts  []front      // sorted by key
	pools   []model.Pool // sorted by name
	check   *model.Check // nil is none
	noLocal NoLocal
}

// front is a frontend in a third of the memory: the Service's name and what follows from the others is left out. Of a large
// cluster there are many.
type front struct {
	key    model.Key
	port   string // name
	allow  []netip.Prefix
	routes [3]way
	kind   kind
}

// way is a route to one of the port's own pools.
type way struct {
	scope model.Scope
	snat  bool
	empty model.Verdict // Route.Else
}

func (f front) frontend(service string) model.Frontend {
	out := model.Frontend{Key: f.key, Allow: f.allow, Owned: f.kind == kindClusterIP, About: model.About{Service: service, Port: f.port, Kind: f.kind.model()}}
	for i, w := range f.routes {
		id := model.PoolID{Service: service, Port: f.port, Proto: f.key.Proto, V6: f.key.V6(), Scope: w.scope}
		out.Routes[i] = model.Route{Pool: id, SNAT: w.snat, Else: w.empty}
	}
	return out
}

// NoLocal counts the ports of Services whose policy is Local, and which have endpoints but none on this node.
type NoLocal struct {
	Internal, External [2]int32 // by family: IPv4, IPv6
}

func (n *NoLocal) add(o NoLocal, sign int32) {
	for i := range 2 {
		n.Internal[i] += sign * o.Internal[i]
		n.External[i] += sign * o.External[i]
	}
}

// world answers what one Service must know of all others and of the nodes.
type world interface {
	// clusterIPOf gives another Service than s whose ClusterIP is ip.
	clusterIPOf(ip netip.Addr, s *service) (owner string, ok bool)
	// nodeOf says in words which node has the address.
	nodeOf(ip netip.Addr) (node string, ok bool)
	// winner is the Service that gets the key; at least one must wish for it.
	winner(model.Key) *service
	// healthLoser tells whether s does not get its health-check node port, and says in words who has it.
	healthLoser(port uint16, s *service) (holder string, lost bool)
}

// resolution is one Service being resolved.
type resolution struct {
	*here
	world
	s      *service
	notes  *notes
	chosen []*chosen // by port and family, see at; nil until asked for
	ranged bool      // the ranges were asked for
	out    rows
}

// chosen is the endpoints of one port in one family, and how they were chosen.
type chosen struct {
	choice
	all  []endpoint
	used [2]bool // by scope: a route leads to this pool
}

// resolve makes the rows of a Service.
func (h *here) resolve(s *service, w world) (rows, []model.Notice) {
	r := resolution{here: h, world: w, s: s, notes: &notes{service: s.name}}
	if s.facts != nil {
		r.run()
	}
	return r.out, r.notes.sorted()
}

func (r *resolution) run() {
	wishes := r.wishes(r.s.facts, r.notes)
	r.chosen = make([]*chosen, 2*len(r.s.facts.ports))
	r.noteSlices()
	r.out.fronts = make([]front, 0, len(wishes))
	for _, w := range wishes {
		if r.granted(w) {
			r.out.fronts = append(r.out.fronts, r.front(w))
		}
	}
	r.pools()
	r.check()
}

// granted tells whether the Service gets what it wishes for, and says why not.
func (r *resolution) granted(w wish) bool {
	if w.kind.external() {
		if owner, ok := r.clusterIPOf(w.key.IP, r.s); ok {
			r.notes.add(ClusterIPAddress, "%s: %s is the ClusterIP of %s; it is not served", w.kind.field(), w.key.IP, owner)
			return false
		}
		if node, ok := r.nodeOf(w.key.IP); ok && !r.AllowNodeAddresses {
			r.notes.add(NodeAddress, "%s: %s is an address of %s; it is not served (allowNodeAddresses permits it)", w.kind.field(), w.key.IP, node)
			return false
		}
	}
	winner := r.winner(w.key)
	if winner == r.s {
		return true
	}
	if w.kind == kindNodePort {
		r.notes.add(NodePortConflict, "node port %d/%s belongs to %s, %s", w.key.Port, w.key.Proto, winner.name, r.s.behind(winner))
	} else {
		r.notes.add(AddressConflict, "%s: %s belongs to %s, %s", w.kind.field(), w.key, winner.name, r.s.behind(winner))
	}
	return false
}

// behind says why the winner comes before s.
func (s *service) behind(winner *service) string {
	if winner.facts.created == s.facts.created {
		return "which comes first by name"
	}
	return "which is older"
}

func (r *resolution) front(w wish) front {
	c := r.choose(w.port, w.key.V6())
	f := front{key: w.key, port: r.s.facts.ports[w.port].name, kind: w.kind}
	if w.kind == kindClusterIP {
		f.routes = r.internalRoutes(c, w.key.V6())
	} else {
		f.routes = r.externalRoutes(c, w.key.V6())
	}
	if w.kind == kindLoadBalancer {
		f.allow = r.allow(w.key.IP)
	}
	for _, way := range f.routes {
		c.used[way.scope] = true
	}
	return f
}

// internalRoutes is the ClusterIP's half of the table in the package comment.
func (r *resolution) internalRoutes(c *chosen, v6 bool) [3]way {
	inner := c.way(model.Cluster)
	if r.s.facts.policy.internalLocal {
		inner = c.way(model.Local)
	}
	outer := inner
	inner.snat = r.MasqueradeAll
	outer.snat = r.MasqueradeAll || r.detects[fam(v6)]
	return [3]way{model.FromPod: inner, model.FromNode: outer, model.FromOutside: outer}
}

// externalRoutes is the half of all other kinds. Traffic from inside never needs the Local policy, whose point is to keep
// the address of an outside client: it takes the short way to the cluster pool.
func (r *resolution) externalRoutes(c *chosen, v6 bool) [3]way {
	hidden := c.way(model.Cluster)
	hidden.snat = true
	if !r.s.facts.policy.externalLocal {
		return [3]way{hidden, hidden, hidden}
	}
	pod, outside := c.way(model.Cluster), c.way(model.Local)
	if !r.detects[fam(v6)] {
		pod = outside
	}
	return [3]way{model.FromPod: pod, model.FromNode: hidden, model.FromOutside: outside}
}

// way leads to one pool. An empty local pool is silent while there is an endpoint elsewhere, so that a load balancer that
// has not noticed yet tries another node instead of telling the client that nobody is there.
func (c *chosen) way(scope model.Scope) way {
	if scope == model.Local && c.anyUsable {
		return way{scope: scope, empty: model.Drop}
	}
	return way{scope: scope, empty: model.Reject}
}

// choose resolves the endpoints of one port in one family, once.
func (r *resolution) choose(port int, v6 bool) *chosen {
	at := &r.chosen[2*port+fam(v6)]
	if *at == nil {
		c := &chosen{all: r.endpoints(r.s.slices, r.s.facts.ports[port], v6, r.notes)}
		c.choice = r.here.choose(c.all, r.s.facts.keys)
		*at = c
	}
	return *at
}

func (r *resolution) allow(vip netip.Addr) []netip.Prefix {
	if !r.ranged {
		r.ranged = true
		r.notes.tell(r.s.facts.faults, inRanges)
	}
	return r.s.facts.ranges.allow(r.here, vip)
}

func (r *resolution) pools() {
	for i, c := range r.chosen {
		if c == nil {
			continue
		}
		p, v6 := r.s.facts.ports[i/2], i%2 == 1
		for _, scope := range [...]model.Scope{model.Cluster, model.Local} {
			if c.used[scope] {
				id := model.PoolID{Service: r.s.name, Port: p.name, Proto: p.proto, V6: v6, Scope: scope}
				r.out.pools = append(r.out.pools, pool(id, c.all, r.s.facts.policy))
			}
		}
		r.countNoLocal(v6, c)
	}
	slices.SortFunc(r.out.pools, func(a, b model.Pool) int { return a.ID.Compare(b.ID) })
	r.out.pools = slices.Clip(r.out.pools)
}

// countNoLocal counts as kube-proxy does: by port, where the policy is in use.
func (r *resolution) countNoLocal(v6 bool, c *chosen) {
	if !c.anyUsable || c.anyLocal {
		return
	}
	if r.s.facts.policy.internalLocal {
		r.out.noLocal.Internal[fam(v6)]++
	}
	if r.s.facts.policy.externalLocal {
		r.out.noLocal.External[fam(v6)]++
	}
}

// check fills in the health-check node port, unless another Service has the number.
func (r *resolution) check() {
	number := r.healthPort(r.s.facts, r.notes)
	if number == 0 {
		return
	}
	if holder, lost := r.healthLoser(number, r.s); lost {
		r.notes.add(NodePortConflict, "health check node port %d is taken by %s; health checks are not answered", number, holder)
		return
	}
	r.out.check = &model.Check{Service: r.s.name, Port: number, Ready4: r.readyHere(false), Ready6: r.readyHere(true)}
}

// readyHere counts the distinct addresses of ready endpoints on this node, over all ports.
func (r *resolution) readyHere(v6 bool) int {
	var ips []netip.Addr
	for i, c := range r.chosen {
		if c == nil || i%2 != fam(v6) {
			continue
		}
		for i := range c.all {
			if e := &c.all[i]; e.twin == nil && e.ready && e.local {
				ips = append(ips, e.addr)
			}
		}
	}
	slices.SortFunc(ips, netip.Addr.Compare)
	return len(slices.Compact(ips))
}

// noteSlices names the slices that nobody can use.
func (r *resolution) noteSlices() {
	for _, s := range r.s.slices {
		r.notes.tell(s.faults, always)
	}
}

func (k kind) field() string {
	return [...]string{fieldClusterIPs, fieldIngress, fieldExternalIPs, "spec.ports"}[k]
}
