// Package control lets get and explain ask a running agent, through a unix socket that only its own user may open. Questions
// change nothing; the one thing that can be told is to switch to another mode, which whoever may open the socket could do in
// ways of his own. The agent has no other listener beside health and metrics.
//
// The protocol is HTTP with JSON bodies, private to one build of the program.
package control
