package lab

import (
	"errors"
	"fmt"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// foreignFamilies are those in which the foreign table is made: its own, and the one in which ours are.
var foreignFamilies = [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4}

// AddForeignTable makes nf_tables tables "foreign" as a newer or stranger program might: their sets, a chain and a rule carry user data
// in which no tool finds its way (an unknown type of TLV, and one that claims to be longer than the data), types that no
// tool knows, and flags that few use; and elements with user data of the same kind.
func (a *Actor) AddForeignTable() error {
	return a.Do(func() error {
		c, err := kernel.OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		var t kernel.NFBatch
		t.Reset()
		for _, family := range foreignFamilies {
			addForeign(&t, family)
		}
		if err := c.Commit(&t); err != nil {
			return fmt.Errorf("add foreign table: %w", err)
		}
		return nil
	})
}

// linux/netfilter/nf_tables.h
const (
	tableUserdata = 6  // NFTA_TABLE_USERDATA
	chainUserdata = 12 // NFTA_CHAIN_USERDATA
)

func addForeign(t *kernel.NFBatch, family uint8) {
	userdata := []byte{0xee, 4, 1, 2, 3, 4, 0xef, 200, 9}
	add := func(kind uint8, attrs func([]byte) []byte) { t.Add(kind, unix.NLM_F_CREATE, family, attrs) }
	add(unix.NFT_MSG_NEWTABLE, func(b []byte) []byte {
		return kernel.AppendAttr(kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, "foreign"), tableUserdata, userdata)
	})
	for i, flags := range []uint32{0, unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL} {
		name := [...]string{"strange", "fleeting"}[i]
		add(unix.NFT_MSG_NEWSET, func(b []byte) []byte {
			b = kernel.AppendAttrString(b, unix.NFTA_SET_TABLE, "foreign")
			b = kernel.AppendAttrString(b, unix.NFTA_SET_NAME, name)
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_FLAGS, flags)
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_TYPE, 4242) // no data type of any nft
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_LEN, 4)
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_ID, uint32(i+1))
			return kernel.AppendAttr(b, unix.NFTA_SET_USERDATA, userdata)
		})
	}
	add(unix.NFT_MSG_NEWSETELEM, func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_TABLE, "foreign")
		b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_SET, "strange")
		b, list := kernel.BeginNest(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		b, elem := kernel.BeginNest(b, unix.NFTA_LIST_ELEM)
		b, key := kernel.BeginNest(b, unix.NFTA_SET_ELEM_KEY)
		b = kernel.EndNest(kernel.AppendAttr(b, unix.NFTA_DATA_VALUE, []byte{1, 2, 3, 4}), key)
		b = kernel.AppendAttr(b, unix.NFTA_SET_ELEM_USERDATA, userdata)
		return kernel.EndNest(kernel.EndNest(b, elem), list)
	})
	add(unix.NFT_MSG_NEWCHAIN, func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_TABLE, "foreign")
		b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_NAME, "odd")
		return kernel.AppendAttr(b, chainUserdata, userdata)
	})
	t.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, family, func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_RULE_TABLE, "foreign")
		b = kernel.AppendAttrString(b, unix.NFTA_RULE_CHAIN, "odd")
		return kernel.AppendAttr(b, unix.NFTA_RULE_USERDATA, userdata)
	})
}

// ForeignTable is all of the foreign tables as the kernel gives it, byte for byte.
func (a *Actor) ForeignTable() (raw []byte, err error) {
	err = a.Do(func() error {
		c, err := kernel.OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		for _, family := range foreignFamilies {
			if raw, err = appendForeign(raw, c, family); err != nil {
				return err
			}
		}
		return nil
	})
	return raw, err
}

func appendForeign(raw []byte, c *kernel.NFNetlink, family uint8) ([]byte, error) {
	for _, of := range []struct {
		kind        uint16
		table, name uint16
		names       []string
	}{
		{unix.NFT_MSG_GETTABLE, unix.NFTA_TABLE_NAME, 0, []string{""}},
		{unix.NFT_MSG_GETSET, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, []string{"strange", "fleeting"}},
		{unix.NFT_MSG_GETCHAIN, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, []string{"odd"}},
	} {
		for _, name := range of.names {
			attrs := kernel.AppendAttrString(nil, of.table, "foreign")
			if of.name != 0 {
				attrs = kernel.AppendAttrString(attrs, of.name, name)
			}
			m, err := c.Get(unix.NFNL_SUBSYS_NFTABLES<<8|of.kind, family, attrs)
			if err != nil {
				return raw, fmt.Errorf("foreign table of family %d, %s: %w", family, name, err)
			}
			raw = append(raw, m.Attrs...)
		}
	}
	rules := kernel.AppendAttrString(kernel.AppendAttrString(nil, unix.NFTA_RULE_TABLE, "foreign"), unix.NFTA_RULE_CHAIN, "odd")
	elems := kernel.AppendAttrString(kernel.AppendAttrString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, "foreign"), unix.NFTA_SET_ELEM_LIST_SET, "strange")
	each := func(m kernel.NFMessage) error { raw = append(raw, m.Attrs...); return nil }
	return raw, errors.Join(c.Dump(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, family, rules, each),
		c.Dump(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSETELEM, family, elems, each))
}
