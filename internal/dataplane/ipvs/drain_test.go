//go:build vmguest

package ipvs

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// flow is a TCP connection of a pod on the wire; both of its ends are played here.
type flow struct {
	w         *wire
	from, vip netip.AddrPort
	to        netip.AddrPort // the endpoint
}

const (
	fin, syn, rst, ack = 1, 2, 4, 16
)

// segment is sent by the client, or by the endpoint, and comes out where it belongs: the answer tells where.
func (f *flow) segment(byEndpoint bool, flags byte, seq, acked uint32) (src, dst netip.AddrPort, got bool) {
	p := model.Packet{Src: f.from, Dst: f.vip, Proto: model.TCP, Interface: "veth-a"}
	if byEndpoint {
		p.Src, p.Dst = f.to, f.from
	}
	f.w.serial++
	payload := binary.BigEndian.AppendUint64([]byte("segment "), f.w.serial)
	b := build(p, payload)
	head := b[len(b)-len(payload)-20:]
	binary.BigEndian.PutUint32(head[4:], seq)
	binary.BigEndian.PutUint32(head[8:], acked)
	head[13] = flags
	head[16], head[17] = 0, 0
	pseudo := append(append(append([]byte{}, p.Src.Addr().AsSlice()...), p.Dst.Addr().AsSlice()...), 0, 6, 0, byte(len(head)))
	binary.BigEndian.PutUint16(head[16:], checksum(append(pseudo, head...)))
	f.w.drain(func(string, []byte) bool { return false })
	if err := f.w.inject(p, b); err != nil {
		panic(err)
	}
	for range 5 {
		got = f.w.drain(func(_ string, b []byte) bool {
			s, d, proto, rest, ok := cut(b)
			if !ok || proto != 6 || string(rest[len(rest)-len(payload):]) != string(payload) {
				return false
			}
			src, dst = netip.AddrPortFrom(s, binary.BigEndian.Uint16(rest)), netip.AddrPortFrom(d, binary.BigEndian.Uint16(rest[2:]))
			return true
		})
		if got {
			return src, dst, true
		}
		time.Sleep(2 * time.Millisecond)
	}
	return src, dst, false
}

func (f *flow) open() error {
	_, to, ok := f.segment(false, syn, 1, 0)
	if !ok {
		return fmt.Errorf("the SYN of %s went nowhere", f.from)
	}
	f.to = to
	if src, dst, ok := f.segment(true, syn|ack, 100, 2); !ok || src != f.vip || dst != f.from {
		return fmt.Errorf("the answer of %s came as %s -> %s (%v), should be %s -> %s", f.to, src, dst, ok, f.vip, f.from)
	}
	return f.alive()
}

// alive sends a byte of each side.
func (f *flow) alive() error {
	if _, dst, ok := f.segment(false, ack, 2, 101); !ok || dst != f.to {
		return fmt.Errorf("a segment of %s went to %s (%v), its flow is with %s", f.from, dst, ok, f.to)
	}
	if src, _, ok := f.segment(true, ack, 101, 2); !ok || src != f.vip {
		return fmt.Errorf("a segment of %s came from %s (%v), not from %s", f.to, src, ok, f.vip)
	}
	return nil
}

func (f *flow) close() {
	f.segment(false, fin|ack, 18, 117)
	f.segment(true, fin|ack, 117, 35)
	f.segment(false, ack, 35, 134)
}

var (
	vip   = netip.MustParseAddrPort("10.96.0.1:80")
	first = netip.MustParseAddrPort("10.244.0.10:8080")
	other = netip.MustParseAddrPort("10.244.0.11:8080")
)

// web is one Service with these endpoints.
func web(backends ...netip.AddrPort) *model.State {
	s := model.NewState()
	s.Node = dptest.Node()
	s.Node.Pods = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}
	p := model.Pool{ID: model.PoolID{Service: "ns/web", Port: "p", Proto: model.TCP}}
	for _, b := range backends {
		p.Backends = append(p.Backends, model.Backend{Addr: b, Local: true})
	}
	r := model.Route{Pool: p.ID, Else: model.Reject}
	s.Pools[p.ID] = p
	k := model.Key{IP: vip.Addr(), Port: vip.Port(), Proto: model.TCP}
	s.Frontends[k] = model.Frontend{Key: k, Routes: [3]model.Route{r, r, r}, Owned: true, About: model.About{Service: "ns/web", Port: "p", Kind: model.ClusterIP}}
	return s
}

func pool(s *model.State) model.Delta { return model.Delta{Pools: s.SortedPools()} }

// drainage is a test's dataplane and flows.
type drainage struct {
	*testing.T
	s    *subject
	d    inside
	port uint16
}

func newDrainage(t *testing.T) *drainage {
	x := &drainage{T: t, s: newSubject(t), port: 20000}
	if err := x.s.w.node.Do(func() error { return kernel.SetSysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1") }); err != nil {
		t.Fatal(err)
	}
	x.start()
	t.Cleanup(func() { x.d.Close() })
	return x
}

func (x *drainage) start() {
	d, err := x.s.open()
	x.must(err)
	x.d = d.(inside)
}

func (x *drainage) must(err error) {
	x.Helper()
	if err != nil {
		text, _ := x.s.w.text()
		x.Log(text)
		x.Fatal(err)
	}
}

func (x *drainage) apply(d model.Delta) {
	x.Helper()
	x.must(x.d.Apply(context.Background(), d))
}

func (x *drainage) flow() *flow {
	x.port++
	return x.from(x.port)
}

func (x *drainage) from(port uint16) *flow {
	return &flow{w: x.s.w, from: netip.AddrPortFrom(netip.MustParseAddr("10.244.0.99"), port), vip: vip}
}

// flowTo opens flows until one is with an endpoint.
func (x *drainage) flowTo(to netip.AddrPort) *flow {
	x.Helper()
	for range 20 {
		f := x.flow()
		x.must(f.open())
		if f.to == to {
			return f
		}
	}
	x.Fatalf("no flow of 20 went to %s", to)
	return nil
}

// never opens flows of which none may be with an endpoint.
func (x *drainage) never(to netip.AddrPort) {
	x.Helper()
	for range 10 {
		f := x.flow()
		if x.must(f.open()); f.to == to {
			x.Fatalf("a new flow went to %s, which drains", to)
		}
	}
}

func (x *drainage) weights() map[netip.AddrPort]kernel.Destination {
	out := map[netip.AddrPort]kernel.Destination{}
	found, err := look(x.d.conn)
	x.must(err)
	for _, h := range found {
		for _, to := range h.dests {
			out[to.Addr] = to
		}
	}
	return out
}

// An endpoint that goes keeps its flow, over a restart too, and gets no new one; one that comes back gets new ones again (kubernetes
// issues 108319 and 92019).
func TestRestartInDrain(t *testing.T) {
	x := newDrainage(t)
	x.apply(web(first, other).Full())
	f := x.flowTo(first)
	x.apply(pool(web(other)))
	x.never(first)
	x.must(f.alive())
	x.d.Close()
	x.start()
	x.apply(web(other).Full())
	x.never(first)
	x.must(f.alive())
	x.must(x.d.reap())
	if w, ok := x.weights()[first]; !ok || w.Weight != 0 || w.Active != 1 {
		t.Fatalf("after a restart the endpoint that drains is %+v (%v)", w, ok)
	}
	x.d.Close()
	x.start()
	x.apply(web(first, other).Full())
	x.must(f.alive())
	x.flowTo(first)
	if w := x.weights()[first]; w.Weight != 1 {
		t.Fatalf("the endpoint that came back is %+v", w)
	}
}

// A port that was used for an endpoint that drains now is a new flow, at its first SYN, to another (kubernetes issues 81775 and 93297).
func TestPortIsUsedAgain(t *testing.T) {
	x := newDrainage(t)
	x.apply(web(first, other).Full())
	live := x.flowTo(first)
	f := x.flowTo(first)
	f.close()
	x.apply(pool(web(other)))
	again := x.from(f.from.Port())
	x.must(again.open())
	if again.to != other {
		t.Fatalf("the port that was used again went to %s", again.to)
	}
	x.must(live.alive())
}

// A draining endpoint goes when its last flow has ended, and its virtual server with it when the Service has gone. A flow outlives its
// Service.
func TestEndOfDrain(t *testing.T) {
	x := newDrainage(t)
	x.apply(web(first).Full())
	f := x.flowTo(first)
	gone := web()
	x.apply(model.Delta{GoneFrontends: []model.Key{gone.SortedFrontends()[0].Key}, GonePools: []model.PoolID{gone.SortedPools()[0].ID}})
	x.must(x.d.reap())
	x.must(f.alive())
	if _, to, ok := x.flow().segment(false, syn, 1, 0); ok && to != vip { // to the next hop, as it is, like anything that is not ours
		t.Fatalf("a new flow to a Service that has gone went to %s", to)
	}
	f.segment(false, rst, 18, 0)
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(time.Second) { // CLOSE is kept for 10 seconds
		x.must(x.d.reap())
		found, err := look(x.d.conn)
		x.must(err)
		if len(found) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %v", x.weights())
		}
	}
	x.apply(web(first).Full())
	x.flowTo(first)
}

// UDP's endpoints go at once.
func TestUDPEndsAtOnce(t *testing.T) {
	x := newDrainage(t)
	udp := func(backends ...netip.AddrPort) *model.State {
		s := web(backends...)
		out := model.NewState()
		out.Node = s.Node
		for k, f := range s.Frontends {
			k.Proto, f.Key.Proto = model.UDP, model.UDP
			for o := range f.Routes {
				f.Routes[o].Pool.Proto = model.UDP
			}
			out.Frontends[k] = f
		}
		for id, p := range s.Pools {
			id.Proto, p.ID.Proto = model.UDP, model.UDP
			out.Pools[id] = p
		}
		return out
	}
	x.apply(udp(first, other).Full())
	x.apply(pool(udp(other)))
	if w := x.weights(); len(w) != 1 {
		t.Fatalf("%v are there", w)
	}
}

// Every scheduler of the kernel serves, and is changed while flows live; one that there is not is told, and rr serves.
func TestSchedulers(t *testing.T) {
	x := newDrainage(t)
	x.apply(web(first, other).Full())
	f := x.flowTo(first)
	for _, name := range []string{"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh", "fo", "ovf", "none-such"} {
		x.d.Close()
		told := 0
		x.must(x.s.w.node.Do(func() error {
			d, err := New(Config{V4: true, V6: true, MasqueradeBit: 14, Scheduler: name, Log: func(err error) { told++; t.Log(err) }})
			x.d = inside{d, x.s}
			return err
		}))
		x.apply(web(first, other).Full())
		x.must(f.alive())
		x.must(x.flow().open())
		if (told > 0) != (name == "none-such") {
			t.Errorf("%s: told %d times", name, told)
		}
	}
}
