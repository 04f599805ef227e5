package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// XTables asks the old iptables (not nf_tables) of one family about its tables, in the network namespace in which it was
// opened, without loading any.
type XTables struct {
	v6    bool
	fd    int
	names *os.File
}

// OpenXTables opens the tables of one family. The error says so when the kernel has none.
func OpenXTables(v6 bool) (*XTables, error) {
	domain, list := unix.AF_INET, "/proc/thread-self/net/ip_tables_names"
	if v6 {
		domain, list = unix.AF_INET6, "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.Open(list)
	if err != nil {
		return nil, fmt.Errorf("legacy iptables: %w", err)
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		names.Close()
		return nil, fmt.Errorf("legacy iptables: socket: %w", err)
	}
	return &XTables{v6: v6, fd: fd, names: names}, nil
}

// LoadXTables is OpenXTables for who means to use the tables: where the kernel has them as a module that nobody needed yet, as on
// a fresh node, it is loaded.
func LoadXTables(v6 bool) (*XTables, error) {
	x, err := OpenXTables(v6)
	if !errors.Is(err, os.ErrNotExist) {
		return x, err
	}
	module := "ip_tables"
	if v6 {
		module = "ip6_tables"
	}
	loading := LoadModule(module)
	if x, err = OpenXTables(v6); err != nil {
		return nil, errors.Join(err, loading)
	}
	return x, nil
}

// Tables lists the tables that are loaded.
func (x *XTables) Tables() ([]string, error) {
	buf := make([]byte, 4096)
	n, err := x.names.ReadAt(buf, 0)
	if n == 0 && err != nil && err != io.EOF {
		return nil, fmt.Errorf("legacy iptables: names of tables: %w", err)
	}
	return strings.Fields(string(buf[:n])), nil
}

// Has tells whether a table is loaded.
func (x *XTables) Has(table string) (bool, error) {
	names, err := x.Tables()
	for _, n := range names {
		if n == table {
			return true, nil
		}
	}
	return false, err
}

// TableSize is how large a table is. Two tables of one size may still differ.
type TableSize struct{ Entries, Bytes uint32 }

// linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h
const (
	soGetInfo          = 64 // IPT_SO_GET_INFO
	soGetEntries       = 65 // IPT_SO_GET_ENTRIES
	soRevisionMatch    = 66 // IPT_SO_GET_REVISION_MATCH
	soRevisionTarget   = 67 // IPT_SO_GET_REVISION_TARGET
	so6RevisionMatch   = 68 // IP6T_SO_GET_REVISION_MATCH
	so6RevisionTarget  = 69 // IP6T_SO_GET_REVISION_TARGET
	getInfoSize        = 84 // struct ipt_getinfo: name[32], valid_hooks, hook_entry[5], underflow[5], num_entries, size
	getRevisionSize    = 30 // struct xt_get_revision: name[29], revision
	tableName, extName = 32, 29
)

// Size asks for the size of a table; one that is not loaded has none. It needs CAP_NET_ADMIN.
func (x *XTables) Size(table string) (TableSize, error) {
	info, err := x.info(table)
	if err != nil || info == nil {
		return TableSize{}, err
	}
	return TableSize{Entries: binary.NativeEndian.Uint32(info[76:]), Bytes: binary.NativeEndian.Uint32(info[80:])}, nil
}

// info is the struct ipt_getinfo of a table; nil when it is not loaded.
func (x *XTables) info(table string) ([]byte, error) {
	if there, err := x.Has(table); !there || err != nil {
		return nil, err
	}
	info := make([]byte, getInfoSize)
	copy(info[:tableName-1], table)
	if err := x.getsockopt(soGetInfo, info); err != nil {
		return nil, fmt.Errorf("legacy iptables: size of table %s: %w", table, err)
	}
	return info, nil
}

// Supports tells whether the kernel has this revision of a match or a target. It needs CAP_NET_ADMIN.
func (x *XTables) Supports(e Extension) (bool, error) {
	var ask [getRevisionSize]byte
	copy(ask[:extName-1], e.Name)
	ask[extName] = e.Revision
	opt := soRevisionMatch
	switch {
	case x.v6 && e.Target:
		opt = so6RevisionTarget
	case x.v6:
		opt = so6RevisionMatch
	case e.Target:
		opt = soRevisionTarget
	}
	switch err := x.getsockopt(opt, ask[:]); err {
	case nil:
		return true, nil
	case unix.ENOENT, unix.EPROTONOSUPPORT:
		return false, nil
	default:
		return false, fmt.Errorf("legacy iptables: look for %s: %w", e.Name, err)
	}
}

func (x *XTables) getsockopt(opt int, v []byte) error {
	level := uintptr(unix.IPPROTO_IP)
	if x.v6 {
		level = unix.IPPROTO_IPV6
	}
	size := uint32(len(v))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(x.fd), level, uintptr(opt),
		uintptr(unsafe.Pointer(&v[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Close closes the socket.
func (x *XTables) Close() error {
	x.names.Close()
	return unix.Close(x.fd)
}

// Extension is a match or a target of iptables.
type Extension struct {
	Name     string
	Revision uint8
	Target   bool
}

// Supports tells whether nf_tables can use this revision of a match or a target (nft_compat), in the given family.
func (c *NFNetlink) Supports(family uint8, e Extension) (bool, error) {
	attrs := AppendAttrString(nil, unix.NFTA_COMPAT_NAME, e.Name)
	attrs = AppendAttrU32(attrs, unix.NFTA_COMPAT_REV, uint32(e.Revision))
	kind := uint32(0)
	if e.Target {
		kind = 1
	}
	attrs = AppendAttrU32(attrs, unix.NFTA_COMPAT_TYPE, kind)
	_, err := c.Get(unix.NFNL_SUBSYS_NFT_COMPAT<<8, family, attrs)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("nft_compat: look for %s: %w", e.Name, err)
	}
	return true, nil
}
