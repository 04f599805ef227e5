package kube

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// Back-off of a reflector. client-go's own goes to 30 s, which with its jitter is a minute in which a node that lost the
// API does not hear that it is back; half of that is still kind to an API server that comes up under all of its nodes.
const (
	backoffFirst = 800 * time.Millisecond
	backoffMost  = 15 * time.Second // and as much again, at random
	backoffReset = 2 * time.Minute  // a watch that lived so long starts over (client-go, fixed)
)

// resource is one kind of object that is listed and watched.
type resource struct {
	client  rest.Interface
	name    string // plural, as in the URL
	labels  string // selectors; empty is everything
	fields  string
	example runtime.Object
	store   cache.ReflectorStore
	track   *tracker
	back    *signal // given when the API answers again, whichever resource asked

	unserved context.CancelCauseFunc // called when the API does not serve the resource; nil takes that for trouble that passes
}

// reflect keeps the store like the API, until ctx ends.
func (r *resource) reflect(ctx context.Context) {
	lw := &cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.watch}
	backoff := wait.Backoff{Duration: backoffFirst, Cap: backoffMost, Steps: int(backoffReset / backoffFirst), Factor: 2, Jitter: 1}
	cache.NewReflectorWithOptions(lw, r.example, r.store, cache.ReflectorOptions{
		Name: r.name, TypeDescription: r.name, Clock: stopClock{ctx: ctx, back: r.back, ahead: &r.track.ahead}, Backoff: &backoff,
	}).RunWithContext(ctx)
}

func (r *resource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	o.LabelSelector, o.FieldSelector = r.labels, r.fields
	list, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).Do(ctx).Get()
	r.asked(ctx, trouble(o, err))
	return list, err
}

func (r *resource) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.LabelSelector, o.FieldSelector, o.Watch = r.labels, r.fields, true
	w, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).Watch(ctx)
	r.asked(ctx, trouble(o, err))
	if ctx.Err() != nil {
		if err == nil {
			w.Stop()
		}
		return nil, io.EOF // the one error that the reflector does not log
	}
	return w, err
}

// asked notes how a request went, and wakes those who wait for the API to answer again.
func (r *resource) asked(ctx context.Context, err error) {
	if r.unserved != nil && isUnserved(err) {
		r.unserved(err)
		return
	}
	if r.track.asked(ctx, err) {
		r.track.ahead.Add(int64(backoffReset + time.Second))
		r.back.give()
	}
}

// trouble is err, or nil for the answers that a reflector knows how to go on from: its version is too old (it lists anew),
// or the API server is too old to stream a list (it lists as it did before KEP-3157).
func trouble(o metav1.ListOptions, err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || o.SendInitialEvents != nil && apierrors.IsInvalid(err) {
		return nil
	}
	return err
}

// stopClock is the wall clock, but nobody waits past the end of ctx (client-go's reflector sits out its back-off before it
// looks whether it should stop), nor when the API answers again. It is put ahead then, so that the back-off starts over: the
// first answer after a restart of the API server is that a version is too old, and the list that is due would wait as long
// as the last of many failures.
type stopClock struct {
	clock.RealClock
	ctx   context.Context
	back  *signal
	ahead *atomic.Int64 // nanoseconds
}

// Now is the time by this clock.
func (c stopClock) Now() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) }

// Since is how long ago t was by this clock.
func (c stopClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// After is like time.After, and fires early when ctx ends, or the API answers again.
func (c stopClock) After(d time.Duration) <-chan time.Time {
	fired := make(chan time.Time, 1)
	back := c.back.next()
	go func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-back:
		case <-c.ctx.Done():
		}
		fired <- time.Now()
	}()
	return fired
}

// signal wakes all who wait for it, each time it is given.
type signal struct {
	mu sync.Mutex
	ch chan struct{}
}

func newSignal() *signal { return &signal{ch: make(chan struct{})} }

// next is closed when the signal is given next.
func (s *signal) next() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ch
}

func (s *signal) give() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.ch)
	s.ch = make(chan struct{})
}
