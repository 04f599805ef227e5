package iptables

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/model"
)

// How a Rule is written as a line of iptables-save, which is also a line that iptables-restore takes.

const (
	commentMost = 255 // xt_comment.h XT_MAX_COMMENT_LEN, less the NUL
	listMost    = 199 // xt_recent.h XT_RECENT_NAME_LEN, less the NUL
	acctMost    = 31  // nfnetlink_acct.h NFACCT_NAME_MAX, less the NUL
	ifaceMost   = 15  // linux/if.h IFNAMSIZ, less the NUL
	chainMost   = 28  // x_tables.h XT_EXTENSION_MAXNAMELEN, less the NUL

	fullMask4 = "255.255.255.255"
	fullMask6 = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
)

// appendText appends the line that iptables-save 1.8.9 prints for the rule, without a final newline. The matches are in the
// order in which the rule asks; the comment is the last of them.
func (r Rule) appendText(b []byte, chain string, v6 bool) []byte {
	b = append(append(b, "-A "...), chain...)
	b = appendPrefixText(b, " -s ", r.Src, r.NotSrc)
	b = appendPrefixText(b, " -d ", r.Dst, r.NotDst)
	if r.In != "" {
		b = append(append(appendNot(b, r.NotIn), " -i "...), r.In...)
	}
	if r.Proto != 0 {
		b = append(append(b, " -p "...), r.Proto.String()...)
	}
	b = r.appendMatchText(b, v6)
	if r.Comment != "" {
		b = appendQuoted(append(b, " -m comment --comment "...), r.Comment)
	}
	return r.Target.appendText(b, v6)
}

func appendNot(b []byte, not bool) []byte {
	if not {
		return append(b, " !"...)
	}
	return b
}

func appendPrefixText(b []byte, option string, p netip.Prefix, not bool) []byte {
	if !p.IsValid() || p.Bits() == 0 && !not {
		return b
	}
	return p.Masked().AppendTo(append(appendNot(b, not), option...))
}

func (r Rule) appendMatchText(b []byte, v6 bool) []byte {
	if r.Port != 0 {
		b = append(append(append(b, " -m "...), r.Proto.String()...), " --dport "...)
		b = strconv.AppendUint(b, uint64(r.Port), 10)
		if r.PortEnd > r.Port {
			b = strconv.AppendUint(append(b, ':'), uint64(r.PortEnd), 10)
		}
	}
	if r.SrcLocal || r.DstLocal {
		b = append(b, " -m addrtype"...)
		if r.SrcLocal {
			b = append(b, " --src-type LOCAL"...)
		}
		if r.DstLocal {
			b = append(b, " --dst-type LOCAL"...)
		}
	}
	if r.MarkMask != 0 {
		b = appendHex(append(appendNot(append(b, " -m mark"...), r.NotMark), " --mark "...), r.Mark)
		if r.MarkMask != ^uint32(0) {
			b = appendHex(append(b, '/'), r.MarkMask)
		}
	}
	if r.State != 0 {
		b = append(appendNot(append(b, " -m conntrack"...), r.NotState), " --ctstate "...)
		for _, s := range ctStates {
			if r.State&s.ours != 0 {
				b = append(append(b, s.name...), ',')
			}
		}
		b = b[:len(b)-1]
	}
	if r.Chance != 0 {
		b = append(b, " -m statistic --mode random --probability "...)
		b = strconv.AppendFloat(b, float64(r.Chance)/(1<<31), 'f', 11, 64)
	}
	if r.Recent.List != "" {
		b = r.Recent.appendText(b, v6)
	}
	if r.NFAcct != "" {
		b = appendQuoted(append(b, " -m nfacct --nfacct-name  "...), r.NFAcct) // two blanks, as iptables prints it
	}
	return b
}

func (rec Recent) appendText(b []byte, v6 bool) []byte {
	switch {
	case rec.Set:
		b = append(b, " -m recent --set"...)
	case rec.Since >= time.Second:
		b = strconv.AppendInt(append(b, " -m recent --rcheck --seconds "...), int64(rec.Since/time.Second), 10)
		b = append(b, " --reap"...)
	default:
		b = append(b, " -m recent --rcheck"...)
	}
	b = append(append(append(b, " --name "...), rec.List...), " --mask "...)
	if v6 {
		b = append(b, fullMask6...)
	} else {
		b = append(b, fullMask4...)
	}
	return append(b, " --rsource"...)
}

func (t Target) appendText(b []byte, v6 bool) []byte {
	switch t.Action {
	case Jump:
		return append(append(b, " -j "...), t.Chain...)
	case Goto:
		return append(append(b, " -g "...), t.Chain...)
	case Accept:
		return append(b, " -j ACCEPT"...)
	case DropIt:
		return append(b, " -j DROP"...)
	case Return:
		return append(b, " -j RETURN"...)
	case DNAT:
		b = append(b, " -j DNAT --to-destination "...)
		if t.To.Port() == 0 {
			return t.To.Addr().AppendTo(b)
		}
		return t.To.AppendTo(b)
	case Masquerade:
		return append(b, " -j MASQUERADE --random-fully"...)
	case OrMark:
		return appendHex(append(appendHex(append(b, " -j MARK --set-xmark "...), t.Mark), '/'), t.Mark)
	case XorMark:
		return append(appendHex(append(b, " -j MARK --set-xmark "...), t.Mark), "/0x0"...)
	case RejectReset:
		return append(b, " -j REJECT --reject-with tcp-reset"...)
	case RejectPort:
		return append(append(b, " -j REJECT --reject-with "...), rejectPortName(v6)...)
	}
	return b
}

func rejectPortName(v6 bool) string {
	if v6 {
		return "icmp6-port-unreachable"
	}
	return "icmp-port-unreachable"
}

func appendHex(b []byte, v uint32) []byte {
	return strconv.AppendUint(append(b, "0x"...), uint64(v), 16)
}

// appendQuoted appends s as iptables-save does: in quotes unless all of it is letters, digits, - and _.
func appendQuoted(b []byte, s string) []byte {
	if strings.IndexFunc(s, func(c rune) bool { return !plain(c) }) < 0 {
		return append(b, s...)
	}
	return append(append(append(b, '"'), s...), '"')
}

func plain(c rune) bool {
	return c == '-' || c == '_' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
}

// clean makes any text fit for a comment: what is not printable ASCII, or would need an escape, becomes a question mark.
func clean(comment string) string {
	ok := func(c byte) bool { return c >= ' ' && c <= '~' && c != '"' && c != '\'' && c != '\\' }
	fine := len(comment) <= commentMost
	for i := 0; i < len(comment) && fine; i++ {
		fine = ok(comment[i])
	}
	if fine {
		return comment
	}
	b := []byte(comment[:min(len(comment), commentMost)])
	for i, c := range b {
		if !ok(c) {
			b[i] = '?'
		}
	}
	return string(b)
}

// checkAll looks for what no back end can write, before anything is written.
func checkAll(changes []change) error {
	for i := range changes {
		c := &changes[i]
		if err := checkName("chain", c.Chain.Name, chainMost); err != nil {
			return err
		}
		for j := range c.Rules {
			if err := c.Rules[j].check(c.Chain.V6); err != nil {
				return fmt.Errorf("%s: rule %d: %w", where(c.Chain), j+1, err)
			}
		}
	}
	return nil
}

// check tells what about the rule can't be written, or is not safe to write.
func (r *Rule) check(v6 bool) error {
	switch {
	case r.Comment != clean(r.Comment):
		return fmt.Errorf("comment %q: not printable, or longer than %d bytes", r.Comment, commentMost)
	case r.Src.IsValid() && r.Src.Addr().Is6() != v6, r.Dst.IsValid() && r.Dst.Addr().Is6() != v6:
		return fmt.Errorf("source %s, destination %s: of the other address family", r.Src, r.Dst)
	case r.Port != 0 && r.Proto == 0:
		return errors.New("a port needs a protocol")
	case r.PortEnd != 0 && r.PortEnd <= r.Port:
		return fmt.Errorf("ports %d to %d: no range", r.Port, r.PortEnd)
	case r.Proto != 0 && r.Proto != model.TCP && r.Proto != model.UDP && r.Proto != model.SCTP:
		return fmt.Errorf("protocol %d: not TCP, UDP or SCTP", r.Proto)
	case r.Chance > math.MaxInt32:
		return errors.New("a probability of more than 1")
	case r.Recent.Since < 0 || r.Recent.Since%time.Second != 0 || r.Recent.Since/time.Second > math.MaxInt32:
		return fmt.Errorf("recent within %s: not in whole seconds", r.Recent.Since)
	case strings.Contains(r.Recent.List, "/") || strings.HasPrefix(r.Recent.List, "."):
		return fmt.Errorf("recent list %q: not a file name", r.Recent.List) // it is one in /proc/net/xt_recent
	}
	return errors.Join(checkName("interface", r.In, ifaceMost+1), checkName("recent list", r.Recent.List, listMost),
		checkName("nfacct counter", r.NFAcct, acctMost), r.Target.check(r.Proto, v6))
}

func (t Target) check(proto model.Proto, v6 bool) error {
	switch t.Action {
	case Jump, Goto:
		if t.Chain == "" {
			return errors.New("a jump to no chain")
		}
		return checkName("chain", t.Chain, chainMost)
	case DNAT:
		if !t.To.Addr().IsValid() || t.To.Addr().Is6() != v6 || t.To.Addr().Zone() != "" {
			return fmt.Errorf("translate to %s: not an address of this family", t.To)
		}
		if t.To.Port() != 0 && proto == 0 {
			return errors.New("translate to a port: needs a protocol")
		}
	case RejectReset:
		if proto != model.TCP {
			return errors.New("TCP reset: needs TCP")
		}
	}
	return nil
}

// checkName lets pass what is one word in any program that prints or reads rules.
func checkName(what, s string, most int) error {
	if len(s) > most {
		return fmt.Errorf("%s %q: longer than %d bytes", what, s, most)
	}
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c > '~' || strings.IndexByte(`"'\!`, c) >= 0 || i == 0 && c == '-' {
			return fmt.Errorf("%s %q: not a name", what, s)
		}
	}
	return nil
}
