package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
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
	store   store
	track   *tracker
	back    *signal         // given when the API answers again, whichever resource asked
	behind  func(why error) // called when the API server knows less than we do: maybe another one knows more; nil: there is none

	unserved context.CancelCauseFunc // called when the API does not serve the resource; nil takes that for trouble that passes
}

// store is what a reflector fills.
type store interface {
	cache.ReflectorStore
	adrift() // nothing comes from now on, until the next Replace
}

// reflect keeps the store like the API, until ctx ends. It runs the reflector as it would run itself, but its back-off is cut
// short when the API answers again; and when the API went back, the list that is due is not put off, unless it was so shortly before.
func (r *resource) reflect(ctx context.Context) {
	lw := &cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.watch}
	backoff := wait.Backoff{Duration: backoffFirst, Cap: backoffMost, Steps: int(backoffReset / backoffFirst), Factor: 2, Jitter: 1}
	clock := stopClock{ctx: ctx, back: r.back, ahead: &r.track.ahead}
	reflector := cache.NewReflectorWithOptions(lw, r.example, r.store, cache.ReflectorOptions{
		Name: r.name, TypeDescription: r.name, Clock: clock, Backoff: &backoff,
	})
	delay := backoff.DelayWithReset(clock, backoffReset)
	var atOnce time.Time
	for ctx.Err() == nil {
		err := reflector.ListAndWatchWithContext(ctx)
		r.store.adrift()
		switch {
		case errors.Is(err, errListAnew) && time.Since(atOnce) > backoffReset:
			atOnce = time.Now()
			continue
		case trouble(metav1.ListOptions{}, err) != nil:
			r.track.asked(ctx, err) // requests have noted theirs; a list can fail otherwise
		}
		<-clock.After(delay())
	}
}

func (r *resource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	if o.Continue == "" {
		switch err := r.wentBack(ctx, o.ResourceVersion); {
		case errors.Is(err, errWentBack):
			o.ResourceVersion, o.ResourceVersionMatch = "", ""
		case err != nil:
			return nil, err
		}
	}
	return r.get(ctx, o)
}

// watch opens a watch. One that goes on from a version which the API server has yet to come to would be accepted, and then be
// silent until it has: for hours, when the API was restored from a backup. So the server is asked first where it is: a
// request for one object, each time that a watch ends, which is every 5 to 10 minutes (client-go, fixed). A list that must not
// be older than what is known would be refused, and that refusal waited out ten times; so there the server is asked, too.
//
// What that can't see is an API that was restored while we were away for so long that it has come past what we knew. So
// after an outage of longAway everything is listed, as it would be anyway wherever that much has changed.
func (r *resource) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	err := r.wentBack(ctx, o.ResourceVersion)
	back := errors.Is(err, errWentBack)
	switch away := r.track.away(); {
	case ctx.Err() != nil:
		return nil, io.EOF // the one error that the reflector does not log
	case err == nil && o.SendInitialEvents == nil && away >= longAway:
		return nil, fmt.Errorf("%w: the API was away for %s, or is another one", errListAnew, away.Round(time.Second))
	case back && o.SendInitialEvents != nil: // a list: of whatever there is
		o.ResourceVersion = ""
	case back:
		klog.InfoS("The Kubernetes API went back to an older version; listing anew", "resource", r.name, "err", err)
		if r.behind != nil {
			r.behind(err)
		}
		return nil, err
	case err != nil:
		return nil, err
	}
	o.LabelSelector, o.FieldSelector, o.Watch = r.labels, r.fields, true
	w, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Watch(ctx)
	r.asked(ctx, trouble(o, err))
	if ctx.Err() != nil {
		if err == nil {
			w.Stop()
		}
		return nil, io.EOF
	}
	return w, err
}

// What has the reflector list anew.
var (
	errListAnew = errors.New("everything is listed anew")
	errWentBack = fmt.Errorf("the API server knows less than we do; %w", errListAnew)
)

// longAway is an outage in which an API may have been restored from a backup, and gone on.
const longAway = 5 * time.Minute

// wentBack is [errWentBack] when the API server knows less than known, a version that we had from it or from another one.
func (r *resource) wentBack(ctx context.Context, known string) error {
	if versionOf(known) == 0 { // any will do, or it is no number
		return nil
	}
	one, err := r.get(ctx, metav1.ListOptions{Limit: 1}) // without a version: from a majority of etcd, not what the server remembers
	if err != nil {
		return err
	}
	list, err := meta.ListAccessor(one)
	if err != nil {
		return fmt.Errorf("ask for the version of %s: %w", r.name, err)
	}
	now := list.GetResourceVersion()
	if at := versionOf(now); at == 0 || at >= versionOf(known) {
		return nil
	}
	return fmt.Errorf("%w: it is at version %s, we are at %s", errWentBack, now, known)
}

// get asks for a list. One that is answered is no end of trouble: that is when a watch is.
func (r *resource) get(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	o.LabelSelector, o.FieldSelector = r.labels, r.fields
	list, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0).Do(ctx).Get()
	if err := trouble(o, err); err != nil {
		r.asked(ctx, err)
	}
	return list, err
}

// asked notes how a watch went, or that a list failed, and wakes those who wait for the API to answer again.
func (r *resource) asked(ctx context.Context, err error) {
	if r.unserved != nil && isUnserved(err) {
		r.unserved(err)
		return
	}
	if r.track.asked(ctx, err) && r.track.fresh() {
		r.track.ahead.Add(int64(backoffReset + time.Second))
		r.back.give()
	}
}

// trouble is err, or nil for the answers that a reflector knows how to go on from: its version is too old, or the API has
// yet to come to it (it lists anew), or the API server is too old to stream a list (it lists as it did before KEP-3157).
func trouble(o metav1.ListOptions, err error) error {
	if errors.Is(err, errListAnew) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || o.SendInitialEvents != nil && apierrors.IsInvalid(err) {
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
