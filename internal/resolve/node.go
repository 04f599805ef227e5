package resolve

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"fairlead/internal/model"
)

// nodeFacts is what is kept of a Node object.
type nodeFacts struct {
	known bool         // there is, or was, such an object
	addrs []netip.Addr // of status, InternalIP before ExternalIP, in the order told
	zone  string
	pods  []netip.Prefix
}

func readNode(n *corev1.Node) nodeFacts {
	f := nodeFacts{known: true, zone: n.Labels[corev1.LabelTopologyZone]}
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for _, a := range n.Status.Addresses {
			if ip, ok := parseAddr(a.Address); ok && a.Type == kind && !slices.Contains(f.addrs, ip) {
				f.addrs = append(f.addrs, ip)
			}
		}
	}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 {
		cidrs = []string{n.Spec.PodCIDR}
	}
	for _, c := range cidrs[:min(len(cidrs), mostPodCIDRsOfNode)] {
		if p, ok := parsePrefix(c); ok {
			f.pods = append(f.pods, p)
		}
	}
	return f
}

// primary is the node's own address of a family: what the administrator binds, or the first that its Node object gives. Where
// nothing but files says what there is, a Node object is no duty: without one nobody says which of the machine's addresses is
// the first, and all of them are.
func (c Config) primary(own nodeFacts, interfaces []netip.Addr, v6 bool) (out []netip.Addr) {
	if b := c.BindAddr.Unmap(); b.IsValid() && !b.IsUnspecified() && b.Is6() == v6 {
		return []netip.Addr{b}
	}
	alone := c.Standalone && !own.known
	if alone {
		own.addrs = interfaces
	}
	for _, a := range own.addrs {
		if a.Is6() != v6 || a.IsLoopback() || alone && a.IsLinkLocalUnicast() {
			continue
		}
		if out = append(out, a); !alone {
			break
		}
	}
	return out
}

// here is this node, as all Services see it.
type here struct {
	Config
	node    model.Node
	zone    string
	addrs   []netip.Addr // of its interfaces and of its Node object, without link-local ones; sorted
	detects [2]bool      // by family: a pod can be told
}

// place works out what follows from the configuration, this node's object and the addresses of its interfaces.
func place(c Config, own nodeFacts, interfaces []netip.Addr) here {
	h := here{Config: c, zone: own.zone, node: model.Node{Name: c.NodeName, Addrs: interfaces}}
	h.node.Pods, h.node.PodInterfaces = c.podSources(own.pods)
	h.detects = [2]bool{h.node.Detects(false), h.node.Detects(true)}
	h.placeNodePorts(own)
	h.addrs = slices.DeleteFunc(slices.Concat(interfaces, own.addrs), netip.Addr.IsLinkLocalUnicast)
	slices.SortFunc(h.addrs, netip.Addr.Compare)
	h.addrs = slices.Compact(h.addrs)
	return h
}

func (h *here) placeNodePorts(own nodeFacts) {
	limited := false
	list := []netip.Prefix{}
	for _, v6 := range h.families() {
		ports := h.nodePortAddrs(v6, h.primary(own, h.node.Addrs, v6))
		switch {
		case h.LocalhostRelay && ports.relayed:
			h.node.LocalhostRelay = append(h.node.LocalhostRelay, relayAddr(v6))
		case !v6:
			h.node.LocalhostPort = h.LocalhostNodePorts && ports.loopback()
		}
		if !ports.limited {
			ports.list = []netip.Prefix{everything(v6)}
		}
		limited = limited || !slices.Equal(ports.list, []netip.Prefix{everything(v6)})
		list = append(list, ports.list...)
	}
	if limited {
		h.node.NodePorts = list
	}
}

// cleanAddrs gives the addresses of interfaces in order: without zones, each once.
func cleanAddrs(addrs []netip.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		if a.IsValid() {
			out = append(out, a.Unmap().WithZone(""))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	out = slices.Compact(out)
	if len(out) == 0 {
		return nil
	}
	return slices.Clip(out)
}

// index of a family in arrays.
func fam(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

func equalNodes(a, b model.Node) bool {
	return a.Name == b.Name && slices.Equal(a.Addrs, b.Addrs) && a.LocalhostPort == b.LocalhostPort &&
		slices.Equal(a.LocalhostRelay, b.LocalhostRelay) &&
		(a.NodePorts == nil) == (b.NodePorts == nil) && slices.Equal(a.NodePorts, b.NodePorts) &&
		slices.Equal(a.Pods, b.Pods) && slices.Equal(a.PodInterfaces, b.PodInterfaces) && slices.Equal(a.ServiceCIDRs, b.ServiceCIDRs)
}
