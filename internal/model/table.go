package model

import (
	"fmt"
	"net/netip"
	"strings"
	"unicode/utf8"
)

// The columns of the tables that people read. A column that is empty in every row is left out when a [Grid] is printed.
var (
	FrontendColumns = []string{"FRONTEND", "SERVICE", "KIND", "POD", "NODE", "OUTSIDE", "ALLOW"}
	PoolColumns     = []string{"POOL", "BACKENDS", "DRAINING", "STICKY"}
	CheckColumns    = []string{"CHECK", "SERVICE", "READY V4", "READY V6"}
)

// maxListed bounds how many items one cell lists; the rest is counted. A screen holds no more, and files of expected
// tables stay readable.
const maxListed = 16

// Row is the line that people read about the frontend: get prints it, tests compare it.
//
// A route is printed as the scope of its pool, "+snat" when the client is hidden, and "/drop" when an empty pool means
// silence (without it: refusal). A pool that is not of the frontend's own Service port is printed in full.
func (f Frontend) Row() []string {
	row := []string{f.Key.String(), PoolID{Service: f.About.Service, Port: f.About.Port}.PortName(), f.kind()}
	for _, r := range f.Routes {
		row = append(row, r.cell(f))
	}
	return append(row, f.allow())
}

// kind adds what is not to be expected of the kind. A dataplane's Dump may know no kind: then it is "owned" or nothing.
func (f Frontend) kind() string {
	switch {
	case f.Owned == (f.About.Kind == ClusterIP):
		return string(f.About.Kind)
	case f.Owned:
		return strings.TrimSpace(string(f.About.Kind) + " owned")
	}
	return string(f.About.Kind) + " not owned"
}

func (f Frontend) allow() string {
	if f.Allow == nil {
		return ""
	}
	if len(f.Allow) == 0 {
		return "nobody"
	}
	return list(f.Allow, netip.Prefix.String)
}

func (r Route) cell(f Frontend) string {
	if r.Pool == (PoolID{}) { // read back from a kernel, which knows of no pool here
		return r.Else.String()
	}
	own := PoolID{f.About.Service, f.About.Port, f.Key.Proto, f.Key.V6(), r.Pool.Scope}
	s := r.Pool.Scope.String()
	if r.Pool != own {
		s = r.Pool.String()
	}
	if r.SNAT {
		s += "+snat"
	}
	if r.Else != Reject && r.Else != Pass {
		s += "/" + r.Else.String()
	}
	return s
}

// Row is the line that people read about the pool. A star marks the backends on this node.
func (p Pool) Row() []string {
	backends := list(p.Backends, Backend.String)
	if len(p.Backends) == 0 {
		backends = "none"
	}
	sticky := ""
	if p.Sticky > 0 {
		sticky = p.Sticky.String()
	}
	return []string{p.ID.String(), backends, list(p.Draining, Backend.String), sticky}
}

// String prints the address and port, with a star when the backend is on this node.
func (b Backend) String() string {
	if b.Local {
		return b.Addr.String() + "*"
	}
	return b.Addr.String()
}

// Row is the line that people read about the health-check node port.
func (c Check) Row() []string {
	return []string{fmt.Sprintf("*:%d/tcp", c.Port), c.Service, fmt.Sprint(c.Ready4), fmt.Sprint(c.Ready6)}
}

// Lines describes the node, one fact a line.
func (n Node) Lines() []string {
	name := n.Name
	if name == "" {
		name = "without a name"
	}
	ports := "all addresses"
	if n.NodePorts != nil {
		ports = orNone(list(n.NodePorts, netip.Prefix.String))
	}
	if n.LocalhostPort {
		ports += ", localhost too"
	}
	if len(n.LocalhostRelay) > 0 {
		ports += ", relayed from " + list(n.LocalhostRelay, netip.Addr.String)
	}
	pods := list(n.Pods, netip.Prefix.String)
	if len(n.PodInterfaces) > 0 {
		pods = strings.TrimSpace(pods + " interface " + strings.Join(n.PodInterfaces, " "))
	}
	lines := []string{
		"node       " + name,
		"addresses  " + orNone(list(n.Addrs, netip.Addr.String)),
		"nodeports  " + ports,
		"pods       " + orNone(pods),
	}
	if len(n.ServiceCIDRs) > 0 {
		lines = append(lines, "services   "+list(n.ServiceCIDRs, netip.Prefix.String))
	}
	return lines
}

// FrontendTable prints frontends, in the order given.
func FrontendTable(fs []Frontend) string { return table(FrontendColumns, fs, Frontend.Row) }

// PoolTable prints pools, in the order given.
func PoolTable(ps []Pool) string { return table(PoolColumns, ps, Pool.Row) }

// CheckTable prints health-check node ports, in the order given.
func CheckTable(cs []Check) string { return table(CheckColumns, cs, Check.Row) }

// Table prints all of the state: the node, then frontends, pools and health-check node ports, each sorted.
func (s *State) Table() string {
	parts := []string{strings.Join(s.Node.Lines(), "\n") + "\n"}
	for _, t := range []string{FrontendTable(s.SortedFrontends()), PoolTable(s.SortedPools()), CheckTable(s.SortedChecks())} {
		if t != "" {
			parts = append(parts, t)
		}
	}
	return strings.Join(parts, "\n")
}

// Lines names what the delta mentions, one a line: "full", "node", "+ 10.96.0.1:80/tcp" for what is set, "- ..." for what goes.
func (d Delta) Lines() []string {
	var out []string
	if d.Full {
		out = append(out, "full")
	}
	if d.Node != nil {
		out = append(out, "node")
	}
	for _, f := range d.Frontends {
		out = append(out, "+ "+f.Key.String())
	}
	for _, k := range d.GoneFrontends {
		out = append(out, "- "+k.String())
	}
	for _, p := range d.Pools {
		out = append(out, "+ "+p.ID.String())
	}
	for _, id := range d.GonePools {
		out = append(out, "- "+id.String())
	}
	for _, c := range d.Checks {
		out = append(out, "+ check "+c.Service)
	}
	for _, s := range d.GoneChecks {
		out = append(out, "- check "+s)
	}
	return out
}

func table[T any](columns []string, items []T, row func(T) []string) string {
	if len(items) == 0 {
		return ""
	}
	rows := make([][]string, len(items))
	for i, item := range items {
		rows[i] = row(item)
	}
	return Grid(columns, rows)
}

// Grid aligns rows under a header, two spaces apart, and leaves out the columns that are empty in every row.
func Grid(columns []string, rows [][]string) string {
	width := make([]int, len(columns))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range append([][]string{columns}, rows...) {
		line := ""
		for i, cell := range row {
			if width[i] > 0 {
				line += cell + strings.Repeat(" ", max(width[i], len(columns[i]))-utf8.RuneCountInString(cell)+2)
			}
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	return b.String()
}

func list[T any](items []T, text func(T) string) string {
	shown := make([]string, 0, min(len(items), maxListed+1))
	for i, item := range items {
		if i == maxListed {
			shown = append(shown, fmt.Sprintf("and %d more", len(items)-i))
			break
		}
		shown = append(shown, text(item))
	}
	return strings.Join(shown, " ")
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
