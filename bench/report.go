package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// line is a row of the table: the step that measures it, what it is called and where its figure is.
type line struct {
	step step
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
	{stepCold, "load of the machine", func(r *Result) float64 { return r.Load }, false},
	{stepCold, "cold: all rules, s", func(r *Result) float64 { return r.Cold }, true},
	{stepCold, "cold: after the API's lists, s", func(r *Result) float64 { return r.Beyond }, true},
	{stepCold, "cold: the writing, by its own count, s", func(r *Result) float64 { return r.FullSync }, false},
	{stepCold, "cold: CPU, s", func(r *Result) float64 { return r.ColdCPU }, true},
	{stepCold, "cold: Services not served", func(r *Result) float64 { return float64(r.Unserved) }, false},
	{stepChanges, "changes", func(r *Result) float64 { return float64(r.Changes) }, false},
	{stepChanges, "change: p50, ms", func(r *Result) float64 { return r.Change.P50 }, false},
	{stepChanges, "change: p99, ms", func(r *Result) float64 { return r.Change.P99 }, false},
	{stepChanges, "change: the kernel's notice, p50, ms", func(r *Result) float64 { return r.Notice.P50 }, false},
	{stepChanges, "change: the kernel's notice, p99, ms", func(r *Result) float64 { return r.Notice.P99 }, false},
	{stepChanges, "change: lone, p50, ms", func(r *Result) float64 { return r.Lone.P50 }, false},
	{stepChanges, "change: CPU, ms", func(r *Result) float64 { return r.CPUPerChange }, false},
	{stepChanges, "change: waiting for a processor, ms", func(r *Result) float64 { return r.WaitPerChange }, false},
	{stepChanges, "change: the writing, by its own count, ms", func(r *Result) float64 { return r.SyncPerChange }, false},
	{stepChanges, "(the API's delivery, ms)", func(r *Result) float64 { return r.Delivery }, false},
	{stepConnect, "connect p01: direct, µs", latencyOf(toDirect, p01), false},
	{stepConnect, "connect p01: direct, conntrack ÷ direct", latencyOf(toTracked, toTheDirect), false},
	{stepConnect, "connect p01: pod, no Service ÷ direct", latencyOf(toPod, toTheDirect), false},
	{stepConnect, "connect p01: first Service ÷ direct", latencyOf(toFirst, toTheDirect), false},
	{stepConnect, "connect p01: middle Service ÷ direct", latencyOf(toMiddle, toTheDirect), false},
	{stepConnect, "connect p01: last Service ÷ direct", latencyOf(toLast, toTheDirect), false},
	{stepConnect, "connect p50: last Service ÷ direct", latencyOf(toLast, p50Direct), false},
	{stepConnect, "connect p01: pod, no Service ÷ conntrack", latencyOf(toPod, toTheTrack), false},
	{stepConnect, "connect p01: first Service ÷ conntrack", latencyOf(toFirst, toTheTrack), false},
	{stepConnect, "connect p01: last Service ÷ conntrack", latencyOf(toLast, toTheTrack), false},
	{stepConnect, "connect p50: last Service, µs", latencyOf(toLast, p50), false},
	{stepConnect, "connect p99: last Service, µs", latencyOf(toLast, p99), false},
	{stepConnect, rulesWalked, func(r *Result) float64 { return float64(r.Walked[toLast]) }, false},
	{stepSettle, "RSS settled, MiB", func(r *Result) float64 { return r.RSS }, false},
	{stepSettle, "RSS settled, anonymous, MiB", func(r *Result) float64 { return r.Anon }, false},
	{stepSettle, "idle CPU, ms/s", func(r *Result) float64 { return r.IdleCPU }, false},
	{stepChanges, "RSS after the changes, MiB", func(r *Result) float64 { return r.RSSEnd }, false},
	{stepChanges, "RSS peak, MiB", func(r *Result) float64 { return r.RSSTop }, false},
	{stepRestart, "restart: caught up, s", func(r *Result) float64 { return r.Restart }, false},
	{stepRestart, "restart: after the API's lists, s", func(r *Result) float64 { return r.RestartBeyond }, false},
	{stepRestart, "restart: says ready, s", func(r *Result) float64 { return r.RestartReady }, false},
	{stepRestart, "restart: CPU, s", func(r *Result) float64 { return r.RestartCPU }, false},
	{stepRestart, "restart: connections", func(r *Result) float64 { return float64(r.RestartConnected) }, false},
	{stepRestart, "restart: connections failed", func(r *Result) float64 { return float64(r.RestartFailed) }, false},
	{stepClean, "SIGTERM to end, s", func(r *Result) float64 { return r.Stop }, false},
	{stepClean, "clean-up, s", func(r *Result) float64 { return r.Clean }, false},
	{stepClean, "clean-up: mentions left", func(r *Result) float64 { return float64(r.Left) }, false},
}

// rulesWalked is counted in iptables mode only: elsewhere all Services are met by the same look-up.
const rulesWalked = "rules to the last Service"

// measured are the lines of what was done.
func (o options) measured() (some []line) {
	for _, l := range lines {
		if o.steps.has(l.step) && (l.name != rulesWalked || o.mode == "iptables") {
			some = append(some, l)
		}
	}
	return some
}

// printTables prints a table for each back end and number of Services, and, where there are several numbers, one for each
// program over all of them. Figures are medians over the rounds.
func printTables(out io.Writer, o options, results []*Result) {
	for _, backend := range o.backendList() {
		of := func(program string, size int) (some []*Result) {
			for _, r := range results {
				if r.Backend == backend && r.Program == program && r.Services == size {
					some = append(some, r)
				}
			}
			return some
		}
		title := fmt.Sprintf("× %d endpoints, %s", o.endpoints, strings.TrimSpace(o.mode+" "+backend))
		for _, size := range o.sizes {
			fmt.Fprintf(out, "\n%d Services %s, %d round(s)\n", size, title, o.rounds)
			printPeers(out, o, of("fairlead", size), of("kube-proxy", size))
		}
		if len(o.sizes) < 2 {
			continue
		}
		for _, program := range []string{"fairlead", "kube-proxy"} {
			if !slices.ContainsFunc(results, func(r *Result) bool { return r.Program == program }) {
				continue
			}
			fmt.Fprintf(out, "\n%s, by the number of Services %s\n", program, title)
			printSizes(out, o, func(size int) []*Result { return of(program, size) })
		}
	}
}

// printPeers has the two programs side by side, and how many times ours kube-proxy's is.
func printPeers(out io.Writer, o options, ours, theirs []*Result) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tfairlead\tkube-proxy\tkube-proxy ÷ fairlead\t")
	for _, l := range o.measured() {
		our, ourText := l.cell(ours)
		their, theirText := l.cell(theirs)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t\n", l.name, ourText, theirText, ratio(their, our))
	}
	t.Flush()
}

// printSizes has one program with each number of Services, and how many times the figure of the first that of the last is.
func printSizes(out io.Writer, o options, of func(size int) []*Result) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, size := range o.sizes {
		fmt.Fprintf(t, "\t%d", size)
	}
	fmt.Fprintf(t, "\t%d ÷ %d\t\n", o.sizes[len(o.sizes)-1], o.sizes[0])
	for _, l := range o.measured() {
		fmt.Fprint(t, l.name)
		var values []float64
		for _, size := range o.sizes {
			v, text := l.cell(of(size))
			values = append(values, v)
			fmt.Fprintf(t, "\t%s", text)
		}
		fmt.Fprintf(t, "\t%s\t\n", ratio(values[len(values)-1], values[0]))
	}
	t.Flush()
}

func ratio(x, y float64) string {
	if x > 0 && y > 0 {
		return fmt.Sprintf("%.3g", x/y)
	}
	return "–"
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
