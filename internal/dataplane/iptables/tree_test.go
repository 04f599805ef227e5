package iptables

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"fairlead/internal/model"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func testTree(v6 bool) *tree {
	t := &tree{root: chainServices, prefix: prefixService, v6: v6, dirty: map[path]bool{}}
	t.rules = func(p path) []Rule {
		r := t.match(p)
		r.Comment = string(p)
		return []Rule{r}
	}
	t.tail = func() []Rule { return []Rule{{Comment: "tail"}} }
	return t
}

// everyChain renders the tree from its root, without looking at what is dirty.
func everyChain(t *tree) map[string][]Rule {
	all := map[string][]Rule{}
	var visit func(part)
	visit = func(p part) {
		if p.inline() {
			return
		}
		all[t.name(p.at)] = t.render(p)
		if !p.list {
			for q := range p.parts() {
				visit(q)
			}
		}
	}
	visit(t.top())
	return all
}

func genKey(t *rapid.T, v6 bool) path {
	near := rapid.Bool().Draw(t, "near")
	var a netip.Addr
	if v6 {
		a = netip.AddrFrom16([16]byte{0xfd, 14: rapid.Byte().Draw(t, "b"), 15: rapid.Byte().Draw(t, "a")})
	} else if near {
		a = netip.AddrFrom4([4]byte{10, 96, rapid.ByteRange(0, 3).Draw(t, "b"), rapid.Byte().Draw(t, "a")})
	} else {
		a = netip.AddrFrom4([4]byte{rapid.Byte().Draw(t, "d"), 1, 2, rapid.ByteRange(0, 3).Draw(t, "a")})
	}
	if rapid.IntRange(0, 9).Draw(t, "whole") == 0 {
		return addrPath(a)
	}
	port := rapid.SampledFrom([]uint16{80, 443, 8080, 53, 1, 65535}).Draw(t, "port")
	return keyPath(model.Key{IP: a, Port: port, Proto: rapid.SampledFrom([]model.Proto{model.TCP, model.UDP, model.SCTP}).Draw(t, "proto")})
}

// Writing only what is dirty gives the same chains as writing everything.
func TestTreeIncremental(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		v6 := rapid.Bool().Draw(rt, "v6")
		tr := testTree(v6)
		kernel := map[string][]Rule{}
		var present []path
		for range rapid.IntRange(1, 60).Draw(rt, "rounds") {
			for range rapid.IntRange(1, 8).Draw(rt, "changes") {
				if len(present) > 0 && rapid.IntRange(0, 9).Draw(rt, "op") < 4 {
					i := rapid.IntRange(0, len(present)-1).Draw(rt, "i")
					tr.remove(present[i])
					present = slices.Delete(present, i, i+1)
					continue
				}
				p := genKey(rt, v6)
				if !slices.Contains(present, p) {
					present = append(present, p)
				}
				tr.put(p)
			}
			if rapid.IntRange(0, 9).Draw(rt, "bulk") == 0 {
				var many []path
				for range 70 {
					p := genKey(rt, v6)
					many = append(many, p)
					if !slices.Contains(present, p) {
						present = append(present, p)
					}
				}
				tr.putAll(many)
			}
			for at := range tr.dirty {
				if rules, ok := tr.chain(at); ok {
					kernel[tr.name(at)] = rules
				} else {
					delete(kernel, tr.name(at))
				}
			}
			clear(tr.dirty)
			if d := cmp.Diff(everyChain(tr), kernel, cmp.Comparer(func(a, b Rule) bool { return a == b })); d != "" {
				rt.Fatalf("dirty parts do not make the whole (-want +got):\n%s", d)
			}
		}
	})
}

// Every entry is reached by its own packets, in few steps, and each name fits into a chain name.
func TestTreeReaches(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		tr := testTree(v6)
		base := netip.MustParseAddr("10.96.0.0")
		if v6 {
			base = netip.MustParseAddr("fd00:96::")
		}
		var keys []model.Key
		for a, i := base, 0; i < 30000; a, i = a.Next(), i+1 {
			keys = append(keys, model.Key{IP: a, Port: 80, Proto: model.TCP})
		}
		for port := uint16(1); port < 400; port++ {
			keys = append(keys, model.Key{IP: base, Port: 1000 + port, Proto: model.UDP})
		}
		var paths []path
		for _, k := range keys {
			paths = append(paths, keyPath(k))
		}
		tr.putAll(paths)
		chains := everyChain(tr)
		for name := range maps.Keys(chains) {
			if len(name) > 28 {
				t.Fatalf("chain name too long: %s", name)
			}
		}
		worst := 0
		for _, k := range keys {
			steps, ok := walkChains(chains, chainServices, k, 0)
			if !ok {
				t.Fatalf("%s is not reached", k)
			}
			worst = max(worst, steps)
		}
		if worst > 110 {
			t.Errorf("v6=%v: a packet passes %d rules in the worst case", v6, worst)
		}
		t.Logf("v6=%v: %d chains, worst case %d rules", v6, len(chains), worst)
	}
}

func walkChains(chains map[string][]Rule, chain string, k model.Key, steps int) (int, bool) {
	for _, r := range chains[chain] {
		steps++
		if r.Dst.IsValid() && !r.Dst.Contains(k.IP) || r.Proto != 0 && r.Proto != k.Proto ||
			(r.Port|r.PortEnd) != 0 && (k.Port < r.Port || k.Port > max(r.Port, r.PortEnd)) {
			continue
		}
		if r.Target.Action == Jump {
			n, ok := walkChains(chains, r.Target.Chain, k, steps)
			if ok {
				return n, true
			}
			steps = n
		} else if r.Comment == string(keyPath(k)) {
			return steps, true
		}
	}
	return steps, false
}
