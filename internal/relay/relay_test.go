package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"fairlead/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is what a test waits for at most.
const patience = 10 * time.Second

var (
	loop4 = netip.MustParseAddr("127.0.0.1")
	loop6 = netip.MustParseAddr("::1")
	both  = []netip.Addr{loop4, loop6}
)

// engine stands in for one: a state, a relay that observes it, and one goroutine at a time.
type engine struct {
	t     testing.TB
	relay *Relay

	mu      sync.Mutex
	state   *model.State
	broken  error // of Look
	notices []model.Notice
	failed  int
	open    [2]int
}

func start(t testing.TB, limit int) *engine {
	e := &engine{t: t, state: model.NewState()}
	e.relay = New(Config{Limit: limit,
		Look: func(_ context.Context, f func(*model.State)) error {
			defer e.locked()()
			if e.broken == nil {
				f(e.state)
			}
			return e.broken
		},
		Notice:    func(n model.Notice) { defer e.locked()(); e.notices = append(e.notices, n) },
		Failed:    func(bool) { defer e.locked()(); e.failed++ },
		Listening: func(v6 bool, n int) { defer e.locked()(); e.open[fam(v6)] = n },
	})
	t.Cleanup(e.relay.Close)
	return e
}

func (e *engine) locked() func() { e.mu.Lock(); return e.mu.Unlock }

func (e *engine) apply(d model.Delta) {
	defer e.locked()()
	e.state.Apply(d)
	e.relay.Applied(d, time.Millisecond)
}

// on is a node that relays.
func on(addrs ...netip.Addr) *model.Node { return &model.Node{Name: "n1", LocalhostRelay: addrs} }

func poolID(v6 bool, name string) model.PoolID {
	return model.PoolID{Service: "default/" + name, Proto: model.TCP, V6: v6}
}

func pool(v6 bool, name string, backends ...netip.AddrPort) model.Pool {
	p := model.Pool{ID: poolID(v6, name)}
	for _, b := range backends {
		p.Backends = append(p.Backends, model.Backend{Addr: b})
	}
	return p
}

// nodePort leads the node to the pool; pods and strangers to none.
func nodePort(v6 bool, port uint16, name string) model.Frontend {
	f := model.Frontend{Key: keyOf(v6, port), About: model.About{Service: "default/" + name, Kind: model.NodePort}}
	f.Routes[model.FromNode] = model.Route{Pool: poolID(v6, name), SNAT: true, Else: model.Drop}
	return f
}

func keyOf(v6 bool, port uint16) model.Key {
	return model.Key{IP: model.Unspecified(v6), Port: port, Proto: model.TCP}
}

// freePort is a port that nobody has a moment ago, on both addresses.
func freePort(t testing.TB) uint16 {
	t.Helper()
	for range 20 {
		l4, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l4.Addr().(*net.TCPAddr).AddrPort().Port()
		l6, err := net.Listen("tcp6", netip.AddrPortFrom(loop6, port).String())
		l4.Close()
		if err == nil {
			l6.Close()
			return port
		}
	}
	t.Fatal("no port is free on 127.0.0.1 and ::1")
	return 0
}

// server is a backend. It says its name at the end of what it is sent.
type server struct {
	at       netip.AddrPort
	mu       sync.Mutex
	accepted int
}

func (s *server) count() int { s.mu.Lock(); defer s.mu.Unlock(); return s.accepted }

func serve(t testing.TB, addr netip.Addr, handle func(*net.TCPConn)) *server {
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	s := &server{at: l.Addr().(*net.TCPAddr).AddrPort()}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.accepted++
			s.mu.Unlock()
			conns.Go(func() { defer c.Close(); handle(c.(*net.TCPConn)) })
		}
	})
	t.Cleanup(func() { l.Close(); conns.Wait() })
	return s
}

// echo reads to the end, and answers with what it read and its name.
func echo(name string) func(*net.TCPConn) {
	return func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		if err == nil {
			fmt.Fprintf(c, "%s from %s", b, name)
		}
	}
}

func dialTo(t testing.TB, addr netip.Addr, port uint16) (*net.TCPConn, error) {
	c, err := net.DialTimeout("tcp", netip.AddrPortFrom(addr, port).String(), patience)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn), nil
}

// ask sends words, ends its half, and gives the answer.
func ask(t testing.TB, addr netip.Addr, port uint16, words string) (string, error) {
	c, err := dialTo(t, addr, port)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, words); err != nil {
		return "", err
	}
	if err := c.CloseWrite(); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in %v: %s", patience, what)
		}
	}
}

func (e *engine) opened(v4, v6 int) {
	e.t.Helper()
	eventually(e.t, fmt.Sprintf("%d listeners of IPv4 and %d of IPv6", v4, v6), func() bool { defer e.locked()(); return e.open == [2]int{v4, v6} })
}

// Both families are relayed, to all backends; both halves of a connection end for themselves, and much is as well as little.
func TestRelays(t *testing.T) {
	e := start(t, 0)
	port := freePort(t)
	d := model.Delta{Full: true, Node: on(both...)}
	for i, a := range both {
		one, two := serve(t, a, echo("one")), serve(t, a, echo("two"))
		d.Pools = append(d.Pools, pool(i == 1, "web", one.at, two.at))
		d.Frontends = append(d.Frontends, nodePort(i == 1, port, "web"))
	}
	e.apply(d)
	e.opened(1, 1)
	for _, a := range both {
		met := map[string]bool{}
		for range 60 {
			answer, err := ask(t, a, port, "hello")
			if err != nil {
				t.Fatal(err)
			}
			met[answer] = true
		}
		if got := slices.Sorted(maps.Keys(met)); !slices.Equal(got, []string{"hello from one", "hello from two"}) {
			t.Errorf("%v: answers %q", a, got)
		}
		much := strings.Repeat("0123456789abcdef", 1<<16)
		if answer, err := ask(t, a, port, much); err != nil || !strings.HasPrefix(answer, much+" from ") {
			t.Errorf("%v: a megabyte comes back as %d bytes: %v", a, len(answer), err)
		}
	}
}

// A listener is there while somebody is behind it. What is not a NodePort of TCP, and an address that is not relayed, has
// none.
func TestFollows(t *testing.T) {
	e := start(t, 0)
	port, other, never := freePort(t), freePort(t), freePort(t)
	one, two := serve(t, loop4, echo("one")), serve(t, loop4, echo("two"))
	ask := func() string {
		answer, _ := ask(t, loop4, port, "")
		return answer
	}
	udp := nodePort(false, never, "udp")
	udp.Key.Proto = model.UDP
	vip := nodePort(false, never, "web")
	vip.Key.IP = netip.MustParseAddr("10.96.0.1")
	e.apply(model.Delta{Full: true, Node: on(loop4), Pools: []model.Pool{pool(false, "web", one.at), pool(true, "web", one.at)},
		Frontends: []model.Frontend{udp, vip, nodePort(true, never, "web")}})
	e.apply(model.Delta{Frontends: []model.Frontend{nodePort(false, port, "web")}}) // later than its pool
	e.opened(1, 0)
	for _, a := range both {
		if _, err := dialTo(t, a, never); err == nil {
			t.Errorf("somebody listens on %v:%d", a, never)
		}
	}
	if got := ask(); got != " from one" {
		t.Errorf("answer %q", got)
	}
	e.apply(model.Delta{Pools: []model.Pool{pool(false, "web")}})
	e.opened(0, 0)
	e.apply(model.Delta{Pools: []model.Pool{pool(false, "web", two.at)}})
	eventually(t, "the new backend", func() bool { return ask() == " from two" })
	e.apply(model.Delta{Pools: []model.Pool{pool(false, "other", one.at)}, Frontends: []model.Frontend{nodePort(false, port, "other")}})
	eventually(t, "the new pool", func() bool { return ask() == " from one" })
	e.apply(model.Delta{GonePools: []model.PoolID{poolID(false, "web")}}) // not its pool any more
	e.opened(1, 0)
	e.apply(model.Delta{GoneFrontends: []model.Key{keyOf(false, port)}, Frontends: []model.Frontend{nodePort(false, other, "other")}})
	eventually(t, "another port", func() bool {
		_, gone := dialTo(t, loop4, port)
		_, here := dialTo(t, loop4, other)
		return gone != nil && here == nil
	})
	e.apply(model.Delta{Node: on()})
	e.opened(0, 0)
	e.apply(model.Delta{Node: on(loop4)}) // nothing else is told
	e.opened(1, 0)
	e.apply(model.Delta{Full: true, Node: on(loop4)})
	e.opened(0, 0)
}

// Whatever the deltas, who connects meets what model.State.Decide says.
func TestDecides(t *testing.T) {
	ports := []uint16{freePort(t), freePort(t)}
	var servers []netip.AddrPort
	for range 2 {
		servers = append(servers, serve(t, loop4, func(c *net.TCPConn) { io.Copy(io.Discard, c) }).at)
	}
	names := []string{"a", "b"}
	rapid.Check(t, func(rt *rapid.T) {
		e := start(t, 0)
		defer e.relay.Close()
		for range rapid.IntRange(1, 12).Draw(rt, "deltas") {
			e.apply(anyDelta(rt, ports, names, servers))
		}
		for _, a := range both {
			for _, port := range ports {
				eventually(t, fmt.Sprintf("%v port %d as decided", a, port), func() bool {
					unlock := e.locked()
					d := e.state.Decide(model.Packet{Src: netip.AddrPortFrom(a, 1), Dst: netip.AddrPortFrom(a, port), Proto: model.TCP})
					unlock()
					c, err := net.DialTimeout("tcp", netip.AddrPortFrom(a, port).String(), patience)
					if err == nil {
						c.Close()
					}
					return (err == nil) == (d.Verdict == model.Forward)
				})
			}
		}
	})
}

func anyDelta(t *rapid.T, ports []uint16, names []string, servers []netip.AddrPort) (d model.Delta) {
	some := func(what string, n int) bool { return rapid.IntRange(1, n).Draw(t, what) == 1 }
	d.Full = some("full", 4)
	if some("node", 3) {
		d.Node = on([][]netip.Addr{nil, {loop4}, {loop6}, both}[rapid.IntRange(0, 3).Draw(t, "relayed")]...)
	}
	for _, v6 := range []bool{false, true} {
		for _, port := range ports {
			switch {
			case some("frontend", 2):
				d.Frontends = append(d.Frontends, nodePort(v6, port, rapid.SampledFrom(names).Draw(t, "pool")))
			case some("gone", 3):
				d.GoneFrontends = append(d.GoneFrontends, keyOf(v6, port))
			}
		}
		for _, name := range names {
			switch {
			case some("pool", 2):
				d.Pools = append(d.Pools, pool(v6, name, rapid.SliceOfDistinct(rapid.SampledFrom(servers), rapid.ID).Draw(t, "backends")...))
			case some("gone", 3):
				d.GonePools = append(d.GonePools, poolID(v6, name))
			}
		}
	}
	return d
}

// While the state can't be looked at, what is to be done is owed.
func TestOwes(t *testing.T) {
	e := start(t, 0)
	one := serve(t, loop4, echo("one"))
	e.broken = errors.New("starting")
	for range 3 {
		e.apply(model.Delta{Node: on(loop4), Pools: []model.Pool{pool(false, "web", one.at)}, Frontends: []model.Frontend{nodePort(false, freePort(t), "web")}})
	}
	func() { defer e.locked()(); e.broken = nil }()
	e.opened(3, 0)
}

// A port that somebody else has is told of once, tried again and again, and had in the end.
func TestTriesAgain(t *testing.T) {
	e := start(t, 0)
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).AddrPort().Port()
	one := serve(t, loop4, echo("one"))
	e.apply(model.Delta{Full: true, Node: on(loop4), Pools: []model.Pool{pool(false, "web", one.at)},
		Frontends: []model.Frontend{nodePort(false, port, "web"), nodePort(false, freePort(t), "web")}})
	e.opened(1, 0) // the other is not held up
	eventually(t, "a second try", func() bool { defer e.locked()(); return e.failed >= 2 })
	taken.Close()
	e.opened(2, 0)
	defer e.locked()()
	if len(e.notices) != 1 || e.notices[0].Reason != ListenFailed || e.notices[0].Service != "default/web" ||
		!strings.Contains(e.notices[0].Message, "address already in use") {
		t.Errorf("notices %+v", e.notices)
	}
}

// A wish for a port that can't be had ends with the port.
func TestGivesUp(t *testing.T) {
	e := start(t, 0)
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	key := keyOf(false, taken.Addr().(*net.TCPAddr).AddrPort().Port())
	e.apply(model.Delta{Full: true, Node: on(loop4), Pools: []model.Pool{pool(false, "web", taken.Addr().(*net.TCPAddr).AddrPort())},
		Frontends: []model.Frontend{nodePort(false, key.Port, "web")}})
	eventually(t, "a try", func() bool { defer e.locked()(); return e.failed > 0 })
	e.apply(model.Delta{GoneFrontends: []model.Key{key}, Frontends: []model.Frontend{nodePort(false, freePort(t), "web")}})
	e.opened(1, 0) // so that the one before was taken in
	taken.Close()
	time.Sleep(firstOpenAgain + 200*time.Millisecond)
	if c, err := dialTo(t, loop4, key.Port); err == nil {
		t.Errorf("%v answers", c.RemoteAddr())
	}
}
