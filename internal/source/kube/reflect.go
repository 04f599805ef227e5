package kube

import (
	"context"
	"io"
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
}

// reflect keeps the store like the API, until ctx ends.
func (r *resource) reflect(ctx context.Context) {
	lw := &cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.watch}
	backoff := wait.Backoff{Duration: backoffFirst, Cap: backoffMost, Steps: int(backoffReset / backoffFirst), Factor: 2, Jitter: 1}
	cache.NewReflectorWithOptions(lw, r.example, r.store, cache.ReflectorOptions{
		Name: r.name, TypeDescription: r.name, Clock: stopClock{ctx: ctx}, Backoff: &backoff,
	}).RunWithContext(ctx)
}

func (r *resource) list(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	o.LabelSelector, o.FieldSelector = r.labels, r.fields
	list, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).Do(ctx).Get()
	r.track.asked(ctx, trouble(o, err))
	return list, err
}

func (r *resource) watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.LabelSelector, o.FieldSelector, o.Watch = r.labels, r.fields, true
	w, err := r.client.Get().Resource(r.name).VersionedParams(&o, metav1.ParameterCodec).Watch(ctx)
	r.track.asked(ctx, trouble(o, err))
	if ctx.Err() != nil {
		return nil, io.EOF // the one error that the reflector does not log
	}
	return w, err
}

// trouble is err, or nil for the answers that a reflector knows how to go on from: its version is too old (it lists anew),
// or the API server is too old to stream a list (it lists as it did before KEP-3157).
func trouble(o metav1.ListOptions, err error) error {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || o.SendInitialEvents != nil && apierrors.IsInvalid(err) {
		return nil
	}
	return err
}

// stopClock is the wall clock, but nobody waits past the end of ctx: client-go's reflector sits out its back-off before
// it looks whether it should stop.
type stopClock struct {
	clock.RealClock
	ctx context.Context
}

// After is like time.After, and fires early when ctx ends.
func (c stopClock) After(d time.Duration) <-chan time.Time {
	fired := make(chan time.Time, 2) // room for both: neither ever blocks
	stop := context.AfterFunc(c.ctx, func() { fired <- time.Now() })
	time.AfterFunc(d, func() { stop(); fired <- time.Now() })
	return fired
}
