package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// many makes n Services with m endpoints each.
func many(n, m int) model.Delta {
	node := model.Node{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11")}, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	d := model.Delta{Full: true, Node: &node}
	vip, pod := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.244.0.1")
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

// BenchmarkScale measures one cold load, changes of one pool, and a restart, on the real kernel: FAIRLEAD_SCALE=5000x4.
func BenchmarkScale(b *testing.B) {
	var n, m int
	if _, err := fmt.Sscanf(os.Getenv("FAIRLEAD_SCALE"), "%dx%d", &n, &m); err != nil {
		b.Skip("FAIRLEAD_SCALE=SERVICESxENDPOINTS asks for it")
	}
	ns, err := kernel.NewNS()
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		ctx := context.Background()
		open := func() *Dataplane {
			d, err := New(ctx, Config{V4: true, V6: true, MasqueradeBit: 14, Backend: os.Getenv("FAIRLEAD_BACKEND")})
			if err != nil {
				b.Fatal(err)
			}
			return d
		}
		d, all := open(), many(n, m)
		start := time.Now()
		if err := d.Apply(ctx, all); err != nil {
			return err
		}
		b.ReportMetric(time.Since(start).Seconds(), "cold-s")
		b.ReportMetric(rssMiB(), "rss-MiB")
		var took []time.Duration
		for i := range 50 {
			p := all.Pools[(i*37)%n]
			p.Backends = p.Backends[:len(p.Backends)-1]
			start := time.Now()
			if err := d.Apply(ctx, model.Delta{Pools: []model.Pool{p}}); err != nil {
				return err
			}
			took = append(took, time.Since(start))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[25].Microseconds())/1000, "change-p50-ms")
		b.ReportMetric(float64(took[49].Microseconds())/1000, "change-max-ms")
		d.Close()
		d = open()
		start = time.Now()
		if err := d.Apply(ctx, all); err != nil {
			return err
		}
		b.ReportMetric(time.Since(start).Seconds(), "restart-s")
		b.ReportMetric(float64(d.last[0][0]+d.last[0][1]), "restart-rules")
		start = time.Now()
		if _, err := d.Dump(ctx); err != nil {
			return err
		}
		b.ReportMetric(time.Since(start).Seconds(), "dump-s")
		start = time.Now()
		if err := d.Remove(ctx); err != nil {
			return err
		}
		b.ReportMetric(time.Since(start).Seconds(), "remove-s")
		return d.Close()
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(0, "ns/op")
}

func rssMiB() float64 {
	runtime.GC()
	data, _ := os.ReadFile("/proc/self/statm")
	var size, rss int
	fmt.Sscan(string(data), &size, &rss)
	return float64(rss) * float64(os.Getpagesize()) / (1 << 20)
}
