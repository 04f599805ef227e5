package resolve

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

const (
	// LabelProxyName hands a Service to another proxy (KEP-2447); its presence counts, not its value.
	LabelProxyName = "service.kubernetes.io/service-proxy-name"
	// AnnotationTopologyKeys is the ordered topology of a Service; see the package comment.
	AnnotationTopologyKeys = "fairlead.io/topology-keys"

	defaultSticky = time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second
	maxSticky     = 86400 // seconds; the API accepts no more (k8s.io/kubernetes/pkg/apis/core/validation)
)

// Where an address was read, as notices name it.
const (
	fieldClusterIPs  = "spec.clusterIPs"
	fieldExternalIPs = "spec.externalIPs"
	fieldIngress     = "status.loadBalancer.ingress"
	fieldRanges      = "spec.loadBalancerSourceRanges"
)

// served tells whether the Service is for us at all.
func served(s *corev1.Service) bool {
	if s == nil || s.Spec.Type == corev1.ServiceTypeExternalName {
		return false
	}
	if _, other := s.Labels[LabelProxyName]; other {
		return false
	}
	ips := clusterIPs(s)
	return len(ips) > 0 && !slices.Contains(ips, corev1.ClusterIPNone)
}

// clusterIPs lists what is written as ClusterIPs, whichever field it is in.
func clusterIPs(s *corev1.Service) []string {
	if len(s.Spec.ClusterIPs) > 0 {
		return s.Spec.ClusterIPs
	}
	if s.Spec.ClusterIP == "" {
		return nil
	}
	return []string{s.Spec.ClusterIP}
}

// serviceFacts is what is kept of a Service object: what it says, whatever a configuration makes of it. The objects
// themselves would be most of the memory of a large cluster.
type serviceFacts struct {
	uid     uid
	created int64 // seconds since 1970: the API tells no less
	ports   []port
	cluster [2]netip.Addr // ClusterIPs by family; invalid is none
	policy  policy
	health  int32 // the port at which load balancers ask for the health; 0 is none
	*rare         // never nil
}

// rare is what few Services have.
type rare struct {
	external []externalAddr // in the order told, of both families
	keys     []string       // of AnnotationTopologyKeys, known ones
	ranges   *ranges
	faults   *faults
	uid      types.UID // one that is no UUID
}

var nothingRare = new(rare)

// readService reads a Service; one that is not for us has no facts.
func readService(s *corev1.Service) *serviceFacts {
	if !served(s) {
		return nil
	}
	var n faults
	f := &serviceFacts{
		created: s.CreationTimestamp.Unix(),
		ports:   ports(s, &n),
		cluster: [2]netip.Addr{clusterIP(s, false, &n), clusterIP(s, true, &n)},
		policy:  readPolicy(s, &n),
		rare:    nothingRare,
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer && externalLocal(s) {
		f.health = s.Spec.HealthCheckNodePort
	}
	more := rare{external: externalAddrs(s, &n), keys: topologyKeys(s, &n), ranges: readRanges(s, &n)}
	if f.uid = packUID(s.UID); f.uid.text() != s.UID {
		more.uid = s.UID
	}
	more.faults = n.orNil()
	if len(more.external)+len(more.keys)+len(more.uid) > 0 || more.ranges != nil || more.faults != nil {
		f.rare = &more
	}
	return f
}

// uid is a UUID in a quarter of the memory, as the API server makes them.
type uid [16]byte

// packUID gives nothing of use for what is no UUID.
func packUID(text types.UID) (u uid) {
	digits := strings.ReplaceAll(string(text), "-", "")
	if len(digits) != hex.EncodedLen(len(u)) {
		return uid{}
	}
	_, _ = hex.Decode(u[:], []byte(digits)) // whoever calls compares
	return u
}

func (u uid) text() types.UID {
	if u == (uid{}) {
		return ""
	}
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]))
}

func (f *serviceFacts) uidText() string { return string(cmp.Or(f.rare.uid, f.uid.text())) }

// clusterIP is the ClusterIP of one family, if it has one. The address says which family it is of, not its place in
// ipFamilies; a family that ipFamilies leaves out is not served.
func clusterIP(s *corev1.Service, v6 bool, n *faults) netip.Addr {
	want := corev1.IPv4Protocol
	if v6 {
		want = corev1.IPv6Protocol
	}
	if len(s.Spec.IPFamilies) > 0 && !slices.Contains(s.Spec.IPFamilies, want) {
		return netip.Addr{}
	}
	for _, text := range clusterIPs(s) {
		ip, ok := parseAddr(text)
		switch {
		case !ok:
			n.add(inClusterIP(v6), Malformed, "%s: %s is no IP address", fieldClusterIPs, quote(text))
		case ip.Is6() != v6:
		case unsafeAddr(ip) != "":
			n.add(inClusterIP(v6), UnsafeAddress, "%s: %s is %s; it is not served", fieldClusterIPs, ip, unsafeAddr(ip))
		default:
			return ip
		}
	}
	return netip.Addr{}
}

// port is one port of a Service.
type port struct {
	name     string
	proto    model.Proto
	number   uint16
	nodePort uint16 // 0 is none
}

// ports reads the ports of a Service. Of two that can't be told apart, the first counts.
func ports(s *corev1.Service, n *faults) []port {
	out := make([]port, 0, len(s.Spec.Ports))
	var taken claimed
	if len(s.Spec.Ports) > 1 {
		taken = claimed{}
	}
	for _, sp := range s.Spec.Ports {
		proto, ok := protocol(sp.Protocol)
		switch {
		case !ok:
			n.add(always, Malformed, "port %s: protocol %s is not known", quote(sp.Name), quote(string(sp.Protocol)))
			continue
		case !validPort(sp.Port):
			n.add(always, Malformed, "port %s: %d is no port number", quote(sp.Name), sp.Port)
			continue
		}
		p := port{sp.Name, proto, uint16(sp.Port), 0}
		if taken.has(portMark{proto: proto, name: p.name}) || taken.has(portMark{proto: proto, number: p.number}) {
			n.add(always, Malformed, "port %s: its name or number %d/%s is taken by an earlier port", quote(sp.Name), sp.Port, proto)
			continue
		}
		taken.mark(portMark{proto: proto, name: p.name})
		taken.mark(portMark{proto: proto, number: p.number})
		p.nodePort = nodePort(sp, proto, taken, n)
		out = append(out, p)
	}
	return out
}

func nodePort(sp corev1.ServicePort, proto model.Proto, taken claimed, n *faults) uint16 {
	if sp.NodePort == 0 {
		return 0
	}
	if !validPort(sp.NodePort) {
		n.add(always, Malformed, "port %s: node port %d is no port number", quote(sp.Name), sp.NodePort)
		return 0
	}
	mark := portMark{proto: proto, number: uint16(sp.NodePort), node: true}
	if taken.has(mark) {
		n.add(always, Malformed, "port %s: node port %d/%s is taken by an earlier port", quote(sp.Name), sp.NodePort, proto)
		return 0
	}
	taken.mark(mark)
	return mark.number
}

// portMark is one thing that tells a port of a Service from the others: its name, its number (never 0), or its node port.
type portMark struct {
	proto  model.Proto
	name   string
	number uint16
	node   bool
}

// claimed is what the ports read so far have. The nil one, for a Service with one port, remembers nothing.
type claimed map[portMark]bool

func (c claimed) has(m portMark) bool { return c[m] }

func (c claimed) mark(m portMark) {
	if c != nil {
		c[m] = true
	}
}

func validPort(p int32) bool { return p > 0 && p < 1<<16 }

// protocol reads a protocol; none is TCP, as in the API.
func protocol(p corev1.Protocol) (model.Proto, bool) {
	switch p {
	case corev1.ProtocolTCP, "":
		return model.TCP, true
	case corev1.ProtocolUDP:
		return model.UDP, true
	case corev1.ProtocolSCTP:
		return model.SCTP, true
	}
	return 0, false
}

// policy is what a Service says of all its ports.
type policy struct {
	internalLocal, externalLocal bool
	sticky                       time.Duration
}

func readPolicy(s *corev1.Service, n *faults) policy {
	return policy{
		internalLocal: s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		externalLocal: externalLocal(s),
		sticky:        sticky(s, n),
	}
}

// externalLocal tells whether external traffic stays on the node; a Service that nothing outside can reach has no such policy.
func externalLocal(s *corev1.Service) bool {
	if s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		return false
	}
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer || s.Spec.Type == corev1.ServiceTypeNodePort || len(s.Spec.ExternalIPs) > 0
}

func sticky(s *corev1.Service, n *faults) time.Duration {
	if s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	c := s.Spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return defaultSticky
	}
	seconds := *c.ClientIP.TimeoutSeconds
	if seconds <= 0 || seconds > maxSticky {
		n.add(always, Malformed, "spec.sessionAffinityConfig: timeout of %d s is not between 1 and %d; %s is used", seconds, maxSticky, defaultSticky)
		return defaultSticky
	}
	return time.Duration(seconds) * time.Second
}

// The known topology keys.
const (
	keyHostname = corev1.LabelHostname
	keyZone     = corev1.LabelTopologyZone
	keyAny      = "*"
)

func topologyKeys(s *corev1.Service, n *faults) []string {
	text, ok := s.Annotations[AnnotationTopologyKeys]
	if !ok {
		return nil
	}
	var keys []string
	for key := range strings.SplitSeq(text, ",") {
		switch key = strings.TrimSpace(key); key {
		case keyHostname, keyZone, keyAny:
			if !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		case "":
		default:
			n.add(always, Malformed, "%s: %s is not a key that is known (%s, %s, %s); it is skipped", AnnotationTopologyKeys, quote(key), keyHostname, keyZone, keyAny)
		}
	}
	return keys
}

// healthPort is the port at which a load balancer asks for the health of the Service; 0 is none.
func (c Config) healthPort(f *serviceFacts, n *notes) uint16 {
	if f == nil || f.health == 0 {
		return 0
	}
	if !slices.ContainsFunc(c.families(), func(v6 bool) bool { return f.cluster[fam(v6)].IsValid() }) {
		return 0
	}
	if !validPort(f.health) {
		n.add(Malformed, "spec.healthCheckNodePort: %d is no port number", f.health)
		return 0
	}
	return uint16(f.health)
}

// ranges are the sources that may use the load-balancer addresses of one Service.
type ranges struct {
	bad bool // there is an entry that can't be read
	fam [2][]netip.Prefix
}

// readRanges gives nil when there are none.
func readRanges(s *corev1.Service, n *faults) *ranges {
	var r *ranges
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		if strings.TrimSpace(text) == "" {
			continue
		}
		if r == nil {
			r = new(ranges)
		}
		p, ok := parsePrefix(text)
		if !ok {
			r.bad = true
			n.add(inRanges, Malformed, "%s: %s is no CIDR; it lets nobody in", fieldRanges, quote(text))
			continue
		}
		i := fam(p.Addr().Is6())
		r.fam[i] = append(r.fam[i], p)
	}
	return r
}

// allow gives who may knock at the load-balancer address vip; nil is everyone.
//
// Ranges that speak only of the other family leave this one open, as in kube-proxy. An entry that can't be read closes a
// family that no other entry opens: a typo must not open a door. If the ranges hold an address of this node, all its
// addresses may knock, and vip itself, which the node uses as source when the address is bound on it.
func (r *ranges) allow(h *here, vip netip.Addr) []netip.Prefix {
	if r == nil {
		return nil
	}
	v6 := vip.Is6()
	own := r.fam[fam(v6)]
	if len(own) == 0 && !r.bad {
		return nil
	}
	allow := slices.Clone(own)
	if allow == nil {
		allow = []netip.Prefix{}
	}
	within := func(a netip.Addr) bool {
		return slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	if slices.ContainsFunc(h.addrs, within) {
		for _, a := range h.addrs {
			if a.Is6() == v6 {
				allow = append(allow, one(a))
			}
		}
		allow = append(allow, one(vip))
	}
	allow = prefixes(allow)
	if len(allow) > 0 && allow[0].Bits() == 0 {
		return nil
	}
	return allow
}
