package nftables

import (
	"bytes"
	"net/netip"
	"strings"

	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// The chains that are there whatever Services there are, beside chainRefuse.
const (
	chainPrerouting  = "prerouting"
	chainOutput      = "output"
	chainPostrouting = "postrouting"
	chainForward     = "forward"
	chainInput       = "input"
	chainUnclaimed   = "unclaimed"
	chainLocalhost   = "localhost"
)

// baseChains are those that packets come to by themselves, if they are there.
var baseChains = map[string]*hook{
	chainPrerouting: hookPrerouting, chainOutput: hookOutput, chainPostrouting: hookPostrouting, chainForward: hookForward, chainInput: hookInput,
	chainArriving: hookArriving, chainEntering: hookEntering, chainEntered: hookEntered, chainLeaving: hookLeaving, chainLeft: hookLeft,
}

// isOurs tells whether we may want a chain of this name, other than those of baseChains.
func isOurs(name string) bool {
	switch name {
	case chainRefuse, chainUnclaimed, chainLocalhost, chainDivert, chainStray, chainTaken, setFromPod.String(), setFromNode.String(), setFromOutside.String():
		return true
	}
	_, ok := targetNamed(name)
	return ok
}

// The counters that rules add to.
const (
	counterInvalid       = "invalid-dropped"
	counterLocalhostUDP  = "localhost-refused-udp"
	counterLocalhostSCTP = "localhost-refused-sctp"
)

var counters = []string{counterInvalid, counterLocalhostUDP, counterLocalhostSCTP}

// The bits of linux/netfilter/nf_conntrack_common.h.
const (
	ctStateInvalid = 1 << 0 // NF_CT_STATE_INVALID_BIT
	ctStatusDNAT   = 1 << 5 // IPS_DST_NAT
)

// builder makes rules of one family.
type builder struct {
	cfg Config
	v6  bool
}

func (x builder) rule(comment string) *rule { return &rule{v6: x.v6, comment: comment} }

// words is how many registers an address takes.
func (x builder) words() int { return addrLen(x.v6) / 4 }

// frontend loads the key of a frontend, as appendKey has it; a NodePort's address is 0.0.0.0 or ::. It returns the register
// behind.
func (x builder) frontend(r *rule, nodePort bool, at int) int {
	r.destination(at)
	if nodePort {
		none := make([]byte, addrLen(x.v6))
		r.mask(at, none, none)
	}
	r.proto(at + x.words()).port(at + x.words() + 1)
	return at + x.words() + 2
}

// fixed are the chains that are always there: what is referred to before what refers to it, the base chains last.
func (x builder) fixed(n *model.Node) []chain {
	if x.cfg.Ahead != nil {
		return x.ahead(n)
	}
	out := append(x.common(n),
		chain{chainPrerouting, hookPrerouting, x.prerouting(n)},
		chain{chainOutput, hookOutput, x.output(n)},
		chain{chainPostrouting, hookPostrouting, x.postrouting()})
	out = append(out, x.filters()...)
	return out
}

// common are the chains by which a packet finds out what it meets.
func (x builder) common(n *model.Node) []chain {
	out := []chain{
		{name: chainRefuse, rules: []*rule{
			x.rule("").proto(0).equal(0, []byte{byte(model.TCP)}).reject(true),
			x.rule("").reject(false)}},
		x.unclaimed(n)}
	if x.relayed(n) {
		out = append(out, x.localhost())
	}
	for _, o := range model.Origins {
		out = append(out, x.routes(routesOf(o)))
	}
	return out
}

// filters drop what no Service has to do with, and must not pass.
func (x builder) filters() (out []chain) {
	if !x.cfg.KeepInvalid {
		out = append(out, chain{chainForward, hookForward, []*rule{
			// A late packet of a translated flow, no longer known to conntrack, would leave with the wrong source address and
			// reset the flow (kubernetes issue 74839).
			x.rule("").conntrack(unix.NFT_CT_STATE, 0).flagged(0, ctStateInvalid).count(counterInvalid).drop()}})
	}
	if !x.v6 {
		out = append(out, chain{chainInput, hookInput, []*rule{
			// With route_localnet on, which we never set, a neighbour could send to them (CVE-2020-8558).
			x.prefix(x.notFrom(x.rule("127.0.0.0/8 is for this node alone"), "lo").destination(0), 0, netip.MustParsePrefix("127.0.0.0/8")).drop()}})
	}
	return out
}

func (x builder) notFrom(r *rule, iface string) *rule {
	return r.meta(unix.NFT_META_IIFNAME, 0).notEqual(0, ifname(iface))
}

func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// prefix goes on when the address in registers is in p.
func (x builder) prefix(r *rule, reg int, p netip.Prefix) *rule {
	addr := appendAddr(nil, p.Masked().Addr())
	if p.Bits() == 8*len(addr) {
		return r.equal(reg, addr)
	}
	mask := make([]byte, len(addr))
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return r.mask(reg, mask, make([]byte, len(addr))).equal(reg, addr)
}

// prerouting tells who is knocking. A pod comes before the node, as in model.State.Origin.
func (x builder) prerouting(n *model.Node) []*rule {
	rules := x.pods(n)
	for _, i := range n.PodInterfaces {
		name, wild := strings.CutSuffix(i, "+")
		match := []byte(name)
		if !wild {
			match = ifname(name)
		}
		if len(match) > 0 && len(match) <= unix.IFNAMSIZ {
			rules = append(rules, x.rule("").meta(unix.NFT_META_IIFNAME, 0).equal(0, match).gotoChain(setFromPod.String()))
		}
	}
	return append(rules,
		x.rule("").source(0).in(setNodeIPs, 0).gotoChain(setFromNode.String()),
		x.rule("").gotoChain(setFromOutside.String()))
}

func (x builder) pods(n *model.Node) []*rule {
	var rules []*rule
	for _, p := range n.Pods {
		if p.Addr().Is6() == x.v6 {
			rules = append(rules, x.prefix(x.rule("").source(0), 0, p).gotoChain(setFromPod.String()))
		}
	}
	return rules
}

func (x builder) output(n *model.Node) []*rule {
	var rules []*rule
	if x.relayed(n) {
		rules = append(rules, x.toLoopback(x.rule("")).gotoChain(chainLocalhost))
	}
	rules = append(rules, x.pods(n)...)
	return append(rules, x.rule("").gotoChain(setFromNode.String()))
}

func (x builder) toLoopback(r *rule) *rule {
	r.destination(0)
	if x.v6 {
		return r.equal(0, appendAddr(nil, netip.IPv6Loopback()))
	}
	return x.prefix(r, 0, netip.MustParsePrefix("127.0.0.0/8"))
}

// relayed tells whether TCP NodePorts are relayed on the family's loopback address. The others are refused there.
func (x builder) relayed(n *model.Node) bool { return n.RelaysLocalhost(x.v6) }

var loopbacks = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

func (x builder) localhost() chain {
	c := chain{name: chainLocalhost}
	for _, p := range []struct {
		proto   model.Proto
		counter string
	}{{model.UDP, counterLocalhostUDP}, {model.SCTP, counterLocalhostSCTP}} {
		r := x.rule("").proto(0).equal(0, []byte{byte(p.proto)})
		next := x.frontend(r, true, 0)
		c.rules = append(c.rules, r.mapped(setServices, 0, next).viaMark(next, next+1).count(p.counter).gotoChain(chainRefuse))
	}
	return c
}

// routes is the chain of an origin, which has the name of its map.
func (x builder) routes(s setID) chain {
	byAddress, byPort := x.rule(""), x.rule("")
	next := x.frontend(byAddress, false, 0)
	byAddress.mapped(setServices, 0, next).viaMark(next, next+1).vmap(s, next)
	byPort.destination(0).in(setNodePortIPs, 0)
	next = x.frontend(byPort, true, 0)
	byPort.mapped(setServices, 0, next).viaMark(next, next+1).vmap(s, next)
	return chain{name: s.String(), rules: []*rule{byAddress, byPort, x.rule("").gotoChain(chainUnclaimed)}}
}

// unclaimed is for what no Service has asked for.
func (x builder) unclaimed(n *model.Node) chain {
	c := chain{name: chainUnclaimed, rules: []*rule{
		x.rule("other ports of a ClusterIP").destination(0).in(setClusterIPs, 0).gotoChain(chainRefuse)}}
	for _, p := range n.ServiceCIDRs {
		if p.Addr().Is6() == x.v6 {
			r := x.rule("ClusterIPs that nobody has").destination(0).notIn(setNodeIPs, 0)
			c.rules = append(c.rules, x.prefix(r, 0, p).drop())
		}
	}
	return c
}

func (x builder) postrouting() []*rule {
	mark := x.cfg.mark()
	ours := x.rule("a pod that is its own endpoint").conntrack(unix.NFT_CT_STATUS, 0).flagged(0, ctStatusDNAT)
	if x.cfg.Ahead != nil {
		ours = x.rule("a pod that is its own endpoint").conntrack(unix.NFT_CT_MARK, 0).flagged(0, x.cfg.flow())
	}
	return []*rule{
		x.rule("Service traffic that hides the client").meta(unix.NFT_META_MARK, 0).flagged(0, mark).
			meta(unix.NFT_META_MARK, 1).mask(1, bytes.Repeat([]byte{0xff}, 4), appendNumber(nil, mark)).setMark(1).masquerade(),
		ours.
			source(0).destination(x.words()).in(setHairpin, 0).masquerade(),
	}
}

// target is the chain of a target. Its rules are tried one after the other; the last ones are for a packet that arrives while
// the kernel changes from one transaction to the next, and between two look-ups sees the old number of endpoints and the new
// endpoints: number 0 is always there.
func (x builder) target(t target) chain {
	c := chain{name: t.chain()}
	if t.ranges {
		r := x.rule("")
		next := x.frontend(r, t.nodePort, 0)
		c.rules = append(c.rules, r.source(next).notIn(setAllowed, 0).drop())
		return chain{c.name, nil, append(c.rules, x.on(t.unguarded()))}
	}
	if t.sticky > 0 {
		c.rules = append(c.rules, x.stick(t), x.chooseFor(t))
	}
	c.rules = append(c.rules, x.choose(t, t.n))
	if t.n > 1 {
		c.rules = append(c.rules, x.choose(t, 1))
	}
	return c
}

// on goes on to a target.
func (x builder) on(t target) *rule {
	if t.verdict == model.Drop {
		return x.rule("").drop()
	}
	return x.rule("").gotoChain(t.chain())
}

// choose sends the packet to one of n endpoints.
func (x builder) choose(t target, n int) *rule {
	r := x.rule("")
	slot := x.frontend(r, t.nodePort, 0)
	r.random(n, slot).mapped(endpointsOf(t.local), 0, slot+1)
	return x.translate(r, t, slot+1)
}

// chooseFor does so for a sticky client, and remembers the endpoint's own number, which is not the one by which it was drawn:
// that may be another's by the next time.
func (x builder) chooseFor(t target) *rule {
	r, service := x.rule("").source(0), x.words()
	at := x.frontend(r, t.nodePort, service)
	r.random(t.n, at).mapped(stickyNumbersOf(t.local), service, at).viaMark(at, at+1)
	r.forget(0, at).remember(0, at, t.sticky)
	r.mapped(stickyOf(t.local), service, at+1)
	return x.translate(r, t, at+1)
}

// stick sends a client that was here before to its endpoint, if that is one yet.
func (x builder) stick(t target) *rule {
	r, service := x.rule("").source(0), x.words()
	at := x.frontend(r, t.nodePort, service)
	r.mapped(setAffinity, 0, at).viaMark(at, at+1).mapped(stickyOf(t.local), service, at+1)
	r.remember(0, at, t.sticky)
	return x.translate(r, t, at+1)
}

// translate ends a rule: the mark that asks for masquerade, and the new destination. Register 0 is free by now.
func (x builder) translate(r *rule, t target, to int) *rule {
	if x.cfg.Ahead != nil {
		return x.mark(r, t, to)
	}
	if t.snat {
		mark := x.cfg.mark()
		r.meta(unix.NFT_META_MARK, 0).mask(0, appendNumber(nil, ^mark), appendNumber(nil, mark)).setMark(0)
	}
	return r.dnat(to)
}

// The maps of a scope.
func endpointsOf(local bool) setID     { return setEndpoints + setID(b2i(local)) }
func stickyNumbersOf(local bool) setID { return setStickyNumbers + setID(b2i(local)) }
func stickyOf(local bool) setID        { return setSticky + setID(b2i(local)) }
