package lab

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Load makes calls at a steady rate until it is stopped.
type Load struct {
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu     sync.Mutex
	report Report
	begun  []trial // when each call began, and how it ended
}

type trial struct {
	at   time.Time
	good bool
}

// Report is what a load saw.
type Report struct {
	Calls    int
	Outcomes map[Outcome]int
	By       map[string]int // answers, by name
	Slowest  time.Duration  // of the answered ones
	Bad      []Answer       // those that did not end as wanted, the first twenty
	BadCount int

	// Gap is the longest time in which calls went wrong: from the beginning of the first to that of the first which was right again.
	Gap time.Duration
}

// String sums the report up in a line or two.
func (r Report) String() string {
	s := fmt.Sprintf("%d calls, %d of them bad; by backend %v; slowest answer %s", r.Calls, r.BadCount, r.By, r.Slowest.Round(time.Millisecond))
	if r.BadCount > 0 {
		s += fmt.Sprintf("; longest gap %s", r.Gap.Round(time.Millisecond))
	}
	for _, a := range r.Bad {
		s += fmt.Sprintf("\n  %s %s -> %s", a.At.Format("15:04:05.000"), a.Local, a)
	}
	return s
}

// LoadWorkers is how many calls a load has in the air at most.
const LoadWorkers = 8

// StartLoad makes calls like c, rate a second, until Stop or the end of the world. want tells which answers are right.
// When all workers are busy the load falls behind; it never piles up.
func (c Call) StartLoad(rate int, want func(Answer) bool) *Load {
	ctx, cancel := context.WithCancel(c.From.world.ctx)
	l := &Load{cancel: cancel, report: Report{Outcomes: map[Outcome]int{}, By: map[string]int{}}}
	calls := make(chan struct{})
	for range LoadWorkers {
		l.done.Go(func() {
			for range calls {
				l.add(c.Do(), want)
			}
		})
	}
	l.done.Go(func() {
		defer close(calls)
		tick := time.NewTicker(time.Second / time.Duration(max(rate, 1)))
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			select {
			case <-ctx.Done():
				return
			case calls <- struct{}{}:
			}
		}
	})
	c.From.running.Go(l.done.Wait)
	return l
}

func (l *Load) add(a Answer, want func(Answer) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, good := &l.report, want(a)
	r.Calls++
	l.begun = append(l.begun, trial{a.At, good})
	r.Outcomes[a.Outcome]++
	if a.Outcome == Answered {
		r.By[a.By]++
		r.Slowest = max(r.Slowest, a.Took)
	}
	if !good {
		r.BadCount++
		if len(r.Bad) < 20 {
			r.Bad = append(r.Bad, a)
		}
	}
}

// Calls counts the calls so far.
func (l *Load) Calls() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.report.Calls
}

// Stop ends the load and reports.
func (l *Load) Stop() Report {
	l.cancel()
	l.done.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.report.Gap = longestGap(l.begun, time.Now())
	return l.report
}

// longestGap is the longest time in which calls went wrong. They end in another order than that in which they began.
func longestGap(calls []trial, end time.Time) (longest time.Duration) {
	slices.SortFunc(calls, func(a, b trial) int { return a.at.Compare(b.at) })
	var since time.Time
	for _, c := range append(calls, trial{end, true}) {
		switch {
		case !c.good && since.IsZero():
			since = c.at
		case c.good && !since.IsZero():
			longest, since = max(longest, c.at.Sub(since)), time.Time{}
		}
	}
	return longest
}
