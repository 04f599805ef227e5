package nftables

import (
	"encoding/binary"
	"hash/fnv"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// rule is one rule as nf_tables expressions. Its methods append one each; in comments stands how nft prints them.
//
// Registers are numbered from 0 in words of four bytes; there are 16 (NFT_REG32_00 and on). No rule may read what another
// has loaded (Linux 6.5 and newer refuse it).
type rule struct {
	v6      bool
	comment string
	b       []byte
}

// chain is a chain and its rules.
type chain struct {
	name  string
	hook  *hook // of a base chain
	rules []*rule
}

// hook is where a base chain gets its packets from (linux/netfilter.h enum nf_inet_hooks).
type hook struct {
	num      uint32
	priority int32
	typ      string
}

var (
	hookPrerouting  = &hook{unix.NF_INET_PRE_ROUTING, -100, "nat"} // NF_IP_PRI_NAT_DST
	hookOutput      = &hook{unix.NF_INET_LOCAL_OUT, -100, "nat"}
	hookPostrouting = &hook{unix.NF_INET_POST_ROUTING, 100, "nat"} // NF_IP_PRI_NAT_SRC
	hookForward     = &hook{unix.NF_INET_FORWARD, 0, "filter"}
	hookInput       = &hook{unix.NF_INET_LOCAL_IN, 0, "filter"}
)

func register(word int) uint32 { return uint32(unix.NFT_REG32_00 + word) }

// expr appends one expression.
func (r *rule) expr(name string, data func(b []byte) []byte) *rule {
	b, elem := kernel.BeginNest(r.b, unix.NFTA_LIST_ELEM)
	b = kernel.AppendAttrString(b, unix.NFTA_EXPR_NAME, name)
	b, at := kernel.BeginNest(b, unix.NFTA_EXPR_DATA)
	b = kernel.EndNest(data(b), at)
	r.b = kernel.EndNest(b, elem)
	return r
}

func (r *rule) payload(base, offset, length uint32, to int) *rule {
	return r.expr("payload", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_DREG, register(to))
		b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_BASE, base)
		b = kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_OFFSET, offset)
		return kernel.AppendAttrU32(b, unix.NFTA_PAYLOAD_LEN, length)
	})
}

// source loads "ip saddr".
func (r *rule) source(to int) *rule {
	offset := uint32(12) // RFC 791
	if r.v6 {
		offset = 8 // RFC 8200
	}
	return r.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(addrLen(r.v6)), to)
}

// destination loads "ip daddr".
func (r *rule) destination(to int) *rule {
	offset := uint32(16)
	if r.v6 {
		offset = 24
	}
	return r.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, uint32(addrLen(r.v6)), to)
}

// port loads "th dport", which is at the same place for TCP, UDP and SCTP.
func (r *rule) port(to int) *rule { return r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, to) }

func (r *rule) meta(key uint32, to int) *rule {
	return r.expr("meta", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_META_DREG, register(to))
		return kernel.AppendAttrU32(b, unix.NFTA_META_KEY, key)
	})
}

func (r *rule) setMark(from int) *rule {
	return r.expr("meta", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_META_KEY, unix.NFT_META_MARK)
		return kernel.AppendAttrU32(b, unix.NFTA_META_SREG, register(from))
	})
}

func (r *rule) proto(to int) *rule { return r.meta(unix.NFT_META_L4PROTO, to) }

// conntrack loads "ct state", "ct status", "ct mark" or "ct direction".
func (r *rule) conntrack(key uint32, to int) *rule {
	return r.expr("ct", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_CT_DREG, register(to))
		return kernel.AppendAttrU32(b, unix.NFTA_CT_KEY, key)
	})
}

// setFlowMark sets "ct mark".
func (r *rule) setFlowMark(from int) *rule {
	return r.expr("ct", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_CT_KEY, unix.NFT_CT_MARK)
		return kernel.AppendAttrU32(b, unix.NFTA_CT_SREG, register(from))
	})
}

func appendValue(b []byte, typ uint16, v []byte) []byte {
	b, at := kernel.BeginNest(b, typ)
	return kernel.EndNest(kernel.AppendAttr(b, unix.NFTA_DATA_VALUE, v), at)
}

// equal goes on when the register holds v; notEqual when it does not.
func (r *rule) equal(reg int, v []byte) *rule    { return r.compare(unix.NFT_CMP_EQ, reg, v) }
func (r *rule) notEqual(reg int, v []byte) *rule { return r.compare(unix.NFT_CMP_NEQ, reg, v) }

func (r *rule) compare(op uint32, reg int, v []byte) *rule {
	return r.expr("cmp", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_CMP_SREG, register(reg))
		b = kernel.AppendAttrU32(b, unix.NFTA_CMP_OP, op)
		return appendValue(b, unix.NFTA_CMP_DATA, v)
	})
}

// mask makes (reg & mask) ^ xor of a register.
func (r *rule) mask(reg int, mask, xor []byte) *rule {
	return r.expr("bitwise", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_SREG, register(reg))
		b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_DREG, register(reg))
		b = kernel.AppendAttrU32(b, unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		b = appendValue(b, unix.NFTA_BITWISE_MASK, mask)
		return appendValue(b, unix.NFTA_BITWISE_XOR, xor)
	})
}

// flagged goes on when any of the bits is set in a number.
func (r *rule) flagged(reg int, bits uint32) *rule {
	return r.mask(reg, appendNumber(nil, bits), make([]byte, 4)).notEqual(reg, make([]byte, 4))
}

// random loads "numgen random mod n".
func (r *rule) random(n, to int) *rule {
	return r.expr("numgen", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_NG_DREG, register(to))
		b = kernel.AppendAttrU32(b, unix.NFTA_NG_MODULUS, uint32(n))
		b = kernel.AppendAttrU32(b, unix.NFTA_NG_TYPE, unix.NFT_NG_RANDOM)
		return kernel.AppendAttrU32(b, unix.NFTA_NG_OFFSET, 0)
	})
}

// in goes on when the set has the key in the registers.
func (r *rule) in(s setID, from int) *rule { return r.lookup(s, from, false, nil) }

// notIn goes on when it has not.
func (r *rule) notIn(s setID, from int) *rule { return r.lookup(s, from, true, nil) }

// mapped goes on when the map has the key, with its value in registers.
func (r *rule) mapped(s setID, from, to int) *rule {
	reg := register(to)
	return r.lookup(s, from, false, &reg)
}

// viaMark takes a number that came out of a map through the packet's mark, which is afterwards what it was. It changes nothing,
// but nft 1.0.6 aborts when it has to print a value that comes out of one map and goes into another; a mark it can print.
func (r *rule) viaMark(reg, spare int) *rule {
	return r.meta(unix.NFT_META_MARK, spare).setMark(reg).meta(unix.NFT_META_MARK, reg).setMark(spare)
}

// vmap does what the map says of the key.
func (r *rule) vmap(s setID, from int) *rule {
	reg := uint32(unix.NFT_REG_VERDICT)
	return r.lookup(s, from, false, &reg)
}

func (r *rule) lookup(s setID, from int, invert bool, to *uint32) *rule {
	return r.expr("lookup", func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_LOOKUP_SET, s.String())
		b = kernel.AppendAttrU32(b, unix.NFTA_LOOKUP_SREG, register(from))
		if to != nil {
			b = kernel.AppendAttrU32(b, unix.NFTA_LOOKUP_DREG, *to)
		}
		if invert {
			b = kernel.AppendAttrU32(b, unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
		}
		return b
	})
}

// remember writes an element of the affinity map, for so many seconds, or refreshes the one that is there. When the map is
// full the rule ends here.
func (r *rule) remember(key, value int, seconds uint32) *rule {
	return r.expr("dynset", func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_DYNSET_SET_NAME, setAffinity.String())
		b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_OP, unix.NFT_DYNSET_OP_UPDATE)
		b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_SREG_KEY, register(key))
		b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_SREG_DATA, register(value))
		return kernel.AppendAttrU64(b, unix.NFTA_DYNSET_TIMEOUT, uint64(seconds)*1000)
	})
}

// forget deletes the element of the affinity map, if there is one. The kernel wants a value all the same.
func (r *rule) forget(key, value int) *rule {
	const opDelete = 2 // NFT_DYNSET_OP_DELETE
	return r.expr("dynset", func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_DYNSET_SET_NAME, setAffinity.String())
		b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_OP, opDelete)
		b = kernel.AppendAttrU32(b, unix.NFTA_DYNSET_SREG_KEY, register(key))
		return kernel.AppendAttrU32(b, unix.NFTA_DYNSET_SREG_DATA, register(value))
	})
}

// dnat sends the connection to the address and the port in registers.
func (r *rule) dnat(addr int) *rule {
	return r.expr("nat", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		b = kernel.AppendAttrU32(b, unix.NFTA_NAT_FAMILY, uint32(family(r.v6)))
		b = kernel.AppendAttrU32(b, unix.NFTA_NAT_REG_ADDR_MIN, register(addr))
		return kernel.AppendAttrU32(b, unix.NFTA_NAT_REG_PROTO_MIN, register(addr+addrLen(r.v6)/4))
	})
}

func (r *rule) masquerade() *rule {
	const randomFully = 1 << 4 // linux/netfilter/nf_nat.h NF_NAT_RANGE_PROTO_RANDOM_FULLY
	return r.expr("masq", func(b []byte) []byte { return kernel.AppendAttrU32(b, unix.NFTA_MASQ_FLAGS, randomFully) })
}

// reject answers a TCP packet with a reset, or any with an ICMP port unreachable.
func (r *rule) reject(reset bool) *rule {
	typ, code := uint32(unix.NFT_REJECT_ICMP_UNREACH), uint8(3) // ICMP_PORT_UNREACH
	switch {
	case reset:
		typ, code = unix.NFT_REJECT_TCP_RST, 0
	case r.v6:
		code = 4 // ICMPV6_PORT_UNREACH
	}
	return r.expr("reject", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_REJECT_TYPE, typ)
		return kernel.AppendAttr(b, unix.NFTA_REJECT_ICMP_CODE, []byte{code})
	})
}

// count adds to a named counter.
func (r *rule) count(name string) *rule {
	return r.expr("objref", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_COUNTER)
		return kernel.AppendAttrString(b, unix.NFTA_OBJREF_IMM_NAME, name)
	})
}

func (r *rule) gotoChain(name string) *rule { return r.verdict(unix.NFT_GOTO, name) }

// accept ends the chain's part in the packet.
func (r *rule) accept() *rule { return r.verdict(verdictAccept, "") }

// drop ends the packet.
func (r *rule) drop() *rule { return r.verdict(verdictDrop, "") }

const (
	verdictDrop   = 0 // linux/netfilter.h NF_DROP
	verdictAccept = 1 // NF_ACCEPT
)

func (r *rule) verdict(code int32, name string) *rule {
	return r.expr("immediate", func(b []byte) []byte {
		b = kernel.AppendAttrU32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		b, at := kernel.BeginNest(b, unix.NFTA_IMMEDIATE_DATA)
		return kernel.EndNest(appendVerdict(b, code, name), at)
	})
}

func appendVerdict(b []byte, code int32, name string) []byte {
	b, at := kernel.BeginNest(b, unix.NFTA_DATA_VERDICT)
	b = kernel.AppendAttrU32(b, unix.NFTA_VERDICT_CODE, uint32(code))
	if name != "" {
		b = kernel.AppendAttrString(b, unix.NFTA_VERDICT_CHAIN, name)
	}
	return kernel.EndNest(b, at)
}

// tag is a checksum that the rule carries in its user data: rules with the same tags say the same.
func (r *rule) tag() uint64 {
	h := fnv.New64a()
	h.Write(r.b)
	h.Write([]byte(r.comment))
	return h.Sum64()
}

// userdata is the comment, for people, and the tag.
func (r *rule) userdata() []byte {
	var u []byte
	if r.comment != "" {
		u = appendUdata(u, udataComment, append([]byte(r.comment), 0))
	}
	return appendUdata(u, udataOurs, binary.BigEndian.AppendUint64(nil, r.tag()))
}

// sum is a checksum of a chain, made of what the kernel tells of it.
type sum uint64

func (c chain) sum() sum {
	s := hookSum(c.hook)
	for _, r := range c.rules {
		s = s.and(r.tag())
	}
	return s
}

// hookSum begins a sum.
func hookSum(h *hook) sum {
	f := fnv.New64a()
	if h != nil {
		f.Write([]byte(h.typ))
		f.Write(binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, h.num), uint32(h.priority)))
	}
	return sum(f.Sum64())
}

func (s sum) and(tag uint64) sum {
	f := fnv.New64a()
	f.Write(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, uint64(s)), tag))
	return sum(f.Sum64())
}

func family(v6 bool) uint8 {
	if v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}
