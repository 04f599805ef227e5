package iptables

import (
	"net/netip"
	"time"

	"fairlead/internal/model"
)

// Table is an iptables table that fairlead writes to.
type Table uint8

// The tables.
const (
	Nat Table = iota
	Filter
	Mangle // only read and cleaned: kube-proxy's canary lives there
)

func (t Table) String() string { return [...]string{"nat", "filter", "mangle"}[t] }

// ChainID names a chain of one family.
type ChainID struct {
	V6    bool
	Table Table
	Name  string // at most 28 bytes (linux/netfilter/x_tables.h XT_EXTENSION_MAXNAMELEN, less the final NUL)
}

// Rule is one iptables rule as data. The zero value of a field means that the rule does not look at it.
//
// It is comparable, so that rules can be compared with ==, and says everything that fairlead's rules need and nothing
// more. Both back ends write it: as text for iptables-restore, as nf_tables expressions over netlink.
type Rule struct {
	Comment string // printable ASCII without quotes or backslashes, at most 255 bytes; made safe by clean()

	Src, Dst       netip.Prefix // source, destination
	NotSrc, NotDst bool         // inverted
	In             string       // incoming interface; a trailing + matches a prefix
	NotIn          bool
	Proto          model.Proto
	Port, PortEnd  uint16 // destination port, or range when PortEnd is larger; needs Proto

	State    CTState // conntrack states, any of
	NotState bool
	SrcLocal bool // source is an address of the node (addrtype LOCAL)
	DstLocal bool // destination is
	Mark     uint32
	MarkMask uint32 // mark & MarkMask == Mark; 0 is no match on the mark
	NotMark  bool
	Recent   Recent // xt_recent: is the source remembered, or remember it
	Chance   uint32 // xt_statistic: match with probability Chance / 2^31; 0 is always
	NFAcct   string // count in this nfacct object

	Target Target
}

// CTState is a set of conntrack states (linux/netfilter/xt_conntrack.h).
type CTState uint16

// The states, as bits of our own; the back ends translate.
const (
	StateInvalid CTState = 1 << iota
	StateEstablished
	StateRelated
	StateNew
	StateDNAT
)

// Recent is a use of xt_recent, keyed by source address.
type Recent struct {
	List  string        // name of the list; empty is no use of it
	Set   bool          // remember the source; otherwise ask whether it was seen
	Since time.Duration // asked: seen within this time (whole seconds), older ones are reaped
}

// Action is what a rule does with the packet it matches.
type Action uint8

// The actions. Jump and Goto go to a chain; Continue only counts (a rule without target).
const (
	Continue Action = iota
	Jump
	Goto
	Accept
	DropIt
	Return
	DNAT
	Masquerade  // with --random-fully
	OrMark      // set the bits of Mark
	XorMark     // flip them
	RejectReset // with a TCP reset; needs Proto TCP
	RejectPort  // with ICMP port unreachable
)

// Target is the action with its argument.
type Target struct {
	Action Action
	Chain  string         // of Jump and Goto
	To     netip.AddrPort // of DNAT
	Mark   uint32         // of OrMark and XorMark
}
