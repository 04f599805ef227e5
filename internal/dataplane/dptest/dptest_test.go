package dptest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// TestStoriesAreComplete counts what the stories' packets meet: every cell that the model can express must appear.
func TestStoriesAreComplete(t *testing.T) {
	met := map[string]int{}
	for _, s := range stories {
		for _, f := range families {
			keys := map[model.Key]bool{}
			for _, st := range s.steps(f) {
				state := st.state()
				for k := range state.Frontends {
					keys[k] = true
				}
				for _, p := range packets(sortedKeys(keys)) {
					for _, what := range facts(state, p) {
						met[what]++
					}
				}
			}
		}
	}
	for _, cell := range cells() {
		if met[cell] == 0 {
			t.Errorf("no packet of any story meets: %s", cell)
		}
	}
}

// facts says what a packet shows.
func facts(s *model.State, p model.Packet) []string {
	d := s.Decide(p)
	f := family{p.Dst.Addr().Is6()}
	out := []string{line(f, d.Origin, d.Verdict)}
	if d.Frontend == nil {
		return out
	}
	pool := s.Pools[d.Route.Pool]
	out = append(out, line("route ", f, d.Origin, d.Route.Else, d.Route.SNAT, len(pool.Backends) == 0),
		line("kind ", f, d.Frontend.About.Kind, p.Proto, d.Origin), line("scope ", f, d.Frontend.About.Kind, d.Origin, d.Route.Pool.Scope, d.Verdict))
	if d.Frontend.Allow != nil {
		out = append(out, line("allow ", f, len(d.Frontend.Allow) > 0, d.Origin, d.Verdict))
	}
	if pool.Sticky > 0 && d.Verdict == model.Forward {
		out = append(out, line("sticky ", f, d.Origin))
	}
	if len(pool.Draining) > 0 && d.Verdict == model.Forward {
		out = append(out, line("draining ", f))
	}
	if slices.ContainsFunc(d.Backends, func(b model.Backend) bool { return b.Addr.Addr() == p.Src.Addr() }) {
		out = append(out, line("hairpin ", f, d.SNAT, len(d.Backends) > 1))
	}
	if d.Frontend.Key.NodePort() && p.Dst.Addr().IsLoopback() {
		out = append(out, line("localhost ", f, d.Verdict))
	}
	return out
}

func line(args ...any) string { return strings.TrimSpace(fmt.Sprintln(args...)) }

// cells are the facts that must be shown.
func cells() []string {
	var out []string
	add := func(args ...any) { out = append(out, line(args...)) }
	for _, f := range families {
		for _, o := range model.Origins {
			for _, v := range []model.Verdict{model.Pass, model.Forward, model.Reject, model.Drop} {
				add(f, o, v)
			}
			for _, snat := range []bool{false, true} {
				for _, empty := range []bool{false, true} {
					add("route ", f, o, model.Reject, snat, empty)
					add("route ", f, o, model.Drop, snat, empty)
				}
			}
			for _, k := range []model.Kind{model.ClusterIP, model.NodePort, model.ExternalIP, model.LoadBalancer} {
				for _, p := range []model.Proto{model.TCP, model.UDP, model.SCTP} {
					add("kind ", f, k, p, o)
				}
				for _, v := range []model.Verdict{model.Forward, model.Reject} {
					add("scope ", f, k, o, model.Cluster, v)
				}
				// Only an outside client follows the Local policy of an outside address; at a ClusterIP everybody does.
				if o == model.FromOutside || k == model.ClusterIP {
					add("scope ", f, k, o, model.Local, model.Forward)
					add("scope ", f, k, o, model.Local, model.Drop)
				}
			}
			add("allow ", f, true, o, model.Forward)
			add("allow ", f, true, o, model.Drop)
			add("allow ", f, false, o, model.Drop)
			add("sticky ", f, o)
		}
		add("draining ", f)
		for _, several := range []bool{false, true} {
			add("hairpin ", f, false, several)
			add("hairpin ", f, true, several)
		}
	}
	add("localhost ", family{false}, model.Forward)
	add("localhost ", family{false}, model.Reject)
	return out
}

// conform runs the whole suite and gives the first complaint.
func conform(fresh func() Subject, histories int) error {
	for _, s := range stories {
		for _, f := range families {
			if err := play(fresh(), s.steps(f), 1); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	for seed := range histories {
		err := rapid.Custom(func(t *rapid.T) error { return history(t, fresh()) }).Example(seed)
		if err != nil {
			return fmt.Errorf("history %d: %w", seed, err)
		}
	}
	return nil
}

// bent is a dataplane that gets some things wrong.
type bent struct {
	engine.Dataplane
	hear func(model.Delta) model.Delta // what it understands of a delta
	dump func(*model.State)
}

func (b bent) Apply(ctx context.Context, d model.Delta) error {
	if b.hear != nil {
		d = b.hear(d)
	}
	return b.Dataplane.Apply(ctx, d)
}

func (b bent) Dump(ctx context.Context) (*model.State, error) {
	s, err := b.Dataplane.Dump(ctx)
	if b.dump != nil && err == nil {
		b.dump(s)
	}
	return s, err
}

func bend(hear func(model.Delta) model.Delta) func() Subject {
	return wrap(func(d engine.Dataplane) engine.Dataplane { return bent{Dataplane: d, hear: hear} })
}

func wrap(f func(engine.Dataplane) engine.Dataplane) func() Subject {
	return func() Subject {
		s := Memory()
		open := s.Open
		s.Open = func() (engine.Dataplane, error) {
			d, err := open()
			return f(d), err
		}
		return s
	}
}

func sending(f func(model.Packet, Outcome) Outcome) func() Subject {
	return func() Subject {
		s := Memory()
		send := s.Send
		s.Send = func(n model.Node, p model.Packet) (Outcome, error) {
			o, err := send(n, p)
			return f(p, o), err
		}
		return s
	}
}

// eachRoute changes all routes of what a dataplane hears.
func eachRoute(f func(*model.Frontend, *model.Route)) func() Subject {
	return bend(func(d model.Delta) model.Delta {
		d.Frontends = slices.Clone(d.Frontends)
		for i := range d.Frontends {
			for o := range d.Frontends[i].Routes {
				f(&d.Frontends[i], &d.Frontends[i].Routes[o])
			}
		}
		return d
	})
}

// forgetful writes what differs from what it believes is there, and notes it after success: the order that shadow forbids.
type forgetful struct {
	engine.Dataplane
	believed *model.State
}

func (f forgetful) Apply(ctx context.Context, d model.Delta) error {
	if d.Full {
		found, err := f.Dump(ctx)
		if err != nil {
			return err
		}
		*f.believed = *found.Clone()
	}
	next := f.believed.Clone()
	next.Apply(d)
	if err := f.Dataplane.Apply(ctx, diff(f.believed, next)); err != nil {
		return err
	}
	*f.believed = *next
	return nil
}

// mistakes are dataplanes that get one thing wrong each.
var mistakes = map[string]func() Subject{
	"ignores GoneFrontends": bend(func(d model.Delta) model.Delta { d.GoneFrontends = nil; return d }),
	"ignores GonePools":     bend(func(d model.Delta) model.Delta { d.GonePools = nil; return d }),
	"ignores GoneChecks":    bend(func(d model.Delta) model.Delta { d.GoneChecks = nil; return d }),
	"ignores Full":          bend(func(d model.Delta) model.Delta { d.Full = false; return d }),
	"ignores a new Node": bend(func(d model.Delta) model.Delta {
		if !d.Full {
			d.Node = nil
		}
		return d
	}),
	"ignores pools alone": bend(func(d model.Delta) model.Delta {
		if len(d.Frontends) == 0 {
			d.Pools = nil
		}
		return d
	}),
	"ignores Allow": eachRoute(func(f *model.Frontend, _ *model.Route) { f.Allow = nil }),
	"takes nobody for all": eachRoute(func(f *model.Frontend, _ *model.Route) {
		if len(f.Allow) == 0 {
			f.Allow = nil
		}
	}),
	"ignores Owned":     eachRoute(func(f *model.Frontend, _ *model.Route) { f.Owned = false }),
	"never hides":       eachRoute(func(_ *model.Frontend, r *model.Route) { r.SNAT = false }),
	"always hides":      eachRoute(func(_ *model.Frontend, r *model.Route) { r.SNAT = true }),
	"always rejects":    eachRoute(func(_ *model.Frontend, r *model.Route) { r.Else = model.Reject }),
	"always drops":      eachRoute(func(_ *model.Frontend, r *model.Route) { r.Else = model.Drop }),
	"one route for all": eachRoute(func(f *model.Frontend, r *model.Route) { *r = f.Routes[model.FromOutside] }),
	"node as outside":   eachRoute(func(f *model.Frontend, r *model.Route) { f.Routes[model.FromNode] = f.Routes[model.FromOutside] }),
	"pods as outside":   eachRoute(func(f *model.Frontend, r *model.Route) { f.Routes[model.FromPod] = f.Routes[model.FromOutside] }),
	"confuses protocols": sending(func(p model.Packet, o Outcome) Outcome {
		if p.Proto == model.SCTP {
			o.Verdict = model.Reject
		}
		return o
	}),
	"no hairpin": sending(func(p model.Packet, o Outcome) Outcome { o.SNAT = o.SNAT && o.Backend.Addr() != p.Src.Addr(); return o }),
	"v6 takes loopback": sending(func(p model.Packet, o Outcome) Outcome {
		if p.Dst.Addr().IsLoopback() {
			o.Verdict = model.Reject
		}
		return o
	}),
	"uses draining backends": bend(func(d model.Delta) model.Delta {
		d.Pools = slices.Clone(d.Pools)
		for i, p := range d.Pools {
			d.Pools[i].Backends = slices.SortedFunc(slices.Values(slices.Concat(p.Backends, p.Draining)), model.Backend.Compare)
		}
		return d
	}),
	"one backend does all": func() Subject {
		first := map[string]Outcome{}
		return sending(func(p model.Packet, o Outcome) Outcome {
			if old, ok := first[p.String()]; ok && old.Verdict == o.Verdict {
				return old
			}
			first[p.String()] = o
			return o
		})()
	},
	"never sticks": bend(func(d model.Delta) model.Delta {
		d.Pools = slices.Clone(d.Pools)
		for i := range d.Pools {
			d.Pools[i].Sticky = 0
		}
		return d
	}),
	"forgets at a restart who sticks": func() Subject {
		m := newMind()
		s := m.subject()
		s.Open = func() (engine.Dataplane, error) {
			clear(m.stuck)
			return memory.New(m.kernel), nil
		}
		return s
	},
	"does not read the kernel again": wrap(func(d engine.Dataplane) engine.Dataplane {
		read := false
		return bent{Dataplane: d, hear: func(d model.Delta) model.Delta {
			d.Full, read = d.Full && !read, true
			return d
		}}
	}),
	"notes after success": wrap(func(d engine.Dataplane) engine.Dataplane { return forgetful{d, model.NewState()} }),
	"dumps too little": wrap(func(d engine.Dataplane) engine.Dataplane {
		return bent{Dataplane: d, dump: func(s *model.State) { clear(s.Frontends) }}
	}),
	"dumps too much": wrap(func(d engine.Dataplane) engine.Dataplane {
		return bent{Dataplane: d, dump: func(s *model.State) { s.Pools[model.PoolID{Service: "x"}] = model.Pool{Backends: []model.Backend{{}}} }}
	}),
	"Remove does nothing": wrap(func(d engine.Dataplane) engine.Dataplane { return stays{d} }),
}

// TestFindsMistakes: the suite must complain of each mistake.
func TestFindsMistakes(t *testing.T) {
	for name, fresh := range mistakes {
		t.Run(name, func(t *testing.T) {
			err := conform(fresh, 300)
			if err == nil {
				t.Fatal("the suite finds nothing wrong with it")
			}
			t.Log(err)
		})
	}
}

type stays struct{ engine.Dataplane }

func (stays) Remove(context.Context) error { return nil }
