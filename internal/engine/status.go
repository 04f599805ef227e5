package engine

import (
	"maps"
	"time"
)

// Status is how the engine is doing.
type Status struct {
	Started      time.Time       // when Run began; zero before
	Sources      map[string]bool // whether each has said that it is synced
	Synced       bool            // all of them have, and there is one; before that nothing is written
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
	if s.Synced && s.PendingSince.IsZero() {
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

// ready tells whether every source has told what it had.
func (e *Engine) ready() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.status.Synced
}

// register adds a source. One that comes late stops the writing until it is synced.
func (e *Engine) register(source string) {
	e.update(func(s *Status) {
		s.Sources[source] = s.Sources[source]
		s.Synced = allTrue(s.Sources)
	})
}

func allTrue(m map[string]bool) bool {
	for _, ok := range m {
		if !ok {
			return false
		}
	}
	return true
}
