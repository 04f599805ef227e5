// Command bench measures the agent, and kube-proxy beside it, in one run on one machine: a real API server, many Services,
// real packets. README.md says what each line means. All happens in namespaces of its own, which end with it.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// options are the command line.
type options struct {
	sizes               []int // numbers of Services, one after the other
	services            int   // the number that is measured now
	endpoints, rounds   int
	mode, backends      string
	fairlead, kubeProxy string
	steps               steps
	changes, lone       int           // measured endpoint changes, back to back and each after a pause
	changing            time.Duration // no further one back to back after this time
	connects, repeats   int           // of the latency of connect()
	settle, deadline    time.Duration // the pause before memory is read; the longest wait for rules
	json, profile       string
	manifests           bool // no API server: see fromManifests
}

func parse() options {
	o := options{sizes: []int{5000}, steps: allSteps}
	flag.Func("services", "how many Services, up to 30000; several numbers with commas between are measured one after the other (default 5000)", func(text string) error {
		return numbers(text, &o.sizes)
	})
	flag.IntVar(&o.endpoints, "endpoints", 4, "endpoints of each, up to 16")
	flag.IntVar(&o.rounds, "rounds", 1, "how often everything is measured; the table has medians")
	flag.StringVar(&o.mode, "mode", "iptables", "--proxy-mode of both: iptables or nftables")
	flag.StringVar(&o.backends, "backend", "nf_tables", "of iptables: nf_tables, legacy, or both with a comma between")
	flag.StringVar(&o.fairlead, "fairlead", "../bin/fairlead", "our binary; empty to leave it out")
	flag.StringVar(&o.kubeProxy, "kube-proxy", "", `kube-proxy's binary; "build" makes it; empty to leave it out`)
	flag.Func("steps", "what is measured after the cold start: "+allSteps.String()+" (the default), or some of them", func(text string) error {
		return o.steps.set(text)
	})
	flag.IntVar(&o.changes, "changes", 200, "endpoint changes back to back, at most")
	flag.DurationVar(&o.changing, "changing", time.Minute, "no further change back to back after this time")
	flag.IntVar(&o.lone, "lone", 5, "endpoint changes that each come after 3 s of silence")
	flag.IntVar(&o.connects, "connects", 3000, "connections to each place in one repeat")
	flag.IntVar(&o.repeats, "repeats", 7, "repeats of the latency measurement, places taking turns")
	flag.DurationVar(&o.settle, "settle", 20*time.Second, "pause before memory is read")
	flag.DurationVar(&o.deadline, "deadline", 6*time.Minute, "give up on rules that take longer")
	flag.StringVar(&o.json, "json", "", "file for all figures as JSON")
	flag.BoolVar(&o.manifests, "manifests", false, "without an API server: ours alone, from a file; no changes, no restart")
	flag.StringVar(&o.profile, "profile", "", "existing folder for CPU (of the cold start) and heap profiles")
	flag.Parse()
	if o.manifests {
		o.steps = o.steps.without(stepChanges, stepRestart)
	}
	return o
}

// numbers reads whole numbers with commas between.
func numbers(text string, to *[]int) error {
	*to = nil
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil {
			return err
		}
		*to = append(*to, n)
	}
	return nil
}

func (o options) check() error {
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	case o.manifests && o.kubeProxy != "":
		return errors.New("-manifests: kube-proxy needs an API server")
	case slices.Min(o.sizes) < 1 || slices.Max(o.sizes) > maxServices:
		return fmt.Errorf("-services: want 1 to %d", maxServices)
	case o.endpoints < 1 || o.endpoints > maxEndpoints:
		return fmt.Errorf("-endpoints %d: want 1 to %d", o.endpoints, maxEndpoints)
	case o.rounds < 1 || o.changes < 1 || o.lone < 1 || o.connects < 100 || o.repeats < 1:
		return errors.New("-rounds, -changes, -lone and -repeats start at 1, -connects at 100")
	case o.fairlead == "" && o.kubeProxy == "":
		return errors.New("nothing to measure: give -fairlead or -kube-proxy")
	case os.Getuid() != 0:
		return errors.New("needs root: it makes network namespaces and sets their rules")
	}
	if o.mode != "iptables" && o.mode != "nftables" {
		return fmt.Errorf("-mode %q: want iptables or nftables", o.mode)
	}
	for _, b := range o.backendList() {
		if o.mode == "iptables" && b != "nf_tables" && b != "legacy" {
			return fmt.Errorf("-backend %q: want nf_tables or legacy", b)
		}
	}
	return nil
}

// backendList is one empty name for modes without a choice.
func (o options) backendList() []string {
	if o.mode != "iptables" {
		return []string{""}
	}
	return strings.Split(o.backends, ",")
}

// roleKey is set in processes that the bench starts of itself.
const roleKey = "FAIRLEAD_BENCH_ROLE"

func main() {
	runtime.LockOSThread() // the thread that starts the second process must live as long as it: see Pdeathsig
	roles := map[string]func() error{"": outside, "inside": inside, "server": serveForever, "client": connectMany}
	role, known := roles[os.Getenv(roleKey)]
	if !known {
		role = outside
	}
	if err := role(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// outside finds the binaries and starts the bench again as the first process of new namespaces.
func outside() error {
	o := parse()
	if err := o.check(); err != nil {
		return err
	}
	var wanted []string
	if !o.manifests {
		wanted = append(wanted, "testctl")
	}
	if o.kubeProxy == "build" {
		wanted = append(wanted, "kube-proxy")
	}
	paths, err := buildPeers(wanted)
	if err != nil {
		return err
	}
	if o.kubeProxy == "build" {
		o.kubeProxy = paths[1]
	}
	paths = append(paths, "") // without an API server
	args := append(os.Args[1:len(os.Args):len(os.Args)], "-kube-proxy", o.kubeProxy)
	self := exec.Command("/proc/self/exe", args...)
	self.Env = append(os.Environ(), roleKey+"=inside", "TESTCTL="+paths[0])
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, os.Stdout, os.Stderr
	self.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := self.Run(); err != nil {
		return fmt.Errorf("the measuring process: %w", err)
	}
	return nil
}

// buildPeers makes the programs of test/apiserver, or finds those made before.
func buildPeers(names []string) ([]string, error) {
	if len(names) == 0 {
		return nil, nil
	}
	build := exec.Command("go", append([]string{"run", "./cmd/build"}, names...)...)
	build.Dir = filepath.Join("..", "test", "apiserver")
	build.Stderr = os.Stderr
	out, err := build.Output()
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", strings.Join(names, " and "), err)
	}
	return strings.Fields(string(out)), nil
}

func inside() error {
	o := parse()
	if err := privateMounts(); err != nil {
		return err
	}
	w, err := newWorld()
	if err != nil {
		return fmt.Errorf("make the world: %w", err)
	}
	b := &bench{o: o, world: w, set: make([]int, maxServices)}
	if !o.manifests {
		if b.api, err = startControlPlane(os.Getenv("TESTCTL")); err != nil {
			return fmt.Errorf("start the control plane: %w", err)
		}
		defer b.api.stop()
	}
	failed := b.run()
	if len(b.results) > 0 {
		printTables(os.Stdout, o, b.results)
	}
	if o.json != "" {
		text, err := json.MarshalIndent(b.results, "", "  ")
		if err == nil {
			err = os.WriteFile(o.json, append(text, '\n'), 0o644)
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// objects has that many Services to be served, in the API server or in a file.
func (b *bench) objects(services int) error {
	began := time.Now()
	if b.o.manifests {
		return writeManifests(services, b.o.endpoints)
	}
	if err := b.resize(services); err != nil {
		return fmt.Errorf("have %d Services: %w", services, err)
	}
	say("%d Services with %d endpoints each, made in %.1f s", services, b.o.endpoints, time.Since(began).Seconds())
	return nil
}

// say reports progress, with the load that the figures were taken under.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s load %.1f: %s\n", time.Now().Format(time.TimeOnly), load(), fmt.Sprintf(format, args...))
}

// load is the machine's one-minute load average.
func load() (one float64) {
	text, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		fmt.Sscan(string(text), &one)
	}
	return one
}
