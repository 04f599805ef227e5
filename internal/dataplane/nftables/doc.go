// Package nftables is the dataplane that keeps Services as elements of a few shared maps, behind a small fixed set of rules.
// It speaks to the kernel by netlink alone.
//
// Costs: a packet that opens a connection meets three look-ups, however many Services there are; a packet of a connection
// that is open meets none of its rules but the two of the forward chain. One endpoint that changes is one or two elements in
// one transaction. README.md draws the way of a packet.
package nftables
