package engine

import (
	"maps"
	"time"

	"k8s.io/klog/v2"
)

// Status is how the engine is doing.
type Status struct {
	Started      time.Time       // when Run began; zero before
	Sources      map[string]bool // whether each has said that it is synced
	Synced       bool            // all of them have, and there is one; before that nothing is written, unless Presumed
	Presumed     bool            // all of them have said what there was, and one at least only what it presumes: served by it, nothing taken away
	LastQueued   time.Time       // when a source last told something
	PendingSince time.Time       // when the oldest change that is not in the kernel yet came; zero when there is none. What came before Synced counts from then
	LastSuccess  time.Time       // when the dataplane last did what it was asked; zero when never
	LastError    error           // of the last round; nil after a success
	LastDrift    string          // what somebody else last changed of ours
	Leftover     string          // what dataplanes that serve no more have left, and why it can't be removed yet; empty when there is nothing
	Failures     int             // failed rounds since the last success
	Rounds       uint64          // times that the dataplane was asked
	Generation   uint64          // times that it did as asked: the age of the state
}

// Status tells how the engine is doing. It may be called from any goroutine, whatever the engine is busy with.
func (e *Engine) Status() Status {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.status
	s.Sources = maps.Clone(e.status.Sources)
	since, last := e.queue.times()
	s.LastQueued = last
	if s.ready() && s.PendingSince.IsZero() {
		s.PendingSince = since
	}
	return s
}

// update changes the status.
func (e *Engine) update(change func(*Status)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.status)
}

// ready tells whether it is time to write.
func (s Status) ready() bool { return s.Synced || s.Presumed }

// ready tells whether it is time to write.
func (e *Engine) ready() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.status.ready()
}

// knowledge is how well a source knows what there is.
type knowledge uint8

const (
	nothing  knowledge = iota
	presumed           // what was true when it was last known
	synced             // the truth
)

// register adds a source. One that comes late stops the writing until it has told what there is.
func (e *Engine) register(source string) {
	e.update(func(s *Status) { e.know(s, source, nothing) })
}

// heard notes that a source has told all that it knows so far.
func (e *Engine) heard(source string, k knowledge) {
	e.update(func(s *Status) {
		before := *s
		switch e.know(s, source, k); {
		case s.Synced && !before.Synced:
			klog.InfoS("All sources are synced")
		case s.Presumed && !before.Presumed:
			klog.InfoS("Not all sources are synced; serving what was true when it was last known, and taking nothing away")
		}
	})
}

// know takes note of what a source knows. It can't know less than before.
func (e *Engine) know(s *Status, source string, k knowledge) {
	e.known[source] = max(e.known[source], k)
	least := synced
	for _, k := range e.known {
		least = min(least, k)
	}
	s.Sources[source] = e.known[source] == synced
	s.Synced, s.Presumed = least == synced, least == presumed
}
