package resolve

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// Resolver keeps what it was told and what it emitted, and resolves only what a change may concern. One goroutine owns it.
// It keeps of the objects what it reads there.
type Resolver struct {
	config   Config
	here     here
	services map[string]*service    // by namespace/name
	slices   map[string]*sliceFacts // by namespace/name
	nodes    map[string]nodeFacts
	cidrs    map[string]serviceCIDR
	addrs    []netip.Addr
	claims   claims
	board    *board
	dirty    []*service
	since    map[*service][]time.Time
	full     bool       // the next delta lists everything
	node     model.Node // as last emitted
	stats    Stats
}

// dirt says why a Service must be resolved again; 0 is clean.
type dirt uint8

const (
	dirtyService dirt = 1 << iota
	dirtySlice
	dirtyOther // something else that it depends on
)

// Stats counts what the resolver was told.
type Stats struct {
	ServiceChanges, EndpointChanges uint64  // Services and slices told, ever
	ServicesPending, SlicesPending  int     // Services that wait for the next Delta since they, or slices of theirs, were told
	NoLocal                         NoLocal // as of the last Delta
}

// New returns a resolver that knows nothing but its configuration. Its first Delta is Full.
func New(c Config) *Resolver {
	r := &Resolver{
		services: map[string]*service{},
		slices:   map[string]*sliceFacts{},
		nodes:    map[string]nodeFacts{},
		cidrs:    map[string]serviceCIDR{},
		claims:   newClaims(),
		board:    newBoard(),
		since:    map[*service][]time.Time{},
		full:     true,
	}
	r.SetConfig(c)
	return r
}

// SetConfig changes the configuration. The next Delta holds what that changes.
func (r *Resolver) SetConfig(c Config) {
	r.config = c
	nodes := r.claims.nodes
	r.claims = newClaims()
	r.claims.nodes = nodes
	for _, s := range r.services {
		r.claims.enter(s, c.wishes(s.facts, nil), c.healthPort(s.facts, nil), false, func(*service) {})
	}
	r.locate()
	r.markAll()
}

// MarkAll makes the next Delta Full.
func (r *Resolver) MarkAll() {
	r.full = true
	r.markAll()
}

func (r *Resolver) markAll() {
	for _, s := range r.services {
		r.mark(s, dirtyOther)
	}
}

func (r *Resolver) mark(s *service, why dirt) {
	if s.dirty == 0 {
		r.dirty = append(r.dirty, s)
	}
	if why == dirtyService && s.dirty&why == 0 {
		r.stats.ServicesPending++
	}
	if why == dirtySlice && s.dirty&why == 0 {
		r.stats.SlicesPending++
	}
	s.dirty |= why
}

func (r *Resolver) touched(s *service) { r.mark(s, dirtyOther) }

// at finds the record of a Service, or makes it. Whoever calls it marks the Service, so that an empty record goes away.
func (r *Resolver) at(nn types.NamespacedName) *service {
	name := nn.String()
	s := r.services[name]
	if s == nil {
		s = &service{name: name}
		r.services[name] = s
	}
	return s
}

// Service tells what a Service is now; nil is gone.
func (r *Resolver) Service(nn types.NamespacedName, obj *corev1.Service) {
	r.stats.ServiceChanges++
	s := r.at(nn)
	old, now := s.facts, readService(obj)
	oldWishes, oldHealth := r.config.wishes(old, nil), r.config.healthPort(old, nil)
	wishes, health := r.config.wishes(now, nil), r.config.healthPort(now, nil)
	r.mark(s, dirtyService)
	if old != nil && now != nil && old.created == now.created && slices.Equal(oldWishes, wishes) && oldHealth == health {
		s.facts = now
		return
	}
	r.claims.enter(s, oldWishes, oldHealth, true, r.touched)
	s.facts = now
	r.claims.enter(s, wishes, health, false, r.touched)
}

// Slice tells what an EndpointSlice is now; nil is gone. One that names no Service counts as gone.
func (r *Resolver) Slice(nn types.NamespacedName, slice *discoveryv1.EndpointSlice) {
	r.stats.EndpointChanges++
	key := nn.String()
	old := r.slices[key]
	var owner *service
	if slice != nil && slice.Labels[discoveryv1.LabelServiceName] != "" {
		owner = r.at(types.NamespacedName{Namespace: nn.Namespace, Name: slice.Labels[discoveryv1.LabelServiceName]})
	}
	if old != nil {
		old.service.slices = slices.DeleteFunc(old.service.slices, func(s *sliceFacts) bool { return s == old })
		delete(r.slices, key)
		r.mark(old.service, dirtySlice)
		if owner != old.service {
			delete(r.since, old.service) // what was asked for is answered by what comes in its place, as in kube-proxy
		}
	}
	if owner == nil {
		return
	}
	now := readSlice(slice)
	now.service = owner
	if name := key[len(nn.Namespace)+1:]; name == now.name {
		now.name = name // one string, not two
	}
	owner.slices = append(owner.slices, now)
	slices.SortFunc(owner.slices, compareSliceNames)
	r.slices[key] = now
	r.mark(owner, dirtySlice)
	if now.asked != 0 && (old == nil || now.asked != old.asked) {
		r.since[owner] = append(r.since[owner], time.Unix(0, now.asked))
	}
}

func compareSliceNames(a, b *sliceFacts) int { return cmp.Compare(a.name, b.name) }

// Node tells what a Node is now; nil is gone. That this node's own object is gone is not believed: the machine is still
// here, and keeps its zone, its addresses and its pods until told otherwise.
func (r *Resolver) Node(name string, n *corev1.Node) {
	old, had := r.nodes[name]
	switch {
	case n != nil:
		r.nodes[name] = readNode(n)
	case name == r.config.NodeName:
		return
	default:
		delete(r.nodes, name)
	}
	if now, has := r.nodes[name]; had != has || !slices.Equal(old.addrs, now.addrs) {
		r.rename("node "+name, old.addrs, now.addrs)
	}
	if name == r.config.NodeName {
		r.locate()
	}
}

// Addrs tells all addresses of this machine's interfaces; nil is that they are not known any more.
func (r *Resolver) Addrs(addrs []netip.Addr) {
	r.addrs = cleanAddrs(addrs)
	r.locate()
}

// rename moves addresses of a node in the index, and marks who wishes for them.
func (r *Resolver) rename(who string, old, now []netip.Addr) {
	for _, a := range without(old, now) {
		r.claims.nodes.remove(a, who)
		each(r.claims.external.of(a), r.touched)
	}
	for _, a := range without(now, old) {
		r.claims.nodes.add(a, who)
		each(r.claims.external.of(a), r.touched)
	}
}

// without gives the addresses that are not among others. Machines with thousands of addresses exist (those of kube-proxy's
// ipvs mode), so it is linear.
func without(addrs, others []netip.Addr) []netip.Addr {
	has := make(map[netip.Addr]bool, len(others))
	for _, a := range others {
		has[a] = true
	}
	var out []netip.Addr
	for _, a := range addrs {
		if !has[a] {
			out = append(out, a)
		}
	}
	return out
}

// locate works out anew what is known of this node, and marks the Services that see the difference.
func (r *Resolver) locate() {
	old := r.here
	r.here = place(r.config, r.nodes[r.config.NodeName], r.addrs)
	r.here.keep(r.cidrs)
	switch {
	case old.zone != r.here.zone || old.detects != r.here.detects:
		r.markAll()
	case !slices.Equal(old.addrs, r.here.addrs):
		for _, s := range r.services {
			if s.facts != nil && s.facts.ranges != nil {
				r.mark(s, dirtyOther)
			}
		}
	}
}

// Notices gives what should be told to people since the last call, as of the last Delta. A notice is given once while it
// holds, and again if it went away and came back.
func (r *Resolver) Notices() []model.Notice {
	news := r.board.news()
	for i, n := range news {
		if s := r.services[n.Service]; s != nil && s.facts != nil {
			news[i].UID = s.facts.uidText()
		}
	}
	return news
}

// Refusals counts the notices that hold, by reason; every reason is there.
func (r *Resolver) Refusals() map[string]int { return maps.Clone(r.board.count) }

// Stats counts what was told, and what is without local endpoints.
func (r *Resolver) Stats() Stats { return r.stats }
