package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// Pauses before a listener that could not be opened is tried again, doubled each time, and before Accept is after a failure
// (no descriptors left, mostly).
const (
	firstOpenAgain, lastOpenAgain     = time.Second, time.Minute
	firstAcceptAgain, lastAcceptAgain = 5 * time.Millisecond, time.Second
)

// target is where connections are led.
type target struct {
	service  string
	backends []model.Backend
	sticky   time.Duration
	allow    []netip.Prefix // sources; nil is everyone
}

func targetOf(s *model.State, f model.Frontend) target {
	p := s.Pools[f.Routes[model.FromNode].Pool]
	return target{f.About.Service, p.Backends, p.Sticky, f.Allow}
}

// door is one listener, or the wish for one.
type door struct {
	at     netip.AddrPort
	closed chan struct{}

	mu   sync.Mutex
	to   target
	pin  netip.AddrPort // with affinity: where everybody is led; zero is not chosen
	used time.Time      // when somebody last was

	// Of the relay's goroutine alone:
	listener net.Listener // nil while it can't be opened
	again    time.Time    // then: when it is tried again
	wait     time.Duration
}

// lead gives a place a target; one without backends closes it.
func (r *Relay) lead(at netip.AddrPort, to target) {
	d := r.doors[at]
	switch {
	case len(to.backends) == 0:
		r.close(at)
	case d != nil:
		d.lead(to)
	default:
		d = &door{at: at, to: to, closed: make(chan struct{})}
		r.doors[at] = d
		r.tryOpen(d)
	}
}

// tryOpen opens a listener. One notice tells of a spell of failures.
func (r *Relay) tryOpen(d *door) {
	v6 := d.at.Addr().Is6()
	l, err := listen(r.ctx, d.at)
	if err != nil {
		r.c.Failed(v6)
		if d.wait == 0 {
			klog.InfoS("Can't listen for a node port on localhost", "service", d.to.service, "address", d.at, "err", err)
			r.c.Notice(model.Notice{Service: d.to.service, Reason: ListenFailed,
				Message: fmt.Sprintf("node port %d does not answer on %s (tried again at least each %v): %v", d.at.Port(), d.at.Addr(), lastOpenAgain, err)})
		}
		d.wait = min(max(2*d.wait, firstOpenAgain), lastOpenAgain)
		d.again = time.Now().Add(d.wait)
		r.shut[d.at] = d
		return
	}
	if d.wait > 0 {
		klog.InfoS("Listens for a node port on localhost after all", "service", d.to.service, "address", d.at)
		delete(r.shut, d.at)
	}
	d.listener = l
	r.open[fam(v6)]++
	r.workers.Go(func() { r.accept(d, l) })
}

// close ends a listener, or the tries to have one. Connections go on.
func (r *Relay) close(at netip.AddrPort) {
	d := r.doors[at]
	if d == nil {
		return
	}
	delete(r.doors, at)
	delete(r.shut, at)
	close(d.closed)
	if d.listener != nil {
		d.listener.Close()
		r.open[fam(at.Addr().Is6())]--
	}
}

// listen opens a plain TCP listener: a multipath one has no use for other addresses of localhost.
func listen(ctx context.Context, at netip.AddrPort) (net.Listener, error) {
	network := "tcp4"
	if at.Addr().Is6() {
		network = "tcp6"
	}
	c := net.ListenConfig{KeepAliveConfig: keepalive}
	c.SetMultipathTCP(false)
	return c.Listen(ctx, network, at.String())
}

// accept serves who comes, until the door is closed. When there are too many connections it waits, and so do the clients.
func (r *Relay) accept(d *door, l net.Listener) {
	for wait := firstAcceptAgain; ; {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			klog.V(2).InfoS("Can't take a connection to a node port on localhost", "address", d.at, "err", err)
			select {
			case <-time.After(wait):
			case <-d.closed:
			}
			wait = min(2*wait, lastAcceptAgain)
			continue
		}
		wait = firstAcceptAgain
		client := c.(*net.TCPConn)
		if !d.allows(client) {
			reset(client)
			continue
		}
		select {
		case r.slots <- struct{}{}:
			r.workers.Go(func() {
				defer func() { <-r.slots }()
				r.serve(client, d)
			})
		case <-d.closed:
			reset(client)
		}
	}
}

func (d *door) allows(client *net.TCPConn) bool {
	d.mu.Lock()
	allow := d.to.allow
	d.mu.Unlock()
	from := client.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	return allow == nil || slices.ContainsFunc(allow, func(p netip.Prefix) bool { return p.Contains(from) })
}

// lead changes the target. The choice that affinity has made falls with its backend, and with its time.
func (d *door) lead(to target) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if to.sticky != d.to.sticky || !has(to.backends, d.pin) {
		d.pin = netip.AddrPort{}
	}
	d.to = to
}

func has(backends []model.Backend, at netip.AddrPort) bool {
	return slices.ContainsFunc(backends, func(b model.Backend) bool { return b.Addr == at })
}

// choose gives the backend for a connection that comes now, and all of them.
func (d *door) choose(now time.Time) (netip.AddrPort, []model.Backend) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.to.sticky > 0 && d.pin.IsValid() && now.Sub(d.used) < d.to.sticky {
		d.used = now
		return d.pin, d.to.backends
	}
	b := d.to.backends[rand.N(len(d.to.backends))].Addr
	if d.to.sticky > 0 {
		d.pin, d.used = b, now
	}
	return b, d.to.backends
}

// instead notes that another backend has answered in place of the chosen one.
func (d *door) instead(chosen, b netip.AddrPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.pin == chosen && has(d.to.backends, b) {
		d.pin = b
	}
}
