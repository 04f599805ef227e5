package relay

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"time"

	"k8s.io/klog/v2"
)

// Limits of connections.
const (
	mostConnections = 4096             // at a time; each takes two sockets and, with data under way, four pipes
	dialPatience    = 5 * time.Second  // for one backend (kube-proxy's)
	allPatience     = 15 * time.Second // for all backends that are tried in turn
)

// keepalive finds out within 75 s that the other side is gone without a word.
var keepalive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 4}

// serve leads a client to a backend, or resets it when none answers.
func (r *Relay) serve(client *net.TCPConn, d *door) {
	backend, err := connect(r.ctx, d)
	if err != nil {
		klog.V(2).InfoS("No backend of a node port answers on localhost", "address", d.at, "err", err)
		reset(client)
		return
	}
	join(r.ctx, client, backend)
}

// connect dials the backend that is chosen; where it does not answer, the others by chance. Nothing has been sent before, so
// that nothing is sent twice.
func connect(ctx context.Context, d *door) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, allPatience)
	defer cancel()
	chosen, all := d.choose(time.Now())
	c, first := dial(ctx, chosen)
	if first == nil {
		return c, nil
	}
	last := first
	for _, i := range rand.Perm(len(all)) {
		b := all[i].Addr
		if b == chosen {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		var err error
		if c, err = dial(ctx, b); err == nil {
			klog.V(2).InfoS("Another backend answers on localhost", "address", d.at, "backend", b, "err", first)
			d.instead(chosen, b)
			return c, nil
		}
		last = err
	}
	if last == first {
		return nil, first
	}
	return nil, errors.Join(first, last)
}

func dial(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: dialPatience, KeepAliveConfig: keepalive}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// join hands bytes on in both directions until both have ended, one was reset, or ctx ends.
func join(ctx context.Context, a, b *net.TCPConn) {
	defer a.Close()
	defer b.Close()
	defer context.AfterFunc(ctx, func() { reset(a, b) })()
	back := make(chan struct{})
	go func() {
		defer close(back)
		pump(a, b)
	}()
	pump(b, a)
	<-back
}

// pump hands bytes on in one direction, in the kernel (splice), and its end after them: a proper end half-closes the other
// side, anything else resets both.
func pump(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		reset(to, from)
		return
	}
	to.CloseWrite() // fails where the other side has gone meanwhile, which the other direction finds
}

// reset ends connections with a reset in place of a proper end.
func reset(cs ...*net.TCPConn) {
	for _, c := range cs {
		c.SetLinger(0)
		c.Close()
	}
}
