package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// IPVS is a socket to the kernel's IP virtual servers (the generic netlink family "IPVS", linux/ip_vs.h). It belongs to the network
// namespace in which it was opened. One goroutine at a time may use it.
type IPVS struct {
	c      *NFNetlink // the header of generic netlink has the size of netfilter's: command, version, nothing
	family uint16
	b      []byte
}

// Flags of virtual servers (linux/ip_vs.h IP_VS_SVC_F_*).
const (
	IPVSPersistent = 0x1
	IPVSOnePacket  = 0x4
	IPVSSched1     = 0x8 // sh: fall back; mh: the same
	IPVSSched2     = 0x10
	IPVSSched3     = 0x20 // no scheduler asks for it
)

// VirtualServer says which packets go to its destinations: those with a mark, or those to an address, port and protocol.
type VirtualServer struct {
	V6    bool
	Mark  uint32 // 0 is none
	Addr  netip.AddrPort
	Proto uint8
}

func (s VirtualServer) String() string {
	if s.Mark != 0 {
		family := "v4"
		if s.V6 {
			family = "v6"
		}
		return fmt.Sprintf("%s mark %#x", family, s.Mark)
	}
	return fmt.Sprintf("%s/%d", s.Addr, s.Proto)
}

// VirtualServerSettings are how it serves.
type VirtualServerSettings struct {
	Scheduler string
	Flags     uint32
	Timeout   uint32 // seconds, of persistence
}

// Destination is a server behind a virtual server; packets to it are translated ("masquerading", as ipvsadm calls it).
type Destination struct {
	Addr             netip.AddrPort
	Weight           uint32
	Active, Inactive uint32 // connections, when read
}

// The protocol (linux/ip_vs.h).
const (
	ipvsNewService = 1
	ipvsSetService = 2
	ipvsDelService = 3
	ipvsGetService = 4
	ipvsNewDest    = 5
	ipvsSetDest    = 6
	ipvsDelDest    = 7
	ipvsGetDest    = 8
	ipvsSetConfig  = 12
	ipvsGetInfo    = 15

	ipvsAttrService    = 1
	ipvsAttrDest       = 2
	ipvsAttrTimeoutTCP = 4
	ipvsAttrTimeoutFin = 5
	ipvsAttrTimeoutUDP = 6

	ipvsSvcAF       = 1
	ipvsSvcProto    = 2
	ipvsSvcAddr     = 3
	ipvsSvcPort     = 4
	ipvsSvcMark     = 5
	ipvsSvcSched    = 6
	ipvsSvcFlags    = 7
	ipvsSvcTimeout  = 8
	ipvsSvcNetmask  = 9
	ipvsDestAddr    = 1
	ipvsDestPort    = 2
	ipvsDestMethod  = 3
	ipvsDestWeight  = 4
	ipvsDestUpper   = 5
	ipvsDestLower   = 6
	ipvsDestActive  = 7
	ipvsDestInact   = 8
	ipvsDestFamily  = 11
	ipvsMasquerade  = 0
	genlControl     = 0x10 // GENL_ID_CTRL
	genlGetFamily   = 3    // CTRL_CMD_GETFAMILY
	genlFamilyID    = 1    // CTRL_ATTR_FAMILY_ID
	genlFamilyName  = 2
	ipvsBatchMost   = 24 << 10 // bytes of one sendmsg(2); every refusal must find room in the socket
	ipvsBatchOfMost = 64       // messages
)

// ErrNoIPVS says that the kernel has no IPVS.
var ErrNoIPVS = errors.New("this kernel has no IPVS (module ip_vs)")

// OpenIPVS opens a socket in the network namespace of the calling thread. The kernel loads its module ip_vs when it can.
func OpenIPVS() (*IPVS, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("open generic netlink socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind generic netlink socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	v := &IPVS{c: &NFNetlink{fd: fd, in: make([]byte, recvBuffer)}}
	m, err := v.c.Get(genlControl, genlGetFamily, AppendAttrString(nil, genlFamilyName, "IPVS"))
	if errors.Is(err, unix.ENOENT) {
		err = ErrNoIPVS
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	for typ, val := range Attrs(m.Attrs) {
		if typ == genlFamilyID && len(val) >= 2 {
			v.family = binary.NativeEndian.Uint16(val)
		}
	}
	return v, nil
}

// Close closes the socket.
func (v *IPVS) Close() error { return v.c.Close() }

// Servers lists the virtual servers, with their settings. [ErrDumpInterrupted] asks for another try.
func (v *IPVS) Servers(each func(VirtualServer, VirtualServerSettings)) error {
	err := v.c.Dump(v.family, ipvsGetService, nil, func(m NFMessage) error {
		for typ, val := range Attrs(m.Attrs) {
			if typ == ipvsAttrService {
				each(cutServer(val))
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("list virtual servers: %w", err)
	}
	return nil
}

// Destinations lists those of one virtual server; it has none when it is not there.
func (v *IPVS) Destinations(s VirtualServer, each func(Destination)) error {
	err := v.c.Dump(v.family, ipvsGetDest, appendServer(nil, s, nil), func(m NFMessage) error {
		for typ, val := range Attrs(m.Attrs) {
			if typ == ipvsAttrDest {
				each(cutDestination(val, s.V6))
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("list destinations of %s: %w", s, err)
	}
	return nil
}

// SetTimeouts sets the timeouts of idle TCP connections, of those after a FIN, and of UDP flows, in seconds; 0 leaves one as it is.
func (v *IPVS) SetTimeouts(tcp, fin, udp uint32) error {
	b := appendHost32(nil, ipvsAttrTimeoutTCP, tcp)
	b = appendHost32(appendHost32(b, ipvsAttrTimeoutFin, fin), ipvsAttrTimeoutUDP, udp)
	return TryFault(func() error {
		if err := v.c.Do(v.family, 0, ipvsSetConfig, b); err != nil {
			return fmt.Errorf("set timeouts of IPVS: %w", err)
		}
		return nil
	})
}

func appendHost16(b []byte, typ, n uint16) []byte {
	return AppendAttr(b, typ, binary.NativeEndian.AppendUint16(nil, n))
}

func appendHost32(b []byte, typ uint16, n uint32) []byte {
	return AppendAttr(b, typ, binary.NativeEndian.AppendUint32(nil, n))
}

// appendIP appends a union nf_inet_addr.
func appendIP(b []byte, typ uint16, a netip.Addr) []byte {
	var all [16]byte
	copy(all[:], a.AsSlice())
	return AppendAttr(b, typ, all[:])
}

func appendServer(b []byte, s VirtualServer, how *VirtualServerSettings) []byte {
	b, at := BeginNest(b, ipvsAttrService)
	if s.V6 {
		b = appendHost16(b, ipvsSvcAF, unix.AF_INET6)
	} else {
		b = appendHost16(b, ipvsSvcAF, unix.AF_INET)
	}
	if s.Mark != 0 {
		b = appendHost32(b, ipvsSvcMark, s.Mark)
	} else {
		b = appendHost16(b, ipvsSvcProto, uint16(s.Proto))
		b = appendIP(b, ipvsSvcAddr, s.Addr.Addr())
		b = AppendAttr(b, ipvsSvcPort, binary.BigEndian.AppendUint16(nil, s.Addr.Port()))
	}
	if how == nil {
		return EndNest(b, at)
	}
	b = AppendAttrString(b, ipvsSvcSched, how.Scheduler)
	b = AppendAttr(b, ipvsSvcFlags, binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, how.Flags), 0xffffffff))
	b = appendHost32(b, ipvsSvcTimeout, how.Timeout)
	netmask := uint32(0xffffffff) // each client by itself
	if s.V6 {
		netmask = 128
	}
	return EndNest(appendHost32(b, ipvsSvcNetmask, netmask), at)
}

func appendDestination(b []byte, d Destination, full bool) []byte {
	b, at := BeginNest(b, ipvsAttrDest)
	if d.Addr.Addr().Is6() {
		b = appendHost16(b, ipvsDestFamily, unix.AF_INET6)
	} else {
		b = appendHost16(b, ipvsDestFamily, unix.AF_INET)
	}
	b = appendIP(b, ipvsDestAddr, d.Addr.Addr())
	b = AppendAttr(b, ipvsDestPort, binary.BigEndian.AppendUint16(nil, d.Addr.Port()))
	if full {
		b = appendHost32(b, ipvsDestMethod, ipvsMasquerade)
		b = appendHost32(b, ipvsDestWeight, d.Weight)
		b = appendHost32(appendHost32(b, ipvsDestUpper, 0), ipvsDestLower, 0)
	}
	return EndNest(b, at)
}

func host32(v []byte) uint32 {
	if len(v) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(v)
}

func cutIP(v []byte, v6 bool) netip.Addr {
	n := 4
	if v6 {
		n = 16
	}
	a, _ := netip.AddrFromSlice(v[:min(n, len(v))])
	return a
}

func cutServer(attrs []byte) (s VirtualServer, how VirtualServerSettings) {
	var addr []byte
	var port uint16
	for typ, v := range Attrs(attrs) {
		switch {
		case typ == ipvsSvcAF && len(v) >= 2:
			s.V6 = binary.NativeEndian.Uint16(v) == unix.AF_INET6
		case typ == ipvsSvcProto && len(v) >= 2:
			s.Proto = uint8(binary.NativeEndian.Uint16(v))
		case typ == ipvsSvcAddr:
			addr = v
		case typ == ipvsSvcPort && len(v) >= 2:
			port = binary.BigEndian.Uint16(v)
		case typ == ipvsSvcMark:
			s.Mark = host32(v)
		case typ == ipvsSvcSched:
			how.Scheduler = string(AttrBytes(v))
		case typ == ipvsSvcFlags:
			how.Flags = host32(v) &^ 0x2 // IP_VS_SVC_F_HASHED is the kernel's own
		case typ == ipvsSvcTimeout:
			how.Timeout = host32(v)
		}
	}
	if s.Mark == 0 {
		s.Addr = netip.AddrPortFrom(cutIP(addr, s.V6), port)
	} else {
		s.Proto = 0
	}
	return s, how
}

func cutDestination(attrs []byte, v6 bool) (d Destination) {
	var addr []byte
	var port uint16
	for typ, v := range Attrs(attrs) {
		switch {
		case typ == ipvsDestAddr:
			addr = v
		case typ == ipvsDestPort && len(v) >= 2:
			port = binary.BigEndian.Uint16(v)
		case typ == ipvsDestWeight:
			d.Weight = host32(v)
		case typ == ipvsDestActive:
			d.Active = host32(v)
		case typ == ipvsDestInact:
			d.Inactive = host32(v)
		case typ == ipvsDestFamily && len(v) >= 2:
			v6 = binary.NativeEndian.Uint16(v) == unix.AF_INET6
		}
	}
	d.Addr = netip.AddrPortFrom(cutIP(addr, v6), port)
	return d
}
