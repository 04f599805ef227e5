package relay

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// ListenFailed is the reason of the notice when a NodePort can't be listened for on a loopback address.
const ListenFailed = "FailedToListenOnLocalhost"

// lookAgain is the pause before the state is looked at again, when it could not be.
const lookAgain = time.Second

// Config says what a relay works with.
type Config struct {
	// Look shows the state as it is now (Engine.Do). Nothing of it may be changed, and f keeps only what is in slices. After
	// an error f was not run, and will not be.
	Look func(ctx context.Context, f func(*model.State)) error

	Notice    func(model.Notice)        // told when a listener can't be opened, once for each spell; may be nil
	Listening func(v6 bool, number int) // told how many listeners of a family are open, when that changes; may be nil
	Failed    func(v6 bool)             // told of each failure to open one; may be nil
	Limit     int                       // most connections at a time; 0 is 4096. More of them wait
}

// Relay is an engine.Observer. Deltas tell it what to look at; what is true it asks the state.
type Relay struct {
	c       Config
	told    []netip.Addr // model.Node.LocalhostRelay as last told; of the engine's goroutine
	wake    chan struct{}
	ctx     context.Context // of the goroutine and of all connections
	cancel  func()
	done    chan struct{}
	workers sync.WaitGroup // one accepts at each door, one is in each connection
	slots   chan struct{}  // taken by connections

	mu     sync.Mutex
	news   news
	fronts map[model.Key]model.PoolID              // of all NodePorts that are relayed, with backends or without
	users  map[model.PoolID]map[model.Key]struct{} // the same, by pool

	// Of the goroutine alone:
	doors  map[netip.AddrPort]*door
	shut   map[netip.AddrPort]*door // those of doors that can't be opened
	open   [2]int                   // how many are, by family
	owed   time.Time                // when to look at the state again; zero is never
	counts [2]int                   // as last told to Listening
}

// news is what must be looked at.
type news struct {
	all  bool
	keys map[model.Key]struct{}
}

func (n *news) add(k model.Key) {
	if n.keys == nil {
		n.keys = map[model.Key]struct{}{}
	}
	n.keys[k] = struct{}{}
}

// New starts a relay that listens nowhere as yet.
func New(c Config) *Relay {
	if c.Notice == nil {
		c.Notice = func(model.Notice) {}
	}
	if c.Listening == nil {
		c.Listening = func(bool, int) {}
	}
	if c.Failed == nil {
		c.Failed = func(bool) {}
	}
	if c.Limit == 0 {
		c.Limit = mostConnections
	}
	r := &Relay{c: c, wake: make(chan struct{}, 1), done: make(chan struct{}), slots: make(chan struct{}, c.Limit),
		fronts: map[model.Key]model.PoolID{}, users: map[model.PoolID]map[model.Key]struct{}{},
		doors: map[netip.AddrPort]*door{}, shut: map[netip.AddrPort]*door{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	go r.run()
	return r
}

// Applied notes what a delta may have changed. It costs the size of the delta, and nothing while there is nothing to relay.
func (r *Relay) Applied(d model.Delta, _ time.Duration) {
	all := d.Full && len(r.told) > 0
	if d.Node != nil && !slices.Equal(d.Node.LocalhostRelay, r.told) {
		r.told, all = slices.Clone(d.Node.LocalhostRelay), true
	}
	if len(r.told) == 0 && !all {
		return
	}
	r.mu.Lock()
	r.news.all = r.news.all || all
	if !r.news.all {
		r.note(d)
	}
	some := r.news.all || len(r.news.keys) > 0
	r.mu.Unlock()
	if some {
		r.poke()
	}
}

// note adds the NodePorts that a delta is about, be it by their pools.
func (r *Relay) note(d model.Delta) {
	for _, f := range d.Frontends {
		if relayed(f.Key) {
			r.news.add(f.Key)
		}
	}
	for _, k := range d.GoneFrontends {
		if _, ok := r.fronts[k]; ok {
			r.news.add(k)
		}
	}
	for _, p := range d.Pools {
		for k := range r.users[p.ID] {
			r.news.add(k)
		}
	}
	for _, id := range d.GonePools {
		for k := range r.users[id] {
			r.news.add(k)
		}
	}
}

func relayed(k model.Key) bool { return k.Proto == model.TCP && k.NodePort() }

func (r *Relay) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Close ends all listeners and all connections.
func (r *Relay) Close() {
	r.cancel()
	<-r.done
}

func (r *Relay) run() {
	defer close(r.done)
	for {
		select {
		case <-r.ctx.Done():
			for at := range r.doors {
				r.close(at)
			}
			r.count()
			r.workers.Wait()
			return
		case <-r.wake:
		case <-r.timer():
		}
		r.take()
		r.retry(time.Now())
		r.count()
	}
}

// timer fires when something is to be tried again; nil, which is never, when nothing is.
func (r *Relay) timer() <-chan time.Time {
	next := r.owed
	for _, d := range r.shut {
		if next.IsZero() || d.again.Before(next) {
			next = d.again
		}
	}
	if next.IsZero() {
		return nil
	}
	return time.After(time.Until(next))
}

// take looks at what the news is about, and opens and closes doors accordingly.
func (r *Relay) take() {
	r.owed = time.Time{}
	r.mu.Lock()
	n := r.news
	r.news = news{}
	r.mu.Unlock()
	if !n.all && len(n.keys) == 0 {
		return
	}
	var now map[netip.AddrPort]target
	if err := r.c.Look(r.ctx, func(s *model.State) { now = r.find(s, n) }); err != nil {
		klog.V(2).InfoS("The relay of localhost can't look at the state", "err", err)
		r.owe(n)
		return
	}
	if n.all {
		for at := range r.doors {
			if len(now[at].backends) == 0 {
				r.close(at)
			}
		}
	}
	for at, to := range now {
		r.lead(at, to)
	}
}

// owe puts news back that could not be looked at.
func (r *Relay) owe(n news) {
	r.owed = time.Now().Add(lookAgain)
	r.mu.Lock()
	defer r.mu.Unlock()
	n.all = n.all || r.news.all
	for k := range r.news.keys {
		n.add(k)
	}
	r.news = n
}

// find gives each place that the news is about the target it has now; one without backends is none. It runs on the engine's
// goroutine.
func (r *Relay) find(s *model.State, n news) map[netip.AddrPort]target {
	r.mu.Lock()
	defer r.mu.Unlock()
	keys := n.keys
	if n.all {
		clear(r.fronts)
		clear(r.users)
		keys = nodePorts(s)
	}
	now := map[netip.AddrPort]target{}
	for k := range keys {
		f, ok := s.Frontends[k]
		r.enter(k, f.Routes[model.FromNode].Pool, ok)
		for _, a := range s.Node.LocalhostRelay {
			if a.Is6() == k.V6() {
				now[netip.AddrPortFrom(a, k.Port)] = targetOf(s, f)
			}
		}
	}
	return now
}

// nodePorts lists the NodePorts to relay.
func nodePorts(s *model.State) map[model.Key]struct{} {
	keys := map[model.Key]struct{}{}
	if len(s.Node.LocalhostRelay) > 0 {
		for k := range s.Frontends {
			if relayed(k) {
				keys[k] = struct{}{}
			}
		}
	}
	return keys
}

// enter writes down which pool a NodePort has, or that there is no such NodePort.
func (r *Relay) enter(k model.Key, pool model.PoolID, there bool) {
	if old, ok := r.fronts[k]; ok {
		delete(r.users[old], k)
		if len(r.users[old]) == 0 {
			delete(r.users, old)
		}
		delete(r.fronts, k)
	}
	if !there {
		return
	}
	r.fronts[k] = pool
	if r.users[pool] == nil {
		r.users[pool] = map[model.Key]struct{}{}
	}
	r.users[pool][k] = struct{}{}
}

// count tells how many listeners are open, when that changed.
func (r *Relay) count() {
	for i, n := range r.open {
		if n != r.counts[i] {
			r.counts[i] = n
			r.c.Listening(i == 1, n)
		}
	}
}

// retry opens what could not be opened, where it is time.
func (r *Relay) retry(now time.Time) {
	for _, d := range slices.Collect(maps.Values(r.shut)) {
		if !now.Before(d.again) {
			r.tryOpen(d)
		}
	}
}

func fam(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}
