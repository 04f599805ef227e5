package engine

import (
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
)

// queue holds what was told and not yet taken. What is told twice of one thing is kept once, in its first place, with the
// last word: a flood costs the memory of the distinct things in it.
type queue struct {
	wake chan struct{} // one slot: something is there

	mu    sync.Mutex
	items map[item]func()
	order []item
	since time.Time // when the oldest item came; zero when there is none
	last  time.Time // when the last item came, ever
}

// item names a thing that something can be told about.
type item struct {
	kind itemKind
	name types.NamespacedName
}

type itemKind uint8

const (
	aService itemKind = iota
	aSlice
	aNode
	aServiceCIDR
	theAddrs
	aSource
	aPresumption
	aDrift
)

// fewItems is up to where the room for them is used again.
const fewItems = 64

func newQueue() *queue {
	return &queue{wake: make(chan struct{}, 1), items: map[item]func(){}}
}

func (q *queue) put(it item, do func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.items[it]; !ok {
		q.order = append(q.order, it)
	}
	q.items[it] = do
	q.last = time.Now()
	if q.since.IsZero() {
		q.since = q.last
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take empties the queue. It returns what was in it, in order, and when the oldest came.
func (q *queue) take() ([]func(), time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	since, todo := q.since, make([]func(), 0, len(q.order))
	for _, it := range q.order {
		todo = append(todo, q.items[it])
	}
	if len(todo) > fewItems {
		q.items, q.order = map[item]func(){}, nil // a map keeps the room of the time when it was largest
	} else {
		clear(q.items)
		clear(q.order)
		q.order = q.order[:0]
	}
	q.since = time.Time{}
	return todo, since
}

// times gives when the oldest item came (zero when there is none), and when the last came, ever.
func (q *queue) times() (since, last time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.since, q.last
}

// sink is how one source reaches the engine. The functions that it queues run on the engine's goroutine.
type sink struct {
	e    *Engine
	name string
}

func (s sink) Service(n types.NamespacedName, obj *corev1.Service) {
	s.e.queue.put(item{aService, n}, func() { s.e.config.Resolver.Service(n, obj) })
}

func (s sink) Slice(n types.NamespacedName, obj *discoveryv1.EndpointSlice) {
	s.e.queue.put(item{aSlice, n}, func() { s.e.config.Resolver.Slice(n, obj) })
}

func (s sink) Node(name string, obj *corev1.Node) {
	s.e.queue.put(item{aNode, types.NamespacedName{Name: name}}, func() { s.e.config.Resolver.Node(name, obj) })
}

func (s sink) ServiceCIDR(name string, obj *networkingv1.ServiceCIDR) {
	s.e.queue.put(item{aServiceCIDR, types.NamespacedName{Name: name}}, func() { s.e.config.Resolver.ServiceCIDR(name, obj) })
}

func (s sink) Addrs(addrs []netip.Addr) {
	s.e.queue.put(item{kind: theAddrs}, func() { s.e.config.Resolver.Addrs(addrs) })
}

// Presumed is queued like the rest.
func (s sink) Presumed() {
	s.e.queue.put(item{aPresumption, types.NamespacedName{Name: s.name}}, func() { s.e.heard(s.name, presumed) })
}

// Synced is queued like the rest: it counts when all that was told before it has been taken.
func (s sink) Synced() {
	s.e.queue.put(item{aSource, types.NamespacedName{Name: s.name}}, func() { s.e.heard(s.name, synced) })
}
