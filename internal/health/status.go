// Package health answers those who ask whether this node serves.
//
// [Server] answers people, probes and cloud load balancers about fairlead itself:
//
//   - /healthz is for load balancers in front of every node (KEP-3836): 503 when changes wait for too long, and when the
//     node is about to go away.
//   - /livez is for the kubelet's liveness probe: 503 when changes wait for too long.
//   - /readyz is for readiness probes and people: 503, with the reasons in words, until every source has told all it knows
//     and it is in the kernel, while writing it keeps failing, and while the API can't be asked, or our view of it is old.
//
// An API server that is away fails /readyz, and the other two never: what is in the kernel goes on serving, so that a load
// balancer would leave a node that works, and it would leave all of them at once; and a restart, which is all that a
// liveness probe can bring about, brings no API server back. What is wrong stands in the body of /readyz from the first
// moment, and its code turns when it has lasted for longer than a fail-over or the restart of an API server takes: else all
// nodes of a cluster would be unready together, and a roll-out would stop, for nothing.
//
// The first two answer as kube-proxy's do, with the same fields. A change waits for too long after twice the sync
// period. Before the first sync, both are 200 unless something already waits for too long: the rules of the previous run
// still serve, so a load balancer must not leave the node, and a restart would not bring the API server back. Whether
// fairlead itself knows the cluster, /readyz tells. Unlike kube-proxy's, the port opens at once.
//
// [Checks] answers cloud load balancers about single Services (healthCheckNodePort).
package health

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"fairlead/internal/engine"
)

// Status is what there is to know about fairlead's own work.
type Status struct {
	Sources      []Source
	PendingSince time.Time // since when the oldest change waits to be written; zero is nothing waits
	LastApplied  time.Time // last successful write; zero is never
	LastError    string    // of the last write; empty after a success
	Presumed     string    // what is served is what was known at some time, and why; empty when the sources themselves have told it
	API          *API      // nil where no API is asked
	Saved        *Saved    // nil where nothing is to be kept
}

// Source is one place that truth comes from.
type Source struct {
	Name    string    // for people: "services", "manifests"
	Synced  bool      // all that existed at the start has been told
	Heard   time.Time // when it last gave a sign of life; zero is never, or not known
	Remote  bool      // it is far away, and gives a sign of life about each minute when it is well, so that Heard says how old our view is
	Problem string    // why its truth can't be relied on now; empty is nothing wrong
	Failing bool      // because of Problem the node does not count as ready; without, it is shown only
	InDoubt bool      // what it says contradicts what it said before, and is not believed yet
}

// StatusOf puts the engine's status into words, with its sources by name. What is known better of a source (when it was
// heard of, what is wrong with it) is the caller's to add.
func StatusOf(e engine.Status) Status {
	s := Status{PendingSince: e.PendingSince, LastApplied: e.LastSuccess}
	if e.LastError != nil {
		s.LastError = e.LastError.Error()
	}
	for _, name := range slices.Sorted(maps.Keys(e.Sources)) {
		s.Sources = append(s.Sources, Source{Name: name, Synced: e.Sources[name]})
	}
	return s
}

// sourceJSON and readiness are the body of /readyz.
type sourceJSON struct {
	Name       string   `json:"name"`
	Synced     bool     `json:"synced"`
	AgeSeconds *float64 `json:"ageSeconds,omitempty"` // since it was last heard of
	Problem    string   `json:"problem,omitempty"`
}

type readiness struct {
	Ready        bool         `json:"ready"`
	Reasons      []string     `json:"reasons"` // why not
	CurrentTime  time.Time    `json:"currentTime"`
	Sources      []sourceJSON `json:"sources"`
	LastApplied  *time.Time   `json:"lastApplied,omitempty"`
	PendingSince *time.Time   `json:"pendingSince,omitempty"`
	LastError    string       `json:"lastError,omitempty"`
	Presumed     string       `json:"presumed,omitempty"`
	API          *API         `json:"api,omitempty"`
	Saved        *Saved       `json:"saved,omitempty"`
}

func (s Status) readiness(now time.Time, limit time.Duration) readiness {
	r := readiness{Reasons: []string{}, Sources: []sourceJSON{}, CurrentTime: now, LastError: s.LastError,
		LastApplied: some(s.LastApplied), PendingSince: some(s.PendingSince), Presumed: s.Presumed, API: s.API, Saved: s.Saved}
	if len(s.Sources) == 0 {
		r.Reasons = append(r.Reasons, "starting")
	}
	for _, src := range s.Sources {
		j := sourceJSON{Name: src.Name, Synced: src.Synced, Problem: src.Problem}
		if !src.Heard.IsZero() {
			age := now.Sub(src.Heard).Seconds()
			j.AgeSeconds = &age
		}
		r.Sources = append(r.Sources, j)
		if why := src.reason(); why != "" {
			r.Reasons = append(r.Reasons, fmt.Sprintf("source %s: %s", src.Name, why))
		}
	}
	if s.Presumed != "" {
		r.Reasons = append(r.Reasons, s.Presumed)
	}
	switch {
	case s.LastApplied.IsZero() && s.LastError != "":
		r.Reasons = append(r.Reasons, "nothing was written yet: "+s.LastError)
	case s.LastApplied.IsZero():
		r.Reasons = append(r.Reasons, "nothing was written yet")
	case !s.healthy(now, limit) && s.LastError != "":
		r.Reasons = append(r.Reasons, fmt.Sprintf("changes wait since %s: %s", s.PendingSince.Format(time.RFC3339), s.LastError))
	case !s.healthy(now, limit):
		r.Reasons = append(r.Reasons, "changes wait since "+s.PendingSince.Format(time.RFC3339))
	}
	r.Ready = len(r.Reasons) == 0
	return r
}

// reason is why the node is not ready because of the source; empty is that it is.
func (s Source) reason() string {
	switch {
	case s.Problem != "" && (s.Failing || !s.Synced):
		return s.Problem
	case !s.Synced:
		return "has not told all yet"
	}
	return ""
}

func some(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// healthy is kube-proxy's rule: no change waits for as long as limit.
func (s Status) healthy(now time.Time, limit time.Duration) bool {
	return s.PendingSince.IsZero() || now.Sub(s.PendingSince) < limit
}

// proxyHealth is the body of /healthz and /livez, with kube-proxy's names in kube-proxy's order.
type proxyHealth struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"` // of /healthz only
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyHealth `json:"status"`
}

type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// proxyHealth tells the same of each family, since both are written together. started stands for the last write until
// there was one.
func (s Status) proxyHealth(now, started time.Time, limit time.Duration, families []string, eligible *bool) proxyHealth {
	last := s.LastApplied
	if last.IsZero() {
		last = started
	}
	h := proxyHealth{LastUpdated: last, CurrentTime: now, NodeEligible: eligible, Healthy: s.healthy(now, limit),
		Status: make(map[string]familyHealth, len(families))}
	for _, f := range families {
		h.Status[f] = familyHealth{LastUpdated: last, Healthy: h.Healthy}
	}
	if h.code() == http.StatusOK {
		h.LastUpdated = now
	}
	return h
}

func (h proxyHealth) code() int {
	return code(h.Healthy && (h.NodeEligible == nil || *h.NodeEligible))
}

func code(ok bool) int {
	if ok {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}
