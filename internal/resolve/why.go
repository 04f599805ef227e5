package resolve

import (
	"net/netip"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// Choice is what became of one endpoint of one port of a Service.
type Choice struct {
	Port  string // name of the Service port, may be empty
	Proto model.Proto
	Addr  netip.AddrPort
	Node  string // where it runs, if that is known

	InCluster, InLocal bool // it takes new connections, in the pools that are in use
	Draining           bool // it keeps the connections it has and gets no new ones
	Reason             string
}

// Where says in a word or two what became of the endpoint.
func (c Choice) Where() string {
	switch {
	case c.InCluster && c.InLocal:
		return "cluster, local"
	case c.InCluster:
		return "cluster"
	case c.InLocal:
		return "local"
	case c.Draining:
		return "draining"
	}
	return "out"
}

// ChoiceColumns are the columns of [Choice.Row].
var ChoiceColumns = []string{"PORT", "ENDPOINT", "NODE", "POOL", "REASON"}

// Row is the line that people read about the endpoint, for [model.Grid].
func (c Choice) Row() []string {
	return []string{strings.TrimPrefix(c.Port+"/"+c.Proto.String(), "/"), c.Addr.String(), c.Node, c.Where(), c.Reason}
}

// Why tells for each endpoint of a Service whether it is used, and the reason in a sentence: ports in the order of the
// Service, IPv4 first, by address. It answers for the objects as they are known now, also before the next Delta.
func (r *Resolver) Why(nn types.NamespacedName) []Choice {
	s := r.services[nn.String()]
	if s == nil || s.facts == nil {
		return nil
	}
	res := resolution{here: &r.here, world: &r.claims, s: s, notes: &notes{}}
	res.run()
	var out []Choice
	for i, c := range res.chosen {
		if c == nil {
			continue
		}
		for j := range c.all {
			e := &c.all[j]
			in := Choice{Port: s.facts.ports[i/2].name, Proto: s.facts.ports[i/2].proto, Addr: e.at, Node: e.site.Value().node, Reason: r.here.reason(c, e)}
			in.InCluster = e.inCluster && c.used[model.Cluster]
			in.InLocal = e.inLocal && c.used[model.Local]
			in.Draining = e.serving && e.twin == nil && !in.InCluster && !in.InLocal
			out = append(out, in)
		}
	}
	return out
}

// reason says why an endpoint is in the pools that are used, or out of them.
func (h *here) reason(c *chosen, e *endpoint) string {
	if e.twin != nil {
		if e.twin == e.slice {
			return "another entry of slice " + e.slice.name + " speaks for this address"
		}
		return "slice " + e.twin.name + " speaks for this address"
	}
	words := []string{condition(e)}
	if e.usable() {
		if c.used[model.Cluster] {
			words = append(words, h.clusterReason(c, e)...)
		}
		if c.used[model.Local] {
			words = append(words, localReason(c, e)...)
		}
	}
	return strings.Join(words, "; ")
}

func condition(e *endpoint) string {
	switch {
	case e.ready:
		return "ready"
	case e.terminating && e.serving:
		return "terminating, but serving"
	case e.terminating:
		return "terminating"
	case e.serving:
		return "serving, but not ready"
	}
	return "not ready"
}

func (h *here) clusterReason(c *chosen, e *endpoint) []string {
	if e.fading() && !c.fading {
		return []string{"others are ready"}
	}
	why := h.topologyReason(c.choice, e)
	if e.fading() {
		return append([]string{"no endpoint is ready"}, why...)
	}
	return why
}

func (h *here) topologyReason(c choice, e *endpoint) []string {
	switch c.by {
	case byKey:
		if e.inCluster {
			return []string{"fits topology key " + c.key}
		}
		return []string{"others fit topology key " + c.key}
	case byNoKey:
		return []string{"no topology key fits any endpoint"}
	case byNodeHint:
		if e.inCluster {
			return []string{"hinted for this node"}
		}
		return []string{"hinted for " + hintedFor(e.site.Value(), c.by)}
	case byZoneHint:
		if e.inCluster {
			return []string{"hinted for zone " + h.zone}
		}
		return []string{"hinted for " + hintedFor(e.site.Value(), c.by) + ", this is " + h.zone}
	}
	return nil
}

func hintedFor(s site, by topology) string {
	what := "zone "
	if by == byNodeHint {
		what = "node "
	}
	return what + strings.Join(s.hint(by).names(), " ")
}

func localReason(c *chosen, e *endpoint) []string {
	switch {
	case !e.local:
		return []string{"not on this node"}
	case e.inLocal && e.fading():
		return []string{"on this node, where none is ready"}
	case e.inLocal:
		return []string{"on this node"}
	}
	return []string{"on this node, where others are ready"}
}
