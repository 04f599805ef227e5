package model

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Packet is the first packet of a flow, as it reaches the node.
type Packet struct {
	Src       netip.AddrPort
	Dst       netip.AddrPort
	Proto     Proto
	Interface string // it came in by; empty when the node itself sends it
}

func (p Packet) String() string { return fmt.Sprintf("%s -> %s/%s", p.Src, p.Dst, p.Proto) }

// Decision is what a packet should meet.
type Decision struct {
	Verdict  Verdict
	Origin   Origin
	Frontend *Frontend // nil when none matches
	Route    Route     // of the frontend, for the origin
	Backends []Backend // one of these takes it, when Forward
	SNAT     bool      // the backend sees the node, not the client. A hairpin (backend is the client) is always hidden
	Why      string    // one sentence
}

// Decide is the reference semantics of a packet that opens a flow. Dataplanes are held to it.
func (s *State) Decide(p Packet) Decision {
	d := Decision{Origin: s.Origin(p)}
	if p.Dst.Addr().IsLoopback() && p.Interface != "" && p.Interface != "lo" {
		d.Verdict, d.Why = Drop, "a loopback address is for the node alone"
		return d
	}
	if to := p.Dst.Addr(); to.IsLoopback() && s.Node.RelaysLocalhost(to.Is6()) {
		return s.relayed(p, d)
	}
	f, ok := s.lookup(p)
	if !ok {
		return s.unclaimed(p, d)
	}
	d.Frontend, d.Route = &f, f.Routes[d.Origin]
	if f.Allow != nil && !contains(f.Allow, p.Src.Addr()) {
		d.Verdict, d.Why = Drop, fmt.Sprintf("the source is in none of the allowed ranges of %s", f.About.Service)
		return d
	}
	pool := s.Pools[d.Route.Pool]
	if len(pool.Backends) == 0 {
		d.Verdict, d.Why = d.Route.Else, elseWhy(d.Route.Else, f.About)
		return d
	}
	d.Verdict, d.Backends, d.SNAT = Forward, pool.Backends, d.Route.SNAT
	d.Why = fmt.Sprintf("from %s to %s %s: one of %d %s endpoints", d.Origin, f.About.Kind, f.About.Service, len(pool.Backends), d.Route.Pool.Scope)
	return d
}

func elseWhy(v Verdict, a About) string {
	if v == Drop {
		return a.Service + " has no endpoint on this node, and its policy is Local"
	}
	return a.Service + " has no endpoint"
}

// Origin tells who sent the packet: a pod before the node, since a node's own address may lie in the pods' range
// (the bridge of the pods, say), and the pod rules come first in kube-proxy too.
func (s *State) Origin(p Packet) Origin {
	src := p.Src.Addr()
	local := p.Interface == "" || slices.Contains(s.Node.Addrs, src)
	switch {
	case contains(s.Node.Pods, src) || s.podInterface(p.Interface):
		return FromPod
	case local || src.IsLoopback():
		return FromNode
	}
	return FromOutside
}

func (s *State) podInterface(name string) bool {
	if name == "" {
		return false
	}
	return slices.ContainsFunc(s.Node.PodInterfaces, func(want string) bool {
		prefix, wild := strings.CutSuffix(want, "+")
		return name == want || wild && strings.HasPrefix(name, prefix)
	})
}

// lookup finds the frontend: the address itself first, then the NodePorts, when the address is one of the node's.
func (s *State) lookup(p Packet) (Frontend, bool) {
	k := Key{p.Dst.Addr(), p.Dst.Port(), p.Proto}
	if f, ok := s.Frontends[k]; ok {
		return f, true
	}
	own := slices.Contains(s.Node.Addrs, k.IP) || k.IP.Is4() && k.IP.IsLoopback()
	if !own || !s.Node.TakesNodePort(k.IP) {
		return Frontend{}, false
	}
	k.IP = Unspecified(k.IP.Is6())
	f, ok := s.Frontends[k]
	return f, ok
}

// unclaimed decides for packets that no frontend takes. It walks all frontends: fit for people and tests.
func (s *State) unclaimed(p Packet, d Decision) Decision {
	for k, f := range s.Frontends {
		if f.Owned && k.IP == p.Dst.Addr() {
			d.Verdict, d.Why = Reject, fmt.Sprintf("%s is the ClusterIP of %s, which has no such port", k.IP, f.About.Service)
			return d
		}
	}
	if ip := p.Dst.Addr(); s.Node.Unassigned(ip) {
		d.Verdict, d.Why = Drop, fmt.Sprintf("%s is kept for ClusterIPs (ServiceCIDR), and no Service has it", ip)
		return d
	}
	d.Verdict, d.Why = Pass, "no Service has this address and port"
	return d
}

// Unspecified is the address that stands for all NodePort addresses of a family.
func Unspecified(v6 bool) netip.Addr {
	if v6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}
