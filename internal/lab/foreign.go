package lab

import (
	"fmt"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// AddForeignTable makes an nf_tables table "foreign" as a newer or stranger program might: its set carries user data in
// which no tool finds its way (an unknown type of TLV, and one that claims to be longer than the data).
func (a *Actor) AddForeignTable() error {
	return a.Do(func() error {
		c, err := kernel.OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		userdata := []byte{0xee, 4, 1, 2, 3, 4, 0xef, 200, 9}
		var t kernel.NFBatch
		t.Reset()
		t.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b []byte) []byte {
			return kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, "foreign")
		})
		t.Add(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b []byte) []byte {
			b = kernel.AppendAttrString(b, unix.NFTA_SET_TABLE, "foreign")
			b = kernel.AppendAttrString(b, unix.NFTA_SET_NAME, "strange")
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_FLAGS, 0)
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_TYPE, 4242) // no data type of any nft
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_LEN, 4)
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_ID, 1)
			return kernel.AppendAttr(b, unix.NFTA_SET_USERDATA, userdata)
		})
		if err := c.Commit(&t); err != nil {
			return fmt.Errorf("add foreign table: %w", err)
		}
		return nil
	})
}

// ForeignTable is the table as the kernel gives it, byte for byte.
func (a *Actor) ForeignTable() (raw []byte, err error) {
	err = a.Do(func() error {
		c, err := kernel.OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		attrs := kernel.AppendAttrString(nil, unix.NFTA_SET_TABLE, "foreign")
		attrs = kernel.AppendAttrString(attrs, unix.NFTA_SET_NAME, "strange")
		m, err := c.Get(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETSET, unix.NFPROTO_INET, attrs)
		raw = append([]byte(nil), m.Attrs...)
		return err
	})
	return raw, err
}
