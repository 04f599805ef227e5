// Package ipvs is the dataplane that leaves the choice of endpoints to the kernel's IP virtual servers: one for each pool, known by a mark.
// Who may knock, where, and as whom is told by the rules of package nftables, which stand ahead of it and set the mark.
//
// Costs: one endpoint that changes is one message, however many frontends its pool has. README.md draws the way of a packet.
package ipvs
