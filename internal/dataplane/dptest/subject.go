// Package dptest is the conformance suite of dataplanes. Each runs it with one line:
//
//	dptest.Run(t, func(t *testing.T) dptest.Subject { … })
//
// It plays stories written by hand and random histories. One write in ten fails, half of those after taking effect, and
// instances are restarted at bad moments. Whenever a dataplane says that a delta is true, every packet of interest must meet
// what [model.State.Decide] says, all backends of a pool must be met by somebody, Dump must tell the same, and after Remove
// the kernel must be as it was.
package dptest

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// Subject is a dataplane and its kernel, as the suite needs them. All fields but Localhost are required.
type Subject struct {
	// Open gives a new instance over the same kernel. The one before was closed, or died.
	Open func() (engine.Dataplane, error)
	// Send sends a packet that opens a new flow, and tells what became of it. The node is the one last applied. What packets
	// leave in a kernel (who sticks to which backend) stays there for as long as it does in a real one.
	Send func(model.Node, model.Packet) (Outcome, error)
	// Fail makes each write into the kernel ask faults first, and fail as it says; nil makes the kernel reliable. A write is
	// what the kernel does as a whole: a transaction, an element, a netlink message.
	Fail func(faults func() memory.Fault)
	// Meddle damages what is ours in the kernel, as a stranger would; luck picks how.
	Meddle func(luck uint64) error
	// Kernel is all that the kernel holds, ours or not, in words and without counters: it is compared before and after.
	Kernel func() (string, error)
	// Localhost gives a node that wants NodePorts on loopback addresses (LocalhostPort is set) those that this dataplane serves,
	// and how: see [Relayed]. nil is as it is: by rules, on 127.0.0.0/8.
	Localhost func(model.Node) model.Node
}

// Relayed is the Localhost of dataplanes whose rules can't serve NodePorts on loopback addresses, so that the agent relays
// them, in both families. The subject's Send does what the relay does with packets that no rule took.
func Relayed(n model.Node) model.Node {
	n.LocalhostPort, n.LocalhostRelay = false, []netip.Addr{families[0].loopback(), families[1].loopback()}
	return n
}

// Outcome is what became of a packet.
type Outcome struct {
	Verdict model.Verdict
	Backend netip.AddrPort // when forwarded
	SNAT    bool           // the backend saw another source than the client's
}

// Run runs the suite. fresh makes a subject over an empty kernel, and cleans up with t.
func Run(t *testing.T, fresh func(t *testing.T) Subject) {
	for _, s := range stories {
		for _, f := range families {
			t.Run(s.name+"/"+f.String(), func(t *testing.T) {
				if err := play(fresh(t), s.steps(f), 1); err != nil {
					t.Fatalf("%s: %v", s.says, err)
				}
			})
		}
	}
	t.Run("histories", func(t *testing.T) {
		s := fresh(t)
		rapid.Check(t, func(rt *rapid.T) {
			if err := history(rt, s); err != nil {
				rt.Fatal(err)
			}
		})
	})
}

// Memory is the reference subject: package memory, and a kernel that does as [model.State.Decide] says.
func Memory() Subject { return newMind().subject() }

func newMind() *mind {
	return &mind{kernel: &memory.Kernel{}, stuck: map[stuckKey]netip.AddrPort{}, rnd: rand.New(rand.NewPCG(1, 2))}
}

// mind sends packets through what the memory kernel holds.
type mind struct {
	kernel  *memory.Kernel
	state   *model.State // as of version
	version int
	stuck   map[stuckKey]netip.AddrPort
	rnd     *rand.Rand
}

func (m *mind) subject() Subject {
	return Subject{
		Open:   func() (engine.Dataplane, error) { return memory.New(m.kernel), nil },
		Fail:   m.kernel.Fail,
		Kernel: func() (string, error) { return m.kernel.String(), nil },
		Meddle: func(luck uint64) error {
			rnd := rand.New(rand.NewPCG(luck, 0))
			m.kernel.Lose(func(row any) bool { _, ok := row.(model.Node); return !ok && rnd.IntN(3) == 0 })
			return nil
		},
		Send: func(_ model.Node, p model.Packet) (Outcome, error) { return m.send(p), nil },
	}
}

func (m *mind) send(p model.Packet) Outcome {
	if v := m.kernel.Version(); m.state == nil || v != m.version {
		m.state, m.version = m.kernel.State(), v
	}
	d := m.state.Decide(p)
	if d.Verdict != model.Forward {
		return Outcome{Verdict: d.Verdict}
	}
	to := d.Backends[m.rnd.IntN(len(d.Backends))].Addr
	if m.state.Pools[d.Route.Pool].Sticky > 0 {
		at := stuckKey{d.Frontend.Key, p.Src.Addr()}
		if b, ok := m.stuck[at]; ok && has(d.Backends, b) {
			to = b
		}
		m.stuck[at] = to
	}
	return Outcome{model.Forward, to, d.SNAT || to.Addr() == p.Src.Addr()}
}
