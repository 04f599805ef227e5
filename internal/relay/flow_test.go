package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"fairlead/internal/model"
)

// one is a relay with one NodePort of IPv4 in front of some backends.
func one(t *testing.T, limit int, change func(*model.Frontend, *model.Pool), backends ...netip.AddrPort) (*engine, uint16) {
	t.Helper()
	e := start(t, limit)
	f, p := nodePort(false, freePort(t), "web"), pool(false, "web", backends...)
	if change != nil {
		change(&f, &p)
	}
	e.apply(model.Delta{Full: true, Node: on(loop4), Pools: []model.Pool{p}, Frontends: []model.Frontend{f}})
	e.opened(1, 0)
	return e, f.Key.Port
}

// dead is an address where nobody listens.
func dead(t *testing.T) netip.AddrPort { return netip.AddrPortFrom(loop4, freePort(t)) }

// A backend that does not answer is passed over; with affinity for good, as long as the other one is there.
func TestPassesOver(t *testing.T) {
	for _, sticky := range []time.Duration{0, time.Hour} {
		good := serve(t, loop4, echo("good"))
		_, port := one(t, 0, func(_ *model.Frontend, p *model.Pool) { p.Sticky = sticky }, dead(t), dead(t), good.at, dead(t))
		for range 20 {
			if answer, err := ask(t, loop4, port, "x"); err != nil || answer != "x from good" {
				t.Errorf("%q, %v", answer, err)
			}
		}
	}
}

func TestNobodyAnswers(t *testing.T) {
	_, port := one(t, 0, nil, dead(t), dead(t))
	c, err := dialTo(t, loop4, port)
	if err == nil { // the reset may be as quick as that
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client meets %v, want a reset", err)
	}
}

// What has reached one backend is not sent to another one, and a backend's reset is the client's.
func TestNoSecondTry(t *testing.T) {
	bad := func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 1))
		reset(c)
	}
	a, b := serve(t, loop4, bad), serve(t, loop4, bad)
	_, port := one(t, 0, nil, a.at, b.at)
	for range 10 {
		c, err := dialTo(t, loop4, port)
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "x")
		if _, err = c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the client meets %v, want a reset", err)
		}
	}
	if n := a.count() + b.count(); n != 10 {
		t.Errorf("%d connections to backends for 10 of clients", n)
	}
}

// A client's reset is the backend's.
func TestPassesResetOn(t *testing.T) {
	met := make(chan error, 1)
	s := serve(t, loop4, func(c *net.TCPConn) {
		io.WriteString(c, "hello")
		_, err := io.Copy(io.Discard, c)
		met <- err
	})
	_, port := one(t, 0, nil, s.at)
	c, err := dialTo(t, loop4, port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	reset(c)
	select {
	case err := <-met:
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the backend meets %v, want a reset", err)
		}
	case <-time.After(patience):
		t.Error("the backend meets nothing")
	}
}

// Established connections live on, whatever goes: the backend, the port, the relay; but not the agent.
func TestLivesOn(t *testing.T) {
	s := serve(t, loop4, func(c *net.TCPConn) { io.Copy(c, c) })
	e, port := one(t, 0, nil, s.at)
	c, err := dialTo(t, loop4, port)
	if err != nil {
		t.Fatal(err)
	}
	says := func(what string) {
		t.Helper()
		got := make([]byte, len(what))
		_, err1 := io.WriteString(c, what)
		_, err2 := io.ReadFull(c, got)
		if err := errors.Join(err1, err2); err != nil || string(got) != what {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
	says("at first")
	e.apply(model.Delta{Pools: []model.Pool{pool(false, "web")}})
	e.opened(0, 0)
	says("without the backend")
	e.apply(model.Delta{GonePools: []model.PoolID{poolID(false, "web")}, GoneFrontends: []model.Key{keyOf(false, port)}})
	e.apply(model.Delta{Full: true, Node: on()})
	says("without a relay")
	e.relay.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Close the client meets %v, want a reset", err)
	}
}

// Connections above the limit wait until one before them ends.
func TestLimit(t *testing.T) {
	s := serve(t, loop4, func(c *net.TCPConn) {
		io.WriteString(c, "hello")
		io.Copy(io.Discard, c)
	})
	_, port := one(t, 1, nil, s.at)
	var clients []*net.TCPConn
	for range 3 {
		c, err := dialTo(t, loop4, port)
		if err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
	}
	for i, c := range clients { // they are taken in the order in which they came
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		if n := s.count(); n != i+1 {
			t.Errorf("%d connections reach the backend while there may be one and %d have ended", n, i)
		}
		c.Close()
	}
}

// Who waits for a place is let go with the port.
func TestLimitAndGone(t *testing.T) {
	s := serve(t, loop4, func(c *net.TCPConn) {
		io.WriteString(c, "hello")
		io.Copy(io.Discard, c)
	})
	e, port := one(t, 1, nil, s.at)
	first, err := dialTo(t, loop4, port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(first, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	second, err := dialTo(t, loop4, port)
	if err != nil {
		t.Fatal(err)
	}
	e.apply(model.Delta{Pools: []model.Pool{pool(false, "web")}})
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("who waits meets %v, want a reset", err)
	}
}

func TestAllow(t *testing.T) {
	s := serve(t, loop4, echo("one"))
	ranges := []netip.Prefix{netip.MustParsePrefix("127.0.0.2/32")}
	_, port := one(t, 0, func(f *model.Frontend, _ *model.Pool) { f.Allow = ranges }, s.at)
	for from, in := range map[string]bool{"127.0.0.1": false, "127.0.0.2": true} {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: patience}
		c, err := d.Dial("tcp", netip.AddrPortFrom(loop4, port).String())
		var b []byte
		if err == nil {
			c.(*net.TCPConn).CloseWrite()
			b, err = io.ReadAll(c)
			c.Close()
		}
		if (err == nil) != in || in && string(b) != " from one" {
			t.Errorf("from %s: %q, %v", from, b, err)
		}
	}
	if s.count() != 1 {
		t.Errorf("%d connections to the backend, want 1", s.count())
	}
}

// Affinity chooses once, and again when nobody came for its time, when its backend goes, and when its time changes.
func TestAffinity(t *testing.T) {
	var backends []model.Backend
	for i := range 50 {
		backends = append(backends, model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80)})
	}
	to := target{backends: backends, sticky: time.Minute}
	now := time.Now()
	d := &door{to: to}
	first, _ := d.choose(now)
	for range 100 { // the window slides: 50 minutes in all
		now = now.Add(30 * time.Second)
		if b, _ := d.choose(now); b != first {
			t.Fatalf("%v after %v", b, first)
		}
	}
	// moved tells whether a change makes it choose again: of 50 backends another one, in one of a few tries.
	moved := func(change func(*door)) bool {
		for range 10 {
			d := &door{to: to}
			before, _ := d.choose(now)
			change(d)
			if after, _ := d.choose(now); after != before {
				return true
			}
		}
		return false
	}
	for what, c := range map[string]struct {
		change func(*door)
		want   bool
	}{
		"nothing changes":       {func(*door) {}, false},
		"the same again":        {func(d *door) { d.lead(to) }, false},
		"time passes":           {func(d *door) { d.used = d.used.Add(-59 * time.Second) }, false},
		"too much time passes":  {func(d *door) { d.used = d.used.Add(-time.Minute) }, true},
		"another time":          {func(d *door) { d.lead(target{backends: backends, sticky: time.Hour}) }, true},
		"affinity ends":         {func(d *door) { d.lead(target{backends: backends}) }, true},
		"another has answered":  {func(d *door) { d.instead(d.pin, backends[7].Addr); d.instead(backends[7].Addr, backends[8].Addr) }, true},
		"another's replacement": {func(d *door) { d.instead(netip.MustParseAddrPort("10.9.9.9:80"), backends[7].Addr) }, false},
		"the backend goes": {func(d *door) {
			var rest []model.Backend
			for _, b := range backends {
				if b.Addr != d.pin {
					rest = append(rest, b)
				}
			}
			d.lead(target{backends: rest, sticky: time.Minute})
			d.lead(to)
		}, true},
	} {
		if got := moved(c.change); got != c.want {
			t.Errorf("%s: chooses again: %v", what, got)
		}
	}
}
