// Package model holds the nouns of fairlead: what a Service proxy decides, with nothing of Kubernetes and nothing of a
// kernel in it.
//
// All traffic policy of Kubernetes fits one small table: a [Frontend] is an address that packets are sent to, an [Origin]
// says who sent them, and the [Route] found there names the [Pool] of backends that takes them. A dataplane is handed these
// tables and needs to know nothing else. [State.Decide] says what a packet should meet; tests, explain and doctor ask it.
//
// The package imports the standard library only.
package model

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Proto is a transport protocol, by its IP protocol number (IANA "Protocol Numbers").
type Proto uint8

// The protocols a Service may use.
const (
	TCP  Proto = 6
	UDP  Proto = 17
	SCTP Proto = 132
)

// String gives the lower-case name ("tcp"), as in rules and in /etc/protocols.
func (p Proto) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("proto%d", uint8(p))
}

// Key is where a packet is addressed to. An unspecified IP (0.0.0.0 or ::) means every address of the node that takes
// NodePorts; its family says which.
type Key struct {
	IP    netip.Addr
	Port  uint16
	Proto Proto
}

// NodePort tells whether the key stands for every NodePort address of the node.
func (k Key) NodePort() bool { return k.IP.IsUnspecified() }

// V6 tells the address family of the key.
func (k Key) V6() bool { return k.IP.Is6() }

// Compare orders keys by address (IPv4 first), port, protocol.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.IP.Compare(o.IP), cmp.Compare(k.Port, o.Port), cmp.Compare(k.Proto, o.Proto))
}

// String prints the key as "10.96.0.1:443/tcp" or "[fd00::1]:53/udp".
func (k Key) String() string {
	return netip.AddrPortFrom(k.IP, k.Port).String() + "/" + k.Proto.String()
}

// Origin is who is knocking.
type Origin uint8

// The origins, in the order of [Frontend.Routes].
const (
	FromPod     Origin = iota // a pod, as the configured detector of local traffic knows it
	FromNode                  // this node itself: the source is one of its addresses
	FromOutside               // anybody else
)

// Origins lists all of them, in order.
var Origins = [...]Origin{FromPod, FromNode, FromOutside}

func (o Origin) String() string { return [...]string{"pod", "node", "outside"}[o] }

// Verdict is what becomes of a packet.
type Verdict uint8

// The verdicts.
const (
	Pass    Verdict = iota // no frontend has anything to say about the packet
	Forward                // to one of the backends
	Reject                 // refused with an answer: TCP reset or ICMP port unreachable
	Drop                   // silence
)

func (v Verdict) String() string { return [...]string{"pass", "forward", "reject", "drop"}[v] }

// Route is what one origin meets at a frontend.
type Route struct {
	Pool PoolID
	SNAT bool    // hide the client from the backend. Hairpin (a backend that reaches itself) is each dataplane's own duty
	Else Verdict // while the pool is empty: Reject (no endpoint anywhere) or Drop (none on this node)
}

// Kind says which field of a Service made a frontend. It is for people: printed, never branched on.
type Kind string

// The kinds, as they are printed.
const (
	ClusterIP    Kind = "ClusterIP"
	NodePort     Kind = "NodePort"
	ExternalIP   Kind = "ExternalIP"
	LoadBalancer Kind = "LoadBalancer"
)

// About says whose frontend it is, for people.
type About struct {
	Service string // namespace/name
	Port    string // name of the Service port, may be empty
	Kind    Kind
}

// Frontend is one address that Service traffic is sent to, and what each origin meets there.
type Frontend struct {
	Key    Key
	Routes [3]Route       // by Origin
	Allow  []netip.Prefix // sources that may knock, sorted; all others are dropped. nil is everyone, of any origin
	Owned  bool           // the address is a Service's alone: what comes to its other ports is rejected, never served by the node
	About  About
}

// Scope is which endpoints a pool holds.
type Scope uint8

// The scopes.
const (
	Cluster Scope = iota // endpoints anywhere, after topology
	Local                // endpoints of this node
)

func (s Scope) String() string { return [...]string{"cluster", "local"}[s] }

// PoolID names a pool. All frontends of one Service port share its (at most two per family) pools.
type PoolID struct {
	Service string // namespace/name
	Port    string // name of the Service port, may be empty
	Proto   Proto
	V6      bool
	Scope   Scope
}

// Compare orders pools by Service, port name, protocol, family, scope.
func (p PoolID) Compare(o PoolID) int {
	return cmp.Or(cmp.Compare(p.Service, o.Service), cmp.Compare(p.Port, o.Port), cmp.Compare(p.Proto, o.Proto),
		compareBool(p.V6, o.V6), cmp.Compare(p.Scope, o.Scope))
}

// PortName is how Kubernetes prints a Service port: "ns/name:port", or "ns/name" when the port has no name
// (k8s.io/kubernetes/pkg/proxy ServicePortName.String; chain names are hashes of it).
func (p PoolID) PortName() string {
	if p.Port == "" {
		return p.Service
	}
	return p.Service + ":" + p.Port
}

// String prints "ns/name:port/tcp v4 cluster".
func (p PoolID) String() string {
	family := "v4"
	if p.V6 {
		family = "v6"
	}
	return p.PortName() + "/" + p.Proto.String() + " " + family + " " + p.Scope.String()
}

// Backend is one endpoint.
type Backend struct {
	Addr  netip.AddrPort
	Local bool // on this node
}

// Compare orders backends by address and port.
func (b Backend) Compare(o Backend) int {
	return cmp.Or(b.Addr.Compare(o.Addr), compareBool(b.Local, o.Local))
}

// Pool is the set of backends behind some frontends.
type Pool struct {
	ID       PoolID
	Backends []Backend     // take new connections; sorted, no repeats
	Draining []Backend     // serving, not chosen: keep the flows they have, get no new ones; sorted, none of Backends
	Sticky   time.Duration // ClientIP affinity: how long a client is remembered after its last connection; 0 is none
}

// Check is one health-check node port: what a cloud load balancer asks this node about one Service.
type Check struct {
	Service        string // namespace/name
	Port           uint16 // TCP port that is asked
	Ready4, Ready6 int    // distinct ready local endpoint addresses, by family
}

// Node is what fairlead knows about the machine it runs on.
type Node struct {
	Name          string
	Addrs         []netip.Addr   // all addresses of its interfaces, loopback too; sorted
	NodePorts     []netip.Prefix // which of Addrs take NodePort traffic, per family; nil is all of them
	LocalhostPort bool           // NodePorts answer on 127.0.0.0/8 too, by rules
	Pods          []netip.Prefix // sources that are pods; with PodInterfaces empty too: nothing tells a pod
	PodInterfaces []string       // interfaces whose traffic is from pods; a trailing + is a prefix match, as in iptables

	// LocalhostRelay lists the loopback addresses, of 127.0.0.1 and ::1 (KEP-6032), where TCP NodePorts answer through a relay in
	// the agent, for what its rules can't serve there. With 127.0.0.1 among them LocalhostPort is off. Sorted.
	LocalhostRelay []netip.Addr

	ServiceCIDRs []netip.Prefix // what ClusterIPs are given from: an address there that no Service has is nobody's, and dropped; sorted, disjoint
}

// TakesNodePort tells whether NodePort traffic sent to addr, one of the node's own addresses, is served.
func (n Node) TakesNodePort(addr netip.Addr) bool {
	if addr.IsLoopback() && (addr.Is6() || !n.LocalhostPort) {
		return false
	}
	return n.NodePorts == nil || contains(n.NodePorts, addr)
}

// Unassigned tells whether addr is kept for ClusterIPs, and so nobody's while no Service has it. What is an address of the
// node itself is the node's.
func (n Node) Unassigned(addr netip.Addr) bool {
	return contains(n.ServiceCIDRs, addr) && !addr.IsLoopback() && !slices.Contains(n.Addrs, addr)
}

// Detects tells whether anything is configured that tells a pod from other sources, for one family.
func (n Node) Detects(v6 bool) bool {
	for _, p := range n.Pods {
		if p.Addr().Is6() == v6 {
			return true
		}
	}
	return len(n.PodInterfaces) > 0
}

// Notice is something a person should be told about a Service or the node: a refused address, a conflict.
type Notice struct {
	Service string // namespace/name; empty is the node itself
	Reason  string // CamelCase, as in a Kubernetes Event
	Message string
	UID     string // of the Service object, where it is known: an Event needs it to be found
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

func contains(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return false
}
