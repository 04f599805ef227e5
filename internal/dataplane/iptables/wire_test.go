package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"pgregory.net/rapid"
)

// drawRule draws any rule that check lets pass, in its canonical form: prefixes are masked, and none is of length 0 unless
// inverted.
func drawRule(t *rapid.T, v6 bool) Rule {
	maybe := func(name string) bool { return rapid.Bool().Draw(t, name) }
	word := func(name string, most int) string {
		return rapid.StringMatching(`[A-Za-z0-9_.:/][A-Za-z0-9_.:/-]*`).Filter(func(s string) bool { return len(s) <= most }).Draw(t, name)
	}
	addr := func(name string) netip.Addr {
		size := 4
		if v6 {
			size = 16
		}
		a, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, name))
		return a
	}
	prefix := func(name string, p *netip.Prefix, not *bool) {
		if maybe(name) {
			a := addr(name)
			*not = maybe("not " + name)
			least := 1
			if *not {
				least = 0
			}
			*p = netip.PrefixFrom(a, rapid.IntRange(least, a.BitLen()).Draw(t, name+" bits")).Masked()
		}
	}
	var r Rule
	prefix("src", &r.Src, &r.NotSrc)
	prefix("dst", &r.Dst, &r.NotDst)
	if maybe("in") {
		r.In, r.NotIn = strings.TrimSuffix(word("in", 15), "+"), maybe("not in")
		if maybe("wildcard") {
			r.In += "+"
		}
	}
	r.Proto = rapid.SampledFrom([]model.Proto{0, model.TCP, model.UDP, model.SCTP}).Draw(t, "proto")
	if r.Proto != 0 && maybe("port") {
		r.Port = rapid.Uint16Range(1, 65535).Draw(t, "port")
		if r.Port < 65535 && maybe("range") {
			r.PortEnd = rapid.Uint16Range(r.Port+1, 65535).Draw(t, "last port")
		}
	}
	if maybe("state") {
		r.State, r.NotState = CTState(rapid.Uint16Range(1, 31).Draw(t, "state")), maybe("not state")
	}
	r.SrcLocal, r.DstLocal = maybe("src local"), maybe("dst local")
	if maybe("mark") {
		r.MarkMask = rapid.Uint32Range(1, ^uint32(0)).Draw(t, "mark mask")
		r.Mark, r.NotMark = rapid.Uint32().Draw(t, "mark")&r.MarkMask, maybe("not mark")
	}
	if maybe("recent") {
		r.Recent = Recent{List: "KUBE-" + strings.ReplaceAll(word("list", 30), "/", "."), Set: maybe("set")}
		if !r.Recent.Set {
			r.Recent.Since = time.Duration(rapid.IntRange(0, 1<<31-1).Draw(t, "since")) * time.Second
		}
	}
	if maybe("chance") {
		r.Chance = rapid.Uint32Range(1, 1<<31-1).Draw(t, "chance")
	}
	if maybe("nfacct") {
		r.NFAcct = word("nfacct", 31)
	}
	r.Comment = clean(rapid.StringN(0, 255, 300).Draw(t, "comment"))
	r.Target.Action = Action(rapid.IntRange(int(Continue), int(RejectPort)).Draw(t, "action"))
	switch r.Target.Action {
	case Jump, Goto:
		r.Target.Chain = "KUBE-" + word("chain", 20)
	case DNAT:
		port := uint16(0)
		if r.Proto != 0 {
			port = rapid.Uint16().Draw(t, "to port")
		}
		r.Target.To = netip.AddrPortFrom(addr("to"), port)
	case OrMark, XorMark:
		r.Target.Mark = rapid.Uint32Range(1, ^uint32(0)).Draw(t, "bits")
	case RejectReset:
		r.Proto, r.Port, r.PortEnd = model.TCP, 0, 0
	}
	if err := r.check(v6); err != nil {
		t.Fatalf("drew a bad rule: %v", err)
	}
	return r
}

// Any rule is the same after it was written as nf_tables expressions, and as text, and read back.
func TestRuleRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v6 := rapid.Bool().Draw(t, "v6")
		r := drawRule(t, v6)
		b := appendRuleChain(nil, ChainID{v6, Nat, "KUBE-X"})
		b = appendRuleBody(b, &r, v6, rapid.Bool().Draw(t, "counter"))
		raw := cutRule(b)
		if got, exact := raw.rule(v6); got != r || !exact || string(raw.chain) != "KUBE-X" {
			t.Errorf("expressions, exact %v:\n%+v\n%+v", exact, r, got)
		}
		line := string(r.appendText(nil, "KUBE-X", v6))
		if chain, got, exact := parseText(line, v6); got != r || !exact || chain != "KUBE-X" {
			t.Errorf("%s, exact %v:\n%+v\n%+v", line, exact, r, got)
		}
	})
}

// The kernel and iptables-nft keep any rule as it is.
func TestKernelKeepsRules(t *testing.T) {
	inNS(t, func(*kernel.NS) {
		n := openTestNFT(t)
		rapid.Check(t, func(rt *rapid.T) {
			v6 := rapid.Bool().Draw(rt, "v6")
			rules := make([]Rule, 10)
			changes := []change{{Chain: natID(v6, "KUBE-RANDOM")}}
			for i := range rules {
				r := drawRule(rt, v6)
				if r.NFAcct != "" {
					r.NFAcct = acctLocalhost
				}
				if r.Target.Chain != "" {
					r.Target.Chain = "KUBE-TARGET"
				}
				if a := r.Target.Action; a == RejectPort || a == RejectReset {
					r.Target = Target{} // not in the nat table
				}
				rules[i] = r
			}
			changes = append(changes, change{Chain: natID(v6, "KUBE-TARGET")}, change{Chain: natID(v6, "KUBE-RANDOM"), Rules: rules})
			if err := n.Write(t.Context(), changes); err != nil {
				rt.Fatal(err)
			}
			var f found
			if _, err := n.rules(natID(v6, "KUBE-RANDOM"), &f); err != nil || !f.Exact || !slices.Equal(f.Rules, rules) {
				rt.Fatalf("%v %v\n%+v\n%+v", err, f.Exact, rules, f.Rules)
			}
		})
	})
}

func FuzzParseText(f *testing.F) {
	for _, v6 := range families() {
		for _, rules := range samples(v6) {
			for _, r := range rules {
				f.Add(string(r.appendText(nil, "KUBE-SAMPLES", v6)), v6)
			}
		}
	}
	f.Add(`-A X -m comment --comment "a \" b" -m recent --set --rcheck`, false)
	f.Add(`[1:2] -A X ! -s 10.0.0.1 ! -j ! "`, false)
	f.Fuzz(func(t *testing.T, line string, v6 bool) {
		chain, r, exact := parseText(line, v6)
		if !exact {
			return
		}
		text := string(r.appendText(nil, chain, v6))
		if strings.ContainsAny(chain, " \t\r\n\"\\") {
			return // no such chain is ours
		}
		chain2, r2, exact2 := parseText(text, v6)
		if r.Src.IsValid() && r.Src.Bits() == 0 && !r.NotSrc || r.Dst.IsValid() && r.Dst.Bits() == 0 && !r.NotDst {
			return // no match at all, and so not printed
		}
		if chain2 != chain || r2 != r || !exact2 {
			t.Fatalf("%q:\n%+v\n%q, exact %v:\n%+v", line, r, text, exact2, r2)
		}
	})
}

func FuzzReadRule(f *testing.F) {
	for _, v6 := range families() {
		for _, rules := range samples(v6) {
			for _, r := range rules {
				f.Add(appendRuleBody(nil, &r, v6, true), v6)
			}
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, v6 bool) {
		r, exact := cutRule(b).rule(v6)
		if !exact || r.check(v6) != nil {
			return
		}
		again := appendRuleBody(nil, &r, v6, false)
		if r2, exact2 := cutRule(again).rule(v6); r2 != r || !exact2 {
			t.Fatalf("%+v\n%+v, exact %v", r, r2, exact2)
		}
	})
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"ns/name:port cluster IP": "ns/name:port cluster IP",
		"":                        "",
		"a\"b'c\\d\ne\x00f\x7f":   "a?b?c?d?e?f?",
		"é":                       "??",
		strings.Repeat("x", 300):  strings.Repeat("x", 255),
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}
