package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"fairlead/internal/control"
	"fairlead/internal/engine"
	"fairlead/internal/health"
)

// What an agent says of itself: to probes, to scrapes, and to get status.

// configz is what kube-proxy's /configz shows.
func (a *agent) configz() ([]byte, error) {
	c := a.now().c
	return json.Marshal(map[string]any{"kubeproxy.config.k8s.io": c.Proxy, "fairlead.io": c.Own})
}

func (a *agent) status() engine.Status {
	if e := a.engine.Load(); e != nil {
		return e.Status()
	}
	return engine.Status{}
}

func (a *agent) about() control.About {
	number, _ := versions()
	now := a.now()
	out := control.About{Version: number, PID: os.Getpid(), Mode: now.c.Mode, Written: now.written, Backend: now.backend, Node: a.c.Node, StartedAt: a.started}
	objects := map[string]int{}
	if a.api != nil {
		for _, s := range a.api.Status() {
			objects[s.Resource] = s.Objects
		}
	}
	if a.manifests != nil {
		s := a.manifests.Status()
		objects[fromFiles] = s.Services + s.Slices + s.Nodes
	}
	for _, s := range a.sourceStates() {
		out.Sources = append(out.Sources, control.Source{Name: s.Name, Synced: s.Synced, Objects: objects[s.Name], Heard: s.Heard, Problem: s.Problem})
	}
	return out
}

func (a *agent) eventCounts() map[string]uint64 {
	if a.recorder == nil {
		return nil
	}
	r := a.recorder.Recorded()
	return map[string]uint64{"posted": r.Posted, "repeated": r.Repeated, "dropped": r.Dropped}
}

// sourceStates lists what truth comes from. The API is shown by resource, once it can be; what counts is whether the engine
// has taken all.
func (a *agent) sourceStates() []health.Source {
	var out []health.Source
	for name, synced := range a.status().Sources {
		if name == fromAPI {
			out = append(out, a.apiStates(synced)...)
			continue
		}
		s := health.Source{Name: name, Synced: synced}
		if name == fromFiles && a.manifests != nil {
			s.Heard = a.manifests.Status().LastRead
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(x, y health.Source) int { return cmp.Compare(x.Name, y.Name) })
	return out
}

// stale is for how long the API may be silent before its truth is called into doubt: kube-proxy would notice nothing. An API
// that is well sends a bookmark about each minute.
const stale = 3 * time.Minute

func (a *agent) apiStates(taken bool) []health.Source {
	var out []health.Source
	for _, s := range a.api.Status() {
		h := health.Source{Name: s.Resource, Synced: s.Synced && taken, Heard: s.LastEvent}
		switch {
		case s.LastError != nil && time.Since(s.Since) > stale:
			h.Problem = fmt.Sprintf("can't be asked since %s: %v", s.Since.Format(time.RFC3339), s.LastError)
		case !s.LastEvent.IsZero() && time.Since(s.LastEvent) > stale:
			h.Problem = "was last heard of at " + s.LastEvent.Format(time.RFC3339)
		}
		out = append(out, h)
	}
	return out
}

// health is how the agent is, for those who ask over HTTP.
func (a *agent) health() health.Status {
	s := health.StatusOf(a.status())
	s.Sources = a.sourceStates()
	return s
}
