package engine

import (
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// The times of trying again.
const (
	firstBackoff = 100 * time.Millisecond // after the first failure; doubled by each further one, up to Config.MaxBackoff
	pace         = time.Second            // a change, or a drift, cuts a longer back-off down to this since the last round
	fullAfter    = 3                      // failures; then everything is sent, in case the dataplane and we see it differently
)

// burst is how long the engine may work without rest. After that it rests as long as it works, so that changes which come in a
// flood are taken together and cost half of one CPU at most; a lone change, and a few dozen in a row, are served at once.
const burst = 5 * time.Second

// due tells whether it is time for a round.
func (e *Engine) due() bool {
	at, ok := e.dueAt()
	return ok && !time.Now().Before(at)
}

// dueAt is when the next round is due, if one is.
func (e *Engine) dueAt() (time.Time, bool) {
	if !e.ready() {
		return time.Time{}, false
	}
	if e.told || !e.pending.Empty() {
		return e.next, true
	}
	return e.full.Add(e.config.Resync), e.config.Resync > 0
}

// timer fires when the next round, or something else, is due; nil, which is never, when nothing is.
func (e *Engine) timer() <-chan time.Time {
	at, ok := e.dueAt()
	if left, owed := e.leaveAt(); owed && (!ok || left.Before(at)) {
		at, ok = left, true
	}
	if e.coming != nil && (!ok || e.coming.next.Before(at)) {
		at, ok = e.coming.next, true
	}
	if !ok {
		return nil
	}
	return time.After(time.Until(at))
}

// round applies what is pending, once.
func (e *Engine) round(ctx context.Context) {
	start := time.Now()
	if err := e.gather(ctx); err != nil {
		e.endedWith(ctx, err, time.Since(start))
		return
	}
	if e.config.Resync > 0 && time.Since(e.full) >= e.config.Resync {
		e.everything()
	}
	if e.pending.Empty() {
		e.pending = model.Delta{}
		e.update(func(s *Status) { s.PendingSince = time.Time{} })
		return
	}
	start = time.Now()
	if e.pending.Full {
		e.full = start
	}
	err := e.config.Dataplane.Apply(ctx, e.pending)
	e.endedWith(ctx, err, time.Since(start))
}

func (e *Engine) endedWith(ctx context.Context, err error, took time.Duration) {
	switch {
	case err == nil:
		e.succeeded(took)
	case ctx.Err() != nil: // told to stop in the middle: no failure
	default:
		e.failed(err, took)
	}
}

func (e *Engine) succeeded(took time.Duration) {
	d := e.withGone(e.pending)
	e.pending = model.Delta{}
	e.state.Apply(d)
	e.last, e.failures, e.served, e.unread = time.Now(), 0, true, false
	e.next = e.last.Add(max(e.config.MinSync, e.rest(took)))
	e.update(func(s *Status) {
		s.Rounds++
		s.Generation++
		s.LastSuccess, s.LastError, s.Failures, s.PendingSince = e.last, nil, 0, time.Time{}
	})
	klog.V(2).InfoS("Applied", "full", d.Full, "frontends", len(d.Frontends), "pools", len(d.Pools),
		"goneFrontends", len(d.GoneFrontends), "gonePools", len(d.GonePools), "took", took)
	for _, o := range e.config.Observers {
		o.Applied(d, took)
	}
}

// rest is how long to wait after a round that took so long: nothing, as long as the work done lately is less than burst.
// Idle time pays work off.
func (e *Engine) rest(took time.Duration) time.Duration {
	idle := time.Since(e.rested) - took
	e.debt = max(0, e.debt-idle) + took
	e.rested = time.Now()
	return min(max(0, e.debt-burst), pace)
}

func (e *Engine) failed(err error, took time.Duration) {
	e.failures++
	wait := max(e.config.MinSync, e.backoff(e.failures))
	e.last = time.Now()
	e.next = e.last.Add(wait)
	e.update(func(s *Status) {
		s.Rounds++
		s.Failures, s.LastError = e.failures, err
		if s.PendingSince.IsZero() {
			s.PendingSince = time.Now()
		}
	})
	klog.ErrorS(err, "Apply failed; nothing is lost", "full", e.pending.Full, "failures", e.failures, "took", took, "retryIn", wait)
	for _, o := range e.config.Observers {
		if o, ok := o.(FailureObserver); ok {
			o.Failed(err, e.pending)
		}
	}
	if e.failures >= fullAfter {
		e.everything()
	}
}

// backoff is the wait after so many failures: exponential, less up to a fifth so that nodes do not march in step.
func (e *Engine) backoff(failures int) time.Duration {
	wait := e.config.MaxBackoff
	if shift := failures - 1; shift < 20 {
		wait = min(firstBackoff<<shift, e.config.MaxBackoff)
	}
	return wait - rand.N(wait/5+1)
}

// soon cuts a back-off short because of news: not to nothing, or a flood of changes would make a failing dataplane spin.
func (e *Engine) soon() {
	if at := e.last.Add(max(e.config.MinSync, pace)); at.Before(e.next) {
		e.next = at
	}
}

// everything makes pending Full.
func (e *Engine) everything() {
	if e.pending.Full {
		return
	}
	since := e.pending.Since
	e.pending = e.whole().Full()
	e.pending.Since = since
}

// withGone says in a Full delta what it takes away of the state, so that observers need not remember it themselves.
func (e *Engine) withGone(d model.Delta) model.Delta {
	if !d.Full {
		return d
	}
	next := model.NewState()
	next.Apply(d)
	d.GoneFrontends = gone(e.state.Frontends, next.Frontends)
	d.GonePools = gone(e.state.Pools, next.Pools)
	d.GoneChecks = gone(e.state.Checks, next.Checks)
	return d
}

func gone[K comparable, V any](old, now map[K]V) []K {
	var out []K
	for k := range old {
		if _, ok := now[k]; !ok {
			out = append(out, k)
		}
	}
	return out
}
