package iptables

import (
	"net/netip"
	"slices"

	"fairlead/internal/model"
)

// chain is a chain as it should be.
type chain struct {
	ID    ChainID
	Rules []Rule
}

// serviceID is one Service port of one family: what there is one set of chains for.
type serviceID struct {
	Service, Port string
	Proto         model.Proto
	V6            bool
}

func serviceOf(p model.PoolID) serviceID {
	return serviceID{Service: p.Service, Port: p.Port, Proto: p.Proto, V6: p.V6}
}

func (id serviceID) pool(scope model.Scope) model.PoolID {
	return model.PoolID{Service: id.Service, Port: id.Port, Proto: id.Proto, V6: id.V6, Scope: scope}
}

// service is everything that the chains of one Service port follow from.
type service struct {
	id        serviceID
	label     string // "ns/name:port", at the head of comments
	frontends []model.Frontend
	pools     [2]model.Pool // by Scope
	node      *model.Node
	terse     bool // no comments on the rules of single endpoints
}

func (s *service) pool(r model.Route) model.Pool { return s.pools[r.Pool.Scope] }

func (s *service) empty(r model.Route) bool { return len(s.pool(r).Backends) == 0 }

// served tells whether any origin finds a backend at f.
func (s *service) served(f model.Frontend) bool {
	return slices.ContainsFunc(f.Routes[:], func(r model.Route) bool { return !s.empty(r) })
}

// direct tells whether f leads straight to its pool, as a ClusterIP does: one pool for all origins, and masquerade (at the
// head of the pool's chain) for all, for all but pods, or for none.
func direct(f model.Frontend) bool {
	pod, node, out := f.Routes[model.FromPod], f.Routes[model.FromNode], f.Routes[model.FromOutside]
	return f.Owned && pod.Pool == node.Pool && node.Pool == out.Pool && node.SNAT == out.SNAT && (out.SNAT || !pod.SNAT)
}

// entry is the chain that packets to f go to.
func (s *service) entry(f model.Frontend) string {
	if f.Allow != nil {
		return s.firewallChain(f)
	}
	return s.routeChain(f)
}

// routeChain is the chain that sends each origin its way. Frontends with the same routes share it; the first kind has the
// name that kube-proxy gives it.
func (s *service) routeChain(f model.Frontend) string {
	if direct(f) {
		return poolChain(f.Routes[0].Pool)
	}
	like := func(g model.Frontend) bool { return !direct(g) && g.Routes == f.Routes }
	return prefixExternal + s.shared(like, func(g model.Frontend) bool { return !direct(g) })
}

// firewallChain is the chain that lets in the allowed sources of f.
func (s *service) firewallChain(f model.Frontend) string {
	like := func(g model.Frontend) bool {
		return g.Allow != nil && slices.Equal(g.Allow, f.Allow) && g.Routes == f.Routes
	}
	return prefixFirewall + s.shared(like, func(g model.Frontend) bool { return g.Allow != nil })
}

// shared is the hash in the name of a chain that all frontends like one another share: of the Service port alone for the
// first of those that have such a chain, of the frontend too for others.
func (s *service) shared(like, any func(model.Frontend) bool) string {
	name := s.id.pool(model.Cluster).PortName()
	i, first := slices.IndexFunc(s.frontends, like), slices.IndexFunc(s.frontends, any)
	if i <= first {
		return hash(name, s.id.Proto.String())
	}
	return hash(name, s.id.Proto.String(), s.frontends[i].Key.String())
}

func (s *service) nat(name string) ChainID { return ChainID{V6: s.id.V6, Table: Nat, Name: name} }

// chains renders all chains of the Service port, what is referred to before what refers to it.
func (s *service) chains() []chain {
	if len(s.frontends) == 0 {
		return nil
	}
	var out []chain
	for _, p := range s.pools {
		for _, b := range p.Backends {
			if p.ID.Scope == model.Cluster || !s.inCluster(b) {
				out = append(out, chain{s.nat(endpointChain(p.ID, b.Addr)), s.endpoint(p, b)})
			}
		}
		if len(p.Backends) > 0 {
			out = append(out, chain{s.nat(poolChain(p.ID)), append(s.heads(p.ID), s.spread(p)...)})
		}
	}
	once := func(name string, rules func() []Rule) {
		id := s.nat(name)
		if !slices.ContainsFunc(out, func(c chain) bool { return c.ID == id }) {
			out = append(out, chain{id, rules()})
		}
	}
	for _, f := range s.frontends {
		if s.served(f) && !direct(f) {
			once(s.routeChain(f), func() []Rule { return s.routes(f.Routes) })
		}
	}
	for _, f := range s.frontends {
		if s.served(f) && f.Allow != nil {
			once(s.firewallChain(f), func() []Rule { return s.ranges(f) })
		}
	}
	return out
}

// inCluster tells whether a local backend is in the cluster pool too, and so has its chain already.
func (s *service) inCluster(b model.Backend) bool {
	_, found := slices.BinarySearchFunc(s.pools[model.Cluster].Backends, b, func(x, y model.Backend) int { return x.Addr.Compare(y.Addr) })
	return found
}

// endpoint hides a backend that calls its own Service behind the node (hairpin), and sends everything to it.
func (s *service) endpoint(p model.Pool, b model.Backend) []Rule {
	comment := s.label
	if s.terse {
		comment = ""
	}
	to := Rule{Comment: comment, Proto: s.id.Proto, Target: Target{Action: DNAT, To: b.Addr}}
	if p.Sticky > 0 {
		to.Recent = Recent{List: endpointChain(p.ID, b.Addr), Set: true}
	}
	return []Rule{{Comment: comment, Src: host(b.Addr.Addr()), Target: markMasq}, to}
}

// heads are the masquerade rules of the frontends that lead straight to the pool.
func (s *service) heads(id model.PoolID) []Rule {
	var rules []Rule
	for _, f := range s.frontends {
		if !direct(f) || f.Routes[0].Pool != id {
			continue
		}
		r := s.to(f, " cluster IP")
		r.Target = markMasq
		switch {
		case f.Routes[model.FromPod].SNAT:
			rules = append(rules, r)
		case f.Routes[model.FromOutside].SNAT:
			rules = append(rules, s.notPods(r))
		}
	}
	return rules
}

// spread picks a backend: the one the client is used to, otherwise each with the same chance.
func (s *service) spread(p model.Pool) []Rule {
	var rules []Rule
	if p.Sticky > 0 {
		for _, b := range p.Backends {
			sep := endpointChain(p.ID, b.Addr)
			rules = append(rules, Rule{Comment: s.leads(b),
				Recent: Recent{List: sep, Since: p.Sticky}, Target: Target{Action: Jump, Chain: sep}})
		}
	}
	for i, b := range p.Backends {
		rules = append(rules, Rule{Comment: s.leads(b), Chance: chance(len(p.Backends) - i),
			Target: Target{Action: Jump, Chain: endpointChain(p.ID, b.Addr)}})
	}
	return rules
}

func (s *service) leads(b model.Backend) string {
	if s.terse {
		return ""
	}
	return s.label + " -> " + b.Addr.String()
}

// chance is one in n as xt_statistic counts it, in 2^31 parts; 0 for certain (linux/netfilter/xt_statistic.h).
func chance(n int) uint32 {
	if n == 1 {
		return 0
	}
	return uint32((1<<31 + n/2) / n)
}

// letGo ends the way of a packet through the nat table, untranslated, so that the filter table meets it: it must not go on
// to a NodePort of the same number.
var letGo = Target{Action: Accept}

// routes sends each origin its way. An origin whose pool is empty is let go.
func (s *service) routes(routes [3]model.Route) []Rule {
	pod, node, out := routes[model.FromPod], routes[model.FromNode], routes[model.FromOutside]
	pod.Else, node.Else, out.Else = 0, 0, 0
	detects := s.node.Detects(s.id.V6)
	if node == out && (pod == out || !detects) {
		return s.take(Rule{}, out, "traffic for ")
	}
	var rules []Rule
	if detects {
		for _, m := range s.pods(Rule{}) {
			rules = append(rules, s.take(m, pod, "pod traffic for ")...)
		}
	}
	if node != out {
		rules = append(rules, s.take(Rule{SrcLocal: true}, node, "LOCAL traffic for ")...)
	}
	return append(rules, s.take(Rule{}, out, "traffic for ")...)
}

// take sends what m matches the way of r.
func (s *service) take(m Rule, r model.Route, what string) []Rule {
	what += s.label + " external destinations"
	if s.empty(r) {
		m.Comment, m.Target = what, letGo
		return []Rule{m}
	}
	var rules []Rule
	if r.SNAT {
		m.Comment, m.Target = "masquerade "+what, markMasq
		rules = append(rules, m)
	}
	m.Comment, m.Target = what, Target{Action: Jump, Chain: poolChain(r.Pool)}
	return append(rules, m)
}

// ranges lets the allowed sources through; the rest is not translated, and dropped by KUBE-PROXY-FIREWALL.
func (s *service) ranges(f model.Frontend) []Rule {
	var rules []Rule
	for _, p := range f.Allow {
		rules = append(rules, Rule{Comment: s.label + " loadbalancer IP", Src: p, Target: Target{Action: Jump, Chain: s.routeChain(f)}})
	}
	return append(rules, Rule{Comment: "other traffic to " + s.label + " will be dropped by " + chainProxyFW, Target: letGo})
}

// dispatch is the rule that leads packets for f to its chains, or lets them go when nobody is served.
func (s *service) dispatch(f model.Frontend) Rule {
	r := s.to(f, kindWords[f.About.Kind])
	if r.Target = letGo; s.served(f) {
		r.Target = Target{Action: Jump, Chain: s.entry(f)}
	}
	return r
}

var kindWords = map[model.Kind]string{
	model.ClusterIP: " cluster IP", model.ExternalIP: " external IP", model.LoadBalancer: " loadbalancer IP",
}

// refusals are the filter rules for f: packets still addressed to it there were not translated, since their origin has no
// backend, or since their source is not allowed.
func (s *service) refusals(f model.Frontend) []Rule {
	left := s.leftovers(f)
	if f.Allow == nil {
		return left
	}
	var rules []Rule
	for _, r := range left {
		for _, p := range f.Allow {
			if src, ok := narrower(r.Src, p); ok {
				allowed := r
				allowed.Src = src
				rules = append(rules, allowed)
			}
		}
	}
	stop := s.to(f, " traffic not accepted by "+s.firewallChain(f))
	stop.Target = Target{Action: DropIt}
	return append(rules, stop)
}

func (s *service) leftovers(f model.Frontend) []Rule {
	var verdicts [3]model.Verdict
	seen := map[model.Verdict]bool{}
	for _, o := range model.Origins {
		verdicts[o] = model.Forward
		if r := f.Routes[o]; s.empty(r) && (o != model.FromPod || s.node.Detects(s.id.V6)) {
			verdicts[o] = r.Else
			seen[r.Else] = true
		}
	}
	refuse := func(o model.Origin) Rule { return s.refuse(f, verdicts[o]) }
	if len(seen) == 1 {
		i := slices.IndexFunc(verdicts[:], func(v model.Verdict) bool { return v != model.Forward })
		return []Rule{refuse(model.Origin(i))}
	}
	var rules []Rule
	if verdicts[model.FromPod] != model.Forward {
		rules = s.pods(refuse(model.FromPod))
	}
	if verdicts[model.FromNode] != model.Forward {
		r := refuse(model.FromNode)
		r.SrcLocal = true
		rules = append(rules, r)
	}
	if verdicts[model.FromOutside] != model.Forward {
		rules = append(rules, refuse(model.FromOutside))
	}
	return rules
}

func (s *service) refuse(f model.Frontend, v model.Verdict) Rule {
	if v == model.Drop {
		r := s.to(f, " has no local endpoints")
		r.Target = Target{Action: DropIt}
		return r
	}
	r := s.to(f, " has no endpoints")
	r.Target = refusal(f.Key.Proto)
	return r
}

// refusal answers TCP with a reset: an ICMP error is not always heard by a TCP client (for IPv6 it costs a second when the
// socket is busy).
func refusal(p model.Proto) Target {
	if p == model.TCP {
		return Target{Action: RejectReset}
	}
	return Target{Action: RejectPort}
}

// to matches packets addressed to f; in a port chain the address has been seen to before.
func (s *service) to(f model.Frontend, what string) Rule {
	r := Rule{Comment: s.label + what, Proto: f.Key.Proto, Port: f.Key.Port}
	if !f.Key.NodePort() {
		r.Dst = host(f.Key.IP)
	}
	return r
}

var markMasq = Target{Action: Jump, Chain: chainMarkMasq}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// narrower is the part that two prefixes share; the zero prefix is everything.
func narrower(p, q netip.Prefix) (netip.Prefix, bool) {
	switch {
	case !p.IsValid():
		return q, true
	case !p.Overlaps(q):
		return p, false
	case p.Bits() > q.Bits():
		return p, true
	}
	return q, true
}

// pods makes one rule for each way in which a pod is known.
func (s *service) pods(r Rule) []Rule { return podRules(s.node, s.id.V6, r) }

func podRules(n *model.Node, v6 bool, r Rule) []Rule {
	var rules []Rule
	for _, p := range n.Pods {
		if p.Addr().Is6() == v6 {
			r := r
			r.Src = p
			rules = append(rules, r)
		}
	}
	for _, i := range n.PodInterfaces {
		r := r
		r.In = i
		rules = append(rules, r)
	}
	return rules
}

// notPods makes r, whose action is to masquerade, apply to what no pod sent.
func (s *service) notPods(r Rule) Rule {
	ways := s.pods(Rule{})
	if len(ways) != 1 {
		r.Target = Target{Action: Jump, Chain: chainNotPods}
		return r
	}
	r.Src, r.In = ways[0].Src, ways[0].In
	r.NotSrc, r.NotIn = r.Src.IsValid(), r.In != ""
	return r
}
