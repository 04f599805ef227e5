package iptables

import (
	"crypto/sha256"
	"encoding/base32"
	"net/netip"
	"strings"

	"fairlead/internal/model"
)

// The fixed chains. Names and places are kube-proxy's own where it has such a chain, so that an operator finds what is
// known, and so that taking over from a kube-proxy (and giving back to it) replaces its rules in place.
const (
	chainServices    = "KUBE-SERVICES"          // nat: to the Service; filter: refusals
	chainNodePorts   = "KUBE-NODEPORTS"         // nat: by port; filter: health-check ports
	chainPostrouting = "KUBE-POSTROUTING"       // nat: masquerade what is marked
	chainMarkMasq    = "KUBE-MARK-MASQ"         // nat: mark it
	chainNotPods     = "KUBE-MASQ-NOT-PODS"     // nat: mark what no pod sent; only with several pod ranges or interfaces
	chainExternal    = "KUBE-EXTERNAL-SERVICES" // filter: NodePorts that are refused
	chainDenyPorts   = "KUBE-NODEPORTS-DENY"    // filter: the NodePorts themselves
	chainForward     = "KUBE-FORWARD"           // filter: let Service traffic be forwarded
	chainProxyFW     = "KUBE-PROXY-FIREWALL"    // filter: sources that a load balancer's ranges do not allow
	chainFirewall    = "KUBE-FIREWALL"          // filter: shared with the kubelet; guards 127.0.0.0/8
	chainRefuse      = "KUBE-REFUSE"            // filter: TCP reset or ICMP port unreachable
	chainCanary      = "KUBE-PROXY-CANARY"      // kube-proxy's; only cleaned up
)

// Prefixes of the chains there is one of for each Service port, endpoint or part of a tree. kube-proxy removes unknown
// chains of the first five from the nat table, so whatever we add there must bear one of them: a left-over of ours that still
// refers to a Service chain would make every later write of kube-proxy fail.
const (
	prefixService  = "KUBE-SVC-"  // cluster pool; also the parts of the dispatch trees
	prefixLocal    = "KUBE-SVL-"  // local pool
	prefixExternal = "KUBE-EXT-"  // routes by origin
	prefixFirewall = "KUBE-FW-"   // allowed sources
	prefixEndpoint = "KUBE-SEP-"  // one endpoint
	prefixRefusals = "KUBE-IP-"   // parts of the tree of refusals
	prefixRanges   = "KUBE-LBFW-" // parts of the tree of source ranges
	prefixDenied   = "KUBE-NP-"   // parts of the tree of refused NodePorts
)

// hash is the last part of a chain name: 16 characters of the base32 of the SHA-256
// (k8s.io/kubernetes/pkg/proxy/iptables, portProtoHash and servicePortEndpointChainName).
func hash(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "")))
	return base32.StdEncoding.EncodeToString(sum[:10])
}

func poolChain(id model.PoolID) string {
	prefix := prefixService
	if id.Scope == model.Local {
		prefix = prefixLocal
	}
	return prefix + hash(id.PortName(), id.Proto.String())
}

func endpointChain(id model.PoolID, to netip.AddrPort) string {
	return prefixEndpoint + hash(id.PortName(), id.Proto.String(), to.String())
}

// ours tells whether a chain is fairlead's or kube-proxy's (of its ipvs mode too) to write and to remove. KUBE-FIREWALL is
// not: the kubelet has its part in it.
func ours(c ChainID) bool {
	switch c.Name {
	case chainCanary:
		return true
	case chainServices, chainNodePorts, "KUBE-NODE-PORT":
		return c.Table != Mangle
	case chainPostrouting, chainMarkMasq, chainNotPods, "KUBE-LOAD-BALANCER":
		return c.Table == Nat
	case chainExternal, chainDenyPorts, chainForward, chainProxyFW, chainRefuse,
		"KUBE-SOURCE-RANGES-FIREWALL", "KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER":
		return c.Table == Filter
	}
	prefixes := []string{prefixService, prefixLocal, prefixExternal, prefixFirewall, prefixEndpoint}
	if c.Table == Filter {
		prefixes = []string{prefixRefusals, prefixRanges, prefixDenied}
	}
	for _, p := range prefixes {
		if strings.HasPrefix(c.Name, p) {
			return c.Table != Mangle
		}
	}
	return false
}
