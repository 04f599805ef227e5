// Package conntrack cleans the kernel's connection tracking table after a change of the rules. A flow of UDP has no end
// that the kernel could see, and an entry of the table is stronger than any rule: a client that never pauses would be sent
// to a pod that is gone for ever. So entries are deleted that lead where the rules no longer lead, and the flow's next
// packet meets the new rules. The same is done for SCTP. TCP is never touched: its flows end by themselves.
//
// An entry (of zone 0) is deleted when
//
//   - it was sent to a frontend, and who answers is neither a backend nor a draining backend of any of the frontend's
//     pools: a pod that is gone, or the frontend's own address, when the flow passed by before there were rules for it;
//   - it was sent to a frontend that was taken away, and was translated.
//
// A NodePort's frontend is meant by the node's own addresses that take NodePorts, and by no others. All other entries stay
// as they are.
//
// Nothing is read when no UDP or SCTP frontend or pool changed in a way that matters; otherwise the table is read once
// for each family and protocol concerned, and once more a second later. A round that fails is owed and tried again.
package conntrack

import (
	"errors"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

const (
	// secondLook is when the table is read once more. A packet may be inside the old rules while they are replaced, or be
	// held after them by a program (NFQUEUE), and become an entry after the first look.
	secondLook = time.Second

	firstRetry = 100 * time.Millisecond // doubled at each failure
	lastRetry  = 30 * time.Second
)

// Round is one reading of the table.
type Round struct {
	V6      bool
	Proto   model.Proto
	Took    time.Duration
	Deleted int
	Err     error // the round is owed
}

// Config are the surroundings of a Cleaner. Its zero value is right in production.
type Config struct {
	Open   func() (*kernel.Conntrack, error) // nil is the table of the program's own network namespace
	Report func(Round)                       // called from the Cleaner's goroutine; may be nil
}

// Cleaner is an engine.Observer.
type Cleaner struct {
	config Config

	mu      sync.Mutex
	pending []model.Delta // told, not yet in the view. One by one: joined, a Full one would forget what is gone

	wake       chan struct{}
	stop, done chan struct{}
	closing    sync.Once

	// Of the goroutine alone:
	view   *view
	fresh  work // owed
	second work // owed, and looked at before
	seen   work // to be looked at once more, soon
	failed bool
}

// New starts a Cleaner.
func New(c Config) *Cleaner {
	if c.Open == nil {
		c.Open = kernel.OpenConntrack
	}
	if c.Report == nil {
		c.Report = func(Round) {}
	}
	cl := &Cleaner{config: c, view: newView(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	go cl.run()
	return cl
}

// Applied takes what became true. It costs the size of d and returns before the table is read. The first delta after a
// start is Full, and lists as gone what the rules of the previous run had; so the first round looks at everything.
func (c *Cleaner) Applied(d model.Delta, _ time.Duration) {
	d = tracked(d)
	if d.Empty() {
		return
	}
	c.mu.Lock()
	c.pending = append(c.pending, d)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Close tries once more what is owed, and ends the Cleaner. What it is told afterwards, it ignores.
func (c *Cleaner) Close() {
	c.closing.Do(func() { close(c.stop) })
	<-c.done
}

func (c *Cleaner) run() {
	defer close(c.done)
	retry, again := stoppedTimer(), stoppedTimer()
	defer retry.Stop()
	defer again.Stop()
	wait, stopping := firstRetry, false
	for !stopping {
		select {
		case <-c.stop:
			stopping = true
		case <-c.wake:
		case <-retry.C:
		case <-again.C:
			c.second.add(c.seen)
			c.seen = work{}
		}
		c.take()
		if c.fresh.empty() && c.second.empty() {
			continue
		}
		if err := c.clean(); err != nil {
			retry.Reset(wait)
			wait = min(2*wait, lastRetry)
			continue
		}
		wait = firstRetry
		retry.Stop()
		if !c.fresh.empty() && c.seen.empty() {
			again.Reset(secondLook)
		}
		c.seen.add(c.fresh)
		c.fresh, c.second = work{}, work{}
	}
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// take brings the view up to date.
func (c *Cleaner) take() {
	c.mu.Lock()
	told := c.pending
	c.pending = nil
	c.mu.Unlock()
	for _, d := range told {
		c.fresh.add(c.view.apply(d))
	}
}

// clean looks at all that is owed. It logs when failing begins and when it ends, not in between.
func (c *Cleaner) clean() error {
	var owed work
	owed.add(c.fresh)
	owed.add(c.second)
	table, err := c.config.Open()
	if err == nil {
		defer table.Close()
	}
	for k := range owed.kinds {
		r := Round{V6: k.V6, Proto: k.Proto, Err: err}
		if table != nil {
			r = c.round(table, k, owed.gone)
			err = errors.Join(err, r.Err)
		}
		c.config.Report(r)
	}
	if failed := err != nil; failed != c.failed {
		c.failed = failed
		if failed {
			klog.ErrorS(err, "Clean-up of stale conntrack entries failed; it is owed and tried again")
		} else {
			klog.InfoS("Clean-up of stale conntrack entries works again")
		}
	}
	return err
}

// round reads one kind of entries and deletes the stale ones.
func (c *Cleaner) round(table *kernel.Conntrack, k kind, gone map[model.Key]bool) Round {
	r := Round{V6: k.V6, Proto: k.Proto}
	start := time.Now()
	var refused error
	r.Err = table.Flows(k.V6, uint8(k.Proto), func(f kernel.Flow) {
		if !c.view.stale(f, gone) {
			return
		}
		deleted, err := table.Delete(f)
		if deleted {
			r.Deleted++
		}
		if err != nil { // one that can't be deleted does not save the others, and one error tells enough
			refused = err
		}
	})
	r.Err = errors.Join(r.Err, refused)
	r.Took = time.Since(start)
	if r.Deleted > 0 {
		klog.V(4).InfoS("Deleted stale conntrack entries", "protocol", k.Proto, "ipv6", k.V6, "entries", r.Deleted, "took", r.Took)
	}
	return r
}
