package engine

import (
	"context"
	"fmt"
	"slices"

	"fairlead/internal/model"
)

// While a source only presumes what there is, the kernel may know better: what it holds was the truth until the process before
// ended. So what the resolver names is served, and what it does not name, or names as gone or empty, stays as it is. What the
// resolver says is kept beside it (Engine.truth); when all sources are synced, that is applied as everything there is, and
// observers hear what it takes away.

// said is what the resolver has to say; while sources presume, without what would take something away.
func (e *Engine) said() model.Delta {
	d := e.config.Resolver.Delta()
	if e.truth == nil {
		return d
	}
	e.truth.Apply(d)
	return e.spare(d)
}

// spare leaves out of a delta what would take away something that is served.
func (e *Engine) spare(d model.Delta) model.Delta {
	d.GoneFrontends = without(d.GoneFrontends, e.state.Frontends)
	d.GonePools = without(d.GonePools, e.state.Pools)
	d.GoneChecks = without(d.GoneChecks, e.state.Checks)
	d.Pools = slices.Clone(d.Pools)
	for i, p := range d.Pools {
		if old := e.state.Pools[p.ID]; len(p.Backends) == 0 && len(old.Backends) > 0 { // its slices may just not have been told yet
			old.Sticky = p.Sticky
			d.Pools[i] = old
		}
	}
	return d
}

func without[K comparable, V any](keys []K, held map[K]V) []K {
	return slices.DeleteFunc(slices.Clone(keys), func(k K) bool { _, ok := held[k]; return ok })
}

// look reads what the kernel holds, when that failed at the start and nothing of it may be taken away.
func (e *Engine) look(ctx context.Context) error {
	if e.truth == nil || !e.unread {
		return nil
	}
	if err := e.load(ctx); err != nil {
		return fmt.Errorf("read what the kernel holds: %w", err)
	}
	return nil
}

// whole is everything that should be true, what is pending included.
func (e *Engine) whole() *model.State {
	s := e.state.Clone()
	s.Apply(e.pending)
	return s
}

// presume goes over to keeping the truth apart, when sources presume; and back to it, when they know.
func (e *Engine) presume() {
	switch s := e.Status(); {
	case e.truth == nil && s.Presumed:
		e.truth = e.whole()
	case e.truth != nil && s.Synced:
		since := e.pending.Since
		e.pending = e.truth.Full()
		e.pending.Since = since
		e.truth = nil
	}
}

// hold lists in a Full delta what it must not take away.
func (e *Engine) hold() {
	if e.truth != nil && e.pending.Full {
		e.pending.Full = false
		e.everything()
	}
}
