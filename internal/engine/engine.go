package engine

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"fairlead/internal/model"
	"fairlead/internal/source"
)

// Resolver turns objects into deltas. All calls come from one goroutine. A nil object is gone.
type Resolver interface {
	Service(types.NamespacedName, *corev1.Service)
	Slice(types.NamespacedName, *discoveryv1.EndpointSlice)
	Node(name string, node *corev1.Node)
	ServiceCIDR(name string, cidr *networkingv1.ServiceCIDR)
	Addrs([]netip.Addr)
	Delta() model.Delta      // what all that was told since the last Delta changes
	Notices() []model.Notice // what people should be told, and was not told before
}

// Config is what an engine is made of.
type Config struct {
	Resolver   Resolver
	Dataplane  Dataplane
	Place      string // names what the dataplane writes to, for Switch: of two with one name, neither removes what the other wrote
	Observers  []Observer
	Notices    func([]model.Notice) // takes what people should be told, on the engine's goroutine; may be nil
	MinSync    time.Duration        // from the end of a round to the next, at least; 0 leaves it to what rounds cost
	Resync     time.Duration        // everything is applied again this long after the last time; 0 is never
	MaxBackoff time.Duration        // longest wait after a failed round; 0 is 30 s
}

// Engine is the one writer.
type Engine struct {
	config  Config
	queue   *queue
	asks    chan ask
	changes chan *change
	ended   chan struct{} // closed when Run returns

	mu     sync.Mutex
	status Status
	known  map[string]knowledge // by source

	// Of Run's goroutine alone:
	state    *model.State  // what is true; before the first success, what the kernel was found to hold
	unread   bool          // what the kernel holds could not be read
	truth    *model.State  // all that the resolver says, while that is not all that is served; nil else. See presume.go
	pending  model.Delta   // resolved, and not true yet
	told     bool          // the resolver was told something since its last Delta
	failures int           // since the last success
	last     time.Time     // end of the last round
	next     time.Time     // no round before
	full     time.Time     // when everything was last applied, or tried
	debt     time.Duration // work that no idle time has paid off yet; see rest
	rested   time.Time     // when debt was reckoned
	fought   time.Duration // a pace for each repair of drift that no idle time has earned back yet; see fight
	foughtAt time.Time     // when fought was reckoned
	served   bool          // something was made true
	unwatch  func()        // ends the watch of the dataplane
	coming   *change       // being tried
	leaving  []*leaver
}

// View is what a question sees. It is valid during the question alone, and nothing in it may be changed.
type View struct {
	State     *model.State
	Resolver  Resolver
	Dataplane Dataplane
	Status    Status
}

type ask struct {
	f    func(View)
	done chan struct{}
}

// New returns an engine that waits to be run.
func New(c Config) *Engine {
	if c.MaxBackoff == 0 {
		c.MaxBackoff = 30 * time.Second
	}
	if c.Notices == nil {
		c.Notices = func([]model.Notice) {}
	}
	return &Engine{config: c, queue: newQueue(), asks: make(chan ask), changes: make(chan *change), unwatch: func() {}, ended: make(chan struct{}),
		status: Status{Sources: map[string]bool{}}, known: map[string]knowledge{}, state: model.NewState(), pending: model.Delta{Full: true}}
}

// Sink registers a source by its name and returns what it should tell. Nothing is written until each registered source is
// synced, or has told what it presumes, so sources are registered before Run.
func (e *Engine) Sink(name string) source.Sink {
	e.register(name)
	return sink{e, name}
}

// ErrEnded is the answer to a question that comes after the end of Run.
var ErrEnded = errors.New("the engine has ended")

// Do runs f on the engine's goroutine, between rounds, and returns when f has. The error says why f was not run.
func (e *Engine) Do(ctx context.Context, f func(View)) error {
	q := ask{f, make(chan struct{})}
	select {
	case e.asks <- q:
		<-q.done
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-e.ended:
		return ErrEnded
	}
}

func (e *Engine) answer(q ask) {
	defer close(q.done)
	q.f(View{State: e.state, Resolver: e.config.Resolver, Dataplane: e.config.Dataplane, Status: e.Status()})
}

// Run works until ctx ends, and leaves the rules as they are. It is called once.
func (e *Engine) Run(ctx context.Context) error {
	defer close(e.ended)
	e.update(func(s *Status) { s.Started = time.Now() })
	if err := e.load(ctx); err != nil {
		klog.ErrorS(err, "Can't read what the kernel holds; what is gone since will not be noticed")
	}
	e.unwatch = e.watch(ctx)
	for ctx.Err() == nil {
		e.tryAgain(ctx)
		if e.due() {
			e.round(ctx)
		}
		e.leave(ctx)
		select {
		case <-ctx.Done():
		case <-e.queue.wake:
			e.drain()
		case q := <-e.asks:
			e.answer(q)
		case c := <-e.takes():
			e.begin(ctx, c)
		case <-e.unwanted():
		case <-e.timer():
		}
	}
	e.end(ctx)
	return nil
}

// load starts from what the kernel holds, so that observers hear what the first delta takes away.
func (e *Engine) load(ctx context.Context) error {
	found, err := e.config.Dataplane.Dump(ctx)
	if e.unread = err != nil; err != nil {
		return err
	}
	found.NamePools()
	e.state = found
	klog.V(2).InfoS("Read what the kernel holds", "frontends", len(found.Frontends), "pools", len(found.Pools))
	return nil
}

// drain tells the resolver all that is queued.
func (e *Engine) drain() {
	todo, since := e.queue.take()
	for _, f := range todo {
		f()
	}
	if len(todo) == 0 {
		return
	}
	e.told = true
	e.update(func(s *Status) {
		if s.ready() && s.PendingSince.IsZero() {
			s.PendingSince = since
		}
	})
	e.soon()
}

// gather takes in all that was told. An error says why nothing can be made of it yet.
func (e *Engine) gather(ctx context.Context) error {
	e.drain()
	e.resolve()
	err := e.look(ctx)
	e.hold()
	return err
}

// resolve adds to pending what the resolver has.
func (e *Engine) resolve() {
	if !e.told {
		return
	}
	e.told = false
	e.presume()
	e.pending = e.pending.Then(e.said())
	if len(e.pending.Since) > maxSince {
		e.pending.Since = e.pending.Since[:maxSince]
	}
	e.tell()
}

// tell hands on what people should be told.
func (e *Engine) tell() {
	if n := e.config.Resolver.Notices(); len(n) > 0 {
		e.config.Notices(n)
	}
}

// maxSince bounds the times that a delta which fails for long collects; the oldest are kept. At 1,000 a minute, four
// minutes' worth: enough for a histogram.
const maxSince = 4096
