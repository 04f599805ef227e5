package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
)

// leaver is a dataplane that serves no more, and whose rules are to be removed.
type leaver struct {
	Dataplane
	place    string
	failures int
	problem  string
	next     time.Time // when it is tried again
}

// lastWish bounds the last try to remove rules when the engine ends.
const lastWish = time.Second

// part lets a dataplane go: its rules are removed, now or as soon as it can be, unless the one that serves writes to the same
// place.
func (e *Engine) part(ctx context.Context, d Dataplane, place string) {
	if place == e.config.Place {
		closed(d, place)
		return
	}
	e.leaving = append(e.leaving, &leaver{Dataplane: d, place: place})
	e.leave(ctx)
}

// leave removes the rules of dataplanes that serve no more: never before another serves.
func (e *Engine) leave(ctx context.Context) {
	if !e.served || len(e.leaving) == 0 {
		return
	}
	e.leaving = slices.DeleteFunc(e.leaving, func(l *leaver) bool {
		return !time.Now().Before(l.next) && ctx.Err() == nil && e.remove(ctx, l)
	})
	e.noteLeavers()
}

// remove tells whether nothing is left.
func (e *Engine) remove(ctx context.Context, l *leaver) bool {
	start := time.Now()
	if err := l.Remove(ctx); err != nil {
		l.failures++
		wait := e.backoff(l.failures)
		l.next, l.problem = time.Now().Add(wait), err.Error()
		klog.ErrorS(err, "Can't remove what a dataplane left that serves no more", "dataplane", l.place, "failures", l.failures, "retryIn", wait)
		return false
	}
	klog.InfoS("Removed what a dataplane left that serves no more", "dataplane", l.place, "took", time.Since(start))
	closed(l.Dataplane, l.place)
	return true
}

// keepPlace strikes off who would remove what the present dataplane has written.
func (e *Engine) keepPlace() {
	e.leaving = slices.DeleteFunc(e.leaving, func(l *leaver) bool {
		if l.place != e.config.Place {
			return false
		}
		closed(l.Dataplane, l.place)
		return true
	})
	e.noteLeavers()
}

// noteLeavers says in the status what is owed.
func (e *Engine) noteLeavers() {
	var owed []error
	for _, l := range e.leaving {
		if l.problem != "" {
			owed = append(owed, fmt.Errorf("%s: %s", l.place, l.problem))
		}
	}
	e.update(func(s *Status) {
		s.Leftover = ""
		if err := errors.Join(owed...); err != nil {
			s.Leftover = err.Error()
		}
	})
}

// leaveAt is when the next removal is due, if one is.
func (e *Engine) leaveAt() (at time.Time, ok bool) {
	for _, l := range e.leaving {
		if e.served && (!ok || l.next.Before(at)) {
			at, ok = l.next, true
		}
	}
	return at, ok
}

// end lets go of everything but the dataplane that serves. What is owed is tried once more.
func (e *Engine) end(ctx context.Context) {
	e.unwatch()
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), lastWish)
	defer stop()
	if e.coming != nil {
		e.giveUp(ctx, ErrEnded)
	}
	for _, l := range e.leaving {
		l.next = time.Time{}
	}
	e.leave(ctx)
	for _, l := range e.leaving {
		closed(l.Dataplane, l.place)
	}
}

func closed(d Dataplane, place string) {
	if err := d.Close(); err != nil {
		klog.ErrorS(err, "Close a dataplane that serves no more", "dataplane", place)
	}
}
