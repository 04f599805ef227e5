package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/model"
)

// fakeKernel keeps chains as the kernel does, and refuses what the kernel refuses.
type fakeKernel struct {
	chains map[ChainID][]Rule
	fail   func() (before, after bool) // inject failures of Write
	writes int
	recent map[string]map[netip.Addr]bool // the lists of xt_recent
	wrote  []ChainID                      // of the last Write
}

func newFakeKernel() *fakeKernel {
	k := &fakeKernel{chains: map[ChainID][]Rule{}, recent: map[string]map[netip.Addr]bool{}}
	for _, v6 := range []bool{false, true} {
		for _, n := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			k.chains[ChainID{v6, Filter, n}] = nil
		}
		for _, n := range []string{"PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"} {
			k.chains[ChainID{v6, Nat, n}] = nil
		}
	}
	return k
}

func (k *fakeKernel) Name() string                              { return "nf_tables" }
func (k *fakeKernel) generation() (string, error)               { return k.String(), nil }
func (k *fakeKernel) Close() error                              { return nil }
func (k *fakeKernel) Watch(context.Context, func(string)) error { return nil }

func (k *fakeKernel) scan(_ context.Context, v6 bool, each func(ChainID, found)) error {
	for id, rules := range k.chains {
		if id.V6 == v6 && (id.builtin() || strings.HasPrefix(id.Name, "KUBE-")) {
			each(id, found{Rules: rules, Exact: true})
		}
	}
	return nil
}

var errFake = errors.New("injected failure")

func (k *fakeKernel) Write(_ context.Context, changes []change) error {
	var before, after bool
	if k.fail != nil {
		before, after = k.fail()
	}
	if before {
		return errFake
	}
	k.writes++
	k.wrote = nil
	next := map[ChainID][]Rule{}
	for id, r := range k.chains {
		next[id] = r
	}
	for _, c := range changes {
		k.wrote = append(k.wrote, c.Chain)
		switch {
		case len(c.Chain.Name) > 28:
			return fmt.Errorf("name too long: %s", c.Chain.Name)
		case c.Chain.builtin():
			rest := slices.DeleteFunc(slices.Clone(next[c.Chain]), func(r Rule) bool { return slices.Contains(c.Rules, r) })
			if !c.Gone {
				rest = append(slices.Clone(c.Rules), rest...)
			}
			next[c.Chain] = rest
		case c.Gone:
			delete(next, c.Chain)
		default:
			next[c.Chain] = slices.Clone(c.Rules)
		}
	}
	for id, rules := range next {
		for _, r := range rules {
			to := ChainID{id.V6, id.Table, r.Target.Chain}
			if _, ok := next[to]; r.Target.Chain != "" && !ok {
				if _, was := k.chains[to]; was {
					return fmt.Errorf("%v %s jumps to %s: %w", id.Table, id.Name, to.Name, errInUse)
				}
				return fmt.Errorf("%v %s jumps to %s, which is not there", id.Table, id.Name, to.Name)
			}
		}
	}
	k.chains = next
	k.forget()
	if after {
		return errFake
	}
	return nil
}

// forget drops the lists that no rule mentions any more, as the kernel does (net/netfilter/xt_recent.c recent_mt_destroy).
func (k *fakeKernel) forget() {
	used := map[string]map[netip.Addr]bool{}
	for _, rules := range k.chains {
		for _, r := range rules {
			if l := r.Recent.List; l != "" && k.recent[l] != nil {
				used[l] = k.recent[l]
			}
		}
	}
	k.recent = used
}

// tracer sends packets through the fake kernel's rules.
type tracer struct {
	k     *fakeKernel
	node  model.Node
	pkt   model.Packet
	v6    bool
	mark  uint32
	to    netip.AddrPort // after DNAT
	reset bool
	rnd   *rand.Rand
}

type traced struct {
	Verdict model.Verdict
	To      netip.AddrPort
	SNAT    bool
}

func (k *fakeKernel) trace(node model.Node, p model.Packet, rnd *rand.Rand) traced {
	t := &tracer{k: k, node: node, pkt: p, v6: p.Dst.Addr().Is6(), rnd: rnd}
	t.to = p.Dst
	if t.v6 && p.Dst.Addr().IsLoopback() && p.Interface != "" {
		return traced{Verdict: model.Drop} // by the kernel itself (net/ipv6/ip6_input.c)
	}
	hook := "PREROUTING"
	if p.Interface == "" {
		hook = "OUTPUT"
	}
	t.walk(Nat, hook)
	local := t.local(t.to.Addr())
	var a Action
	switch {
	case p.Interface == "":
		if a = t.walk(Filter, "OUTPUT"); a != DropIt && a != RejectReset && a != RejectPort && local {
			a = t.walk(Filter, "INPUT")
		}
	case local:
		a = t.walk(Filter, "INPUT")
	default:
		a = t.walk(Filter, "FORWARD")
	}
	switch a {
	case DropIt:
		return traced{Verdict: model.Drop}
	case RejectPort, RejectReset:
		if (a == RejectReset) != (p.Proto == model.TCP) {
			panic("refused in the wrong way")
		}
		return traced{Verdict: model.Reject}
	}
	if t.to == p.Dst {
		return traced{Verdict: model.Pass}
	}
	snat := t.walk(Nat, "POSTROUTING") == Masquerade
	return traced{Verdict: model.Forward, To: t.to, SNAT: snat}
}

func (t *tracer) local(a netip.Addr) bool { return slices.Contains(t.node.Addrs, a) || a.IsLoopback() }

func (t *tracer) walk(table Table, name string) Action {
	for _, r := range t.k.chains[ChainID{t.v6, table, name}] {
		if !t.matches(r) {
			continue
		}
		if r.Recent.List != "" && r.Recent.Set {
			if t.k.recent[r.Recent.List] == nil {
				t.k.recent[r.Recent.List] = map[netip.Addr]bool{}
			}
			t.k.recent[r.Recent.List][t.pkt.Src.Addr()] = true
		}
		switch r.Target.Action {
		case Continue:
		case Jump:
			if a := t.walk(table, r.Target.Chain); a != Return {
				return a
			}
		case OrMark:
			t.mark |= r.Target.Mark
		case XorMark:
			t.mark ^= r.Target.Mark
		case DNAT:
			t.to = r.Target.To
			return DNAT
		default:
			return r.Target.Action
		}
	}
	return Return
}

func (t *tracer) matches(r Rule) bool {
	src := t.pkt.Src.Addr()
	in := t.pkt.Interface
	ok := (!r.Src.IsValid() || r.Src.Contains(src) != r.NotSrc) &&
		(!r.Dst.IsValid() || r.Dst.Contains(t.to.Addr()) != r.NotDst) &&
		(r.Proto == 0 || r.Proto == t.pkt.Proto) &&
		((r.Port|r.PortEnd) == 0 || t.to.Port() >= r.Port && t.to.Port() <= max(r.Port, r.PortEnd)) &&
		(!r.SrcLocal || t.local(src)) && (!r.DstLocal || t.local(t.to.Addr())) &&
		(r.MarkMask == 0 || (t.mark&r.MarkMask == r.Mark) != r.NotMark)
	if r.In != "" {
		prefix, wild := strings.CutSuffix(r.In, "+")
		is := in == r.In || wild && in != "" && strings.HasPrefix(in, prefix)
		ok = ok && is != r.NotIn
	}
	if r.State != 0 {
		state := StateNew
		if t.to != t.pkt.Dst {
			state |= StateDNAT
		}
		ok = ok && (r.State&state != 0) != r.NotState
	}
	if r.Recent.List != "" && !r.Recent.Set {
		ok = ok && t.k.recent[r.Recent.List][src]
	}
	if r.Chance != 0 {
		ok = ok && t.rnd.Uint32()>>1 < r.Chance
	}
	return ok
}

func errorsIsFake(err error) bool { return errors.Is(err, errFake) }
