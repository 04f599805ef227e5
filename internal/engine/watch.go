package engine

import (
	"context"
	"time"

	"k8s.io/klog/v2"
)

// watch lets the dataplane notice foreign changes, if it can. stop ends the watch and waits for its end.
func (e *Engine) watch(ctx context.Context) (stop func()) {
	w, ok := e.config.Dataplane.(Watcher)
	if !ok {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.keepWatching(ctx, w)
	}()
	return func() {
		cancel()
		<-done
	}
}

func (e *Engine) keepWatching(ctx context.Context, w Watcher) {
	for failures := 1; ; failures++ {
		start := time.Now()
		err := w.Watch(ctx, func(what string) {
			e.queue.put(item{kind: aDrift}, func() { e.drifted(what) })
		})
		if ctx.Err() != nil || err == nil {
			return
		}
		if time.Since(start) > e.config.MaxBackoff {
			failures = 1
		}
		wait := e.backoff(failures)
		klog.ErrorS(err, "Can't watch for foreign changes; until then the resync finds them", "retryIn", wait)
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// fights is how many repairs may follow each other without rest; idle time earns them back. Who goes on after that fights us,
// as a second proxy on the node would: then it is one repair each pace.
const fights = 10

// drifted sends everything again: at once, but not faster than the pace when somebody keeps fighting us.
func (e *Engine) drifted(what string) {
	klog.InfoS("Somebody else changed what is ours; putting it right", "what", what)
	e.update(func(s *Status) { s.LastDrift = what })
	for _, o := range e.config.Observers {
		if o, ok := o.(DriftObserver); ok {
			o.Drifted(what)
		}
	}
	if e.pending.Full {
		return // it is about to be
	}
	e.everything()
	if at := e.full.Add(e.fight()); at.After(e.next) {
		e.next = at
	}
}

// fight counts a repair, and tells how long after the last one it is made.
func (e *Engine) fight() time.Duration {
	now := time.Now()
	e.fought = min(max(0, e.fought-now.Sub(e.foughtAt))+pace, (fights+1)*pace)
	e.foughtAt = now
	return max(0, e.fought-fights*pace)
}
