package iptables

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// rawRule is a rule as the kernel lists it. The slices are valid as long as the message.
type rawRule struct {
	table, chain []byte
	handle       uint64
	exprs        []byte
	userdata     []byte
}

func cutRule(attrs []byte) (raw rawRule) {
	for typ, v := range kernel.Attrs(attrs) {
		switch typ {
		case unix.NFTA_RULE_TABLE:
			raw.table = kernel.AttrBytes(v)
		case unix.NFTA_RULE_CHAIN:
			raw.chain = kernel.AttrBytes(v)
		case unix.NFTA_RULE_HANDLE:
			raw.handle = kernel.AttrU64(v)
		case unix.NFTA_RULE_EXPRESSIONS:
			raw.exprs = v
		case attrUserData:
			raw.userdata = v
		}
	}
	return raw
}

// rule reads the expressions back. It knows our own form and all that kube-proxy writes with iptables-nft, also that of
// older versions (ports and marks as xtables matches). Exact is false when anything was not understood.
func (raw rawRule) rule(v6 bool) (r Rule, exact bool) {
	d := exprReader{v6: v6, exact: true}
	for _, elem := range kernel.Attrs(raw.exprs) {
		var name, data []byte
		for typ, v := range kernel.Attrs(elem) {
			switch typ {
			case unix.NFTA_EXPR_NAME:
				name = kernel.AttrBytes(v)
			case unix.NFTA_EXPR_DATA:
				data = v
			}
		}
		d.expr(string(name), data)
	}
	d.comment(raw.userdata)
	if d.load != loadNone {
		d.exact = false
	}
	return d.r, d.exact
}

// exprReader follows the one register that iptables-nft uses.
type exprReader struct {
	r     Rule
	v6    bool
	exact bool

	load   loadKind // what the register holds
	key    uint32   // of meta; offset of payload
	size   int      // of payload
	mask   [16]byte // what was masked off it
	masked int      // length of the mask; 0 is none
	acted  bool     // an action was read
}

type loadKind uint8

const (
	loadNone loadKind = iota
	loadMeta
	loadNetwork   // bytes of the IP header
	loadTransport // bytes of the header after it
)

func (d *exprReader) expr(name string, data []byte) {
	ok := true
	switch name {
	case "counter":
	case "meta":
		ok = d.meta(data)
	case "payload":
		ok = d.payload(data)
	case "bitwise":
		ok = d.bitwise(data)
	case "cmp":
		ok = d.cmp(data)
	case "range":
		ok = d.ports(data)
	case "immediate":
		ok = d.verdict(data)
	case "match":
		ok = d.match(data)
	case "target":
		ok = d.target(data)
	default:
		ok = false
	}
	d.exact = d.exact && ok
}

func (d *exprReader) meta(data []byte) bool {
	was := d.load
	d.load, d.key, d.masked = loadMeta, ^uint32(0), 0
	dreg := uint32(0)
	for typ, v := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_META_KEY:
			d.key = kernel.AttrU32(v)
		case unix.NFTA_META_DREG:
			dreg = kernel.AttrU32(v)
		}
	}
	return was == loadNone && dreg == unix.NFT_REG_1
}

func (d *exprReader) payload(data []byte) bool {
	was := d.load
	d.load, d.key, d.size, d.masked = loadNone, 0, 0, 0
	dreg, base := uint32(0), ^uint32(0)
	for typ, v := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_PAYLOAD_DREG:
			dreg = kernel.AttrU32(v)
		case unix.NFTA_PAYLOAD_BASE:
			base = kernel.AttrU32(v)
		case unix.NFTA_PAYLOAD_OFFSET:
			d.key = kernel.AttrU32(v)
		case unix.NFTA_PAYLOAD_LEN:
			d.size = int(kernel.AttrU32(v))
		}
	}
	switch base {
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		d.load = loadNetwork
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		d.load = loadTransport
	}
	return was == loadNone && dreg == unix.NFT_REG_1 && d.load != loadNone
}

func (d *exprReader) bitwise(data []byte) bool {
	regs, hasMask := true, false
	for typ, v := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG:
			regs = regs && kernel.AttrU32(v) == unix.NFT_REG_1
		case unix.NFTA_BITWISE_MASK:
			m := dataValue(v)
			hasMask = len(m) > 0 && len(m) <= len(d.mask)
			d.masked = copy(d.mask[:], m)
		case unix.NFTA_BITWISE_XOR:
			regs = regs && allZero(dataValue(v))
		case attrBitwiseOp:
			regs = regs && kernel.AttrU32(v) == unix.NFT_BITWISE_BOOL
		}
	}
	return regs && hasMask && d.load != loadNone
}

const attrBitwiseOp = 6 // linux/netfilter/nf_tables.h NFTA_BITWISE_OP

func (d *exprReader) cmp(data []byte) bool {
	var v []byte
	var op uint32
	reg := false
	for typ, a := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_CMP_SREG:
			reg = kernel.AttrU32(a) == unix.NFT_REG_1
		case unix.NFTA_CMP_OP:
			op = kernel.AttrU32(a)
		case unix.NFTA_CMP_DATA:
			v = dataValue(a)
		}
	}
	not := op == unix.NFT_CMP_NEQ
	if !reg || op != unix.NFT_CMP_EQ && !not || len(v) == 0 {
		d.load = loadNone
		return false
	}
	ok := d.compared(v, not)
	d.load = loadNone
	return ok
}

// compared notes that what the register holds must, or must not, be v.
func (d *exprReader) compared(v []byte, not bool) bool {
	switch {
	case d.load == loadMeta && d.key == unix.NFT_META_IIFNAME && d.masked == 0:
		name := string(kernel.AttrBytes(v))
		if len(name) == len(v) {
			name += "+"
		}
		was := d.r.In
		d.r.In, d.r.NotIn = name, not
		return was == ""
	case d.load == loadMeta && d.key == unix.NFT_META_L4PROTO && d.masked == 0:
		return len(v) == 1 && !not && d.proto(model.Proto(v[0]))
	case d.load == loadMeta && d.key == unix.NFT_META_MARK && len(v) == 4 && d.r.MarkMask == 0:
		d.r.Mark, d.r.MarkMask, d.r.NotMark = binary.NativeEndian.Uint32(v), ^uint32(0), not
		if d.masked == 4 {
			d.r.MarkMask = binary.NativeEndian.Uint32(d.mask[:])
		}
		return d.r.MarkMask != 0 && (d.masked == 0 || d.masked == 4)
	case d.load == loadNetwork:
		return d.address(v, not)
	case d.load == loadTransport && d.key == dstPortOffset && d.size == 2 && d.masked == 0 && !not && len(v) == 2:
		return d.port(binary.BigEndian.Uint16(v), 0)
	}
	return false
}

func (d *exprReader) proto(p model.Proto) bool {
	was := d.r.Proto
	d.r.Proto = p
	return was == 0 && (p == model.TCP || p == model.UDP || p == model.SCTP)
}

func (d *exprReader) port(first, last uint16) bool {
	was := d.r.Port
	d.r.Port, d.r.PortEnd = first, last
	return was == 0 && first != 0 && d.r.Proto != 0
}

// address reads a comparison with a part of the IP header.
func (d *exprReader) address(v []byte, not bool) bool {
	src, dst, size := addrOffset(d.v6)
	if len(v) != d.size || d.size > size {
		return false
	}
	bits := 8 * d.size
	if d.masked > 0 {
		if bits = prefixLen(d.mask[:d.masked]); bits < 0 || d.masked != d.size {
			return false
		}
	}
	var raw [16]byte
	copy(raw[:], v)
	addr, _ := netip.AddrFromSlice(raw[:size])
	p := netip.PrefixFrom(addr, bits)
	to, neg := &d.r.Src, &d.r.NotSrc
	switch int(d.key) {
	case src:
	case dst:
		to, neg = &d.r.Dst, &d.r.NotDst
	default:
		return false
	}
	was := *to
	*to, *neg = p, not
	return !was.IsValid() && p == p.Masked()
}

// prefixLen is the number of leading ones, or -1 when other ones follow.
func prefixLen(mask []byte) int {
	n := 0
	for n < 8*len(mask) && mask[n/8]&(0x80>>(n%8)) != 0 {
		n++
	}
	for i := n; i < 8*len(mask); i++ {
		if mask[i/8]&(0x80>>(i%8)) != 0 {
			return -1
		}
	}
	return n
}

// ports reads a range of ports.
func (d *exprReader) ports(data []byte) bool {
	var from, to []byte
	ok := d.load == loadTransport && d.key == dstPortOffset && d.size == 2 && d.masked == 0
	d.load = loadNone
	for typ, v := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_RANGE_SREG:
			ok = ok && kernel.AttrU32(v) == unix.NFT_REG_1
		case unix.NFTA_RANGE_OP:
			ok = ok && kernel.AttrU32(v) == unix.NFT_RANGE_EQ
		case unix.NFTA_RANGE_FROM_DATA:
			from = dataValue(v)
		case unix.NFTA_RANGE_TO_DATA:
			to = dataValue(v)
		}
	}
	if !ok || len(from) != 2 || len(to) != 2 {
		return false
	}
	return d.portRange(binary.BigEndian.Uint16(from), binary.BigEndian.Uint16(to))
}

func (d *exprReader) portRange(first, last uint16) bool {
	if first == last {
		last = 0
	}
	return d.port(first, last) && (last == 0 || last > first)
}

func (d *exprReader) verdict(data []byte) bool {
	var code int32
	var chain []byte
	found := false
	for typ, v := range kernel.Attrs(data) {
		if typ != unix.NFTA_IMMEDIATE_DATA {
			continue
		}
		for typ, v := range kernel.Attrs(v) {
			if typ != unix.NFTA_DATA_VERDICT {
				continue
			}
			for typ, v := range kernel.Attrs(v) {
				switch typ {
				case unix.NFTA_VERDICT_CODE:
					code, found = int32(kernel.AttrU32(v)), true
				case unix.NFTA_VERDICT_CHAIN:
					chain = kernel.AttrBytes(v)
				}
			}
		}
	}
	if !found {
		return false
	}
	switch code {
	case unix.NFT_JUMP:
		return d.act(Target{Action: Jump, Chain: string(chain)})
	case unix.NFT_GOTO:
		return d.act(Target{Action: Goto, Chain: string(chain)})
	case unix.NFT_RETURN:
		return d.act(Target{Action: Return})
	case verdictAccept:
		return d.act(Target{Action: Accept})
	case verdictDrop:
		return d.act(Target{Action: DropIt})
	}
	return false
}

func (d *exprReader) act(t Target) bool {
	was := d.acted
	d.r.Target, d.acted = t, true
	return !was
}

// comment reads the user data of a rule: type, length, value.
func (d *exprReader) comment(data []byte) {
	for len(data) >= udataHeadSize {
		typ, n := data[0], int(data[1])
		if n > len(data)-udataHeadSize {
			break
		}
		if typ == udataComment {
			d.exact = d.setComment(data[udataHeadSize:udataHeadSize+n]) && d.exact
		}
		data = data[udataHeadSize+n:]
	}
}

func (d *exprReader) setComment(v []byte) bool {
	was := d.r.Comment
	d.r.Comment = string(kernel.AttrBytes(v))
	return was == ""
}

// cutExtension reads a match or a target; they have the same attributes.
func cutExtension(data []byte) (name string, rev uint32, info []byte) {
	for typ, v := range kernel.Attrs(data) {
		switch typ {
		case unix.NFTA_MATCH_NAME:
			name = string(kernel.AttrBytes(v))
		case unix.NFTA_MATCH_REV:
			rev = kernel.AttrU32(v)
		case unix.NFTA_MATCH_INFO:
			info = v
		}
	}
	return name, rev, info
}

func (d *exprReader) match(data []byte) bool {
	name, rev, info := cutExtension(data)
	switch {
	case name == "comment" && rev == 0:
		return d.setComment(info)
	case name == "addrtype" && rev == 1 && len(info) >= sizeAddrtype:
		return d.addrtype(info)
	case name == "conntrack" && rev == 3 && len(info) >= sizeConntrack:
		return d.conntrack(info)
	case name == "recent" && rev == 1 && len(info) >= sizeRecent:
		return d.recent(info)
	case name == "statistic" && rev == 0 && len(info) >= sizeStatistic:
		was := d.r.Chance
		d.r.Chance = binary.NativeEndian.Uint32(info[4:])
		return was == 0 && d.r.Chance != 0 && allZero(info[:4])
	case name == "nfacct" && rev <= 1 && len(info) >= 32:
		was := d.r.NFAcct
		d.r.NFAcct = string(kernel.AttrBytes(info[:32]))
		return was == ""
	case name == "mark" && rev == 1 && len(info) >= 9:
		was := d.r.MarkMask
		d.r.Mark, d.r.MarkMask = binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:])
		d.r.NotMark = info[8] != 0
		return was == 0 && d.r.MarkMask != 0
	case name == "tcp" && rev == 0 && len(info) >= 12: // xt_tcpudp.h: source ports, destination ports, flags
		return d.r.Proto == model.TCP && d.xtPorts(info[4:8], info[0:4]) && allZero(info[8:12])
	case name == "udp" && rev == 0 && len(info) >= 9:
		return d.r.Proto == model.UDP && d.xtPorts(info[4:8], info[0:4]) && info[8] == 0
	case name == "sctp" && rev == 0 && len(info) >= sizeSCTP:
		return d.sctp(info)
	}
	return false
}

// xtPorts reads ranges as xt_tcpudp.h has them; everything is no match at all.
func (d *exprReader) xtPorts(dst, src []byte) bool {
	first, last := binary.NativeEndian.Uint16(dst), binary.NativeEndian.Uint16(dst[2:])
	if binary.NativeEndian.Uint32(src) != binary.NativeEndian.Uint32([]byte{0, 0, 0xff, 0xff}) {
		return false
	}
	if first == 0 && last == 0xffff {
		return true
	}
	return d.portRange(first, last)
}

func (d *exprReader) sctp(info []byte) bool {
	ok := d.r.Proto == model.SCTP && allZero(info[4:268]) && allZero(info[280:284]) && allZero(info[288:292])
	switch binary.NativeEndian.Uint32(info[284:]) {
	case 0:
		return ok
	case sctpDestPorts:
		return ok && d.portRange(binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:]))
	}
	return false
}

func (d *exprReader) addrtype(info []byte) bool {
	src, dst := binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
	ok := allZero(info[4:8]) && (src == 0 || src == addrtypeLocal && !d.r.SrcLocal) && (dst == 0 || dst == addrtypeLocal && !d.r.DstLocal)
	d.r.SrcLocal = d.r.SrcLocal || src != 0
	d.r.DstLocal = d.r.DstLocal || dst != 0
	return ok
}

func (d *exprReader) conntrack(info []byte) bool {
	at := info[conntrackFlags:]
	mask := binary.NativeEndian.Uint16(at[4:])
	ok := d.r.State == 0 && binary.NativeEndian.Uint16(at) == conntrackState
	for _, s := range ctStates {
		if mask&s.bit != 0 {
			d.r.State |= s.ours
			mask &^= s.bit
		}
	}
	inv := binary.NativeEndian.Uint16(at[2:])
	d.r.NotState = inv == conntrackState
	return ok && mask == 0 && d.r.State != 0 && inv&^conntrackState == 0 && allZero(info[:conntrackFlags])
}

func (d *exprReader) recent(info []byte) bool {
	was := d.r.Recent.List
	seconds := binary.NativeEndian.Uint32(info)
	rec := Recent{
		List:  string(kernel.AttrBytes(info[10:210])),
		Set:   info[8] == recentSet,
		Since: time.Duration(seconds) * time.Second,
	}
	d.r.Recent = rec
	_, _, size := addrOffset(d.v6)
	ok := was == "" && allZero(info[4:8]) && info[9] == 0 && info[210] == 0 && allOnes(info[212:212+size])
	switch info[8] {
	case recentSet, recentCheck:
		return ok && seconds == 0
	case recentCheck | recentReap:
		return ok && seconds > 0
	}
	return false
}

func (d *exprReader) target(data []byte) bool {
	name, rev, info := cutExtension(data)
	reset, port := rejectWith(d.v6)
	switch {
	case name == "DNAT" && rev == 2 && len(info) >= 42:
		return d.dnat(info)
	case name == "MASQUERADE" && rev == 0 && d.v6 && len(info) >= sizeMasq6:
		return d.act(Target{Action: Masquerade}) && binary.NativeEndian.Uint32(info) == natRandomFully
	case name == "MASQUERADE" && rev == 0 && !d.v6 && len(info) >= 20:
		return d.act(Target{Action: Masquerade}) && binary.NativeEndian.Uint32(info) == 1 &&
			binary.NativeEndian.Uint32(info[4:]) == natRandomFully
	case name == "MARK" && rev == 2 && len(info) >= sizeMark:
		value, mask := binary.NativeEndian.Uint32(info), binary.NativeEndian.Uint32(info[4:])
		if mask == 0 {
			return d.act(Target{Action: XorMark, Mark: value})
		}
		return d.act(Target{Action: OrMark, Mark: value}) && mask == value
	case name == "REJECT" && rev == 0 && len(info) >= 4:
		switch binary.NativeEndian.Uint32(info) {
		case reset:
			return d.act(Target{Action: RejectReset})
		case port:
			return d.act(Target{Action: RejectPort})
		}
	}
	return false
}

func (d *exprReader) dnat(info []byte) bool {
	size := 4
	if d.v6 {
		size = 16
	}
	addr, _ := netip.AddrFromSlice(info[4 : 4+size])
	port := binary.BigEndian.Uint16(info[36:])
	ok := bytes.Equal(info[4:20], info[20:36]) && allZero(info[4+size:20]) && bytes.Equal(info[36:38], info[38:40])
	switch binary.NativeEndian.Uint32(info) {
	case natMapIPs:
		ok = ok && port == 0
	case natMapIPs | natProto:
		ok = ok && port != 0
	default:
		ok = false
	}
	return d.act(Target{Action: DNAT, To: netip.AddrPortFrom(addr, port)}) && ok
}

// dataValue is the value in the form of nf_tables' registers.
func dataValue(b []byte) []byte {
	for typ, v := range kernel.Attrs(b) {
		if typ == unix.NFTA_DATA_VALUE {
			return v
		}
	}
	return nil
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func allOnes(b []byte) bool {
	for _, c := range b {
		if c != 0xff {
			return false
		}
	}
	return true
}
