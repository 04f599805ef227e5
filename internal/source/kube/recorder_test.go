package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
)

// record runs a recorder for the time of the test.
func record(t *testing.T, r *Recorder) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func posted(a *api) []*eventsv1.Event {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.events
}

func TestRecorder(t *testing.T) {
	a := newAPI(t).start()
	s := newSource(t, Config{Rest: a.rest()})
	t.Cleanup(s.http.CloseIdleConnections)
	r := s.Recorder("n1")
	record(t, r)
	web := ServiceRef(types.NamespacedName{Namespace: "shop", Name: "web"}, "u-1")
	r.Event(web, corev1.EventTypeWarning, "Conflict", "192.0.2.1 is taken")
	r.Event(web, corev1.EventTypeWarning, "Conflict", "192.0.2.1 is taken")
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Starting", "")
	waitFor(t, "2 Events", func() bool { return len(posted(a)) == 2 })
	e := posted(a)[0]
	if e.Namespace != "shop" || !strings.HasPrefix(e.Name, "web.") || e.Regarding != web || e.Type != "Warning" || e.Reason != "Conflict" || e.Note != "192.0.2.1 is taken" ||
		e.ReportingController != "fairlead" || e.ReportingInstance != "fairlead-n1" || e.Action == "" || e.EventTime.IsZero() {
		t.Errorf("posted %+v", e)
	}
	if e := posted(a)[1]; e.Namespace != "default" || e.Regarding.Kind != "Node" || e.Regarding.UID != "n1" {
		t.Errorf("posted %+v", e)
	}
	waitFor(t, "the counts", func() bool { return r.Recorded() == Recorded{Posted: 2, Repeated: 1} })
}

// What the API can't take now is tried again; what it will never take is not.
func TestRecorderRetries(t *testing.T) {
	a := newAPI(t).start()
	a.noEvents = []int{http.StatusInternalServerError, http.StatusServiceUnavailable}
	s := newSource(t, Config{Rest: a.rest()})
	t.Cleanup(s.http.CloseIdleConnections)
	r := s.Recorder("n1")
	r.first = time.Millisecond
	record(t, r)
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "One", "")
	waitFor(t, "the Event", func() bool { return len(posted(a)) == 1 })
	a.set(func(a *api) { a.refuse = http.StatusForbidden })
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Two", "")
	waitFor(t, "the refusal", func() bool { return r.Recorded() == Recorded{Posted: 1, Dropped: 1} })
}

// While the API is away, whatever that looks like, nothing is given up; what happened meanwhile is posted when it is back, and
// says when it was. An Event that the API itself stumbles over holds up the others for a few tries only.
func TestRecorderOutlastsAnOutage(t *testing.T) {
	a := newAPI(t).start()
	for range 3 {
		a.noEvents = append(a.noEvents, http.StatusUnauthorized, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, http.StatusTooManyRequests)
	}
	s := newSource(t, Config{Rest: a.rest()})
	t.Cleanup(s.http.CloseIdleConnections)
	r := s.Recorder("n1")
	r.first, r.limit = time.Millisecond, flowcontrol.NewFakeAlwaysRateLimiter()
	record(t, r)
	before := time.Now()
	r.Event(NodeRef("n1"), corev1.EventTypeWarning, "Stale", "")
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Fresh", "")
	said := time.Now()
	waitFor(t, "both Events", func() bool { return len(posted(a)) == 2 })
	if e := posted(a)[0]; e.Reason != "Stale" || e.EventTime.Time.Before(before.Truncate(time.Microsecond)) || e.EventTime.Time.After(said) {
		t.Errorf("posted %+v", e)
	}
	a.set(func(a *api) { a.noEvents = slices.Repeat([]int{http.StatusInternalServerError}, postTries) })
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Odd", "")
	r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Next", "")
	waitFor(t, "the Event after", func() bool { return len(posted(a)) == 3 && posted(a)[2].Reason == "Next" })
	waitFor(t, "the counts", func() bool { return r.Recorded() == Recorded{Posted: 3, Dropped: 1} })

	if _, err := s.http.Get("http://127.0.0.1:1"); !away(err) { // nobody listens there
		t.Errorf("%v is no outage", err)
	}
	for _, err := range []error{errors.New("can't be encoded"), apierrors.NewForbidden(corev1.Resource("events"), "e", nil), apierrors.NewInternalError(errors.New("webhook"))} {
		if away(err) {
			t.Errorf("%v is taken for an outage", err)
		}
	}
}

// Nobody waits for a recorder, whatever the API does, and its memory is bounded.
func TestRecorderNeverBlocks(t *testing.T) {
	a := newAPI(t).start()
	r := newSource(t, Config{Rest: a.rest()}).Recorder("n1") // does not run
	for i := range 3 * heardMost {
		r.Event(NodeRef("n1"), corev1.EventTypeNormal, "Flood", fmt.Sprint(i))
	}
	if got := r.Recorded(); got.Dropped != 3*heardMost-queueMost {
		t.Errorf("recorded %+v", got)
	}
	if len(r.said) > heardMost {
		t.Errorf("%d are remembered", len(r.said))
	}
}

func TestRepeatAfterAWhile(t *testing.T) {
	r := &Recorder{said: map[string]time.Time{}}
	now := time.Now()
	for _, tc := range []struct {
		after time.Duration
		want  bool
	}{{0, true}, {time.Second, false}, {repeatAfter - 1, false}, {repeatAfter, true}, {repeatAfter + 1, false}} {
		if got := r.news("x", now.Add(tc.after)); got != tc.want {
			t.Errorf("after %v: %v", tc.after, got)
		}
	}
}

func TestCut(t *testing.T) {
	for _, tc := range []struct {
		in   string
		n    int
		want string
	}{{"abc", 3, "abc"}, {"abcd", 3, "abc"}, {"aß", 2, "a"}, {"a\xffb", 9, "a?b"}, {"", 0, ""}, {"ß", 1, ""}} {
		if got := cut(tc.in, tc.n); got != tc.want || !utf8.ValidString(got) {
			t.Errorf("cut(%q, %d) = %q, want %q", tc.in, tc.n, got, tc.want)
		}
	}
}
