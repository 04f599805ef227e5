package cli

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"fairlead/internal/control"
	"fairlead/internal/health"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

// The views are what get -o json prints: the model, in words. Their names are an interface; tools read them.
type (
	stateView struct {
		Frontends []frontendView `json:"frontends"`
		Pools     []poolView     `json:"pools"`
		Checks    []checkView    `json:"checks"`
		Node      nodeView       `json:"node"`
	}
	checkView struct {
		Service   string `json:"service"`
		Port      uint16 `json:"port"`
		ReadyIPv4 int    `json:"readyIPv4"`
		ReadyIPv6 int    `json:"readyIPv6"`
	}
	nodeView struct {
		Name           string   `json:"name"`
		Addresses      []string `json:"addresses"`
		AllNodePorts   bool     `json:"allNodePorts"` // every address takes them
		NodePorts      []string `json:"nodePorts,omitempty"`
		LocalhostPorts bool     `json:"localhostNodePorts"`
		LocalhostRelay []string `json:"localhostRelay,omitempty"`
		Pods           []string `json:"pods"`
		PodInterfaces  []string `json:"podInterfaces,omitempty"`
	}
	statusView struct {
		Version      string         `json:"version"`
		PID          int            `json:"pid"`
		StartedAt    time.Time      `json:"startedAt"`
		Node         string         `json:"node"`
		Mode         string         `json:"mode"`
		Backend      string         `json:"backend,omitempty"`
		Frontends    int            `json:"frontends"`
		Pools        int            `json:"pools"`
		Synced       bool           `json:"synced"`
		Sources      []sourceView   `json:"sources"`
		PendingSince *time.Time     `json:"pendingSince,omitempty"`
		LastSuccess  *time.Time     `json:"lastSuccess,omitempty"`
		Generation   uint64         `json:"generation"`
		Failures     int            `json:"failures"`
		LastError    string         `json:"lastError,omitempty"`
		LastDrift    string         `json:"lastDrift,omitempty"`
		Leftover     string         `json:"leftover,omitempty"`
		Refusals     map[string]int `json:"refusals"`
		Presumed     string         `json:"presumed,omitempty"`
		API          *health.API    `json:"api,omitempty"`
		Saved        *health.Saved  `json:"saved,omitempty"`
	}
	sourceView struct {
		Name    string     `json:"name"`
		Synced  bool       `json:"synced"`
		Objects int        `json:"objects,omitempty"`
		Heard   *time.Time `json:"heard,omitempty"`
		Problem string     `json:"problem,omitempty"`
	}
	frontendView struct {
		Address  string               `json:"address"`
		Port     uint16               `json:"port"`
		Protocol string               `json:"protocol"`
		Service  string               `json:"service"`
		PortName string               `json:"portName,omitempty"`
		Kind     string               `json:"kind,omitempty"`
		Allow    []string             `json:"allow"` // null is everyone
		Owned    bool                 `json:"owned"`
		Routes   map[string]routeView `json:"routes"`
	}
	routeView struct {
		Pool     string `json:"pool"`
		SNAT     bool   `json:"snat"`
		Else     string `json:"else"`
		Backends int    `json:"backends"`
	}
	poolView struct {
		Name     string        `json:"name"`
		Service  string        `json:"service"`
		PortName string        `json:"portName,omitempty"`
		Protocol string        `json:"protocol"`
		Family   string        `json:"family"`
		Scope    string        `json:"scope"`
		Backends []backendView `json:"backends"`
		Draining []backendView `json:"draining,omitempty"`
		Sticky   float64       `json:"stickySeconds,omitempty"`
	}
	backendView struct {
		Address string `json:"address"`
		Local   bool   `json:"local"`
	}
	serviceView struct {
		Service   string   `json:"service"`
		Frontends []string `json:"frontends"`
		Backends  int      `json:"backends"`
		Local     int      `json:"local"`
		Draining  int      `json:"draining"`
	}
	choiceView struct {
		PortName string `json:"portName,omitempty"`
		Protocol string `json:"protocol"`
		Address  string `json:"address"`
		Node     string `json:"node,omitempty"`
		Pool     string `json:"pool"`
		Reason   string `json:"reason"`
	}
)

func frontendViews(s *model.State) []frontendView {
	out := []frontendView{}
	for _, f := range s.SortedFrontends() {
		v := frontendView{Address: f.Key.IP.String(), Port: f.Key.Port, Protocol: f.Key.Proto.String(), Service: f.About.Service,
			PortName: f.About.Port, Kind: string(f.About.Kind), Owned: f.Owned, Routes: map[string]routeView{}}
		if f.Allow != nil {
			v.Allow = words(f.Allow)
		}
		for _, o := range model.Origins {
			r := f.Routes[o]
			v.Routes[o.String()] = routeView{r.Pool.String(), r.SNAT, r.Else.String(), len(s.Pools[r.Pool].Backends)}
		}
		out = append(out, v)
	}
	return out
}

func poolViews(s *model.State) []poolView {
	out := []poolView{}
	for _, p := range s.SortedPools() {
		out = append(out, poolView{Name: p.ID.String(), Service: p.ID.Service, PortName: p.ID.Port, Protocol: p.ID.Proto.String(),
			Family: familyOf(p.ID.V6), Scope: p.ID.Scope.String(), Backends: backendViews(p.Backends), Draining: backendViews(p.Draining),
			Sticky: p.Sticky.Seconds()})
	}
	return out
}

func checkViews(s *model.State) []checkView {
	out := []checkView{}
	for _, c := range s.SortedChecks() {
		out = append(out, checkView{c.Service, c.Port, c.Ready4, c.Ready6})
	}
	return out
}

func viewOfNode(n model.Node) nodeView {
	return nodeView{Name: n.Name, Addresses: words(n.Addrs), AllNodePorts: n.NodePorts == nil, NodePorts: words(n.NodePorts),
		LocalhostPorts: n.LocalhostPort, LocalhostRelay: words(n.LocalhostRelay), Pods: words(n.Pods), PodInterfaces: n.PodInterfaces}
}

func viewOfStatus(s control.Status) statusView {
	a, e := s.About, s.Engine
	v := statusView{Version: a.Version, PID: a.PID, StartedAt: a.StartedAt, Node: a.Node, Mode: a.Mode, Backend: a.Backend,
		Frontends: s.Frontends, Pools: s.Pools, Synced: e.Synced, Sources: []sourceView{}, PendingSince: some(e.PendingSince),
		LastSuccess: some(e.LastSuccess), Generation: e.Generation, Failures: e.Failures, LastError: s.LastError, LastDrift: e.LastDrift, Leftover: e.Leftover,
		Refusals: s.Refusals, Presumed: a.Presumed, API: a.API, Saved: a.Saved}
	for _, src := range a.Sources {
		v.Sources = append(v.Sources, sourceView{src.Name, src.Synced, src.Objects, some(src.Heard), src.Problem})
	}
	return v
}

func some(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func words[T fmt.Stringer](items []T) []string {
	out := []string{}
	for _, i := range items {
		out = append(out, i.String())
	}
	return out
}

func familyOf(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

func backendViews(bs []model.Backend) []backendView {
	out := make([]backendView, len(bs))
	for i, b := range bs {
		out[i] = backendView{b.Addr.String(), b.Local}
	}
	return out
}

func choiceViews(cs []resolve.Choice) []choiceView {
	out := make([]choiceView, len(cs))
	for i, c := range cs {
		out[i] = choiceView{c.Port, c.Proto.String(), c.Addr.String(), c.Node, c.Where(), c.Reason}
	}
	return out
}

// serviceViews sums up each Service: what it answers at, and how many endpoints it has.
func serviceViews(s *model.State) []serviceView {
	type count struct{ in, local, draining map[model.Backend]bool }
	by := map[string]*serviceView{}
	counts := map[string]count{}
	at := func(name string) *serviceView {
		if by[name] == nil {
			by[name] = &serviceView{Service: name, Frontends: []string{}}
			counts[name] = count{map[model.Backend]bool{}, map[model.Backend]bool{}, map[model.Backend]bool{}}
		}
		return by[name]
	}
	for _, f := range s.SortedFrontends() {
		v := at(f.About.Service)
		v.Frontends = append(v.Frontends, f.Key.String())
	}
	for id, p := range s.Pools {
		at(id.Service)
		c := counts[id.Service]
		for _, b := range p.Backends {
			c.in[b] = true
			if b.Local {
				c.local[b] = true
			}
		}
		for _, b := range p.Draining {
			c.draining[b] = true
		}
	}
	out := []serviceView{}
	for _, name := range slices.Sorted(maps.Keys(by)) {
		v, c := by[name], counts[name]
		maps.DeleteFunc(c.draining, func(b model.Backend, _ bool) bool { return c.in[b] }) // drains from a local pool only
		v.Backends, v.Local, v.Draining = len(c.in), len(c.local), len(c.draining)
		out = append(out, *v)
	}
	return out
}
