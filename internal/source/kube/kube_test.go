package kube

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead/internal/source/sourcetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func service(name, ip string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: "u-1"},
		Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}}
}

func slice(name, ip string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{ip}}}}
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDR: "10.244.1.0/24"}}
}

func serviceCIDR(name string, ranges ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: ranges}}
}

func newSource(t *testing.T, c Config) *Source {
	t.Helper()
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func synced(s sourcetest.State) bool { return s.Synced > 0 }

// The life of a few objects: there at the start, changed in what matters and in what does not, gone.
func TestListAndWatch(t *testing.T) {
	for name, old := range map[string]bool{"streamed list": false, "old API server": true} {
		t.Run(name, func(t *testing.T) {
			a, sink := newAPI(t).start(), new(sourcetest.Sink)
			a.old = old
			a.put(service("web", "10.96.0.1"), slice("web", "10.244.1.1"), node("n1"), serviceCIDR("kubernetes", "10.96.0.0/16"))
			s := newSource(t, Config{Rest: a.rest()})
			sourcetest.Run(t, s, sink)

			now := sink.Until(t, "synced", synced)
			if len(now.Services) != 1 || len(now.Slices) != 1 || len(now.Nodes) != 1 || len(now.CIDRs) != 1 {
				t.Fatalf("synced with calls %q", now.Calls)
			}
			if got := now.Services["default/web"]; got.Spec.ClusterIP != "10.96.0.1" || got.Spec.Selector != nil {
				t.Errorf("service is not trimmed: %+v", got.Spec)
			}
			if n := len(s.Status()); n != 4 {
				t.Errorf("status of %d resources", n)
			}
			for _, st := range s.Status() {
				if !st.Synced || st.Objects != 1 || st.LastError != nil || st.LastEvent.IsZero() {
					t.Errorf("status after sync: %+v", st)
				}
			}

			sink.Forget()
			other := service("web", "10.96.0.1")
			other.Spec.Selector = map[string]string{"app": "other"} // nothing that a proxy reads
			ready := serviceCIDR("kubernetes", "10.96.0.0/16")
			ready.Status.Conditions = []metav1.Condition{{Type: "Ready"}}
			a.put(other, ready, service("web", "10.96.0.2"), slice("web", "10.244.1.2"))
			now = sink.Until(t, "changes", func(s sourcetest.State) bool {
				return s.Services["default/web"].Spec.ClusterIP == "10.96.0.2" && s.Slices["default/web"].Endpoints[0].Addresses[0] == "10.244.1.2"
			})
			if slices.Sort(now.Calls); !slices.Equal(now.Calls, []string{"service default/web", "slice default/web"}) {
				t.Errorf("told too much: %q", now.Calls)
			}
			a.remove(service("web", ""))
			a.remove(node("n1"))
			a.remove(serviceCIDR("kubernetes"))
			now = sink.Until(t, "removal", func(s sourcetest.State) bool { return len(s.Services)+len(s.Nodes)+len(s.CIDRs) == 0 })
			if now.Synced != 1 {
				t.Errorf("told Synced %d times", now.Synced)
			}
		})
	}
}

// The selectors are those of kube-proxy, and one node can be asked for alone.
func TestSelectors(t *testing.T) {
	a, sink := newAPI(t).start(), new(sourcetest.Sink)
	sourcetest.Run(t, newSource(t, Config{Rest: a.rest(), OnlyNode: "n1"}), sink)
	sink.Until(t, "synced", synced)
	a.mu.Lock()
	defer a.mu.Unlock()
	want := map[string][2]string{
		"services":       {"!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"},
		"endpointslices": {"!service.kubernetes.io/headless", ""},
		"nodes":          {"", "metadata.name=n1"},
		"servicecidrs":   {"", ""},
	}
	for resource, w := range want {
		if len(a.queries[resource]) == 0 {
			t.Errorf("%s: not asked for", resource)
		}
		for _, q := range a.queries[resource] {
			if q.Get("labelSelector") != w[0] || q.Get("fieldSelector") != w[1] {
				t.Errorf("%s: asked with %v", resource, q)
			}
		}
	}
}

// A watch that ends goes on where it was: what happened in between is told, and nothing twice.
func TestWatchRestart(t *testing.T) {
	a, sink := newAPI(t).start(), new(sourcetest.Sink)
	a.put(service("a", "10.96.0.1"), service("b", "10.96.0.2"))
	sourcetest.Run(t, newSource(t, Config{Rest: a.rest()}), sink)
	sink.Until(t, "synced", synced)
	sink.Forget()
	a.cutWatches()
	a.remove(service("a", ""))
	a.put(service("c", "10.96.0.3"))
	now := sink.Until(t, "c", func(s sourcetest.State) bool { return s.Services["default/c"] != nil })
	if want := []string{"no service default/a", "service default/c"}; !slices.Equal(now.Calls, want) {
		t.Errorf("calls %q, want %q", now.Calls, want)
	}
}

// When the API forgot the version of the watch, the list that follows tells what vanished, and only what differs.
func TestRelist(t *testing.T) {
	for name, old := range map[string]bool{"streamed list": false, "old API server": true} {
		t.Run(name, func(t *testing.T) {
			a, sink := newAPI(t).start(), new(sourcetest.Sink)
			a.old = old
			a.put(service("gone", "10.96.0.1"), service("same", "10.96.0.2"), service("new", "10.96.0.3"))
			sourcetest.Run(t, newSource(t, Config{Rest: a.rest()}), sink)
			sink.Until(t, "synced", synced)
			sink.Forget()
			a.rewrite(service("new", "10.96.0.4"), service("gone", ""))
			now := sink.Until(t, "relist", func(s sourcetest.State) bool {
				return s.Services["default/gone"] == nil && s.Services["default/new"].Spec.ClusterIP == "10.96.0.4"
			})
			if slices.Sort(now.Calls); !slices.Equal(now.Calls, []string{"no service default/gone", "service default/new"}) {
				t.Errorf("calls %q", now.Calls)
			}
		})
	}
}

// The source starts while nobody listens, says so, and gets its list when the API comes up.
func TestAPIDownAtStart(t *testing.T) {
	a, sink := newAPI(t), new(sourcetest.Sink)
	addr := a.srv.Listener.Addr()
	a.srv.Listener.Close()
	s := newSource(t, Config{Rest: a.restAt(addr)})
	sourcetest.Run(t, s, sink)
	waitFor(t, "an error in the status", func() bool {
		return !slices.ContainsFunc(s.Status(), func(st Status) bool { return st.LastError == nil || st.Since.IsZero() })
	})
	for _, st := range s.Status() {
		if st.Synced || !st.LastEvent.IsZero() {
			t.Errorf("status while the API is down: %+v", st)
		}
	}
	if now := sink.Now(); len(now.Calls) > 0 {
		t.Fatalf("told %q", now.Calls)
	}
	a.put(service("web", "10.96.0.1"))
	l, err := net.Listen("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	a.srv.Listener = l
	a.start()
	now := sink.Until(t, "synced", synced)
	if now.Services["default/web"] == nil {
		t.Error("the Service is missing")
	}
	waitFor(t, "a clean status", func() bool {
		return !slices.ContainsFunc(s.Status(), func(st Status) bool { return !st.Synced || st.LastError != nil })
	})
}

// A refusal (expired token, no permission) is told in the status, takes nothing away, and passes.
func TestRefused(t *testing.T) {
	a, sink := newAPI(t).start(), new(sourcetest.Sink)
	a.put(service("web", "10.96.0.1"))
	s := newSource(t, Config{Rest: a.rest()})
	sourcetest.Run(t, s, sink)
	sink.Until(t, "synced", synced)
	a.set(func(a *api) { a.refuse = http.StatusUnauthorized })
	a.cutWatches()
	waitFor(t, "an error in the status", func() bool { return s.Status()[0].LastError != nil })
	a.set(func(a *api) { a.refuse = 0 })
	a.put(service("late", "10.96.0.2"))
	now := sink.Until(t, "the late Service", func(s sourcetest.State) bool { return s.Services["default/late"] != nil })
	if now.Services["default/web"] == nil || now.Synced != 1 {
		t.Errorf("calls %q", now.Calls)
	}
}

// An API server that does not know ServiceCIDRs, or does not let us have them, keeps nobody waiting, and is no trouble. When
// it does, they are taken; when it does not any more, they are gone.
func TestUnserved(t *testing.T) {
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden} {
		for name, old := range map[string]bool{"streamed list": false, "old API server": true} {
			t.Run(http.StatusText(code)+"/"+name, func(t *testing.T) {
				a, sink := newAPI(t).start(), new(sourcetest.Sink)
				a.old, a.noCIDRs = old, code
				a.put(service("web", "10.96.0.1"), serviceCIDR("kubernetes", "10.96.0.0/16"))
				s := newSource(t, Config{Rest: a.rest()})
				sourcetest.Run(t, s, sink)
				if now := sink.Until(t, "synced", synced); len(now.CIDRs) > 0 {
					t.Errorf("synced with %v", now.Calls)
				}
				if n := len(s.Status()); n != 3 {
					t.Errorf("status of %d resources", n)
				}
				asked := func() (n int) { a.set(func(a *api) { n = len(a.queries["servicecidrs"]) }); return n }
				before := asked()

				// The API server is replaced by one that serves them.
				a.set(func(a *api) { a.refuse = http.StatusServiceUnavailable })
				a.cutWatches()
				waitFor(t, "an error in the status", func() bool { return s.Status()[0].LastError != nil })
				if n := asked(); n != before {
					t.Errorf("asked again %d times", n-before)
				}
				a.set(func(a *api) { a.refuse, a.noCIDRs = 0, 0 })
				sink.Until(t, "ServiceCIDRs", func(s sourcetest.State) bool { return s.CIDRs["kubernetes"] != nil })
				waitFor(t, "a clean status", func() bool {
					return len(s.Status()) == 4 && !slices.ContainsFunc(s.Status(), func(st Status) bool { return !st.Synced || st.LastError != nil })
				})

				// And back.
				a.set(func(a *api) { a.noCIDRs = code })
				a.cutWatches()
				now := sink.Until(t, "no ServiceCIDRs", func(s sourcetest.State) bool { return len(s.CIDRs) == 0 })
				if now.Synced != 1 || now.Services["default/web"] == nil {
					t.Errorf("calls %q", now.Calls)
				}
				waitFor(t, "a clean status", func() bool { return len(s.Status()) == 3 })
			})
		}
	}
}

// Who waits to try again does so as soon as anybody is answered, with a fresh back-off, and when the source ends.
func TestWaitIsCutShort(t *testing.T) {
	back := newSignal()
	r := &resource{track: newTracker("services"), back: back}
	ctx, end := context.WithCancel(t.Context())
	clock := stopClock{ctx: ctx, back: back, ahead: &r.track.ahead}
	r.asked(t.Context(), nil) // was never in trouble: wakes nobody
	waits := clock.After(time.Hour)
	r.asked(t.Context(), io.ErrUnexpectedEOF)
	select {
	case <-waits:
		t.Error("woken by a failure")
	default:
	}
	r.asked(t.Context(), nil)
	<-waits
	if ahead := time.Until(clock.Now()); ahead < backoffReset {
		t.Errorf("the clock is %s ahead: the back-off goes on where it was", ahead)
	}
	waits = clock.After(time.Hour)
	end()
	<-waits
}

// A source ends at once also while it waits between two tries.
func TestEndsInBackoff(t *testing.T) {
	a := newAPI(t)
	a.srv.Listener.Close()
	s := newSource(t, Config{Rest: a.rest()})
	stop := sourcetest.Run(t, s, new(sourcetest.Sink))
	waitFor(t, "an error in the status", func() bool { return s.Status()[0].LastError != nil })
	stop()
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("waited in vain for %s", what)
}
