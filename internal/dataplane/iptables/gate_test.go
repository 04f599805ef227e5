package iptables

import (
	"os"
	"slices"
	"strings"
	"testing"

	"fairlead/internal/kernel"

	"github.com/google/go-cmp/cmp"
)

const testBit = 14

func openTestGate(t *testing.T) *Gate {
	g := &Gate{}
	t.Cleanup(func() { g.Close() })
	return g
}

// keep lets the gate be kept, and says whether that changed something.
func keep(t *testing.T, g *Gate) bool {
	t.Helper()
	changed, err := g.Keep(t.Context(), testBit)
	if err != nil {
		t.Fatal(err)
	}
	return len(changed) > 0
}

// gateIs compares what iptables prints of the gate, and of FORWARD, with what it should be.
func gateIs(t *testing.T, flavour string, v6 bool, forward ...string) {
	t.Helper()
	out := run(t, "", tool(flavour, v6, "save"), "-t", "filter")
	var want []string
	if slices.Contains(forward, gateLine) {
		for _, r := range gateRules(testBit) {
			want = append(want, string(r.appendText(nil, chainGate, v6)))
		}
	}
	if d := cmp.Diff(want, linesOf(out, "-A "+chainGate)); d != "" {
		t.Errorf("the gate (-want +got):\n%s", d)
	}
	if d := cmp.Diff(forward, linesOf(out, "-A FORWARD")); d != "" {
		t.Errorf("FORWARD (-want +got):\n%s", d)
	}
	if there := strings.Contains(out, ":"+chainGate); there != (want != nil) {
		t.Errorf("the chain is there: %v\n%s", there, out)
	}
}

const gateLine = `-A FORWARD -m comment --comment "fairlead forwarding rules" -j FAIRLEAD-FORWARD`

// The gate is where FORWARD could drop, comes back when somebody takes it away, and goes when nothing drops any more.
func TestGate(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, _ backend, flavour string, v6 bool) {
		iptables, g := tool(flavour, v6, ""), openTestGate(t)
		step := func(want bool, forward ...string) {
			t.Helper()
			if got := keep(t, g); got != want {
				t.Errorf("changed something: %v, want %v", got, want)
			}
			for range 2 { // the first look after a write sees that it holds
				if keep(t, g) {
					t.Error("changed something again")
				}
			}
			gateIs(t, flavour, v6, forward...)
		}
		run(t, "", iptables, "-P", "FORWARD", "ACCEPT") // makes the table
		run(t, "", iptables, "-N", "KUBE-SERVICES")
		run(t, "", iptables, "-A", "FORWARD", "-j", "KUBE-SERVICES")
		step(false, "-A FORWARD -j KUBE-SERVICES")
		run(t, "", iptables, "-P", "FORWARD", "DROP")
		step(true, gateLine, "-A FORWARD -j KUBE-SERVICES")
		run(t, "", iptables, "-F")
		step(true, gateLine)
		run(t, "", iptables, "-A", chainGate, "-j", "DROP")
		step(true, gateLine)
		run(t, "", iptables, "-D", "FORWARD", "1")
		step(true, gateLine)
		run(t, "", iptables, "-P", "FORWARD", "ACCEPT")
		step(true)
		run(t, "", iptables, "-A", "FORWARD", "-j", "DROP")
		step(true, gateLine, "-A FORWARD -j DROP")
		other := openTestGate(t) // of another process
		if keep(t, other) {
			t.Error("what another process left is written again")
		}
		for _, want := range []int{2, 0} {
			if changed, err := other.Remove(t.Context()); err != nil || len(changed) != want {
				t.Errorf("removal: %v, %v; want %d", changed, err, want)
			}
		}
		gateIs(t, flavour, v6, "-A FORWARD -j DROP")
	})
}

// Another bit of the mark is another rule.
func TestGateBit(t *testing.T) {
	inNS(t, func(*kernel.NS) {
		run(t, "", "iptables-nft", "-P", "FORWARD", "DROP")
		g := openTestGate(t)
		keep(t, g)
		if changed, err := g.Keep(t.Context(), 20); err != nil || len(changed) != 1 {
			t.Errorf("%v, %v", changed, err)
		}
		if out := run(t, "", "iptables-nft-save"); !strings.Contains(out, "--mark 0x100000/0x100000") {
			t.Errorf("the mark is not in\n%s", out)
		}
	})
}

// Where nobody uses iptables no table is made and none is loaded; a table of somebody else with that name is not touched.
func TestGateLeavesNothing(t *testing.T) {
	emptyNS(t, func() {
		g := openTestGate(t)
		keep(t, g)
		if out := run(t, "", "nft", "list", "ruleset"); out != "" {
			t.Errorf("nf_tables:\n%s", out)
		}
		for _, v6 := range families() {
			x, err := kernel.LoadXTables(v6)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			if names, err := x.Tables(); err != nil || len(names) != 0 {
				t.Errorf("legacy tables %q, %v", names, err)
			}
		}
		run(t, "table ip filter { chain forward { type filter hook forward priority 0; policy drop; }; chain FORWARD { drop; }; }", "nft", "-f", "-")
		before := run(t, "", "nft", "list", "ruleset")
		keep(t, g)
		if d := cmp.Diff(before, run(t, "", "nft", "list", "ruleset")); d != "" {
			t.Errorf("another table has changed:\n%s", d)
		}
	})
}

// nf_tables needs no program. Legacy tables do, and it is said so; where the gate is not needed there, nothing is.
func TestGateWithoutPrograms(t *testing.T) {
	emptyNS(t, func() {
		run(t, "", "iptables-nft", "-P", "FORWARD", "DROP")
		run(t, "", "iptables-legacy", "-P", "FORWARD", "ACCEPT")
		g := openTestGate(t)
		withoutPrograms(t, func() {
			if !keep(t, g) || keep(t, g) {
				t.Error("the gate was not opened once")
			}
		})
		gateIs(t, "nft", false, gateLine)
		run(t, "", "iptables-legacy", "-P", "FORWARD", "DROP")
		withoutPrograms(t, func() {
			for range 2 {
				if _, err := g.Keep(t.Context(), testBit); err == nil || !strings.Contains(err.Error(), "iptables-legacy-restore is not installed") {
					t.Errorf("without a program: %v", err)
				}
			}
		})
		if !keep(t, g) {
			t.Error("with the program, nothing was done")
		}
		gateIs(t, "legacy", false, gateLine)
	})
}

// withoutPrograms runs f on the same thread, which is in the namespace.
func withoutPrograms(t *testing.T, f func()) {
	t.Helper()
	path := os.Getenv("PATH")
	defer os.Setenv("PATH", path)
	if err := os.Setenv("PATH", t.TempDir()); err != nil {
		t.Fatal(err)
	}
	f()
}

// A rule of somebody else's that leads to the gate's chain keeps it from going, and nothing else.
func TestGateReferred(t *testing.T) {
	backends(t, func(t *testing.T, _ *kernel.NS, _ backend, flavour string, v6 bool) {
		iptables, g := tool(flavour, v6, ""), openTestGate(t)
		run(t, "", iptables, "-P", "FORWARD", "DROP")
		keep(t, g)
		run(t, "", iptables, "-N", "OTHER")
		run(t, "", iptables, "-A", "OTHER", "-j", chainGate)
		if _, err := g.Remove(t.Context()); err == nil || !strings.Contains(err.Error(), "is left, empty") {
			t.Errorf("removal: %v", err)
		}
		if out := run(t, "", iptables, "-S", "FORWARD"); strings.Contains(out, chainGate) {
			t.Errorf("the jump is left:\n%s", out)
		}
	})
}
