// Package control lets get and explain ask a running agent, through a unix socket that only its own user may open. It reads
// and never changes anything: the agent has no other listener beside health and metrics.
//
// The protocol is HTTP with JSON bodies, private to one build of the program.
package control
