package resolve

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"fairlead/internal/model"
)

// endpoint is one address and port behind a Service port, while it is being resolved.
type endpoint struct {
	addr                        netip.AddrPort
	ready, serving, terminating bool
	local                       bool // on this node
	from                        *discoveryv1.Endpoint
	slice                       *discoveryv1.EndpointSlice
	twin                        *discoveryv1.EndpointSlice // another slice (or entry) that speaks for the same address and port; nil: this one does

	inCluster, inLocal bool // chosen, see choose
}

func (e *endpoint) usable() bool { return e.ready || e.fading() }

// fading tells of an endpoint that is used only when nothing better is left.
func (e *endpoint) fading() bool { return !e.ready && e.serving && e.terminating }

// endpoints lists what slices hold for one port of a Service, sorted by address. Of several that have the same address and
// port one speaks; the others are marked as twins.
func (h *here) endpoints(all []*discoveryv1.EndpointSlice, p port, v6 bool, n *notes) []endpoint {
	out := make([]endpoint, 0, count(all))
	for _, slice := range all {
		if slice.AddressType != addressType(v6) {
			continue
		}
		number, ok := slicePort(slice, p, n)
		if !ok {
			continue
		}
		for i := range slice.Endpoints {
			if ip, ok := endpointAddr(slice, i, v6, n); ok {
				out = append(out, h.endpoint(slice, i, netip.AddrPortFrom(ip, number)))
			}
		}
	}
	slices.SortStableFunc(out, func(a, b endpoint) int { return a.addr.Compare(b.addr) })
	settleTwins(out)
	return out
}

func (h *here) endpoint(slice *discoveryv1.EndpointSlice, i int, addr netip.AddrPort) endpoint {
	from := &slice.Endpoints[i]
	is := func(b *bool, otherwise bool) bool {
		if b == nil {
			return otherwise
		}
		return *b
	}
	return endpoint{
		addr:        addr,
		ready:       is(from.Conditions.Ready, true),
		serving:     is(from.Conditions.Serving, true),
		terminating: is(from.Conditions.Terminating, false),
		local:       from.NodeName != nil && *from.NodeName == h.NodeName && h.NodeName != "",
		from:        from,
		slice:       slice,
	}
}

func count(all []*discoveryv1.EndpointSlice) int {
	n := 0
	for _, s := range all {
		n += len(s.Endpoints)
	}
	return n
}

func addressType(v6 bool) discoveryv1.AddressType {
	if v6 {
		return discoveryv1.AddressTypeIPv6
	}
	return discoveryv1.AddressTypeIPv4
}

// slicePort finds the number that a slice has for a port of the Service. No name is the empty name and no protocol is TCP,
// as the API server would have filled in. A port without number ("all ports") can't be served.
func slicePort(slice *discoveryv1.EndpointSlice, want port, n *notes) (uint16, bool) {
	for _, sp := range slice.Ports {
		name, proto := "", model.TCP
		if sp.Name != nil {
			name = *sp.Name
		}
		if sp.Protocol != nil {
			var ok bool
			if proto, ok = protocol(*sp.Protocol); !ok {
				n.add(Malformed, "EndpointSlice %s: protocol %s is not known", quote(slice.Name), quote(string(*sp.Protocol)))
				continue
			}
		}
		if name != want.name || proto != want.proto || sp.Port == nil || *sp.Port == 0 {
			continue
		}
		if !validPort(*sp.Port) {
			n.add(Malformed, "EndpointSlice %s: %d is no port number", quote(slice.Name), *sp.Port)
			continue
		}
		return uint16(*sp.Port), true
	}
	return 0, false
}

// endpointAddr reads the address of an endpoint: the first, and only it, since the API says of the others that they are
// interchangeable with it and no consumer may rely on them.
func endpointAddr(slice *discoveryv1.EndpointSlice, i int, v6 bool, n *notes) (netip.Addr, bool) {
	if len(slice.Endpoints[i].Addresses) == 0 {
		return netip.Addr{}, false
	}
	text := slice.Endpoints[i].Addresses[0]
	ip, ok := parseAddr(text)
	switch {
	case !ok || ip.Is6() != v6:
		n.add(Malformed, "EndpointSlice %s: endpoint %s is no %s address", quote(slice.Name), quote(text), familyName(v6))
		return netip.Addr{}, false
	case unsafeAddr(ip) != "":
		n.add(UnsafeAddress, "EndpointSlice %s: endpoint %s is %s; nothing is sent to it", quote(slice.Name), ip, unsafeAddr(ip))
		return netip.Addr{}, false
	}
	return ip, true
}

// settleTwins picks, in each run of one address and port, the endpoint that speaks.
func settleTwins(es []endpoint) {
	for start := 0; start < len(es); {
		end := start + 1
		for end < len(es) && es[end].addr == es[start].addr {
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
		if run[i].from.TargetRef != nil {
			known = append(known, &run[i])
		}
	}
	slices.SortStableFunc(known, func(a, b *endpoint) int {
		return cmp.Or(compareTargets(a.from.TargetRef, b.from.TargetRef), compareAge(b.slice, a.slice))
	})
	newest := 0
	for i, e := range known {
		if compareTargets(known[newest].from.TargetRef, e.from.TargetRef) != 0 {
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

// compareAge orders slices by what was written last: by resourceVersion (a number that grows, KEP-5504), else by creation,
// else by name, so that every node comes to the same end in whatever order it hears of them.
func compareAge(a, b *discoveryv1.EndpointSlice) int {
	return cmp.Or(
		cmp.Compare(version(a), version(b)),
		a.CreationTimestamp.Time.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Name, b.Name),
	)
}

func version(s *discoveryv1.EndpointSlice) uint64 {
	n, _ := strconv.ParseUint(s.ResourceVersion, 10, 64) // 0 when it is none
	return n
}

// compareTargets orders the objects that endpoints stand for: by uid, and those without one by name.
func compareTargets(a, b *corev1.ObjectReference) int {
	if a.UID != "" || b.UID != "" {
		return cmp.Compare(a.UID, b.UID)
	}
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
