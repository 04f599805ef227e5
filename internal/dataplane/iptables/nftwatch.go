package iptables

import (
	"context"
	"fmt"
	"strings"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// Watch calls drift when somebody else changed what is ours; see backend. It hears of each change from the kernel, which
// leaves out what this back end writes itself.
func (n *nft) Watch(ctx context.Context, drift func(what string)) error {
	return kernel.WatchNFTables(ctx, n.conn.Port(), see, drift)
}

// see says in words what an event did to what is ours.
func see(m kernel.NFMessage) string {
	if m.Family != unix.NFPROTO_IPV4 && m.Family != unix.NFPROTO_IPV6 {
		return ""
	}
	v6 := m.Family == unix.NFPROTO_IPV6
	switch m.Type {
	case nftType(unix.NFT_MSG_NEWCHAIN):
		return seeChain(m.Attrs, v6, "made or changed")
	case nftType(unix.NFT_MSG_DELCHAIN):
		return seeChain(m.Attrs, v6, "deleted")
	case nftType(unix.NFT_MSG_NEWRULE):
		return seeRule(m.Attrs, v6, "added to")
	case nftType(unix.NFT_MSG_DELRULE):
		return seeRule(m.Attrs, v6, "deleted from")
	}
	return ""
}

// seeChain notes a change of one of our chains. One that goes with its table is told of like any other.
func seeChain(attrs []byte, v6 bool, what string) string {
	if id, ok := cutChain(attrs, v6); ok && watched(id) {
		return fmt.Sprintf("%s was %s", where(id), what)
	}
	return ""
}

// seeRule notes a change in one of our chains, or of a jump to one.
func seeRule(attrs []byte, v6 bool, what string) string {
	raw := cutRule(attrs)
	table, ok := tableNamed(string(raw.table))
	if !ok {
		return ""
	}
	id := ChainID{V6: v6, Table: table, Name: string(raw.chain)}
	if id.builtin() {
		r, _ := raw.rule(v6)
		to := ChainID{V6: v6, Table: table, Name: r.Target.Chain}
		if watched(to) {
			return fmt.Sprintf("a jump to %s was %s %s", to.Name, what, where(id))
		}
		return ""
	}
	if watched(id) {
		return fmt.Sprintf("a rule was %s %s", what, where(id))
	}
	return ""
}

// watched tells our chains from the kubelet's, which comes and goes, and from all others.
func watched(id ChainID) bool {
	return (id.Table == Nat || id.Table == Filter) && watchedName(id.Name)
}

func watchedName(chain string) bool {
	return strings.HasPrefix(chain, kubePrefix) && chain != chainKubeletCanary
}

// chainKubeletCanary is the chain by which the kubelet, and iptables-wrapper, know the flavour of iptables in use.
const chainKubeletCanary = "KUBE-KUBELET-CANARY"
