package dptest

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// harness drives a subject as the engine does: what failed stays pending, and is sent as everything after a few failures.
type harness struct {
	Subject
	plane   engine.Dataplane
	before  string       // what the kernel held when nothing was ours
	want    *model.State // what should be true
	applied *model.State // what the dataplane said is true
	pending model.Delta
	keys    map[model.Key]bool // every key there ever was
	stuck   map[stuckKey]bond
	fired   bool // a fault was given since it was last reset
	faults  func() memory.Fault
}

type stuckKey struct {
	frontend model.Key
	client   netip.Addr
}

// bond is what a client sticks to: a backend of one Service port. Who has the address next owes the client nothing.
type bond struct {
	to     netip.AddrPort
	length time.Duration
	pool   model.PoolID
}

// begin takes a subject with whatever an earlier run left in it.
func begin(s Subject, seed uint64) (*harness, error) {
	if s.Open == nil || s.Send == nil || s.Fail == nil || s.Meddle == nil || s.Kernel == nil {
		return nil, fmt.Errorf("the subject lacks a function; see dptest.Subject")
	}
	h := &harness{Subject: s, want: model.NewState(), applied: model.NewState(), pending: model.Delta{Full: true},
		keys: map[model.Key]bool{}, stuck: map[stuckKey]bond{}}
	unlucky := memory.Unlucky(0.1, seed)
	h.faults = func() memory.Fault {
		f := unlucky()
		h.fired = h.fired || f != memory.None
		return f
	}
	h.Fail(nil)
	if err := h.open(); err != nil {
		return nil, err
	}
	if err := h.plane.Remove(context.Background()); err != nil {
		return nil, fmt.Errorf("remove: %w", err)
	}
	var err error
	h.before, err = h.Kernel()
	return h, err
}

// open starts a new instance, over whatever the last one left.
func (h *harness) open() error {
	if h.plane != nil {
		if err := h.plane.Close(); err != nil {
			return fmt.Errorf("close: %w", err)
		}
	}
	plane, err := h.Open()
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	h.plane = memory.Faulty(plane, h.faults)
	return nil
}

// restart kills the instance. The new one is told everything, as the engine would.
func (h *harness) restart() error {
	h.pending = h.want.Full()
	return h.open()
}

// tell says what should be true now.
func (h *harness) tell(s *model.State) {
	if s.Node.LocalhostPort && h.Localhost != nil {
		s.Node = h.Localhost(s.Node)
	}
	h.pending = h.pending.Then(diff(h.want, s))
	h.want = s
	for k := range s.Frontends {
		h.keys[k] = true
	}
	maps.DeleteFunc(h.stuck, func(at stuckKey, b bond) bool { return !h.holds(at.frontend, b) })
}

// holds tells whether a client that sticks to a backend may hold on to it: the one pool of its Service port has the
// backend. With two pools (a policy is Local, another is not) a client may have a backend in each, and which of them the
// first pool then prefers is the dataplane's choice.
func (h *harness) holds(k model.Key, b bond) bool {
	f, ok := h.want.Frontends[k]
	only := f.Routes[model.FromOutside].Pool
	other := only
	other.Scope = model.Cluster + model.Local - only.Scope
	_, two := h.want.Pools[other]
	p := h.want.Pools[only]
	return ok && !two && only == b.pool && p.Sticky == b.length && has(p.Backends, b.to)
}

// try applies what is pending, once, with one write in ten failing. It tells whether that worked; an error is one that no
// fault explains.
func (h *harness) try() (bool, error) {
	if h.pending.Empty() {
		return true, nil
	}
	h.fired = false
	h.Fail(h.faults)
	err := h.plane.Apply(context.Background(), h.pending)
	h.Fail(nil)
	switch {
	case err == nil:
		h.applied.Apply(h.pending)
		h.pending = model.Delta{}
		return true, nil
	case h.fired:
		return false, nil
	}
	return false, fmt.Errorf("apply: %w", err)
}

// settle tries until it worked, and looks at everything.
func (h *harness) settle() error {
	for i := range 1000 {
		if i >= 3 && !h.pending.Full {
			h.pending = h.want.Full()
		}
		done, err := h.try()
		if err != nil {
			return err
		}
		if done {
			return h.check()
		}
	}
	return fmt.Errorf("1,000 tries did not make it")
}

// check makes sure of the suite itself, and looks.
func (h *harness) check() error {
	if !reflect.DeepEqual(canon(h.applied, h.want.Node), canon(h.want, h.want.Node)) {
		return fmt.Errorf("the suite is wrong: deltas do not add up")
	}
	return h.looks()
}

// looks compares what packets meet, and what Dump tells, with the model.
func (h *harness) looks() error {
	keys := some(slices.SortedFunc(maps.Keys(h.keys), model.Key.Compare))
	for _, p := range append(packets(keys), nobodys()...) {
		if err := h.send(p); err != nil {
			return fmt.Errorf("%v (in %q): %w", p, p.Interface, err)
		}
	}
	return h.checkDump()
}

// some is a few of many: the first, the last, and every so many between.
func some(keys []model.Key) []model.Key {
	const few = 24
	if len(keys) <= few {
		return keys
	}
	out := make([]model.Key, few)
	for i := range out {
		out[i] = keys[i*(len(keys)-1)/(few-1)]
	}
	return out
}

// send sends a packet a few times; more often when there is more to see.
func (h *harness) send(p model.Packet) error {
	d := h.want.Decide(p)
	if d.Verdict != model.Forward {
		return h.once(p, d, nil)
	}
	seen := map[netip.AddrPort]bool{}
	sticky := h.want.Pools[d.Route.Pool].Sticky > 0
	for i := range 40 * len(d.Backends) { // misses one of five with less than one in 10^18
		q := p
		if sticky && i > 1 {
			var more bool
			if q, more = another(p, i); !more {
				return nil
			}
		}
		if err := h.once(q, d, seen); err != nil {
			return err
		}
		if i > 0 && len(seen) == len(d.Backends) {
			return nil
		}
	}
	return fmt.Errorf("only %d of %d backends are ever met", len(seen), len(d.Backends))
}

// once sends a packet and compares what became of it with the decision.
func (h *harness) once(p model.Packet, d model.Decision, seen map[netip.AddrPort]bool) error {
	got, err := h.Send(h.want.Node, p)
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if got.Verdict != d.Verdict {
		return fmt.Errorf("meets %v, should meet %v: %s", got.Verdict, d.Verdict, d.Why)
	}
	if d.Verdict != model.Forward {
		return nil
	}
	if !has(d.Backends, got.Backend) {
		return fmt.Errorf("goes to %v, should go to one of %v: %s", got.Backend, d.Backends, d.Why)
	}
	if hidden := d.SNAT || got.Backend.Addr() == p.Src.Addr(); got.SNAT != hidden {
		return fmt.Errorf("goes to %v, client hidden: %v; should be: %v (%s)", got.Backend, got.SNAT, hidden, d.Why)
	}
	seen[got.Backend] = true
	if length := h.want.Pools[d.Route.Pool].Sticky; length > 0 {
		return h.sticks(stuckKey{d.Frontend.Key, p.Src.Addr()}, bond{got.Backend, length, d.Route.Pool})
	}
	return nil
}

// sticks remembers which backend a client has, and compares.
func (h *harness) sticks(at stuckKey, b bond) error {
	if had, ok := h.stuck[at]; ok && had != b {
		return fmt.Errorf("a client that sticks to %v was sent to %v", had.to, b.to)
	}
	if h.holds(at.frontend, b) {
		h.stuck[at] = b
	}
	return nil
}

// end removes everything and looks for traces.
func (h *harness) end() error {
	for range 2 { // Remove is idempotent
		if err := h.plane.Remove(context.Background()); err != nil {
			return fmt.Errorf("remove: %w", err)
		}
		left, err := h.plane.Dump(context.Background())
		if err != nil {
			return fmt.Errorf("dump: %w", err)
		}
		if n := len(left.Frontends) + len(left.Pools) + len(left.Checks); n > 0 {
			return fmt.Errorf("Remove leaves %d nouns: %v", n, left)
		}
		after, err := h.Kernel()
		if err != nil {
			return err
		}
		if after != h.before {
			return fmt.Errorf("Remove leaves the kernel changed; before:\n%s\nafter:\n%s", h.before, after)
		}
	}
	return h.plane.Close()
}
