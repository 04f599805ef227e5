package kube

import (
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead/internal/source/sourcetest"
)

// story runs in a bubble of time, against an API that streams lists and one that does not.
func story(t *testing.T, tell func(t *testing.T, a *api, sink *sourcetest.Sink)) {
	for name, old := range map[string]bool{"streamed list": false, "old API server": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newDirectAPI(t)
				a.old = old
				tell(t, a, new(sourcetest.Sink))
			})
		})
	}
}

// begin runs a source until it is synced, and forgets the calls.
func begin(t *testing.T, a *api, sink *sourcetest.Sink) *Source {
	t.Helper()
	s := newSource(t, Config{Rest: a.direct()})
	sourcetest.Run(t, s, sink)
	time.Sleep(2 * time.Second) // client-go takes a watch that ends within a second for a failure
	synctest.Wait()
	if sink.Now().Synced != 1 {
		t.Fatalf("not synced: %q", sink.Now().Calls)
	}
	sink.Forget()
	return s
}

// expect compares what was told since the last time, in any order.
func expect(t *testing.T, when string, sink *sourcetest.Sink, want ...string) {
	t.Helper()
	synctest.Wait()
	got := sink.Now().Calls
	sink.Forget()
	slices.Sort(got)
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("%s: told %q, want %q", when, got, want)
	}
}

// doubts tells which resources are in doubt.
func doubts(s *Source) string {
	var out []string
	for _, st := range s.Status() {
		if st.Doubt != "" {
			out = append(out, st.Resource)
		}
	}
	return strings.Join(out, " ")
}

const everything = "services endpointslices nodes servicecidrs"

// A cluster is restored from a backup. What is new since is served at once; what the backup does not have only goes when 30 s
// have passed, and so does what was taken away after the restoration, if it had been written to after the backup. And nobody waits for the version to come up to what it was.
func TestRestored(t *testing.T) {
	story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
		a.put(service("kept", "10.96.0.1"), service("changed", "10.96.0.2"), service("brought-back", "10.96.0.3"), service("rewritten", "10.96.0.4"), slice("web", "10.244.1.1"))
		backup := a.version
		a.remove(service("brought-back", ""))
		for range 100 {
			a.put(service("other", "10.96.0.9")) // time passes
		}
		a.remove(service("other", ""))
		a.put(service("changed", "10.96.1.2"), service("lost", "10.96.0.5"), service("rewritten", "10.96.1.4"), slice("web", "10.244.1.2"))
		s := begin(t, a, sink)

		a.restore(backup)
		a.put(service("early", "10.96.0.6"))
		expect(t, "restored", sink, "service default/brought-back", "service default/early")
		if got := doubts(s); got != everything {
			t.Errorf("in doubt: %s", got)
		}
		time.Sleep(time.Second)
		a.put(service("late", "10.96.0.7"), service("rewritten", "10.96.2.4"), service("kept", "10.96.2.1"), slice("web", "10.244.1.3"))
		expect(t, "new writes", sink, "service default/late", "service default/rewritten", "service default/kept", "slice default/web")
		a.remove(service("late", ""))
		a.remove(service("changed", ""))
		empty := slice("web", "")
		empty.Endpoints = nil
		a.put(empty)
		expect(t, "new removals", sink, "no service default/late")
		time.Sleep(doubtFor - 2*time.Second)
		expect(t, "30 s not yet over", sink)
		time.Sleep(2 * time.Second)
		expect(t, "30 s later", sink, "no service default/lost", "no service default/changed", "slice default/web")
		if got := doubts(s); got != "" {
			t.Errorf("still in doubt: %s", got)
		}
		a.remove(service("kept", ""))
		expect(t, "after that", sink, "no service default/kept")
	})
}

// An API server lags behind the one that we were on. It plays history again; nothing that we know is taken away, nor a
// slice emptied, for that.
func TestLags(t *testing.T) {
	story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
		empty := slice("web", "")
		empty.Endpoints = nil
		a.put(service("web", "10.96.0.1"), slice("web", "10.244.1.1"))
		a.remove(service("web", ""))
		a.put(empty)
		a.put(service("web", "10.96.0.1"), slice("web", "10.244.1.2"), service("new", "10.96.0.2"))
		a.remove(service("new", ""))
		a.put(service("new", "10.96.0.2"))
		s := begin(t, a, sink)

		a.set(func(a *api) { a.lag = a.version - 1 })
		a.cutWatches()
		synctest.Wait()
		if got := doubts(s); got != everything {
			t.Errorf("in doubt: %s", got)
		}
		for a.lag > 0 {
			time.Sleep(time.Second)
			a.set(func(a *api) { a.lag--; a.ring() })
			synctest.Wait()
		}
		a.bookmark()
		expect(t, "caught up", sink, "slice default/web", "slice default/web") // with the endpoint that it had once; and back
		if got := doubts(s); got != "" {
			t.Errorf("still in doubt: %s", got)
		}
		a.remove(service("web", ""))
		expect(t, "after that", sink, "no service default/web")
	})
}

// A watch has to begin anew, and the list says that there is nothing. It is not believed at once, nor as long as the API
// does not answer.
func TestEmptyList(t *testing.T) {
	story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
		a.put(service("web", "10.96.0.1"), slice("web", "10.244.1.1"))
		s := begin(t, a, sink)
		again := func(empty bool) {
			a.set(func(a *api) { a.empty = empty })
			a.forget()
			time.Sleep(10 * time.Second) // the reflector's back-off
			synctest.Wait()
		}
		again(true)
		if got := doubts(s); got != "services endpointslices" {
			t.Errorf("in doubt: %s", got)
		}
		expect(t, "an empty list", sink)
		again(false)
		if got := doubts(s); got != "" {
			t.Errorf("still in doubt: %s", got)
		}
		expect(t, "a full list", sink)

		again(true)
		a.set(func(a *api) { a.refuse = http.StatusUnauthorized })
		a.cutWatches()
		time.Sleep(time.Hour)
		expect(t, "an outage", sink)
		a.set(func(a *api) { a.refuse = 0 })
		time.Sleep(time.Minute)
		a.bookmark()
		time.Sleep(doubtFor)
		expect(t, "30 s in which the API says so", sink, "no service default/web", "no slice default/web")
	})
}

// Services were served here before the start, and the first list has none: it is not believed at once.
func TestFirstListIsEmpty(t *testing.T) {
	for name, c := range map[string]struct{ served, filled bool }{
		"nothing was served": {},
		"they come":          {served: true, filled: true},
		"they are gone":      {served: true},
	} {
		t.Run(name, func(t *testing.T) {
			story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
				a.put(service("web", "10.96.0.1"), node("n1"))
				a.empty = true
				s := newSource(t, Config{Rest: a.direct(), Expect: func() bool { return c.served }})
				sourcetest.Run(t, s, sink)
				if !c.served {
					expect(t, "at start", sink, "synced")
					return
				}
				expect(t, "at start", sink)
				if got := doubts(s); got != "services" || s.Status()[0].Synced {
					t.Errorf("in doubt: %s; status %+v", got, s.Status()[0])
				}
				if c.filled {
					a.set(func(a *api) { a.empty = false })
					a.forget()
					time.Sleep(10 * time.Second)
					expect(t, "the next list", sink, "node n1", "service default/web", "synced")
				} else {
					time.Sleep(doubtFor)
					expect(t, "30 s later", sink, "synced")
				}
				if got := doubts(s); got != "" {
					t.Errorf("still in doubt: %s", got)
				}
			})
		})
	}
}

// The API forgot our version, and a server that lags is asked for a list: whatever it has, since what is as new as ours it
// would refuse, and client-go ask ten times.
func TestListsWhatThereIs(t *testing.T) {
	story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
		a.put(service("web", "10.96.0.1"), service("new", "10.96.0.2"))
		begin(t, a, sink)
		a.set(func(a *api) { a.lag = 2; clear(a.queries) })
		a.forget()
		start := time.Now()
		for !slices.ContainsFunc(a.asked("services"), func(q query) bool { return q.list && q.version == "" }) {
			if time.Sleep(100 * time.Millisecond); time.Since(start) > time.Minute {
				t.Fatalf("asked %+v", a.asked("services"))
			}
		}
		for _, q := range a.asked("services") {
			if q.list && q.version != "" {
				t.Errorf("asked %+v", q)
			}
		}
		expect(t, "an older list", sink)
	})
}

// Who asks a server that knows less than we do tells so, and opens no watch there.
func TestBehind(t *testing.T) {
	a := newAPI(t).start()
	s := newSource(t, Config{Rest: a.rest()})
	var told error
	r := &resource{client: s.core, name: "services", track: newTracker("services"), back: newSignal(), behind: func(why error) { told = why }}
	for version, want := range map[string]error{"1": nil, "": nil, "not-a-number": nil, "2": errWentBack} {
		told = nil
		w, err := r.watch(t.Context(), metav1.ListOptions{ResourceVersion: version})
		if !errors.Is(err, want) || !errors.Is(told, want) {
			t.Errorf("watch from %q: %v, told %v; want %v", version, err, told, want)
		}
		if err == nil {
			w.Stop()
		}
	}
	a.set(func(a *api) { a.refuse = http.StatusUnauthorized })
	if w, err := r.watch(t.Context(), metav1.ListOptions{ResourceVersion: "2"}); err == nil || errors.Is(err, errWentBack) {
		t.Errorf("a question that fails: %v, %v", w, err)
	}
}

// After a long outage everything is listed anew, once: versions can't tell what became of the API meanwhile.
func TestLongAway(t *testing.T) {
	a := newAPI(t).start()
	s := newSource(t, Config{Rest: a.rest()})
	r := &resource{client: s.core, name: "services", track: newTracker("services"), back: newSignal()}
	from := metav1.ListOptions{ResourceVersion: "1"}
	for _, c := range []struct {
		away time.Duration
		want error
	}{{longAway - time.Minute, nil}, {longAway, errListAnew}} {
		r.track.now.LastError, r.track.now.Since = io.EOF, time.Now().Add(-c.away)
		w, err := r.watch(t.Context(), from)
		if !errors.Is(err, c.want) || errors.Is(err, errWentBack) {
			t.Errorf("away for %s: %v, want %v", c.away, err, c.want)
		}
		if err == nil {
			w.Stop()
		}
	}
	r.track.listed(0)
	if w, err := r.watch(t.Context(), from); err != nil {
		t.Errorf("after the list: %v", err)
	} else {
		w.Stop()
	}
}

// An API that answers lists and refuses watches is asked ever more seldom, is in trouble all the time, and is all right as soon as
// it lets us watch again: after what the back-off takes at most.
func TestWatchesRefused(t *testing.T) {
	story(t, func(t *testing.T, a *api, sink *sourcetest.Sink) {
		a.put(service("web", "10.96.0.1"))
		s := begin(t, a, sink)
		a.set(func(a *api) { a.noWatches = http.StatusInternalServerError; a.queries = map[string][]url.Values{} })
		a.cutWatches()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		a.set(func(a *api) {
			for resource, asked := range a.queries {
				if n := len(asked); n < 10 || n > 150 {
					t.Errorf("%s: asked %d times in five minutes", resource, n)
				}
			}
		})
		for _, st := range s.Status() {
			if st.LastError == nil || time.Since(st.Since) < 4*time.Minute {
				t.Errorf("status: %+v", st)
			}
		}
		a.set(func(a *api) { a.noWatches = 0 })
		a.put(service("late", "10.96.0.2"))
		time.Sleep(2*backoffMost + time.Minute)
		expect(t, "watches are served again", sink, "service default/late")
		if st := s.Status()[0]; st.LastError != nil {
			t.Errorf("status: %+v", st)
		}
	})
}

func TestBare(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		conditions []discoveryv1.EndpointConditions
		want       bool
	}{
		{nil, true},
		{[]discoveryv1.EndpointConditions{{}}, false},
		{[]discoveryv1.EndpointConditions{{Ready: &no}}, true},
		{[]discoveryv1.EndpointConditions{{Ready: &no}, {Ready: &yes}}, false},
		{[]discoveryv1.EndpointConditions{{Ready: &no, Serving: &yes}}, false},
	} {
		s := new(discoveryv1.EndpointSlice)
		for _, e := range c.conditions {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Conditions: e})
		}
		if got := bare(s); got != c.want {
			t.Errorf("%+v: %t", c.conditions, got)
		}
	}
}
