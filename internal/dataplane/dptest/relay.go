package dptest

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	"fairlead/internal/model"
)

// Relay answers as the agent's relay does, which listens on the loopback addresses where rules can't serve them: as
// [model.State.Decide] says, from the node's own address, and a client that sticks gets its backend as long as there is one.
type Relay struct {
	Rand  *rand.Rand
	stuck map[stuckClient]netip.AddrPort
}

type stuckClient struct {
	to   model.Key
	from netip.Addr
}

// Answer sends a packet.
func (r *Relay) Answer(s *model.State, p model.Packet) Outcome {
	d := s.Decide(p)
	if d.Verdict != model.Forward {
		return Outcome{Verdict: d.Verdict}
	}
	to := d.Backends[r.Rand.IntN(len(d.Backends))].Addr
	if s.Pools[d.Route.Pool].Sticky > 0 {
		at := stuckClient{d.Frontend.Key, p.Src.Addr()}
		if had, ok := r.stuck[at]; ok && slices.ContainsFunc(d.Backends, func(b model.Backend) bool { return b.Addr == had }) {
			to = had
		}
		if r.stuck == nil {
			r.stuck = map[stuckClient]netip.AddrPort{}
		}
		r.stuck[at] = to
	}
	return Outcome{Verdict: model.Forward, Backend: to, SNAT: true}
}
