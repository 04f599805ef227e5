package nftables

import (
	"context"
	"fmt"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// Watch reports what others do to our tables; see engine.Watcher. The kernel tells each change and who made it, and leaves out
// our own. What the rules themselves write into the affinity map is not told.
func (d *Dataplane) Watch(ctx context.Context, drift func(what string)) error {
	d.damage.add(nil) // what happened before is not known
	return kernel.WatchNFTables(ctx, d.port, func(m kernel.NFMessage) string {
		what := see(m, d.cfg.table())
		if what != "" || m.Type == 0 {
			d.damage.add(&m)
		}
		return what
	}, drift)
}

// kinds are the events of interest: the attributes that name the table and the object, and how to say it.
var kinds = map[uint16]struct {
	table, name uint16
	says        string
}{
	nftType(unix.NFT_MSG_DELTABLE):   {unix.NFTA_TABLE_NAME, 0, "table %s was deleted"},
	nftType(unix.NFT_MSG_NEWTABLE):   {unix.NFTA_TABLE_NAME, 0, "table %s was made or changed"},
	nftType(unix.NFT_MSG_NEWCHAIN):   {unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, "chain %s of %s was made or changed"},
	nftType(unix.NFT_MSG_DELCHAIN):   {unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, "chain %s of %s was deleted"},
	nftType(unix.NFT_MSG_NEWRULE):    {unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, "a rule was added to chain %s of %s"},
	nftType(unix.NFT_MSG_DELRULE):    {unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, "a rule was deleted from chain %s of %s"},
	nftType(unix.NFT_MSG_DELSET):     {unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, "set %s of %s was deleted"},
	nftType(unix.NFT_MSG_DELOBJ):     {unix.NFTA_OBJ_TABLE, unix.NFTA_OBJ_NAME, "counter %s of %s was deleted"},
	nftType(unix.NFT_MSG_NEWSETELEM): {unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET, "element%s was added to %s of %s"},
	nftType(unix.NFT_MSG_DELSETELEM): {unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET, "element%s was deleted from %s of %s"},
}

// see says in words what an event did to what is ours.
func see(m kernel.NFMessage, ours string) string {
	k, ok := kinds[m.Type]
	if !ok || m.Family != unix.NFPROTO_IPV4 && m.Family != unix.NFPROTO_IPV6 {
		return ""
	}
	table, name := cutNames(m.Attrs, k.table, k.name)
	if string(table) != ours {
		return ""
	}
	v6 := m.Family == unix.NFPROTO_IPV6
	where := "ip " + ours
	if v6 {
		where = "ip6 " + ours
	}
	switch m.Type {
	case nftType(unix.NFT_MSG_DELTABLE), nftType(unix.NFT_MSG_NEWTABLE):
		return fmt.Sprintf(k.says, where)
	case nftType(unix.NFT_MSG_NEWSETELEM), nftType(unix.NFT_MSG_DELSETELEM):
		set, ours := setNamed(name)
		if !ours || set == setAffinity {
			return ""
		}
		return fmt.Sprintf(k.says, keyIn(m.Attrs, set, v6), set, where)
	}
	return fmt.Sprintf(k.says, name, where)
}

// keyIn prints the first element of an event: " 10.96.0.10:80/tcp", of a frontend's; nothing of others.
func keyIn(attrs []byte, s setID, v6 bool) string {
	var out string
	cutElements(attrs, func(e element) {
		n := keyLen(v6)
		if out != "" || len(specs[s].key) < len(frontendKey) || len(e.key) < n {
			return
		}
		k := cutKey(e.key, v6)
		if out = " " + k.String(); k.NodePort() {
			out = fmt.Sprintf(" NodePort %d/%s", k.Port, k.Proto)
		}
	})
	return out
}
