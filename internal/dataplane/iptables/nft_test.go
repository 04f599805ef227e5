package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"fairlead/internal/kernel"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func openTestNFT(t testing.TB) *nft {
	n, err := newNFT()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func saved(t testing.TB, flavour string, v6 bool, chain string) []string {
	return linesOf(run(t, "", tool(flavour, v6, "save"), "-t", "filter")+run(t, "", tool(flavour, v6, "save"), "-t", "nat"), "-A "+chain+" ")
}

func textOf(v6 bool, chain string) (lines []string) {
	for _, t := range []Table{Filter, Nat} {
		for _, r := range samples(v6)[t] {
			lines = append(lines, string(r.appendText(nil, chain, v6)))
		}
	}
	return lines
}

// iptables-nft prints what we wrote over netlink exactly as our own text says it.
func TestNFTSaysWhatWeWrite(t *testing.T) {
	for _, v6 := range families() {
		for _, counter := range []bool{true, false} {
			inNS(t, func(*kernel.NS) {
				n := openTestNFT(t)
				n.counter = counter
				if err := n.Write(t.Context(), sampleChanges(v6)); err != nil {
					t.Fatal(err)
				}
				got := saved(t, "nft", v6, "KUBE-SAMPLES")
				got = slices.DeleteFunc(got, func(l string) bool { return l == "-A KUBE-SAMPLES" }) // prefix match needs a blank
				want := slices.DeleteFunc(textOf(v6, "KUBE-SAMPLES"), func(l string) bool { return l == "-A KUBE-SAMPLES" })
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("%s, counter %v: iptables-nft-save (-ours +theirs):\n%s", familyName(v6), counter, d)
				}
			})
		}
	}
}

// What we write we read back, exactly.
func TestNFTReadsWhatWeWrite(t *testing.T) {
	for _, v6 := range families() {
		inNS(t, func(*kernel.NS) {
			n := openTestNFT(t)
			if err := n.Write(t.Context(), sampleChanges(v6)); err != nil {
				t.Fatal(err)
			}
			checkRead(t, n, v6)
		})
	}
}

// What iptables-nft writes of our text we read as the rules we meant.
func TestNFTReadsIptablesNFT(t *testing.T) {
	for _, v6 := range families() {
		inNS(t, func(*kernel.NS) {
			run(t, restoreText(v6), tool("nft", v6, "restore"), "--noflush")
			checkRead(t, openTestNFT(t), v6)
		})
	}
}

// restoreText is the samples as input for iptables-restore.
func restoreText(v6 bool) string {
	var b []byte
	for _, t := range []Table{Filter, Nat} {
		b = append(b, "*"+t.String()+"\n:KUBE-SVC-TARGET - [0:0]\n:KUBE-SAMPLES - [0:0]\n"...)
		for _, r := range samples(v6)[t] {
			b = append(r.appendText(b, "KUBE-SAMPLES", v6), '\n')
		}
		b = append(b, "COMMIT\n"...)
	}
	return string(b)
}

func checkRead(t *testing.T, be backend, v6 bool) {
	t.Helper()
	got, err := readAll(t.Context(), be, v6)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range []Table{Filter, Nat} {
		f := got[ChainID{v6, table, "KUBE-SAMPLES"}]
		want := samples(v6)[table]
		if !f.Exact {
			t.Errorf("%s %s: not exact", familyName(v6), table)
		}
		for i := range max(len(want), len(f.Rules)) {
			if i >= len(want) || i >= len(f.Rules) || want[i] != f.Rules[i] {
				t.Errorf("%s %s rule %d:\nwant %+v\n got %+v", familyName(v6), table, i, at(want, i), at(f.Rules, i))
			}
		}
		if f, ok := got[ChainID{v6, table, "KUBE-SVC-TARGET"}]; !ok || len(f.Rules) != 0 || !f.Exact {
			t.Errorf("%s %s: empty chain read as %v, %v", familyName(v6), table, f, ok)
		}
	}
}

func at(rules []Rule, i int) Rule {
	if i < len(rules) {
		return rules[i]
	}
	return Rule{Comment: "(none)"}
}

func natID(v6 bool, name string) ChainID { return ChainID{v6, Nat, name} }

func mustWrite(t *testing.T, be backend, changes ...change) {
	t.Helper()
	if err := be.Write(t.Context(), changes); err != nil {
		t.Fatal(err)
	}
}

func jumpTo(name string) Rule {
	return Rule{Comment: "to " + name, Target: Target{Action: Jump, Chain: name}}
}

// backends runs f for both back ends and both families, each time in a fresh namespace.
func backends(t *testing.T, f func(t *testing.T, ns *kernel.NS, be backend, flavour string, v6 bool)) {
	for _, flavour := range []string{"nft", "legacy"} {
		for _, v6 := range families() {
			t.Run(flavour+" "+familyName(v6), func(t *testing.T) {
				inNS(t, func(ns *kernel.NS) {
					if flavour == "nft" {
						f(t, ns, openTestNFT(t), flavour, v6)
					} else {
						f(t, ns, openTestLegacy(t), flavour, v6)
					}
				})
			})
		}
	}
}

// A chain is rewritten, and goes, also when it is not there; chains that refer to each other go together.
func TestWriteChains(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, be backend, flavour string, v6 bool) {
		a, b := natID(v6, "KUBE-SVC-A"), natID(v6, "KUBE-SVC-B")
		rules := func(id ChainID) []string { return savedTable(t, flavour, v6, "nat", "-A "+id.Name+" ") }
		mustWrite(t, be, change{Chain: b, Rules: []Rule{{Comment: "one", Target: Target{Action: Return}}}}, change{Chain: a, Rules: []Rule{jumpTo(b.Name), jumpTo(b.Name)}})
		if n := len(rules(a)); n != 2 {
			t.Fatalf("%d rules in A, want 2", n)
		}
		for range 2 {
			mustWrite(t, be, change{Chain: a, Rules: []Rule{jumpTo(b.Name)}})
			if n := len(rules(a)); n != 1 {
				t.Fatalf("rewritten: %d rules in A, want 1", n)
			}
		}
		mustWrite(t, be, change{Chain: b, Rules: nil})
		if n := len(rules(b)); n != 0 {
			t.Fatalf("emptied: %d rules in B", n)
		}
		for range 2 {
			mustWrite(t, be, change{Chain: b, Gone: true}, change{Chain: a, Gone: true}, change{Chain: natID(v6, "KUBE-SVC-NEVER"), Gone: true})
			if lines := savedTable(t, flavour, v6, "nat", ":KUBE-"); len(lines) != 0 {
				t.Fatalf("left: %q", lines)
			}
		}
	})
}

// Removing from a node that has no iptables tables makes none.
func TestRemoveFromNothing(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, be backend, flavour string, v6 bool) {
		mustWrite(t, be, change{Chain: natID(v6, "PREROUTING"), Gone: true}, change{Chain: natID(v6, "KUBE-SVC-A"), Gone: true})
		if got := run(t, "", "nft", "list", "ruleset") + run(t, "", tool("legacy", v6, "save")); strings.TrimSpace(got) != "" {
			t.Errorf("made:\n%s", got)
		}
	})
}

func savedTable(t *testing.T, flavour string, v6 bool, table, prefix string) []string {
	t.Helper()
	return linesOf(run(t, "", tool(flavour, v6, "save"), "-t", table), prefix)
}

// In a built-in chain only the jumps asked for are put in, once, at the top, and taken out. Rules and the policy of others
// stay.
func TestWriteJumps(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, be backend, flavour string, v6 bool) {
		iptables := tool(flavour, v6, "")
		run(t, "", iptables, "-A", "INPUT", "-p", "tcp", "--dport", "22", "-j", "ACCEPT")
		run(t, "", iptables, "-A", "INPUT", "-m", "limit", "--limit", "1/sec", "-j", "LOG")
		run(t, "", iptables, "-P", "INPUT", "DROP")
		foreign := savedTable(t, flavour, v6, "filter", "-A INPUT")

		id := func(name string) ChainID { return ChainID{v6, Filter, name} }
		x, y, z := jumpTo("KUBE-X"), jumpTo("KUBE-Y"), jumpTo("KUBE-Z")
		text := func(rules ...Rule) (lines []string) {
			for _, r := range rules {
				lines = append(lines, string(r.appendText(nil, "INPUT", v6)))
			}
			return append(lines, foreign...)
		}
		check := func(what string, want []string) {
			t.Helper()
			if d := cmp.Diff(want, savedTable(t, flavour, v6, "filter", "-A INPUT")); d != "" {
				t.Errorf("%s (-want +got):\n%s", what, d)
			}
		}
		for range 2 {
			mustWrite(t, be, change{Chain: id("KUBE-X")}, change{Chain: id("KUBE-Y")}, change{Chain: id("INPUT"), Rules: []Rule{x, y}})
			check("two jumps", text(x, y))
		}
		mustWrite(t, be, change{Chain: id("KUBE-Z")}, change{Chain: id("INPUT"), Rules: []Rule{x, z, y}})
		check("a third, at the top", text(z, x, y))
		mustWrite(t, be, change{Chain: id("INPUT"), Rules: []Rule{x}, Gone: true})
		check("one taken out", text(z, y))
		run(t, "", iptables, "-A", "INPUT", "-m", "limit", "--limit", "2/sec", "-j", "KUBE-Y") // nothing that a Rule can say
		mustWrite(t, be, change{Chain: id("INPUT"), Rules: []Rule{z, y}, Gone: true}, change{Chain: id("KUBE-Y"), Gone: true},
			change{Chain: id("KUBE-X"), Gone: true}, change{Chain: id("KUBE-Z"), Gone: true})
		check("all taken out, also a jump of others to a chain that goes", text())
		if p := savedTable(t, flavour, v6, "filter", ":INPUT"); len(p) != 1 || !strings.HasPrefix(p[0], ":INPUT DROP") {
			t.Errorf("policy of others: %q", p)
		}
	})
}

// A refused change changes nothing, and the error says where and why.
func TestWriteRefused(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, be backend, flavour string, v6 bool) {
		a := natID(v6, "KUBE-SVC-A")
		mustWrite(t, be, change{Chain: a, Rules: []Rule{{Comment: "before", Target: Target{Action: Return}}}},
			change{Chain: natID(v6, "OUTPUT"), Rules: []Rule{jumpTo(a.Name)}})
		before := savedTable(t, flavour, v6, "nat", "-A")
		for _, c := range []struct {
			what  string
			rules []Rule
			words []string
		}{
			{"no such chain", []Rule{{}, jumpTo("KUBE-SVC-MISSING")}, []string{"KUBE-SVC-A", "-j KUBE-SVC-MISSING"}},
			{"no such counter", []Rule{{NFAcct: "nobody_made_it", Target: Target{Action: Return}}}, []string{"KUBE-SVC-A", "nobody_made_it"}},
			{"unsafe comment", []Rule{{}, {Comment: "a\nCOMMIT"}}, []string{"KUBE-SVC-A", "rule 2", "comment"}},
			{"unsafe interface", []Rule{{In: "eth0 -j ACCEPT"}}, []string{"KUBE-SVC-A", "rule 1", "interface"}},
			{"port without protocol", []Rule{{Port: 80}}, []string{"protocol"}},
			{"loop", []Rule{jumpTo("KUBE-SVC-A")}, []string{"KUBE-SVC-A", "loop"}},
		} {
			err := be.Write(t.Context(), []change{{Chain: natID(v6, "KUBE-SVC-NEW")}, {Chain: a, Rules: c.rules}})
			if err == nil {
				t.Errorf("%s: no error", c.what)
				continue
			}
			for _, w := range c.words {
				if strings.Contains(err.Error(), "the kernel refused table nat") { // all that xtables tell
					break
				}
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%s: %q does not say %q", c.what, err, w)
				}
			}
			if d := cmp.Diff(before, savedTable(t, flavour, v6, "nat", "-A")); d != "" {
				t.Errorf("%s: changed something:\n%s", c.what, d)
			}
		}
		mustWrite(t, be, change{Chain: natID(v6, "KUBE-SVC-USER"), Rules: []Rule{jumpTo(a.Name)}})
		if err := be.Write(t.Context(), []change{{Chain: a, Gone: true}}); err == nil || !strings.Contains(err.Error(), a.Name) {
			t.Errorf("deleting a chain in use: %v", err)
		}
	})
}

// A load that is cut into pieces ends as one that is not.
func TestNFTPieces(t *testing.T) {
	inNS(t, func(*kernel.NS) {
		n := openTestNFT(t)
		n.limit = 4 << 10
		var changes, gone []change
		last := ""
		for i := range 300 {
			id := natID(false, fmt.Sprintf("KUBE-SEP-%d", i))
			c := change{Chain: id, Rules: []Rule{{Comment: fmt.Sprint(i), Target: Target{Action: Return}}}}
			if last != "" {
				c.Rules = append(c.Rules, Rule{Chance: 7, Target: Target{Action: Jump, Chain: "KUBE-SEP-0"}})
			}
			last = id.Name
			changes = append(changes, c)
			gone = append(gone, change{Chain: id, Gone: true})
		}
		jump := change{Chain: natID(false, "PREROUTING"), Rules: []Rule{jumpTo(last)}}
		mustWrite(t, n, append(slices.Clone(changes), jump)...)
		got, err := readAll(t.Context(), n, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range append(changes, jump) {
			if f := got[c.Chain]; !f.Exact || !slices.Equal(f.Rules, c.Rules) {
				t.Fatalf("%s: %v", where(c.Chain), f)
			}
		}
		jump.Gone = true
		mustWrite(t, n, append([]change{jump}, gone...)...)
		if got, err := readAll(t.Context(), n, false); err != nil || len(got) != 1 || len(got[jump.Chain].Rules) != 0 {
			t.Errorf("left: %v, %v", got, err)
		}
	})
}

// iptables-nft, and a kube-proxy that uses it, still work on tables that we wrote.
func TestNFTUnderstood(t *testing.T) {
	for _, v6 := range families() {
		inNS(t, func(*kernel.NS) {
			n := openTestNFT(t)
			portals := Rule{State: StateNew, Comment: "kubernetes service portals", Target: Target{Action: Jump, Chain: "KUBE-SERVICES"}}
			mustWrite(t, n, append(sampleChanges(v6), change{Chain: ChainID{v6, Filter, "KUBE-SERVICES"}},
				change{Chain: ChainID{v6, Filter, "FORWARD"}, Rules: []Rule{portals}},
				change{Chain: natID(v6, "KUBE-SERVICES")},
				change{Chain: natID(v6, "OUTPUT"), Rules: []Rule{{Comment: "kubernetes service portals", Target: portals.Target}}})...)
			iptables := tool("nft", v6, "")
			for _, table := range []string{"filter", "nat"} {
				for _, args := range [][]string{{"-L", "-n", "-v"}, {"-S"}, {"-S", "KUBE-SAMPLES"}} {
					if out := run(t, "", iptables, append([]string{"-w", "5", "-t", table}, args...)...); strings.Contains(out, "incompatible") {
						t.Errorf("%v: %s", args, out)
					}
				}
			}
			// kube-proxy looks for its jumps like this, and adds them when they are not found.
			run(t, "", iptables, "-w", "5", "-C", "FORWARD", "-t", "filter", "-m", "conntrack", "--ctstate", "NEW", "-m", "comment", "--comment", "kubernetes service portals", "-j", "KUBE-SERVICES")
			run(t, "", iptables, "-w", "5", "-C", "OUTPUT", "-t", "nat", "-m", "comment", "--comment", "kubernetes service portals", "-j", "KUBE-SERVICES")
			restore := "*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-SAMPLES - [0:0]\n:KUBE-OTHER - [0:0]\n-A KUBE-SERVICES -m comment --comment \"x y\" -j KUBE-OTHER\n-X KUBE-SVC-TARGET\nCOMMIT\n"
			run(t, restore, tool("nft", v6, "restore"), "-w", "5", "--noflush", "--counters")
			run(t, "", iptables, "-t", "filter", "-F", "KUBE-SAMPLES")
			run(t, "", iptables, "-t", "filter", "-X", "KUBE-SAMPLES")
			run(t, "", iptables, "-D", "FORWARD", "-m", "conntrack", "--ctstate", "NEW", "-m", "comment", "--comment", "kubernetes service portals", "-j", "KUBE-SERVICES")
			got, err := readAll(t.Context(), n, v6)
			if err != nil {
				t.Fatal(err)
			}
			f := got[natID(v6, "KUBE-SERVICES")]
			want := []Rule{{Comment: "x y", Target: Target{Action: Jump, Chain: "KUBE-OTHER"}}}
			if !f.Exact || !slices.Equal(f.Rules, want) {
				t.Errorf("what iptables-nft-restore wrote: %+v", f)
			}
		})
	}
}

// While others write all the time our transactions succeed, and jumps are not put in twice.
func TestNFTBusy(t *testing.T) {
	inNS(t, func(ns *kernel.NS) {
		n, other := openTestNFT(t), openTestNFT(t)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				c := change{Chain: natID(true, "CALI-OTHER"), Rules: make([]Rule, i%3)}
				if err := other.Write(t.Context(), []change{c}); err != nil {
					t.Errorf("the other: %v", err)
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
		id := natID(false, "PREROUTING")
		for i := range 100 {
			name := fmt.Sprintf("KUBE-SVC-%d", i%5)
			err := n.Write(t.Context(), []change{{Chain: natID(false, name)}, {Chain: id, Rules: []Rule{jumpTo(name)}}})
			if err != nil && !errors.Is(err, unix.ERESTART) {
				t.Error(err)
			}
		}
		stop()
		wg.Wait()
		if got, err := readAll(t.Context(), n, false); err != nil || len(got[id].Rules) > 5 {
			t.Errorf("%v, %v", got[id], err)
		}
	})
}
