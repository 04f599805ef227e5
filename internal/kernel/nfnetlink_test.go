package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNewNS runs f inside a fresh network namespace.
func inNewNS(t *testing.T, f func(ns *NS, c *NFNetlink)) {
	t.Helper()
	ns, err := NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		c, err := OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		f(ns, c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func addTable(b *NFBatch, name string) {
	b.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, func(b []byte) []byte {
		return AppendAttrString(b, unix.NFTA_TABLE_NAME, name)
	})
}

func addChain(b *NFBatch, flags uint16, table, name string) {
	b.Add(unix.NFT_MSG_NEWCHAIN, flags, unix.NFPROTO_IPV4, func(b []byte) []byte {
		return AppendAttrString(AppendAttrString(b, unix.NFTA_CHAIN_TABLE, table), unix.NFTA_CHAIN_NAME, name)
	})
}

func chains(t *testing.T, c *NFNetlink) (names []string) {
	t.Helper()
	err := c.Dump(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETCHAIN, unix.NFPROTO_IPV4, nil, func(m NFMessage) error {
		for typ, v := range Attrs(m.Attrs) {
			if typ == unix.NFTA_CHAIN_NAME {
				names = append(names, string(AttrBytes(v)))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// A transaction becomes true as a whole or not at all, and the error names the message. Thousands of refusals are no
// trouble.
func TestBatch(t *testing.T) {
	inNewNS(t, func(_ *NS, c *NFNetlink) {
		var b NFBatch
		b.Reset()
		if err := c.Commit(&b); err != nil {
			t.Errorf("empty: %v", err)
		}
		addTable(&b, "t")
		for i := range 5000 {
			addChain(&b, unix.NLM_F_CREATE, "t", fmt.Sprint("chain-", i))
		}
		if err := c.Commit(&b); err != nil {
			t.Fatal(err)
		}
		if n := len(chains(t, c)); n != 5000 {
			t.Fatalf("%d chains, want 5000", n)
		}
		b.Reset()
		addChain(&b, unix.NLM_F_CREATE, "t", "good")
		for range 3000 {
			addChain(&b, unix.NLM_F_CREATE, "missing", "bad")
		}
		err := c.Commit(&b)
		var refused *BatchError
		if !errors.As(err, &refused) || refused.Index != 1 || !errors.Is(err, unix.ENOENT) {
			t.Errorf("refused: %v", err)
		}
		if n := len(chains(t, c)); n != 5000 {
			t.Errorf("%d chains after a refusal, want 5000", n)
		}
		b.Reset()
		addChain(&b, unix.NLM_F_CREATE|unix.NLM_F_EXCL, "t", "good")
		if err := c.Commit(&b); err != nil {
			t.Errorf("after the refusals: %v", err)
		}
	})
}

func TestGeneration(t *testing.T) {
	inNewNS(t, func(_ *NS, c *NFNetlink) {
		old, err := c.Generation()
		if err != nil {
			t.Fatal(err)
		}
		var b NFBatch
		for range 2 {
			b.Reset()
			b.Expect(old)
			addTable(&b, "t")
			addChain(&b, unix.NLM_F_CREATE, "t", "c")
			err = c.Commit(&b)
		}
		if !errors.Is(err, unix.ERESTART) {
			t.Errorf("commit of an old generation: %v", err)
		}
	})
}

func TestGet(t *testing.T) {
	inNewNS(t, func(_ *NS, c *NFNetlink) {
		get := func(name string) error {
			_, err := c.Get(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETTABLE, unix.NFPROTO_IPV4, AppendAttrString(nil, unix.NFTA_TABLE_NAME, name))
			return err
		}
		if err := get("t"); !errors.Is(err, unix.ENOENT) {
			t.Errorf("missing: %v", err)
		}
		var b NFBatch
		b.Reset()
		addTable(&b, "t")
		if err := errors.Join(c.Commit(&b), get("t")); err != nil {
			t.Error(err)
		}
		var answer *AnswerError
		err := c.Do(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, 0, unix.NFPROTO_IPV4, nil)
		if !errors.As(err, &answer) {
			t.Errorf("a request outside of a transaction: %v", err)
		}
	})
}

// A listener hears others, not the socket it was told to ignore, and says so when it heard not all.
func TestListen(t *testing.T) {
	inNewNS(t, func(ns *NS, c *NFNetlink) {
		other, err := OpenNFNetlink()
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		l, err := ListenNFNetlink(unix.NFNLGRP_NFTABLES, c.Port())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		write := func(c *NFNetlink, n int, name string) {
			t.Helper()
			var b NFBatch
			b.Reset()
			addTable(&b, "t")
			for i := range n {
				addChain(&b, unix.NLM_F_CREATE, "t", fmt.Sprintf("%s-%d", name, i))
			}
			if err := c.Commit(&b); err != nil {
				t.Fatal(err)
			}
		}
		heard := 0
		drain := func() error {
			for {
				err := l.Receive(t.Context(), 100*time.Millisecond, func(m NFMessage) {
					if m.Port == c.Port() {
						t.Error("heard what it should ignore")
					}
					heard++
				})
				if err != nil {
					return err
				}
			}
		}
		write(c, 1000, "own")
		write(other, 3, "other")
		if err := drain(); !errors.Is(err, os.ErrDeadlineExceeded) || heard != 4 { // three chains and the end
			t.Errorf("heard %d events, %v", heard, err)
		}
		for i := range 8 {
			write(other, 20000, fmt.Sprint("flood-", i))
		}
		if err := drain(); !errors.Is(err, ErrEventsLost) {
			t.Errorf("after a flood: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		for err == nil {
			err = l.Receive(ctx, 0, func(NFMessage) {})
		}
		if !errors.Is(err, context.Canceled) {
			t.Errorf("end: %v", err)
		}
	})
}

// Attributes that lie about their length, or are cut off, do no harm.
func FuzzAttrs(f *testing.F) {
	f.Add(AppendAttrString(AppendAttrU32(nil, 1, 2), 3, "abc"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, v := range Attrs(b) {
			_, _, _ = AttrU32(v), AttrU64(v), AttrBytes(v)
		}
		_ = answerError(unix.NLMSG_ERROR, b)
		_, _, _, _ = cutMessage(b)
	})
}

func TestXTables(t *testing.T) {
	inNewNS(t, func(*NS, *NFNetlink) {
		for _, v6 := range []bool{false, true} {
			x, err := LoadXTables(v6)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			if size, err := x.Size("nat"); err != nil || size != (TableSize{}) {
				t.Errorf("before: %v, %v", size, err)
			}
			if names, err := x.Tables(); err != nil || len(names) != 0 {
				t.Errorf("asking loaded tables: %q, %v", names, err)
			}
			iptables := "iptables-legacy"
			if v6 {
				iptables = "ip6tables-legacy"
			}
			if err := (Command{Name: iptables, Args: []string{"-t", "nat", "-N", "X"}}).Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			if size, err := x.Size("nat"); err != nil || size.Entries == 0 || size.Bytes == 0 {
				t.Errorf("after: %v, %v", size, err)
			}
		}
	})
}

// Both kinds of iptables tell alike what the kernel can do.
func TestSupports(t *testing.T) {
	inNewNS(t, func(_ *NS, c *NFNetlink) {
		for _, v6 := range []bool{false, true} {
			family := uint8(unix.NFPROTO_IPV4)
			if v6 {
				family = unix.NFPROTO_IPV6
			}
			x, err := LoadXTables(v6)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			for e, want := range map[Extension]bool{
				{Name: "comment"}:                             true,
				{Name: "DNAT", Revision: 2, Target: true}:     true,
				{Name: "DNAT", Revision: 2}:                   false,
				{Name: "conntrack", Revision: 200}:            false,
				{Name: strings.Repeat("n", 28)}:               false,
				{Name: "REJECT", Revision: 0, Target: true}:   true,
				{Name: "no-such-target", Target: true}:        false,
				{Name: "MASQUERADE", Target: true}:            true,
				{Name: "statistic", Revision: 0}:              true,
				{Name: "recent", Revision: 1, Target: false}:  true,
				{Name: "addrtype", Revision: 1}:               true,
				{Name: "sctp"}:                                true,
				{Name: "MARK", Revision: 2, Target: true}:     true,
				{Name: "conntrack", Revision: 3}:              true,
				{Name: "nfacct", Revision: 1, Target: false}:  true,
				{Name: "DNAT", Revision: 255, Target: true}:   false,
				{Name: "REJECT", Revision: 255, Target: true}: false,
			} {
				if ok, err := c.Supports(family, e); ok != want || err != nil {
					t.Errorf("nft_compat, v6 %v: %+v: %v, %v", v6, e, ok, err)
				}
				if ok, err := x.Supports(e); ok != want || err != nil {
					t.Errorf("xtables, v6 %v: %+v: %v, %v", v6, e, ok, err)
				}
			}
		}
	})
}
