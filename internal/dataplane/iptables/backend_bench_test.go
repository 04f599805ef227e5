package iptables

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// kubeProxyShape is n Services with m endpoints in kube-proxy's chains, a chain for each endpoint, behind a tree of 16 ways:
// about n(m+1) chains and n(3m+2) rules.
func kubeProxyShape(n, m int) []change {
	mark := natID(false, chainMarkMasq)
	out := []change{{Chain: mark, Rules: []Rule{{Target: Target{Action: OrMark, Mark: 0x4000}}}}}
	pods := netip.MustParsePrefix("10.244.0.0/16")
	var level []string
	for s := range n {
		vip := netip.AddrFrom4([4]byte{10, 96, byte(s >> 8), byte(s)})
		label := fmt.Sprintf("ns-%d/svc-%d:http", s%100, s)
		svc := change{Chain: natID(false, fmt.Sprintf("KUBE-SVC-%016d", s))}
		svc.Rules = append(svc.Rules, Rule{Src: pods, NotSrc: true, Dst: netip.PrefixFrom(vip, 32), Proto: model.TCP, Port: 80, Comment: label + " cluster IP",
			Target: Target{Action: Jump, Chain: mark.Name}})
		for e := range m {
			to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244 + byte(e), byte(s >> 8), byte(s)}), 8080)
			sep := natID(false, fmt.Sprintf("KUBE-SEP-%012d-%03d", s, e))
			out = append(out, change{Chain: sep, Rules: []Rule{
				{Src: netip.PrefixFrom(to.Addr(), 32), Comment: label, Target: Target{Action: Jump, Chain: mark.Name}},
				{Proto: model.TCP, Comment: label, Target: Target{Action: DNAT, To: to}},
			}})
			r := Rule{Comment: label + " -> " + to.String(), Target: Target{Action: Jump, Chain: sep.Name}}
			if e < m-1 {
				r.Chance = uint32((1 << 31) / (m - e))
			}
			svc.Rules = append(svc.Rules, r)
		}
		out = append(out, svc)
		level = append(level, svc.Chain.Name)
	}
	for depth := 0; len(level) > 1; depth++ {
		var up []string
		for i := 0; i < len(level); i += 16 {
			c := change{Chain: natID(false, fmt.Sprintf("KUBE-SVC-%d-%d", depth, i))}
			for j := i; j < min(i+16, len(level)); j++ {
				c.Rules = append(c.Rules, Rule{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 96, byte(j >> 8), byte(j)}), 32), Proto: model.TCP, Port: 80,
					Target: Target{Action: Jump, Chain: level[j]}})
			}
			out, up = append(out, c), append(up, c.Chain.Name)
		}
		level = up
	}
	jump := []Rule{{Comment: "kubernetes service portals", Target: Target{Action: Jump, Chain: level[0]}}}
	return append(out, change{Chain: natID(false, "PREROUTING"), Rules: jump}, change{Chain: natID(false, "OUTPUT"), Rules: jump})
}

// BenchmarkBackend measures a cold load, the change of one chain in it, and a list of all, with 5,000 Services of 4
// endpoints: 25,339 chains, 75,339 rules. cpu-ms is time on the processor, the kernel's part included.
func BenchmarkBackend(b *testing.B) {
	changes := kubeProxyShape(5000, 4)
	for _, kind := range []string{"nft", "nft without counters", "legacy"} {
		open := func() backend {
			if kind == "legacy" {
				return openTestLegacy(b)
			}
			n := openTestNFT(b)
			n.counter = kind == "nft"
			return n
		}
		b.Run("cold/"+kind, func(b *testing.B) {
			for range b.N {
				b.StopTimer()
				inNS(b, func(*kernel.NS) {
					be, before := open(), cpuTime()
					b.StartTimer()
					if err := be.Write(b.Context(), changes); err != nil {
						b.Fatal(err)
					}
					b.StopTimer()
					b.ReportMetric(float64((cpuTime() - before).Milliseconds()), "cpu-ms")
				})
			}
		})
		inNS(b, func(ns *kernel.NS) {
			be := open()
			if err := be.Write(b.Context(), changes); err != nil {
				b.Fatal(err)
			}
			b.Run("change/"+kind, func(b *testing.B) {
				inside(b, ns, func(i int) error { return be.Write(b.Context(), changes[1+i%1000:][:1]) })
			})
			if l, ok := be.(*legacy); ok {
				b.Run("look/"+kind, func(b *testing.B) {
					inside(b, ns, func(int) error { l.news(); return nil })
				})
			}
			b.Run("read/"+kind, func(b *testing.B) {
				inside(b, ns, func(int) error { _, err := readAll(b.Context(), be, false); return err })
			})
		})
	}
}

// inside measures f in a namespace: each sub-benchmark has its own goroutine.
func inside(b *testing.B, ns *kernel.NS, f func(i int) error) {
	err := ns.Do(func() error {
		before := cpuTime()
		b.ResetTimer()
		for i := range b.N {
			if err := f(i); err != nil {
				return err
			}
		}
		b.StopTimer()
		b.ReportMetric(float64((cpuTime()-before).Microseconds())/1000/float64(b.N), "cpu-ms")
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// cpuTime is the time that this process and the programs it ran spent on the processor.
func cpuTime() (sum time.Duration) {
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		if err := syscall.Getrusage(who, &u); err == nil {
			sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
		}
	}
	return sum
}
