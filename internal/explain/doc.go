// Package explain tells the story of a packet: who sent it, which frontend takes it, what its origin meets there, which
// endpoints may get it and which may not, each with its reason.
//
// It decides nothing itself. What a packet should meet is [model.State.Decide]; why an endpoint is in or out is the
// resolver's to say.
package explain
