package dptest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// Many makes n Services with m endpoints each, as a Full delta.
func Many(n, m int) model.Delta {
	node := model.Node{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.128.0.0/12")}}
	d := model.Delta{Full: true, Node: &node}
	vip, pod := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.128.0.1")
	for i := range n {
		id := model.PoolID{Service: fmt.Sprintf("bench/svc-%d", i), Proto: model.TCP}
		f := model.Frontend{Key: model.Key{IP: vip, Port: 80, Proto: model.TCP}, Owned: true, About: model.About{Service: id.Service, Kind: model.ClusterIP}}
		for o := range f.Routes {
			f.Routes[o] = model.Route{Pool: id, SNAT: o != 0, Else: model.Reject}
		}
		p := model.Pool{ID: id}
		for range m {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.AddrPortFrom(pod, 8080)})
			pod = pod.Next()
		}
		d.Frontends, d.Pools = append(d.Frontends, f), append(d.Pools, p)
		vip = vip.Next()
	}
	return d
}

// Scale measures a dataplane on the real kernel: a cold load, changes of one endpoint, a restart. FAIRLEAD_SCALE=5000x4 says with how
// many Services of how many endpoints. CPU is that of this process, and of the kernel on its behalf.
func Scale(b *testing.B, open func() (engine.Dataplane, error)) error {
	var n, m int
	if _, err := fmt.Sscanf(os.Getenv("FAIRLEAD_SCALE"), "%dx%d", &n, &m); err != nil {
		b.Skip("FAIRLEAD_SCALE=SERVICESxENDPOINTS asks for it")
	}
	ctx := context.Background()
	d, err := open()
	if err != nil {
		return err
	}
	all := Many(n, m)
	if err := measured(b, "cold", func() error { return d.Apply(ctx, all) }); err != nil {
		return err
	}
	b.ReportMetric(rssMiB(), "rss-MiB")
	for _, how := range []struct {
		name   string
		change func(p *model.Pool, i int)
	}{
		{"replaced", func(p *model.Pool, i int) {
			p.Backends = slices.Clone(p.Backends)
			p.Backends[0].Addr = netip.AddrPortFrom(p.Backends[0].Addr.Addr(), uint16(9000+i))
		}},
		{"fewer", func(p *model.Pool, _ int) { p.Backends = p.Backends[:len(p.Backends)-1] }},
	} {
		if err := changes(ctx, b, d, all, how.name, how.change); err != nil {
			return err
		}
	}
	if err := d.Close(); err != nil {
		return err
	}
	if d, err = open(); err != nil {
		return err
	}
	if err := measured(b, "restart", func() error { return d.Apply(ctx, all) }); err != nil {
		return err
	}
	if err := measured(b, "dump", func() error { _, err := d.Dump(ctx); return err }); err != nil {
		return err
	}
	if err := measured(b, "remove", func() error { return d.Remove(ctx) }); err != nil {
		return err
	}
	b.ReportMetric(0, "ns/op")
	return d.Close()
}

// changes changes one pool after the other.
func changes(ctx context.Context, b *testing.B, d engine.Dataplane, all model.Delta, name string, change func(*model.Pool, int)) error {
	const count = 400
	took := make([]time.Duration, 0, count)
	cpu := cpuTime()
	for i := range count {
		p := &all.Pools[(i*37)%len(all.Pools)]
		change(p, i)
		delta := model.Delta{Pools: []model.Pool{*p}}
		start := time.Now()
		if err := d.Apply(ctx, delta); err != nil {
			return err
		}
		took = append(took, time.Since(start))
	}
	cpu = cpuTime() - cpu
	slices.Sort(took)
	b.ReportMetric(float64(took[count/2].Microseconds()), name+"-p50-µs")
	b.ReportMetric(float64(took[count*99/100].Microseconds()), name+"-p99-µs")
	b.ReportMetric(float64(cpu.Microseconds())/count, name+"-cpu-µs")
	return nil
}

func measured(b *testing.B, name string, f func() error) error {
	start, cpu := time.Now(), cpuTime()
	err := f()
	b.ReportMetric(time.Since(start).Seconds(), name+"-s")
	b.ReportMetric((cpuTime() - cpu).Seconds(), name+"-cpu-s")
	return err
}

// cpuTime is what the threads of this process have spent on a processor (Documentation/scheduler/sched-stats.rst).
func cpuTime() (sum time.Duration) {
	threads, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, t := range threads {
		var spent int64
		data, _ := os.ReadFile(t)
		_, _ = fmt.Sscan(string(data), &spent)
		sum += time.Duration(spent)
	}
	return sum
}

func rssMiB() float64 {
	runtime.GC()
	data, _ := os.ReadFile("/proc/self/statm")
	var size, rss int
	fmt.Sscan(string(data), &size, &rss)
	return float64(rss) * float64(os.Getpagesize()) / (1 << 20)
}
