package cli

import (
	"cmp"
	"encoding/json"
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
	out := control.About{Version: number, PID: os.Getpid(), Mode: now.c.Mode, Written: now.written, Backend: now.backend, Node: a.c.Node, StartedAt: a.started,
		Presumed: a.presumed(), API: a.apiNow(), Saved: a.savedNow()}
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
			out = append(out, a.view().sources(synced, time.Now())...)
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

// presumed says that what is served is not what the sources have told; empty is that it is.
func (a *agent) presumed() string {
	if s := a.savedNow(); s != nil && a.status().Presumed {
		return "serving what was known at " + clock(s.AsOf) + "; the API has not told all since"
	}
	return ""
}

// savedNow is what is kept for a start without the API; nil is that nothing is to be.
func (a *agent) savedNow() *health.Saved {
	if a.saved == nil {
		return nil
	}
	s := health.Saved(a.saved.Status())
	return &s
}

// health is how the agent is, for those who ask over HTTP.
func (a *agent) health() health.Status {
	s := health.StatusOf(a.status())
	s.Sources, s.Presumed, s.API, s.Saved = a.sourceStates(), a.presumed(), a.apiNow(), a.savedNow()
	return s
}
