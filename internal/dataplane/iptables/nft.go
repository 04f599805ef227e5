package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// nft is the nf_tables back end: the same tables, chains and rules that iptables-nft makes, over netlink.
type nft struct {
	conn    *kernel.NFNetlink
	tx      kernel.NFBatch
	origin  []origin // of each message of tx
	ask     []byte   // a request for a list
	counter bool     // rules count packets and bytes, as iptables' do
	limit   int      // size in bytes at which a large load is cut
}

// origin says what a message of a transaction is about.
type origin struct {
	change *change
	rule   int // index of the rule, or one of the following
}

const (
	aboutTable = -1 - iota
	aboutChain
	aboutFlush
	aboutDelete
	aboutJump // a rule taken out of a built-in chain
)

// txLimit is the size at which a large load goes to the kernel in a transaction of its own. Measured with 25,000 chains and
// 75,000 rules, milliseconds of CPU at 256 KiB, 512 KiB, 1, 2, 4, 16 MiB: 710, 590, 475, 515, 705, 1050. Each commit walks
// all chains of a table, and each large message costs fresh memory.
const txLimit = 1 << 20

func newNFT() (*nft, error) {
	conn, err := kernel.OpenNFNetlink()
	if err != nil {
		return nil, err
	}
	return &nft{conn: conn, counter: true, limit: txLimit}, nil
}

func (n *nft) Name() string { return "nf_tables" }

func (n *nft) Close() error { return n.conn.Close() }

// triesMost is how often a transaction is built anew when others write at the same time.
const triesMost = 5

// Write makes the changes; see backend.
func (n *nft) Write(ctx context.Context, changes []change) error {
	if err := checkAll(changes); err != nil {
		return err
	}
	var err error
	for range triesMost {
		if err = n.write(ctx, changes); !errors.Is(err, unix.ERESTART) && !errors.Is(err, unix.EINTR) {
			return err
		}
	}
	return fmt.Errorf("%w: other programs keep changing nf_tables", err)
}

func (n *nft) write(ctx context.Context, changes []change) error {
	var keep, jumps, gone []*change
	for i := range changes {
		switch c := &changes[i]; {
		case c.Chain.builtin():
			jumps = append(jumps, c)
		case c.Gone:
			gone = append(gone, c)
		default:
			keep = append(keep, c)
		}
	}
	gone, err := n.present(gone)
	if err != nil {
		return err
	}
	n.begin()
	n.tables(keep, jumps)
	for part := range n.parts(keep) {
		if err := n.fill(ctx, part); err != nil {
			return err
		}
	}
	if err := n.jumps(jumps, gone); err != nil {
		return err
	}
	if err := n.remove(ctx, gone); err != nil {
		return err
	}
	return n.commit()
}

// present leaves out those in tables that are not there.
func (n *nft) present(gone []*change) ([]*change, error) {
	type place struct {
		v6    bool
		table Table
	}
	there := map[place]bool{}
	var out []*change
	for _, c := range gone {
		p := place{c.Chain.V6, c.Chain.Table}
		is, asked := there[p]
		if !asked {
			_, err := n.conn.Get(nftType(unix.NFT_MSG_GETTABLE), family(p.v6), kernel.AppendAttrString(nil, unix.NFTA_TABLE_NAME, p.table.String()))
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, fmt.Errorf("look for table %s: %w", p.table, err)
			}
			is = err == nil
			there[p] = is
		}
		if is {
			out = append(out, c)
		}
	}
	return out, nil
}

// tables makes the tables that the changes need.
func (n *nft) tables(lists ...[]*change) {
	var made [2][3]bool
	for _, c := range slices.Concat(lists...) {
		v6 := b2i(c.Chain.V6)
		if c.Gone || made[v6][c.Chain.Table] {
			continue
		}
		made[v6][c.Chain.Table] = true
		n.add(origin{c, aboutTable}, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(b []byte) []byte {
			return kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, c.Chain.Table.String())
		})
	}
}

// parts cuts the changes into pieces of about half the limit.
func (n *nft) parts(keep []*change) func(yield func([]*change) bool) {
	const perRule, perChain = 420, 200 // bytes, about
	return func(yield func([]*change) bool) {
		for len(keep) > 0 {
			i, size := 0, 0
			for ; i < len(keep) && (i == 0 || size < n.limit/2); i++ {
				size += perChain + perRule*len(keep[i].Rules)
			}
			if !yield(keep[:i]) {
				return
			}
			keep = keep[i:]
		}
	}
}

// fill makes the chains of one part, empties them, and gives them their rules: the chains first, as rules refer to them.
func (n *nft) fill(ctx context.Context, part []*change) error {
	for _, c := range part {
		n.chain(c)
	}
	for _, c := range part {
		n.flush(c)
		for i := range c.Rules {
			n.rule(c, i, unix.NLM_F_APPEND)
		}
	}
	return n.commitIfLarge(ctx)
}

func (n *nft) chain(c *change) {
	n.add(origin{c, aboutChain}, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(b []byte) []byte {
		return appendChain(b, c.Chain)
	})
}

func (n *nft) flush(c *change) {
	n.add(origin{c, aboutFlush}, unix.NFT_MSG_DELRULE, 0, func(b []byte) []byte {
		return appendRuleChain(b, c.Chain)
	})
}

// rule adds rule i of a change: at the end with NLM_F_APPEND, else at the top.
func (n *nft) rule(c *change, i int, flags uint16) {
	n.add(origin{c, i}, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, func(b []byte) []byte {
		b = appendRuleChain(b, c.Chain)
		return appendRuleBody(b, &c.Rules[i], c.Chain.V6, n.counter)
	})
}

// remove empties the chains that are gone, since they may refer to each other, and then deletes them. A chain that is not
// there is made for the moment: older kernels know no way to delete what may be missing.
func (n *nft) remove(ctx context.Context, gone []*change) error {
	for _, c := range gone {
		n.chain(c)
		n.flush(c)
		if err := n.commitIfLarge(ctx); err != nil {
			return err
		}
	}
	for _, c := range gone {
		n.add(origin{c, aboutDelete}, unix.NFT_MSG_DELCHAIN, 0, func(b []byte) []byte { return appendChain(b, c.Chain) })
		if err := n.commitIfLarge(ctx); err != nil {
			return err
		}
	}
	return nil
}

// jumps puts the missing jumps at the top of the built-in chains, and takes out those that are gone or lead to a chain that
// is. When somebody else writes between our look and our transaction, the kernel refuses it.
func (n *nft) jumps(builtin, gone []*change) error {
	if len(builtin) == 0 {
		return nil
	}
	generation, err := n.conn.Generation()
	if err != nil {
		return err
	}
	n.tx.Expect(generation)
	lost := map[ChainID]bool{}
	for _, c := range gone {
		lost[c.Chain] = true
	}
	for _, c := range builtin {
		if err := n.jumpsOf(c, lost); err != nil {
			return fmt.Errorf("%s: %w", where(c.Chain), err)
		}
	}
	return nil
}

func (n *nft) jumpsOf(c *change, lost map[ChainID]bool) error {
	have, err := n.held(c.Chain)
	if err != nil {
		return err
	}
	there := map[Rule]bool{}
	for _, h := range have {
		to := ChainID{V6: c.Chain.V6, Table: c.Chain.Table, Name: h.rule.Target.Chain}
		if lost[to] || c.Gone && h.exact && slices.Contains(c.Rules, h.rule) {
			n.drop(c, h.handle)
			continue
		}
		there[h.rule] = there[h.rule] || h.exact
	}
	if c.Gone {
		return nil
	}
	if err := n.base(c); err != nil {
		return err
	}
	for i := len(c.Rules) - 1; i >= 0; i-- {
		if !there[c.Rules[i]] {
			n.rule(c, i, 0)
		}
	}
	return nil
}

// heldRule is a rule of a built-in chain as the kernel holds it.
type heldRule struct {
	handle uint64
	rule   Rule
	exact  bool
}

func (n *nft) held(id ChainID) ([]heldRule, error) {
	var out []heldRule
	err := untorn(func() error {
		out = out[:0]
		return n.list(id, func(raw rawRule) {
			r, exact := raw.rule(id.V6)
			out = append(out, heldRule{raw.handle, r, exact})
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	return out, nil
}

// drop deletes a rule of a built-in chain.
func (n *nft) drop(c *change, handle uint64) {
	n.add(origin{c, aboutJump}, unix.NFT_MSG_DELRULE, 0, func(b []byte) []byte {
		return kernel.AppendAttrU64(appendRuleChain(b, c.Chain), unix.NFTA_RULE_HANDLE, handle)
	})
}

// base makes a built-in chain where it is missing. One that is there is left alone: its policy is the administrator's.
func (n *nft) base(c *change) error {
	_, err := n.conn.Get(nftType(unix.NFT_MSG_GETCHAIN), family(c.Chain.V6), appendChain(nil, c.Chain))
	if err == nil || !errors.Is(err, unix.ENOENT) {
		return err
	}
	n.add(origin{c, aboutChain}, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(b []byte) []byte { return appendBase(b, c.Chain) })
	return nil
}

// hook is where a built-in chain gets its packets from (linux/netfilter_ipv4.h).
type hook struct {
	num      uint32
	priority int32
	typ      string
}

func hookOf(id ChainID) hook {
	num := map[string]uint32{"PREROUTING": 0, "INPUT": 1, "FORWARD": 2, "OUTPUT": 3, "POSTROUTING": 4}[id.Name]
	switch {
	case id.Table == Nat && (id.Name == "PREROUTING" || id.Name == "OUTPUT"):
		return hook{num, -100, "nat"}
	case id.Table == Nat:
		return hook{num, 100, "nat"}
	case id.Table == Mangle && id.Name == "OUTPUT":
		return hook{num, -150, "route"}
	case id.Table == Mangle:
		return hook{num, -150, "filter"}
	}
	return hook{num, 0, "filter"}
}

// appendBase appends the attributes of a built-in chain, as iptables-nft makes it.
func appendBase(b []byte, id ChainID) []byte {
	h := hookOf(id)
	b = appendChain(b, id)
	b, at := kernel.BeginNest(b, unix.NFTA_CHAIN_HOOK)
	b = kernel.AppendAttrU32(b, unix.NFTA_HOOK_HOOKNUM, h.num)
	b = kernel.AppendAttrU32(b, unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
	b = kernel.EndNest(b, at)
	b = kernel.AppendAttrU32(b, unix.NFTA_CHAIN_POLICY, verdictAccept)
	return kernel.AppendAttrString(b, unix.NFTA_CHAIN_TYPE, h.typ)
}

func appendChain(b []byte, id ChainID) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_TABLE, id.Table.String())
	return kernel.AppendAttrString(b, unix.NFTA_CHAIN_NAME, id.Name)
}

func appendRuleChain(b []byte, id ChainID) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_RULE_TABLE, id.Table.String())
	return kernel.AppendAttrString(b, unix.NFTA_RULE_CHAIN, id.Name)
}

func nftType(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

func family(v6 bool) uint8 {
	if v6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// The transaction.

func (n *nft) begin() { n.release() }

func (n *nft) add(o origin, kind uint8, flags uint16, attrs func([]byte) []byte) {
	n.tx.Add(kind, flags, family(o.change.Chain.V6), attrs)
	n.origin = append(n.origin, o)
}

func (n *nft) commitIfLarge(ctx context.Context) error {
	if n.tx.Size() < n.limit {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := n.commit(); err != nil {
		return err
	}
	n.begin()
	return nil
}

// release lets go of what a transaction was made of, or its rules would stay in memory until the next one.
func (n *nft) release() {
	n.origin = nil
	n.tx.Reset()
}

func (n *nft) commit() error {
	defer n.release()
	err := n.conn.Commit(&n.tx)
	var refused *kernel.BatchError
	if errors.As(err, &refused) && refused.Index >= 0 && refused.Index < len(n.origin) {
		return n.origin[refused.Index].explain(refused.Err)
	}
	return err
}

// explain says in words what the kernel refused.
func (o origin) explain(err error) error {
	at := where(o.change.Chain)
	switch o.rule {
	case aboutTable:
		return fmt.Errorf("make table %s: %w", o.change.Chain.Table, err)
	case aboutChain:
		return fmt.Errorf("make %s: %w", at, err)
	case aboutFlush:
		return fmt.Errorf("empty %s: %w", at, err)
	case aboutDelete:
		if errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("delete %s: %w: %w", at, errInUse, err)
		}
		return fmt.Errorf("delete %s: %w", at, err)
	case aboutJump:
		return fmt.Errorf("%s: delete a rule: %w", at, err)
	}
	r := o.change.Rules[o.rule]
	line := r.appendText(nil, o.change.Chain.Name, o.change.Chain.V6)
	return fmt.Errorf("%s: rule %d (%s)%s: %w", at, o.rule+1, line, hint(r, err), err)
}

// hint guesses what the kernel did not like.
func hint(r Rule, err error) string {
	switch {
	case errors.Is(err, unix.EMLINK), errors.Is(err, unix.ELOOP):
		return ": a loop of jumps, or more than 16 one after another" // linux/netfilter/nf_tables.h NFT_JUMP_STACK_SIZE
	case !errors.Is(err, unix.ENOENT):
		return ""
	case r.Target.Chain != "":
		return fmt.Sprintf(": no chain %s, or a match that this kernel does not have", r.Target.Chain)
	case r.NFAcct != "":
		return fmt.Sprintf(": no counter %s, or a match or target that this kernel does not have", r.NFAcct)
	}
	return ": a match or target that this kernel does not have"
}

// where names a chain for people, as nft does: "chain KUBE-SERVICES of ip nat".
func where(id ChainID) string {
	f := "ip"
	if id.V6 {
		f = "ip6"
	}
	return fmt.Sprintf("chain %s of %s %s", id.Name, f, id.Table)
}

// scan gives chain after chain, each once; Rules are valid during the call only. It asks for the rules of one chain at a
// time: in a longer list the kernel walks to the place where it stopped again for every 32 KiB, and a change of anybody's
// anywhere makes the whole list void.
func (n *nft) scan(ctx context.Context, v6 bool, each func(ChainID, found)) error {
	chains, err := n.chains(v6)
	if err != nil {
		return err
	}
	var f found
	for _, id := range chains {
		if err := ctx.Err(); err != nil {
			return err
		}
		there, err := n.rules(id, &f)
		if err != nil {
			return fmt.Errorf("list %s: %w", where(id), err)
		}
		if there {
			each(id, f)
		}
	}
	return nil
}

// chains lists the chains that may be of interest.
func (n *nft) chains(v6 bool) ([]ChainID, error) {
	var out []ChainID
	err := untorn(func() error {
		out = out[:0]
		return n.conn.Dump(nftType(unix.NFT_MSG_GETCHAIN), family(v6), nil, func(m kernel.NFMessage) error {
			if id, ok := cutChain(m.Attrs, v6); ok {
				out = append(out, id)
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list chains: %w", err)
	}
	return out, nil
}

// rules reads one chain: all its rules, or of a built-in one those that jump to a chain of Kubernetes' programs.
func (n *nft) rules(id ChainID, f *found) (there bool, err error) {
	err = untorn(func() error {
		f.Rules, f.Exact = f.Rules[:0], true
		return n.list(id, func(raw rawRule) {
			r, exact := raw.rule(id.V6)
			if !id.builtin() || strings.HasPrefix(r.Target.Chain, kubePrefix) {
				f.Rules = append(f.Rules, r)
				f.Exact = f.Exact && exact
			}
		})
	})
	if errors.Is(err, unix.ENOENT) { // it went meanwhile
		return false, nil
	}
	return err == nil, err
}

// list gives the rules of a chain.
func (n *nft) list(id ChainID, each func(rawRule)) error {
	n.ask = appendRuleChain(n.ask[:0], id)
	return n.conn.Dump(nftType(unix.NFT_MSG_GETRULE), family(id.V6), n.ask, func(m kernel.NFMessage) error {
		raw := cutRule(m.Attrs)
		if string(raw.chain) == id.Name && string(raw.table) == id.Table.String() { // some old kernels filter less
			each(raw)
		}
		return nil
	})
}

// untorn lists again as long as others change nf_tables meanwhile.
func untorn(list func() error) (err error) {
	for range 20 {
		if err = list(); !errors.Is(err, kernel.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// cutChain reads a chain of the kernel's list that may be of interest.
func cutChain(attrs []byte, v6 bool) (ChainID, bool) {
	var table, name []byte
	for typ, v := range kernel.Attrs(attrs) {
		switch typ {
		case unix.NFTA_CHAIN_TABLE:
			table = kernel.AttrBytes(v)
		case unix.NFTA_CHAIN_NAME:
			name = kernel.AttrBytes(v)
		}
	}
	t, ok := tableNamed(string(table))
	if !ok {
		return ChainID{}, false
	}
	id := ChainID{V6: v6, Table: t, Name: string(name)}
	return id, id.builtin() || strings.HasPrefix(id.Name, kubePrefix)
}

// kubePrefix begins the names of all chains of Kubernetes' own programs.
const kubePrefix = "KUBE-"

func tableNamed(name string) (Table, bool) {
	for _, t := range [...]Table{Nat, Filter, Mangle} {
		if t.String() == name {
			return t, true
		}
	}
	return 0, false
}

// generation counts the changes of anything in nf_tables.
func (n *nft) generation() (string, error) {
	g, err := n.conn.Generation()
	return strconv.FormatUint(uint64(g), 10), err
}
