package iptables

import (
	"encoding/binary"
	"net/netip"
	"strings"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// How a Rule is written as nf_tables expressions: in the same way as iptables-nft 1.8.9 does it, so that its programs
// understand every rule of ours. What nf_tables can say itself is said in its own expressions, the rest in xtables matches and
// targets (nft_compat) whose data are the structs of linux/netfilter/xt_*.h in the byte order of the machine.
//
// In one thing we differ: the comment lies in the user data of the rule, where no packet meets it, and not in a match of
// 256 bytes that each packet calls. iptables-nft prints both alike.

// The sizes of xtables data, each rounded up to 8 (XT_ALIGN), and where their fields are.
const (
	sizeComment   = 256 // xt_comment.h
	sizeAddrtype  = 8   // xt_addrtype.h, revision 1
	sizeConntrack = 168 // xt_conntrack.h, revision 3
	sizeRecent    = 232 // xt_recent.h, revision 1
	sizeStatistic = 24  // xt_statistic.h
	sizeNFAcct    = 40  // xt_nfacct.h, revision 1
	sizeSCTP      = 296 // xt_sctp.h
	sizePorts     = 16  // xt_tcpudp.h
	sizeDNAT      = 48  // nf_nat.h nf_nat_range2
	sizeMasq4     = 24  // nf_nat.h nf_nat_ipv4_multi_range_compat
	sizeMasq6     = 40  // nf_nat.h nf_nat_range
	sizeMark      = 8   // xt_mark.h xt_mark_tginfo2
	sizeReject    = 8   // ipt_REJECT.h, ip6t_REJECT.h

	addrtypeLocal = 1 << unix.RTN_LOCAL

	conntrackFlags = 146 // match_flags, invert_flags, state_mask
	conntrackState = 1   // XT_CONNTRACK_STATE

	recentSet   = 1 << 1 // check_set at 8, name at 10, mask at 212
	recentCheck = 1 << 0
	recentReap  = 1 << 5

	sctpDestPorts = 2 // flags at 284; flag_info at 268

	natMapIPs      = 1 << 0
	natProto       = 1 << 1
	natRandomFully = 1 << 4
)

// ctStates are our states with the bits of xt_conntrack.h.
var ctStates = [...]struct {
	ours CTState
	bit  uint16
	name string
}{ // in the order in which iptables prints them
	{StateInvalid, 1 << 0, "INVALID"},
	{StateNew, 1 << 3, "NEW"},
	{StateRelated, 1 << 2, "RELATED"},
	{StateEstablished, 1 << 1, "ESTABLISHED"},
	{StateDNAT, 1 << 7, "DNAT"},
}

// rejectWith are the codes of REJECT: reset and port unreachable.
func rejectWith(v6 bool) (reset, port uint32) {
	if v6 {
		return 6, 4 // ip6t_REJECT.h
	}
	return 7, 3 // ipt_REJECT.h
}

// addrOffset is where the source and the destination address are in an IP header.
func addrOffset(v6 bool) (src, dst, size int) {
	if v6 {
		return 8, 24, 16
	}
	return 12, 16, 4
}

const dstPortOffset = 2 // in TCP, UDP and SCTP headers

// appendRuleBody appends all attributes of a rule but its table and chain.
func appendRuleBody(b []byte, r *Rule, v6, counter bool) []byte {
	b, at := kernel.BeginNest(b, unix.NFTA_RULE_EXPRESSIONS)
	comment := len(r.Comment) > maxUserComment
	b = appendMatches(b, r, v6)
	if comment {
		b = appendCommentMatch(b, r.Comment)
	}
	if counter {
		b = appendCounter(b)
	}
	b = appendAction(b, r.Target, v6)
	b = kernel.EndNest(b, at)
	if r.Proto != 0 { // nft_compat lets some matches and targets only into rules of their protocol
		b, at = kernel.BeginNest(b, unix.NFTA_RULE_COMPAT)
		b = kernel.AppendAttrU32(b, unix.NFTA_RULE_COMPAT_PROTO, uint32(r.Proto))
		b = kernel.AppendAttrU32(b, unix.NFTA_RULE_COMPAT_FLAGS, 0)
		b = kernel.EndNest(b, at)
	}
	if r.Comment != "" && !comment {
		b = appendUserComment(b, r.Comment)
	}
	return b
}

// maxUserComment is the longest comment that fits into a rule's user data: NFT_USERDATA_MAXLEN less type, length and NUL.
const maxUserComment = unix.NFT_USERDATA_MAXLEN - 3

const (
	attrUserData  = 7 // NFTA_RULE_USERDATA
	udataComment  = 0 // libnftnl udata.h NFTNL_UDATA_RULE_COMMENT
	udataHeadSize = 2
)

func appendUserComment(b []byte, comment string) []byte {
	var data [unix.NFT_USERDATA_MAXLEN]byte
	data[0], data[1] = udataComment, byte(len(comment)+1)
	n := udataHeadSize + copy(data[udataHeadSize:], comment) + 1
	return kernel.AppendAttr(b, attrUserData, data[:n])
}

// appendMatches appends what the rule looks at, in the order of appendText: what has a side effect comes last.
func appendMatches(b []byte, r *Rule, v6 bool) []byte {
	if r.In != "" {
		b = appendMeta(b, unix.NFT_META_IIFNAME)
		if name, wild := strings.CutSuffix(r.In, "+"); wild {
			b = appendCmp(b, r.NotIn, []byte(name))
		} else {
			b = appendCmp(b, r.NotIn, append([]byte(name), 0))
		}
	}
	if r.Proto != 0 {
		b = appendMeta(b, unix.NFT_META_L4PROTO)
		b = appendCmp(b, false, []byte{byte(r.Proto)})
	}
	src, dst, _ := addrOffset(v6)
	b = appendPrefix(b, r.Src, r.NotSrc, src)
	b = appendPrefix(b, r.Dst, r.NotDst, dst)
	if r.Port != 0 {
		b = appendPort(b, r)
	}
	if r.SrcLocal || r.DstLocal {
		b = appendAddrtype(b, r)
	}
	if r.MarkMask != 0 {
		b = appendMark(b, r)
	}
	if r.State != 0 {
		b = appendConntrack(b, r)
	}
	if r.Chance != 0 {
		var info [sizeStatistic]byte
		binary.NativeEndian.PutUint32(info[4:], r.Chance)
		b = appendMatch(b, "statistic", 0, info[:])
	}
	if r.Recent.List != "" {
		b = appendRecent(b, r.Recent)
	}
	if r.NFAcct != "" {
		var info [sizeNFAcct]byte
		copy(info[:31], r.NFAcct)
		b = appendMatch(b, "nfacct", 1, info[:])
	}
	return b
}

// appendPrefix compares the address at an offset in the IP header. A prefix of whole bytes needs no mask.
func appendPrefix(b []byte, p netip.Prefix, not bool, offset int) []byte {
	if !p.IsValid() || p.Bits() == 0 && !not {
		return b
	}
	addr, bits := p.Masked().Addr().AsSlice(), p.Bits()
	if bits%8 == 0 && bits > 0 {
		b = appendPayload(b, unix.NFT_PAYLOAD_NETWORK_HEADER, offset, bits/8)
		return appendCmp(b, not, addr[:bits/8])
	}
	b = appendPayload(b, unix.NFT_PAYLOAD_NETWORK_HEADER, offset, len(addr))
	b = appendBitwise(b, maskOf(bits, len(addr)))
	return appendCmp(b, not, addr)
}

func maskOf(bits, size int) []byte {
	m := make([]byte, size)
	for i := range m {
		m[i] = ^byte(0xff >> min(8, max(0, bits-8*i)))
	}
	return m
}

func appendPort(b []byte, r *Rule) []byte {
	last := max(r.Port, r.PortEnd)
	if r.Proto == model.SCTP {
		var info [sizeSCTP]byte
		binary.NativeEndian.PutUint16(info[0:], r.Port)
		binary.NativeEndian.PutUint16(info[2:], last)
		for i := range 4 { // no chunk flags
			info[268+3*i] = 0xff
		}
		binary.NativeEndian.PutUint32(info[284:], sctpDestPorts)
		return appendMatch(b, "sctp", 0, info[:])
	}
	b = appendPayload(b, unix.NFT_PAYLOAD_TRANSPORT_HEADER, dstPortOffset, 2)
	from := []byte{byte(r.Port >> 8), byte(r.Port)}
	if last == r.Port {
		return appendCmp(b, false, from)
	}
	return appendRange(b, from, []byte{byte(last >> 8), byte(last)})
}

func appendAddrtype(b []byte, r *Rule) []byte {
	var info [sizeAddrtype]byte
	if r.SrcLocal {
		binary.NativeEndian.PutUint16(info[0:], addrtypeLocal)
	}
	if r.DstLocal {
		binary.NativeEndian.PutUint16(info[2:], addrtypeLocal)
	}
	return appendMatch(b, "addrtype", 1, info[:])
}

func appendMark(b []byte, r *Rule) []byte {
	var v [4]byte
	b = appendMeta(b, unix.NFT_META_MARK)
	if r.MarkMask != ^uint32(0) {
		binary.NativeEndian.PutUint32(v[:], r.MarkMask)
		b = appendBitwise(b, v[:])
	}
	binary.NativeEndian.PutUint32(v[:], r.Mark)
	return appendCmp(b, r.NotMark, v[:])
}

func appendConntrack(b []byte, r *Rule) []byte {
	var info [sizeConntrack]byte
	var mask uint16
	for _, s := range ctStates {
		if r.State&s.ours != 0 {
			mask |= s.bit
		}
	}
	at := info[conntrackFlags:]
	binary.NativeEndian.PutUint16(at[0:], conntrackState)
	if r.NotState {
		binary.NativeEndian.PutUint16(at[2:], conntrackState)
	}
	binary.NativeEndian.PutUint16(at[4:], mask)
	return appendMatch(b, "conntrack", 3, info[:])
}

func appendRecent(b []byte, rec Recent) []byte {
	var info [sizeRecent]byte
	switch {
	case rec.Set:
		info[8] = recentSet
	case rec.Since > 0:
		binary.NativeEndian.PutUint32(info[0:], uint32(rec.Since/time.Second))
		info[8] = recentCheck | recentReap
	default:
		info[8] = recentCheck
	}
	copy(info[10:209], rec.List)
	for i := range 16 { // all bits of the source
		info[212+i] = 0xff
	}
	return appendMatch(b, "recent", 1, info[:])
}

func appendCommentMatch(b []byte, comment string) []byte {
	var info [sizeComment]byte
	copy(info[:sizeComment-1], comment)
	return appendMatch(b, "comment", 0, info[:])
}

func appendAction(b []byte, t Target, v6 bool) []byte {
	switch t.Action {
	case Jump:
		return appendVerdict(b, unix.NFT_JUMP, t.Chain)
	case Goto:
		return appendVerdict(b, unix.NFT_GOTO, t.Chain)
	case Accept:
		return appendVerdict(b, verdictAccept, "")
	case DropIt:
		return appendVerdict(b, verdictDrop, "")
	case Return:
		return appendVerdict(b, unix.NFT_RETURN, "")
	case DNAT:
		return appendDNAT(b, t.To)
	case Masquerade:
		return appendMasquerade(b, v6)
	case OrMark, XorMark: // mark = mark &^ mask ^ value
		var info [sizeMark]byte
		binary.NativeEndian.PutUint32(info[0:], t.Mark)
		if t.Action == OrMark {
			binary.NativeEndian.PutUint32(info[4:], t.Mark)
		}
		return appendTarget(b, "MARK", 2, info[:])
	case RejectReset, RejectPort:
		var info [sizeReject]byte
		reset, port := rejectWith(v6)
		if t.Action == RejectReset {
			port = reset
		}
		binary.NativeEndian.PutUint32(info[:], port)
		return appendTarget(b, "REJECT", 0, info[:])
	}
	return b
}

const (
	verdictDrop   = 0 // linux/netfilter.h NF_DROP
	verdictAccept = 1 // linux/netfilter.h NF_ACCEPT
)

func appendDNAT(b []byte, to netip.AddrPort) []byte {
	var info [sizeDNAT]byte
	flags := uint32(natMapIPs)
	if to.Port() != 0 {
		flags |= natProto
	}
	binary.NativeEndian.PutUint32(info[0:], flags)
	addr := to.Addr().AsSlice()
	copy(info[4:20], addr)
	copy(info[20:36], addr)
	binary.BigEndian.PutUint16(info[36:], to.Port())
	binary.BigEndian.PutUint16(info[38:], to.Port())
	return appendTarget(b, "DNAT", 2, info[:])
}

func appendMasquerade(b []byte, v6 bool) []byte {
	if v6 {
		var info [sizeMasq6]byte
		binary.NativeEndian.PutUint32(info[0:], natRandomFully)
		return appendTarget(b, "MASQUERADE", 0, info[:])
	}
	var info [sizeMasq4]byte
	binary.NativeEndian.PutUint32(info[0:], 1) // one range
	binary.NativeEndian.PutUint32(info[4:], natRandomFully)
	return appendTarget(b, "MASQUERADE", 0, info[:])
}

// The expressions.

func beginExpr(b []byte, name string) (out []byte, elem, data int) {
	b, elem = kernel.BeginNest(b, unix.NFTA_LIST_ELEM)
	b = kernel.AppendAttrString(b, unix.NFTA_EXPR_NAME, name)
	b, data = kernel.BeginNest(b, unix.NFTA_EXPR_DATA)
	return b, elem, data
}

func endExpr(b []byte, elem, data int) []byte {
	return kernel.EndNest(kernel.EndNest(b, data), elem)
}

// appendData appends a value in the form of nf_tables' registers.
func appendData(b []byte, typ uint16, v []byte) []byte {
	b, at := kernel.BeginNest(b, typ)
	b = kernel.AppendAttr(b, unix.NFTA_DATA_VALUE, v)
	return kernel.EndNest(b, at)
}

func appendMeta(b []byte, key uint32) []byte {
	b, elem, data := beginExpr(b, "meta")
	b = kernel.AppendAttrU32(b, unix.NFTA_META_KEY, key)
	b = kernel.AppendAttrU32(b, unix.NFTA_META_DREG, unix.NFT_REG_1)
	return endExpr(b, elem, data)
}

func appendPayload(b []byte, base uint32, offset, size int) []byte {
	b, elem, data := beginExpr(b, "payload")
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_DREG, unix.NFT_REG_1)
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_BASE, base)
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_OFFSET, uint32(offset))
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_LEN, uint32(size))
	return endExpr(b, elem, data)
}

func appendBitwise(b, mask []byte) []byte {
	var zero [16]byte
	b, elem, data := beginExpr(b, "bitwise")
	b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_SREG, unix.NFT_REG_1)
	b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_DREG, unix.NFT_REG_1)
	b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_LEN, uint32(len(mask)))
	b = appendData(b, unix.NFTA_BITWISE_MASK, mask)
	b = appendData(b, unix.NFTA_BITWISE_XOR, zero[:len(mask)])
	return endExpr(b, elem, data)
}

func appendCmp(b []byte, not bool, v []byte) []byte {
	op := uint32(unix.NFT_CMP_EQ)
	if not {
		op = unix.NFT_CMP_NEQ
	}
	b, elem, data := beginExpr(b, "cmp")
	b = kernel.AppendAttrU32(b, unix.NFTA_CMP_SREG, unix.NFT_REG_1)
	b = kernel.AppendAttrU32(b, unix.NFTA_CMP_OP, op)
	b = appendData(b, unix.NFTA_CMP_DATA, v)
	return endExpr(b, elem, data)
}

func appendRange(b, from, to []byte) []byte {
	b, elem, data := beginExpr(b, "range")
	b = kernel.AppendAttrU32(b, unix.NFTA_RANGE_SREG, unix.NFT_REG_1)
	b = kernel.AppendAttrU32(b, unix.NFTA_RANGE_OP, unix.NFT_RANGE_EQ)
	b = appendData(b, unix.NFTA_RANGE_FROM_DATA, from)
	b = appendData(b, unix.NFTA_RANGE_TO_DATA, to)
	return endExpr(b, elem, data)
}

func appendMatch(b []byte, name string, rev uint32, info []byte) []byte {
	b, elem, data := beginExpr(b, "match")
	b = kernel.AppendAttrString(b, unix.NFTA_MATCH_NAME, name)
	b = kernel.AppendAttrU32(b, unix.NFTA_MATCH_REV, rev)
	b = kernel.AppendAttr(b, unix.NFTA_MATCH_INFO, info)
	return endExpr(b, elem, data)
}

func appendTarget(b []byte, name string, rev uint32, info []byte) []byte {
	b, elem, data := beginExpr(b, "target")
	b = kernel.AppendAttrString(b, unix.NFTA_TARGET_NAME, name)
	b = kernel.AppendAttrU32(b, unix.NFTA_TARGET_REV, rev)
	b = kernel.AppendAttr(b, unix.NFTA_TARGET_INFO, info)
	return endExpr(b, elem, data)
}

func appendCounter(b []byte) []byte {
	b, elem, data := beginExpr(b, "counter")
	return endExpr(b, elem, data)
}

func appendVerdict(b []byte, code int32, chain string) []byte {
	b, elem, data := beginExpr(b, "immediate")
	b = kernel.AppendAttrU32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
	b, value := kernel.BeginNest(b, unix.NFTA_IMMEDIATE_DATA)
	b, verdict := kernel.BeginNest(b, unix.NFTA_DATA_VERDICT)
	b = kernel.AppendAttrU32(b, unix.NFTA_VERDICT_CODE, uint32(code))
	if chain != "" {
		b = kernel.AppendAttrString(b, unix.NFTA_VERDICT_CHAIN, chain)
	}
	b = kernel.EndNest(b, verdict)
	b = kernel.EndNest(b, value)
	return endExpr(b, elem, data)
}
