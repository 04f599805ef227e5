package resolve

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// Resolver keeps what it was told and what it emitted, and resolves only what a change may concern. One goroutine owns it.
// It keeps the objects it is given; nobody may change one afterwards.
type Resolver struct {
	config   Config
	here     here
	services map[types.NamespacedName]*service
	slices   map[types.NamespacedName]sliceOf
	nodes    map[string]nodeFacts
	addrs    []netip.Addr
	claims   claims
	board    *board
	dirty    []*service
	since    map[*service][]time.Time
	full     bool       // the next delta lists everything
	node     model.Node // as last emitted
	stats    Stats
}

// sliceOf says whose a slice is.
type sliceOf struct {
	service *service
	slice   *discoveryv1.EndpointSlice
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
		services: map[types.NamespacedName]*service{},
		slices:   map[types.NamespacedName]sliceOf{},
		nodes:    map[string]nodeFacts{},
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
		r.claims.enter(s, c.wishes(s.obj, nil), c.healthPort(s.obj, nil), false, func(*service) {})
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
	s := r.services[nn]
	if s == nil {
		s = &service{nn: nn, name: nn.String()}
		r.services[nn] = s
	}
	return s
}

// Service tells what a Service is now; nil is gone.
func (r *Resolver) Service(nn types.NamespacedName, obj *corev1.Service) {
	r.stats.ServiceChanges++
	s := r.at(nn)
	old := s.obj
	oldWishes, oldHealth := r.config.wishes(old, nil), r.config.healthPort(old, nil)
	wishes, health := r.config.wishes(obj, nil), r.config.healthPort(obj, nil)
	r.mark(s, dirtyService)
	if old != nil && obj != nil && old.CreationTimestamp.Equal(&obj.CreationTimestamp) && slices.Equal(oldWishes, wishes) && oldHealth == health {
		s.obj = obj
		return
	}
	r.claims.enter(s, oldWishes, oldHealth, true, r.touched)
	s.obj = obj
	r.claims.enter(s, wishes, health, false, r.touched)
}

// Slice tells what an EndpointSlice is now; nil is gone. One that names no Service counts as gone.
func (r *Resolver) Slice(nn types.NamespacedName, slice *discoveryv1.EndpointSlice) {
	r.stats.EndpointChanges++
	old, had := r.slices[nn]
	var now *service
	if slice != nil && slice.Labels[discoveryv1.LabelServiceName] != "" {
		now = r.at(types.NamespacedName{Namespace: nn.Namespace, Name: slice.Labels[discoveryv1.LabelServiceName]})
	}
	if had {
		old.service.slices = slices.DeleteFunc(old.service.slices, func(s *discoveryv1.EndpointSlice) bool { return s == old.slice })
		delete(r.slices, nn)
		r.mark(old.service, dirtySlice)
	}
	if had && now != old.service {
		delete(r.since, old.service) // what was asked for is answered by what comes in its place, as in kube-proxy
	}
	if now == nil {
		return
	}
	now.slices = append(now.slices, slice)
	slices.SortFunc(now.slices, compareSliceNames)
	r.slices[nn] = sliceOf{now, slice}
	r.mark(now, dirtySlice)
	if at, ok := triggered(slice); ok && (!had || slice.Annotations[corev1.EndpointsLastChangeTriggerTime] != old.slice.Annotations[corev1.EndpointsLastChangeTriggerTime]) {
		r.since[now] = append(r.since[now], at)
	}
}

func compareSliceNames(a, b *discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) }

// triggered is when the change that a slice carries was asked for.
func triggered(s *discoveryv1.EndpointSlice) (time.Time, bool) {
	t, err := time.Parse(time.RFC3339Nano, s.Annotations[corev1.EndpointsLastChangeTriggerTime])
	return t, err == nil
}

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
	switch {
	case old.zone != r.here.zone || old.detects != r.here.detects:
		r.markAll()
	case !slices.Equal(old.addrs, r.here.addrs):
		for _, s := range r.services {
			if s.obj != nil && len(s.obj.Spec.LoadBalancerSourceRanges) > 0 {
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
		ns, name, _ := strings.Cut(n.Service, "/")
		if s := r.services[types.NamespacedName{Namespace: ns, Name: name}]; s != nil && s.obj != nil {
			news[i].UID = string(s.obj.UID)
		}
	}
	return news
}

// Refusals counts the notices that hold, by reason; every reason is there.
func (r *Resolver) Refusals() map[string]int { return maps.Clone(r.board.count) }

// Stats counts what was told, and what is without local endpoints.
func (r *Resolver) Stats() Stats { return r.stats }
