package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// line is a row of the table: what it is called and where its figure is.
type line struct {
	name string
	of   func(*Result) float64
	cold bool // a lower bound when the rules were not complete in time, where others are absent
}

func latencyOf(place string, of func(Latency) float64) func(*Result) float64 {
	return func(r *Result) float64 { return of(r.Connect[place]) }
}

var (
	p01         = func(l Latency) float64 { return l.P01 }
	p50         = func(l Latency) float64 { return l.P50 }
	p99         = func(l Latency) float64 { return l.P99 }
	toTheDirect = func(l Latency) float64 { return l.ToDirect }
	toTheTrack  = func(l Latency) float64 { return l.ToTracked }
	p50Direct   = func(l Latency) float64 { return l.P50ToDirect }
)

var lines = []line{
	{"load of the machine", func(r *Result) float64 { return r.Load }, false},
	{"cold: all rules, s", func(r *Result) float64 { return r.Cold }, true},
	{"cold: CPU, s", func(r *Result) float64 { return r.ColdCPU }, true},
	{"cold: Services not served", func(r *Result) float64 { return float64(r.Unserved) }, false},
	{"change: p50, ms", func(r *Result) float64 { return r.Change.P50 }, false},
	{"change: p99, ms", func(r *Result) float64 { return r.Change.P99 }, false},
	{"change: lone, p50, ms", func(r *Result) float64 { return r.Lone.P50 }, false},
	{"change: CPU, ms", func(r *Result) float64 { return r.CPUPerChange }, false},
	{"(the watch's delivery, ms)", func(r *Result) float64 { return r.Delivery }, false},
	{"connect p01: direct, µs", latencyOf(toDirect, p01), false},
	{"connect p01: direct, conntrack ÷ direct", latencyOf(toTracked, toTheDirect), false},
	{"connect p01: pod, no Service ÷ direct", latencyOf(toPod, toTheDirect), false},
	{"connect p01: first Service ÷ direct", latencyOf(toFirst, toTheDirect), false},
	{"connect p01: middle Service ÷ direct", latencyOf(toMiddle, toTheDirect), false},
	{"connect p01: worst Service ÷ direct", latencyOf(toLast, toTheDirect), false},
	{"connect p50: worst Service ÷ direct", latencyOf(toLast, p50Direct), false},
	{"connect p01: worst Service ÷ conntrack", latencyOf(toLast, toTheTrack), false},
	{"connect p50: worst Service, µs", latencyOf(toLast, p50), false},
	{"connect p99: worst Service, µs", latencyOf(toLast, p99), false},
	{"rules to the worst Service", func(r *Result) float64 { return float64(r.Walked[toLast]) }, false},
	{"RSS settled, MiB", func(r *Result) float64 { return r.RSS }, false},
	{"RSS settled, anonymous, MiB", func(r *Result) float64 { return r.Anon }, false},
	{"RSS after the changes, MiB", func(r *Result) float64 { return r.RSSEnd }, false},
	{"RSS peak, MiB", func(r *Result) float64 { return r.RSSTop }, false},
	{"idle CPU, ms/s", func(r *Result) float64 { return r.IdleCPU }, false},
	{"restart: caught up, s", func(r *Result) float64 { return r.Restart }, false},
	{"restart: says ready, s", func(r *Result) float64 { return r.RestartReady }, false},
	{"restart: CPU, s", func(r *Result) float64 { return r.RestartCPU }, false},
	{"restart: connections", func(r *Result) float64 { return float64(r.RestartConnected) }, false},
	{"restart: connections failed", func(r *Result) float64 { return float64(r.RestartFailed) }, false},
	{"SIGTERM to end, s", func(r *Result) float64 { return r.Stop }, false},
	{"clean-up, s", func(r *Result) float64 { return r.Clean }, false},
	{"clean-up: mentions left", func(r *Result) float64 { return float64(r.Left) }, false},
}

// printTables prints one table for each back end: medians over the rounds, and how many times ours kube-proxy's is.
func printTables(out io.Writer, o options, results []*Result) {
	for _, backend := range o.backendList() {
		of := map[string][]*Result{}
		for _, r := range results {
			if r.Backend == backend {
				of[r.Program] = append(of[r.Program], r)
			}
		}
		fmt.Fprintf(out, "\n%d Services × %d endpoints, %s %s, %d round(s)\n", o.services, o.endpoints, o.mode, backend, o.rounds)
		t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "\tfairlead\tkube-proxy\tkube-proxy ÷ fairlead\t")
		for _, l := range lines {
			if o.manifests && l.changes() {
				continue
			}
			ours, oursText := l.cell(of["fairlead"])
			theirs, theirsText := l.cell(of["kube-proxy"])
			ratio := "–"
			if ours > 0 && theirs > 0 {
				ratio = fmt.Sprintf("%.3g", theirs/ours)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t\n", l.name, oursText, theirsText, ratio)
		}
		t.Flush()
	}
}

// changes tells whether the line is of the steps that change something through the API.
func (l line) changes() bool {
	for _, prefix := range []string{"change", "(the watch", "restart", "RSS after", "RSS peak"} {
		if strings.HasPrefix(l.name, prefix) {
			return true
		}
	}
	return false
}

// cell is the median over the rounds, and how it is written: "> " before what ended at the deadline, a dash for what was
// not measured.
func (l line) cell(results []*Result) (float64, string) {
	var values []float64
	prefix := ""
	for _, r := range results {
		if r.Unfinished {
			if !l.cold {
				continue
			}
			prefix = "> "
		}
		if v := l.of(r); v != 0 || r.Error == "" { // zero after an error is what was never measured
			values = append(values, v)
		}
	}
	if len(values) == 0 {
		return 0, "–"
	}
	m := median(values)
	return m, prefix + fmt.Sprintf("%.4g", m)
}
