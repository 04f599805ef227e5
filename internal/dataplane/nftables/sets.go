package nftables

import (
	"encoding/binary"
	"net/netip"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// tableName is our table's, in the families ip and ip6. Everything of ours is in there, and nothing of ours elsewhere.
const tableName = "fairlead"

// setID names a set or map.
type setID uint8

const (
	setServices setID = iota
	setEndpoints
	setLocalEndpoints
	setStickyNumbers
	setLocalStickyNumbers
	setSticky
	setLocalSticky
	setAffinity
	setAllowed
	setFromPod
	setFromNode
	setFromOutside
	setClusterIPs
	setHairpin
	setNodeIPs
	setNodePortIPs
	setsCount
)

// field is the type of a part of a key or value, as nft numbers them (include/datatype.h enum datatypes).
type field uint32

const (
	fieldAddr    field = 7 // 8 in ip6
	fieldAddr6   field = 8
	fieldProto   field = 12
	fieldPort    field = 13
	fieldMark    field = 19 // a number in the byte order of the machine, printed in hexadecimal
	fieldVerdict field = 0xffffff00
)

// spec is what a set is.
type spec struct {
	name, comment string
	key, value    []field
	flags         uint32
	size          uint32
}

// affinityMost is how many clients are remembered. When more come, new ones are served without being remembered.
const affinityMost = 1 << 18

var frontendKey = []field{fieldAddr, fieldProto, fieldPort}

func frontendKeyAnd(more ...field) []field { return append(append([]field{}, frontendKey...), more...) }

var (
	backendValue = []field{fieldAddr, fieldPort}
	verdictValue = []field{fieldVerdict}
)

// specs are all sets, in the order of setID. An address 0.0.0.0 or :: in a key stands for the node's NodePort addresses.
var specs = [setsCount]spec{
	setServices:       {"services", "address . protocol . port : number of its routes, see from-pod, from-node, from-outside", frontendKey, []field{fieldMark}, 0, 0},
	setEndpoints:      {"endpoints", "the endpoints of each Service, numbered", frontendKeyAnd(fieldMark), backendValue, 0, 0},
	setLocalEndpoints: {"local-endpoints", "those on this node, for policies that are Local", frontendKeyAnd(fieldMark), backendValue, 0, 0},
	setStickyNumbers: {"sticky-numbers", "endpoints of Services with ClientIP affinity : their own numbers, which they keep", frontendKeyAnd(fieldMark),
		[]field{fieldMark}, 0, 0},
	setLocalStickyNumbers: {"sticky-local-numbers", "the same, on this node", frontendKeyAnd(fieldMark), []field{fieldMark}, 0, 0},
	setSticky:             {"sticky-endpoints", "endpoints by their own numbers", frontendKeyAnd(fieldMark), backendValue, 0, 0},
	setLocalSticky:        {"sticky-local-endpoints", "the same, on this node", frontendKeyAnd(fieldMark), backendValue, 0, 0},
	setAffinity: {"affinity", "client . Service : own number of the endpoint that it sticks to", []field{fieldAddr, fieldAddr, fieldProto, fieldPort},
		[]field{fieldMark}, unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, affinityMost},
	setAllowed:     {"allowed", "source ranges that may knock", frontendKeyAnd(fieldAddr), nil, unix.NFT_SET_INTERVAL, 0},
	setFromPod:     {"from-pod", "routes of what pods send", []field{fieldMark}, verdictValue, 0, 0},
	setFromNode:    {"from-node", "routes of what this node sends", []field{fieldMark}, verdictValue, 0, 0},
	setFromOutside: {"from-outside", "routes of what others send", []field{fieldMark}, verdictValue, 0, 0},
	setClusterIPs:  {"cluster-ips", "addresses that are a Service's alone: other ports are refused", []field{fieldAddr}, nil, 0, 0},
	setHairpin:     {"hairpin", "pods of this node that may be their own endpoint", []field{fieldAddr, fieldAddr}, nil, 0, 0},
	setNodeIPs:     {"node-ips", "this node's addresses", []field{fieldAddr}, nil, 0, 0},
	setNodePortIPs: {"nodeport-ips", "those that take NodePorts", []field{fieldAddr}, nil, 0, 0},
}

func (s setID) String() string { return specs[s].name }

func (s setID) isMap() bool { return specs[s].value != nil }

func (s setID) verdicts() bool { return s == setFromPod || s == setFromNode || s == setFromOutside }

// routesOf is the map of an origin.
func routesOf(o model.Origin) setID { return setFromPod + setID(o) }

// setNamed finds a set by its name.
func setNamed(name []byte) (setID, bool) {
	for i := range specs {
		if specs[i].name == string(name) {
			return setID(i), true
		}
	}
	return 0, false
}

// in is the type of a field in a family.
func (f field) in(v6 bool) field {
	if f == fieldAddr && v6 {
		return fieldAddr6
	}
	return f
}

// size in bytes of a field in a register: each takes whole ones of four bytes.
func (f field) size(v6 bool) int {
	if f == fieldAddr && v6 {
		return 16
	}
	return 4
}

// exact size of a field.
func (f field) bytes(v6 bool) int {
	switch f {
	case fieldProto:
		return 1
	case fieldPort:
		return 2
	}
	return f.size(v6)
}

func sizeOf(fields []field, v6 bool) int {
	if len(fields) == 1 {
		return fields[0].bytes(v6)
	}
	n := 0
	for _, f := range fields {
		n += f.size(v6)
	}
	return n
}

// typeOf is how nft numbers a concatenation: six bits for each part.
func typeOf(fields []field, v6 bool) uint32 {
	t := uint32(0)
	for _, f := range fields {
		t = t<<6 | uint32(f.in(v6))
	}
	return t
}

// Attributes of linux/netfilter/nf_tables.h that x/sys lacks.
const (
	attrTableUserdata = 6    // NFTA_TABLE_USERDATA
	attrSetDescConcat = 2    // NFTA_SET_DESC_CONCAT
	attrSetFieldLen   = 1    // NFTA_SET_FIELD_LEN
	attrElemKeyEnd    = 10   // NFTA_SET_ELEM_KEY_END
	attrSetUserdata   = 0xd  // NFTA_SET_USERDATA
	setFlagConcat     = 0x80 // NFT_SET_CONCAT
	elemCatchall      = 2    // NFT_SET_ELEM_CATCHALL
	attrRuleUserdata  = 7    // NFTA_RULE_USERDATA
	attrElemUserdata  = 6    // NFTA_SET_ELEM_USERDATA
)

// What nft keeps in user data (libnftnl's udata.h): type, length, value.
const (
	udataComment    = 0 // of rules, elements, tables
	udataKeyOrder   = 0 // of sets
	udataDataOrder  = 1
	udataSetComment = 7
	udataOurs       = 0xf1 // our own: programs skip what they do not know
	hostOrder       = 1
	networkOrder    = 2
)

func appendUdata(b []byte, typ byte, v []byte) []byte {
	b = append(b, typ, byte(len(v)))
	return append(b, v...)
}

// cutUdata finds one value.
func cutUdata(b []byte, typ byte) []byte {
	for len(b) >= 2 && len(b) >= 2+int(b[1]) {
		v := b[2 : 2+b[1]]
		if b[0] == typ {
			return v
		}
		b = b[2+b[1]:]
	}
	return nil
}

func (s spec) allFlags() uint32 {
	flags := s.flags
	if s.value != nil {
		flags |= unix.NFT_SET_MAP
	}
	if len(s.key) > 1 && s.flags&unix.NFT_SET_INTERVAL != 0 {
		flags |= setFlagConcat
	}
	return flags
}

// appendSet appends the attributes that make a set.
func appendSet(b []byte, table string, id setID, v6 bool) []byte {
	s := specs[id]
	b = kernel.AppendAttrString(b, unix.NFTA_SET_TABLE, table)
	b = kernel.AppendAttrString(b, unix.NFTA_SET_NAME, s.name)
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_FLAGS, s.allFlags())
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_TYPE, typeOf(s.key, v6))
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_LEN, uint32(sizeOf(s.key, v6)))
	if s.value != nil {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_DATA_TYPE, typeOf(s.value, v6))
		if !id.verdicts() {
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_DATA_LEN, uint32(sizeOf(s.value, v6)))
		}
	}
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_ID, uint32(id)+1)
	b = appendDesc(b, s, v6)
	u := appendUdata(nil, udataKeyOrder, orderOf(s.key))
	if s.value != nil {
		u = appendUdata(u, udataDataOrder, orderOf(s.value))
	}
	u = appendUdata(u, udataSetComment, append([]byte(s.comment), 0))
	return kernel.AppendAttr(b, attrSetUserdata, u)
}

// appendDesc says how large the set may get, and of what its intervals are made.
func appendDesc(b []byte, s spec, v6 bool) []byte {
	b, desc := kernel.BeginNest(b, unix.NFTA_SET_DESC)
	if s.size > 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_DESC_SIZE, s.size)
	}
	if s.allFlags()&setFlagConcat != 0 {
		var concat, part int
		b, concat = kernel.BeginNest(b, attrSetDescConcat)
		for _, f := range s.key {
			b, part = kernel.BeginNest(b, unix.NFTA_LIST_ELEM)
			b = kernel.AppendAttrU32(b, attrSetFieldLen, uint32(f.bytes(v6)))
			b = kernel.EndNest(b, part)
		}
		b = kernel.EndNest(b, concat)
	}
	return kernel.EndNest(b, desc)
}

func orderOf(fields []field) []byte {
	order := uint32(networkOrder)
	if fields[0] == fieldMark {
		order = hostOrder
	}
	return binary.NativeEndian.AppendUint32(nil, order)
}

// Keys and values of elements, in the bytes of registers.

func appendAddr(b []byte, a netip.Addr) []byte {
	if a.Is4() {
		v := a.As4()
		return append(b, v[:]...)
	}
	v := a.As16()
	return append(b, v[:]...)
}

// appendKey appends a frontend's address, protocol and port.
func appendKey(b []byte, k model.Key) []byte {
	b = appendAddr(b, k.IP)
	b = append(b, byte(k.Proto), 0, 0, 0)
	return append(b, byte(k.Port>>8), byte(k.Port), 0, 0)
}

func appendBackend(b []byte, a netip.AddrPort) []byte {
	b = appendAddr(b, a.Addr())
	return append(b, byte(a.Port()>>8), byte(a.Port()), 0, 0)
}

func appendNumber(b []byte, n uint32) []byte { return binary.NativeEndian.AppendUint32(b, n) }

func addrLen(v6 bool) int {
	if v6 {
		return 16
	}
	return 4
}

func keyLen(v6 bool) int     { return addrLen(v6) + 8 }
func backendLen(v6 bool) int { return addrLen(v6) + 4 }

func cutAddr(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

// cutKey reads what appendKey wrote; b has its length.
func cutKey(b []byte, v6 bool) model.Key {
	n := addrLen(v6)
	return model.Key{IP: cutAddr(b[:n]), Proto: model.Proto(b[n]), Port: binary.BigEndian.Uint16(b[n+4:])}
}

func cutBackend(b []byte, v6 bool) netip.AddrPort {
	n := addrLen(v6)
	return netip.AddrPortFrom(cutAddr(b[:n]), binary.BigEndian.Uint16(b[n:]))
}
