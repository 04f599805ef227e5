package nftables

import (
	"context"
	"encoding/binary"
	"net/netip"

	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// Ahead makes the table one that stands ahead of IPVS: it tells who is knocking where and what that meets, by the same maps and chains,
// but leaves the choice of an endpoint to IPVS, which knows each pool by a mark. Its base chains are others:
//
//	arriving  prerouting, -90: what is for a Service gets the bit [Config.Bit], by which a routing rule takes it into this machine
//	entering  input, 97:       who, where, what; the mark of a pool. IPVS comes at 98 and 99
//	entered   input, 101:      what IPVS did not take is refused
//	leaving   output, -99:     the same for what this node sends, IPVS comes at -98; and what IPVS sends on, which gets the mark of
//	left      output, -97      masquerade in place of the pool's
//
// A flow that IPVS has is known by the same bit in conntrack's mark, whatever becomes of its Service; the next bit says that its client
// is hidden.
type Ahead struct {
	Table  string                                       // the table's name
	Number func(to model.Key, pool model.PoolID) uint32 // of a pool, for packets to a frontend; from 1, below 1<<NumberBits
}

// NumberBits is the size of a pool's number.
const NumberBits = 20

// markPrefix is what the marks of pools begin with. As addresses in the maps they are 250.16.0.0 and on, which nobody has.
const markPrefix = 0xfa1 << NumberBits

// MarkOf is the mark of packets to a pool, as a number of this machine's byte order.
func MarkOf(number uint32) uint32 {
	return binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, markPrefix|number))
}

// NumberOf is the way back; ok is false for marks of others, and for number 0: on most machines that mark is as small as one that somebody
// else may choose.
func NumberOf(mark uint32) (number uint32, ok bool) {
	n := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, mark))
	return n &^ markPrefix, n>>NumberBits == markPrefix>>NumberBits && n != markPrefix
}

// The base chains, and those behind them.
const (
	chainArriving = "arriving"
	chainEntering = "entering"
	chainEntered  = "entered"
	chainLeaving  = "leaving"
	chainLeft     = "left"
	chainDivert   = "divert"
	chainStray    = "stray"
	chainTaken    = "taken"
)

// IPVS is at 98 and 99 in input, at -99 and -98 in output (net/netfilter/ipvs/ip_vs_core.c ip_vs_ops4). Others' destination NAT, at
// -100, comes first: what another dataplane translates is not ours.
var (
	hookArriving = &hook{unix.NF_INET_PRE_ROUTING, -90, "filter"}
	hookEntering = &hook{unix.NF_INET_LOCAL_IN, 97, "filter"}
	hookEntered  = &hook{unix.NF_INET_LOCAL_IN, 101, "filter"}
	hookLeaving  = &hook{unix.NF_INET_LOCAL_OUT, -99, "filter"}
	hookLeft     = &hook{unix.NF_INET_LOCAL_OUT, -97, "filter"}
)

const ctStateNew = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW)

// table is the name of our table.
func (c Config) table() string {
	if c.Ahead != nil {
		return c.Ahead.Table
	}
	return tableName
}

// first are the chains that go first, when the table goes.
func (c Config) first() []string {
	if c.Ahead != nil {
		return []string{chainArriving, chainEntering, chainLeaving}
	}
	return []string{chainPrerouting, chainOutput}
}

// Bit is the bit of the packet mark that takes packets to Services into this machine, and of conntrack's mark that IPVS has the
// flow: the one below that of masquerade.
func (c Config) Bit() uint32 { return c.flow() }

func (c Config) flow() uint32 {
	if c.MasqueradeBit == 0 {
		return 1 << 1
	}
	return 1 << (c.MasqueradeBit - 1)
}

// AbleAhead tells whether this kernel can do all that the rules ahead of IPVS need; see Able.
func AbleAhead(cfg Config, v6 bool) error { return able(cfg, v6) }

// Numbers says what the rules of a table ahead of IPVS lead to.
type Numbers struct {
	Of   map[model.Key][2]int    // numbers of pools, by frontend and scope; -1 for none
	Here map[netip.Addr]struct{} // addresses of endpoints on this node
}

// DumpAhead is Dump with the numbers. The pools of the state have no endpoints that mean anything.
func (d *Dataplane) DumpAhead(ctx context.Context) (*model.State, Numbers, error) {
	out := Numbers{map[model.Key][2]int{}, map[netip.Addr]struct{}{}}
	s, found, err := d.dump(ctx)
	for _, h := range found {
		for k, r := range h.rows {
			n := [2]int{-1, -1}
			for scope, in := range r.scopes() {
				if len(in.endpoints) == backendLen(h.v6) {
					n[scope] = int(cutNumber(in.endpoints, h.v6))
				}
			}
			out.Of[k] = n
		}
		for f := range h.facts {
			if f.set == setHairpin {
				out.Here[f.at] = struct{}{}
			}
		}
	}
	return s, out, err
}

// A number in place of an endpoint is the mark in the last four bytes of the address.
func packNumber(n uint32, v6 bool) string {
	b := make([]byte, backendLen(v6))
	binary.BigEndian.PutUint32(b[addrLen(v6)-4:], markPrefix|n)
	return string(b)
}

func cutNumber(packed string, v6 bool) uint32 {
	return binary.BigEndian.Uint32([]byte(packed[addrLen(v6)-4:])) &^ markPrefix
}

// anyOf stands for one or more endpoints.
func anyOf(packed string, v6 bool) string {
	if packed == "" {
		return ""
	}
	return packNumber(0, v6)
}

// row renders a frontend.
func (d *Dataplane) row(f *front, s shape) row {
	n := d.number(f.key.V6(), s)
	if d.cfg.Ahead == nil {
		return f.row(s, n, d.own.of)
	}
	r, m := row{shape: n, about: checksum(f.about())}, more{allowed: packRanges(f.allow)}
	for scope := range f.service.pools {
		if uses, _ := s.uses(scope); uses == 0 {
			continue
		}
		id := f.service.id
		id.Scope = model.Scope(scope)
		slot := packNumber(d.cfg.Ahead.Number(f.key, id), f.key.V6())
		if id.Scope == model.Local {
			m.local = slot
		} else {
			r.endpoints = slot
		}
	}
	r.setMore(m)
	return r
}

// ahead are the fixed chains of a table ahead of IPVS.
func (x builder) ahead(n *model.Node) []chain {
	entering := []*rule{x.withoutBit(x.rule("")), x.notNew().accept()}
	leaving := []*rule{x.marked().gotoChain(chainTaken), x.notNew().accept()}
	out := append(x.common(n),
		chain{name: chainDivert, rules: x.divert()},
		chain{name: chainTaken, rules: []*rule{
			x.setMark(x.rule("").conntrack(unix.NFT_CT_MARK, 0).flagged(0, x.cfg.hidden()), x.cfg.mark()).accept(),
			x.setMark(x.rule(""), 0).accept()}},
		chain{name: chainStray, rules: x.stray()},
		chain{chainEntering, hookEntering, append(entering, x.prerouting(n)...)},
		chain{chainEntered, hookEntered, []*rule{x.marked().gotoChain(chainStray), x.ofFlow().gotoChain(chainStray)}},
		chain{chainLeaving, hookLeaving, append(leaving, x.output(n)...)},
		chain{chainLeft, hookLeft, []*rule{x.marked().gotoChain(chainStray)}},
		chain{chainArriving, hookArriving, []*rule{
			x.withBit(x.ofFlow()).accept(),
			x.rule("").conntrack(unix.NFT_CT_STATE, 0).flagged(0, ctStateNew).gotoChain(chainDivert)}},
		chain{chainPostrouting, hookPostrouting, x.postrouting()})
	return append(out, x.filters()...)
}

// hidden is the bit of conntrack's mark that says that the client is hidden.
func (c Config) hidden() uint32 { return c.mark() }

// ofFlow goes on with what the client of one of IPVS's flows sends, ICMP errors too.
func (x builder) ofFlow() *rule {
	return x.rule("").conntrack(unix.NFT_CT_MARK, 0).flagged(0, x.cfg.flow()).conntrack(unix.NFT_CT_DIRECTION, 1).equal(1, []byte{0})
}

func (x builder) notNew() *rule {
	return x.rule("").conntrack(unix.NFT_CT_STATE, 0).mask(0, appendNumber(nil, ctStateNew), make([]byte, 4)).equal(0, make([]byte, 4))
}

// marked goes on with what has the mark of a pool.
func (x builder) marked() *rule {
	mask := binary.BigEndian.AppendUint32(nil, 0xfff<<NumberBits)
	return x.rule("").meta(unix.NFT_META_MARK, 0).mask(0, mask, make([]byte, 4)).equal(0, binary.BigEndian.AppendUint32(nil, markPrefix))
}

func (x builder) setMark(r *rule, mark uint32) *rule {
	return r.meta(unix.NFT_META_MARK, 1).mask(1, make([]byte, 4), appendNumber(nil, mark)).setMark(1)
}

func (x builder) withBit(r *rule) *rule {
	bit := x.cfg.flow()
	return r.meta(unix.NFT_META_MARK, 2).mask(2, appendNumber(nil, ^bit), appendNumber(nil, bit)).setMark(2)
}

func (x builder) withoutBit(r *rule) *rule {
	bit := x.cfg.flow()
	return r.meta(unix.NFT_META_MARK, 0).flagged(0, bit).meta(unix.NFT_META_MARK, 1).mask(1, appendNumber(nil, ^bit), make([]byte, 4)).setMark(1)
}

// divert takes what is addressed to a Service into this machine.
func (x builder) divert() []*rule {
	r := x.rule("")
	next := x.frontend(r, false, 0)
	r.mapped(setServices, 0, next).viaMark(next, next+1)
	bit := x.cfg.flow()
	r.meta(unix.NFT_META_MARK, 0).mask(0, appendNumber(nil, ^bit), appendNumber(nil, bit)).setMark(0)
	return []*rule{r.accept(), x.rule("").gotoChain(chainUnclaimed)}
}

// stray refuses what is addressed to a Service yet, when IPVS has had it: no server of this machine's may answer for one. What IPVS has
// sent to an endpoint that is this machine itself may go on.
func (x builder) stray() []*rule {
	byAddress, byPort := x.rule(""), x.rule("")
	next := x.frontend(byAddress, false, 0)
	byAddress.mapped(setServices, 0, next).viaMark(next, next+1).gotoChain(chainRefuse)
	byPort.destination(0).in(setNodePortIPs, 0)
	next = x.frontend(byPort, true, 0)
	byPort.mapped(setServices, 0, next).viaMark(next, next+1).gotoChain(chainRefuse)
	return []*rule{
		x.rule("").destination(0).notIn(setNodeIPs, 0).gotoChain(chainRefuse),
		byAddress, byPort,
		x.marked().gotoChain(chainTaken)}
}

// mark ends a rule that has found the number of a pool: IPVS does the rest.
func (x builder) mark(r *rule, t target, to int) *rule {
	bits := x.cfg.flow()
	if t.snat {
		bits |= x.cfg.hidden()
	}
	r.conntrack(unix.NFT_CT_MARK, 0).mask(0, appendNumber(nil, ^(x.cfg.flow()|x.cfg.hidden())), appendNumber(nil, bits)).setFlowMark(0)
	return r.setMark(to + x.words() - 1).accept()
}
