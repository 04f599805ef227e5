// Package relay answers on the loopback addresses for NodePorts, in modes whose rules can't: a connection to 127.0.0.1 can't
// leave the machine by rules without route_localnet, and one to ::1 never can. So the agent listens there itself, and hands
// bytes on (KEP-6032). It is for TCP, on the addresses of model.Node.LocalhostRelay; what else is sent there is for rules to
// refuse. Backends see the node.
//
// There is a listener for each of these addresses and each TCP NodePort whose pool (that of the node's own traffic) has
// backends, so that a client is refused by the kernel when nobody is there to serve it. A connection goes to a backend by
// chance. One that does not answer is passed over for another, as long as no byte has been sent. With session affinity
// all connections go to one backend, since all clients have one address, until none comes for the time of the affinity, or
// the backend goes.
//
// A connection that is established lives until one of its ends closes it, whatever becomes of its NodePort, its Service and
// its backend, as with rules: a backend that was taken out of a Service may still have something to say, and one that is gone
// without a word is found by keepalive. A relayed connection does not outlive the agent, though. Half of a connection can be
// closed, and a reset is passed on.
package relay
