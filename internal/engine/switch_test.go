package engine_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// diary is what happened to all planes of a test, in order; and who began to watch, which each does in its own time.
type diary struct {
	mu       sync.Mutex
	said     []string
	watching []string
}

func (d *diary) watches(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watching = append(d.watching, name)
}

func (d *diary) add(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.said = append(d.said, fmt.Sprintf(format, args...))
}

// take gives what was said since it was last asked.
func (d *diary) take() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := strings.Join(d.said, ", ")
	d.said = nil
	return out
}

// told writes into a diary what its plane is told.
type told struct {
	*plane
	name   string
	diary  *diary
	remove func() error
}

func (p told) Apply(ctx context.Context, d model.Delta) error {
	err := p.plane.Apply(ctx, d)
	what := map[bool]string{true: "applies all", false: "applies"}[d.Full]
	if err != nil {
		what = "fails"
	}
	p.diary.add("%s %s", p.name, what)
	return err
}

func (p told) Watch(ctx context.Context, _ func(string)) error {
	p.diary.watches(p.name)
	<-ctx.Done()
	p.diary.add("%s looks away", p.name)
	return nil
}

func (p told) Remove(context.Context) error {
	if p.remove != nil {
		if err := p.remove(); err != nil {
			p.diary.add("%s is not removed", p.name)
			return err
		}
	}
	p.diary.add("%s is removed", p.name)
	return nil
}

func (p told) Close() error {
	p.diary.add("%s is closed", p.name)
	return nil
}

// switching runs f with an engine whose plane is called old, and a function that makes others.
func switching(t *testing.T, c engine.Config, f func(r *rig, d *diary, plane func(name string) told)) {
	d := &diary{}
	start := time.Now()
	make := func(name string) told { return told{plane: &plane{start: start}, name: name, diary: d} }
	old := make("old")
	c.Dataplane, c.Place = old, "old"
	bubble(t, c, old.plane, func(r *rig) { f(r, d, make) })
}

func (r *rig) wantSaid(d *diary, want string) {
	r.t.Helper()
	r.calls(ms)
	if got := d.take(); got != want {
		r.t.Errorf("what happened:\n%s\nwant:\n%s", got, want)
	}
}

func TestSwitch(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		r.service("b", "10.0.0.2") // and is not taken yet
		next := plane("new")
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: next, Place: "new", Configure: func() { r.resolver.setPort(81) }}); err != nil {
			t.Fatal(err)
		}
		r.wantSaid(d, "old applies, new applies all, old looks away, old is removed, old is closed")
		all := next.seen()[0].d
		if !slices.Equal(ips(all.Frontends), []string{"10.0.0.1", "10.0.0.2"}) || all.Frontends[0].Key.Port != 81 {
			t.Errorf("the new one was told %+v", all)
		}
		heard := r.observer.applied[2]
		if !heard.Full || len(heard.Frontends) != 2 || !slices.Equal(keyIPs(heard.GoneFrontends), []string{"10.0.0.1", "10.0.0.2"}) || heard.GoneFrontends[0].Port != 80 {
			t.Errorf("observers heard %+v", heard)
		}
		r.service("c", "10.0.0.3")
		r.wantSaid(d, "new applies")
		r.stop()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		r.wantSaid(d, "new looks away, new is closed")
		if !slices.Equal(d.watching, []string{"old", "new"}) {
			t.Errorf("who watched: %v", d.watching)
		}
	})
}

// TestSwitchOfOnePlace: what another dataplane wrote to the same place is not removed.
func TestSwitchOfOnePlace(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: plane("new"), Place: "old"}); err != nil {
			t.Fatal(err)
		}
		r.wantSaid(d, "old looks away, new applies all, old is closed")
		bad := plane("bad")
		bad.fail = always
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: bad, Place: "old"}); !errors.Is(err, errPlane) {
			t.Fatal(err)
		}
		r.calls(time.Second)
		got := d.take()
		if !strings.HasPrefix(got, "new looks away, bad fails, new applies all, new looks away") || !strings.HasSuffix(got, "bad is closed, new applies all") || strings.Contains(got, "removed") {
			t.Errorf("what happened: %s", got)
		}
	})
}

// TestSwitchFails: the old one goes on serving, and learns of what is news; in the end all is as before.
func TestSwitchFails(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		bad := plane("bad")
		bad.fail = always
		done, start := make(chan error, 1), time.Now()
		go func() {
			done <- r.Switch(r.t.Context(), engine.Change{Dataplane: bad, Place: "bad",
				Configure: func() { r.resolver.setPort(81) }, Restore: func() { r.resolver.setPort(80) }})
		}()
		time.Sleep(250 * ms)
		r.service("b", "10.0.0.2")
		r.calls(ms)
		if said := d.take(); !strings.Contains(said, "bad fails") || !strings.HasSuffix(said, "old applies") {
			t.Errorf("news in the middle: %s", said)
		}
		if n := len(ips(r.plane.seen()[len(r.plane.seen())-1].d.Frontends)); n == 0 {
			t.Error("the old one was not told what is news")
		}
		if err := <-done; !errors.Is(err, errPlane) || !strings.Contains(err.Error(), "all is as before") {
			t.Errorf("got %v", err)
		}
		if took := time.Since(start); took < 3*time.Second || took > 10*time.Second {
			t.Errorf("given up after %v", took)
		}
		r.calls(time.Second)
		if said := d.take(); !strings.HasSuffix(said, "bad is removed, bad is closed, old applies all") || strings.Contains(said, "looks away") {
			t.Errorf("in the end: %s", said)
		}
		last := r.plane.seen()[len(r.plane.seen())-1].d
		if !slices.Equal(ips(last.Frontends), []string{"10.0.0.1", "10.0.0.2"}) || last.Frontends[0].Key.Port != 80 {
			t.Errorf("the old one was told last: %+v", last)
		}
	})
}

// TestSwitchAtLast: a fault or two do not matter.
func TestSwitchAtLast(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		next := plane("new")
		next.fail = func(n int) error {
			if n < 3 {
				return errPlane
			}
			return nil
		}
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: next, Place: "new"}); err != nil {
			t.Error(err)
		}
		r.wantSaid(d, "new fails, new fails, new applies all, old looks away, old is removed, old is closed")
	})
}

// TestRemovalIsOwed: a removal that fails is tried again, unless its place is written to again.
func TestRemovalIsOwed(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.sink.Synced()
		r.calls(ms)
		tries := 0
		stubborn := plane("stubborn")
		stubborn.remove = func() error {
			if tries++; tries < 4 {
				return errPlane
			}
			return nil
		}
		for _, c := range []engine.Change{{Dataplane: stubborn, Place: "stubborn"}, {Dataplane: plane("new"), Place: "new"}} {
			if err := r.Switch(r.t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		if s := r.Status(); s.Leftover != "stubborn: no luck" {
			t.Errorf("status %+v", s)
		}
		r.calls(time.Minute)
		if s := r.Status(); s.Leftover != "" || tries != 4 {
			t.Errorf("after %d tries: %+v", tries, s)
		}
		stubborn.remove = func() error { return errPlane }
		for _, c := range []engine.Change{{Dataplane: stubborn, Place: "stubborn"}, {Dataplane: plane("new"), Place: "new"}} {
			if err := r.Switch(r.t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		r.calls(ms)
		d.take()
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: plane("again"), Place: "stubborn"}); err != nil {
			t.Fatal(err)
		}
		r.calls(time.Hour)
		if said := d.take(); strings.Contains(said, "stubborn is not removed") || !strings.Contains(said, "stubborn is closed") || r.Status().Leftover != "" {
			t.Errorf("%s; %+v", said, r.Status())
		}
	})
}

// TestSwitchBeforeSynced: dataplanes change hands at once, and what the old one's rules do for traffic goes on until the new
// one serves.
func TestSwitchBeforeSynced(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.service("a", "10.0.0.1")
		next := plane("new")
		next.fail = func(n int) error {
			if n == 1 {
				return errPlane
			}
			return nil
		}
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: next, Place: "new", Configure: func() { r.resolver.setPort(81) }}); err != nil {
			t.Fatal(err)
		}
		r.calls(time.Hour)
		r.wantSaid(d, "old looks away")
		r.sink.Synced()
		r.calls(time.Second)
		r.wantSaid(d, "new fails, new applies all, old is removed, old is closed")
		if k := next.seen()[1].d.Frontends[0].Key; k.Port != 81 {
			t.Errorf("the new one was told %v", k)
		}
	})
}

func TestSwitchOfSettingsAlone(t *testing.T) {
	switching(t, engine.Config{Resync: time.Hour}, func(r *rig, d *diary, plane func(string) told) {
		r.service("a", "10.0.0.1")
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		c := engine.Change{Configure: func() { r.resolver.setPort(81) }, Pace: &engine.Pace{MinSync: time.Second, Resync: 10 * time.Minute}}
		if err := r.Switch(r.t.Context(), c); err != nil {
			t.Fatal(err)
		}
		r.wantSaid(d, "old applies")
		r.service("b", "10.0.0.2")
		r.calls(900 * ms)
		r.wantSaid(d, "")
		r.calls(100 * ms)
		r.wantSaid(d, "old applies")
		r.calls(10 * time.Minute)
		r.wantSaid(d, "old applies all")
	})
}

// TestSwitchGivenUp: who does not wait any more gets nothing done.
func TestSwitchGivenUp(t *testing.T) {
	switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
		r.sink.Synced()
		r.wantSaid(d, "old applies all")
		slow := plane("slow")
		slow.takes = time.Hour
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		if err := r.Switch(ctx, engine.Change{Dataplane: slow, Place: "slow"}); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		r.wantSaid(d, "slow fails, slow is removed, slow is closed, old applies all")

		go r.stop()
		r.calls(ms)
		d.take()
		if err := r.Switch(r.t.Context(), engine.Change{Dataplane: plane("late"), Place: "late"}); !errors.Is(err, engine.ErrEnded) {
			t.Errorf("after the end: %v", err)
		}
		r.wantSaid(d, "late is closed")
	})
}

// TestEndInTheMiddleOfASwitch: what the new one wrote is removed all the same.
func TestEndInTheMiddleOfASwitch(t *testing.T) {
	for name, takes := range map[string]time.Duration{"in a write": time.Hour, "between two": 0} {
		t.Run(name, func(t *testing.T) {
			switching(t, engine.Config{}, func(r *rig, d *diary, plane func(string) told) {
				r.sink.Synced()
				r.calls(ms)
				bad := plane("bad")
				bad.takes, bad.fail = takes, always
				done := make(chan error, 1)
				go func() {
					done <- r.Switch(context.WithoutCancel(r.t.Context()), engine.Change{Dataplane: bad, Place: "bad"})
				}()
				r.calls(time.Second)
				d.take()
				r.stop()
				if err := <-done; err == nil {
					t.Error("the switch succeeded")
				}
				if said := d.take(); !strings.Contains(said, "bad is removed, bad is closed") {
					t.Errorf("what happened: %s", said)
				}
			})
		})
	}
}

// TestSwitchHistories: whatever is told, however writes and removals fail, and however often dataplanes and settings change,
// no rules are removed while the serving ones are not complete; in the end one kernel holds what the last words say, the
// others are empty, and the observers have heard of every change.
func TestSwitchHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &switchWorld{t: t, rnd: rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0)), heard: model.NewState()}
		c := engine.Config{Dataplane: w.plane(0), Place: "0", Resync: time.Duration(w.rnd.IntN(2)) * time.Minute}
		c.Observers = nil // the rig's own
		bubble(t, c, &plane{}, w.live)
	})
}

// switchWorld is three kernels, and an engine that moves between them.
type switchWorld struct {
	t       *testing.T
	rnd     *rand.Rand
	kernels [3]memory.Kernel
	serving int
	rig     *rig
	heard   *model.State
	told    int // deltas in heard
}

// careful is a dataplane that looks, before it is removed, whether another serves.
type careful struct {
	engine.Dataplane
	world *switchWorld
	at    int
}

func (w *switchWorld) plane(at int) engine.Dataplane {
	unlucky := memory.Unlucky(0.2, w.rnd.Uint64())
	return careful{memory.Faulty(memory.New(&w.kernels[at]), unlucky), w, at}
}

func (c careful) Remove(ctx context.Context) error {
	w := c.world
	for _, d := range w.rig.observer.applied[w.told:] { // on the engine's goroutine, as observers are
		w.heard.Apply(model.Delta{Frontends: d.Frontends, GoneFrontends: d.GoneFrontends})
		w.told++
	}
	complete, wanted := false, slices.Collect(maps.Values(w.rig.resolver.held))
	for i := range w.kernels {
		held := w.kernels[i].State().Frontends
		whole := true
		for k := range w.heard.Frontends { // one that is to go may have gone already
			whole = whole && (held[k].Key == k || !slices.Contains(wanted, k))
		}
		complete = complete || i != c.at && whole
	}
	if w.rig.Status().Failures == 0 && !complete { // what fails may have half its effect
		w.t.Errorf("kernel %d is emptied while no other is complete", c.at)
	}
	if w.rnd.IntN(4) == 0 {
		return errPlane
	}
	return c.Dataplane.Remove(ctx)
}

func (w *switchWorld) live(r *rig) {
	w.rig = r
	want := map[string]string{}
	port := uint16(80)
	for i := range w.rnd.IntN(60) + 6 {
		switch n := w.rnd.IntN(10); {
		case i == 5:
			r.sink.Synced()
		case n == 0:
			port = w.change(port)
		default:
			name, ip := fmt.Sprint(w.rnd.IntN(6)), fmt.Sprintf("10.0.0.%d", w.rnd.IntN(200)+1)
			if want[name] = ip; n < 4 || taken(want, name, ip) {
				delete(want, name)
				r.gone(name)
			} else {
				r.service(name, ip)
			}
		}
		time.Sleep(time.Duration(w.rnd.IntN(300)) * ms)
	}
	for i := range w.kernels {
		w.kernels[i].Fail(nil)
	}
	r.calls(10 * time.Minute)
	w.check(slices.Sorted(maps.Values(want)), port)
}

// change moves to some dataplane, perhaps of the same place, with another setting, and comes back with the one that holds.
func (w *switchWorld) change(port uint16) uint16 {
	at, now := w.rnd.IntN(len(w.kernels)), uint16(80+w.rnd.IntN(3))
	if w.rnd.IntN(3) == 0 {
		w.kernels[at].Fail(memory.Unlucky(0.8, w.rnd.Uint64())) // so that it is given up, perhaps
	} else {
		w.kernels[at].Fail(memory.Unlucky(0.05, w.rnd.Uint64()))
	}
	err := w.rig.Switch(w.rig.t.Context(), engine.Change{Dataplane: w.plane(at), Place: fmt.Sprint(at),
		Configure: func() { w.rig.resolver.setPort(now) }, Restore: func() { w.rig.resolver.setPort(port) }})
	if err != nil {
		if at != w.serving {
			w.kernels[at].Fail(nil)
		}
		return port
	}
	w.serving = at
	return now
}

func (w *switchWorld) check(want []string, port uint16) {
	for i := range w.kernels {
		held := w.kernels[i].State().SortedFrontends()
		if i != w.serving {
			if len(held) > 0 {
				w.t.Errorf("kernel %d is left with %v; %+v", i, ips(held), w.rig.Status())
			}
			continue
		}
		if !slices.Equal(ips(held), want) {
			w.t.Errorf("the serving kernel holds %v, want %v", ips(held), want)
		}
		for _, f := range held {
			if f.Key.Port != port {
				w.t.Errorf("%v, want port %d", f.Key, port)
			}
		}
	}
	heard := model.NewState()
	for _, d := range w.rig.observer.applied {
		heard.Apply(model.Delta{Frontends: d.Frontends, GoneFrontends: d.GoneFrontends})
	}
	if told := ips(heard.SortedFrontends()); !slices.Equal(told, want) {
		w.t.Errorf("observers believe %v, want %v", told, want)
	}
}
