// Package demo shows the real engine at work on one screen: a node, three pods and a client outside, all in network
// namespaces of their own (package lab), and the manifests of the folder examples. Whatever it shows, it checks.
package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"fairlead/examples"
	"fairlead/internal/lab"
	"fairlead/internal/model"
)

// Options say what to show, and where.
type Options struct {
	Binary string // fairlead; empty is this very program
	Mode   string // --proxy-mode; empty is iptables
	Out    io.Writer
}

// The addresses of the examples.
var (
	webLB   = [2]netip.AddrPort{netip.MustParseAddrPort("203.0.113.10:80"), netip.MustParseAddrPort("[2001:db8:113::10]:80")}
	webVIP  = netip.MustParseAddrPort("10.96.0.10:80")
	cartVIP = netip.MustParseAddrPort("10.96.0.20:80")
	dnsVIP  = netip.MustParseAddrPort("10.96.0.53:53")
	soonVIP = netip.MustParseAddrPort("10.96.0.99:80")
)

var pods = []string{"web-1", "web-2", "web-3"}

// victim is the pod that dies in the middle of the demo.
const victim = "web-2"

// show is a running demo.
type show struct {
	Options
	world *lab.World
	agent *lab.Agent
	dir   string
	wrong []error
	step  int
}

// Run shows everything and returns an error if anything shown was wrong. It leaves nothing behind.
func Run(ctx context.Context, o Options) error {
	if o.Binary == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
		o.Binary = self
	}
	if o.Mode == "" {
		o.Mode = "iptables"
	}
	if os.Getuid() != 0 {
		return errors.New("the demo makes network namespaces and needs root (nothing outside of them is touched)")
	}
	s := &show{Options: o}
	if err := s.set(ctx); err != nil {
		return errors.Join(err, s.close())
	}
	err := s.play(ctx)
	return errors.Join(append(s.wrong, err, s.close())...)
}

// set builds the world and starts the agent.
func (s *show) set(ctx context.Context) (err error) {
	if s.dir, err = os.MkdirTemp("", "fairlead-demo-"); err != nil {
		return err
	}
	if err := copyExamples(s.dir); err != nil {
		return err
	}
	if s.world, err = lab.New(lab.Config{Nodes: []string{"n1"}, Pods: map[string][]string{"n1": pods}}); err != nil {
		return err
	}
	for _, pod := range pods {
		for network, port := range map[string]uint16{"tcp": 8080, "udp": 53} {
			if _, err := s.world.Must(pod).Serve(network, netip.AddrPortFrom(netip.IPv6Unspecified(), port)); err != nil {
				return err
			}
		}
	}
	s.agent, err = s.world.NewAgent("n1", lab.AgentConfig{Binary: s.Binary, Mode: s.Mode, Manifests: s.dir})
	return err
}

func copyExamples(dir string) error {
	names, err := fs.Glob(examples.Files, "*.yaml")
	if err != nil {
		return err
	}
	for _, name := range names {
		data, err := examples.Files.ReadFile(name)
		if err == nil {
			err = lab.WriteManifest(dir, name, data)
		}
		if err != nil {
			return fmt.Errorf("example %s: %w", name, err)
		}
	}
	return nil
}

func (s *show) close() error {
	var errs []error
	if s.world != nil {
		errs = append(errs, s.world.Close())
	}
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

func (s *show) play(ctx context.Context) error {
	begin := time.Now()
	if err := s.agent.Start(ctx); err != nil {
		return err
	}
	if err := s.world.Settle(ctx, s.dir, s.agent); err != nil {
		return err
	}
	s.print("fairlead, mode %s: node n1 with pods %s, and a client outside, each in a network namespace of its own.", s.Mode, strings.Join(pods, " "))
	s.print("Started, and all rules in force, in %d ms.", time.Since(begin).Milliseconds())
	for _, step := range []func(context.Context) error{s.tables, s.spreading, s.death, s.stickiness, s.rules, s.explanation} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if _, err := s.agent.Stop(5 * time.Second); err != nil {
		s.fail("the agent: %v", err)
	}
	if len(s.wrong) == 0 {
		s.print("\nAll of it was checked, and right.")
	}
	return nil
}

func (s *show) print(format string, args ...any) { fmt.Fprintf(s.Out, format+"\n", args...) }

func (s *show) title(format string, args ...any) {
	s.step++
	s.print("\n%d  "+format, append([]any{s.step}, args...)...)
}

// fail remembers that something shown was wrong, and says so at its place.
func (s *show) fail(format string, args ...any) {
	err := fmt.Errorf(format, args...)
	s.wrong = append(s.wrong, err)
	s.print("   WRONG: %v", err)
}

func (s *show) call(from string, proto model.Proto, dst netip.AddrPort) lab.Answer {
	return lab.Call{From: s.world.Must(from), Proto: proto, Dst: dst}.Do()
}

// tables shows what the agent serves. IPv6 has the same rows with other addresses: one family fills the screen.
func (s *show) tables(ctx context.Context) error {
	var out string
	for _, table := range []string{"frontends", "pools"} {
		rows, err := s.agent.Ask(ctx, "get", table)
		if err != nil {
			return fmt.Errorf("get %s: %w\n%s", table, err, rows)
		}
		out += rows + "\n"
	}
	s.title("What it serves (fairlead get frontends, get pools; the rows of IPv6 are not shown)")
	s.print("%s", indent(familyRows(out)))
	want := []string{"10.96.0.10:80/tcp", "203.0.113.10:80/tcp", "0.0.0.0:30080/tcp", "10.96.0.20:80/tcp", "10.96.0.53:53/udp", "10.96.0.99:80/tcp",
		"[fd00:96::10]:80/tcp", "[2001:db8:113::10]:80/tcp", "10.244.1.10:8080", "10.244.1.11:8080", "10.244.1.12:8080"}
	for _, w := range want {
		if !strings.Contains(out, w) {
			s.fail("get does not show %s", w)
		}
	}
	return nil
}

// familyRows keeps headers and the rows of IPv4, without the lab's own barrier.
func familyRows(table string) string {
	var keep []string
	for _, l := range strings.Split(table, "\n") {
		v6 := strings.HasPrefix(l, "[") || strings.Contains(l, " v6 ")
		if !v6 && !strings.Contains(l, "fairlead-lab/") && !strings.HasPrefix(l, "addresses") {
			keep = append(keep, l)
		}
	}
	return strings.Trim(strings.Join(keep, "\n"), "\n")
}

// spreading sends requests from outside and from a pod.
func (s *show) spreading(context.Context) error {
	const n = 300
	s.title("%d requests from outside to %s, and as many over IPv6", n, webLB[0])
	got := map[string]int{}
	for _, dst := range webLB {
		for range n {
			a := s.call("ext", model.TCP, dst)
			if a.Outcome != lab.Answered {
				s.fail("a request ended with %s", a)
				return nil
			}
			got[a.By]++
		}
	}
	for _, pod := range slices.Sorted(maps.Keys(got)) {
		share := 100 * float64(got[pod]) / (2 * n)
		s.print("   %s  %s %.0f %%", pod, strings.Repeat("█", int(share)), share)
		if share < 20 || share > 47 { // seven standard deviations around a third
			s.fail("%s has %.0f %% of the requests", pod, share)
		}
	}
	if len(got) != len(pods) {
		s.fail("only %d of %d pods were met", len(got), len(pods))
	}
	if a := s.call("web-1", model.UDP, dnsVIP); a.Outcome != lab.Answered || a.Seen != a.Local && a.By != "web-1" {
		s.fail("a name server asked from web-1: %s", a)
	} else {
		s.print("   a pod asks the name server %s over UDP: %s", dnsVIP, a)
	}
	if a := s.call("web-1", model.TCP, soonVIP); a.Outcome != lab.Reset {
		s.fail("a Service without endpoints: %s; want a reset", a)
	} else {
		s.print("   a pod asks %s, which has no endpoints: refused after %.1f ms", soonVIP, float64(a.Took.Microseconds())/1000)
	}
	return nil
}

// death ends a pod under traffic, as the kubelet and the pod do it, and measures until no connection meets it any more.
func (s *show) death(ctx context.Context) error {
	s.title("Pod %s dies under traffic", victim)
	flow, err := s.openFlow(victim)
	if err != nil {
		return err
	}
	defer flow.Close()
	if err := s.unready(victim); err != nil {
		return err
	}
	if !s.moved(time.Now()) {
		return nil
	}
	if a := flow.Ask(); a.Outcome != lab.Answered || a.By != victim {
		s.fail("the connection that was open to it was cut: %s", a)
	} else {
		s.print("   a connection that was open to it still lives, until the pod itself is gone")
	}
	s.world.Must(victim).StopServing()
	return s.world.Settle(ctx, s.dir, s.agent)
}

// unready says in a pod's manifest that it is not ready any more.
func (s *show) unready(pod string) error {
	name := "pod-" + pod + ".yaml"
	data, err := examples.Files.ReadFile(name)
	if err != nil {
		return err
	}
	ready, not := []byte(`status: "True"`), []byte(`status: "False"`)
	if !bytes.Contains(data, ready) {
		return fmt.Errorf("example %s does not say that the pod is ready", name)
	}
	return lab.WriteManifest(s.dir, name, bytes.Replace(data, ready, not, 1))
}

// moved sends until a hundred connections in a row met other pods.
func (s *show) moved(since time.Time) bool {
	const calm = 100
	last, late, good := since, 0, 0
	for good < calm {
		if time.Since(since) > 10*time.Second {
			s.fail("ten seconds later connections still meet it")
			return false
		}
		a := s.call("ext", model.TCP, webLB[0])
		switch {
		case a.Outcome != lab.Answered:
			s.fail("a connection ended with %s", a)
			return false
		case a.By == victim:
			late, good, last = late+1, 0, a.At
		default:
			good++
		}
	}
	s.print("   it is not ready any more; %d ms later its traffic had moved: %d connections met it in between, and of the",
		last.Sub(since).Milliseconds(), late)
	s.print("   next %d none; no connection failed", calm)
	return true
}

// openFlow opens connections until one is with the pod.
func (s *show) openFlow(pod string) (*lab.Flow, error) {
	for range 200 {
		f, err := lab.Call{From: s.world.Must("ext"), Proto: model.TCP, Dst: webLB[0]}.Open()
		if err != nil {
			return nil, err
		}
		if f.First().By == pod {
			return f, nil
		}
		f.Close()
	}
	return nil, fmt.Errorf("200 connections did not meet %s", pod)
}

// stickiness shows that a client stays where it was.
func (s *show) stickiness(context.Context) error {
	const n = 20
	s.title("A sticky client: %d connections each to %s, which has session affinity, and to %s, which has none", n, cartVIP, webVIP)
	for _, to := range []netip.AddrPort{cartVIP, webVIP} {
		var by []string
		for range n {
			a := s.call("ext", model.TCP, to)
			if a.Outcome != lab.Answered {
				s.fail("a connection ended with %s", a)
				return nil
			}
			by = append(by, strings.TrimPrefix(a.By, "web-"))
		}
		met := slices.Compact(slices.Sorted(slices.Values(by)))
		s.print("   web- %s", strings.Join(by, " "))
		if sticky := to == cartVIP; sticky != (len(met) == 1) {
			s.fail("%s met pods %v", to, met)
		}
	}
	return nil
}
