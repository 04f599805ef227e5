package cli

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"fairlead/internal/config"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// BenchmarkScale is the whole agent but for a kernel: an API server (in another process) streams Services, and then changes the
// endpoints of one at a time. It measures what there is beside the dataplane. FAIRLEAD_SCALE says how many there are, several
// with commas between; FAIRLEAD_SCALE_PROFILE=DIR keeps profiles.
//
//	FAIRLEAD_SCALE=1000x4,30000x4 go test -run '^$' -bench Scale -benchtime 5000x ./internal/cli
//
// ns/op is a round trip through the API server; the rest is this process's:
//
//	heap-MiB           live, after everything was told
//	RSS-MiB, peak-MiB  of the test binary; RSS after memory was given back
//	after-MiB          RSS after the changes
//	cold-cpu-ms        from the start until all of it reached the dataplane
//	cpu-us/op          user and system, garbage collection included
//	p50-us, p99-us     from the moment that the API server makes a change to the dataplane's Apply
//	bytes/op, mallocs/op  of the whole process
func BenchmarkScale(b *testing.B) {
	for text := range strings.SplitSeq(cmp.Or(os.Getenv("FAIRLEAD_SCALE"), "1000x4"), ",") {
		s, err := parseScale(text)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(s.String(), func(b *testing.B) { benchmarkScale(b, s) })
	}
}

func benchmarkScale(b *testing.B, s scale) {
	before := cpuTime()
	r := startScaled(b, s)
	<-r.plane.full
	if err := r.agent.engine.Load().Do(b.Context(), func(engine.View) {}); err != nil { // until the round is over
		b.Fatal(err)
	}
	cold := cpuTime() - before
	time.Sleep(calmAfter + time.Second) // until memory was given back
	rss, peak := memoryOf(b)
	heap := liveHeap()
	r.profile(b, "heap", s)
	stop := r.cpuProfile(b, s)
	for range 100 { // warm up
		r.change(b)
	}
	var took []time.Duration
	var m0, m1 runtime.MemStats
	runtime.ReadMemStats(&m0)
	before = cpuTime()
	for b.Loop() {
		took = append(took, r.change(b))
	}
	spent := cpuTime() - before
	runtime.ReadMemStats(&m1)
	stop()
	slices.Sort(took)
	after, _ := memoryOf(b)
	n := float64(b.N)
	for unit, v := range map[string]float64{
		"heap-MiB": heap, "RSS-MiB": rss, "peak-MiB": peak, "after-MiB": after, "cold-cpu-ms": cold.Seconds() * 1e3,
		"cpu-us/op": float64(spent.Microseconds()) / n, "p50-us": float64(took[len(took)/2].Microseconds()), "p99-us": float64(took[len(took)*99/100].Microseconds()),
		"bytes/op": float64(m1.TotalAlloc-m0.TotalAlloc) / n, "mallocs/op": float64(m1.Mallocs-m0.Mallocs) / n,
	} {
		b.ReportMetric(v, unit)
	}
}

// scaled is an agent that runs, and its API server.
type scaled struct {
	scale
	plane *nullPlane
	agent *agent
	api   *os.File // its standard input
}

func startScaled(b *testing.B, s scale) *scaled {
	addr, api := startScaleAPI(b, s)
	r := &scaled{scale: s, plane: &nullPlane{full: make(chan struct{}), took: make(chan time.Duration, 1)}, api: api}
	old := dataplanes[config.Memory]
	dataplanes[config.Memory] = func(context.Context, *config.Config) (engine.Dataplane, families, error) {
		return r.plane, families{v4: true, v6: true}, nil
	}
	o := config.NewOptions()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--proxy-mode=memory", "--master=http://" + addr, "--hostname-override=node-0001", "--conntrack-max-per-core=0",
		"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--control-socket=" + config.SocketOff,
		"--cluster-cidr=10.128.0.0/9", "--oom-score-adj=0"}); err != nil {
		b.Fatal(err)
	}
	c, err := o.Config()
	if err != nil {
		b.Fatal(err)
	}
	c.Healthz, c.Metrics = "", "127.0.0.1:0"
	sparing(gcPercent)
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	r.agent = newAgent(c, "")
	go func() { ended <- r.agent.run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
		dataplanes[config.Memory] = old
	})
	return r
}

// change has the API server change a Service, and waits until the dataplane is told.
func (r *scaled) change(b *testing.B) time.Duration {
	if _, err := fmt.Fprintln(r.api, rand.N(r.services)); err != nil {
		b.Fatal(err)
	}
	return <-r.plane.took
}

// nullPlane does nothing with what it is told, and remembers nothing.
type nullPlane struct {
	full chan struct{} // closed at the first Apply
	took chan time.Duration
}

func (p *nullPlane) Apply(_ context.Context, d model.Delta) error {
	if d.Full {
		select {
		case <-p.full:
		default:
			close(p.full)
		}
	}
	for _, asked := range d.Since {
		p.took <- time.Since(asked)
	}
	return nil
}

func (p *nullPlane) Dump(context.Context) (*model.State, error) { return model.NewState(), nil }
func (p *nullPlane) Remove(context.Context) error               { return nil }
func (p *nullPlane) Close() error                               { return nil }

func startScaleAPI(b *testing.B, s scale) (addr string, input *os.File) {
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	in, input, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	c := exec.Command(self)
	c.Env = append(os.Environ(), asAPI+"="+s.String())
	c.Stdin, c.Stderr = in, os.Stderr
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	in.Close()
	b.Cleanup(func() {
		input.Close()
		if err := c.Wait(); err != nil {
			b.Error(err)
		}
	})
	if addr, err = bufio.NewReader(out).ReadString('\n'); err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(addr), input
}

func (r *scaled) profile(b *testing.B, name string, s scale) {
	dir := os.Getenv("FAIRLEAD_SCALE_PROFILE")
	if dir == "" {
		return
	}
	f, err := os.Create(fmt.Sprintf("%s/%s-%s", dir, name, s))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := pprof.Lookup(name).WriteTo(f, 0); err != nil {
		b.Fatal(err)
	}
}

func (r *scaled) cpuProfile(b *testing.B, s scale) (stop func()) {
	dir := os.Getenv("FAIRLEAD_SCALE_PROFILE")
	if dir == "" {
		return func() {}
	}
	f, err := os.Create(fmt.Sprintf("%s/cpu-%s", dir, s))
	if err != nil {
		b.Fatal(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		b.Fatal(err)
	}
	return func() {
		pprof.StopCPUProfile()
		f.Close()
		r.profile(b, "allocs", s)
	}
}

func liveHeap() (mib float64) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}

// memoryOf is what the kernel says of this process, in MiB.
func memoryOf(b *testing.B) (rss, peak float64) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, _ := strconv.ParseFloat(f[1], 64)
		switch f[0] {
		case "VmRSS:":
			rss = kib / 1024
		case "VmHWM:":
			peak = kib / 1024
		}
	}
	return rss, peak
}

// cpuTime is what the process has used so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
