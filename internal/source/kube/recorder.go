package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
)

// Limits of the events.k8s.io/v1 API (k8s.io/kubernetes/pkg/apis/core/validation/events.go).
const (
	noteMost = 1024
	wordMost = 128
)

// How much a recorder says.
const (
	controller  = "fairlead"       // reportingController
	action      = "Sync"           // what was being done: bring the node in line with the cluster
	queueMost   = 256              // Events that wait; more are dropped
	heardMost   = 4096             // Events that are remembered as said
	repeatAfter = 10 * time.Minute // the same Event is not posted again sooner
	postRate    = 1                // Events a second, in the long run
	postBurst   = 25               // and at once (client-go's broadcaster, per object)
	postTries   = 5                // before one is given up that the API answers with an error: 1, 2, 4, 8 seconds apart
	postAgain   = 30               // times the first pause is the longest one, while the API is away
)

// Recorder posts Kubernetes Events (events.k8s.io/v1). It never blocks: an Event that was just said, or that finds the
// queue full, is counted and forgotten. What can't be posted because the API is away waits until it is back, however long that
// takes, and says then when it happened: an outage is among the things to be told of.
type Recorder struct {
	client   rest.Interface
	instance string // reportingInstance
	limit    flowcontrol.RateLimiter
	queue    chan *eventsv1.Event
	first    time.Duration // wait before the second try

	mu   sync.Mutex
	said map[string]time.Time

	posted, repeated, dropped atomic.Uint64
}

// Recorded counts what became of the Events.
type Recorded struct {
	Posted   uint64
	Repeated uint64 // said within the last minutes
	Dropped  uint64 // the queue was full, or the API would not have it
}

// Recorder makes a recorder on the connection of the source. instance is the name of this node.
func (s *Source) Recorder(instance string) *Recorder {
	return &Recorder{
		client: s.events, instance: instance, limit: flowcontrol.NewTokenBucketRateLimiter(postRate, postBurst),
		queue: make(chan *eventsv1.Event, queueMost), first: time.Second, said: map[string]time.Time{},
	}
}

// NodeRef names a node as the kubelet does in its Events: kubectl describe node asks for the name in place of the UID.
func NodeRef(name string) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: name, UID: types.UID(name)}
}

// ServiceRef names a Service. Without its UID kubectl describe does not find the Event, kubectl get events does.
func ServiceRef(name types.NamespacedName, uid types.UID) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: name.Namespace, Name: name.Name, UID: uid}
}

// Event says one thing about an object. kind is [corev1.EventTypeNormal] or [corev1.EventTypeWarning], reason a CamelCase
// word, note a sentence. Run posts it.
func (r *Recorder) Event(regarding corev1.ObjectReference, kind, reason, note string) {
	now := time.Now()
	note, reason = cut(note, noteMost), cut(reason, wordMost)
	what := strings.Join([]string{regarding.Kind, regarding.Namespace, regarding.Name, kind, reason, note}, "\x00")
	if !r.news(what, now) {
		r.repeated.Add(1)
		return
	}
	space := regarding.Namespace
	if space == "" {
		space = metav1.NamespaceDefault // where Events about what has no namespace live
	}
	e := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: space, Name: fmt.Sprintf("%s.%016x", cut(regarding.Name, 200), rand.Uint64())},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: controller, ReportingInstance: cut(controller+"-"+r.instance, wordMost),
		Action: action, Reason: reason, Regarding: regarding, Note: note, Type: kind,
	}
	select {
	case r.queue <- e:
	default:
		r.dropped.Add(1)
		r.forget(what) // it was not said after all
	}
}

func (r *Recorder) forget(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.said, what)
}

// news tells whether what was not said lately, and notes that it is said now.
func (r *Recorder) news(what string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, ok := r.said[what]; ok && now.Sub(at) < repeatAfter {
		return false
	}
	if len(r.said) >= heardMost {
		for k, at := range r.said {
			if now.Sub(at) >= repeatAfter {
				delete(r.said, k)
			}
		}
	}
	if len(r.said) < heardMost { // else a flood of different ones: the queue bounds it
		r.said[what] = now
	}
	return true
}

// Run posts, until ctx ends. What is still queued then is lost.
func (r *Recorder) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-r.queue:
			if err := r.post(ctx, e); err != nil && ctx.Err() == nil {
				r.dropped.Add(1)
				klog.InfoS("An Event could not be posted", "regarding", e.Regarding.Kind+" "+e.Regarding.Namespace+"/"+e.Regarding.Name,
					"reason", e.Reason, "note", e.Note, "err", oneLine(err))
			}
		}
	}
}

func (r *Recorder) post(ctx context.Context, e *eventsv1.Event) error {
	tries := 0
	for pause := r.first; ; pause = min(2*pause, postAgain*r.first) {
		if err := r.limit.Wait(ctx); err != nil {
			return err
		}
		err := r.client.Post().Namespace(e.Namespace).Resource("events").Body(e).Do(ctx).Error()
		if err == nil || apierrors.IsAlreadyExists(err) { // a try before this one came through
			r.posted.Add(1)
			return nil
		}
		if !away(err) {
			tries++
		}
		if tries == postTries || refused(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause + rand.N(pause)): // when the API is back, all nodes have something to tell
		}
	}
}

// away tells whether the API can't be asked at all now: it does not answer, or what stands before it does in its place, or it
// does not know us. It says nothing about the Event.
func away(err error) bool {
	var unanswered *url.Error
	var answer apierrors.APIStatus
	if !errors.As(err, &answer) {
		return errors.As(err, &unanswered)
	}
	switch answer.Status().Code {
	case http.StatusUnauthorized, http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// refused tells whether another try is in vain: the API understood, and said no.
func refused(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) || apierrors.IsBadRequest(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}

// Recorded tells what became of the Events until now.
func (r *Recorder) Recorded() Recorded {
	return Recorded{Posted: r.posted.Load(), Repeated: r.repeated.Load(), Dropped: r.dropped.Load()}
}

// cut shortens s to at most n bytes, at a rune.
func cut(s string, n int) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
