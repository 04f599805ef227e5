// Package sourcetest has a sink for tests of sources: it remembers what it was told, and can wait.
package sourcetest

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/source"
)

// patience is how long Until waits. It bounds a failing test, and measures nothing.
const patience = 20 * time.Second

// State is what a sink knows.
type State struct {
	Services map[string]*corev1.Service // by namespace/name
	Slices   map[string]*discoveryv1.EndpointSlice
	Nodes    map[string]*corev1.Node
	CIDRs    map[string]*networkingv1.ServiceCIDR
	Addrs    []netip.Addr
	Presumed int // how often it was told
	Synced   int // how often it was told
	Calls    []string
}

// Sink is a [source.Sink] that remembers. Its zero value is ready.
type Sink struct {
	mu   sync.Mutex
	now  State
	bell chan struct{} // closed at each call
}

var _ source.Sink = (*Sink)(nil)

// Service implements [source.Sink].
func (s *Sink) Service(key types.NamespacedName, v *corev1.Service) {
	s.call("service", key.String(), v == nil, func() { set(&s.now.Services, key.String(), v) })
}

// Slice implements [source.Sink].
func (s *Sink) Slice(key types.NamespacedName, v *discoveryv1.EndpointSlice) {
	s.call("slice", key.String(), v == nil, func() { set(&s.now.Slices, key.String(), v) })
}

// Node implements [source.Sink].
func (s *Sink) Node(name string, v *corev1.Node) {
	s.call("node", name, v == nil, func() { set(&s.now.Nodes, name, v) })
}

// ServiceCIDR implements [source.Sink].
func (s *Sink) ServiceCIDR(name string, v *networkingv1.ServiceCIDR) {
	s.call("servicecidr", name, v == nil, func() { set(&s.now.CIDRs, name, v) })
}

// Addrs implements [source.Sink].
func (s *Sink) Addrs(all []netip.Addr) {
	s.call("addrs", strings.Trim(fmt.Sprint(all), "[]"), false, func() { s.now.Addrs = all })
}

// Presumed implements [source.Sink].
func (s *Sink) Presumed() { s.call("presumed", "", false, func() { s.now.Presumed++ }) }

// Synced implements [source.Sink].
func (s *Sink) Synced() { s.call("synced", "", false, func() { s.now.Synced++ }) }

func (s *Sink) call(kind, key string, gone bool, note func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	note()
	if gone {
		kind = "no " + kind
	}
	s.now.Calls = append(s.now.Calls, strings.TrimSpace(kind+" "+key))
	if s.bell != nil {
		close(s.bell)
		s.bell = nil
	}
}

func set[T any](m *map[string]*T, key string, v *T) {
	if v == nil {
		delete(*m, key)
		return
	}
	if *m == nil {
		*m = map[string]*T{}
	}
	(*m)[key] = v
}

// Now is a copy of what the sink knows.
func (s *Sink) Now() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now
	now.Services, now.Slices, now.Nodes, now.CIDRs = maps.Clone(now.Services), maps.Clone(now.Slices), maps.Clone(now.Nodes), maps.Clone(now.CIDRs)
	now.Calls = slices.Clone(now.Calls)
	return now
}

// Forget drops the list of calls.
func (s *Sink) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Calls = nil
}

// Until waits until ok, and fails the test when that takes too long.
func (s *Sink) Until(t testing.TB, what string, ok func(State) bool) State {
	t.Helper()
	late := time.After(patience)
	for {
		s.mu.Lock()
		if s.bell == nil {
			s.bell = make(chan struct{})
		}
		bell := s.bell
		s.mu.Unlock()
		now := s.Now()
		if ok(now) {
			return now
		}
		select {
		case <-bell:
		case <-late:
			t.Fatalf("waited in vain for %s; calls: %q", what, now.Calls)
		}
	}
}

// Run runs a source in the background, for the time of the test, and fails the test when the source does not end with it.
// stop ends it sooner.
func Run(t testing.TB, s source.Source, to source.Sink) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, to) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("source ended with %v", err)
			}
		case <-time.After(patience):
			t.Error("source does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}
