package main

import (
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
	Lists, Beyond float64 // s; Cold: until the program had all objects, and from then on
	FullSync      float64 // s, of the writes of everything until then, as the program itself counts
	Unserved      int     // Services that did not lead to their endpoints after Cold

	IdleCPU        float64 // ms per s
	RSS, Anon      float64 // MiB, after the pause
	RSSEnd, RSSTop float64 // MiB, after all changes; the most there ever was

	Changes       int     // back to back
	Change        Times   // ms
	Notice        Times   // ms, until the kernel's own notice of the rules
	Lone          Times   // ms
	Delivery      float64 // ms, median of the API server's delivery
	CPUPerChange  float64 // ms
	SyncPerChange float64 // ms, as the program itself counts
	WaitPerChange float64 // ms that its threads waited for a processor

	Connect map[string]Latency
	Walked  map[string]int // rules that a packet meets in the tree of Services

	Restart, RestartReady, RestartCPU float64 // s
	RestartLists, RestartBeyond       float64 // s; Restart: until the program had all objects, and from then on
	RestartConnected, RestartFailed   int
	RestartSlowest                    float64 // ms

	Stop, Clean float64 // s
	Left        int     // mentions of KUBE- in the rules after the clean-up
}

// Times are of changes, in milliseconds after the API server's packet is at the program.
type Times struct{ P50, P99, Max float64 }

func timesOf(ms []float64) Times {
	slices.Sort(ms)
	return Times{quantile(ms, 0.5), quantile(ms, 0.99), quantile(ms, 1)}
}

// bench is a run.
type bench struct {
	o       options
	world   *world
	api     *control // nil without an API server
	first   *stored  // what the API server made of the first Service
	filled  int      // Services in the API
	set     []int    // which set of endpoints each Service has now
	results []*Result
}

// run measures every program with every number of Services and every back end, each after the other, round after round.
func (b *bench) run() error {
	var failed []error
	for round := range b.o.rounds {
		sizes, paths := slices.Clone(b.o.sizes), []string{b.o.fairlead, b.o.kubeProxy}
		if round%2 == 1 {
			slices.Reverse(sizes)
			slices.Reverse(paths)
		}
		for _, b.o.services = range sizes {
			if err := b.objects(b.o.services); err != nil {
				return errors.Join(append(failed, err)...)
			}
			for _, backend := range b.o.backendList() {
				for _, path := range paths {
					if path != "" {
						failed = append(failed, b.turn(path, backend, round+1))
					}
				}
			}
		}
	}
	return errors.Join(failed...)
}

// turn measures one program once.
func (b *bench) turn(path, backend string, round int) error {
	p := newProgram(b.o, path, backend)
	r := &Result{Program: p.name, Backend: backend, Services: b.o.services, Endpoints: b.o.endpoints,
		Round: round, Load: load(), Connect: map[string]Latency{}, Walked: map[string]int{}}
	b.results = append(b.results, r)
	err := b.measure(p, r)
	if err != nil {
		say("%s: %v", p, err)
		r.Error = err.Error()
		err = fmt.Errorf("%s, %d Services, round %d: %w", p, b.o.services, round, err)
	}
	return err
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
	do := map[step]func(*program, *Result) error{
		stepSettle: b.settle, stepChanges: b.changes, stepConnect: b.connect, stepRestart: b.restart}
	for _, s := range b.o.steps {
		if err = do[s](p, r); err != nil {
			err = fmt.Errorf("%s: %w", s, err)
			break
		}
	}
	r.Stop = p.end(syscall.SIGTERM).Seconds()
	took, left, cleaned := p.clean(b.o.deadline)
	r.Clean, r.Left = took.Seconds(), left
	say("%s: stopped in %.1f s, cleaned up in %.1f s, %d left", p, r.Stop, r.Clean, left)
	return errors.Join(err, cleaned)
}

// cold: from the start of the process until all Services are served.
func (b *bench) cold(p *program, r *Result) error {
	began := time.Now()
	if err := p.start(); err != nil {
		return err
	}
	defer p.profiled("profile?seconds=10", "cold.pprof")()
	done, err := b.world.waitAll(b.o.services, began.Add(b.o.deadline), p.alive)
	if err != nil {
		return err
	}
	r.Cold, r.ColdCPU, r.Unfinished = time.Since(began).Seconds(), p.cpu().Seconds(), !done
	r.Lists, r.Beyond = p.lists(began, r.Cold)
	if !done {
		say("%s: not all rules after %.0f s, %.0f s CPU; its last words: %s", p, r.Cold, r.ColdCPU, p.lastWords())
		return nil
	}
	r.Unserved, err = b.world.unserved(b.o.services)
	r.FullSync = p.firstSync()
	say("%s: all rules after %.2f s (%.2f s after the lists; %.2f s by its own count), %.2f s CPU, %d Services unserved (%v)",
		p, r.Cold, r.Beyond, r.FullSync, r.ColdCPU, r.Unserved, err)
	return nil
}

// settle: memory, and what it costs to do nothing.
func (b *bench) settle(p *program, r *Result) error {
	time.Sleep(b.o.settle)
	r.RSS, r.Anon, _ = p.memory()
	p.profiled("heap?gc=1", "heap.pprof")()
	before, began := p.cpu(), time.Now()
	time.Sleep(5 * time.Second)
	r.IdleCPU = float64((p.cpu() - before).Microseconds()) / 1000 / time.Since(began).Seconds()
	say("%s: %.1f MiB, %.1f of it not of files; idle %.1f ms/s", p, r.RSS, r.Anon, r.IdleCPU)
	return p.alive()
}

// changes: one Service's endpoints are replaced by other ones, again and again.
func (b *bench) changes(p *program, r *Result) error {
	i := b.o.services / 2
	e, err := hear(p)
	if err != nil {
		return err
	}
	defer e.close()
	if _, err := b.change(p, i, e); err != nil { // the first one after a pause warms up
		return err
	}
	defer p.profiled("profile?seconds=20", "changes.pprof")()
	if err := b.backToBack(p, r, i, e); err != nil {
		return err
	}
	var lone []float64
	for range b.o.lone {
		time.Sleep(3 * time.Second)
		c, err := b.change(p, i, e)
		if err != nil {
			return err
		}
		lone = append(lone, ms(c.served.Sub(c.delivered)))
	}
	r.Lone = timesOf(lone)
	r.RSSEnd, _, r.RSSTop = p.memory()
	say("%s: %d changes: p50 %.2f ms, p99 %.2f ms (the kernel's notice %.2f, %.2f), lone %.2f ms; CPU %.2f ms, waiting for one %.2f ms; its own count %.2f ms; delivery %.2f ms",
		p, r.Changes, r.Change.P50, r.Change.P99, r.Notice.P50, r.Notice.P99, r.Lone.P50, r.CPUPerChange, r.WaitPerChange, r.SyncPerChange, r.Delivery)
	return nil
}

// backToBack makes changes, each as soon as the one before it is served.
func (b *bench) backToBack(p *program, r *Result, i int, e *ears) error {
	var beyond, noticed, delivered []float64
	synced, syncs := p.metric(partialSync)
	before, waited, began := p.cpu(), p.waited(), time.Now()
	for len(beyond) < b.o.changes && (len(beyond) < 10 || time.Since(began) < b.o.changing) {
		c, err := b.change(p, i, e)
		if err != nil {
			return err
		}
		delivered = append(delivered, ms(c.delivered.Sub(c.sent)))
		beyond = append(beyond, ms(c.served.Sub(c.delivered)))
		if !c.noticed.IsZero() {
			noticed = append(noticed, ms(c.noticed.Sub(c.delivered)))
		}
	}
	r.Changes = len(beyond)
	r.CPUPerChange = ms(p.cpu()-before) / float64(r.Changes)
	r.WaitPerChange = ms(p.waited()-waited) / float64(r.Changes)
	syncedNow, syncsNow := p.metric(partialSync)
	if syncsNow > syncs {
		r.SyncPerChange = (syncedNow - synced) / (syncsNow - syncs) * 1000
	}
	r.Change, r.Notice, r.Delivery = timesOf(beyond), timesOf(noticed), median(delivered)
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// changed is when what happened to a change.
type changed struct {
	sent      time.Time
	delivered time.Time // the API server's packet was at the program
	noticed   time.Time // the kernel told of the new rules; zero where it does not
	served    time.Time // the first connection had reached the new endpoints
}

// change makes the other set the endpoints.
func (b *bench) change(p *program, i int, e *ears) (c changed, err error) {
	e.forget()
	next := 1 - b.set[i]
	sent := make(chan error, 1)
	c.sent = time.Now()
	go func() { sent <- b.api.endpoints(i, next, b.o.endpoints) }()
	c.noticed, c.served, err = b.world.waitSet(i, next, e, c.sent.Add(b.o.deadline), p.alive)
	if err := errors.Join(err, <-sent); err != nil {
		return c, err
	}
	b.set[i] = next
	c.delivered, err = e.delivery()
	return c, err
}

// The places that connections are made to.
const (
	toDirect  = "direct"
	toTracked = "direct, conntrack"
	toPod     = "pod, no Service"
	toFirst   = "first Service"
	toMiddle  = "middle Service"
	toLast    = "last Service"
)

// connect: what a connection costs at the first, the middle and the last Service, in the order of the rules where that matters.
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
		say("%s: connect, %s: p01 %.2f p50 %.2f p99 %.1f µs; p01 %.2f × direct, %.2f × tracked; %d failed, %d slow; %d rules",
			p, name, l.P01, l.P50, l.P99, l.ToDirect, l.ToTracked, l.Failed, l.Slow, r.Walked[name])
	}
	return p.alive()
}

// placed are the addresses of the Services in the order of how many rules a packet to each meets in iptables mode; in other
// modes, and where the rules do not say, in the order they were created in.
func (b *bench) placed(p *program, r *Result) []netip.Addr {
	var all []netip.Addr
	var cost map[netip.Addr]int
	if p.mode == "iptables" {
		cost = walked(p.save("iptables-save", "-t", "nat"))
	}
	for i := range b.o.services {
		if a := serviceAddr(i); len(cost) == 0 || cost[a] > 0 {
			all = append(all, a)
		}
	}
	if len(all) < b.o.services {
		say("%s: %d Services have no rule of their own that we know to find", p, b.o.services-len(all))
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
		say("%s: restart %.2f s (%.2f s after the lists; says ready %.2f s), %.2f s CPU; %d connections, %d failed (%v), slowest %.1f ms",
			p, r.Restart, r.RestartBeyond, r.RestartReady, r.RestartCPU, l.connected, l.failed, l.err, r.RestartSlowest)
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
	defer p.profiled("profile?seconds=10", "restart.pprof")()
	ready := make(chan time.Time, 1)
	go func() {
		for !p.says(p.ready) && p.alive() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		ready <- time.Now()
	}()
	_, at, err := b.world.waitSet(i, next, nil, began.Add(b.o.deadline), p.alive)
	if err != nil {
		return err
	}
	said := <-ready
	r.RestartReady = said.Sub(began).Seconds()
	r.Restart = max(at.Sub(began).Seconds(), r.RestartReady)
	r.RestartLists, r.RestartBeyond = p.lists(began, r.Restart)
	r.RestartCPU = p.cpu().Seconds()
	return p.alive()
}
