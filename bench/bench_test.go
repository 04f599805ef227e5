package main

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestWalked(t *testing.T) {
	const save = `*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.1.0/31 -j KUBE-SVC-10.96.1.0/31
-A KUBE-SERVICES -d 10.96.2.0/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-10.96.1.0/31 -d 10.96.1.0/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-BBBBBBBBBBBBBBBB
-A KUBE-SVC-10.96.1.0/31 -d 10.96.1.1/32 -p tcp -m tcp --dport 80 -g KUBE-SVC-CCCCCCCCCCCCCCCC
COMMIT
`
	got := walked(save)
	for addr, want := range map[string]int{"10.96.1.0": 2, "10.96.1.1": 3, "10.96.2.0": 2} {
		if n := got[netip.MustParseAddr(addr)]; n != want {
			t.Errorf("%s: %d rules, want %d", addr, n, want)
		}
	}
	if len(got) != 3 {
		t.Errorf("got %v", got)
	}
}

func TestEveryAddressHasOneOwner(t *testing.T) {
	for _, i := range []int{0, 1, 4999, maxServices - 1} {
		for set := range 2 {
			for _, e := range []int{0, maxEndpoints - 1} {
				if s, in := owner(endpointAddr(i, set, e)); s != i || in != set {
					t.Errorf("endpoint %d of set %d of Service %d: is of set %d of %d", e, set, i, in, s)
				}
			}
		}
	}
	last, services := serviceAddr(maxServices-1), netip.MustParsePrefix("10.96.0.0/16")
	endpoints := netip.MustParsePrefix("10.128.0.0/12")
	if !services.Contains(last) || !endpoints.Contains(endpointAddr(maxServices-1, 1, maxEndpoints-1)) {
		t.Error("the largest bench has addresses outside its plan")
	}
}

func TestTable(t *testing.T) {
	o := options{sizes: []int{1, 100}, endpoints: 1, rounds: 1, mode: "iptables", backends: "legacy", steps: allSteps.without(stepRestart)}
	var out strings.Builder
	printTables(&out, o, []*Result{
		{Program: "fairlead", Backend: "legacy", Services: 1, Cold: 2, RSS: 50},
		{Program: "kube-proxy", Backend: "legacy", Services: 1, Cold: 60, Unfinished: true},
		{Program: "fairlead", Backend: "legacy", Services: 100, Cold: 3, RSS: 60},
	})
	for _, want := range [][]string{{"cold: all rules, s", "2", "> 60", "30"}, {"cold: all rules, s", "2", "3", "1.5"},
		{"RSS settled, MiB", "50", "–", "–"}, {"RSS settled, MiB", "50", "60", "1.2"}} {
		if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), strings.Join(want, " ")) {
			t.Errorf("no line %q in:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "restart") {
		t.Errorf("a line of a step that was left out:\n%s", out.String())
	}
}

func TestSteps(t *testing.T) {
	var s steps
	if err := s.set("connect,settle"); err != nil || s.String() != "settle,connect" {
		t.Errorf("got %q, %v", s, err)
	}
	if err := s.set("settle,nothing"); err == nil {
		t.Error("an unknown step is taken")
	}
	for step, want := range map[step]bool{stepCold: true, stepSettle: true, stepRestart: false, stepClean: true} {
		if s.has(step) != want {
			t.Errorf("%s: %t", step, !want)
		}
	}
}

func TestLogged(t *testing.T) {
	near := time.Date(2026, 11, 30, 0, 0, 0, 0, time.Local)
	got, err := logged(`I1130 22:30:06.123456   12345 file.go:1] "Caches are synced"`, near)
	if want := time.Date(2026, 11, 30, 22, 30, 6, 123456000, time.Local); err != nil || !got.Equal(want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	if _, err := logged("panic: ", near); err == nil {
		t.Error("a line without a time is taken")
	}
}
