// Package events tells people what they should know, as Kubernetes Events and in the log: what is refused to a Service, a
// port that can't be opened, writes that go on failing, somebody else who changes what is fairlead's. Without an API server
// it is the log alone.
//
// What is told is bounded: the same thing is not said again for ten minutes, and a flood is cut, with a line in the log
// that counts what was left out. Metrics count all of it.
package events

import (
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// Recorder posts Kubernetes Events. It must not block. kind is [corev1.EventTypeNormal] or [corev1.EventTypeWarning].
type Recorder interface {
	Event(regarding corev1.ObjectReference, kind, reason, note string)
}

// The reasons of what is told about the node; Starting is kube-proxy's word.
const (
	Starting     = "Starting"
	ApplyFails   = "ApplyFails"   // writes to the kernel go on failing
	ApplyWorks   = "ApplyWorks"   // again, after ApplyFails
	DriftRepair  = "DriftRepair"  // somebody else had changed what is ours
	Switched     = "Switched"     // another mode serves
	ConfigFailed = "ConfigFailed" // a changed configuration can't be used

	ViewStale          = "ViewStale"          // what is known of the cluster is old
	ViewFresh          = "ViewFresh"          // again, after ViewStale
	CertificateExpires = "CertificateExpires" // soon, or has
	CredentialsRefused = "CredentialsRefused" // by the API server
)

const (
	tellAfter   = 3                // failed writes in a row; fewer are a lock that somebody held, or the like
	repeatAfter = 10 * time.Minute // before the same thing is said again
	rememberMax = 4096             // things that are remembered as said
	burst       = 100              // things said at once
	every       = time.Second      // one more, in the long run
)

// Config says to whom it is told.
type Config struct {
	Node     string   // name of this node
	Recorder Recorder // nil is the log alone
}

// Teller is an engine.Observer, also of failures and of drift. Its methods may be called from any goroutine.
type Teller struct {
	c   Config
	now func() time.Time

	mu       sync.Mutex
	said     map[model.Notice]time.Time
	tokens   float64
	filled   time.Time
	left     int // out of a flood
	failures int // in a row
	failing  bool
}

// New makes a teller.
func New(c Config) *Teller {
	return &Teller{c: c, now: time.Now, said: map[model.Notice]time.Time{}, tokens: burst}
}

// Starting tells that fairlead starts.
func (t *Teller) Starting(what string) {
	t.tell(corev1.EventTypeNormal, model.Notice{Reason: Starting, Message: what})
}

// Switched tells that another mode serves.
func (t *Teller) Switched(what string) {
	t.tell(corev1.EventTypeNormal, model.Notice{Reason: Switched, Message: what})
}

// Notices tells what is wrong with Services, or with the node.
func (t *Teller) Notices(ns ...model.Notice) {
	for _, n := range ns {
		t.tell(corev1.EventTypeWarning, n)
	}
}

// Over tells that what was told of is over.
func (t *Teller) Over(n model.Notice) { t.tell(corev1.EventTypeNormal, n) }

// Drifted tells that somebody else had changed what is ours, and that it is put right.
func (t *Teller) Drifted(what string) {
	t.tell(corev1.EventTypeWarning, model.Notice{Reason: DriftRepair, Message: "somebody else changed the rules of fairlead, which puts them right: " + what})
}

// Failed tells of writes that go on failing.
func (t *Teller) Failed(err error, _ model.Delta) {
	t.mu.Lock()
	t.failures++
	tell := t.failures >= tellAfter
	t.failing = t.failing || tell
	t.mu.Unlock()
	if tell {
		t.tell(corev1.EventTypeWarning, model.Notice{Reason: ApplyFails,
			Message: fmt.Sprintf("changes can't be written to the kernel and are tried again: %v", err)})
	}
}

// Applied tells that writes work again, if it was told that they do not.
func (t *Teller) Applied(model.Delta, time.Duration) {
	t.mu.Lock()
	works := t.failing
	t.failures, t.failing = 0, false
	t.mu.Unlock()
	if works {
		t.tell(corev1.EventTypeNormal, model.Notice{Reason: ApplyWorks, Message: "changes are written to the kernel again"})
	}
}

func (t *Teller) tell(kind string, n model.Notice) {
	fresh, left := t.admit(n)
	if !fresh {
		return
	}
	if left > 0 {
		klog.InfoS("There was too much to tell; some was left out (see the metric fairlead_notices_total)", "leftOut", left)
	}
	ref := t.ref(n)
	klog.InfoS(n.Message, "kind", ref.Kind, "namespace", ref.Namespace, "name", ref.Name, "reason", n.Reason)
	if t.c.Recorder != nil {
		t.c.Recorder.Event(ref, kind, n.Reason, n.Message)
	}
}

// admit tells whether n is news and there is room for it, and how many were left out before it for lack of room.
func (t *Teller) admit(n model.Notice) (fresh bool, left int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	if at, ok := t.said[n]; ok && now.Sub(at) < repeatAfter {
		return false, 0
	}
	t.tokens = min(burst, t.tokens+now.Sub(t.filled).Seconds()/every.Seconds())
	t.filled = now
	if t.tokens < 1 {
		t.left++
		return false, 0
	}
	t.tokens--
	if len(t.said) >= rememberMax {
		t.forget(now)
	}
	t.said[n] = now
	left, t.left = t.left, 0
	return true, left
}

// forget drops what may be said again, or all of it: better to repeat oneself than to grow.
func (t *Teller) forget(now time.Time) {
	for n, at := range t.said {
		if now.Sub(at) >= repeatAfter {
			delete(t.said, n)
		}
	}
	if len(t.said) >= rememberMax {
		clear(t.said)
	}
}

// ref names a Service, or the node. The kubelet gives a node's name in place of its UID, and kubectl describe asks for it.
func (t *Teller) ref(n model.Notice) corev1.ObjectReference {
	if n.Service == "" {
		return corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: t.c.Node, UID: types.UID(t.c.Node)}
	}
	r := corev1.ObjectReference{Kind: "Service", APIVersion: "v1", UID: types.UID(n.UID)}
	r.Namespace, r.Name, _ = strings.Cut(n.Service, "/")
	return r
}
