package kernel

import (
	"math/rand/v2"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// xtables opens the old tables of one family in a namespace of its own, and gives a way to change them.
func xtables(t *testing.T, v6 bool, play func(x *XTables, iptables func(args ...string))) {
	t.Helper()
	name := "iptables-legacy"
	if v6 {
		name = "ip6tables-legacy"
	}
	err := newNS(t).Do(func() error {
		x, err := LoadXTables(v6)
		if err != nil {
			return err
		}
		defer x.Close()
		play(x, func(args ...string) {
			t.Helper()
			if err := (Command{Name: name, Args: append([]string{"-w", "5", "-t", "nat"}, args...)}).Run(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestXTRules: a rule has its chain, the chain it leads to, and a sum that neither counters nor other rules change, but its
// content does.
func TestXTRules(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		xtables(t, v6, func(x *XTables, iptables func(...string)) {
			read := func() (sum uint64, rules map[string][]uint64) {
				rules = map[string][]uint64{}
				sum, err := x.Rules("nat", func(r XTRule) {
					key := string(r.Chain) + ">" + string(r.Jump)
					rules[key] = append(rules[key], r.Sum)
				})
				if err != nil {
					t.Fatal(err)
				}
				return sum, rules
			}
			if sum, rules := read(); sum != 0 || len(rules) > 0 {
				t.Errorf("a table that is not loaded has the sum %d, rules %v", sum, rules)
			}
			iptables("-N", "EMPTY")
			iptables("-N", "FULL")
			iptables("-A", "FULL", "-p", "tcp", "--dport", "80", "-j", "EMPTY")
			iptables("-A", "OUTPUT", "-c", "7", "700", "-j", "FULL")
			sum, rules := read()
			if n := len(rules["EMPTY>"]); n != 1 {
				t.Errorf("an empty chain comes up %d times", n)
			}
			if len(rules["FULL>EMPTY"]) != 1 || len(rules["OUTPUT>FULL"]) != 1 || len(rules["POSTROUTING>"]) != 1 {
				t.Errorf("rules %v", rules)
			}
			iptables("-Z")
			if now, _ := read(); now != sum {
				t.Error("counters change the sum")
			}
			iptables("-I", "PREROUTING", "-j", "ACCEPT")
			iptables("-N", "ANOTHER")
			now, moved := read()
			if now == sum {
				t.Error("a new rule does not change the sum")
			}
			for _, key := range []string{"FULL>EMPTY", "OUTPUT>FULL", "FULL>"} {
				if !slices.Equal(rules[key], moved[key]) {
					t.Errorf("%s: rules of others change the sum of a rule", key)
				}
			}
			iptables("-R", "FULL", "1", "-p", "tcp", "--dport", "81", "-j", "EMPTY")
			if _, other := read(); slices.Equal(rules["FULL>EMPTY"], other["FULL>EMPTY"]) {
				t.Error("a rule that was replaced by one of its size has the same sum")
			}
		})
	}
}

// TestXTGarbage: whatever a table is made of, reading it ends, with an error at worst.
func TestXTGarbage(t *testing.T) {
	xtables(t, false, func(x *XTables, iptables func(...string)) {
		iptables("-N", "A")
		iptables("-A", "A", "-j", "RETURN")
		iptables("-A", "OUTPUT", "-j", "A")
		blob, hooks, err := x.entries("nat")
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(blob)
		for range 5000 {
			b := slices.Clone(blob[entriesHeader:])
			for range 1 + rand.IntN(8) {
				b[rand.IntN(len(b))] = byte(rand.Uint32())
			}
			b = b[:rand.IntN(len(b)+1)]
			_, _ = x.layout().sum(b)
			_ = x.layout().walk(b, hooks, func(XTRule) {})
		}
	})
}
