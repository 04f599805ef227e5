package kernel

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What another Service proxy may have left behind: whole objects, found by their names.

// DeleteNFTable deletes an nf_tables table (family unix.NFPROTO_*) with all that is in it. One that is not there is no error.
func DeleteNFTable(family uint8, name string) error {
	c, err := OpenNFNetlink()
	if err != nil {
		return err
	}
	defer c.Close()
	var b NFBatch
	b.Reset()
	b.Add(unix.NFT_MSG_DELTABLE, 0, family, func(b []byte) []byte { return AppendAttrString(b, unix.NFTA_TABLE_NAME, name) })
	if err := c.Commit(&b); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete nf_tables table %s: %w", name, err)
	}
	return nil
}

// The ipset protocol (linux/netfilter/ipset/ip_set.h).
const (
	subsysIPSet = 6 // NFNL_SUBSYS_IPSET

	ipsetDestroy = 3 // enum ipset_cmd
	ipsetList    = 7

	ipsetAttrProtocol = 1 // enum, IPSET_ATTR_*
	ipsetAttrSetName  = 2
	ipsetAttrFlags    = 6

	ipsetProtocol     = 6 // spoken by every kernel since 2.6.39
	ipsetFlagSetsOnly = 2 // IPSET_FLAG_LIST_SETNAME: no members

	ipsetErrBusy = unix.Errno(4100) // IPSET_ERR_BUSY
)

// DestroyIPSets destroys the sets of ipset(8) whose names begin so, and gives the names. A kernel without ipset has none.
func DestroyIPSets(prefix string) ([]string, error) {
	c, err := OpenNFNetlink()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	names, err := ipsets(c)
	if err != nil {
		return nil, err
	}
	var gone []string
	var failed error
	for _, name := range names {
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		attrs := AppendAttrString(AppendAttr(nil, ipsetAttrProtocol, []byte{ipsetProtocol}), ipsetAttrSetName, name)
		err := c.Do(subsysIPSet<<8|ipsetDestroy, 0, unix.AF_INET, attrs)
		if errors.Is(err, ipsetErrBusy) {
			err = errors.New("a rule still uses it")
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			failed = errors.Join(failed, fmt.Errorf("destroy ipset %s: %w", name, err))
			continue
		}
		gone = append(gone, name)
	}
	return gone, failed
}

func ipsets(c *NFNetlink) ([]string, error) {
	var names []string
	attrs := AppendAttrU32(AppendAttr(nil, ipsetAttrProtocol, []byte{ipsetProtocol}), ipsetAttrFlags|unix.NLA_F_NET_BYTEORDER, ipsetFlagSetsOnly)
	err := c.Dump(subsysIPSet<<8|ipsetList, unix.AF_INET, attrs, func(m NFMessage) error {
		for typ, v := range Attrs(m.Attrs) {
			if typ == ipsetAttrSetName {
				names = append(names, strings.TrimRight(string(v), "\x00"))
			}
		}
		return nil
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil // the kernel has no such subsystem
	}
	if err != nil {
		return nil, fmt.Errorf("list ipsets: %w", err)
	}
	return names, nil
}

// DeleteLink deletes a network interface of the given kind ("dummy"). One that is not there is no error; one of another kind
// is left alone.
func DeleteLink(name, kind string) error {
	link, err := netlink.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find interface %s: %w", name, err)
	}
	if link.Type() != kind {
		return nil
	}
	if err := netlink.LinkDel(link); err != nil {
		return fmt.Errorf("delete interface %s: %w", name, err)
	}
	return nil
}
