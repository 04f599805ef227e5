package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

// Resolver knows why an endpoint is in or out.
type Resolver interface {
	Why(types.NamespacedName) []resolve.Choice
}

// Story answers a question in a few lines. Without a resolver (the tables were read from the kernel) it names the backends
// and no reasons.
func Story(s *model.State, why Resolver, q Question) string {
	p := q.packet(s.Node)
	d := s.Decide(p)
	t := &telling{state: s, packet: p, decision: d}
	t.say("packet", "%s%s -> %s/%s", end(p.Src), by(q.In), p.Dst, p.Proto)
	t.origin(q)
	if f := d.Frontend; f != nil {
		t.say("frontend", "%s, %s of %s%s", f.Key, f.About.Kind, model.PoolID{Service: f.About.Service, Port: f.About.Port}.PortName(), t.asNodePort())
		t.say("route", "%s", t.route())
	}
	t.say("answer", "%s", t.answer())
	t.endpoints(why)
	return t.b.String()
}

// telling is a story as it grows.
type telling struct {
	b        strings.Builder
	state    *model.State
	packet   model.Packet
	decision model.Decision
}

func (t *telling) say(what, format string, args ...any) {
	fmt.Fprintf(&t.b, "%-9s  %s\n", what, fmt.Sprintf(format, args...))
}

// end prints an address, and its port where there is one.
func end(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}

func by(in string) string {
	if in == "" {
		return ""
	}
	return " in by " + in
}

// origin says who the sender is taken for, and by what sign.
func (t *telling) origin(q Question) {
	n, src := t.state.Node, t.packet.Src.Addr()
	switch t.decision.Origin {
	case model.FromPod:
		sign := "it came in by " + t.packet.Interface
		for _, r := range n.Pods {
			if r.Contains(src) {
				sign = fmt.Sprintf("%s is in %s", src, r)
			}
		}
		t.say("origin", "pod: %s", sign)
	case model.FromNode:
		t.say("origin", "node: this node itself sends it")
	default:
		t.say("origin", "outside: %s is neither a pod nor this node", src)
	}
	if !n.Detects(src.Is6()) {
		t.say("", "nothing is configured that tells a pod from others (detectLocalMode, clusterCIDR)")
	} else if q.In == "" && len(n.PodInterfaces) > 0 && t.decision.Origin != model.FromPod {
		t.say("", "pods are known by their interface (%s): say which one it comes in by", strings.Join(n.PodInterfaces, ", "))
	}
}

// asNodePort says that the address itself is no Service's.
func (t *telling) asNodePort() string {
	if !t.decision.Frontend.Key.NodePort() {
		return ""
	}
	return fmt.Sprintf(" (%s is an address of this node)", t.packet.Dst.Addr())
}

// relayed tells whether a NodePort is asked for where the relay of localhost has its say.
func (t *telling) relayed() bool {
	to := t.packet.Dst.Addr()
	return t.decision.Frontend.Key.NodePort() && to.IsLoopback() && t.state.Node.RelaysLocalhost(to.Is6())
}

func (t *telling) route() string {
	r := t.decision.Route
	switch {
	case t.relayed() && t.packet.Proto != model.TCP:
		return "none on loopback addresses"
	case t.relayed():
		return fmt.Sprintf("by the relay of localhost, in the agent: pool %s, the client is hidden from the backend, refuse while it is empty", r.Pool)
	}
	sees := "the client is seen by the backend"
	if r.SNAT {
		sees = "the client is hidden from the backend"
	}
	otherwise := "refuse while it is empty"
	if r.Else == model.Drop {
		otherwise = "silence while it is empty"
	}
	return fmt.Sprintf("from %s: pool %s, %s, %s", t.decision.Origin, r.Pool, sees, otherwise)
}

// answer says what becomes of the packet.
func (t *telling) answer() string {
	d := t.decision
	switch d.Verdict {
	case model.Forward:
		return fmt.Sprintf("forward to %s, which sees %s%s", some(d.Backends), t.seen(), t.sticky())
	case model.Reject:
		how := "ICMP port unreachable"
		if t.packet.Proto == model.TCP {
			how = "a TCP reset"
		}
		return fmt.Sprintf("refuse with %s: %s", how, d.Why)
	case model.Drop:
		return "drop in silence: " + d.Why
	}
	return fmt.Sprintf("pass: %s; fairlead has no part in it", d.Why)
}

func some(bs []model.Backend) string {
	if len(bs) == 1 {
		return bs[0].Addr.String()
	}
	return fmt.Sprintf("one of %d backends", len(bs))
}

// seen says which source the backend sees. A backend that is chosen for its own packet would answer itself: its address
// is hidden in any case.
func (t *telling) seen() string {
	src := t.packet.Src.Addr()
	hairpin := slices.ContainsFunc(t.decision.Backends, func(b model.Backend) bool { return b.Addr.Addr() == src })
	switch {
	case t.decision.SNAT:
		return "an address of this node"
	case hairpin && len(t.decision.Backends) == 1:
		return "an address of this node: it is the client itself"
	case hairpin:
		return src.String() + ", or an address of this node where it is the client itself"
	}
	return src.String()
}

func (t *telling) sticky() string {
	sticky := t.state.Pools[t.decision.Route.Pool].Sticky
	if sticky == 0 {
		return ""
	}
	return fmt.Sprintf("; always the same for one client, until it stays away for %s", sticky)
}

// endpoints lists each endpoint of the port, the ones that are out too.
func (t *telling) endpoints(why Resolver) {
	f := t.decision.Frontend
	if f == nil || t.relayed() && t.packet.Proto != model.TCP {
		return
	}
	pool := t.state.Pools[t.decision.Route.Pool]
	var rows [][]string
	if why != nil {
		ns, name, _ := strings.Cut(f.About.Service, "/")
		for _, c := range why.Why(types.NamespacedName{Namespace: ns, Name: name}) {
			if c.Port == f.About.Port && c.Proto == f.Key.Proto && c.Addr.Addr().Is6() == f.Key.V6() {
				rows = append(rows, []string{mark(pool.Backends, c.Addr), c.Addr.String(), c.Node, c.Where(), c.Reason})
			}
		}
	} else {
		for _, b := range pool.Backends {
			rows = append(rows, []string{"->", b.String(), "", "", ""})
		}
		for _, b := range pool.Draining {
			rows = append(rows, []string{"", b.String(), "", "draining", ""})
		}
	}
	if len(rows) > 0 {
		t.b.WriteString("\n" + model.Grid([]string{"  ", "ENDPOINT", "NODE", "POOL", "REASON"}, rows))
	}
}

// mark points at the endpoints that may get the packet.
func mark(in []model.Backend, addr netip.AddrPort) string {
	if slices.ContainsFunc(in, func(b model.Backend) bool { return b.Addr == addr }) {
		return "->"
	}
	return ""
}
