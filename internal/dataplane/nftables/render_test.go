package nftables

import (
	"net/netip"
	"slices"
	"testing"

	"fairlead/internal/model"

	"pgregory.net/rapid"
)

// The name of a chain says all of its target.
func TestTargetNames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := target{
			verdict:  rapid.SampledFrom([]model.Verdict{model.Forward, model.Reject, model.Drop}).Draw(t, "verdict"),
			nodePort: rapid.Bool().Draw(t, "nodePort"), ranges: rapid.Bool().Draw(t, "ranges"),
		}
		if want.verdict == model.Forward {
			want.local, want.snat = rapid.Bool().Draw(t, "local"), rapid.Bool().Draw(t, "snat")
			want.n, want.sticky = rapid.IntRange(1, 100_000).Draw(t, "n"), rapid.Uint32Range(0, 86_400).Draw(t, "sticky")
		}
		if got, ok := targetNamed(want.chain()); !ok || got != want {
			t.Fatalf("%s is read as %+v (%v), was %+v", want.chain(), got, ok, want)
		}
	})
	for _, name := range []string{"", "cluster-", "cluster-0", "cluster-x", "local--1", "cluster-1-sticky-0", "cluster-1-sticky-", "input", "from-pod"} {
		if got, ok := targetNamed(name); ok {
			t.Errorf("%q is read as %+v", name, got)
		}
	}
}

// Those who stay keep their numbers where they can: one that comes is one write, one that goes at most two.
func TestArrange(t *testing.T) {
	backends := func(ns []int) string {
		var out []model.Backend
		for _, n := range ns {
			out = append(out, model.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80)})
		}
		return pack(out, false)
	}
	size := backendLen(false)
	differ := func(a, b string) (n int) {
		for i := 0; i*size < max(len(a), len(b)); i++ {
			if part(a, i, size) != part(b, i, size) {
				n++
			}
		}
		return n
	}
	rapid.Check(t, func(t *rapid.T) {
		had := ""
		set := map[int]bool{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			n := rapid.IntRange(1, 9).Draw(t, "endpoint")
			set[n] = !set[n]
			var want []int
			for i := range 10 {
				if set[i] {
					want = append(want, i)
				}
			}
			got := arrange(had, backends(want), size)
			if inOrder(got, size) != inOrder(backends(want), size) {
				t.Fatalf("%x is not an order of %v", got, want)
			}
			most := 1
			if !set[n] {
				most = 2
			}
			if had != "" && differ(had, got) > most {
				t.Fatalf("one changed, %d numbers are written: %x, %x", differ(had, got), had, got)
			}
			had = got
		}
	})
}

func inOrder(packed string, size int) string {
	var all []string
	for ; len(packed) >= size; packed = packed[size:] {
		all = append(all, packed[:size])
	}
	slices.Sort(all)
	out := ""
	for _, a := range all {
		out += a
	}
	return out
}

// Ranges survive the way into elements and back; what lies within another is left out.
func TestRanges(t *testing.T) {
	p := netip.MustParsePrefix
	for _, c := range []struct{ in, want []netip.Prefix }{
		{[]netip.Prefix{p("192.0.2.0/24")}, []netip.Prefix{p("192.0.2.0/24")}},
		{[]netip.Prefix{p("192.0.2.7/32"), p("192.0.2.0/24"), p("10.0.0.0/8")}, []netip.Prefix{p("10.0.0.0/8"), p("192.0.2.0/24")}},
		{[]netip.Prefix{p("0.0.0.0/0"), p("10.0.0.0/8")}, []netip.Prefix{p("0.0.0.0/0")}},
		{[]netip.Prefix{p("10.0.0.0/9"), p("10.128.0.0/9")}, []netip.Prefix{p("10.0.0.0/9"), p("10.128.0.0/9")}},
	} {
		if got := unpackRanges(packRanges(c.in), false); !slices.Equal(got, c.want) {
			t.Errorf("%v become %v, want %v", c.in, got, c.want)
		}
	}
	six := []netip.Prefix{p("2001:db8::/33"), p("2001:db8:8000::/127")}
	if got := unpackRanges(packRanges(six), true); !slices.Equal(got, six) {
		t.Errorf("%v become %v", six, got)
	}
}
