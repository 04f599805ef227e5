package kube

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"fairlead/internal/source/sourcetest"
)

// step is one thing that happens to an API, or to the way there.
type step struct {
	what string
	n    int
	name string
}

// drawSteps draws a history. Names are few, so that they come and go and come again.
func drawSteps(t *rapid.T, kinds []string) (steps []step) {
	for range rapid.IntRange(5, 40).Draw(t, "steps") {
		steps = append(steps, step{
			rapid.SampledFrom(kinds).Draw(t, "what"), rapid.IntRange(0, 20).Draw(t, "n"), rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name"),
		})
	}
	return steps
}

var (
	writes = []string{"service", "service", "slice", "slice", "empty slice", "no service", "no slice", "wait"}
	cuts   = []string{"cut", "forget", "bookmark"}
	lags   = []string{"lag", "lag", "catch up a bit", "catch up"}
	backs  = []string{"restore", "empty", "full"}
)

// history plays steps against a source.
type history struct {
	a      *api
	sink   *sourcetest.Sink
	lagged time.Time // since when what is served is behind; zero: it is not
	moment int       // last octet of whatever is written, so that each write is news
}

func (h *history) do(s step) {
	a := h.a
	switch s.what {
	case "service":
		h.moment++
		a.put(service(s.name, fmt.Sprintf("10.96.0.%d", h.moment)))
	case "slice":
		h.moment++
		a.put(slice(s.name, fmt.Sprintf("10.244.0.%d", h.moment)))
	case "empty slice":
		e := slice(s.name, "")
		e.Endpoints = nil
		a.put(e)
	case "no service":
		if a.objects["services"]["default/"+s.name] != nil {
			a.remove(service(s.name, ""))
		}
	case "no slice":
		if a.objects["endpointslices"]["default/"+s.name] != nil {
			a.remove(slice(s.name, ""))
		}
	case "cut":
		a.cutWatches()
	case "forget":
		a.forget()
	case "bookmark":
		a.bookmark()
	case "lag":
		if h.lagged.IsZero() {
			h.lagged = time.Now()
		}
		a.set(func(a *api) { a.lag = min(a.lag+s.n, a.version-1) })
		a.cutWatches() // another server
	case "catch up a bit":
		a.set(func(a *api) { a.lag = max(0, a.lag-s.n); a.ring() })
	case "catch up":
		h.catchUp()
	case "restore":
		a.restore(max(1, a.version-s.n))
		h.reconnect()
	case "empty":
		a.set(func(a *api) { a.empty = true })
		a.forget()
	case "full":
		a.set(func(a *api) { a.empty = false })
		a.forget()
	case "wait":
		h.wait(time.Duration(s.n) * 500 * time.Millisecond)
	}
}

// wait lets time pass, in which an API server that lags never does so for as long as it takes to believe it.
func (h *history) wait(d time.Duration) {
	if !h.lagged.IsZero() && time.Since(h.lagged)+d > doubtFor-time.Second {
		h.catchUp()
	}
	time.Sleep(d)
}

func (h *history) catchUp() {
	h.a.set(func(a *api) { a.lag = 0; a.ring() })
	h.lagged = time.Time{}
}

// reconnect waits for the source to ask again: one that only does so when the API has come past what it was, can't know.
func (h *history) reconnect() {
	h.a.set(func(a *api) { clear(a.queries) })
	for len(h.a.asked("services")) == 0 || len(h.a.asked("endpointslices")) == 0 {
		time.Sleep(100 * time.Millisecond)
	}
}

// end lets the API be well for long enough, and compares what was told with what there is.
func (h *history) end() error {
	h.catchUp()
	h.a.set(func(a *api) { a.empty = false })
	h.a.forget()
	time.Sleep(5 * time.Minute)
	synctest.Wait()
	now := h.sink.Now()
	want, got := map[string]string{}, map[string]string{}
	for _, objects := range h.a.objects {
		shapes(want, objects)
	}
	shapes(got, now.Services)
	shapes(got, now.Slices)
	if !maps.Equal(got, want) {
		return fmt.Errorf("told %v, want %v", got, want)
	}
	return nil
}

// shapes adds what matters of objects here.
func shapes[O metav1.Object](to map[string]string, objects map[string]O) {
	for key, o := range objects {
		to[fmt.Sprintf("%T %s", o, key)] = shape(o)
	}
}

func shape(o any) string {
	switch o := o.(type) {
	case *corev1.Service:
		return o.Spec.ClusterIP
	case *discoveryv1.EndpointSlice:
		var ips []string
		for _, e := range o.Endpoints {
			ips = append(ips, e.Addresses...)
		}
		return strings.Join(ips, " ")
	}
	return fmt.Sprintf("%T", o)
}

// play runs the steps in a bubble of time. After each one, check sees what the API served before it.
func play(t *testing.T, old bool, steps []step, check func(h *history, before map[string]int, calls []string) error) (err error) {
	synctest.Test(t, func(t *testing.T) {
		h := &history{a: newDirectAPI(t), sink: new(sourcetest.Sink)}
		h.a.old = old
		h.a.put(service("a", "10.96.0.1"), slice("a", "10.244.0.1"))
		defer sourcetest.Run(t, newSource(t, Config{Rest: h.a.direct()}), h.sink)()
		time.Sleep(2 * time.Second)
		for i, s := range steps {
			var before map[string]int
			h.a.set(func(a *api) { before = maps.Clone(a.told) })
			h.sink.Forget()
			h.do(s)
			synctest.Wait()
			if err = check(h, before, h.sink.Now().Calls); err != nil {
				err = fmt.Errorf("step %d, %v: %w", i, s, err)
				return
			}
		}
		err = h.end()
	})
	return err
}

// Whatever an API server does that only ever lags behind, for less than 30 s: nothing is told gone unless it was so at some
// time since the newest state that was served, and in the end what was told is what there is.
func TestHistoryLags(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		steps := drawSteps(rt, slices.Concat(writes, cuts, lags))
		if err := play(t, rapid.Bool().Draw(rt, "old"), steps, (*history).neverWrong); err != nil {
			rt.Fatal(err)
		}
	})
}

// neverWrong checks what was told to be gone.
func (h *history) neverWrong(before map[string]int, calls []string) error {
	for _, call := range calls {
		var name, resource string
		switch {
		case n(call, "no service %s", &name):
			resource = "services"
		case n(call, "no slice %s", &name):
			resource = "endpointslices"
		default:
			continue
		}
		gone := false
		for v := before[resource]; v <= h.a.version; v++ {
			gone = gone || h.a.at(v)[resource][name] == nil
		}
		if !gone {
			return fmt.Errorf("%q, though it existed at all versions from %d to %d", call, before[resource], h.a.version)
		}
	}
	return nil
}

func n(s, format string, to *string) bool {
	got, err := fmt.Sscanf(s, format, to)
	return err == nil && got == 1
}

// Whatever else an API does, restored from backups and empty lists included: once it is well, what was told is what there is.
func TestHistoryRestored(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		steps := drawSteps(rt, slices.Concat(writes, cuts, lags, backs))
		if err := play(t, rapid.Bool().Draw(rt, "old"), steps, func(*history, map[string]int, []string) error { return nil }); err != nil {
			rt.Fatal(err)
		}
	})
}
