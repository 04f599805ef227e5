package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Flow is one entry of the kernel's connection tracking table, as far as a Service proxy cares.
type Flow struct {
	ID       uint32 // the kernel's name of the entry; another one if the same flow is tracked anew
	Proto    uint8
	Src, Dst netip.AddrPort // of its first packet, before any translation
	ReplySrc netip.AddrPort // who answers: Dst itself, or the backend to which the flow was translated
	Zone     bool           // it is in a zone other than 0, where no rule of ours ever put it
}

// Numbers of linux/netfilter/nfnetlink_conntrack.h, and of net/netfilter/nf_internals.h for the filter flag.
const (
	ctnlGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	ctnlDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaID         = 12
	ctaZone       = 18
	ctaFilter     = 25

	ctaTupleIP    = 1
	ctaTupleProto = 2
	ctaTupleZone  = 3

	ctaIPv4Src, ctaIPv4Dst = 1, 2
	ctaIPv6Src, ctaIPv6Dst = 3, 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaFilterOrigFlags = 1
	filterProtoNum     = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
)

// Conntrack reads and deletes entries of the connection tracking table of one network namespace. It is not safe for
// concurrent use.
type Conntrack struct {
	dump, del *NFNetlink // two, since a dump is read while entries are deleted
}

// OpenConntrack opens the table of the calling thread's network namespace (see [NS.Do]). It needs CAP_NET_ADMIN there.
func OpenConntrack() (*Conntrack, error) {
	dump, err := OpenNFNetlink()
	if err != nil {
		return nil, fmt.Errorf("open conntrack: %w", err)
	}
	del, err := OpenNFNetlink()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open conntrack: %w", err), dump.Close())
	}
	return &Conntrack{dump, del}, nil
}

// Close ends both sockets.
func (c *Conntrack) Close() error { return errors.Join(c.dump.Close(), c.del.Close()) }

// Flows gives each entry of one family and protocol to each, which may delete it. Kernels from 5.8 on choose the entries
// (CTA_FILTER); older ones send the whole family, and the rest is passed over here. Entries are decoded one by one as they
// arrive, so that a large table takes no memory.
func (c *Conntrack) Flows(v6 bool, proto uint8, each func(Flow)) error {
	b, tuple := BeginNest(nil, ctaTupleOrig)
	b, inner := BeginNest(b, ctaTupleProto)
	b = AppendAttr(b, ctaProtoNum, []byte{proto})
	b = EndNest(EndNest(b, inner), tuple)
	b, filter := BeginNest(b, ctaFilter)
	b = AppendAttr(b, ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, filterProtoNum))
	b = EndNest(b, filter)
	err := c.dump.Dump(ctnlGet, ctFamily(v6), b, func(m NFMessage) error {
		f, err := parseFlow(m.Attrs)
		if err == nil && f.Proto == proto {
			each(f)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("read conntrack: %w", err)
	}
	return nil
}

// Delete removes an entry. When it is gone already, or the flow is tracked anew under another ID, nothing happens and
// the answer is false.
func (c *Conntrack) Delete(f Flow) (bool, error) {
	v6 := f.Dst.Addr().Is6()
	src, dst := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if v6 {
		src, dst = ctaIPv6Src, ctaIPv6Dst
	}
	b, tuple := BeginNest(nil, ctaTupleOrig)
	b, inner := BeginNest(b, ctaTupleIP)
	b = AppendAttr(b, src, f.Src.Addr().AsSlice())
	b = AppendAttr(b, dst, f.Dst.Addr().AsSlice())
	b = EndNest(b, inner)
	b, inner = BeginNest(b, ctaTupleProto)
	b = AppendAttr(b, ctaProtoNum, []byte{f.Proto})
	b = AppendAttr(b, ctaProtoSrcPort, binary.BigEndian.AppendUint16(nil, f.Src.Port()))
	b = AppendAttr(b, ctaProtoDstPort, binary.BigEndian.AppendUint16(nil, f.Dst.Port()))
	b = EndNest(EndNest(b, inner), tuple)
	b = AppendAttrU32(b, ctaID, f.ID)
	switch err := c.del.Do(ctnlDelete, 0, ctFamily(v6), b); {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("delete conntrack entry %s -> %s: %w", f.Src, f.Dst, err)
	}
	return true, nil
}

func ctFamily(v6 bool) uint8 {
	if v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func parseFlow(b []byte) (f Flow, err error) {
	for typ, v := range Attrs(b) {
		switch {
		case typ == ctaTupleOrig:
			f.Src, f.Dst = f.parseTuple(v)
		case typ == ctaTupleReply:
			f.ReplySrc, _ = f.parseTuple(v)
		case typ == ctaID:
			f.ID = AttrU32(v)
		case typ == ctaZone && len(v) == 2:
			f.Zone = f.Zone || binary.BigEndian.Uint16(v) != 0
		}
	}
	if !f.Src.IsValid() || !f.Dst.IsValid() || !f.ReplySrc.IsValid() {
		return f, errors.New("an entry has no addresses")
	}
	return f, nil
}

// parseTuple decodes one direction. A zone may hold for one direction only.
func (f *Flow) parseTuple(b []byte) (src, dst netip.AddrPort) {
	var from, to netip.Addr
	var sport, dport uint16
	for part, v := range Attrs(b) {
		if part == ctaTupleZone && len(v) == 2 {
			f.Zone = f.Zone || binary.BigEndian.Uint16(v) != 0
		}
		for typ, v := range Attrs(v) {
			switch {
			case part == ctaTupleIP && (typ == ctaIPv4Src || typ == ctaIPv6Src):
				from, _ = netip.AddrFromSlice(v)
			case part == ctaTupleIP && (typ == ctaIPv4Dst || typ == ctaIPv6Dst):
				to, _ = netip.AddrFromSlice(v)
			case part == ctaTupleProto && typ == ctaProtoNum && len(v) == 1:
				f.Proto = v[0]
			case part == ctaTupleProto && typ == ctaProtoSrcPort && len(v) == 2:
				sport = binary.BigEndian.Uint16(v)
			case part == ctaTupleProto && typ == ctaProtoDstPort && len(v) == 2:
				dport = binary.BigEndian.Uint16(v)
			}
		}
	}
	return netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport)
}
