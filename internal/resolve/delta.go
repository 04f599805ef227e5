package resolve

import (
	"slices"
	"time"

	"fairlead/internal/model"
)

// Delta resolves what was marked and gives what changed by it, in an order that depends on nothing but the objects. The
// first one, and the first after MarkAll, is Full.
func (r *Resolver) Delta() model.Delta {
	d := model.Delta{Full: r.full}
	slices.SortFunc(r.dirty, compareNames)
	if r.full {
		d.Frontends, d.Pools = make([]model.Frontend, 0, len(r.dirty)), make([]model.Pool, 0, len(r.dirty))
	}
	for _, s := range r.dirty {
		r.renew(&d, s)
	}
	r.board.settle("", nodeNotices(r.config, r.cidrs))
	if r.full || !equalNodes(r.node, r.here.node) {
		node := r.here.node
		r.node, d.Node = node, &node
	}
	d.GoneFrontends = moved(d.GoneFrontends, d.Frontends)
	r.dirty, r.full = nil, false
	r.stats.ServicesPending, r.stats.SlicesPending = 0, 0
	if len(r.since) > 0 {
		r.since = map[*service][]time.Time{} // to clear a map costs as much as it was large once
	}
	return d
}

// renew resolves one Service and writes down what differs from what was emitted for it before.
func (r *Resolver) renew(d *model.Delta, s *service) {
	old := s.rows
	now, notices := r.here.resolve(s, &r.claims)
	r.board.settle(s.name, notices)
	s.dirty = 0
	if keep(old, &now, d, s.name) {
		d.Since = append(d.Since, r.since[s]...)
	}
	r.stats.NoLocal.add(old.noLocal, -1)
	r.stats.NoLocal.add(now.noLocal, 1)
	s.rows = now
	if s.facts == nil && len(s.slices) == 0 {
		delete(r.services, s.name)
	}
}

// keep writes down how rows differ, and tells whether they do. Rows that are equal keep their old memory, so that what the
// engine holds and what is held here stay one thing.
func keep(old rows, now *rows, d *model.Delta, service string) bool {
	before := size(d)
	diff(old.fronts, now.fronts, d.Full, differ[front]{
		compare: func(a, b front) int { return a.key.Compare(b.key) },
		equal:   equalFronts,
		set:     func(f front) { d.Frontends = append(d.Frontends, f.frontend(service)) },
		gone:    func(f front) { d.GoneFrontends = append(d.GoneFrontends, f.key) },
	})
	diff(old.pools, now.pools, d.Full, differ[model.Pool]{
		compare: func(a, b model.Pool) int { return a.ID.Compare(b.ID) },
		equal:   equalPools,
		set:     func(p model.Pool) { d.Pools = append(d.Pools, p) },
		gone:    func(p model.Pool) { d.GonePools = append(d.GonePools, p.ID) },
	})
	switch {
	case now.check != nil && (d.Full || old.check == nil || *now.check != *old.check):
		d.Checks = append(d.Checks, *now.check)
	case now.check == nil && old.check != nil && !d.Full:
		d.GoneChecks = append(d.GoneChecks, service)
	}
	return before != size(d)
}

func size(d *model.Delta) int {
	return len(d.Frontends) + len(d.GoneFrontends) + len(d.Pools) + len(d.GonePools) + len(d.Checks) + len(d.GoneChecks)
}

// differ says how rows of one sort are compared, and what becomes of differences.
type differ[V any] struct {
	compare   func(a, b V) int // of their keys
	equal     func(a, b V) bool
	set, gone func(V)
}

// diff walks two sorted lists. In now, a row that is equal to the old one is replaced by it. If full, all of now is set and
// nothing is gone.
func diff[V any](old, now []V, full bool, by differ[V]) {
	i := 0
	gone := func() {
		if !full {
			by.gone(old[i])
		}
		i++
	}
	for j := range now {
		for i < len(old) && by.compare(old[i], now[j]) < 0 {
			gone()
		}
		same := false
		if i < len(old) && by.compare(old[i], now[j]) == 0 {
			if same = by.equal(old[i], now[j]); same {
				now[j] = old[i]
			}
			i++
		}
		if full || !same {
			by.set(now[j])
		}
	}
	for i < len(old) {
		gone()
	}
}

// moved drops from gone what another Service has set: a key that changes hands is not gone.
func moved(gone []model.Key, set []model.Frontend) []model.Key {
	if len(gone) == 0 || len(set) == 0 {
		return gone
	}
	has := make(map[model.Key]bool, len(set))
	for _, f := range set {
		has[f.Key] = true
	}
	gone = slices.DeleteFunc(gone, func(k model.Key) bool { return has[k] })
	if len(gone) == 0 {
		return nil
	}
	return gone
}

func equalFronts(a, b front) bool {
	return a.key == b.key && a.port == b.port && a.routes == b.routes && a.kind == b.kind &&
		(a.allow == nil) == (b.allow == nil) && slices.Equal(a.allow, b.allow)
}

func equalPools(a, b model.Pool) bool {
	return a.ID == b.ID && a.Sticky == b.Sticky && slices.Equal(a.Backends, b.Backends) && slices.Equal(a.Draining, b.Draining)
}
