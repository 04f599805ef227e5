package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/model"
)

// Dump reads the rules back into frontends and pools; see engine.Dataplane. It understands kube-proxy's rules as well,
// since they have the same chains. Rules do not tell: what an origin would meet if its pool were empty, which pool an
// origin without backends looks to, the Local mark of a backend in the cluster pool, Draining, and the node itself, but for its ServiceCIDRs.
func (d *Dataplane) Dump(ctx context.Context) (*model.State, error) {
	s := model.NewState()
	held := map[ChainID]content{}
	before, err := d.be.generation()
	if err != nil {
		return nil, err
	}
	for _, v6 := range d.families() {
		chains, err := readAll(ctx, d.be, v6)
		if err != nil {
			return nil, fmt.Errorf("read the rules: %w", err)
		}
		r := reader{v6: v6, chains: chains, state: s}
		r.nat()
		r.filter()
		for id, f := range chains {
			hold(held, id, f)
		}
	}
	if !d.loaded { // the first Apply need not read it all again
		d.dumped = dumped{before, held}
	}
	return s, nil
}

// reader turns the chains of one family into nouns.
type reader struct {
	v6     bool
	chains map[ChainID]found
	state  *model.State
}

func (r *reader) rules(t Table, name string) []Rule { return r.chains[ChainID{r.v6, t, name}].Rules }

// entries yields the rules for single destinations below a root: those that do not lead further into the tree.
func (r *reader) entries(t Table, name string, depth int, visit func(Rule)) {
	for _, rule := range r.rules(t, name) {
		to := ChainID{r.v6, t, rule.Target.Chain}
		switch {
		case rule.Target.Chain != "" && isBranch(to) && depth < 64:
			r.entries(t, to.Name, depth+1, visit)
		case rule.Dst.IsValid() && !rule.Dst.IsSingleIP(): // counts what comes by localhost, beside the rule for all
		case rule.Proto != 0 && rule.Port != 0 && rule.PortEnd <= rule.Port, rule.Target.Chain == chainRefuse:
			visit(rule)
		}
	}
}

func (r *reader) nat() {
	for _, root := range []string{chainServices, chainNodePorts} {
		r.entries(Nat, root, 0, func(rule Rule) { r.frontend(rule) })
	}
	names := r.poolNames()
	for id := range r.chains {
		if id.Table == Nat && !isBranch(id) && (strings.HasPrefix(id.Name, prefixService) || strings.HasPrefix(id.Name, prefixLocal)) {
			if p, ok := r.pool(id.Name, names); ok {
				r.state.Pools[p.ID] = p
			}
		}
	}
}

// poolNames says which pool has which chain, by the frontends: large tables do without comments on each endpoint.
func (r *reader) poolNames() map[string]model.PoolID {
	names := map[string]model.PoolID{}
	for _, f := range r.state.Frontends {
		for _, scope := range []model.Scope{model.Cluster, model.Local} {
			id := model.PoolID{Service: f.About.Service, Port: f.About.Port, Proto: f.Key.Proto, V6: r.v6, Scope: scope}
			names[poolChain(id)] = id
		}
	}
	return names
}

// pool reads the chain that spreads over endpoints.
func (r *reader) pool(name string, names map[string]model.PoolID) (model.Pool, bool) {
	p := model.Pool{ID: model.PoolID{V6: r.v6, Scope: scopeOf(name)}}
	known, named := names[name]
	for _, rule := range r.rules(Nat, name) {
		if !strings.HasPrefix(rule.Target.Chain, prefixEndpoint) {
			continue
		}
		if rule.Recent.List != "" {
			p.Sticky = rule.Recent.Since
			continue
		}
		for _, e := range r.rules(Nat, rule.Target.Chain) {
			if e.Target.Action == DNAT {
				p.ID.Proto = e.Proto
				p.Backends = append(p.Backends, model.Backend{Addr: e.Target.To, Local: p.ID.Scope == model.Local})
				p.ID.Service, p.ID.Port = parseLabel(e.Comment)
			}
		}
	}
	if named {
		p.ID = known
	}
	slices.SortFunc(p.Backends, model.Backend.Compare)
	return p, len(p.Backends) > 0 && p.ID.Service != ""
}

func scopeOf(chain string) model.Scope {
	if strings.HasPrefix(chain, prefixLocal) {
		return model.Local
	}
	return model.Cluster
}

// parseLabel parts "ns/name:port".
func parseLabel(s string) (service, port string) {
	service, port, _ = strings.Cut(s, ":")
	return service, port
}

// keyOf is the frontend that a rule is for, as far as the rule tells.
func (r *reader) keyOf(rule Rule) model.Key {
	k := model.Key{IP: model.Unspecified(r.v6), Port: rule.Port, Proto: rule.Proto}
	if rule.Dst.IsValid() {
		k.IP = rule.Dst.Addr()
	}
	return k
}

// aboutOf reads the comment: the label of the Service port, then words for the kind.
func aboutOf(comment string, k model.Key) (model.About, bool) {
	label, words, _ := strings.Cut(comment, " ")
	a := model.About{Kind: model.NodePort}
	a.Service, a.Port = parseLabel(label)
	for kind, w := range kindWords {
		if w == " "+words {
			a.Kind = kind
		}
	}
	return a, strings.Contains(a.Service, "/") && (a.Kind != model.NodePort || k.NodePort() || strings.HasPrefix(words, "has no "))
}

func (r *reader) frontend(rule Rule) {
	k := r.keyOf(rule)
	about, ok := aboutOf(rule.Comment, k)
	if !ok || rule.Target.Action != Jump {
		return
	}
	f := model.Frontend{Key: k, About: about}
	to := rule.Target.Chain
	if strings.HasPrefix(to, prefixFirewall) {
		f.Allow = []netip.Prefix{}
		for _, a := range r.rules(Nat, to) {
			if a.Target.Action == Jump {
				f.Allow, to = append(f.Allow, a.Src), a.Target.Chain
			}
		}
	}
	f.Routes = r.routes(to, f)
	r.state.Frontends[k] = f
}

// routes reads a chain that sends each origin its way, or the head of a pool's chain.
func (r *reader) routes(name string, f model.Frontend) [3]model.Route {
	var routes [3]model.Route
	pool := func(chain string) model.PoolID {
		return model.PoolID{Service: f.About.Service, Port: f.About.Port, Proto: f.Key.Proto, V6: r.v6, Scope: scopeOf(chain)}
	}
	if !strings.HasPrefix(name, prefixExternal) {
		for o := range routes {
			routes[o].Pool = pool(name)
		}
		for _, rule := range r.rules(Nat, name) {
			if rule.Target.Chain != chainMarkMasq && rule.Target.Chain != chainNotPods || r.keyOf(rule) != f.Key {
				continue
			}
			for _, o := range r.origins(rule) {
				routes[o].SNAT = true
			}
		}
		return routes
	}
	var done [3]bool
	for _, rule := range r.rules(Nat, name) {
		for _, o := range r.origins(rule) {
			switch {
			case done[o]:
			case rule.Target.Chain == chainMarkMasq:
				routes[o].SNAT = true
			default:
				done[o] = true
				if rule.Target.Action == Jump {
					routes[o].Pool = pool(rule.Target.Chain)
				}
			}
		}
	}
	return routes
}

// origins tells whom a rule is for.
func (r *reader) origins(rule Rule) []model.Origin {
	switch {
	case rule.NotSrc, rule.NotIn, rule.Target.Chain == chainNotPods:
		if rule.SrcLocal {
			return []model.Origin{model.FromNode}
		}
		return []model.Origin{model.FromNode, model.FromOutside}
	case rule.Src.IsValid(), rule.In != "":
		return []model.Origin{model.FromPod}
	case rule.SrcLocal:
		return []model.Origin{model.FromNode}
	}
	return model.Origins[:]
}

// filter reads who is refused, which addresses are a Service's alone, and the health-check ports.
func (r *reader) filter() {
	var owned []netip.Addr
	for _, root := range []string{chainServices, chainProxyFW, chainExternal, chainDenyPorts} {
		r.entries(Filter, root, 0, func(rule Rule) {
			if rule.Target.Chain == chainRefuse {
				owned = append(owned, rule.Dst.Addr())
				return
			}
			r.refusal(root, rule)
		})
	}
	for k, f := range r.state.Frontends {
		if slices.Contains(owned, k.IP) {
			f.Owned = true
			r.state.Frontends[k] = f
		}
	}
	for _, rule := range r.rules(Filter, chainServices) {
		if rule.Target.Action == DropIt && rule.Dst.IsValid() && rule.Proto == 0 {
			r.state.Node.ServiceCIDRs = append(r.state.Node.ServiceCIDRs, rule.Dst)
		}
	}
	for _, rule := range r.rules(Filter, chainNodePorts) {
		if service, ok := strings.CutSuffix(rule.Comment, " health check node port"); ok {
			r.state.Checks[service] = model.Check{Service: service, Port: rule.Port}
		}
	}
}

// refusal reads a rule for what was not translated. A frontend that no origin is served at stands here only.
func (r *reader) refusal(root string, rule Rule) {
	k := r.keyOf(rule)
	f, known := r.state.Frontends[k]
	if !known {
		label, _, _ := strings.Cut(rule.Comment, " ")
		f.Key = k
		if f.About.Service, f.About.Port = parseLabel(label); !strings.Contains(f.About.Service, "/") {
			return
		}
	}
	served := slices.ContainsFunc(f.Routes[:], func(r model.Route) bool { return r.Pool != model.PoolID{} })
	origins := r.origins(rule)
	if root == chainProxyFW {
		origins = model.Origins[:]
		if f.Allow == nil {
			f.Allow = []netip.Prefix{}
		}
		if rule.Src.IsValid() && !served && !slices.Contains(f.Allow, rule.Src) {
			f.Allow = append(f.Allow, rule.Src)
		}
	}
	for _, o := range origins {
		if f.Routes[o].Pool == (model.PoolID{}) && !strings.Contains(rule.Comment, " traffic not accepted by ") {
			f.Routes[o].Else = verdictOf(rule.Target.Action)
		}
	}
	r.state.Frontends[k] = f
}

func verdictOf(a Action) model.Verdict {
	switch a {
	case DropIt:
		return model.Drop
	case RejectPort, RejectReset:
		return model.Reject
	}
	return model.Pass
}
