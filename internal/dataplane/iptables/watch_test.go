package iptables

import (
	"context"
	"strings"
	"testing"
	"time"

	"fairlead/internal/kernel"
)

// What others do to our chains is told once, with who did it; what we do ourselves is not, nor what does not concern us.
func TestWatch(t *testing.T) {
	backends(t, func(t *testing.T, ns *kernel.NS, be backend, flavour string, v6 bool) {
		iptables := tool(flavour, v6, "")
		a, b := natID(v6, "KUBE-SVC-A"), natID(v6, "KUBE-SVC-B")
		setup := []change{{Chain: b, Rules: []Rule{{Target: Target{Action: Return}}}}, {Chain: a, Rules: []Rule{jumpTo(b.Name)}},
			{Chain: natID(v6, "OUTPUT"), Rules: []Rule{jumpTo(a.Name)}}}
		mustWrite(t, be, setup...)

		ctx, cancel := context.WithCancel(t.Context())
		heard, ended := make(chan string, 100), make(chan error, 1)
		go func() {
			ended <- ns.Do(func() error { return be.Watch(ctx, func(what string) { heard <- what }) })
		}()
		wait := 300 * time.Millisecond
		if flavour == "legacy" {
			wait = 1500 * time.Millisecond
		}
		next := func(limit time.Duration) string {
			select {
			case what := <-heard:
				return what
			case <-time.After(limit):
				return ""
			}
		}
		time.Sleep(100 * time.Millisecond) // until it listens
		mustWrite(t, be, setup...)
		mustWrite(t, be, change{Chain: natID(v6, "KUBE-SVC-C"), Rules: []Rule{jumpTo(b.Name)}})
		run(t, "", iptables, "-t", "nat", "-N", "CALI-OTHER")
		run(t, "", iptables, "-t", "nat", "-I", "OUTPUT", "-j", "CALI-OTHER")
		run(t, "", iptables, "-t", "nat", "-A", "CALI-OTHER", "-j", "ACCEPT")
		run(t, "", iptables, "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
		if what := next(wait); what != "" {
			t.Errorf("told of what is no drift: %s", what)
		}
		for _, c := range []struct {
			args []string
			want string // of nf_tables
		}{
			{[]string{"-F", "KUBE-SVC-A"}, "a rule was deleted from chain KUBE-SVC-A of "},
			{[]string{"-X", "KUBE-SVC-C"}, "chain KUBE-SVC-C of "},
			{[]string{"-R", "KUBE-SVC-B", "1", "-j", "ACCEPT"}, "of "}, // a rule by one of the same size
			{[]string{"-D", "OUTPUT", "2"}, "a jump to KUBE-SVC-A was deleted from chain OUTPUT of "},
			{[]string{"-A", "KUBE-SVC-B", "-j", "ACCEPT"}, "a rule was added to chain KUBE-SVC-B of "},
			{[]string{"-F"}, " was deleted from chain "},
		} {
			if c.args[0] == "-X" {
				mustWrite(t, be, change{Chain: natID(v6, "KUBE-SVC-C")})
			}
			run(t, "", iptables, append([]string{"-t", "nat"}, c.args...)...)
			what := next(10 * time.Second)
			t.Log(what)
			who := strings.Contains(what, "by ") && strings.Contains(what, "(process ")
			if !strings.Contains(what, c.want) || who != (flavour == "nft") { // the old tables do not tell who
				t.Errorf("%v: told %q, want %q", c.args, what, c.want)
			}
		}
		if what := next(wait); what != "" {
			t.Errorf("told twice: %s", what)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("end of Watch: %v", err)
		}
	})
}
