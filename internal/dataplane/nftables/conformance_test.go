package nftables

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

func TestConformance(t *testing.T) {
	defer keep(&txMost)()
	dptest.Run(t, func(*testing.T) dptest.Subject { return newSubject(newFakeKernel()).subject() })
}

// keep gives a function that puts back what is in v now.
func keep[T any](v *T) func() {
	was := *v
	return func() { *v = was }
}

// nfSubject is the dataplane over a kernel that keeps tables and walks packets through them, and a relay for localhost.
type nfSubject struct {
	k     *fakeKernel
	conn  conn         // k, or something around it
	state *model.State // what was applied; the relay is told
	sure  bool         // the kernel holds just that
	relay dptest.Relay
}

func newSubject(k *fakeKernel) *nfSubject {
	return &nfSubject{k: k, conn: k, state: model.NewState(), relay: dptest.Relay{Rand: rand.New(rand.NewPCG(1, 2))}}
}

func (s *nfSubject) subject() dptest.Subject {
	return dptest.Subject{
		Open: func() (engine.Dataplane, error) {
			if txMost = 1 << 20; s.relay.Rand.IntN(2) == 0 {
				txMost = 512 // many transactions
			}
			return watched{newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, s.conn), s}, nil
		},
		Send:      s.send,
		Fail:      func(faults func() memory.Fault) { s.k.fail = faults },
		Meddle:    s.meddle,
		Kernel:    func() (string, error) { return s.k.String(), nil },
		Localhost: dptest.Relayed,
	}
}

// watched looks at packets after each transaction: what is there before a change and after it must be there all the time.
type watched struct {
	engine.Dataplane
	s *nfSubject
}

func (w watched) Apply(ctx context.Context, d model.Delta) error {
	s, next := w.s, w.s.state.Clone()
	next.Apply(d)
	var wrong error
	if s.sure {
		s.k.committed = func() { wrong = cmp.Or(wrong, s.between(s.state, next)) }
	}
	err := w.Dataplane.Apply(ctx, d)
	s.k.committed = nil
	if s.sure = err == nil; s.sure {
		s.state = next
	}
	if wrong != nil {
		return fmt.Errorf("in the middle of a change: %w", wrong)
	}
	return err
}

func (w watched) Remove(ctx context.Context) error {
	w.s.state, w.s.sure = model.NewState(), false
	return w.Dataplane.Remove(ctx)
}

// between sends a packet from afar to frontends that are there before and after.
func (s *nfSubject) between(before, after *model.State) error {
	for k := range after.Frontends {
		if _, ok := before.Frontends[k]; !ok || k.NodePort() {
			continue
		}
		from := netip.MustParseAddrPort("203.0.113.7:40000")
		if k.V6() {
			from = netip.MustParseAddrPort("[2001:db8:113::7]:40000")
		}
		p := model.Packet{Src: from, Dst: netip.AddrPortFrom(k.IP, k.Port), Proto: k.Proto, Interface: "eth0"}
		got, err := s.send(after.Node, p)
		if err != nil {
			return err
		}
		a, b := before.Decide(p), after.Decide(p)
		if !met(a, got) && !met(b, got) {
			return fmt.Errorf("%v meets %+v; before it met %v %v, after it shall meet %v %v", p, got, a.Verdict, a.Backends, b.Verdict, b.Backends)
		}
	}
	return nil
}

// met tells whether a packet from afar met what was decided.
func met(d model.Decision, got dptest.Outcome) bool {
	return got.Verdict == d.Verdict && (d.Verdict != model.Forward || got.SNAT == d.SNAT &&
		slices.ContainsFunc(d.Backends, func(b model.Backend) bool { return b.Addr == got.Backend }))
}

func (s *nfSubject) send(n model.Node, p model.Packet) (dptest.Outcome, error) {
	got, err := s.k.trace(n, p, s.relay.Rand)
	if err == nil && got.Verdict == model.Pass && p.Interface == "" && p.Proto == model.TCP && slices.Contains(n.LocalhostRelay, p.Dst.Addr()) {
		return s.relay.Answer(s.state, p), nil
	}
	return dptest.Outcome{Verdict: got.Verdict, Backend: got.To, SNAT: got.SNAT}, err
}

// meddle damages what is in the tables, as a stranger could: by a transaction.
func (s *nfSubject) meddle(luck uint64) error {
	tables := s.k.sortedTables()
	if len(tables) == 0 {
		return nil
	}
	rnd := rand.New(rand.NewPCG(luck, 7))
	t := tables[rnd.IntN(len(tables))]
	var b kernel.NFBatch
	b.Reset()
	d := &damage{&b, rnd, t}
	[...]func(){d.table, d.rule, d.chainEmptied, d.chain, d.setEmptied, d.elementChanged, d.element, d.element}[rnd.IntN(8)]()
	s.sure = false
	return s.conn.Commit(&b)
}

type damage struct {
	*kernel.NFBatch
	rnd *rand.Rand
	t   *fakeTable
}

// say adds a message about an object: the table is attribute 1 of every kind.
func (d *damage) say(kind uint8, attrs func([]byte) []byte) {
	d.Add(kind, unix.NLM_F_CREATE, d.t.family, func(b []byte) []byte {
		return attrs(kernel.AppendAttrString(b, 1, d.t.name))
	})
}

func (d *damage) table() { d.say(unix.NFT_MSG_DELTABLE, func(b []byte) []byte { return b }) }

func (d *damage) rules(handle func(*fakeChain) uint64) {
	c := pick(d.rnd, d.t.chains, func(c *fakeChain) bool { return len(c.rules) > 0 })
	if c == nil {
		return
	}
	d.say(unix.NFT_MSG_DELRULE, func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_RULE_CHAIN, c.name)
		if h := handle(c); h != 0 {
			b = kernel.AppendAttrU64(b, unix.NFTA_RULE_HANDLE, h)
		}
		return b
	})
}

func (d *damage) rule() {
	d.rules(func(c *fakeChain) uint64 { return c.rules[d.rnd.IntN(len(c.rules))].handle })
}

func (d *damage) chainEmptied() { d.rules(func(*fakeChain) uint64 { return 0 }) }

// chain takes a chain to which nothing leads.
func (d *damage) chain() {
	if c := pick(d.rnd, d.t.chains, func(c *fakeChain) bool { return c.refs == 0 }); c != nil {
		d.say(unix.NFT_MSG_DELCHAIN, func(b []byte) []byte { return kernel.AppendAttrString(b, unix.NFTA_CHAIN_NAME, c.name) })
	}
}

func (d *damage) setEmptied() {
	if s := pick(d.rnd, d.t.sets, func(s *fakeSet) bool { return len(s.elems) > 0 }); s != nil {
		d.say(unix.NFT_MSG_DELSETELEM, func(b []byte) []byte {
			return kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_SET, s.name)
		})
	}
}

// elements picks one that no packet made, takes it out, and puts another in its place.
func (d *damage) elements(fits func(*fakeSet) bool, instead func(*fakeElem) *fakeElem) {
	s := pick(d.rnd, d.t.sets, func(s *fakeSet) bool { return len(s.elems) > 0 && !s.timed() && fits(s) })
	if s == nil {
		return
	}
	e := pick(d.rnd, s.elems, func(*fakeElem) bool { return true })
	list := func(kind uint8, e *fakeElem) {
		if e == nil {
			return
		}
		d.say(kind, func(b []byte) []byte {
			b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_SET, s.name)
			return fillNest(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b []byte) []byte {
				return fillNest(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte { return e.fill(b, s) })
			})
		})
	}
	list(unix.NFT_MSG_DELSETELEM, e)
	list(unix.NFT_MSG_NEWSETELEM, instead(e))
}

func (d *damage) element() {
	d.elements(func(*fakeSet) bool { return true }, func(*fakeElem) *fakeElem { return nil })
}

func (d *damage) elementChanged() {
	d.elements(func(s *fakeSet) bool { return s.isMap() && !s.verdicts() }, func(e *fakeElem) *fakeElem {
		other := *e
		other.data = slices.Clone(e.data)
		other.data[d.rnd.IntN(min(4, len(e.data)))] ^= byte(1 + d.rnd.IntN(3))
		return &other
	})
}

// pick picks one of a map, of those that fit; nil when none does.
func pick[V any](rnd *rand.Rand, m map[string]*V, fits func(*V) bool) *V {
	all := slices.DeleteFunc(sorted(m), func(v *V) bool { return !fits(v) })
	if len(all) == 0 {
		return nil
	}
	return all[rnd.IntN(len(all))]
}
