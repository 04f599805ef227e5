package cli

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/control"
	"fairlead/internal/health"
	"fairlead/internal/model"
)

// The tables that get prints beside those of the model.

func serviceText(s *model.State) string {
	var rows [][]string
	for _, v := range serviceViews(s) {
		draining := ""
		if v.Draining > 0 {
			draining = strconv.Itoa(v.Draining)
		}
		rows = append(rows, []string{v.Service, strconv.Itoa(v.Backends), strconv.Itoa(v.Local), draining, strings.Join(v.Frontends, " ")})
	}
	if rows == nil {
		return ""
	}
	return model.Grid([]string{"SERVICE", "BACKENDS", "LOCAL", "DRAINING", "FRONTENDS"}, rows)
}

// frontendText is the table of the model; wide, with the number of backends that each origin finds.
func frontendText(s *model.State, wide bool) string {
	fs := s.SortedFrontends()
	if !wide || len(fs) == 0 {
		return model.FrontendTable(fs)
	}
	columns := slices.Clone(model.FrontendColumns)
	var rows [][]string
	for _, f := range fs {
		row := f.Row()
		for i, r := range f.Routes {
			at := len(row) - 1 - len(f.Routes) + i
			row[at] = fmt.Sprintf("%s (%d)", row[at], len(s.Pools[r.Pool].Backends))
		}
		rows = append(rows, row)
	}
	return model.Grid(columns, rows)
}

// poolText is the table of the model; wide, with a line for each backend, however many there are.
func poolText(s *model.State, wide bool) string {
	ps := s.SortedPools()
	if !wide || len(ps) == 0 {
		return model.PoolTable(ps)
	}
	var rows [][]string
	for _, p := range ps {
		sticky := ""
		if p.Sticky > 0 {
			sticky = p.Sticky.String()
		}
		name := p.ID.String()
		add := func(b, state string) {
			rows = append(rows, []string{name, b, state, sticky})
		}
		if len(p.Backends)+len(p.Draining) == 0 {
			add("none", "")
		}
		for _, b := range p.Backends {
			add(b.String(), "in")
		}
		for _, b := range p.Draining {
			add(b.String(), "draining")
		}
	}
	return model.Grid([]string{"POOL", "BACKEND", "STATE", "STICKY"}, rows)
}

// statusLines says how an agent is doing, one fact a line.
func statusLines(s control.Status) string {
	var b strings.Builder
	say := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", what, fmt.Sprintf(format, args...))
	}
	say("agent", "fairlead %s, process %d, up %s", s.About.Version, s.About.PID, ago(s.About.StartedAt))
	say("node", "%s", s.About.Node)
	mode := s.About.Mode
	if s.About.Backend != "" {
		mode += " (" + s.About.Backend + ")"
	}
	say("dataplane", "%s, %d frontends, %d pools", mode, s.Frontends, s.Pools)
	if w := s.About.Written; w != "" && w != s.About.Mode {
		say("switched", "until a restart, or another mode in the configuration, which says %s", w)
	}
	for _, src := range s.About.Sources {
		say("source", "%s", sourceLine(src))
	}
	for _, line := range apiLines(s.About.API, time.Now()) {
		say("api", "%s", line)
	}
	if s.About.Presumed != "" {
		say("presumed", "%s", s.About.Presumed)
	}
	for _, line := range savedLines(s.About.Saved) {
		say("saved", "%s", line)
	}
	switch e := s.Engine; {
	case e.LastSuccess.IsZero() && !e.Synced:
		say("kernel", "nothing was written yet: the sources have not told all")
	case e.LastSuccess.IsZero():
		say("kernel", "nothing was written yet")
	case e.PendingSince.IsZero():
		say("kernel", "up to date; last written %s ago, %d times in all", ago(e.LastSuccess), e.Generation)
	default:
		say("kernel", "changes wait since %s; last written %s ago", ago(e.PendingSince), ago(e.LastSuccess))
	}
	if s.LastError != "" {
		say("failing", "%d times since the last success: %s", s.Engine.Failures, s.LastError)
	}
	if s.Engine.Leftover != "" {
		say("left over", "can't be removed yet: %s", s.Engine.Leftover)
	}
	if s.Engine.LastDrift != "" {
		say("drift", "put right last: %s", s.Engine.LastDrift)
	}
	for _, reason := range slices.Sorted(maps.Keys(s.Refusals)) {
		if n := s.Refusals[reason]; n > 0 {
			say("refused", "%s %d", reason, n)
		}
	}
	return b.String()
}

func sourceLine(src control.Source) string {
	parts := []string{src.Name + " has not told all yet"}
	if src.Synced {
		parts[0] = src.Name + " synced"
	}
	if src.Objects > 0 {
		parts = append(parts, fmt.Sprintf("%d objects", src.Objects))
	}
	if !src.Heard.IsZero() {
		parts = append(parts, "heard of "+ago(src.Heard)+" ago")
	}
	if src.Problem != "" {
		parts = append(parts, src.Problem)
	}
	return strings.Join(parts, ", ")
}

// apiLines say how the API is reached; none is that none is asked.
func apiLines(a *health.API, now time.Time) (lines []string) {
	if a == nil {
		return nil
	}
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	switch {
	case a.Connected:
		say("%s, connected for %s", a.Server, ago(a.Since))
	case a.LastError == "":
		say("%s, which has not answered yet", a.Server)
	default:
		say("%s, can't be asked for %s: %s", a.Server, ago(a.Since), a.LastError)
	}
	if others := slices.DeleteFunc(slices.Clone(a.Servers), func(s string) bool { return s == a.Server }); len(others) > 0 {
		say("else %s; %d fail-overs", strings.Join(others, ", "), a.Failovers)
	}
	if a.NotReady != "" {
		say("it says itself that it is not ready: %s", a.NotReady)
	}
	if a.View != nil {
		say("the view of it is %v old", time.Duration(*a.View*float64(time.Second)).Round(time.Second))
	}
	if a.Connected && a.LastError != "" {
		say("last trouble %s ago, over: %s", ago(a.LastErrorAt), a.LastError)
	}
	for _, c := range []struct {
		what  string
		until time.Time
		least time.Duration // what should be left of it
	}{{"client certificate", a.ClientNotAfter, soon}, {"server certificate", a.ServerNotAfter, soon}, {"token", a.TokenNotAfter, 0}} {
		if c.until.IsZero() {
			continue
		}
		advice := ""
		if c.until.Sub(now) <= c.least {
			advice = ": renew it"
		}
		say("%s %s%s", c.what, expiry(c.until, now), advice)
	}
	if text := reloadText(a.Reloads); text != "" {
		say("read anew: %s", text)
	}
	if a.Waiting != "" {
		say("not in use: %s", a.Waiting)
	}
	return lines
}

// savedLines say what is kept for a start without the API; none is that nothing is to be.
func savedLines(s *health.Saved) (lines []string) {
	if s == nil {
		return nil
	}
	switch {
	case s.Problem != "":
		lines = append(lines, "nothing is kept in "+s.Dir+": "+s.Problem)
	case s.Bytes == 0:
		lines = append(lines, "nothing new is kept in "+s.Dir+" yet: the API has not told all")
	default:
		lines = append(lines, fmt.Sprintf("%d objects in %s, %d KiB", s.Objects, s.Dir, (s.Bytes+1023)/1024))
	}
	if s.Ignored != "" {
		lines = append(lines, "what was kept before is not used: "+s.Ignored)
	}
	return lines
}

// reloadText counts what was read anew.
func reloadText(reloads map[string]health.Reload) string {
	var parts []string
	for _, thing := range slices.Sorted(maps.Keys(reloads)) {
		r := reloads[thing]
		var of []string
		if r.Used > 0 {
			of = append(of, fmt.Sprintf("used %d times, last %s ago", r.Used, ago(r.Last)))
		}
		if r.Refused > 0 {
			of = append(of, fmt.Sprintf("refused %d times", r.Refused))
		}
		if of != nil {
			parts = append(parts, thing+" "+strings.Join(of, ", "))
		}
	}
	return strings.Join(parts, "; ")
}

func ago(t time.Time) string {
	if t.IsZero() {
		return "ever"
	}
	return time.Since(t).Round(time.Second).String()
}
