package iptables

import (
	"net/netip"

	"fairlead/internal/model"
)

var (
	loopback4 = netip.MustParsePrefix("127.0.0.0/8")
	loopback6 = netip.MustParsePrefix("::1/128")
)

// fixedID is the owner of the chains of a family that are there whatever Services there are.
type fixedID struct{ v6 bool }

// fixed renders them: what is referred to before what refers to it, the jumps from the built-in chains last.
func fixed(v6 bool, cfg Config, n *model.Node, checks []model.Check) []chain {
	nat := func(name string, rules ...Rule) chain { return chain{ChainID{v6, Nat, name}, rules} }
	filter := func(name string, rules ...Rule) chain { return chain{ChainID{v6, Filter, name}, rules} }
	mark := cfg.mark()
	out := []chain{
		nat(chainMarkMasq, Rule{Target: Target{Action: OrMark, Mark: mark}}),
		nat(chainPostrouting,
			Rule{Mark: mark, MarkMask: mark, NotMark: true, Target: Target{Action: Return}},
			Rule{Target: Target{Action: XorMark, Mark: mark}},
			Rule{Comment: "kubernetes service traffic requiring SNAT", Target: Target{Action: Masquerade}}),
		nat(chainNotPods, notPodsChain(n, v6)...),
		filter(chainRefuse,
			Rule{Proto: model.TCP, Target: Target{Action: RejectReset}},
			Rule{Target: Target{Action: RejectPort}}),
		filter(chainForward, forward(cfg, mark)...),
		filter(chainNodePorts, healthPorts(checks)...),
		filter(chainExternal, gates(n, v6, chainDenyPorts)...),
	}
	if !v6 {
		out = append(out, filter(chainFirewall, Rule{Comment: "block incoming localnet connections",
			Src: loopback4, NotSrc: true, Dst: loopback4,
			State: StateRelated | StateEstablished | StateDNAT, NotState: true, Target: Target{Action: DropIt}}))
	}
	return append(out, jumps(v6)...)
}

// notPodsChain marks what none of the pods' ranges and interfaces sent.
func notPodsChain(n *model.Node, v6 bool) []Rule {
	rules := podRules(n, v6, Rule{Target: Target{Action: Return}})
	return append(rules, Rule{Target: markMasq})
}

func forward(cfg Config, mark uint32) []Rule {
	var rules []Rule
	if !cfg.KeepInvalid {
		// A late packet of a translated flow, no longer known to conntrack, would leave with the wrong source address and
		// reset the flow (kubernetes issue 74839).
		rules = append(rules, Rule{State: StateInvalid, NFAcct: cfg.invalidCounter(), Target: Target{Action: DropIt}})
	}
	return append(rules,
		Rule{Comment: "kubernetes forwarding rules", Mark: mark, MarkMask: mark, Target: Target{Action: Accept}},
		Rule{Comment: "kubernetes forwarding conntrack rule", State: StateRelated | StateEstablished, Target: Target{Action: Accept}})
}

func healthPorts(checks []model.Check) []Rule {
	var rules []Rule
	for _, c := range checks {
		rules = append(rules, Rule{Comment: c.Service + " health check node port", Proto: model.TCP, Port: c.Port, Target: Target{Action: Accept}})
	}
	return rules
}

// gates lead packets for the node's NodePort addresses to a chain of ports. Loopback addresses are for the node alone:
// with route_localnet on, a neighbour could send to them (CVE-2020-8558).
func gates(n *model.Node, v6 bool, to string) []Rule {
	rule := func(r Rule) Rule {
		r.Comment = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
		r.Target = Target{Action: Jump, Chain: to}
		return r
	}
	loop := loopback4
	if v6 {
		loop = loopback6
	}
	if n.NodePorts == nil {
		rules := []Rule{rule(Rule{Dst: loop, NotDst: true, DstLocal: true})}
		if !v6 && n.LocalhostPort {
			rules = append(rules, rule(Rule{Src: loop, Dst: loop}))
		}
		return rules
	}
	var rules []Rule
	for _, a := range n.Addrs {
		if a.Is6() == v6 && !a.IsLoopback() && n.TakesNodePort(a) {
			rules = append(rules, rule(Rule{Dst: host(a)}))
		}
	}
	for _, p := range n.NodePorts {
		if dst, ok := narrower(loop, p); !v6 && ok && n.LocalhostPort {
			rules = append(rules, rule(Rule{Src: loop, Dst: dst}))
		}
	}
	return rules
}

// unassigned drops what is sent to an address kept for ClusterIPs that no Service has; what a Service has was met before. An
// address of the node is the node's, and what was translated goes to a backend, wherever that is.
func unassigned(n *model.Node, v6 bool) []Rule {
	var rules []Rule
	for _, p := range n.ServiceCIDRs {
		if p.Addr().Is6() == v6 {
			rules = append(rules,
				Rule{Comment: "addresses of this node are no ClusterIPs", Dst: p, DstLocal: true, Target: Target{Action: Return}},
				Rule{Comment: "Drop traffic to unallocated ClusterIPs", Dst: p, State: StateDNAT, NotState: true, Target: Target{Action: DropIt}})
		}
	}
	return rules
}

// localhostOnly is the twin of a NodePort's rule that counts what comes by 127.0.0.0/8
// (kubeproxy_iptables_localhost_nodeports_accepted_packets_total).
func localhostOnly(r Rule) Rule {
	r.Dst, r.NFAcct = loopback4, acctLocalhost
	return r
}

// jumps are our rules in the built-in chains, from the top.
func jumps(v6 bool) []chain {
	to := func(name, comment string, state CTState) Rule {
		return Rule{Comment: comment, State: state, Target: Target{Action: Jump, Chain: name}}
	}
	const (
		portals  = "kubernetes service portals"
		external = "kubernetes externally-visible service portals"
		lbfw     = "kubernetes load balancer firewall"
	)
	guard := to(chainFirewall, "", 0)
	// A frontend at an address of the node goes before a NodePort of the same number, here as in the nat table.
	input := []Rule{to(chainProxyFW, lbfw, StateNew), to(chainNodePorts, "kubernetes health check service ports", 0),
		to(chainServices, portals, StateNew), to(chainExternal, external, StateNew)}
	output := []Rule{to(chainProxyFW, lbfw, StateNew), to(chainServices, portals, StateNew)}
	if !v6 {
		input, output = append([]Rule{guard}, input...), append([]Rule{guard}, output...)
	}
	return []chain{
		{ChainID{v6, Filter, "INPUT"}, input},
		{ChainID{v6, Filter, "FORWARD"}, []Rule{to(chainProxyFW, lbfw, StateNew), to(chainForward, "kubernetes forwarding rules", 0),
			to(chainServices, portals, StateNew)}},
		{ChainID{v6, Filter, "OUTPUT"}, output},
		{ChainID{v6, Nat, "PREROUTING"}, []Rule{to(chainServices, portals, 0)}},
		{ChainID{v6, Nat, "OUTPUT"}, []Rule{to(chainServices, portals, 0)}},
		{ChainID{v6, Nat, "POSTROUTING"}, []Rule{to(chainPostrouting, "kubernetes postrouting rules", 0)}},
	}
}
