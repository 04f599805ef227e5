package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead/internal/model"
)

// flow is the first packet of a flow on its way through the node.
type flow struct {
	k            *fakeKernel
	node         model.Node
	p            model.Packet
	src, dst     netip.AddrPort // now
	mark, ctmark uint32
	in, out      string // interfaces, where the packet is
	dnat, snat   bool
	refused      bool
	again        bool // comes in by lo, after it left
	rnd          *rand.Rand
	err          error // the packet met what the fake can't tell
}

// traced is what became of a packet.
type traced struct {
	Verdict model.Verdict
	To      netip.AddrPort
	SNAT    bool
}

func (f *flow) v6() bool { return f.p.Dst.Addr().Is6() }

func (f *flow) family() uint8 {
	if f.v6() {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

func (f *flow) local(a netip.Addr) bool { return slices.Contains(f.node.Addrs, a) || a.IsLoopback() }

func (f *flow) fail(format string, args ...any) {
	if f.err == nil {
		f.err = fmt.Errorf(format, args...)
	}
}

// status is the conntrack entry's (IPS_*).
func (f *flow) status() (s uint32) {
	if f.dnat {
		s |= statusDNAT | statusDNATed
	}
	if f.snat {
		s |= statusSNAT | statusSNATed
	}
	return s
}

// headers are the packet's network and transport headers, as far as Services care.
func (f *flow) headers() (network, transport []byte) {
	if f.v6() {
		network = make([]byte, 40)
		network[0], network[6] = 0x60, byte(f.p.Proto)
		copy(network[8:], f.src.Addr().AsSlice())
		copy(network[24:], f.dst.Addr().AsSlice())
	} else {
		network = make([]byte, 20)
		network[0], network[9] = 0x45, byte(f.p.Proto)
		copy(network[12:], f.src.Addr().AsSlice())
		copy(network[16:], f.dst.Addr().AsSlice())
	}
	transport = make([]byte, 12)
	binary.BigEndian.PutUint16(transport, f.src.Port())
	binary.BigEndian.PutUint16(transport[2:], f.dst.Port())
	return network, transport
}

// othersMark are bits of the mark that others use, and find again.
const othersMark = 0x80018001

// trace sends a packet that opens a flow.
func (k *fakeKernel) trace(node model.Node, p model.Packet, rnd *rand.Rand) (traced, error) {
	f := &flow{k: k, node: node, p: p, src: p.Src, dst: p.Dst, in: p.Interface, mark: othersMark, rnd: rnd}
	through := f.travel()
	switch {
	case through && f.snat && !f.dnat:
		f.fail("hidden, though nobody translated its destination")
	case through && f.mark != othersMark:
		f.fail("has mark %#x in the end", f.mark)
	}
	switch {
	case f.err != nil:
		return traced{}, f.err
	case f.refused:
		return traced{Verdict: model.Reject}, nil
	case !through:
		return traced{Verdict: model.Drop}, nil
	case !f.dnat:
		return traced{Verdict: model.Pass}, nil
	}
	return traced{model.Forward, f.dst, f.snat}, nil
}

// travel takes the packet through the hooks, and the checks that the stack makes between them. It tells whether it arrived.
func (f *flow) travel() bool {
	loopback := f.p.Dst.Addr().IsLoopback() || f.p.Src.Addr().IsLoopback()
	if f.p.Interface == "" {
		return f.leave()
	}
	if f.v6() && loopback && f.p.Interface != "lo" { // net/ipv6/ip6_input.c ip6_rcv_core
		return false
	}
	if !f.hook(inPrerouting) {
		return false
	}
	if f.dst.Addr().IsLoopback() && f.p.Interface != "lo" { // a martian: net/ipv4/route.c ip_route_input_slow
		return false
	}
	if f.local(f.dst.Addr()) {
		return f.hook(inInput)
	}
	f.out = f.towards()
	return f.hook(inForward) && f.hook(inPostrouting)
}

// leave is the way of the node's own packets. What is for the node itself comes in again by lo, with the conntrack entry and
// the mark that it has, and is not translated once more.
func (f *flow) leave() bool {
	f.out = f.towards()
	if !f.hook(inOutput) {
		return false
	}
	f.out = f.towards()
	if f.p.Src.Addr().IsLoopback() && !f.local(f.dst.Addr()) { // without route_localnet; in IPv6 always
		return false
	}
	if !f.hook(inPostrouting) {
		return false
	}
	if f.out != "lo" {
		return true
	}
	f.in, f.out, f.again = "lo", "", true
	return f.hook(inPrerouting) && f.hook(inInput)
}

// Where the pods of this node are, in the plan of dptest.
var podNets = [...]netip.Prefix{netip.MustParsePrefix("10.244.0.0/24"), netip.MustParsePrefix("fd00:244::/64")}

// towards is the interface that leads to the destination.
func (f *flow) towards() string {
	a := f.dst.Addr()
	switch {
	case f.local(a):
		return "lo"
	case podNets[0].Contains(a) || podNets[1].Contains(a):
		return "veth-a"
	}
	return "eth0"
}

type hooked struct {
	t        *fakeTable
	c        *fakeChain
	priority int32
}

// hook runs the base chains of a hook. Chains of type nat run where NAT does, whatever their own priority, until one of them
// translates (net/netfilter/nf_nat_core.c nf_nat_inet_fn).
func (f *flow) hook(num uint32) bool {
	var all []hooked
	for _, t := range f.k.sortedTables() {
		for _, c := range sorted(t.chains) {
			if t.family != f.family() || c.base == nil || c.base.num != num {
				continue
			}
			h := hooked{t, c, c.base.priority}
			if c.base.typ == "nat" {
				if h.priority = 100; num == inPrerouting || num == inOutput {
					h.priority = -100
				}
			}
			all = append(all, h)
		}
	}
	slices.SortStableFunc(all, func(a, b hooked) int {
		return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.c.base.priority, b.c.base.priority))
	})
	for _, h := range all {
		if h.c.base.typ == "nat" && (f.again || f.translated(num)) {
			continue
		}
		if !f.chain(h.t, h.c) || f.err != nil {
			return false
		}
	}
	return true
}

func (f *flow) translated(num uint32) bool {
	if num == inPrerouting || num == inOutput {
		return f.dnat
	}
	return f.snat
}

// run is a packet in a chain: nft_do_chain.
type run struct {
	f       *flow
	t       *fakeTable
	regs    [fakeRegs]byte
	verdict fakeVerdict
}

// leave ends the rule: the packet goes on with the next one.
func (r *run) leave() { r.verdict = fakeVerdict{code: unix.NFT_BREAK} }

func (r *run) get(at fakeReg, n int) []byte { return slices.Clone(r.regs[at : int(at)+n]) }

// put stores a value, and zeros up to the end of its last word.
func (r *run) put(at fakeReg, v []byte) {
	n := copy(r.regs[at:], v)
	for ; n%4 != 0; n++ {
		r.regs[int(at)+n] = 0
	}
}

func (r *run) word(at fakeReg) uint32       { return binary.NativeEndian.Uint32(r.regs[at:]) }
func (r *run) putWord(at fakeReg, v uint32) { binary.NativeEndian.PutUint32(r.regs[at:], v) }

// rule runs one rule. Registers hold nothing that a rule may count on.
func (r *run) rule(rule *fakeRule) fakeVerdict {
	for i := range r.regs {
		r.regs[i] = 0xa5
	}
	r.verdict = fakeVerdict{code: unix.NFT_CONTINUE}
	for _, e := range rule.exprs {
		e.eval(r)
		if r.verdict.code != unix.NFT_CONTINUE {
			break
		}
	}
	return r.verdict
}

type place struct {
	c    *fakeChain
	next int
}

// chain runs a base chain and tells whether it accepts.
func (f *flow) chain(t *fakeTable, base *fakeChain) bool {
	r := &run{f: f, t: t}
	var stack []place
	at := place{base, 0}
	for {
		v := fakeVerdict{code: unix.NFT_RETURN}
		if at.next < len(at.c.rules) {
			v = r.rule(at.c.rules[at.next])
			at.next++
		}
		switch v.code {
		case verdictAcceptCode:
			return true
		case verdictDropCode:
			return false
		case unix.NFT_JUMP:
			stack = append(stack, at)
			at = place{t.chains[v.chain], 0}
		case unix.NFT_GOTO:
			at = place{t.chains[v.chain], 0}
		case unix.NFT_RETURN:
			if len(stack) == 0 {
				return base.base.policy == verdictAcceptCode
			}
			at, stack = stack[len(stack)-1], stack[:len(stack)-1]
		}
	}
}
