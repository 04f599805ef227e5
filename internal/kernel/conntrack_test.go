package kernel

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	tmct "github.com/ti-mo/conntrack"
)

// table opens the conntrack table of a new namespace, with the same seen through an independent library.
func table(t testing.TB) (*Conntrack, *tmct.Conn) {
	t.Helper()
	n, err := NewNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	var ours *Conntrack
	var theirs *tmct.Conn
	if err := n.Do(func() (err error) {
		if ours, err = OpenConntrack(); err != nil {
			return err
		}
		theirs, err = tmct.Dial(nil)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return ours, theirs
}

func track(t testing.TB, c *tmct.Conn, proto uint8, src, dst, backend string, zone uint16) {
	t.Helper()
	s, d, b := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst), netip.MustParseAddrPort(backend)
	f := tmct.NewFlow(proto, 0, s.Addr(), d.Addr(), s.Port(), d.Port(), 600, 0)
	f.TupleReply.IP.SourceAddress, f.TupleReply.Proto.SourcePort = b.Addr(), b.Port()
	f.Zone = zone
	if proto == 6 {
		f.ProtoInfo.TCP = &tmct.ProtoInfoTCP{State: 3}
	}
	if err := c.Create(f); err != nil {
		t.Fatal(err)
	}
}

func flows(t testing.TB, c *Conntrack, v6 bool, proto uint8) map[netip.AddrPort]Flow {
	t.Helper()
	out := map[netip.AddrPort]Flow{}
	if err := c.Flows(v6, proto, func(f Flow) { out[f.Src] = f }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestConntrack(t *testing.T) {
	ours, theirs := table(t)
	track(t, theirs, 17, "192.0.2.1:1000", "10.96.0.1:53", "10.244.1.1:5353", 0)
	track(t, theirs, 17, "192.0.2.1:1001", "10.96.0.1:53", "10.96.0.1:53", 0)
	track(t, theirs, 17, "192.0.2.1:1002", "10.96.0.1:53", "10.96.0.1:53", 7)
	track(t, theirs, 6, "192.0.2.1:1003", "10.96.0.1:53", "10.244.1.1:5353", 0)
	track(t, theirs, 132, "192.0.2.1:1004", "10.96.0.1:53", "10.244.1.1:5353", 0)
	track(t, theirs, 17, "[fd00::1]:1005", "[fd00:96::1]:53", "[fd00:244::1]:5353", 0)

	for _, c := range []struct {
		v6    bool
		proto uint8
		want  []string
	}{
		{false, 17, []string{"192.0.2.1:1000", "192.0.2.1:1001", "192.0.2.1:1002"}},
		{false, 132, []string{"192.0.2.1:1004"}},
		{false, 6, []string{"192.0.2.1:1003"}},
		{true, 17, []string{"[fd00::1]:1005"}},
		{true, 132, nil},
	} {
		got := flows(t, ours, c.v6, c.proto)
		if len(got) != len(c.want) {
			t.Errorf("v6 %v proto %d: %v, want %v", c.v6, c.proto, got, c.want)
		}
		for _, w := range c.want {
			if _, ok := got[netip.MustParseAddrPort(w)]; !ok {
				t.Errorf("v6 %v proto %d: %s is missing in %v", c.v6, c.proto, w, got)
			}
		}
	}

	all, err := theirs.Dump(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range all {
		src := netip.AddrPortFrom(want.TupleOrig.IP.SourceAddress, want.TupleOrig.Proto.SourcePort)
		got := flows(t, ours, src.Addr().Is6(), want.TupleOrig.Proto.Protocol)[src]
		is := Flow{ID: got.ID, Proto: want.TupleOrig.Proto.Protocol, Src: src, Zone: want.Zone != 0,
			Dst:      netip.AddrPortFrom(want.TupleOrig.IP.DestinationAddress, want.TupleOrig.Proto.DestinationPort),
			ReplySrc: netip.AddrPortFrom(want.TupleReply.IP.SourceAddress, want.TupleReply.Proto.SourcePort)}
		if got != is || got.ID == 0 {
			t.Errorf("read %+v\nwant %+v", got, is)
		}
	}
}

func TestConntrackDelete(t *testing.T) {
	ours, theirs := table(t)
	track(t, theirs, 17, "192.0.2.1:1000", "10.96.0.1:53", "10.244.1.1:5353", 0)
	track(t, theirs, 17, "[fd00::1]:1005", "[fd00:96::1]:53", "[fd00:244::1]:5353", 0)
	for _, v6 := range []bool{false, true} {
		for _, f := range flows(t, ours, v6, 17) {
			reborn := f
			reborn.ID++
			if ok, err := ours.Delete(reborn); ok || err != nil {
				t.Errorf("entry under another ID: deleted %v, %v", ok, err)
			}
			if ok, err := ours.Delete(f); !ok || err != nil {
				t.Errorf("entry: deleted %v, %v", ok, err)
			}
			if ok, err := ours.Delete(f); ok || err != nil {
				t.Errorf("entry that is gone: deleted %v, %v", ok, err)
			}
		}
		if left := flows(t, ours, v6, 17); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// A table larger than one read is read whole, also while it is emptied.
func TestConntrackLarge(t *testing.T) {
	ours, theirs := table(t)
	const n = 3000
	for i := range n {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 0xc6336400+uint32(i))
		src := netip.AddrPortFrom(netip.AddrFrom4(a), 4000)
		track(t, theirs, 17, src.String(), "10.96.0.1:53", "10.244.1.1:5353", 0)
	}
	if got := len(flows(t, ours, false, 17)); got != n {
		t.Fatalf("read %d, want %d", got, n)
	}
	start, deleted := time.Now(), 0
	if err := ours.Flows(false, 17, func(f Flow) {
		ok, err := ours.Delete(f)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			deleted++
		}
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("read and deleted %d entries in %v", deleted, time.Since(start))
	if left := len(flows(t, ours, false, 17)); left != 0 || deleted != n {
		t.Errorf("deleted %d, left %d", deleted, left)
	}
}

func FuzzParseFlow(f *testing.F) {
	f.Add([]byte{8, 0, 12, 0, 1, 2, 3, 4})
	f.Fuzz(func(t *testing.T, b []byte) { parseFlow(b) })
}

func BenchmarkConntrackFlows(b *testing.B) {
	ours, theirs := table(b)
	for i := range 10000 {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 0xc6336400+uint32(i))
		track(b, theirs, 17, netip.AddrPortFrom(netip.AddrFrom4(a), 4000).String(), "10.96.0.1:53", "10.244.1.1:5353", 0)
	}
	b.Run("ours", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			flows(b, ours, false, 17)
		}
	})
	b.Run("ours none", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			flows(b, ours, false, 132)
		}
	})
	b.Run("ti-mo", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := theirs.Dump(nil); err != nil {
				b.Fatal(err)
			}
		}
	})
}
