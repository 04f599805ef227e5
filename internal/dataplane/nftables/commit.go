package nftables

import (
	"context"
	"fmt"
	"slices"

	"fairlead/internal/model"
	"fairlead/internal/shadow"
)

// write brings what differs to the kernel, in one transaction or, when it is much, in several. What is referred to comes
// before what refers to it, and the base chains last: before they are there, no packet meets an unfinished table.
func (d *Dataplane) write(ctx context.Context) error {
	d.loaded = false // until all of it is known to be true
	w := d.writer()
	d.writeBase(w)
	puts, gone := d.chains.Changes()
	plain, based := split(puts, d.rendered)
	d.writeChains(w, plain)
	shapes, oldShapes := d.shapes.Changes()
	for _, s := range shapes {
		writeShape(w, s)
	}
	rest, err := d.writeRows(ctx, w)
	if err != nil {
		return fmt.Errorf("write Services: %w", err)
	}
	facts, oldFacts := d.facts.Changes()
	for _, f := range facts {
		w.put(f.Key.set, f.Key.at.Is6(), element{key: f.Key.key()})
	}
	d.writeChains(w, based)
	for _, f := range oldFacts {
		w.drop(f.Key.set, f.Key.at.Is6(), f.Key.key(), nil)
	}
	for _, s := range oldShapes {
		dropShape(w, s)
	}
	if err := w.commit(); err != nil {
		return fmt.Errorf("write Services: %w", err)
	}
	settle(d.chains, puts)
	settle(d.shapes, shapes, oldShapes)
	settle(d.facts, facts, oldFacts)
	settle(d.rows, rest)
	d.made()
	d.loaded = true
	return d.deleteChains(gone)
}

func settle[O, K comparable, V any](t *shadow.Table[O, K, V], lists ...[]shadow.Row[K, V]) {
	for _, rows := range lists {
		for _, r := range rows {
			t.Settled(r.Key)
		}
	}
}

// writeBase makes the table and the sets where they are missing, and takes out what makes no sense.
func (d *Dataplane) writeBase(w *writer) {
	for _, v6 := range d.cfg.families() {
		b := &d.base[b2i(v6)]
		if b.rebuild {
			w.deleteTable(v6)
		}
		if !b.table || b.rebuild {
			w.table(v6)
		}
		for s := range setsCount {
			if !b.sets[s] {
				w.set(s, v6)
			}
			if b.anything[s] {
				w.dropAnything(s, v6)
			}
		}
		for _, name := range counters {
			if !b.counters[name] {
				w.counter(name, v6)
			}
		}
		for _, s := range b.strays {
			w.drop(s.set, v6, s.key, s.end)
		}
	}
}

// made says that the table and the sets are there now.
func (d *Dataplane) made() {
	for _, v6 := range d.cfg.families() {
		b := &d.base[b2i(v6)]
		*b = base{table: true, counters: map[string]bool{}}
		for s := range setsCount {
			b.sets[s] = true
		}
		for _, name := range counters {
			b.counters[name] = true
		}
	}
}

// split tells base chains from others.
func split(puts []shadow.Row[chainID, sum], rendered map[chainID]chain) (plain, based []chainOf) {
	for _, p := range puts {
		c := chainOf{p.Key.v6, rendered[p.Key]}
		if c.hook == nil {
			plain = append(plain, c)
		} else {
			based = append(based, c)
		}
	}
	return plain, based
}

type chainOf struct {
	v6 bool
	chain
}

// writeChains makes the chains first, then their rules, since those refer to chains.
func (d *Dataplane) writeChains(w *writer, cs []chainOf) {
	for _, c := range cs {
		w.chain(c.name, c.hook, c.v6)
	}
	for _, c := range cs {
		w.fill(c.chain, c.v6)
	}
}

// deleteChains is a transaction of its own, after nothing refers to them any more: kernels before 6.2 hold the references of
// an element that has gone for a moment. If it fails they stay, empty of meaning, until everything is read again.
func (d *Dataplane) deleteChains(gone []shadow.Row[chainID, sum]) error {
	if len(gone) == 0 {
		return nil
	}
	w := d.writer()
	for _, c := range gone {
		w.empty(c.Key.name, c.Key.v6)
	}
	for _, c := range gone {
		w.deleteChain(c.Key.name, c.Key.v6)
	}
	if err := w.commit(); err != nil {
		d.cfg.Log(fmt.Errorf("chains that nothing leads to stay for now: %w", err))
		return nil
	}
	settle(d.chains, gone)
	return nil
}

func writeShape(w *writer, s shadow.Row[shapeID, shape]) {
	dropShape(w, s)
	for _, o := range model.Origins {
		t := s.Val[o]
		w.put(routesOf(o), s.Key.v6, element{key: appendNumber(nil, s.Key.n), verdict: verdictOf(t), comment: t.says()})
	}
}

// dropShape takes out what the kernel holds of it.
func dropShape(w *writer, s shadow.Row[shapeID, shape]) {
	if s.Was == (shape{}) {
		return
	}
	for _, o := range model.Origins {
		w.drop(routesOf(o), s.Key.v6, appendNumber(nil, s.Key.n), nil)
	}
}

func (f fact) key() []byte {
	b := appendAddr(nil, f.at)
	if f.set == setHairpin {
		b = append(b, b...)
	}
	return b
}

// writeRows writes frontends, in parts when there are many: each part is whole frontends. It returns those that wait in w.
func (d *Dataplane) writeRows(ctx context.Context, w *writer) (rest []shadow.Row[model.Key, row], err error) {
	puts, gone := d.rows.Changes()
	whole := d.base[0].rebuild || d.base[1].rebuild
	rest = append(puts, gone...)
	for i, done := 0, 0; i < len(rest); i++ {
		writeRow(w, rest[i], d.fronts[rest[i].Key])
		if whole {
			continue
		}
		committed, err := w.commitIfLarge(ctx)
		if err != nil {
			return nil, err
		}
		if committed {
			d.made()
			settle(d.rows, rest[done:i+1])
			rest, i, done = rest[i+1:], -1, 0
		}
	}
	return rest, nil
}

// writeRow writes what differs of a frontend; f is nil when it goes.
func writeRow(w *writer, r shadow.Row[model.Key, row], f *front) {
	v6 := r.Key.V6()
	key := appendKey(make([]byte, 0, 64), r.Key)
	was, now := r.Was, r.Val
	if was.shape != now.shape || was.about != now.about {
		if was.shape != 0 {
			w.drop(setServices, v6, key, nil)
		}
		if now.shape != 0 {
			w.put(setServices, v6, element{key: key, value: appendNumber(nil, now.shape), comment: string(f.about())})
		}
	}
	size := backendLen(v6)
	if was.endpoints == now.endpoints && was.more == now.more {
		return
	}
	wasIn, nowIn := was.scopes(), now.scopes()
	for scope := range wasIn {
		of := func(s setID) setID { return s + setID(scope) }
		a, b := wasIn[scope], nowIn[scope]
		writeNumbered(w, of(setEndpoints), key, a.endpoints, b.endpoints, size, v6)
		writeNumbered(w, of(setStickyNumbers), key, a.numbers, b.numbers, numberLen, v6)
		writeMembers(w, of(setSticky), key, a.members(size), b.members(size), numberLen+size, v6)
	}
	writeRanges(w, key, was.getMore().allowed, now.getMore().allowed, v6)
}

// writeNumbered writes the packed values whose numbers have another meaning now.
func writeNumbered(w *writer, s setID, key []byte, was, now string, size int, v6 bool) {
	for n := 0; n*size < max(len(was), len(now)); n++ {
		a, b := part(was, n, size), part(now, n, size)
		if a == b {
			continue
		}
		k := appendNumber(key, uint32(n))
		if a != "" {
			w.drop(s, v6, k, nil)
		}
		if b != "" {
			w.put(s, v6, element{key: k, value: []byte(b)})
		}
	}
}

// writeMembers writes which endpoints came and went, by their own numbers.
func writeMembers(w *writer, s setID, key []byte, was, now string, size int, v6 bool) {
	if was == now {
		return
	}
	others(was, size, now, func(m string) { w.drop(s, v6, append(key, m[:numberLen]...), nil) })
	others(now, size, was, func(m string) {
		w.put(s, v6, element{key: append(key, m[:numberLen]...), value: []byte(m[numberLen:])})
	})
}

// writeRanges writes which ranges came and went.
func writeRanges(w *writer, key []byte, was, now string, v6 bool) {
	if was == now {
		return
	}
	n := addrLen(v6)
	ends := func(m string) (first, last []byte) {
		return append(slices.Clone(key), m[:n]...), append(slices.Clone(key), m[n:]...)
	}
	others(was, 2*n, now, func(m string) {
		first, last := ends(m)
		w.drop(setAllowed, v6, first, last)
	})
	others(now, 2*n, was, func(m string) {
		first, last := ends(m)
		w.put(setAllowed, v6, element{key: first, end: last})
	})
}

// others calls f with each packed thing of s that is not in t.
func others(s string, size int, t string, f func(string)) {
	has := map[string]bool{}
	for ; len(t) >= size; t = t[size:] {
		has[t[:size]] = true
	}
	for ; len(s) >= size; s = s[size:] {
		if !has[s[:size]] {
			f(s[:size])
		}
	}
}
