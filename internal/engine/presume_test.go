package engine_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

var (
	oldKey   = model.Key{IP: netip.MustParseAddr("10.0.0.9"), Port: 80, Proto: model.TCP}
	oldPool  = model.PoolID{Service: "ns/old"}
	backends = []model.Backend{{Addr: netip.MustParseAddrPort("10.1.0.1:80")}}
)

// held is what a kernel was left with.
func held() *model.State {
	s := model.NewState()
	s.Apply(model.Delta{Frontends: []model.Frontend{{Key: oldKey}}, Pools: []model.Pool{{ID: oldPool, Backends: backends}},
		Checks: []model.Check{{Service: "ns/old", Port: 30000}}})
	return s
}

// What is only presumed is served, and takes nothing away: neither what the kernel was found to hold, nor what was presumed
// itself. When the truth is known, all that it does not have goes, and observers hear of it.
func TestPresumed(t *testing.T) {
	bubble(t, engine.Config{}, &plane{found: held()}, func(r *rig) {
		other := r.Sink("other")
		r.service("a", "10.0.0.1")
		r.service("b", "10.0.0.2")
		r.sink.Presumed()
		r.want(0, time.Hour)
		if s := r.Status(); s.Presumed || s.Synced {
			t.Errorf("while another source has told nothing: %+v", s)
		}
		other.Synced()
		d := r.want(1, time.Hour)[0].d
		if !d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.1", "10.0.0.2", "10.0.0.9"}) || len(d.Pools) != 1 || len(d.Checks) != 1 {
			t.Errorf("first delta %+v", d)
		}
		if s := r.Status(); !s.Presumed || s.Synced || s.Sources["test"] || !s.Sources["other"] || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		r.gone("a")
		r.want(1, time.Hour)
		r.service("c", "10.0.0.3")
		if d := r.want(2, time.Minute)[1].d; d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.3"}) || len(d.GoneFrontends) != 0 {
			t.Errorf("news while presumed: %+v", d)
		}
		r.sink.Synced()
		r.sink.Presumed() // nobody knows less than before
		if d := r.want(3, time.Minute)[2].d; !d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.2", "10.0.0.3"}) || len(d.Pools)+len(d.Checks) != 0 {
			t.Errorf("the truth: %+v", d)
		}
		last := r.observer.applied[2]
		if !slices.Equal(keyIPs(last.GoneFrontends), []string{"10.0.0.1", "10.0.0.9"}) || !slices.Equal(last.GonePools, []model.PoolID{oldPool}) || !slices.Equal(last.GoneChecks, []string{"ns/old"}) {
			t.Errorf("observers heard %+v", last)
		}
		if s := r.Status(); s.Presumed || !s.Synced {
			t.Errorf("status %+v", s)
		}
		r.gone("b")
		if d := r.want(4, time.Minute)[3].d; d.Full || !slices.Equal(keyIPs(d.GoneFrontends), []string{"10.0.0.2"}) {
			t.Errorf("afterwards: %+v", d)
		}
	})
}

// A pool that is presumed to be empty keeps the backends that are served: its slices may be told later.
func TestPresumedEmptiesNoPool(t *testing.T) {
	bubble(t, engine.Config{}, &plane{found: held()}, func(r *rig) {
		say := func(ps ...model.Pool) { r.resolver.next = model.Delta{Pools: ps}; r.sink.Addrs(nil) }
		say(model.Pool{ID: oldPool, Sticky: time.Hour})
		r.sink.Presumed()
		if got := r.want(1, time.Minute)[0].d.Pools; len(got) != 1 || len(got[0].Backends) != 1 || got[0].Sticky != time.Hour {
			t.Errorf("presumed to be empty: %+v", got)
		}
		two := append([]model.Backend{{Addr: netip.MustParseAddrPort("10.1.0.0:80")}}, backends...)
		say(model.Pool{ID: oldPool, Backends: two})
		if got := r.want(2, time.Minute)[1].d.Pools; len(got) != 1 || len(got[0].Backends) != 2 {
			t.Errorf("with backends: %+v", got)
		}
		say(model.Pool{ID: oldPool})
		r.want(3, time.Minute)
		r.sink.Synced()
		if got := r.want(4, time.Minute)[3].d.Pools; len(got) != 1 || len(got[0].Backends) != 0 {
			t.Errorf("known to be empty: %+v", got)
		}
	})
}

// blind can't be read for a while.
type blind struct {
	*plane
	dumps int
}

func (b *blind) Dump(ctx context.Context) (*model.State, error) {
	if b.dumps++; b.dumps < 4 {
		return nil, errPlane
	}
	return b.plane.Dump(ctx)
}

// While nothing may be taken away and the kernel can't be read, nothing is written.
func TestPresumedOverAnUnreadableKernel(t *testing.T) {
	p := &plane{found: held()}
	b := &blind{plane: p}
	bubble(t, engine.Config{Dataplane: b}, p, func(r *rig) {
		r.service("a", "10.0.0.1")
		r.sink.Presumed()
		r.want(0, 50*ms)
		if s := r.Status(); !errors.Is(s.LastError, errPlane) || s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		d := r.want(1, time.Minute)[0].d
		if !d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.1", "10.0.0.9"}) {
			t.Errorf("first delta %+v", d)
		}
	})
}

// A switch while sources presume takes nothing away either, whether it works or not.
func TestSwitchWhilePresumed(t *testing.T) {
	for _, fails := range []bool{false, true} {
		bubble(t, engine.Config{Place: "old"}, &plane{found: held()}, func(r *rig) {
			r.service("a", "10.0.0.1")
			r.sink.Presumed()
			r.want(1, time.Minute)
			next := &plane{start: r.plane.start}
			if fails {
				next.fail = always
			}
			err := r.Switch(r.t.Context(), engine.Change{Dataplane: next, Place: "new",
				Configure: func() { r.resolver.setPort(81) }, Restore: func() { r.resolver.setPort(80) }})
			if fails != (err != nil) {
				t.Fatal(err)
			}
			if d := next.seen()[0].d; !d.Full || !slices.Equal(ips(d.Frontends), []string{"10.0.0.1", "10.0.0.1", "10.0.0.9"}) {
				t.Errorf("the new dataplane was told %+v", d)
			}
			r.sink.Synced()
			r.calls(time.Minute)
			last := next
			if fails {
				last = r.plane
			}
			calls := last.seen()
			d := calls[len(calls)-1].d
			if want := map[bool]uint16{false: 81, true: 80}[fails]; !d.Full || len(d.Frontends) != 1 || d.Frontends[0].Key.Port != want {
				t.Errorf("fails %v: the truth, port %d: %+v", fails, want, d)
			}
		})
	}
}

// guarded is a dataplane over a kernel in which nothing that was served may vanish for as long as the truth is not known.
type guarded struct {
	engine.Dataplane
	kernel *memory.Kernel
	synced func() bool
	served map[model.Key]bool
	lost   []string
}

func (g *guarded) Apply(ctx context.Context, d model.Delta) error {
	err := g.Dataplane.Apply(ctx, d)
	if g.synced() {
		return err
	}
	now := g.kernel.State().Frontends
	for k := range g.served {
		if _, ok := now[k]; !ok {
			g.lost = append(g.lost, k.String())
		}
	}
	if err == nil {
		for k := range now {
			g.served[k] = true
		}
	}
	return err
}

// TestPresumedHistories: over lives of one kernel, each beginning with what an earlier one remembers, with writes and reads that
// fail: nothing vanishes before all is synced, then the kernel holds the truth, and observers have heard of every change.
func TestPresumedHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		k := &memory.Kernel{}
		k.Fail(memory.Unlucky(0.1, rapid.Uint64().Draw(rt, "seed")))
		journal := map[string]string{}
		for range rapid.IntRange(1, 3).Draw(rt, "lives") {
			presumedLife(t, rt, k, journal)
		}
	})
}

func presumedLife(t *testing.T, rt *rapid.T, k *memory.Kernel, journal map[string]string) {
	rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "life"), 0))
	heard := k.State()
	g := &guarded{Dataplane: memory.Faulty(memory.New(k), memory.Unlucky(0.1, rnd.Uint64())), kernel: k, served: map[model.Key]bool{}}
	for key := range heard.Frontends {
		g.served[key] = true
	}
	c := engine.Config{Dataplane: g, MinSync: time.Duration(rnd.IntN(2)) * time.Second, Resync: time.Duration(rnd.IntN(2)) * time.Minute}
	g.synced = func() bool { return false }
	bubble(t, c, &plane{}, func(r *rig) {
		told := map[string]string{}
		for name, ip := range journal {
			if rnd.IntN(4) > 0 { // the journal may lack the last words
				told[name] = ip
				r.service(name, ip)
			}
		}
		want := map[string]string{}
		presumes, knows := rnd.IntN(30), rnd.IntN(60)
		for i := range 60 {
			switch i {
			case knows:
				for name := range told {
					if want[name] == "" {
						r.gone(name)
					}
				}
				told = map[string]string{}
				g.synced = func() bool { return r.Status().Synced }
				r.sink.Synced()
			case presumes:
				r.sink.Presumed()
			}
			name, ip := fmt.Sprint(rnd.IntN(6)), fmt.Sprintf("10.0.0.%d", rnd.IntN(200)+1)
			if want[name] = ip; rnd.IntN(3) == 0 || taken(want, name, ip) || taken(told, name, ip) {
				delete(want, name)
				r.gone(name)
			} else {
				r.service(name, ip)
			}
			time.Sleep(time.Duration(rnd.IntN(300)) * ms)
		}
		r.calls(10 * time.Minute)
		if len(g.lost) > 0 {
			t.Fatalf("vanished before all was synced: %v", g.lost[:min(3, len(g.lost))])
		}
		for _, d := range r.observer.applied {
			heard.Apply(model.Delta{Frontends: d.Frontends, GoneFrontends: d.GoneFrontends})
		}
		got := slices.Sorted(maps.Values(want))
		if held := ips(k.State().SortedFrontends()); !slices.Equal(held, got) {
			t.Fatalf("the kernel holds %v, want %v", held, got)
		}
		if told := ips(heard.SortedFrontends()); !slices.Equal(told, got) {
			t.Fatalf("observers believe %v, want %v", told, got)
		}
		clear(journal)
		maps.Copy(journal, want)
	})
}
