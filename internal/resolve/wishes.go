package resolve

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"fairlead/internal/model"
)

// kind is what makes a wish, the strongest first: of two wishes of one Service for the same key the stronger one counts.
// A load-balancer address comes before an external IP since it may be closed to some sources.
type kind uint8

const (
	kindClusterIP kind = iota
	kindLoadBalancer
	kindExternalIP
	kindNodePort
)

func (k kind) model() model.Kind {
	return [...]model.Kind{model.ClusterIP, model.LoadBalancer, model.ExternalIP, model.NodePort}[k]
}

// external tells whether the kind serves an address that the cluster did not allot.
func (k kind) external() bool { return k == kindLoadBalancer || k == kindExternalIP }

// wish is one frontend that a Service asks for. Whether it gets it depends on the others.
type wish struct {
	key  model.Key
	kind kind
	port int // index into serviceFacts.ports
}

// maxWishes bounds what one Service can cost: external addresses times ports. No sane Service has a hundredth of it, but one
// object of etcd's full size (1.5 MiB) could ask for a billion.
const maxWishes = 1 << 16

// wishes lists what a Service asks for, sorted by key, one wish a key. It depends on nothing but the object and the
// configuration, which is what lets wishes be indexed.
func (c Config) wishes(f *serviceFacts, n *notes) []wish {
	if f == nil {
		return nil
	}
	n.tell(f.faults, always)
	if c.AllowExternalIPs {
		n.tell(f.faults, inExternalIPs)
	}
	var out []wish
	var other []string
	for _, v6 := range [...]bool{false, true} {
		externals := c.externals(f, v6)
		cluster := netip.Addr{}
		if c.serves(v6) {
			cluster = f.cluster[fam(v6)]
			n.tell(f.faults, inClusterIP(v6))
		}
		if !cluster.IsValid() {
			for _, e := range externals {
				other = append(other, e.ip.String())
			}
			continue
		}
		for i, p := range f.ports {
			if len(out)+len(externals)+2 > maxWishes {
				n.add(Malformed, "the Service has too many addresses and ports (%d addresses, %d ports); not all are served", len(externals), len(f.ports))
				break
			}
			add := func(ip netip.Addr, number uint16, k kind) {
				out = append(out, wish{model.Key{IP: ip, Port: number, Proto: p.proto}, k, i})
			}
			add(cluster, p.number, kindClusterIP)
			for _, e := range externals {
				add(e.ip, p.number, e.kind)
			}
			if p.nodePort != 0 {
				add(model.Unspecified(v6), p.nodePort, kindNodePort)
			}
		}
	}
	if len(other) > 0 {
		other = other[:min(len(other), maxNamed)]
		n.add(OtherFamily, "%s: the Service has no ClusterIP of that family, or it is not served here; ignored", strings.Join(other, ", "))
	}
	slices.SortFunc(out, func(a, b wish) int { return cmp.Or(a.key.Compare(b.key), cmp.Compare(a.kind, b.kind)) })
	return slices.CompactFunc(out, func(a, b wish) bool { return a.key == b.key })
}

const maxNamed = 8 // addresses in one message

type externalAddr struct {
	ip   netip.Addr
	kind kind
}

// externals lists the external addresses of one family that may be served.
func (c Config) externals(f *serviceFacts, v6 bool) []externalAddr {
	var out []externalAddr
	for _, e := range f.external {
		if e.ip.Is6() == v6 && (c.AllowExternalIPs || e.kind != kindExternalIP) {
			out = append(out, e)
		}
	}
	return out
}

// externalAddrs reads the addresses that are safe to serve at all.
func externalAddrs(s *corev1.Service, n *faults) []externalAddr {
	var out []externalAddr
	add := func(in where, field, text string, k kind) {
		ip, ok := parseAddr(text)
		switch {
		case strings.TrimSpace(text) == "": // an ingress that has a hostname only
		case !ok:
			n.add(in, Malformed, "%s: %s is no IP address", field, quote(text))
		case unsafeAddr(ip) != "":
			n.add(in, UnsafeAddress, "%s: %s is %s; it is not served", field, ip, unsafeAddr(ip))
		default:
			out = append(out, externalAddr{ip, k})
		}
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP {
			add(always, fieldIngress, in.IP, kindLoadBalancer)
		}
	}
	for _, text := range s.Spec.ExternalIPs {
		add(inExternalIPs, fieldExternalIPs, text, kindExternalIP)
	}
	return slices.Clip(out)
}
