package iptables

import (
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/model"
)

// parseText reads a line of iptables-save, such as "-A KUBE-SVC-X -d 10.0.0.1/32 -j KUBE-SEP-Y". Exact is false when it says
// anything that a Rule can't; the chain and the target's chain are given all the same where they are found. It takes any
// line, and panics on none.
func parseText(line string, v6 bool) (chain string, r Rule, exact bool) {
	p := textReader{words: splitWords(line), v6: v6}
	if len(p.words) > 0 && strings.HasPrefix(p.words[0], "[") { // iptables-save -c puts the counters first
		p.words = p.words[1:]
	}
	if p.next() != "-A" {
		return "", Rule{}, false
	}
	chain = p.next()
	exact = chain != ""
	for len(p.words) > 0 {
		exact = p.option() && exact
	}
	if p.xmark && p.r.Target.Action == Continue {
		exact = false
	}
	return chain, p.r, exact && p.complete()
}

// splitWords splits at blanks; quotes keep words together, and a backslash keeps what follows.
func splitWords(line string) []string {
	words := make([]string, 0, 24)
	for i := 0; i < len(line); {
		if line[i] == ' ' || line[i] == '\t' || line[i] == '\n' || line[i] == '\r' {
			i++
			continue
		}
		start, quoted, plain := i, false, true
		for ; i < len(line) && (quoted || line[i] != ' ' && line[i] != '\t' && line[i] != '\n' && line[i] != '\r'); i++ {
			switch line[i] {
			case '"':
				quoted, plain = !quoted, false
			case '\\':
				plain = false
				i++
			}
		}
		word := line[start:min(i, len(line))]
		if !plain {
			word = unquote(word)
		}
		words = append(words, word)
	}
	return words
}

func unquote(s string) string {
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '"':
		case '\\':
			if i++; i < len(s) {
				b = append(b, s[i])
			}
		default:
			b = append(b, s[i])
		}
	}
	return string(b)
}

type textReader struct {
	words []string
	v6    bool
	r     Rule
	match string // the module of the options that follow
	not   bool   // a ! was read
	xmark bool
	rec   struct{ check, set, reap bool }
}

func (p *textReader) next() string {
	if len(p.words) == 0 {
		return ""
	}
	w := p.words[0]
	p.words = p.words[1:]
	return w
}

// option reads one option with its arguments, and tells whether it was understood.
func (p *textReader) option() bool {
	w := p.next()
	if w == "!" {
		was := p.not
		p.not = true
		return !was && len(p.words) > 0
	}
	not := p.not
	p.not = false
	switch w {
	case "-s":
		return p.prefix(&p.r.Src, &p.r.NotSrc, not)
	case "-d":
		return p.prefix(&p.r.Dst, &p.r.NotDst, not)
	case "-i":
		was := p.r.In
		p.r.In, p.r.NotIn = p.next(), not
		return was == "" && p.r.In != "" && checkName("", p.r.In, ifaceMost+1) == nil
	case "-p":
		was := p.r.Proto
		p.r.Proto = protoNamed(p.next())
		return was == 0 && p.r.Proto != 0 && !not
	case "-m":
		p.match = p.next()
		return p.known() && !not
	case "-j":
		return !not && p.target(p.next())
	case "-g":
		was := p.r.Target.Action
		p.r.Target = Target{Action: Goto, Chain: p.next()}
		return was == Continue && !not && p.r.Target.Chain != ""
	}
	if p.r.Target.Action != Continue || p.xmark {
		return !not && p.targetOption(w)
	}
	return p.matchOption(w, not)
}

func (p *textReader) known() bool {
	switch p.match {
	case "tcp", "udp", "sctp":
		return p.r.Proto != 0 && p.match == p.r.Proto.String()
	case "comment", "addrtype", "conntrack", "mark", "recent", "statistic", "nfacct":
		return true
	}
	return false
}

func protoNamed(s string) model.Proto {
	for _, p := range [...]model.Proto{model.TCP, model.UDP, model.SCTP} {
		if s == p.String() {
			return p
		}
	}
	return 0
}

func (p *textReader) prefix(to *netip.Prefix, neg *bool, not bool) bool {
	was := *to
	w := p.next()
	if !strings.Contains(w, "/") {
		a, err := netip.ParseAddr(w)
		if err != nil || a.Zone() != "" {
			return false
		}
		*to = netip.PrefixFrom(a, a.BitLen())
	} else {
		pre, err := netip.ParsePrefix(w)
		if err != nil {
			return false // iptables prints a mask that is no prefix as an address
		}
		*to = pre
	}
	*neg = not
	return !was.IsValid() && to.Addr().Is6() == p.v6 && *to == to.Masked()
}

func (p *textReader) matchOption(w string, not bool) bool {
	switch p.match + " " + w {
	case "tcp --dport", "udp --dport", "sctp --dport":
		return !not && p.ports(p.next())
	case "comment --comment":
		was := p.r.Comment
		p.r.Comment = p.next()
		return was == "" && !not && p.r.Comment != "" && p.r.Comment == clean(p.r.Comment)
	case "addrtype --src-type":
		was := p.r.SrcLocal
		p.r.SrcLocal = p.next() == "LOCAL"
		return p.r.SrcLocal && !was && !not
	case "addrtype --dst-type":
		was := p.r.DstLocal
		p.r.DstLocal = p.next() == "LOCAL"
		return p.r.DstLocal && !was && !not
	case "conntrack --ctstate":
		was := p.r.State
		ok := p.states(p.next())
		p.r.NotState = not
		return ok && was == 0
	case "mark --mark":
		return p.mark(p.next(), not)
	case "statistic --mode":
		return p.next() == "random" && !not
	case "statistic --probability":
		f, err := strconv.ParseFloat(p.next(), 64)
		was := p.r.Chance
		if err != nil || !(f > 0 && f <= 1) {
			return false
		}
		p.r.Chance = uint32(math.Round(f * (1 << 31)))
		return was == 0 && p.r.Chance != 0 && p.r.Chance <= math.MaxInt32 && !not
	case "nfacct --nfacct-name":
		was := p.r.NFAcct
		p.r.NFAcct = p.next()
		return was == "" && p.r.NFAcct != "" && checkName("", p.r.NFAcct, acctMost) == nil && !not
	}
	return p.match == "recent" && !not && p.recent(w)
}

func (p *textReader) ports(s string) bool {
	first, last, isRange := strings.Cut(s, ":")
	was := p.r.Port
	a, err := strconv.ParseUint(first, 10, 16)
	if err != nil || a == 0 || was != 0 {
		return false
	}
	p.r.Port = uint16(a)
	if !isRange {
		return true
	}
	z, err := strconv.ParseUint(last, 10, 16)
	if err != nil || z < a {
		return false
	}
	if z > a {
		p.r.PortEnd = uint16(z)
	}
	return true
}

func (p *textReader) states(s string) bool {
	for name := range strings.SplitSeq(s, ",") {
		was := p.r.State
		for _, st := range ctStates {
			if st.name == name {
				p.r.State |= st.ours
			}
		}
		if p.r.State == was {
			return false
		}
	}
	return true
}

func (p *textReader) mark(s string, not bool) bool {
	value, mask, masked := strings.Cut(s, "/")
	v, err := strconv.ParseUint(value, 0, 32)
	if err != nil || p.r.MarkMask != 0 {
		return false
	}
	m := uint64(^uint32(0))
	if masked {
		if m, err = strconv.ParseUint(mask, 0, 32); err != nil || m == 0 {
			return false
		}
	}
	p.r.Mark, p.r.MarkMask, p.r.NotMark = uint32(v), uint32(m), not
	return true
}

func (p *textReader) recent(w string) bool {
	rec := &p.r.Recent
	switch w {
	case "--set":
		rec.Set, p.rec.set = true, true
	case "--rcheck":
		p.rec.check = true
	case "--reap":
		p.rec.reap = true
	case "--rsource":
	case "--seconds":
		n, err := strconv.ParseUint(p.next(), 10, 31)
		rec.Since = time.Duration(n) * time.Second
		return err == nil && n > 0
	case "--name":
		was := rec.List
		rec.List = p.next()
		return was == "" && rec.List != "" && checkName("", rec.List, listMost) == nil
	case "--mask":
		m := p.next()
		return m == fullMask4 && !p.v6 || m == fullMask6 && p.v6
	default:
		return false
	}
	return true
}

func (p *textReader) target(name string) bool {
	was := p.r.Target.Action
	t := &p.r.Target
	switch name {
	case "ACCEPT":
		t.Action = Accept
	case "DROP":
		t.Action = DropIt
	case "RETURN":
		t.Action = Return
	case "DNAT":
		t.Action = DNAT
	case "MASQUERADE":
		t.Action = Masquerade
	case "REJECT":
		t.Action = RejectPort
	case "MARK":
		p.xmark = true
	case "":
		return false
	default:
		*t = Target{Action: Jump, Chain: name}
	}
	return was == Continue
}

func (p *textReader) targetOption(w string) bool {
	t := &p.r.Target
	switch {
	case p.xmark && w == "--set-xmark":
		return p.setXmark(p.next())
	case t.Action == DNAT && w == "--to-destination":
		s := p.next()
		if a, err := netip.ParseAddr(s); err == nil {
			t.To = netip.AddrPortFrom(a, 0)
			return a.Is6() == p.v6 && a.Zone() == ""
		}
		ap, err := netip.ParseAddrPort(s)
		t.To = ap
		return err == nil && ap.Addr().Is6() == p.v6 && ap.Port() != 0 && ap.Addr().Zone() == ""
	case t.Action == Masquerade && w == "--random-fully":
		t.Mark = 1 // noted for complete
		return true
	case t.Action == RejectPort && w == "--reject-with":
		switch s := p.next(); s {
		case "tcp-reset":
			t.Action = RejectReset
			return true
		default:
			return s == rejectPortName(p.v6)
		}
	}
	return false
}

func (p *textReader) setXmark(s string) bool {
	value, mask, _ := strings.Cut(s, "/")
	v, err := strconv.ParseUint(value, 0, 32)
	m, err2 := strconv.ParseUint(mask, 0, 32)
	if err != nil || err2 != nil || p.r.Target.Action != Continue {
		return false
	}
	p.r.Target = Target{Action: OrMark, Mark: uint32(v)}
	if m == 0 {
		p.r.Target.Action = XorMark
	}
	return m == 0 || m == v
}

// complete checks what several options say together.
func (p *textReader) complete() bool {
	t := &p.r.Target
	full := !p.not
	if t.Action == Masquerade {
		full = full && t.Mark == 1
		t.Mark = 0
	}
	if t.Action == DNAT {
		full = full && t.To.IsValid()
	}
	if rec := p.r.Recent; rec != (Recent{}) || p.rec.check || p.rec.set || p.rec.reap {
		full = full && rec.List != "" && p.rec.set != p.rec.check && p.rec.reap == (rec.Since > 0) && !(p.rec.set && p.rec.reap)
	}
	return full && p.r.check(p.v6) == nil
}
