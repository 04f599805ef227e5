package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	tmct "github.com/ti-mo/conntrack"
	"go.uber.org/goleak"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lab is a network namespace with its conntrack table and a Cleaner at work on it.
type lab struct {
	*testing.T
	ns    *kernel.NS
	table *tmct.Conn
	clean *Cleaner

	opened   atomic.Int32 // how often the Cleaner opened the table
	failures atomic.Int32 // how often it still shall fail
	mu       sync.Mutex
	rounds   []Round
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{T: t}
	var err error
	if l.ns, err = kernel.NewNS(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.ns.Close() })
	l.in(func() (err error) { l.table, err = tmct.Dial(nil); return err })
	t.Cleanup(func() { l.table.Close() })
	l.clean = New(Config{Open: l.open, Report: func(r Round) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.rounds = append(l.rounds, r)
	}})
	t.Cleanup(l.clean.Close)
	return l
}

func (l *lab) open() (table *kernel.Conntrack, err error) {
	l.opened.Add(1)
	if l.failures.Add(-1) >= 0 {
		return nil, errors.New("injected failure")
	}
	err = l.ns.Do(func() error { table, err = kernel.OpenConntrack(); return err })
	return table, err
}

func (l *lab) in(fn func() error) {
	l.Helper()
	if err := l.ns.Do(fn); err != nil {
		l.Fatal(err)
	}
}

// run runs a program inside, with a text as its input.
func (l *lab) run(input string, name string, args ...string) {
	l.Helper()
	l.in(func() error {
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(input)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %v: %w: %s", name, args, err, out)
		}
		return nil
	})
}

// track puts an entry into the table: src sent to dst, and backend answers.
func (l *lab) track(proto model.Proto, src, dst, backend string) {
	l.Helper()
	s, d, b := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst), netip.MustParseAddrPort(backend)
	f := tmct.NewFlow(uint8(proto), 0, s.Addr(), d.Addr(), s.Port(), d.Port(), 600, 0)
	f.TupleReply.IP.SourceAddress, f.TupleReply.Proto.SourcePort = b.Addr(), b.Port()
	if proto == model.TCP {
		f.ProtoInfo.TCP = &tmct.ProtoInfoTCP{State: 3}
	}
	if err := l.table.Create(f); err != nil {
		l.Fatal(err)
	}
}

// entries are the ids in the table, by "proto src>dst<backend".
func (l *lab) entries() map[string]uint32 {
	l.Helper()
	all, err := l.table.Dump(nil)
	if err != nil {
		l.Fatal(err)
	}
	out := map[string]uint32{}
	for _, f := range all {
		o, r := f.TupleOrig, f.TupleReply
		out[fmt.Sprintf("%s %s>%s<%s", model.Proto(o.Proto.Protocol),
			netip.AddrPortFrom(o.IP.SourceAddress, o.Proto.SourcePort),
			netip.AddrPortFrom(o.IP.DestinationAddress, o.Proto.DestinationPort),
			netip.AddrPortFrom(r.IP.SourceAddress, r.Proto.SourcePort))] = f.ID
	}
	return out
}

// want waits until the table holds the wanted entries and no others, with the ids they had before.
func (l *lab) want(before map[string]uint32, keys ...string) {
	l.Helper()
	var now map[string]uint32
	l.eventually("the table to hold "+strings.Join(keys, ", "), func() bool {
		now = l.entries()
		return len(now) == len(keys)
	}, func() any { return now })
	for _, k := range keys {
		if id, ok := now[k]; !ok || id != before[k] {
			l.Errorf("entry %s: id %d, was %d", k, id, before[k])
		}
	}
}

func (l *lab) eventually(what string, ok func() bool, is func() any) {
	l.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			l.Fatalf("waited in vain for %s; is %v", what, is())
		}
	}
}

// look waits until n rounds were reported.
func (l *lab) look(n int) []Round {
	l.Helper()
	var rounds []Round
	l.eventually(fmt.Sprint(n, " rounds"), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		rounds = append([]Round(nil), l.rounds...)
		return len(rounds) >= n
	}, func() any { return rounds })
	return rounds
}

func (l *lab) apply(d model.Delta) { l.clean.Applied(d, 0) }

var dnsID = poolID("ns/dns", model.UDP, false, model.Cluster)

// Each way of a frontend, three protocols: only what is stale goes, and ids of the others stay.
func TestCleanKinds(t *testing.T) {
	l := newLab(t)
	for _, p := range []model.Proto{model.TCP, model.UDP, model.SCTP} {
		for i, dst := range []string{"10.96.0.10:53", "203.0.113.1:53", "198.51.100.1:53", "192.0.2.11:30053", "192.0.2.99:30053"} {
			l.track(p, fmt.Sprintf("192.0.2.1:%d", 1000+i), dst, "10.244.9.9:5353")
			l.track(p, fmt.Sprintf("192.0.2.1:%d", 2000+i), dst, "10.244.1.10:5353")
		}
	}
	l.track(model.UDP, "[fd00::1]:1000", "[fd00:96::10]:53", "[fd00:244::9]:5353")
	l.track(model.UDP, "[fd00::1]:2000", "[fd00:96::10]:53", "[fd00:244::1]:5353")
	before := l.entries()
	var keep []string
	for k := range before {
		gone := strings.HasSuffix(k, "<10.244.9.9:5353") || strings.HasSuffix(k, "<[fd00:244::9]:5353")
		if !gone || strings.HasPrefix(k, "tcp") || strings.Contains(k, ">192.0.2.99:") {
			keep = append(keep, k)
		}
	}
	l.apply(world())
	l.want(before, keep...)
	deleted := 0
	for _, r := range l.look(3) {
		deleted += r.Deleted
	}
	if deleted != len(before)-len(keep) || deleted != 9 {
		t.Errorf("reported %d deleted, %d are gone", deleted, len(before)-len(keep))
	}
}

// A Service or one port of it deleted: what was translated goes, what only has the same address stays.
func TestCleanGone(t *testing.T) {
	l := newLab(t)
	l.apply(world())
	l.look(3)
	l.track(model.UDP, "192.0.2.1:1000", "10.96.0.10:53", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1001", "192.0.2.11:30053", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1002", "203.0.113.1:53", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1003", "10.96.0.10:99", "10.244.1.10:5353")
	before := l.entries()
	l.apply(model.Delta{GoneFrontends: []model.Key{key("10.96.0.10:53", model.UDP), key("0.0.0.0:30053", model.UDP)}})
	l.want(before, "udp 192.0.2.1:1002>203.0.113.1:53<10.244.1.10:5353", "udp 192.0.2.1:1003>10.96.0.10:99<10.244.1.10:5353")
}

// A frontend that the rules of the previous run had, and that went away while fairlead was down.
func TestCleanAfterRestart(t *testing.T) {
	l := newLab(t)
	l.track(model.UDP, "192.0.2.1:1000", "10.96.0.66:53", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1001", "10.96.0.67:53", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1002", "192.0.2.11:30066", "10.244.1.10:5353")
	before := l.entries()
	first := world()
	first.GoneFrontends = []model.Key{key("10.96.0.66:53", model.UDP), key("0.0.0.0:30066", model.UDP)}
	l.apply(first)
	l.apply(model.Delta{Frontends: []model.Frontend{front(key("10.96.0.68:53", model.UDP), dnsID, false)}})
	l.want(before, "udp 192.0.2.1:1001>10.96.0.67:53<10.244.1.10:5353")
}

// Failed rounds are owed, tried again without a new change, and nothing of what they owed is forgotten.
func TestCleanRetries(t *testing.T) {
	l := newLab(t)
	l.apply(world())
	l.look(3)
	l.track(model.UDP, "192.0.2.1:1000", "10.96.0.10:53", "10.244.1.10:5353")
	l.track(model.UDP, "192.0.2.1:1001", "203.0.113.1:53", "10.244.1.10:5353")
	l.failures.Store(3)
	l.apply(model.Delta{GoneFrontends: []model.Key{key("10.96.0.10:53", model.UDP)}})
	l.apply(model.Delta{Pools: []model.Pool{pool(dnsID, "10.244.2.10:5353")}})
	l.want(nil)
	if l.failures.Load() >= 0 {
		t.Error("the failures were not met")
	}
}

// Close does what is still owed.
func TestCloseCleans(t *testing.T) {
	l := newLab(t)
	l.failures.Store(1)
	l.track(model.UDP, "192.0.2.1:1000", "10.96.0.10:53", "10.244.9.9:5353")
	l.apply(world())
	l.look(1)
	l.clean.Close()
	if left := l.entries(); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// What does not concern UDP or SCTP, or can't leave anything stale, is not worth opening the table.
func TestNoNeedlessReading(t *testing.T) {
	l := newLab(t)
	web := poolID("ns/web", model.TCP, false, model.Cluster)
	l.apply(model.Delta{Full: true, Node: node("192.0.2.11"),
		Frontends: []model.Frontend{front(key("10.96.0.10:80", model.TCP), web, false)}, Pools: []model.Pool{pool(web, "10.244.1.1:80")}})
	l.apply(model.Delta{Pools: []model.Pool{pool(web)}})
	l.apply(model.Delta{GoneFrontends: []model.Key{key("10.96.0.10:80", model.TCP)}})
	l.apply(model.Delta{Checks: []model.Check{{Service: "ns/x"}}})
	l.clean.Close()
	if n := l.opened.Load(); n != 0 {
		t.Errorf("the table was opened %d times", n)
	}
}

// An entry made of a packet that was on its way while the rules changed.
func TestSecondLook(t *testing.T) {
	l := newLab(t)
	l.apply(world())
	l.look(3)
	l.track(model.UDP, "192.0.2.1:1000", "10.96.0.10:53", "10.244.9.9:5353")
	l.want(nil)
	time.Sleep(2 * secondLook) // there is no third look
	if n := l.opened.Load(); n != 2 {
		t.Errorf("the table was opened %d times, want 2", n)
	}
}

func TestManyFlows(t *testing.T) {
	l := newLab(t)
	l.apply(world())
	l.look(3)
	const n = 5000
	for i := range n {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 0xac100000+uint32(i))
		l.track(model.UDP, netip.AddrPortFrom(netip.AddrFrom4(a), 4000).String(), "10.96.0.10:53",
			[]string{"10.244.1.10:5353", "10.244.2.10:5353"}[i%2])
	}
	l.mu.Lock()
	l.rounds = nil
	l.mu.Unlock()
	l.apply(model.Delta{Pools: []model.Pool{pool(dnsID, "10.244.1.10:5353")}})
	l.eventually("half of the flows to go", func() bool { return len(l.entries()) == n/2 }, func() any { return len(l.entries()) })
	l.Logf("first round: %+v", l.look(1)[0])
}

// A churn of Services leaves nothing behind in the Cleaner.
func TestChurn(t *testing.T) {
	l := newLab(t)
	l.apply(world())
	for wave := range 50 {
		var born, dead model.Delta
		for i := range 100 {
			id := poolID(fmt.Sprintf("ns/s%d-%d", wave, i), model.UDP, false, model.Cluster)
			k := model.Key{IP: netip.AddrFrom4([4]byte{10, 97, byte(wave), byte(i)}), Port: 53, Proto: model.UDP}
			born.Frontends, born.Pools = append(born.Frontends, front(k, id, false)), append(born.Pools, pool(id, "10.244.1.1:1"))
			dead.GoneFrontends, dead.GonePools = append(dead.GoneFrontends, k), append(dead.GonePools, id)
		}
		l.apply(born)
		l.apply(dead)
	}
	l.clean.Close()
	v := l.clean.view.state
	want := model.NewState()
	want.Apply(tracked(world()))
	if len(v.Frontends) != len(want.Frontends) || len(v.Pools) != len(want.Pools) || !l.clean.fresh.empty() || !l.clean.second.empty() {
		t.Errorf("left: %d frontends, %d pools, %v, %v", len(v.Frontends), len(v.Pools), l.clean.fresh, l.clean.second)
	}
}

// Real packets: one socket that never pauses is refused when its Service is scaled to zero, and is served by the new
// backend afterwards; the entries of other flows keep their ids. (Case: UDP scale to zero and back.)
func TestUnpausedSender(t *testing.T) {
	l := newLab(t)
	l.run("", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1") // an ICMP error needs a route off lo
	l.run("", "ip", "link", "set", "v0", "up")
	l.run("", "ip", "link", "set", "v1", "up")
	for _, a := range []string{"10.244.1.10/32", "10.244.1.11/32", "192.0.2.1/32"} {
		l.run("", "ip", "addr", "add", a, "dev", "v0")
	}
	l.run("", "ip", "route", "add", "10.96.0.0/16", "dev", "v0", "src", "192.0.2.1")
	rules := func(rule string) {
		l.Helper()
		l.run(`table ip t
delete table ip t
table ip t {
	chain nat { type nat hook output priority -100; `+strings.ReplaceAll(rule, "REJECT", "")+`
		ip daddr 10.96.0.20 udp dport 53 dnat to 10.244.1.11:5353
	}
	chain filter { type filter hook output priority 0; `+map[bool]string{true: "ip daddr 10.96.0.10 udp dport 53 reject"}[rule == "REJECT"]+`
	}
}`, "nft", "-f", "-")
	}
	var a, b atomic.Int64
	l.sink("10.244.1.10:5353", &a)
	l.sink("10.244.1.11:5353", &b)
	other := poolID("ns/other", model.UDP, false, model.Cluster)
	state := model.Delta{Full: true, Node: node("10.244.1.10", "10.244.1.11", "127.0.0.1", "192.0.2.1"),
		Frontends: []model.Frontend{front(key("10.96.0.10:53", model.UDP), dnsID, false), front(key("10.96.0.20:53", model.UDP), other, false)},
		Pools:     []model.Pool{pool(dnsID, "10.244.1.10:5353"), pool(other, "10.244.1.11:5353")}}

	rules("ip daddr 10.96.0.10 udp dport 53 dnat to 10.244.1.10:5353")
	l.apply(state)
	var refused atomic.Int64
	l.sender("10.96.0.20:53", nil)
	l.sender("10.244.1.10:5353", nil) // to the pod itself: not a Service's business
	l.eventually("the others' flows", func() bool { return len(l.entries()) == 2 }, func() any { return l.entries() })
	others := l.entries()
	for k := range others {
		if strings.Contains(k, "10.96.0.10") {
			t.Fatalf("unexpected %s", k)
		}
	}
	const atA, atB = "10.96.0.10:53<10.244.1.10:5353", "10.96.0.10:53<10.244.1.11:5353"
	has := func(suffix string) bool {
		for k := range l.entries() {
			if strings.HasSuffix(k, suffix) {
				return true
			}
		}
		return false
	}
	l.sender("10.96.0.10:53", &refused)
	l.eventually("an entry to A", func() bool { return has(atA) }, func() any { return l.entries() })

	rules("REJECT")
	l.apply(model.Delta{Pools: []model.Pool{pool(dnsID)}})
	l.eventually("the sender to be refused", func() bool { return refused.Load() > 3 }, func() any { return l.entries() })
	if has(atA) {
		t.Errorf("still there: %v", l.entries())
	}

	rules("ip daddr 10.96.0.10 udp dport 53 dnat to 10.244.1.11:5353")
	l.apply(model.Delta{Pools: []model.Pool{pool(dnsID, "10.244.1.11:5353")}})
	l.eventually("an entry to B", func() bool { return has(atB) }, func() any { return l.entries() })
	got := b.Load()
	l.eventually("B to receive", func() bool { return b.Load() > got+10 }, func() any { return b.Load() })
	now := l.entries()
	for k, id := range others {
		if now[k] != id {
			t.Errorf("entry of another flow was touched: %s id %d, was %d", k, now[k], id)
		}
	}
}

// sink counts datagrams at an address until the test ends.
func (l *lab) sink(addr string, n *atomic.Int64) {
	l.Helper()
	var c net.PacketConn
	l.in(func() (err error) { c, err = net.ListenPacket("udp", addr); return err })
	var wg sync.WaitGroup
	wg.Go(func() {
		for buf := make([]byte, 64); ; n.Add(1) {
			if _, _, err := c.ReadFrom(buf); err != nil {
				return
			}
		}
	})
	l.Cleanup(func() { c.Close(); wg.Wait() })
}

// sender sends a datagram each 2 ms from one socket until the test ends, and counts refusals.
func (l *lab) sender(addr string, refused *atomic.Int64) {
	l.Helper()
	var c net.Conn
	l.in(func() (err error) { c, err = net.Dial("udp", addr); return err })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for tick := time.NewTicker(2 * time.Millisecond); ; {
			select {
			case <-stop:
				tick.Stop()
				return
			case <-tick.C:
			}
			if _, err := c.Write([]byte("x")); errors.Is(err, syscall.ECONNREFUSED) && refused != nil {
				refused.Add(1)
			}
		}
	})
	l.Cleanup(func() { close(stop); wg.Wait(); c.Close() })
}
