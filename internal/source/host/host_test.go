package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"fairlead/internal/kernel"
	"fairlead/internal/source"
	"fairlead/internal/source/sourcetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// in is a source that runs inside a network namespace.
type in struct {
	*Source
	ns *kernel.NS
}

func (i in) Run(ctx context.Context, to source.Sink) error {
	return i.ns.Do(func() error { return i.Source.Run(ctx, to) })
}

func newNS(t *testing.T) *kernel.NS {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func do(t *testing.T, ns *kernel.NS, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

func addrsOf(all ...string) (out []netip.Addr) {
	for _, s := range all {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func has(want ...string) func(sourcetest.State) bool {
	return func(s sourcetest.State) bool { return slices.Equal(s.Addrs, addrsOf(want...)) }
}

// cable makes an interface that is up, and the other end of its cable. (Not every kernel has dummy interfaces.)
func cable(name string) error {
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}); err != nil {
		return err
	}
	for _, end := range []string{name, name + "p"} {
		l, err := netlink.LinkByName(end)
		if err == nil {
			err = errors.Join(netlink.LinkSetIP6AddrGenMode(l, 1), netlink.LinkSetUp(l)) // 1: no link-local address of its own
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func change(f func(netlink.Link, *netlink.Addr) error, name, cidr string, flags int) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(cidr)
	if err != nil {
		return err
	}
	a.Flags = flags
	return f(l, a)
}

// Addresses come and go in a real namespace, and the sink follows.
func TestFollows(t *testing.T) {
	ns, sink := newNS(t), new(sourcetest.Sink)
	do(t, ns, func() error { return cable("d0") })
	sourcetest.Run(t, in{New(), ns}, sink)
	now := sink.Until(t, "synced", func(s sourcetest.State) bool { return s.Synced > 0 })
	if !has("127.0.0.1", "::1")(now) {
		t.Fatalf("at first %v", now.Addrs)
	}
	do(t, ns, func() error {
		return errors.Join(
			change(netlink.AddrAdd, "d0", "192.0.2.10/24", 0),
			change(netlink.AddrAdd, "d0", "2001:db8::1/64", unix.IFA_F_NODAD),
			change(netlink.AddrAdd, "d0", "fe80::1/64", unix.IFA_F_NODAD),
			change(netlink.AddrAdd, "lo", "192.0.2.10/32", 0)) // twice on the machine, once in the list
	})
	sink.Until(t, "new addresses", has("127.0.0.1", "192.0.2.10", "::1", "2001:db8::1", "fe80::1"))
	do(t, ns, func() error { return change(netlink.AddrDel, "d0", "192.0.2.10/24", 0) })
	do(t, ns, func() error { return change(netlink.AddrDel, "lo", "192.0.2.10/32", 0) })
	sink.Until(t, "an address less", has("127.0.0.1", "::1", "2001:db8::1", "fe80::1"))
	do(t, ns, func() error {
		l, err := netlink.LinkByName("d0")
		return errors.Join(err, netlink.LinkDel(l))
	})
	if now := sink.Until(t, "no interface", has("127.0.0.1", "::1")); now.Synced != 1 {
		t.Errorf("synced %d times", now.Synced)
	}
}

// An address that is not yet known to be unique is no address of ours. When it is, the sink hears of it.
func TestTentative(t *testing.T) {
	ns, sink := newNS(t), new(sourcetest.Sink)
	do(t, ns, func() error { return cable("d0") })
	sourcetest.Run(t, in{New(), ns}, sink)
	sink.Until(t, "synced", func(s sourcetest.State) bool { return s.Synced > 0 })
	do(t, ns, func() error {
		if err := change(netlink.AddrAdd, "d0", "2001:db8::2/64", 0); err != nil {
			return err
		}
		all, err := netlink.AddrList(nil, netlink.FAMILY_V6)
		if !slices.ContainsFunc(all, func(a netlink.Addr) bool { return a.Flags&unix.IFA_F_TENTATIVE != 0 }) {
			t.Errorf("no address is tentative, so this test shows nothing: %v", all)
		}
		if now, err := addrs(); err != nil || !slices.Equal(now, addrsOf("127.0.0.1", "::1")) {
			t.Errorf("while tentative: %v, %v", now, err)
		}
		return err
	})
	sink.Until(t, "the address", has("127.0.0.1", "::1", "2001:db8::2"))
}

// More changes than a socket holds end in the right list.
func TestFlood(t *testing.T) {
	ns, sink := newNS(t), new(sourcetest.Sink)
	do(t, ns, func() error { return cable("d0") })
	s := New()
	var listens atomic.Int32
	s.listen = func() (subscription, error) { // deaf for a while, with the smallest buffer
		c, err := mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{Groups: groups})
		if err != nil {
			return nil, err
		}
		listens.Add(1)
		return slow{c}, c.SetReadBuffer(1)
	}
	sourcetest.Run(t, in{s, ns}, sink)
	sink.Until(t, "synced", func(s sourcetest.State) bool { return s.Synced > 0 })
	want := []string{"127.0.0.1"}
	do(t, ns, func() error {
		for i := range 200 {
			want = append(want, fmt.Sprintf("192.0.2.%d", i+1))
			if err := change(netlink.AddrAdd, "d0", want[i+1]+"/32", 0); err != nil {
				return err
			}
		}
		return nil
	})
	sink.Until(t, "all of them", has(append(want, "::1")...))
	if listens.Load() < 2 {
		t.Error("nothing overflowed, so this test shows nothing")
	}
}

type slow struct{ *mdl.Conn }

func (s slow) Receive() ([]mdl.Message, error) {
	time.Sleep(100 * time.Millisecond)
	return s.Conn.Receive()
}

// fake is a subscription and a list that fail as told.
type fake struct {
	mu      sync.Mutex
	list    []netip.Addr
	fail    error // of list
	lists   int
	listens int
	events  chan error // what Receive returns next; closed by nobody
}

func (f *fake) source() *Source {
	return &Source{
		list: func() ([]netip.Addr, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.lists++
			return f.list, f.fail
		},
		listen: func() (subscription, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.listens++
			if f.listens == 1 {
				return nil, unix.EPERM
			}
			return &fakeConn{f.events, make(chan struct{})}, nil
		},
	}
}

type fakeConn struct {
	events chan error
	closed chan struct{}
}

func (c *fakeConn) Receive() ([]mdl.Message, error) {
	select {
	case err := <-c.events:
		return nil, err
	case <-c.closed:
		return nil, net.ErrClosed
	}
}

func (c *fakeConn) Close() error { close(c.closed); return nil }

// Whatever fails is tried again: the subscription at the start, the list, the subscription later. What changed meanwhile
// is told.
func TestRecovers(t *testing.T) {
	f, sink := &fake{list: addrsOf("192.0.2.1"), events: make(chan error)}, new(sourcetest.Sink)
	sourcetest.Run(t, f.source(), sink)
	sink.Until(t, "the list without a subscription", has("192.0.2.1"))
	set := func(fail error, list ...string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.list, f.fail = addrsOf(list...), fail
	}
	set(nil, "192.0.2.2")
	sink.Until(t, "the second subscription", has("192.0.2.2"))
	set(nil, "192.0.2.3")
	f.events <- unix.ENOBUFS
	sink.Until(t, "the list after an overflow", has("192.0.2.3"))
	set(unix.EIO)
	f.events <- nil
	waitFor(t, func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.listens >= 4 })
	if now := sink.Now(); !has("192.0.2.3")(now) {
		t.Errorf("a list that failed took addresses away: %v", now.Addrs)
	}
	set(nil, "192.0.2.4")
	now := sink.Until(t, "the list at last", has("192.0.2.4"))
	if want := "addrs 192.0.2.1, synced, addrs 192.0.2.2, addrs 192.0.2.3, addrs 192.0.2.4"; strings.Join(now.Calls, ", ") != want {
		t.Errorf("calls %q, want %q", strings.Join(now.Calls, ", "), want)
	}
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("waited in vain")
}

func TestTidy(t *testing.T) {
	addr := func(ip string, flags int) netlink.Addr {
		p := net.ParseIP(ip)
		return netlink.Addr{IPNet: &net.IPNet{IP: p}, Flags: flags}
	}
	got := tidy([]netlink.Addr{
		addr("2001:db8::5", unix.IFA_F_TEMPORARY), addr("2001:db8::4", unix.IFA_F_DEPRECATED), addr("2001:db8::3", unix.IFA_F_DADFAILED|unix.IFA_F_TENTATIVE),
		addr("2001:db8::2", unix.IFA_F_TENTATIVE), addr("2001:db8::1", unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC),
		addr("::ffff:192.0.2.1", unix.IFA_F_PERMANENT), addr("192.0.2.1", unix.IFA_F_SECONDARY), {}, addr("bad", 0),
	})
	if want := addrsOf("192.0.2.1", "2001:db8::1", "2001:db8::4", "2001:db8::5"); !slices.Equal(got, want) {
		t.Errorf("tidy: %v, want %v", got, want)
	}
}
