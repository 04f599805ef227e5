package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// fakeExpr is an expression of a rule. Each reads itself from bytes (its parser below), writes itself in the kernel's order and
// with the kernel's register names (fill), and works on registers (eval), as the file of its name in net/netfilter/nft_*.c.
type fakeExpr interface {
	name() string
	fill(b []byte) []byte
	eval(r *run)
}

// fakeReg is the byte in the registers at which a value starts; 0 is the verdict.
type fakeReg int

const (
	fakeRegs     = 80 // the verdict's 16 bytes and 16 words
	fakeRegFirst = 16
)

// fakeRegOf reads a register's number: NFT_REG_1 to 4 are 16 bytes long, NFT_REG32_00 to 15 are 4 (nft_parse_register).
func fakeRegOf(n uint32) (fakeReg, error) {
	switch {
	case n <= unix.NFT_REG_4:
		return fakeReg(n * 16), nil
	case n >= unix.NFT_REG32_00 && n <= unix.NFT_REG32_15:
		return fakeReg(fakeRegFirst + (n-unix.NFT_REG32_00)*4), nil
	}
	return 0, unix.ERANGE
}

// fill writes the number as nft_dump_register does: the name of a long register where one begins.
func (r fakeReg) fill(b []byte, typ uint16) []byte {
	n := uint32(r) / 16
	if r%16 != 0 {
		n = uint32(r-fakeRegFirst)/4 + unix.NFT_REG32_00
	}
	return kernel.AppendAttrU32(b, typ, n)
}

// ruleReader is what parsers know of the rule they are in: its table, and which registers hold something (Linux 6.5 refuses loads of
// others, nft_parse_register_load).
type ruleReader struct {
	t      *fakeTable
	filled [fakeRegs]bool
}

func (r *ruleReader) load(a attrs, typ uint16, n uint32) (fakeReg, error) {
	reg, err := fakeRegOf(a.u32(typ))
	switch {
	case err != nil:
		return 0, err
	case !a.has(typ), reg < fakeRegFirst, n == 0:
		return 0, unix.EINVAL
	case int(reg)+int(n) > fakeRegs:
		return 0, unix.ERANGE
	}
	if slices.Contains(r.filled[reg:int(reg)+int(n)], false) {
		return 0, unix.ENODATA
	}
	return reg, nil
}

func (r *ruleReader) store(a attrs, typ uint16, n uint32) (fakeReg, error) {
	reg, err := fakeRegOf(a.u32(typ))
	switch {
	case err != nil:
		return 0, err
	case !a.has(typ), reg < fakeRegFirst, n == 0:
		return 0, unix.EINVAL
	case int(reg)+int(n) > fakeRegs:
		return 0, unix.ERANGE
	}
	for i := range (n + 3) / 4 * 4 {
		r.filled[int(reg)+int(i)] = true
	}
	return reg, nil
}

type parser struct {
	known []uint16
	parse func(*ruleReader, attrs) (fakeExpr, error)
}

func parserOf(name string) (parser, bool) {
	p, ok := map[string]parser{
		"payload":   {[]uint16{unix.NFTA_PAYLOAD_DREG, unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN}, parsePayload},
		"meta":      {[]uint16{unix.NFTA_META_DREG, unix.NFTA_META_KEY, unix.NFTA_META_SREG}, parseMeta},
		"ct":        {[]uint16{unix.NFTA_CT_DREG, unix.NFTA_CT_KEY, unix.NFTA_CT_DIRECTION, unix.NFTA_CT_SREG}, parseCT},
		"cmp":       {[]uint16{unix.NFTA_CMP_SREG, unix.NFTA_CMP_OP, unix.NFTA_CMP_DATA}, parseCmp},
		"range":     {[]uint16{unix.NFTA_RANGE_SREG, unix.NFTA_RANGE_OP, unix.NFTA_RANGE_FROM_DATA, unix.NFTA_RANGE_TO_DATA}, parseRange},
		"bitwise":   {[]uint16{unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG, unix.NFTA_BITWISE_LEN, unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR, bitwiseOp, bitwiseData}, parseBitwise},
		"byteorder": {[]uint16{unix.NFTA_BYTEORDER_SREG, unix.NFTA_BYTEORDER_DREG, unix.NFTA_BYTEORDER_OP, unix.NFTA_BYTEORDER_LEN, unix.NFTA_BYTEORDER_SIZE}, parseByteorder},
		"immediate": {[]uint16{unix.NFTA_IMMEDIATE_DREG, unix.NFTA_IMMEDIATE_DATA}, parseImmediate},
		"lookup":    {[]uint16{unix.NFTA_LOOKUP_SET, unix.NFTA_LOOKUP_SREG, unix.NFTA_LOOKUP_DREG, unix.NFTA_LOOKUP_SET_ID, unix.NFTA_LOOKUP_FLAGS}, parseLookup},
		"numgen":    {[]uint16{unix.NFTA_NG_DREG, unix.NFTA_NG_MODULUS, unix.NFTA_NG_TYPE, unix.NFTA_NG_OFFSET}, parseNumgen},
		"dynset":    {[]uint16{unix.NFTA_DYNSET_SET_NAME, unix.NFTA_DYNSET_SET_ID, unix.NFTA_DYNSET_OP, unix.NFTA_DYNSET_SREG_KEY, unix.NFTA_DYNSET_SREG_DATA, unix.NFTA_DYNSET_TIMEOUT, unix.NFTA_DYNSET_FLAGS}, parseDynset},
		"nat":       {[]uint16{unix.NFTA_NAT_TYPE, unix.NFTA_NAT_FAMILY, unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX, unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX, unix.NFTA_NAT_FLAGS}, parseNAT},
		"masq":      {[]uint16{unix.NFTA_MASQ_FLAGS}, parseMasq},
		"reject":    {[]uint16{unix.NFTA_REJECT_TYPE, unix.NFTA_REJECT_ICMP_CODE}, parseReject},
		"counter":   {[]uint16{unix.NFTA_COUNTER_BYTES, unix.NFTA_COUNTER_PACKETS}, parseCounter},
		"objref":    {[]uint16{unix.NFTA_OBJREF_IMM_TYPE, unix.NFTA_OBJREF_IMM_NAME}, parseObjref},
		"fib":       {[]uint16{unix.NFTA_FIB_DREG, unix.NFTA_FIB_RESULT, unix.NFTA_FIB_FLAGS}, parseFib},
	}[name]
	return p, ok
}

// The numbers of nf_tables.h that x/sys lacks.
const (
	bitwiseOp   = 6
	bitwiseData = 7
	opBool      = 0
	opLshift    = 1
	opRshift    = 2
	dynsetDel   = 2
)

func parseExprs(t *fakeTable, b []byte) (out []fakeExpr, err error) {
	r := &ruleReader{t: t}
	for typ, v := range kernel.Attrs(b) {
		a, err := parseAttrs(v, unix.NFTA_EXPR_NAME, unix.NFTA_EXPR_DATA)
		if err != nil || typ != unix.NFTA_LIST_ELEM {
			return nil, unix.EINVAL
		}
		name := a.str(unix.NFTA_EXPR_NAME)
		p, ok := parserOf(name)
		if !ok {
			return nil, fmt.Errorf("expression %q: the fake does not know it: %w", name, unix.EOPNOTSUPP)
		}
		data, err := parseAttrs(a[unix.NFTA_EXPR_DATA], p.known...)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		e, err := p.parse(r, data)
		if err != nil {
			return nil, fmt.Errorf("expression %d, %s: %w", len(out), name, err)
		}
		out = append(out, e)
	}
	if len(out) > 128 { // NFT_RULE_MAXEXPRS
		return nil, unix.EINVAL
	}
	return out, nil
}

// payload

type payloadExpr struct {
	dreg              fakeReg
	base, offset, len uint32
}

func parsePayload(r *ruleReader, a attrs) (fakeExpr, error) {
	e := &payloadExpr{base: a.u32(unix.NFTA_PAYLOAD_BASE), offset: a.u32(unix.NFTA_PAYLOAD_OFFSET), len: a.u32(unix.NFTA_PAYLOAD_LEN)}
	if !a.all(unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET, unix.NFTA_PAYLOAD_LEN) {
		return nil, unix.EINVAL
	}
	if e.base != unix.NFT_PAYLOAD_NETWORK_HEADER && e.base != unix.NFT_PAYLOAD_TRANSPORT_HEADER {
		return nil, unix.EOPNOTSUPP
	}
	if e.offset > 255 || e.len > 64 {
		return nil, unix.ERANGE
	}
	var err error
	e.dreg, err = r.store(a, unix.NFTA_PAYLOAD_DREG, e.len)
	return e, err
}

func (*payloadExpr) name() string { return "payload" }

func (e *payloadExpr) fill(b []byte) []byte {
	b = e.dreg.fill(b, unix.NFTA_PAYLOAD_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_BASE, e.base)
	b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_OFFSET, e.offset)
	return kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_LEN, e.len)
}

func (e *payloadExpr) eval(r *run) {
	network, transport := r.f.headers()
	h := network
	if e.base == unix.NFT_PAYLOAD_TRANSPORT_HEADER {
		h = transport
	}
	if int(e.offset+e.len) > len(h) {
		r.leave()
		return
	}
	r.put(e.dreg, h[e.offset:e.offset+e.len])
}

// meta

type metaExpr struct {
	dreg, sreg fakeReg // one of them
	key        uint32
}

func metaLen(key uint32) uint32 {
	switch key {
	case unix.NFT_META_L4PROTO, unix.NFT_META_NFPROTO:
		return 1
	case unix.NFT_META_PROTOCOL:
		return 2
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
		return 16 // IFNAMSIZ
	case unix.NFT_META_MARK:
		return 4
	}
	return 0
}

func parseMeta(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &metaExpr{key: a.u32(unix.NFTA_META_KEY)}
	n := metaLen(e.key)
	switch {
	case !a.has(unix.NFTA_META_KEY) || a.has(unix.NFTA_META_DREG) == a.has(unix.NFTA_META_SREG):
		return nil, unix.EINVAL
	case n == 0:
		return nil, fmt.Errorf("key %d: %w", e.key, unix.EOPNOTSUPP)
	case a.has(unix.NFTA_META_DREG):
		e.dreg, err = r.store(a, unix.NFTA_META_DREG, n)
	case e.key != unix.NFT_META_MARK:
		return nil, unix.EOPNOTSUPP
	default:
		e.sreg, err = r.load(a, unix.NFTA_META_SREG, n)
	}
	return e, err
}

func (*metaExpr) name() string { return "meta" }

func (e *metaExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrU32(b, unix.NFTA_META_KEY, e.key)
	if e.sreg != 0 {
		return e.sreg.fill(b, unix.NFTA_META_SREG)
	}
	return e.dreg.fill(b, unix.NFTA_META_DREG)
}

func (e *metaExpr) eval(r *run) {
	if e.sreg != 0 {
		r.f.mark = r.word(e.sreg)
		return
	}
	name := func(s string) { r.put(e.dreg, append([]byte(s), make([]byte, 16-len(s))...)) }
	switch e.key {
	case unix.NFT_META_L4PROTO:
		r.put(e.dreg, []byte{byte(r.f.p.Proto)})
	case unix.NFT_META_NFPROTO:
		r.put(e.dreg, []byte{r.f.family()})
	case unix.NFT_META_PROTOCOL:
		r.put(e.dreg, map[bool][]byte{false: {0x08, 0}, true: {0x86, 0xdd}}[r.f.v6()])
	case unix.NFT_META_IIFNAME:
		name(r.f.in)
	case unix.NFT_META_OIFNAME:
		name(r.f.out)
	case unix.NFT_META_MARK:
		r.putWord(e.dreg, r.f.mark)
	}
}

// ct

type ctExpr struct {
	dreg, sreg fakeReg // one of them
	key        uint32
	dir        int // -1 is none
}

func parseCT(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &ctExpr{key: a.u32(unix.NFTA_CT_KEY), dir: -1}
	if !a.has(unix.NFTA_CT_KEY) || a.has(unix.NFTA_CT_DREG) == a.has(unix.NFTA_CT_SREG) {
		return nil, unix.EINVAL
	}
	if a.has(unix.NFTA_CT_DIRECTION) {
		if e.dir = int(a[unix.NFTA_CT_DIRECTION][0]); e.dir > 1 {
			return nil, unix.EINVAL
		}
	}
	n, directed := e.size(r.t.family)
	switch {
	case n == 0:
		return nil, fmt.Errorf("key %d: %w", e.key, unix.EOPNOTSUPP)
	case directed != (e.dir >= 0):
		return nil, unix.EINVAL
	case a.has(unix.NFTA_CT_DREG):
		e.dreg, err = r.store(a, unix.NFTA_CT_DREG, n)
	case e.key != unix.NFT_CT_MARK:
		return nil, unix.EOPNOTSUPP
	default:
		e.sreg, err = r.load(a, unix.NFTA_CT_SREG, n)
	}
	return e, err
}

func (e *ctExpr) size(family uint8) (n uint32, directed bool) {
	addr := uint32(4)
	if family == unix.NFPROTO_IPV6 {
		addr = 16
	}
	switch e.key {
	case unix.NFT_CT_DIRECTION:
		return 1, false
	case unix.NFT_CT_STATE, unix.NFT_CT_STATUS, unix.NFT_CT_MARK:
		return 4, false
	case unix.NFT_CT_SRC, unix.NFT_CT_DST:
		return addr, true
	case unix.NFT_CT_PROTO_SRC, unix.NFT_CT_PROTO_DST:
		return 2, true
	case unix.NFT_CT_PROTOCOL, unix.NFT_CT_L3PROTOCOL:
		return 1, true
	case unix.NFT_CT_SRC_IP, unix.NFT_CT_DST_IP:
		return 4, true
	case unix.NFT_CT_SRC_IP6, unix.NFT_CT_DST_IP6:
		return 16, true
	}
	return 0, false
}

func (*ctExpr) name() string { return "ct" }

func (e *ctExpr) fill(b []byte) []byte {
	if e.sreg != 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_CT_KEY, e.key)
		return e.sreg.fill(b, unix.NFTA_CT_SREG)
	}
	b = e.dreg.fill(b, unix.NFTA_CT_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_CT_KEY, e.key)
	if e.dir >= 0 {
		b = kernel.AppendAttr(b, unix.NFTA_CT_DIRECTION, []byte{byte(e.dir)})
	}
	return b
}

// The first packet of a flow, always: linux/netfilter/nf_conntrack_common.h.
const (
	ctNew        = 1 << 3 // NF_CT_STATE_BIT(IP_CT_NEW)
	statusSNAT   = 1 << 4 // IPS_SRC_NAT
	statusDNAT   = 1 << 5 // IPS_DST_NAT
	statusSNATed = 1 << 7 // IPS_SRC_NAT_DONE
	statusDNATed = 1 << 8 // IPS_DST_NAT_DONE
)

func (e *ctExpr) eval(r *run) {
	if e.sreg != 0 {
		r.f.ctmark = r.word(e.sreg)
		return
	}
	src, dst := r.f.p.Src, r.f.p.Dst
	if e.dir == 1 { // the answer comes from the backend
		src, dst = r.f.dst, r.f.p.Src
	}
	switch e.key {
	case unix.NFT_CT_DIRECTION:
		r.put(e.dreg, []byte{0})
	case unix.NFT_CT_STATE:
		r.putWord(e.dreg, ctNew)
	case unix.NFT_CT_STATUS:
		r.putWord(e.dreg, r.f.status())
	case unix.NFT_CT_MARK:
		r.putWord(e.dreg, r.f.ctmark)
	case unix.NFT_CT_SRC, unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		r.putAddr(e, src.Addr())
	case unix.NFT_CT_DST, unix.NFT_CT_DST_IP, unix.NFT_CT_DST_IP6:
		r.putAddr(e, dst.Addr())
	case unix.NFT_CT_PROTO_SRC:
		r.put(e.dreg, portBytes(src))
	case unix.NFT_CT_PROTO_DST:
		r.put(e.dreg, portBytes(dst))
	case unix.NFT_CT_PROTOCOL:
		r.put(e.dreg, []byte{byte(r.f.p.Proto)})
	case unix.NFT_CT_L3PROTOCOL:
		r.put(e.dreg, []byte{r.f.family()})
	}
}

func (r *run) putAddr(e *ctExpr, a netip.Addr) {
	if a.Is6() && (e.key == unix.NFT_CT_SRC_IP || e.key == unix.NFT_CT_DST_IP) || a.Is4() && (e.key == unix.NFT_CT_SRC_IP6 || e.key == unix.NFT_CT_DST_IP6) {
		r.leave()
		return
	}
	r.put(e.dreg, a.AsSlice())
}

func portBytes(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }

// cmp and range

type cmpExpr struct {
	sreg fakeReg
	op   uint32
	data []byte
}

func parseCmp(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	if !a.all(unix.NFTA_CMP_SREG, unix.NFTA_CMP_OP, unix.NFTA_CMP_DATA) {
		return nil, unix.EINVAL
	}
	e := &cmpExpr{op: a.u32(unix.NFTA_CMP_OP)}
	if e.op > unix.NFT_CMP_GTE {
		return nil, unix.EINVAL
	}
	if e.data, err = parseValue(a[unix.NFTA_CMP_DATA], 0); err != nil {
		return nil, err
	}
	e.sreg, err = r.load(a, unix.NFTA_CMP_SREG, uint32(len(e.data)))
	return e, err
}

func (*cmpExpr) name() string { return "cmp" }

func (e *cmpExpr) fill(b []byte) []byte {
	b = e.sreg.fill(b, unix.NFTA_CMP_SREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_CMP_OP, e.op)
	return fillData(b, unix.NFTA_CMP_DATA, e.data)
}

func (e *cmpExpr) eval(r *run) {
	c := bytes.Compare(r.get(e.sreg, len(e.data)), e.data)
	ok := [...]bool{c == 0, c != 0, c < 0, c <= 0, c > 0, c >= 0}[e.op]
	if !ok {
		r.leave()
	}
}

type rangeExpr struct {
	sreg     fakeReg
	op       uint32
	from, to []byte
}

func parseRange(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &rangeExpr{op: a.u32(unix.NFTA_RANGE_OP)}
	if !a.all(unix.NFTA_RANGE_SREG, unix.NFTA_RANGE_OP, unix.NFTA_RANGE_FROM_DATA, unix.NFTA_RANGE_TO_DATA) || e.op > unix.NFT_RANGE_NEQ {
		return nil, unix.EINVAL
	}
	if e.from, err = parseValue(a[unix.NFTA_RANGE_FROM_DATA], 0); err != nil {
		return nil, err
	}
	if e.to, err = parseValue(a[unix.NFTA_RANGE_TO_DATA], uint32(len(e.from))); err != nil {
		return nil, err
	}
	e.sreg, err = r.load(a, unix.NFTA_RANGE_SREG, uint32(len(e.from)))
	return e, err
}

func (*rangeExpr) name() string { return "range" }

func (e *rangeExpr) fill(b []byte) []byte {
	b = e.sreg.fill(b, unix.NFTA_RANGE_SREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_RANGE_OP, e.op)
	b = fillData(b, unix.NFTA_RANGE_FROM_DATA, e.from)
	return fillData(b, unix.NFTA_RANGE_TO_DATA, e.to)
}

func (e *rangeExpr) eval(r *run) {
	v := r.get(e.sreg, len(e.from))
	in := bytes.Compare(v, e.from) >= 0 && bytes.Compare(v, e.to) <= 0
	if in == (e.op == unix.NFT_RANGE_NEQ) {
		r.leave()
	}
}

// bitwise

type bitwiseExpr struct {
	sreg, dreg fakeReg
	len, op    uint32
	mask, xor  []byte
	shift      []byte
}

func parseBitwise(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &bitwiseExpr{len: a.u32(unix.NFTA_BITWISE_LEN), op: a.u32(bitwiseOp)}
	switch {
	case !a.has(unix.NFTA_BITWISE_LEN) || e.len > 255:
		return nil, unix.EINVAL
	case e.op > opRshift:
		return nil, unix.EOPNOTSUPP
	}
	if e.sreg, err = r.load(a, unix.NFTA_BITWISE_SREG, e.len); err != nil {
		return nil, err
	}
	if e.dreg, err = r.store(a, unix.NFTA_BITWISE_DREG, e.len); err != nil {
		return nil, err
	}
	if e.op != opBool {
		if a.has(unix.NFTA_BITWISE_MASK) || a.has(unix.NFTA_BITWISE_XOR) || !a.has(bitwiseData) {
			return nil, unix.EINVAL
		}
		e.shift, err = parseValue(a[bitwiseData], 4)
		if err == nil && (binary.NativeEndian.Uint32(e.shift) >= 32) {
			err = unix.EINVAL
		}
		return e, err
	}
	if a.has(bitwiseData) || !a.all(unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR) {
		return nil, unix.EINVAL
	}
	if e.mask, err = parseValue(a[unix.NFTA_BITWISE_MASK], e.len); err != nil {
		return nil, err
	}
	e.xor, err = parseValue(a[unix.NFTA_BITWISE_XOR], e.len)
	return e, err
}

func (*bitwiseExpr) name() string { return "bitwise" }

func (e *bitwiseExpr) fill(b []byte) []byte {
	b = e.sreg.fill(b, unix.NFTA_BITWISE_SREG)
	b = e.dreg.fill(b, unix.NFTA_BITWISE_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_LEN, e.len)
	b = kernel.AppendAttrU32(b, bitwiseOp, e.op)
	if e.op != opBool {
		return fillData(b, bitwiseData, e.shift)
	}
	b = fillData(b, unix.NFTA_BITWISE_MASK, e.mask)
	return fillData(b, unix.NFTA_BITWISE_XOR, e.xor)
}

func (e *bitwiseExpr) eval(r *run) {
	v := r.get(e.sreg, int(e.len))
	if e.op == opBool {
		for i := range v {
			v[i] = v[i]&e.mask[i] ^ e.xor[i]
		}
		r.put(e.dreg, v)
		return
	}
	words := (len(v) + 3) / 4
	n := binary.NativeEndian.Uint32(e.shift)
	carry := uint32(0)
	for i := range words {
		at := i
		if e.op == opLshift {
			at = words - 1 - i
		}
		src := r.word(e.sreg + fakeReg(at*4))
		if e.op == opLshift {
			r.putWord(e.dreg+fakeReg(at*4), src<<n|carry)
			carry = uint32(uint64(src) >> (32 - n))
		} else {
			r.putWord(e.dreg+fakeReg(at*4), src>>n|carry)
			carry = uint32(uint64(src) << (32 - n))
		}
	}
}

// byteorder

type byteorderExpr struct {
	sreg, dreg    fakeReg
	op, len, size uint32
}

func parseByteorder(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &byteorderExpr{op: a.u32(unix.NFTA_BYTEORDER_OP), len: a.u32(unix.NFTA_BYTEORDER_LEN), size: a.u32(unix.NFTA_BYTEORDER_SIZE)}
	if !a.all(unix.NFTA_BYTEORDER_OP, unix.NFTA_BYTEORDER_LEN, unix.NFTA_BYTEORDER_SIZE) || e.op > 1 || !slices.Contains([]uint32{2, 4, 8}, e.size) {
		return nil, unix.EINVAL
	}
	if e.sreg, err = r.load(a, unix.NFTA_BYTEORDER_SREG, e.len); err != nil {
		return nil, err
	}
	e.dreg, err = r.store(a, unix.NFTA_BYTEORDER_DREG, e.len)
	return e, err
}

func (*byteorderExpr) name() string { return "byteorder" }

func (e *byteorderExpr) fill(b []byte) []byte {
	b = e.sreg.fill(b, unix.NFTA_BYTEORDER_SREG)
	b = e.dreg.fill(b, unix.NFTA_BYTEORDER_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_BYTEORDER_OP, e.op)
	b = kernel.AppendAttrU32(b, unix.NFTA_BYTEORDER_LEN, e.len)
	return kernel.AppendAttrU32(b, unix.NFTA_BYTEORDER_SIZE, e.size)
}

func (e *byteorderExpr) eval(r *run) {
	v := r.get(e.sreg, int(e.len))
	for i := 0; i+int(e.size) <= len(v); i += int(e.size) {
		slices.Reverse(v[i : i+int(e.size)]) // this is a little-endian machine, or both would be alike
	}
	r.put(e.dreg, v)
}

// immediate

type immediateExpr struct {
	dreg    fakeReg
	data    []byte
	verdict *fakeVerdict
}

func parseImmediate(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	if !a.all(unix.NFTA_IMMEDIATE_DREG, unix.NFTA_IMMEDIATE_DATA) {
		return nil, unix.EINVAL
	}
	e := &immediateExpr{}
	if a.u32(unix.NFTA_IMMEDIATE_DREG) == unix.NFT_REG_VERDICT {
		e.verdict, err = r.t.verdict(a[unix.NFTA_IMMEDIATE_DATA])
		return e, err
	}
	if e.data, err = parseValue(a[unix.NFTA_IMMEDIATE_DATA], 0); err != nil {
		return nil, err
	}
	e.dreg, err = r.store(a, unix.NFTA_IMMEDIATE_DREG, uint32(len(e.data)))
	return e, err
}

func (*immediateExpr) name() string { return "immediate" }

func (e *immediateExpr) fill(b []byte) []byte {
	b = e.dreg.fill(b, unix.NFTA_IMMEDIATE_DREG)
	if e.verdict != nil {
		return e.verdict.fill(b, unix.NFTA_IMMEDIATE_DATA)
	}
	return fillData(b, unix.NFTA_IMMEDIATE_DATA, e.data)
}

func (e *immediateExpr) eval(r *run) {
	if e.verdict != nil {
		r.verdict = *e.verdict
		return
	}
	r.put(e.dreg, e.data)
}

// lookup

type lookupExpr struct {
	set        string
	sreg, dreg fakeReg
	keyLen     int
	mapped     bool
	flags      uint32
}

func parseLookup(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &lookupExpr{set: a.str(unix.NFTA_LOOKUP_SET), flags: a.u32(unix.NFTA_LOOKUP_FLAGS), mapped: a.has(unix.NFTA_LOOKUP_DREG)}
	if !a.all(unix.NFTA_LOOKUP_SET, unix.NFTA_LOOKUP_SREG) || e.flags&^unix.NFT_LOOKUP_F_INV != 0 {
		return nil, unix.EINVAL
	}
	s := r.t.sets[e.set]
	if s == nil {
		return nil, fmt.Errorf("set %s: %w", e.set, unix.ENOENT)
	}
	e.keyLen = int(s.keyLen)
	if e.sreg, err = r.load(a, unix.NFTA_LOOKUP_SREG, s.keyLen); err != nil {
		return nil, err
	}
	switch {
	case !e.mapped && s.isMap(): // Linux since 6.9 allows it
		return nil, unix.EINVAL
	case !e.mapped:
		return e, nil
	case !s.isMap(), e.flags != 0, s.verdicts() != (a.u32(unix.NFTA_LOOKUP_DREG) == unix.NFT_REG_VERDICT):
		return nil, unix.EINVAL
	case s.verdicts():
		return e, nil
	}
	e.dreg, err = r.store(a, unix.NFTA_LOOKUP_DREG, s.dataLen)
	return e, err
}

func (*lookupExpr) name() string { return "lookup" }

func (e *lookupExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_LOOKUP_SET, e.set)
	b = e.sreg.fill(b, unix.NFTA_LOOKUP_SREG)
	if e.mapped {
		b = e.dreg.fill(b, unix.NFTA_LOOKUP_DREG)
	}
	return kernel.AppendAttrU32(b, unix.NFTA_LOOKUP_FLAGS, e.flags)
}

func (e *lookupExpr) eval(r *run) {
	s := r.t.sets[e.set]
	found := s.find(r.get(e.sreg, e.keyLen))
	if found == nil {
		found = s.elems["catchall"]
	}
	if (found == nil) == (e.flags == 0) {
		r.leave()
		return
	}
	switch {
	case !e.mapped:
	case found.verdict != nil:
		r.verdict = *found.verdict
	default:
		r.put(e.dreg, found.data)
	}
}

// numgen

type numgenExpr struct {
	dreg                 fakeReg
	modulus, typ, offset uint32
}

func parseNumgen(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &numgenExpr{modulus: a.u32(unix.NFTA_NG_MODULUS), typ: a.u32(unix.NFTA_NG_TYPE), offset: a.u32(unix.NFTA_NG_OFFSET)}
	switch {
	case !a.all(unix.NFTA_NG_DREG, unix.NFTA_NG_MODULUS, unix.NFTA_NG_TYPE), e.typ > unix.NFT_NG_RANDOM:
		return nil, unix.EINVAL
	case e.modulus == 0:
		return nil, unix.ERANGE
	case e.offset+e.modulus-1 < e.offset:
		return nil, unix.EOVERFLOW
	}
	e.dreg, err = r.store(a, unix.NFTA_NG_DREG, 4)
	return e, err
}

func (*numgenExpr) name() string { return "numgen" }

func (e *numgenExpr) fill(b []byte) []byte {
	b = e.dreg.fill(b, unix.NFTA_NG_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_NG_MODULUS, e.modulus)
	b = kernel.AppendAttrU32(b, unix.NFTA_NG_TYPE, e.typ)
	return kernel.AppendAttrU32(b, unix.NFTA_NG_OFFSET, e.offset)
}

func (e *numgenExpr) eval(r *run) {
	if e.typ == unix.NFT_NG_RANDOM {
		r.putWord(e.dreg, r.f.rnd.Uint32N(e.modulus)+e.offset)
		return
	}
	n := r.f.k.numgen[e]
	r.f.k.numgen[e] = n + 1
	r.putWord(e.dreg, n%e.modulus+e.offset)
}

// dynset

type dynsetExpr struct {
	set            string
	op, flags      uint32
	key, data      fakeReg
	keyLen, length int
	timeout        uint64 // ms; 0 is the set's
}

func parseDynset(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &dynsetExpr{set: a.str(unix.NFTA_DYNSET_SET_NAME), op: a.u32(unix.NFTA_DYNSET_OP), flags: a.u32(unix.NFTA_DYNSET_FLAGS),
		timeout: a.u64(unix.NFTA_DYNSET_TIMEOUT)}
	if !a.all(unix.NFTA_DYNSET_SET_NAME, unix.NFTA_DYNSET_OP, unix.NFTA_DYNSET_SREG_KEY) || e.flags&^unix.NFT_DYNSET_F_INV != 0 {
		return nil, unix.EINVAL
	}
	s := r.t.sets[e.set]
	switch {
	case s == nil:
		return nil, fmt.Errorf("set %s: %w", e.set, unix.ENOENT)
	case !s.updates(), e.op > dynsetDel, e.op == unix.NFT_DYNSET_OP_UPDATE && !s.timed(): // newer kernels allow the latter
		return nil, unix.EOPNOTSUPP
	case s.flags&unix.NFT_SET_CONSTANT != 0:
		return nil, unix.EBUSY
	case a.has(unix.NFTA_DYNSET_TIMEOUT) && !s.timed():
		return nil, unix.EOPNOTSUPP
	case a.has(unix.NFTA_DYNSET_SREG_DATA) && (!s.isMap() || s.verdicts()):
		return nil, unix.EOPNOTSUPP
	case s.isMap() && !a.has(unix.NFTA_DYNSET_SREG_DATA): // also to delete
		return nil, unix.EINVAL
	}
	if s.size == 0 { // what packets fill has an end
		s.size = 0xffff
	}
	e.keyLen, e.length = int(s.keyLen), int(s.dataLen)
	if e.key, err = r.load(a, unix.NFTA_DYNSET_SREG_KEY, s.keyLen); err == nil && s.isMap() {
		e.data, err = r.load(a, unix.NFTA_DYNSET_SREG_DATA, s.dataLen)
	}
	return e, err
}

func (*dynsetExpr) name() string { return "dynset" }

func (e *dynsetExpr) fill(b []byte) []byte {
	b = e.key.fill(b, unix.NFTA_DYNSET_SREG_KEY)
	if e.length > 0 {
		b = e.data.fill(b, unix.NFTA_DYNSET_SREG_DATA)
	}
	b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_OP, e.op)
	b = kernel.AppendAttrString(b, unix.NFTA_DYNSET_SET_NAME, e.set)
	b = kernel.AppendAttrU64(b, unix.NFTA_DYNSET_TIMEOUT, e.timeout)
	return kernel.AppendAttrU32(b, unix.NFTA_DYNSET_FLAGS, e.flags)
}

// eval adds the packet's key. One that is there keeps its data: an update touches the timeout alone (nft_dynset_eval).
func (e *dynsetExpr) eval(r *run) {
	s := r.t.sets[e.set]
	key := string(r.get(e.key, e.keyLen))
	if e.op == dynsetDel {
		if s.elems[key] != nil {
			s.own()
			_ = r.t.drop(s, key)
		}
		return
	}
	ok := s.elems[key] != nil
	if !ok && (s.size == 0 || len(s.elems) < int(s.size)) {
		s.own()
		n := &fakeElem{key: []byte(key), timeout: e.timeout, dynamic: true}
		if n.timeout == 0 {
			n.timeout = s.timeout
		}
		n.explicit = n.timeout != s.timeout
		if e.length > 0 {
			n.data = r.get(e.data, e.length)
		}
		s.elems[key], ok = n, true
	}
	if ok == (e.flags != 0) {
		r.leave()
	}
}

// nat and masq

type natExpr struct {
	typ, family                    uint32
	addr, addrMax, proto, protoMax fakeReg
	addrLen                        int
	flags                          uint32
}

const natKnownFlags = 0x7f // linux/netfilter/nf_nat.h NF_NAT_RANGE_MASK

func parseNAT(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &natExpr{typ: a.u32(unix.NFTA_NAT_TYPE), family: a.u32(unix.NFTA_NAT_FAMILY), flags: a.u32(unix.NFTA_NAT_FLAGS), addrLen: 4}
	if r.t.family == unix.NFPROTO_IPV6 {
		e.addrLen = 16
	}
	switch {
	case !a.has(unix.NFTA_NAT_TYPE) || !a.has(unix.NFTA_NAT_REG_ADDR_MIN) && !a.has(unix.NFTA_NAT_REG_PROTO_MIN):
		return nil, unix.EINVAL
	case e.typ > unix.NFT_NAT_DNAT || !a.has(unix.NFTA_NAT_FAMILY):
		return nil, unix.EINVAL
	case e.family != uint32(r.t.family) || e.flags&^natKnownFlags != 0:
		return nil, unix.EOPNOTSUPP
	}
	read := func(min, max uint16, n int, to, toMax *fakeReg) {
		if err != nil || !a.has(min) {
			return
		}
		if *to, err = r.load(a, min, uint32(n)); err == nil {
			*toMax = *to
			if a.has(max) {
				*toMax, err = r.load(a, max, uint32(n))
			}
		}
	}
	read(unix.NFTA_NAT_REG_ADDR_MIN, unix.NFTA_NAT_REG_ADDR_MAX, e.addrLen, &e.addr, &e.addrMax)
	read(unix.NFTA_NAT_REG_PROTO_MIN, unix.NFTA_NAT_REG_PROTO_MAX, 2, &e.proto, &e.protoMax)
	if e.addr != 0 {
		e.flags |= 1 // NF_NAT_RANGE_MAP_IPS
	}
	if e.proto != 0 {
		e.flags |= 2 // NF_NAT_RANGE_PROTO_SPECIFIED
	}
	return e, err
}

func (*natExpr) name() string { return "nat" }

func (e *natExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrU32(b, unix.NFTA_NAT_TYPE, e.typ)
	b = kernel.AppendAttrU32(b, unix.NFTA_NAT_FAMILY, e.family)
	if e.addr != 0 {
		b = e.addr.fill(b, unix.NFTA_NAT_REG_ADDR_MIN)
		b = e.addrMax.fill(b, unix.NFTA_NAT_REG_ADDR_MAX)
	}
	if e.proto != 0 {
		b = e.proto.fill(b, unix.NFTA_NAT_REG_PROTO_MIN)
		b = e.protoMax.fill(b, unix.NFTA_NAT_REG_PROTO_MAX)
	}
	return kernel.AppendAttrU32(b, unix.NFTA_NAT_FLAGS, e.flags)
}

func (e *natExpr) validate(h *fakeHook) error {
	hooks := []uint32{inPostrouting, inInput}
	if e.typ == unix.NFT_NAT_DNAT {
		hooks = []uint32{inPrerouting, inOutput}
	}
	return only(h, "nat", hooks...)
}

func only(h *fakeHook, typ string, hooks ...uint32) error {
	if typ != "" && h.typ != typ || !slices.Contains(hooks, h.num) {
		return unix.EOPNOTSUPP
	}
	return nil
}

func (e *natExpr) eval(r *run) {
	at := &r.f.src
	done := &r.f.snat
	if e.typ == unix.NFT_NAT_DNAT {
		at, done = &r.f.dst, &r.f.dnat
	}
	to := *at
	if e.addr != 0 {
		ip, _ := netip.AddrFromSlice(r.get(e.addr, e.addrLen))
		to = netip.AddrPortFrom(ip, to.Port())
	}
	if e.proto != 0 {
		to = netip.AddrPortFrom(to.Addr(), binary.BigEndian.Uint16(r.get(e.proto, 2)))
	}
	if e.addr != e.addrMax || e.proto != e.protoMax {
		r.f.fail("nat to a range: the fake does not know it")
	}
	*at, *done = to, true
	r.verdict = fakeVerdict{code: verdictAcceptCode}
}

type masqExpr struct{ flags uint32 }

func parseMasq(_ *ruleReader, a attrs) (fakeExpr, error) {
	e := &masqExpr{a.u32(unix.NFTA_MASQ_FLAGS)}
	if e.flags&^natKnownFlags != 0 {
		return nil, unix.EINVAL
	}
	return e, nil
}

func (*masqExpr) name() string { return "masq" }

func (e *masqExpr) fill(b []byte) []byte {
	if e.flags == 0 {
		return b
	}
	return kernel.AppendAttrU32(b, unix.NFTA_MASQ_FLAGS, e.flags)
}

func (e *masqExpr) validate(h *fakeHook) error { return only(h, "nat", inPostrouting) }

func (e *masqExpr) eval(r *run) {
	r.f.snat = true
	r.verdict = fakeVerdict{code: verdictAcceptCode}
}

// reject

type rejectExpr struct {
	typ  uint32
	code byte
}

func parseReject(_ *ruleReader, a attrs) (fakeExpr, error) {
	e := &rejectExpr{typ: a.u32(unix.NFTA_REJECT_TYPE)}
	switch {
	case !a.has(unix.NFTA_REJECT_TYPE):
		return nil, unix.EINVAL
	case e.typ == unix.NFT_REJECT_TCP_RST:
		return e, nil
	case e.typ > unix.NFT_REJECT_ICMPX_UNREACH || len(a[unix.NFTA_REJECT_ICMP_CODE]) != 1:
		return nil, unix.EINVAL
	}
	e.code = a[unix.NFTA_REJECT_ICMP_CODE][0]
	return e, nil
}

func (*rejectExpr) name() string { return "reject" }

func (e *rejectExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrU32(b, unix.NFTA_REJECT_TYPE, e.typ)
	if e.typ != unix.NFT_REJECT_TCP_RST {
		b = kernel.AppendAttr(b, unix.NFTA_REJECT_ICMP_CODE, []byte{e.code})
	}
	return b
}

func (e *rejectExpr) validate(h *fakeHook) error {
	return only(h, "", inPrerouting, inInput, inForward, inOutput)
}

// eval refuses. A reset answers TCP alone; nothing else hears of it (nf_reject_ip_tcphdr_get).
func (e *rejectExpr) eval(r *run) {
	unreachable := byte(3) // ICMP_PORT_UNREACH
	if r.f.v6() {
		unreachable = 4 // ICMPV6_PORT_UNREACH
	}
	switch {
	case e.typ == unix.NFT_REJECT_TCP_RST:
		r.f.refused = r.f.p.Proto == model.TCP
	case e.typ == unix.NFT_REJECT_ICMPX_UNREACH: // taken, and silent: it is for other families
	case e.code == unreachable:
		r.f.refused = true
	default:
		r.f.fail("refused with ICMP code %d", e.code)
	}
	r.verdict = fakeVerdict{code: verdictDropCode}
}

// counter and objref

type counterExpr struct{ bytes, packets uint64 }

func parseCounter(_ *ruleReader, a attrs) (fakeExpr, error) {
	return &counterExpr{a.u64(unix.NFTA_COUNTER_BYTES), a.u64(unix.NFTA_COUNTER_PACKETS)}, nil
}

func (*counterExpr) name() string { return "counter" }

func (e *counterExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrU64(b, unix.NFTA_COUNTER_BYTES, e.bytes)
	return kernel.AppendAttrU64(b, unix.NFTA_COUNTER_PACKETS, e.packets)
}

const packetBytes = 60 // what a first packet weighs

func (e *counterExpr) eval(*run) { e.bytes += packetBytes; e.packets++ }

type objrefExpr struct {
	typ    uint32
	object string
}

func parseObjref(r *ruleReader, a attrs) (fakeExpr, error) {
	e := &objrefExpr{a.u32(unix.NFTA_OBJREF_IMM_TYPE), a.str(unix.NFTA_OBJREF_IMM_NAME)}
	if !a.all(unix.NFTA_OBJREF_IMM_NAME, unix.NFTA_OBJREF_IMM_TYPE) {
		return nil, unix.EINVAL
	}
	if o := r.t.objs[e.object]; o == nil || o.typ != e.typ {
		return nil, unix.ENOENT
	}
	return e, nil
}

func (*objrefExpr) name() string { return "objref" }

func (e *objrefExpr) fill(b []byte) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_OBJREF_IMM_NAME, e.object)
	return kernel.AppendAttrU32(b, unix.NFTA_OBJREF_IMM_TYPE, e.typ)
}

func (e *objrefExpr) eval(r *run) {
	o := r.t.objs[e.object]
	o.bytes, o.packets = o.bytes+packetBytes, o.packets+1
}

// fib

type fibExpr struct {
	dreg          fakeReg
	result, flags uint32
}

func parseFib(r *ruleReader, a attrs) (_ fakeExpr, err error) {
	e := &fibExpr{result: a.u32(unix.NFTA_FIB_RESULT), flags: a.u32(unix.NFTA_FIB_FLAGS)}
	if !a.all(unix.NFTA_FIB_RESULT, unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_DREG) {
		return nil, unix.EINVAL
	}
	if e.result != unix.NFT_FIB_RESULT_ADDRTYPE || e.flags != unix.NFTA_FIB_F_SADDR && e.flags != unix.NFTA_FIB_F_DADDR {
		return nil, unix.EOPNOTSUPP // the type of an address is all that is modelled
	}
	e.dreg, err = r.store(a, unix.NFTA_FIB_DREG, 4)
	return e, err
}

func (*fibExpr) name() string { return "fib" }

func (e *fibExpr) fill(b []byte) []byte {
	b = e.dreg.fill(b, unix.NFTA_FIB_DREG)
	b = kernel.AppendAttrU32(b, unix.NFTA_FIB_RESULT, e.result)
	return kernel.AppendAttrU32(b, unix.NFTA_FIB_FLAGS, e.flags)
}

func (e *fibExpr) eval(r *run) {
	a := r.f.dst.Addr()
	if e.flags == unix.NFTA_FIB_F_SADDR {
		a = r.f.src.Addr()
	}
	typ := uint32(unix.RTN_UNICAST)
	if r.f.local(a) {
		typ = unix.RTN_LOCAL
	}
	r.putWord(e.dreg, typ)
}

// describe is an expression in words, without what packets change.
func describe(e fakeExpr) string {
	switch e := e.(type) {
	case *counterExpr:
		return "counter"
	case *immediateExpr:
		if e.verdict != nil {
			return e.verdict.String()
		}
		return fmt.Sprintf("reg %d = %x", e.dreg, e.data)
	case *cmpExpr:
		return fmt.Sprintf("reg %d %s %x", e.sreg, [...]string{"==", "!=", "<", "<=", ">", ">="}[e.op], e.data)
	}
	return fmt.Sprintf("%s%+v", e.name(), e)
}
