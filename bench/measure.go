package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"
)

// Result is what one program showed in one round.
type Result struct {
	Program, Backend    string
	Services, Endpoints int
	Round               int
	Load                float64 // one-minute load average of the machine at the start
	Error               string  `json:",omitempty"` // why what follows some point was not measured

	Cold, ColdCPU float64 // s
	Unfinished    bool    // the deadline passed; Cold is then a lower bound and all that follows is absent
	Unserved      int     // Services that did not lead to their endpoints after Cold

	IdleCPU        float64 // ms per s
	RSS, Anon      float64 // MiB, after the pause
	RSSEnd, RSSTop float64 // MiB, after all changes; the most there ever was

	Change       Times   // ms
	Lone         Times   // ms
	Delivery     float64 // ms, median of the watch's own delivery
	CPUPerChange float64 // ms

	Connect map[string]Latency
	Walked  map[string]int // rules that a packet meets in the tree of Services

	Restart, RestartReady, RestartCPU float64 // s
	RestartConnected, RestartFailed   int
	RestartSlowest                    float64 // ms

	Stop, Clean float64 // s
	Left        int     // mentions of KUBE- in the rules after the clean-up
}

// Times are of changes, in milliseconds beyond the watch's own delivery.
type Times struct{ P50, P99, Max float64 }

func timesOf(ms []float64) Times {
	slices.Sort(ms)
	return Times{quantile(ms, 0.5), quantile(ms, 0.99), quantile(ms, 1)}
}

// bench is a run.
type bench struct {
	o       options
	world   *world
	api     *control
	results []*Result
	set     []int // which set of endpoints each changed Service has now; by Service
}

// run measures every program with every back end, each after the other, round after round.
func (b *bench) run() error {
	b.set = make([]int, b.o.services)
	var failed []error
	for round := range b.o.rounds {
		for _, backend := range b.o.backendList() {
			paths := []string{b.o.fairlead, b.o.kubeProxy}
			if round%2 == 1 {
				slices.Reverse(paths)
			}
			for _, path := range paths {
				if path == "" {
					continue
				}
				p := newProgram(b.o, path, backend)
				r := &Result{Program: p.name, Backend: backend, Services: b.o.services, Endpoints: b.o.endpoints,
					Round: round + 1, Load: load(), Connect: map[string]Latency{}, Walked: map[string]int{}}
				b.results = append(b.results, r)
				if err := b.measure(p, r); err != nil {
					say("%s %s: %v", p.name, backend, err)
					r.Error = err.Error()
					failed = append(failed, fmt.Errorf("%s %s, round %d: %w", p.name, backend, round+1, err))
				}
			}
		}
	}
	return errors.Join(failed...)
}

// measure is one program's turn, and leaves nothing of it.
func (b *bench) measure(p *program, r *Result) (err error) {
	if err := flush(); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	if err := b.cold(p, r); err != nil || r.Unfinished {
		if p.cmd != nil {
			p.end(syscall.SIGKILL)
		}
		return errors.Join(err, flush())
	}
	for _, step := range []struct {
		name string
		do   func(*program, *Result) error
		api  bool // changes something through the API
	}{{"settle", b.settle, false}, {"changes", b.changes, true}, {"connect", b.connect, false}, {"restart", b.restart, true}} {
		if step.api && b.o.manifests {
			continue
		}
		if err = step.do(p, r); err != nil {
			err = fmt.Errorf("%s: %w", step.name, err)
			break
		}
	}
	r.Stop = p.end(syscall.SIGTERM).Seconds()
	took, left, cleaned := p.clean(b.o.deadline)
	r.Clean, r.Left = took.Seconds(), left
	say("%s %s: stopped in %.1f s, cleaned up in %.1f s, %d left", p.name, p.backend, r.Stop, r.Clean, left)
	return errors.Join(err, cleaned)
}

// cold: from the start of the process until all Services are served.
func (b *bench) cold(p *program, r *Result) error {
	began := time.Now()
	if err := p.start(); err != nil {
		return err
	}
	if p.profile != "" {
		go p.takeProfile("profile?seconds=10", "cold.pprof")
	}
	done, err := b.world.waitAll(b.o.services, began.Add(b.o.deadline), p.alive)
	if err != nil {
		return err
	}
	r.Cold, r.ColdCPU, r.Unfinished = time.Since(began).Seconds(), p.cpu().Seconds(), !done
	if !done {
		say("%s %s: not all rules after %.0f s, %.0f s CPU", p.name, p.backend, r.Cold, r.ColdCPU)
		return nil
	}
	r.Unserved, err = b.world.unserved(b.o.services)
	say("%s %s: all rules after %.2f s, %.2f s CPU, %d Services unserved (%v)", p.name, p.backend, r.Cold, r.ColdCPU, r.Unserved, err)
	return nil
}

// settle: memory, and what it costs to do nothing.
func (b *bench) settle(p *program, r *Result) error {
	time.Sleep(b.o.settle)
	r.RSS, r.Anon, _ = p.memory()
	if p.profile != "" {
		p.takeProfile("heap?gc=1", "heap.pprof")
	}
	before, began := p.cpu(), time.Now()
	time.Sleep(5 * time.Second)
	r.IdleCPU = float64((p.cpu() - before).Microseconds()) / 1000 / time.Since(began).Seconds()
	say("%s %s: %.1f MiB, %.1f of it not of files; idle %.1f ms/s", p.name, p.backend, r.RSS, r.Anon, r.IdleCPU)
	return p.alive()
}

// changes: one Service's endpoints are replaced by other ones, again and again.
func (b *bench) changes(p *program, r *Result) error {
	i := b.o.services / 2
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seen, err := b.api.watch(ctx, i)
	if err != nil {
		return err
	}
	first, ok := <-seen // the watch begins with what is there
	if !ok || first.set != b.set[i] {
		return errors.New("the watch does not begin with the endpoints that are there")
	}
	if _, _, err := b.change(p, i, seen); err != nil { // the first one after a pause warms up
		return err
	}
	if p.profile != "" {
		go p.takeProfile("profile?seconds=5", "changes.pprof")
	}
	var beyond, delivered, lone []float64
	before := p.cpu()
	for range b.o.changes {
		d, x, err := b.change(p, i, seen)
		if err != nil {
			return err
		}
		delivered, beyond = append(delivered, ms(d)), append(beyond, ms(x))
	}
	r.CPUPerChange = ms(p.cpu()-before) / float64(b.o.changes)
	for range b.o.lone {
		time.Sleep(3 * time.Second)
		_, x, err := b.change(p, i, seen)
		if err != nil {
			return err
		}
		lone = append(lone, ms(x))
	}
	r.Change, r.Lone, r.Delivery = timesOf(beyond), timesOf(lone), median(delivered)
	r.RSSEnd, _, r.RSSTop = p.memory()
	say("%s %s: change p50 %.2f ms, p99 %.2f ms, lone %.2f ms; CPU %.2f ms; delivery %.2f ms", p.name, p.backend,
		r.Change.P50, r.Change.P99, r.Lone.P50, r.CPUPerChange, r.Delivery)
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// change makes the other set the endpoints. delivery is how long a watch took to tell, beyond how long after that the first
// connection reached the new set; below zero when that was earlier.
func (b *bench) change(p *program, i int, seen <-chan delivery) (delivery, beyond time.Duration, err error) {
	next := 1 - b.set[i]
	sent := make(chan error, 1)
	began := time.Now()
	go func() { sent <- b.api.endpoints(i, next, b.o.endpoints) }()
	at, err := b.world.waitSet(i, next, began.Add(b.o.deadline), p.alive)
	if err := errors.Join(err, <-sent); err != nil {
		return 0, 0, err
	}
	b.set[i] = next
	d, ok := <-seen
	if !ok || d.set != next {
		return 0, 0, errors.New("our own watch missed a change")
	}
	return d.at.Sub(began), at.Sub(d.at), nil
}

// The places that connections are made to.
const (
	toDirect  = "direct"
	toTracked = "direct, conntrack"
	toPod     = "pod, no Service"
	toFirst   = "first Service"
	toMiddle  = "middle Service"
	toLast    = "worst Service"
)

// connect: what a connection costs at the first, the middle and the worst place in the tree of rules.
func (b *bench) connect(p *program, r *Result) error {
	byPlace := b.placed(p, r)
	places := []place{{toDirect, direct}, {toTracked, tracked},
		{toPod, netip.AddrPortFrom(endpointAddr(0, b.set[0], 0), podPort)}}
	for name, i := range map[string]int{toFirst: 0, toMiddle: len(byPlace) / 2, toLast: len(byPlace) - 1} {
		places = append(places, place{name, netip.AddrPortFrom(byPlace[i], servicePort)})
	}
	var err error
	r.Connect, err = b.world.latency(places, b.o.connects, b.o.repeats)
	if err != nil {
		return err
	}
	for _, name := range []string{toDirect, toTracked, toPod, toFirst, toMiddle, toLast} {
		l := r.Connect[name]
		say("%s %s: connect, %s: p01 %.2f p50 %.2f p99 %.1f µs; p01 %.2f × direct, %.2f × tracked; %d failed, %d slow; %d rules",
			p.name, p.backend, name, l.P01, l.P50, l.P99, l.ToDirect, l.ToTracked, l.Failed, l.Slow, r.Walked[name])
	}
	return p.alive()
}

// placed are the addresses of the Services in the order of how many rules a packet to each meets; where the rules do not
// say, in the order they were created in.
func (b *bench) placed(p *program, r *Result) []netip.Addr {
	var all []netip.Addr
	cost := walked(p.save("iptables-save", "-t", "nat"))
	for i := range b.o.services {
		if a := serviceAddr(i); len(cost) == 0 || cost[a] > 0 {
			all = append(all, a)
		}
	}
	if len(all) < b.o.services {
		say("%s %s: %d Services have no rule of their own that we know to find", p.name, p.backend, b.o.services-len(all))
	}
	slices.SortStableFunc(all, func(x, y netip.Addr) int { return cost[x] - cost[y] })
	for name, i := range map[string]int{toFirst: 0, toMiddle: len(all) / 2, toLast: len(all) - 1} {
		r.Walked[name] = cost[all[i]]
	}
	return all
}

// restart: killed, and while it is away a Service's endpoints change.
func (b *bench) restart(p *program, r *Result) error {
	i := b.o.services / 3
	l := b.world.startLoop(b.o.services)
	defer func() {
		l.end()
		r.RestartConnected, r.RestartFailed, r.RestartSlowest = l.connected, l.failed, ms(l.slowest)
		say("%s %s: restart %.2f s (says ready %.2f s), %.2f s CPU; %d connections, %d failed (%v), slowest %.1f ms",
			p.name, p.backend, r.Restart, r.RestartReady, r.RestartCPU, l.connected, l.failed, l.err, r.RestartSlowest)
	}()
	time.Sleep(500 * time.Millisecond)
	p.end(syscall.SIGKILL)
	next := 1 - b.set[i]
	if err := b.api.endpoints(i, next, b.o.endpoints); err != nil {
		return err
	}
	b.set[i] = next
	began := time.Now()
	if err := p.start(); err != nil {
		return err
	}
	if p.profile != "" {
		go p.takeProfile("profile?seconds=10", "restart.pprof")
		defer time.Sleep(10 * time.Second)
	}
	ready := make(chan time.Time, 1)
	go func() {
		for !p.says(p.ready) && p.alive() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		ready <- time.Now()
	}()
	at, err := b.world.waitSet(i, next, began.Add(b.o.deadline), p.alive)
	if err != nil {
		return err
	}
	said := <-ready
	r.RestartReady = said.Sub(began).Seconds()
	r.Restart = max(at.Sub(began).Seconds(), r.RestartReady)
	r.RestartCPU = p.cpu().Seconds()
	return p.alive()
}
