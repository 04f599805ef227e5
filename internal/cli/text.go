package cli

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/control"
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

func ago(t time.Time) string {
	if t.IsZero() {
		return "ever"
	}
	return time.Since(t).Round(time.Second).String()
}
