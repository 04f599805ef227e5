package model

import (
	"fmt"
	"net/netip"
	"slices"
)

// RelaysLocalhost tells whether NodePorts of a family answer on its loopback address through the relay. Where they do, TCP
// is the relay's, and rules refuse what is sent to a NodePort of another protocol at any loopback address of the family.
func (n Node) RelaysLocalhost(v6 bool) bool {
	return slices.ContainsFunc(n.LocalhostRelay, func(a netip.Addr) bool { return a.Is6() == v6 })
}

// relayed decides for packets to a loopback address of a family whose NodePorts the relay serves. Who connects to the relay
// is on this node; backends see a connection of the node's own.
func (s *State) relayed(p Packet, d Decision) Decision {
	at := p.Dst.Addr()
	f, ok := s.Frontends[Key{Unspecified(at.Is6()), p.Dst.Port(), p.Proto}]
	switch {
	case !ok:
		d.Verdict, d.Why = Pass, "no Service has this address and port"
		return d
	case p.Proto == TCP && !slices.Contains(s.Node.LocalhostRelay, at):
		d.Verdict, d.Why = Pass, fmt.Sprintf("of the loopback addresses, NodePorts answer on %s only", list(s.Node.LocalhostRelay, netip.Addr.String))
		return d
	}
	d.Origin, d.Frontend, d.Route = FromNode, &f, f.Routes[FromNode]
	pool := s.Pools[d.Route.Pool]
	switch {
	case p.Proto != TCP:
		d.Verdict, d.Why = Reject, "on loopback addresses NodePorts are relayed, which is for TCP alone"
	case len(pool.Backends) == 0:
		d.Verdict, d.Why = Reject, f.About.Service+" has no endpoint for the relay of localhost, so that nobody listens"
	case f.Allow != nil && !contains(f.Allow, p.Src.Addr()):
		d.Verdict, d.Why = Reject, fmt.Sprintf("the source is in none of the allowed ranges of %s", f.About.Service)
	default:
		d.Verdict, d.Backends, d.SNAT = Forward, pool.Backends, true
		d.Why = fmt.Sprintf("from %s to %s %s, by the relay of localhost: one of %d %s endpoints", d.Origin, f.About.Kind, f.About.Service,
			len(pool.Backends), d.Route.Pool.Scope)
	}
	return d
}
