package engine_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

const ms = time.Millisecond

func TestNothingIsWrittenBeforeAllIsSynced(t *testing.T) {
	bubble(t, engine.Config{}, &plane{}, func(r *rig) {
		other := r.Sink("other")
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.want(0, time.Hour)
		if s := r.Status(); s.Synced || !reflect.DeepEqual(s.Sources, map[string]bool{"test": true, "other": false}) || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		other.Synced()
		got := r.want(1, ms)
		if d := got[0].d; !d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.1"}) {
			t.Errorf("first delta %+v", d)
		}
		late := r.Sink("late")
		r.service("b", "10.0.0.2")
		r.want(1, time.Hour)
		late.Synced()
		r.want(2, ms)
	})
}

func TestSyncedComesAfterWhatWasToldBeforeIt(t *testing.T) {
	bubble(t, engine.Config{}, &plane{}, func(r *rig) {
		for i := range 500 {
			r.service(fmt.Sprint(i), fmt.Sprintf("10.0.%d.%d", i/250, i%250))
		}
		r.sink.Synced()
		if d := r.want(1, ms)[0].d; len(d.Frontends) != 500 {
			t.Errorf("the first delta has %d of 500 frontends", len(d.Frontends))
		}
	})
}

func TestNobodyToAskWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &plane{start: time.Now()}
		e := engine.New(engine.Config{Resolver: &resolver{}, Dataplane: p, Resync: time.Minute})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := e.Run(ctx); err != nil || len(p.calls) != 0 {
			t.Errorf("%v, %d rounds without a source", err, len(p.calls))
		}
	})
}

func TestFloodIsCoalesced(t *testing.T) {
	bubble(t, engine.Config{}, &plane{takes: time.Second}, func(r *rig) {
		r.sink.Synced()
		r.want(1, ms) // and is busy for a second
		before := r.resolver.calls
		for i := range 10_000 {
			r.service("a", fmt.Sprintf("10.0.%d.%d", i/250, i%250))
		}
		got := r.want(2, 3*time.Second)
		if n := r.resolver.calls - before; n != 1 {
			t.Errorf("the resolver was told %d times", n)
		}
		if !slices.Equal(ips(got[1].d.Frontends), []string{"10.0.39.249"}) {
			t.Errorf("not the last word: %v", got[1].d)
		}
	})
}

func TestMinSyncCountsFromTheEndOfARound(t *testing.T) {
	bubble(t, engine.Config{MinSync: time.Second}, &plane{takes: 300 * ms}, func(r *rig) {
		r.sink.Synced()
		for i := range 300 {
			r.service(fmt.Sprint(i), fmt.Sprintf("10.0.0.%d", i%250))
			time.Sleep(10 * ms)
		}
		var at []time.Duration
		for _, c := range r.calls(0) {
			at = append(at, c.at)
		}
		if want := []time.Duration{0, 1300 * ms, 2600 * ms}; !slices.Equal(at, want) {
			t.Errorf("rounds at %v, want %v", at, want)
		}
	})
}

func TestMinSyncZeroWritesAtOnce(t *testing.T) {
	bubble(t, engine.Config{}, &plane{}, func(r *rig) {
		r.sink.Synced()
		r.want(1, 0)
		for i := range 5 {
			r.service("a", fmt.Sprintf("10.0.0.%d", i+1))
			r.want(i+2, 0)
		}
	})
}

func TestFailureLosesNothing(t *testing.T) {
	bubble(t, engine.Config{MaxBackoff: time.Second}, &plane{fail: func(n int) error {
		if n > 1 && n < 8 {
			return errPlane
		}
		return nil
	}}, func(r *rig) {
		r.service("a", "10.0.0.1")
		r.service("b", "10.0.0.2")
		r.sink.Synced()
		r.want(1, 0)
		r.gone("a")
		r.service("c", "10.0.0.3")
		got := r.want(8, time.Minute)
		for i, c := range got[1:] {
			if full := i >= 3; c.d.Full != full {
				t.Errorf("try %d: full %v", i+1, c.d.Full)
			}
			if c.d.Full && !slices.Equal(ips(c.d.Frontends), []string{"10.0.0.2", "10.0.0.3"}) {
				t.Errorf("full delta: %v", ips(c.d.Frontends))
			}
		}
		wantGaps(t, got[1:], 100*ms, 200*ms, 400*ms, 800*ms, time.Second, time.Second)
		if len(r.observer.failed) != 6 || !errors.Is(r.observer.failed[0], errPlane) {
			t.Errorf("observers heard of failures: %v", r.observer.failed)
		}
		last := r.observer.applied[1]
		if len(r.observer.applied) != 2 || !slices.Equal(keyIPs(last.GoneFrontends), []string{"10.0.0.1"}) {
			t.Errorf("observers heard: %+v", r.observer.applied)
		}
		if s := r.Status(); s.LastError != nil || s.Failures != 0 || s.Rounds != 8 || s.Generation != 2 || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
	})
}

// wantGaps compares the times between calls: at most what is wanted, and at least four fifths of it.
func wantGaps(t *testing.T, calls []call, want ...time.Duration) {
	t.Helper()
	for i, w := range want {
		if got := calls[i+1].at - calls[i].at; got > w || got < w*4/5 {
			t.Errorf("wait %d: %v, want up to a fifth less than %v", i+1, got, w)
		}
	}
}

func TestDeltasAddUpWhileFailing(t *testing.T) {
	bubble(t, engine.Config{}, &plane{fail: func(n int) error {
		if n == 2 {
			return errPlane
		}
		return nil
	}}, func(r *rig) {
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.want(1, 0)
		r.service("b", "10.0.0.2")
		r.want(2, 0)
		r.gone("a")
		d := r.want(3, time.Minute)[2].d
		if d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.2"}) || !slices.Equal(keyIPs(d.GoneFrontends), []string{"10.0.0.1"}) {
			t.Errorf("retried with %+v", d)
		}
	})
}

func TestAChangeCutsALongBackoff(t *testing.T) {
	bubble(t, engine.Config{MaxBackoff: time.Hour}, &plane{fail: always}, func(r *rig) {
		r.sink.Synced()
		n := len(r.calls(20 * time.Minute)) // by now waits last many minutes
		r.service("a", "10.0.0.1")
		r.want(n+1, 0)
	})
}

func TestAFloodDoesNotMakeAFailureSpin(t *testing.T) {
	bubble(t, engine.Config{}, &plane{fail: always}, func(r *rig) {
		r.sink.Synced()
		n := len(r.calls(time.Minute))
		for i := range 10_000 {
			r.service(fmt.Sprint(i%10), fmt.Sprintf("10.0.0.%d", i%250))
			time.Sleep(ms)
		}
		if got := len(r.calls(0)) - n; got < 9 || got > 11 {
			t.Errorf("%d tries in 10 s of changes, want about one a second", got)
		}
	})
}

func TestResync(t *testing.T) {
	for _, resync := range []time.Duration{0, 5 * time.Minute} {
		bubble(t, engine.Config{Resync: resync}, &plane{}, func(r *rig) {
			r.service("a", "10.0.0.1")
			r.sink.Synced()
			r.want(1, 0)
			if resync == 0 {
				r.want(1, 24*time.Hour)
				return
			}
			for i, c := range r.want(4, 15*time.Minute) {
				if c.at != time.Duration(i)*resync || !c.d.Full || len(c.d.Frontends) != 1 {
					t.Errorf("round %d at %v: %+v", i, c.at, c.d)
				}
			}
		})
	}
}

func TestStartSeesWhatIsGone(t *testing.T) {
	found := model.NewState()
	old := model.Key{IP: netip.MustParseAddr("10.0.0.9"), Port: 80, Proto: model.TCP}
	pool := model.PoolID{Service: "ns/old"}
	found.Apply(model.Delta{Frontends: []model.Frontend{{Key: old}}, Pools: []model.Pool{{ID: pool}}, Checks: []model.Check{{Service: "ns/old"}}})
	bubble(t, engine.Config{}, &plane{found: found}, func(r *rig) {
		if err := r.Do(r.t.Context(), func(v engine.View) {
			if len(v.State.Frontends) != 1 {
				t.Errorf("before the first round the state is %v", v.State)
			}
		}); err != nil {
			t.Error(err)
		}
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.want(1, 0)
		d := r.observer.applied[0]
		if !slices.Equal(d.GoneFrontends, []model.Key{old}) || !slices.Equal(d.GonePools, []model.PoolID{pool}) || !slices.Equal(d.GoneChecks, []string{"ns/old"}) {
			t.Errorf("observers heard %+v", d)
		}
	})
}

func TestStartWithoutReading(t *testing.T) {
	bubble(t, engine.Config{}, &plane{unread: errPlane}, func(r *rig) {
		r.sink.Synced()
		if !r.want(1, 0)[0].d.Full {
			t.Error("the first delta is not full")
		}
	})
}

func TestEmptyDeltasWriteNothing(t *testing.T) {
	bubble(t, engine.Config{}, &plane{}, func(r *rig) {
		r.sink.Synced()
		r.want(1, 0)
		r.service("headless", "")
		r.sink.Addrs(nil)
		r.sink.Node("n", nil)
		r.want(1, time.Hour)
		if s := r.Status(); !s.PendingSince.IsZero() || s.Rounds != 1 || s.LastQueued.IsZero() {
			t.Errorf("status %+v", s)
		}
	})
}

func TestNotices(t *testing.T) {
	var got []model.Notice
	bubble(t, engine.Config{Notices: func(n []model.Notice) { got = append(got, n...) }}, &plane{}, func(r *rig) {
		r.resolver.notices = []model.Notice{{Service: "ns/a", Reason: "AddressConflict"}}
		r.sink.Synced()
		r.want(1, 0)
		r.service("a", "10.0.0.1")
		r.want(2, 0)
	})
	if len(got) != 1 {
		t.Errorf("notices: %v", got)
	}
}

func TestStatusOfAFailure(t *testing.T) {
	bubble(t, engine.Config{}, &plane{fail: func(n int) error {
		if n > 1 {
			return errPlane
		}
		return nil
	}}, func(r *rig) {
		start := time.Now()
		r.want(0, time.Minute)
		r.sink.Synced()
		r.want(1, 0)
		if s := r.Status(); s.LastSuccess.Sub(start) != time.Minute || !s.PendingSince.IsZero() || !s.Started.Equal(start) {
			t.Errorf("status %+v", s)
		}
		time.Sleep(time.Minute)
		r.service("a", "10.0.0.1")
		r.calls(5 * time.Minute)
		r.service("a", "10.0.0.2")
		r.calls(5 * time.Minute)
		s := r.Status()
		if s.PendingSince.Sub(start) != 2*time.Minute || !errors.Is(s.LastError, errPlane) || s.Failures < 10 || s.Generation != 1 {
			t.Errorf("status %+v", s)
		}
	})
}

// TestFailuresStartAnew: a success forgives earlier failures; a failed resync is pending work too.
func TestFailuresStartAnew(t *testing.T) {
	bubble(t, engine.Config{Resync: time.Hour}, &plane{fail: func(n int) error {
		if n != 5 {
			return errPlane
		}
		return nil
	}}, func(r *rig) {
		start := time.Now()
		r.sink.Synced()
		r.want(5, time.Minute)
		got := r.calls(2 * time.Hour)
		wantGaps(t, got[5:], 100*ms, 200*ms, 400*ms)
		s := r.Status()
		if at := got[5].at; s.PendingSince.Sub(start) != at || at != got[4].at+time.Hour || s.Failures != len(got)-5 {
			t.Errorf("pending since %v, resync at %v, %d failures", s.PendingSince.Sub(start), at, s.Failures)
		}
	})
}

// TestStatusOfAStuckWrite: what waits behind a write that does not end is seen to wait.
func TestStatusOfAStuckWrite(t *testing.T) {
	bubble(t, engine.Config{}, &plane{takes: time.Hour}, func(r *rig) {
		r.sink.Synced()
		start := time.Now()
		r.want(1, time.Minute)
		r.service("a", "10.0.0.1")
		if s := r.Status(); !s.PendingSince.Equal(start) {
			t.Errorf("pending since %v, want %v", s.PendingSince, start)
		}
		r.want(2, 61*time.Minute)
		if s := r.Status(); s.PendingSince.Sub(start) != time.Minute {
			t.Errorf("pending since %v after the start, want 1m", s.PendingSince.Sub(start))
		}
	})
}

func TestDo(t *testing.T) {
	bubble(t, engine.Config{}, &plane{takes: time.Second}, func(r *rig) {
		ask := func(timeout time.Duration) (int, error) {
			ctx, cancel := context.WithTimeout(r.t.Context(), timeout)
			defer cancel()
			n := -1
			err := r.Do(ctx, func(v engine.View) {
				n = len(v.State.Frontends)
				if v.Resolver == nil || v.Dataplane == nil || v.Status.Started.IsZero() {
					t.Errorf("view %+v", v)
				}
			})
			return n, err
		}
		if n, err := ask(time.Second); n != 0 || err != nil {
			t.Errorf("before sources are synced: %d, %v", n, err)
		}
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.want(1, ms)
		if _, err := ask(100 * ms); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("during a round: %v", err)
		}
		if n, err := ask(time.Minute); n != 1 || err != nil {
			t.Errorf("after the round: %d, %v", n, err)
		}
		r.stop()
		if _, err := ask(time.Minute); !errors.Is(err, engine.ErrEnded) {
			t.Errorf("after the end: %v", err)
		}
	})
}

func TestEndInTheMiddleOfARound(t *testing.T) {
	bubble(t, engine.Config{}, &plane{takes: time.Hour}, func(r *rig) {
		r.sink.Synced()
		r.want(1, ms)
		before := time.Now()
		r.stop()
		if time.Since(before) != 0 || r.Status().Failures != 0 || len(r.observer.failed) != 0 {
			t.Errorf("ended after %v, %+v", time.Since(before), r.Status())
		}
	})
}

// watcher is a plane that notices.
type watcher struct {
	*plane
	watch func(ctx context.Context, drift func(string)) error
}

func (w watcher) Watch(ctx context.Context, drift func(string)) error { return w.watch(ctx, drift) }

func TestDrift(t *testing.T) {
	p := &plane{}
	var drift func(string)
	w := watcher{p, func(ctx context.Context, d func(string)) error {
		drift = d
		<-ctx.Done()
		return nil
	}}
	bubble(t, engine.Config{Dataplane: w}, p, func(r *rig) {
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.want(1, time.Minute)
		drift("chain flushed")
		if d := r.want(2, 0)[1].d; !d.Full || len(d.Frontends) != 1 {
			t.Errorf("after drift: %+v", d)
		}
		if s := r.Status(); s.LastDrift != "chain flushed" || !slices.Equal(r.observer.drifts, []string{"chain flushed"}) {
			t.Errorf("status %+v, observers heard %v", s, r.observer.drifts)
		}
		for range 1000 { // somebody keeps fighting us
			drift("chain flushed")
			time.Sleep(10 * ms)
		}
		if n := len(r.calls(0)); n < 19 || n > 23 {
			t.Errorf("%d rounds in 10 s of drift, want some at once, then about one a second", n-2)
		}
		time.Sleep(time.Minute)
		n := len(r.calls(0))
		for i := range 5 { // several in a row are put right at once
			drift("chain flushed")
			r.want(n+i+1, 0)
		}
	})
}

// mender is a watcher that puts right small damage by itself.
type mender struct {
	watcher
	mend func() ([]model.Key, error)
}

func (m mender) Mend() ([]model.Key, error) { return m.mend() }

// What the dataplane can put right by itself is not applied again, and observers hear which frontends it was; when it can't, or
// when somebody keeps fighting us, everything is.
func TestMend(t *testing.T) {
	p := &plane{}
	var drift func(string)
	w := watcher{p, func(ctx context.Context, d func(string)) error {
		drift = d
		<-ctx.Done()
		return nil
	}}
	var keys []model.Key
	var fails error
	mends := 0
	m := mender{w, func() ([]model.Key, error) { mends++; return keys, fails }}
	bubble(t, engine.Config{Dataplane: m}, p, func(r *rig) {
		r.service("a", "10.0.0.1")
		r.service("b", "10.0.0.2")
		r.sink.Synced()
		all := r.want(1, time.Minute)[0].d
		keys = []model.Key{all.Frontends[1].Key, {}}
		heard := len(r.observer.applied)
		drift("one element")
		r.want(1, 0)
		told := r.observer.applied[heard:]
		if len(told) != 1 || told[0].Full || len(told[0].Frontends) != 1 || told[0].Frontends[0].Key != keys[0] || mends != 1 {
			t.Errorf("mended %d times, observers were told %+v", mends, told)
		}
		fails = errPlane
		drift("a chain")
		if d := r.want(2, 0)[1].d; !d.Full {
			t.Errorf("after damage that can't be mended: %+v", d)
		}
		fails = nil
		for range 1000 { // somebody keeps fighting us
			drift("one element")
			time.Sleep(10 * ms)
		}
		if n := mends + len(r.calls(0)); n > 30 {
			t.Errorf("put right %d times in 10 s of drift, want some at once, then about once a second", n)
		}
	})
}

func TestWatchIsTakenUpAgain(t *testing.T) {
	p, watches := &plane{}, 0
	w := watcher{p, func(ctx context.Context, drift func(string)) error {
		if watches++; watches < 4 {
			return errPlane
		}
		drift("seen at last")
		<-ctx.Done()
		return ctx.Err()
	}}
	bubble(t, engine.Config{Dataplane: w}, p, func(r *rig) {
		r.sink.Synced()
		r.want(2, time.Minute)
		if watches != 4 {
			t.Errorf("%d watches", watches)
		}
	})
}

// TestHistories: whatever is told, and however writes fail, in the end the kernel holds what the last words say, and the
// observers have heard of every change.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		k := &memory.Kernel{}
		k.Fail(memory.Unlucky(0.1, rapid.Uint64().Draw(rt, "seed")))
		for range rapid.IntRange(1, 3).Draw(rt, "lives") {
			life(t, rt, k)
		}
	})
}

func life(t *testing.T, rt *rapid.T, k *memory.Kernel) {
	rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "life"), 0))
	heard := k.State()
	c := engine.Config{Dataplane: memory.Faulty(memory.New(k), memory.Unlucky(0.1, rnd.Uint64())),
		MinSync: time.Duration(rnd.IntN(2)) * time.Second, Resync: time.Duration(rnd.IntN(2)) * time.Minute}
	bubble(t, c, &plane{}, func(r *rig) {
		want := map[string]string{}
		for i := range rnd.IntN(60) {
			if i == 5 {
				r.sink.Synced()
			}
			name, ip := fmt.Sprint(rnd.IntN(6)), fmt.Sprintf("10.0.0.%d", rnd.IntN(200)+1)
			if want[name] = ip; rnd.IntN(3) == 0 {
				delete(want, name)
				r.gone(name)
			} else if !taken(want, name, ip) {
				r.service(name, ip)
			} else {
				delete(want, name)
				r.gone(name)
			}
			time.Sleep(time.Duration(rnd.IntN(300)) * ms)
		}
		r.sink.Synced()
		r.calls(10 * time.Minute)
		for _, d := range r.observer.applied {
			heard.Apply(model.Delta{Frontends: d.Frontends, GoneFrontends: d.GoneFrontends}) // whether Full or not
		}
		got := slices.Sorted(maps.Values(want))
		if held := ips(k.State().SortedFrontends()); !slices.Equal(held, got) {
			t.Fatalf("the kernel holds %v, want %v", held, got)
		}
		if told := ips(heard.SortedFrontends()); !slices.Equal(told, got) {
			t.Fatalf("observers believe %v, want %v", told, got)
		}
	})
}

func taken(want map[string]string, name, ip string) bool {
	for n, i := range want {
		if n != name && i == ip {
			return true
		}
	}
	return false
}
