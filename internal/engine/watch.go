package engine

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
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

// drifted puts it right: the dataplane by itself where it can, else everything is sent again, at once, but not faster than the pace when somebody keeps fighting us.
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
	wait := e.fight()
	if wait == 0 && e.mended() {
		return
	}
	e.everything()
	if at := e.full.Add(wait); at.After(e.next) {
		e.next = at
	}
}

// mended tells whether the dataplane has put it right by itself. Observers hear of it as of any change: while a frontend was not
// there, flows may have begun that conntrack should forget.
func (e *Engine) mended() bool {
	m, ok := e.config.Dataplane.(Mender)
	if !ok || !e.pending.Empty() {
		return false
	}
	start := time.Now()
	keys, err := m.Mend()
	if err != nil {
		klog.V(2).InfoS("Everything is applied again", "why", err)
		return false
	}
	var d model.Delta
	pools := map[model.PoolID]bool{}
	for _, k := range keys {
		f, ok := e.state.Frontends[k]
		if !ok {
			continue
		}
		d.Frontends = append(d.Frontends, f)
		for _, r := range f.Routes {
			if p, ok := e.state.Pools[r.Pool]; ok && !pools[r.Pool] {
				pools[r.Pool] = true
				d.Pools = append(d.Pools, p)
			}
		}
	}
	took := time.Since(start)
	klog.V(2).InfoS("Put right", "frontends", len(d.Frontends), "took", took)
	for _, o := range e.config.Observers {
		o.Applied(d, took)
	}
	return true
}

// fight counts a repair, and tells how long after the last one it is made.
func (e *Engine) fight() time.Duration {
	now := time.Now()
	e.fought = min(max(0, e.fought-now.Sub(e.foughtAt))+pace, (fights+1)*pace)
	e.foughtAt = now
	return max(0, e.fought-fights*pace)
}
