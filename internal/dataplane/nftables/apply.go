package nftables

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
	"fairlead/internal/shadow"

	"golang.org/x/sys/unix"
)

// Dataplane keeps Services in nf_tables. Use New.
type Dataplane struct {
	cfg      Config
	conn     conn
	port     uint32  // of conn: what it causes is no drift
	damage   damages // that others did
	node     model.Node
	services map[model.PoolID]*service // by serviceID
	fronts   map[model.Key]*front

	loaded   bool     // the tables below say what the kernel holds
	last     snapshot // of Dump, for the next Apply
	refusals int      // of the kernel, one after the other
	base     [2]base
	numbered [2]numbers
	own      ownNumbers
	rendered map[chainID]chain

	rows   *shadow.Table[model.Key, model.Key, row]
	facts  *shadow.Table[fact, fact, struct{}]
	chains *shadow.Table[chainID, chainID, sum]
	shapes *shadow.Table[shapeID, shapeID, shape]
}

type (
	chainID struct {
		v6   bool
		name string
	}
	shapeID struct {
		v6 bool
		n  uint32
	}
)

// base is what a family needs before anything else can be written.
type base struct {
	table    bool
	rebuild  bool // a table of another layout is there
	sets     [setsCount]bool
	counters map[string]bool
	strays   []stray
	anything [setsCount]bool
}

// numbers are those of a family's shapes. They are kept until the kernel is read again: a shape that comes again costs nothing.
type numbers struct {
	of   map[shape]uint32
	used map[uint32]bool // wanted since the kernel was read
	next uint32
	from uint32 // next, when it was read
}

// crowded tells that so many new shapes have come that it is worth reading the kernel again to take out those that nobody uses any
// more: the kernel validates all of them whenever one comes.
func (n *numbers) crowded() bool { return n.next-n.from > 4096 }

func newDataplane(cfg Config, c conn) *Dataplane {
	if cfg.Log == nil {
		cfg.Log = func(error) {}
	}
	d := &Dataplane{cfg: cfg, conn: c, rendered: map[chainID]chain{},
		rows:   shadow.New[model.Key, model.Key](shadow.Same[row], nil),
		facts:  shadow.New[fact, fact](shadow.Same[struct{}], nil),
		chains: shadow.New[chainID, chainID](shadow.Same[sum], nil),
		shapes: shadow.New[shapeID, shapeID](shadow.Same[shape], nil)}
	d.forget(0)
	return d
}

// forget forgets what is wanted, and makes room for so many frontends.
func (d *Dataplane) forget(room int) {
	d.services, d.fronts = make(map[model.PoolID]*service, room), make(map[model.Key]*front, room)
	d.node = model.Node{}
	d.rows.Grow(room)
	d.facts.Grow(room)
}

// Apply makes it so; see engine.Dataplane. Its cost is that of the change: one transaction of the elements that differ. After
// a failure, or when the kernel does not hold what we believed, it is read again.
func (d *Dataplane) Apply(ctx context.Context, delta model.Delta) error {
	fresh := delta.Full || !d.loaded || d.numbered[0].crowded() || d.numbered[1].crowded() || d.own.crowded()
	if delta.Full {
		if delta.Node == nil {
			n := d.node
			delta.Node = &n
		}
		d.forget(len(delta.Frontends))
	}
	d.loaded = d.loaded && !fresh // facts are counted when all is known
	dirty := d.absorb(delta)
	if delta.Full {
		return d.reapply(ctx, slices.Values(dirty)) // these are all there are, in an order that does not change
	}
	if fresh {
		return d.reapply(ctx, maps.Values(d.services))
	}
	for _, s := range dirty {
		d.want(s)
	}
	if delta.Node != nil {
		d.wantFixed()
	}
	err := d.write(ctx)
	if differs(err) {
		return d.reapply(ctx, maps.Values(d.services))
	}
	return err
}

// reapply reads the kernel and writes all that differs from what is wanted, which is all services.
func (d *Dataplane) reapply(ctx context.Context, all iter.Seq[*service]) error {
	if err := d.load(ctx); err != nil {
		d.loaded = false
		return err
	}
	d.wantFixed()
	d.count(d.nodeFacts(), 1)
	for s := range all {
		for _, f := range s.fronts {
			d.count(f.owns(), 1)
		}
		for _, p := range s.pools {
			d.count(p.hairpins(s.id.V6), 1)
		}
		d.want(s)
	}
	err := d.write(ctx)
	d.refused(err)
	return err
}

// patience is how often in a row the kernel may refuse what differs from what was just read. Then something is in our table that
// we do not read (a set made anew with room for one element, say), and the table is made anew, in one transaction.
const patience = 2

// refused counts refusals.
func (d *Dataplane) refused(err error) {
	var no *kernel.BatchError
	if d.refusals++; !errors.As(err, &no) || no.Index < 0 {
		d.refusals = 0
	}
}

// differs tells an error that says that the kernel does not hold what we believed: somebody was faster than the watch.
func differs(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY)
}

// absorb takes a delta into what is wanted, and returns the services that it touches, in its order.
func (d *Dataplane) absorb(delta model.Delta) []*service {
	out := make([]*service, 0, max(len(delta.Frontends), len(delta.Pools)))
	touched := make(map[*service]bool, cap(out))
	touch := func(s *service) {
		if !touched[s] {
			touched[s] = true
			out = append(out, s)
		}
	}
	for _, k := range delta.GoneFrontends {
		d.remove(k)
	}
	for _, id := range delta.GonePools {
		if s, ok := d.services[serviceID(id)]; ok {
			d.count(s.pools[id.Scope].hairpins(id.V6), -1)
			s.pools[id.Scope] = pool{}
			touch(s)
		}
	}
	for _, f := range delta.Frontends {
		if d.serves(f.Key.V6()) {
			touch(d.place(f))
		}
	}
	for _, p := range delta.Pools {
		if d.serves(p.ID.V6) {
			touch(d.fill(p))
		}
	}
	if delta.Node != nil {
		had := d.nodeFacts()
		d.node = *delta.Node
		d.count(d.nodeFacts(), 1)
		d.count(had, -1)
	}
	for _, id := range delta.GonePools {
		d.sweep(serviceID(id))
	}
	return out
}

func (d *Dataplane) serves(v6 bool) bool { return v6 && d.cfg.V6 || !v6 && d.cfg.V4 }

// remove lets go of a frontend.
func (d *Dataplane) remove(k model.Key) {
	f, ok := d.fronts[k]
	if !ok {
		return
	}
	delete(d.fronts, k)
	d.rows.Unwant(k)
	d.part(f)
}

// part takes a frontend from its service.
func (d *Dataplane) part(f *front) {
	d.count(f.owns(), -1)
	f.service.fronts = slices.DeleteFunc(f.service.fronts, func(o *front) bool { return o == f })
	d.sweep(f.service.id)
}

// sweep forgets a service of which nothing is left.
func (d *Dataplane) sweep(id model.PoolID) {
	if s, ok := d.services[id]; ok && len(s.fronts) == 0 && s.pools[0].slots == "" && s.pools[1].slots == "" {
		delete(d.services, id)
	}
}

func (d *Dataplane) service(id model.PoolID) *service {
	id = serviceID(id)
	s, ok := d.services[id]
	if !ok {
		s = &service{id: id}
		d.services[id] = s
	}
	return s
}

// place puts a frontend to its service.
func (d *Dataplane) place(f model.Frontend) *service {
	s := d.service(f.Routes[model.FromOutside].Pool)
	now := newFront(f)
	now.service = s
	s.fronts = append(s.fronts, now)
	d.count(now.owns(), 1)
	if had, ok := d.fronts[f.Key]; ok {
		d.part(had)
	}
	d.fronts[f.Key] = now
	return s
}

// fill gives a service its endpoints.
func (d *Dataplane) fill(p model.Pool) *service {
	s := d.service(p.ID)
	to := &s.pools[p.ID.Scope]
	to.slots, to.sticky = arrange(to.slots, pack(p.Backends, p.ID.V6), backendLen(p.ID.V6)), seconds(p.Sticky)
	if d.cfg.Ahead != nil {
		to.slots, to.sticky = anyOf(to.slots, p.ID.V6), 0
	}
	had := to.hairpins(p.ID.V6)
	to.here = packHere(p.Backends, p.ID.V6)
	d.count(to.hairpins(p.ID.V6), 1)
	d.count(had, -1)
	return s
}

// count says that facts are wanted once more, or once less. Before the kernel was read nothing is counted: then everything is.
func (d *Dataplane) count(facts iter.Seq[fact], by int) {
	if !d.loaded {
		return
	}
	for f := range facts {
		if by > 0 {
			d.facts.Ref(f, struct{}{})
		} else {
			d.facts.Unref(f)
		}
	}
}

// want says which rows a service asks for.
func (d *Dataplane) want(s *service) {
	for _, f := range s.fronts {
		sh := f.shape()
		d.rows.Want(f.key, d.row(f, sh))
	}
}

// number is the number of a shape, which it gets, with the chains that it leads to, when it is seen the first time.
func (d *Dataplane) number(v6 bool, s shape) uint32 {
	ns := &d.numbered[b2i(v6)]
	n, ok := ns.of[s]
	if !ok {
		n = ns.next
		ns.next++
		ns.of[s] = n
	}
	if ns.used[n] {
		return n
	}
	ns.used[n] = true
	d.shapes.Want(shapeID{v6, n}, s)
	x := builder{d.cfg, v6}
	for _, t := range s {
		if t.ranges && t.unguarded().verdict == model.Forward {
			d.wantChain(v6, x.target(t.unguarded()))
		}
		if t.verdict == model.Forward || t.ranges {
			d.wantChain(v6, x.target(t))
		}
	}
	return n
}

func (d *Dataplane) wantChain(v6 bool, c chain) {
	id := chainID{v6, c.name}
	d.rendered[id] = c
	d.chains.Want(id, c.sum())
}

// sometimes are the fixed chains that are not always there.
var sometimes = [...]string{chainForward, chainLocalhost}

// wantFixed asks for the chains and addresses that follow from the node.
func (d *Dataplane) wantFixed() {
	for _, v6 := range d.cfg.families() {
		there := map[string]bool{}
		for _, c := range (builder{d.cfg, v6}).fixed(&d.node) {
			there[c.name] = true
			d.wantChain(v6, c)
		}
		for _, name := range sometimes {
			if !there[name] {
				d.chains.Unwant(chainID{v6, name})
			}
		}
	}
}

// nodeFacts are the node's own addresses, and those that take NodePorts.
func (d *Dataplane) nodeFacts() iter.Seq[fact] {
	n := d.node
	return func(yield func(fact) bool) {
		for _, a := range n.Addrs {
			if !d.serves(a.Is6()) {
				continue
			}
			if !yield(fact{setNodeIPs, a}) || !a.IsLoopback() && n.TakesNodePort(a) && !yield(fact{setNodePortIPs, a}) {
				return
			}
		}
	}
}

// load takes note of what the kernel holds.
func (d *Dataplane) load(ctx context.Context) error {
	d.damage.take() // from here on it is read
	found, err := d.look(ctx)
	if err != nil {
		return err
	}
	d.rows.Loaded(each(found, func(h *held) iter.Seq2[model.Key, row] { return maps.All(h.rows) }))
	d.facts.Loaded(each(found, func(h *held) iter.Seq2[fact, struct{}] { return maps.All(h.facts) }))
	d.chains.Loaded(each(found, func(h *held) iter.Seq2[chainID, sum] { return maps.All(h.chains) }))
	d.shapes.Loaded(each(found, func(h *held) iter.Seq2[shapeID, shape] { return maps.All(h.shapes) }))
	for _, h := range found {
		i := b2i(h.v6)
		d.base[i] = base{table: h.table, rebuild: h.stale, sets: h.sets, counters: h.counters, strays: h.strays, anything: h.anything}
		of, next := h.numbers()
		d.numbered[i] = numbers{of: of, used: map[uint32]bool{}, next: next, from: next}
	}
	d.own = ownNumbersIn(found)
	d.adopt()
	d.loaded = true
	return nil
}

// each yields what all families hold of one kind.
func each[K, V any](found []*held, of func(*held) iter.Seq2[K, V]) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, h := range found {
			for k, v := range of(h) {
				if !yield(k, v) {
					return
				}
			}
		}
	}
}

// adopt gives endpoints the numbers that they have in the kernel, where it has any of the service.
func (d *Dataplane) adopt() {
	for _, s := range d.services {
		for _, f := range s.fronts {
			r, ok := d.rows.Held(f.key)
			if !ok {
				continue
			}
			size := backendLen(f.key.V6())
			for scope, had := range r.scopes() {
				if p := &s.pools[scope]; had.endpoints != "" {
					p.slots = arrange(had.endpoints, p.slots, size)
				}
			}
		}
	}
}

// look reads the families that are served; what Dump has just read counts, if nothing was written since.
func (d *Dataplane) look(ctx context.Context) ([]*held, error) {
	last := d.last
	d.last = snapshot{}
	if g, err := generation(d.conn); err == nil && last.found != nil && g == last.generation {
		return last.found, nil
	}
	var out []*held
	for _, v6 := range d.cfg.families() {
		h, err := read(ctx, d.conn, d.cfg.table(), v6)
		if err != nil {
			return nil, err
		}
		if h.stale || h.table && d.refusals >= patience { // as good as none, but must go
			*h = held{v6: v6, name: d.cfg.table(), stale: true}
		}
		out = append(out, h)
	}
	return out, nil
}

// grace is longer than any packet takes through our chains. A packet that is among them when the table goes would find the maps
// empty and the plain sets not (the kernel ends them in different ways), and be refused as if for another port of a ClusterIP; one
// that was translated, and should be hidden on its way out, would not be.
const grace = 10 * time.Millisecond

// Remove takes out our tables, of both families: what translates packets first, the rest when no such packet is on its way any more;
// see engine.Dataplane.
func (d *Dataplane) Remove(ctx context.Context) error {
	d.forget(0)
	d.loaded, d.last = false, snapshot{}
	var failed error
	there := false
	for _, v6 := range [...]bool{false, true} {
		for _, name := range d.cfg.first() {
			gone, err := d.delete(func(w *writer) { w.deleteChain(name, v6) })
			there, failed = there || gone, errors.Join(failed, err)
		}
	}
	if there {
		select {
		case <-ctx.Done():
		case <-time.After(grace):
		}
	}
	for _, v6 := range [...]bool{false, true} {
		_, err := d.delete(func(w *writer) { w.deleteTable(v6) })
		failed = errors.Join(failed, err)
	}
	return failed
}

// delete makes a transaction of one deletion. What is not there, or can't be, needs none.
func (d *Dataplane) delete(what func(*writer)) (was bool, err error) {
	w := d.writer()
	what(w)
	err = w.commit()
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	return err == nil, err
}
