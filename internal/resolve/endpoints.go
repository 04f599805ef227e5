package resolve

import (
	"cmp"
	"hash/maphash"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead/internal/model"
)

// sliceFacts is what is kept of an EndpointSlice.
type sliceFacts struct {
	name    string
	service *service // whose it is
	version uint64   // its resourceVersion, a number that grows (KEP-5504); 0 when it is none
	created int64    // seconds since 1970
	asked   int64    // when the change that it carries was asked for, in nanoseconds since 1970; 0 is unknown
	v6      bool
	ports   []slicePort
	members []member
	faults  *faults
}

// slicePort is a port of a slice.
type slicePort struct {
	name   string
	proto  model.Proto
	number int32 // never 0
}

// member is one endpoint of a slice, with its first address, and only it: the API says of the others that they are
// interchangeable with it, and no consumer may rely on them. There are very many members.
type member struct {
	addr                        netip.Addr
	site                        unique.Handle[site]
	target                      target
	ready, serving, terminating bool
}

// site is where an endpoint runs, and for where it is meant; what is unknown is empty. Very many endpoints share few sites.
type site struct {
	node, zone         string
	forNodes, forZones hint
}

// hint is a list of names, each after a comma, which no name of a node or a zone has in it; empty is no hint.
type hint string

func (h hint) names() []string { return strings.Split(string(h), ",")[1:] }

func (h hint) has(name string) bool { return strings.Contains(string(h)+",", ","+name+",") }

func readSite(e *discoveryv1.Endpoint) unique.Handle[site] {
	s := site{node: orEmpty(e.NodeName), zone: orEmpty(e.Zone)}
	if e.Hints != nil {
		s.forNodes = readHint(e.Hints.ForNodes, func(n discoveryv1.ForNode) string { return n.Name })
		s.forZones = readHint(e.Hints.ForZones, func(z discoveryv1.ForZone) string { return z.Name })
	}
	return unique.Make(s)
}

func readHint[F any](all []F, name func(F) string) hint {
	var b strings.Builder
	for _, one := range all {
		b.WriteString("," + name(one))
	}
	return hint(b.String())
}

// target tells apart the objects that endpoints stand for (targetRef): by uid, and those without one by name. It is a
// hash, since names are long, and two endpoints of one Service with the same address have to be told apart rarely enough that
// one in four billion may fail. 0 is an endpoint without target.
type target uint32

var targetSeed = maphash.MakeSeed()

func readTarget(r *corev1.ObjectReference) target {
	if r == nil {
		return 0
	}
	var h uint64
	if r.UID != "" {
		h = maphash.String(targetSeed, string(r.UID))
	} else {
		h = maphash.Comparable(targetSeed, [3]string{r.Kind, r.Namespace, r.Name})
	}
	return max(1, target(h))
}

// readSlice reads what a slice says.
func readSlice(s *discoveryv1.EndpointSlice) *sliceFacts {
	var n faults
	f := &sliceFacts{name: s.Name, created: s.CreationTimestamp.Unix(), v6: s.AddressType == discoveryv1.AddressTypeIPv6}
	f.version, _ = strconv.ParseUint(s.ResourceVersion, 10, 64)
	if at, ok := triggered(s); ok {
		f.asked = at.UnixNano()
	}
	switch s.AddressType {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
		f.ports = readSlicePorts(s, &n)
		f.members = readMembers(s, f.v6, &n)
	default:
		n.add(always, Malformed, "EndpointSlice %s: address type %s can't be served", quote(s.Name), quote(string(s.AddressType)))
	}
	f.faults = n.orNil()
	return f
}

// readSlicePorts: no name is the empty name and no protocol is TCP, as the API server would have filled in. A port without
// number ("all ports") can't be served.
func readSlicePorts(s *discoveryv1.EndpointSlice, n *faults) []slicePort {
	out := make([]slicePort, 0, len(s.Ports))
	for _, sp := range s.Ports {
		p := slicePort{proto: model.TCP}
		if sp.Name != nil {
			p.name = *sp.Name
		}
		if sp.Protocol != nil {
			var ok bool
			if p.proto, ok = protocol(*sp.Protocol); !ok {
				n.add(inPorts, Malformed, "EndpointSlice %s: protocol %s is not known", quote(s.Name), quote(string(*sp.Protocol)))
				continue
			}
		}
		if sp.Port != nil && *sp.Port != 0 {
			p.number = *sp.Port
			out = append(out, p)
		}
	}
	return out
}

// readMembers leaves out the endpoints that can't be sent to.
func readMembers(s *discoveryv1.EndpointSlice, v6 bool, n *faults) []member {
	out := make([]member, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		ip, ok := endpointAddr(s, e, v6, n)
		if !ok {
			continue
		}
		out = append(out, member{
			addr:        ip,
			site:        readSite(e),
			target:      readTarget(e.TargetRef),
			ready:       is(e.Conditions.Ready, true),
			serving:     is(e.Conditions.Serving, true),
			terminating: is(e.Conditions.Terminating, false),
		})
	}
	return out
}

func orEmpty(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func is(b *bool, otherwise bool) bool {
	if b == nil {
		return otherwise
	}
	return *b
}

func endpointAddr(s *discoveryv1.EndpointSlice, e *discoveryv1.Endpoint, v6 bool, n *faults) (netip.Addr, bool) {
	if len(e.Addresses) == 0 {
		return netip.Addr{}, false
	}
	text := e.Addresses[0]
	ip, ok := parseAddr(text)
	switch {
	case !ok || ip.Is6() != v6:
		n.add(inEndpoints, Malformed, "EndpointSlice %s: endpoint %s is no %s address", quote(s.Name), quote(text), familyName(v6))
		return netip.Addr{}, false
	case unsafeAddr(ip) != "":
		n.add(inEndpoints, UnsafeAddress, "EndpointSlice %s: endpoint %s is %s; nothing is sent to it", quote(s.Name), ip, unsafeAddr(ip))
		return netip.Addr{}, false
	}
	return ip, true
}

// triggered is when the change that a slice carries was asked for.
func triggered(s *discoveryv1.EndpointSlice) (time.Time, bool) {
	t, err := time.Parse(time.RFC3339Nano, s.Annotations[corev1.EndpointsLastChangeTriggerTime])
	return t, err == nil
}

// endpoint is one address and port behind a Service port, while it is being resolved.
type endpoint struct {
	*member
	at    netip.AddrPort
	local bool // on this node
	slice *sliceFacts
	twin  *sliceFacts // another slice (or entry) that speaks for the same address and port; nil: this one does

	inCluster, inLocal bool // chosen, see choose
}

func (e *endpoint) usable() bool { return e.ready || e.fading() }

// fading tells of an endpoint that is used only when nothing better is left.
func (e *endpoint) fading() bool { return !e.ready && e.serving && e.terminating }

// endpoints lists what slices hold for one port of a Service, sorted by address. Of several that have the same address and
// port one speaks; the others are marked as twins.
func (h *here) endpoints(all []*sliceFacts, p port, v6 bool, n *notes) []endpoint {
	out := make([]endpoint, 0, count(all))
	for _, s := range all {
		if s.v6 != v6 {
			continue
		}
		n.tell(s.faults, inPorts)
		number, ok := s.port(p, n)
		if !ok {
			continue
		}
		n.tell(s.faults, inEndpoints)
		for i := range s.members {
			m := &s.members[i]
			local := h.NodeName != "" && m.site.Value().node == h.NodeName
			out = append(out, endpoint{member: m, at: netip.AddrPortFrom(m.addr, number), local: local, slice: s})
		}
	}
	slices.SortStableFunc(out, func(a, b endpoint) int { return a.at.Compare(b.at) })
	settleTwins(out)
	return out
}

func count(all []*sliceFacts) int {
	n := 0
	for _, s := range all {
		n += len(s.members)
	}
	return n
}

// port finds the number that a slice has for a port of the Service.
func (s *sliceFacts) port(want port, n *notes) (uint16, bool) {
	for _, p := range s.ports {
		if p.name != want.name || p.proto != want.proto {
			continue
		}
		if !validPort(p.number) {
			n.add(Malformed, "EndpointSlice %s: %d is no port number", quote(s.name), p.number)
			continue
		}
		return uint16(p.number), true
	}
	return 0, false
}

// settleTwins picks, in each run of one address and port, the endpoint that speaks.
func settleTwins(es []endpoint) {
	for start := 0; start < len(es); {
		end := start + 1
		for end < len(es) && es[end].at == es[start].at {
			end++
		}
		if end-start > 1 {
			settleRun(es[start:end])
		}
		start = end
	}
}

// settleRun picks among endpoints of one address and port. Of those that are the same object (targetRef), the newer slice
// knows better: it is the later word on one pod. Those left are different pods, of which at most one really has the
// address: it is more likely the one in better health.
func settleRun(run []endpoint) {
	var known []*endpoint // those with a targetRef: by target, the newest slice first
	for i := range run {
		if run[i].target != 0 {
			known = append(known, &run[i])
		}
	}
	slices.SortStableFunc(known, func(a, b *endpoint) int {
		return cmp.Or(cmp.Compare(a.target, b.target), compareAge(b.slice, a.slice))
	})
	newest := 0
	for i, e := range known {
		if known[newest].target != e.target {
			newest = i
		}
		if compareAge(known[newest].slice, e.slice) > 0 {
			e.twin = known[newest].slice
		}
	}
	var best *endpoint
	for i := range run {
		if e := &run[i]; e.twin == nil && (best == nil || cmp.Or(e.health()-best.health(), compareAge(e.slice, best.slice)) > 0) {
			best = e
		}
	}
	for i := range run {
		if &run[i] != best {
			run[i].twin = best.slice
		}
	}
}

func (e *endpoint) health() int {
	switch {
	case e.ready:
		return 3
	case !e.terminating:
		return 2
	case e.serving:
		return 1
	}
	return 0
}

// compareAge orders slices by what was written last: by resourceVersion, else by creation, else by name, so that every node
// comes to the same end in whatever order it hears of them.
func compareAge(a, b *sliceFacts) int {
	return cmp.Or(cmp.Compare(a.version, b.version), cmp.Compare(a.created, b.created), cmp.Compare(a.name, b.name))
}
