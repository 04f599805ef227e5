// Package lab is a small world in network namespaces: nodes on one LAN, pods behind them, clients outside. Tests and the
// demo send real packets through it.
//
//	         lan: 192.0.2.0/24, 2001:db8::/64
//	    ┌───────────────┼───────────────┐
//	n1 .11          n2 .12          ext .100
//	p1a 10.244.1.10  p2a 10.244.2.10
//	p1b 10.244.1.11
//
// The LAN is a bridge that lives in a namespace of its own; nothing is made in the namespace the program runs in, and no
// sysctl outside the world is touched. Namespaces are anonymous: when the program dies, they are gone.
//
// ext routes what a cluster owns (Services, load-balancer addresses) to the first node, as a router or a cloud would. The
// nodes route each other's pods. Waiting for packets is done here and in package story, nowhere else.
package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"fairlead/internal/kernel"
)

// The addresses of the world (documentation ranges of RFC 5737 and RFC 3849, unique local ones of RFC 4193).
var (
	ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10:244::/48")}
	ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}
	LBPools      = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:113::/64")}
	FarNets      = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:51::/64")}
)

// Config says what the world holds.
type Config struct {
	Nodes  []string            // in order: the first is .11
	Pods   map[string][]string // by node, in order: the first is .10
	Bridge bool                // pods hang on a bridge cni0 of their node, not each on an interface of its own
	Bin    string              // a directory that comes first in the PATH of every program that runs in the world
}

// Common is the world of most stories: two nodes, three pods, one client outside.
func Common() Config {
	return Config{Nodes: []string{"n1", "n2"}, Pods: map[string][]string{"n1": {"p1a", "p1b"}, "n2": {"p2a"}}}
}

// World is a running lab. Its methods may be called from several goroutines.
type World struct {
	config Config
	lan    *Actor
	dir    string          // for files of the world's processes
	ctx    context.Context // ends at Close; everything that runs in the world ends with it
	cancel context.CancelFunc

	mu     sync.Mutex
	actors map[string]*Actor
	order  []*Actor
	seq    int // barriers so far
}

// New builds a world. The caller must Close it.
func New(c Config) (_ *World, err error) {
	w := &World{config: c, actors: map[string]*Actor{}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("build lab: %w", err), w.Close())
		}
	}()
	if w.dir, err = os.MkdirTemp("", "fairlead-lab-"); err != nil {
		return nil, err
	}
	if err := w.addLAN(); err != nil {
		return nil, err
	}
	if _, err := w.addClient("ext"); err != nil {
		return nil, err
	}
	for _, name := range c.Nodes {
		if _, err := w.addNode(name); err != nil {
			return nil, err
		}
	}
	for _, node := range c.Nodes {
		for _, pod := range c.Pods[node] {
			if _, err := w.AddPod(pod, node); err != nil {
				return nil, err
			}
		}
	}
	return w, w.awaitLinks()
}

// Close ends every process, server and client of the world and lets its namespaces go.
func (w *World) Close() error {
	w.cancel()
	w.mu.Lock()
	actors := w.order
	w.order, w.actors = nil, map[string]*Actor{}
	w.mu.Unlock()
	var errs []error
	for _, a := range actors {
		a.running.Wait()
		errs = append(errs, a.ns.Close())
	}
	if w.dir != "" {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	return errors.Join(errs...)
}

// Actor finds a node, pod or client by its name.
func (w *World) Actor(name string) (*Actor, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a, ok := w.actors[name]; ok {
		return a, nil
	}
	return nil, fmt.Errorf("the lab has no actor %q", name)
}

// Must is Actor for names that the caller has put there.
func (w *World) Must(name string) *Actor {
	a, err := w.Actor(name)
	if err != nil {
		panic(err)
	}
	return a
}

// Actors lists all nodes, pods and clients, in the order they were made.
func (w *World) Actors() []*Actor {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*Actor(nil), w.order...)
}

// newActor makes the namespace of an actor and registers it.
func (w *World) newActor(name string, kind Kind) (*Actor, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.actors[name]; ok {
		return nil, fmt.Errorf("the lab has two actors %q", name)
	}
	ns, err := kernel.NewNS()
	if err != nil {
		return nil, err
	}
	a := &Actor{Name: name, Kind: kind, world: w, ns: ns}
	w.actors[name] = a
	w.order = append(w.order, a)
	return a, quietLinks(a)
}
