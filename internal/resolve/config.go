package resolve

import (
	"net/netip"
	"strings"

	"fairlead/internal/model"
)

// Config is what an administrator decides. Lists in it must not change once it is handed over.
type Config struct {
	NodeName   string     // as Node objects and nodeName of endpoints spell it
	IPv4, IPv6 bool       // families to serve
	BindAddr   netip.Addr // if valid and not unspecified: this node's own address of its family, instead of the Node object's

	MasqueradeAll bool // hide every client of a ClusterIP
	Detect        Detect

	NodePortAddresses  []string // CIDRs, or the words primary, localhost, all; empty is all
	LocalhostNodePorts bool     // NodePorts answer on 127.0.0.0/8, where NodePortAddresses permit it; by rules
	LocalhostRelay     bool     // TCP NodePorts answer on 127.0.0.1 and ::1 by a relay, each where NodePortAddresses name it

	Standalone bool // there is no API server: without a Node object of this node, primary is every address of its interfaces

	AllowExternalIPs   bool // serve spec.externalIPs (kube-proxy's feature gate AllowServiceExternalIPs)
	AllowNodeAddresses bool // let Services have addresses of nodes. Such a Service takes its ports from the node itself
}

// DetectMode says how a pod's traffic is told from other traffic, in the words of kube-proxy's detectLocalMode.
type DetectMode string

// The modes. Any other value detects nothing.
const (
	DetectNothing      DetectMode = ""
	ByClusterCIDR      DetectMode = "ClusterCIDR"         // source in one of Detect.CIDRs
	ByNodeCIDR         DetectMode = "NodeCIDR"            // source in one of this Node's spec.podCIDRs
	ByBridgeInterface  DetectMode = "BridgeInterface"     // came in by Detect.Interface
	ByInterfacePrefix  DetectMode = "InterfaceNamePrefix" // came in by an interface whose name starts so
	wordPrimary                   = "primary"
	wordLocalhost                 = "localhost"
	wordAll                       = "all"
	interfaceWildcard             = "+" // of model.Node.PodInterfaces
	mostPodCIDRsOfNode            = 64  // more than any Node has; bounds what a bad Node object can cost
)

// Detect configures the detector of pods.
type Detect struct {
	Mode      DetectMode
	CIDRs     []netip.Prefix // ByClusterCIDR: all of them count, in both families
	Interface string         // ByBridgeInterface, ByInterfacePrefix
}

// families lists the families that are served; true is IPv6.
func (c Config) families() []bool {
	switch {
	case c.IPv4 && c.IPv6:
		return []bool{false, true}
	case c.IPv4:
		return []bool{false}
	case c.IPv6:
		return []bool{true}
	}
	return nil
}

func (c Config) serves(v6 bool) bool { return v6 && c.IPv6 || !v6 && c.IPv4 }

// portAddrs are the addresses of one family that take NodePorts.
type portAddrs struct {
	limited bool // some entry speaks of this family, so that list counts
	relayed bool // some entry names the loopback address as such, and not as one of many
	list    []netip.Prefix
}

func (p *portAddrs) add(entries ...netip.Prefix) {
	p.limited = true
	p.list = append(p.list, entries...)
}

// nodePortAddrs reads NodePortAddresses for one family. An entry that can't be read limits both families: a typo must not
// open what was meant to be closed. kube-proxy opens all IPv6 addresses when `primary` finds no IPv6 address; here the word
// then matches nothing.
func (c Config) nodePortAddrs(v6 bool, primary []netip.Addr) portAddrs {
	var out portAddrs
	for _, entry := range c.NodePortAddresses {
		p, isPrefix := parsePrefix(entry)
		switch {
		case entry == wordPrimary:
			out.add()
			for _, a := range primary {
				out.add(one(a))
			}
		case entry == wordLocalhost:
			out.add(localhost(v6))
			out.relayed = true
		case entry == wordAll:
			out.add(everything(v6))
		case !isPrefix:
			out.add()
		case p.Addr().Is6() == v6:
			out.add(p)
			out.relayed = out.relayed || p.Addr().IsLoopback() && p.Contains(relayAddr(v6))
		}
	}
	out.list = prefixes(out.list)
	return out
}

// notices names the entries of NodePortAddresses that can't be read.
func (c Config) notices() []model.Notice {
	n := &notes{}
	for _, entry := range c.NodePortAddresses {
		_, ok := parsePrefix(entry)
		if !ok && entry != wordPrimary && entry != wordLocalhost && entry != wordAll {
			n.add(Malformed, "nodePortAddresses: %s is neither a CIDR nor primary, localhost or all; it matches nothing", quote(entry))
		}
	}
	return n.sorted()
}

// loopback tells whether the list lets 127.0.0.0/8 in (kube-proxy's ContainsIPv4Loopback: any overlap at its start).
func (p portAddrs) loopback() bool {
	if !p.limited {
		return true
	}
	for _, pre := range p.list {
		if pre.Addr().IsLoopback() || pre.Contains(netip.AddrFrom4([4]byte{127, 0, 0, 0})) {
			return true
		}
	}
	return false
}

// relayAddr is the loopback address of a family that the relay serves (KEP-6032: these two and no other).
func relayAddr(v6 bool) netip.Addr {
	if v6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

func localhost(v6 bool) netip.Prefix {
	if v6 {
		return one(netip.IPv6Loopback())
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127, 0, 0, 0}), 8)
}

func everything(v6 bool) netip.Prefix { return netip.PrefixFrom(model.Unspecified(v6), 0) }

// podSources gives the sources and interfaces that are pods.
func (c Config) podSources(podCIDRs []netip.Prefix) (cidrs []netip.Prefix, interfaces []string) {
	switch d := c.Detect; d.Mode {
	case ByClusterCIDR:
		cidrs = d.CIDRs
	case ByNodeCIDR:
		cidrs = podCIDRs
	case ByBridgeInterface, ByInterfacePrefix:
		if name := strings.TrimSpace(d.Interface); name != "" && d.Mode == ByBridgeInterface {
			interfaces = []string{name}
		} else if name != "" {
			interfaces = []string{name + interfaceWildcard}
		}
	}
	var served []netip.Prefix
	for _, p := range cidrs {
		if p.IsValid() && c.serves(p.Addr().Is6()) {
			served = append(served, p.Masked())
		}
	}
	return prefixes(served), interfaces
}
