package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// Change says what a running engine should be made of instead. What is left out stays as it is.
type Change struct {
	Dataplane Dataplane // the engine's from the call of Switch on: it is closed when it comes to nothing
	Place     string    // of Dataplane; see Config.Place
	Configure func()    // changes what the resolver goes by. Runs on the engine's goroutine
	Restore   func()    // takes back what Configure did; needed beside a Dataplane, which may fail
	Pace      *Pace
}

// Pace is how often is written. See Config.
type Pace struct{ MinSync, Resync time.Duration }

// switchTime bounds how long a new dataplane is tried. Meanwhile the old one goes on serving, and takes what is news.
const switchTime = 10 * time.Second

// Switch changes what the engine is made of. The old dataplane serves until the new one holds everything; then the new one
// is watched, and the old one's rules are removed. It returns when that was tried: a removal that fails is owed and tried
// again (Status.Leftover), and is no failure of the switch. An error says why the new dataplane can't hold everything; then
// what it wrote is removed, and all is as before. The end of ctx gives the switch up.
//
// While sources are not synced nothing is written: dataplanes change hands at once, and the old one's rules, those of an
// earlier process, are removed after the first success of the new one.
func (e *Engine) Switch(ctx context.Context, c Change) error {
	w := &change{Change: c, ctx: ctx, answer: make(chan error, 1)}
	select {
	case e.changes <- w:
		return <-w.answer
	case <-ctx.Done():
		return errors.Join(ctx.Err(), w.drop())
	case <-e.ended:
		return errors.Join(ErrEnded, w.drop())
	}
}

// Close closes the dataplane that the engine has in the end, and leaves the rules. It is called when Run has returned.
func (e *Engine) Close() error { return e.config.Dataplane.Close() }

// change is a Change that somebody waits for.
type change struct {
	Change
	ctx    context.Context // of who waits
	answer chan error      // one slot
	tries  int
	next   time.Time // when it is tried again
	until  time.Time // when it is given up
}

func (c *change) drop() error {
	if c.Dataplane == nil {
		return nil
	}
	return c.Dataplane.Close()
}

// takes is where changes come in: one after the other.
func (e *Engine) takes() <-chan *change {
	if e.coming != nil {
		return nil
	}
	return e.changes
}

// unwanted fires when nobody waits for the change any more.
func (e *Engine) unwanted() <-chan struct{} {
	if e.coming == nil {
		return nil
	}
	return e.coming.ctx.Done()
}

// begin does a change, or the first try of it.
func (e *Engine) begin(ctx context.Context, c *change) {
	switch {
	case c.Dataplane == nil:
		e.configure(c)
		e.setPace(c)
		c.answer <- nil
	case !e.ready():
		e.configure(c)
		e.install(ctx, c)
		c.answer <- nil
	default:
		e.coming, c.until = c, time.Now().Add(switchTime)
		e.try(ctx)
	}
}

// configure makes the resolver go by something else; the next round brings what that changes.
func (e *Engine) configure(c *change) {
	if c.Configure == nil {
		return
	}
	c.Configure()
	e.told = true
	e.update(func(s *Status) {
		if s.ready() && s.PendingSince.IsZero() {
			s.PendingSince = time.Now()
		}
	})
	e.soon()
}

func (e *Engine) setPace(c *change) {
	if c.Pace != nil {
		e.config.MinSync, e.config.Resync = c.Pace.MinSync, c.Pace.Resync
	}
}

// tryAgain goes on with the change that is under way, if it is time.
func (e *Engine) tryAgain(ctx context.Context) {
	if e.coming != nil && (e.coming.ctx.Err() != nil || !time.Now().Before(e.coming.next)) {
		e.try(ctx)
	}
}

// try lets the new dataplane make everything true, once.
func (e *Engine) try(ctx context.Context) {
	c := e.coming
	err := context.Cause(c.ctx)
	if err == nil {
		c.tries++
		err = e.hand(ctx, c)
	}
	if err == nil {
		e.coming = nil
		c.answer <- nil
		return
	}
	wait := e.backoff(max(c.tries, 1))
	if c.next = time.Now().Add(wait); ctx.Err() != nil || c.ctx.Err() != nil || c.next.After(c.until) {
		e.giveUp(ctx, err)
		return
	}
	klog.ErrorS(err, "Switch: the new dataplane can't hold everything; the old one serves", "to", c.Place, "tries", c.tries, "retryIn", wait)
}

// hand gives everything to the new dataplane, and when it holds it, makes it the one that serves.
func (e *Engine) hand(ctx context.Context, c *change) error {
	e.told = true
	if err := e.gather(ctx); err != nil { // by the old settings: what the old dataplane lacks
		return err
	}
	whole, news := e.wholeBy(c)
	same := c.Place == e.config.Place
	if same { // two that write to one place would take each other for strangers
		e.unwatch()
	}
	start := time.Now()
	if err := c.apply(ctx, whole); err != nil {
		e.takeBack(c, news)
		if same {
			e.unwatch = e.watch(ctx)
			e.everything()
			e.next = time.Time{} // the other one may have written half of it
		}
		return err
	}
	e.pending = whole
	e.succeeded(time.Since(start))
	e.tell()
	e.install(ctx, c)
	return nil
}

// wholeBy resolves everything by the new settings: all that should be true, and what of it the new settings brought.
func (e *Engine) wholeBy(c *change) (whole, news model.Delta) {
	s := e.whole()
	if c.Configure != nil {
		c.Configure()
		news = e.said()
		s.Apply(news)
	}
	whole = s.Full()
	whole.Since = e.pending.Since
	return whole, news
}

// takeBack makes the resolver go by the old settings again.
func (e *Engine) takeBack(c *change, news model.Delta) {
	if c.Configure == nil {
		return
	}
	c.Restore()
	e.pending = e.pending.Then(news).Then(e.said())
}

// apply ends early when nobody waits any more.
func (c *change) apply(ctx context.Context, d model.Delta) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(c.ctx, stop)()
	return c.Dataplane.Apply(ctx, d)
}

// install makes the new dataplane the one that serves, and lets the old one go.
func (e *Engine) install(ctx context.Context, c *change) {
	old, place := e.config.Dataplane, e.config.Place
	e.config.Dataplane, e.config.Place = c.Dataplane, c.Place
	e.setPace(c)
	e.unwatch()
	e.unwatch = e.watch(ctx)
	e.keepPlace()
	e.part(ctx, old, place)
}

// giveUp leaves everything as it was.
func (e *Engine) giveUp(ctx context.Context, err error) {
	c := e.coming
	e.coming = nil
	e.everything() // whatever the other one did, nothing is lost
	e.part(ctx, c.Dataplane, c.Place)
	c.answer <- fmt.Errorf("given up after %d tries, and all is as before: %w", c.tries, err)
}
