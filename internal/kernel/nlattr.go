package kernel

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// Netlink attributes (linux/netlink.h struct nlattr), appended to and read from byte slices. The nfnetlink subsystems take
// and give numbers in network byte order.

const (
	attrHeader   = 4
	attrTypeMask = 0x3fff // linux/netlink.h NLA_TYPE_MASK
)

// AppendAttr appends an attribute with value v, padded to four bytes.
func AppendAttr(b []byte, typ uint16, v []byte) []byte {
	b = appendAttrHead(b, typ, len(v))
	b = append(b, v...)
	return pad4(b)
}

// AppendAttrString appends s with a final NUL.
func AppendAttrString(b []byte, typ uint16, s string) []byte {
	b = appendAttrHead(b, typ, len(s)+1)
	b = append(b, s...)
	b = append(b, 0)
	return pad4(b)
}

// AppendAttrU32 appends v in network byte order.
func AppendAttrU32(b []byte, typ uint16, v uint32) []byte {
	b = appendAttrHead(b, typ, 4)
	return binary.BigEndian.AppendUint32(b, v)
}

// AppendAttrU64 appends v in network byte order.
func AppendAttrU64(b []byte, typ uint16, v uint64) []byte {
	b = appendAttrHead(b, typ, 8)
	return binary.BigEndian.AppendUint64(b, v)
}

// BeginNest opens an attribute that holds attributes; EndNest closes it, given the same place.
func BeginNest(b []byte, typ uint16) (out []byte, at int) {
	at = len(b)
	return appendAttrHead(b, typ|unix.NLA_F_NESTED, 0), at
}

// EndNest closes the attribute that BeginNest opened.
func EndNest(b []byte, at int) []byte {
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	return b
}

// Attrs yields the attributes in b, without their flag bits. It ends at the first one that is cut off.
func Attrs(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrHeader {
			n := int(binary.NativeEndian.Uint16(b))
			if n < attrHeader || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&attrTypeMask, b[attrHeader:n]) {
				return
			}
			b = b[min(align4(n), len(b)):]
		}
	}
}

// AttrU32 reads a number in network byte order; 0 when it is cut off.
func AttrU32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.BigEndian.Uint32(v)
}

// AttrU64 reads a number in network byte order; 0 when it is cut off.
func AttrU64(v []byte) uint64 {
	if len(v) < 8 {
		return 0
	}
	return binary.BigEndian.Uint64(v)
}

// AttrBytes is a string attribute up to its NUL, not copied.
func AttrBytes(v []byte) []byte {
	for i, c := range v {
		if c == 0 {
			return v[:i]
		}
	}
	return v
}

func appendAttrHead(b []byte, typ uint16, n int) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attrHeader+n))
	return binary.NativeEndian.AppendUint16(b, typ)
}

func pad4(b []byte) []byte {
	for len(b)%4 != 0 { // messages start at multiples of four in the buffer, and so do attributes
		b = append(b, 0)
	}
	return b
}

func align4(n int) int { return (n + 3) &^ 3 }
