package kube

import (
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// trimmer reduces objects to what a Service proxy reads, and makes equal strings one string. It names what is kept: what
// a later Kubernetes adds costs nothing until somebody needs it.
type trimmer struct {
	strings interner
	start   time.Time // what was asked for before is no measure of how fast we are
}

func newTrimmer() *trimmer { return &trimmer{start: time.Now()} }

// Prefixes of the annotations and labels that are kept.
var (
	keptAnnotations = []string{"fairlead.io/", corev1.EndpointsLastChangeTriggerTime}
	keptLabels      = []string{discoveryv1.LabelServiceName, "service.kubernetes.io/", "topology.kubernetes.io/"}
)

// meta keeps who the object is and how old. The age tells which of two Services with one address wins.
func (t *trimmer) meta(m metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:              m.Name,
		Namespace:         t.strings.one(m.Namespace),
		UID:               m.UID, // Events need it
		CreationTimestamp: m.CreationTimestamp,
		DeletionTimestamp: m.DeletionTimestamp,
		Labels:            t.keep(m.Labels, keptLabels),
		Annotations:       t.keep(m.Annotations, keptAnnotations),
	}
}

func (t *trimmer) keep(all map[string]string, prefixes []string) map[string]string {
	var kept map[string]string
	for k, v := range all {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(k, p) }) {
			if kept == nil {
				kept = make(map[string]string, 1)
			}
			kept[t.strings.one(k)] = v
		}
	}
	return kept
}

// service drops, besides, what only controllers read: the selector, target ports, what asked for an address.
func (t *trimmer) service(s *corev1.Service) {
	s.TypeMeta, s.ObjectMeta = metav1.TypeMeta{}, t.meta(s.ObjectMeta)
	in := &s.Spec
	s.Spec = corev1.ServiceSpec{
		Ports:                    t.servicePorts(in.Ports),
		ClusterIP:                in.ClusterIP,
		ClusterIPs:               in.ClusterIPs,
		Type:                     corev1.ServiceType(t.strings.one(string(in.Type))),
		ExternalIPs:              in.ExternalIPs,
		SessionAffinity:          corev1.ServiceAffinity(t.strings.one(string(in.SessionAffinity))),
		SessionAffinityConfig:    in.SessionAffinityConfig,
		LoadBalancerSourceRanges: in.LoadBalancerSourceRanges,
		ExternalTrafficPolicy:    corev1.ServiceExternalTrafficPolicy(t.strings.one(string(in.ExternalTrafficPolicy))),
		HealthCheckNodePort:      in.HealthCheckNodePort,
		IPFamilies:               families(in.IPFamilies),
		InternalTrafficPolicy:    internalPolicy(in.InternalTrafficPolicy),
	}
	if len(s.Spec.ClusterIPs) > 0 && s.Spec.ClusterIPs[0] == s.Spec.ClusterIP {
		s.Spec.ClusterIPs = slices.Clone(s.Spec.ClusterIPs)
		s.Spec.ClusterIPs[0] = s.Spec.ClusterIP // one string, not two
	}
	s.Status = corev1.ServiceStatus{LoadBalancer: s.Status.LoadBalancer}
	for i := range s.Status.LoadBalancer.Ingress {
		s.Status.LoadBalancer.Ingress[i].Ports = nil
	}
}

func (t *trimmer) servicePorts(ports []corev1.ServicePort) []corev1.ServicePort {
	out := make([]corev1.ServicePort, len(ports))
	for i, p := range ports {
		out[i] = corev1.ServicePort{
			Name: t.strings.one(p.Name), Protocol: corev1.Protocol(t.strings.one(string(p.Protocol))), Port: p.Port, NodePort: p.NodePort,
		}
	}
	return out
}

// slice drops, besides, the UID and what repeats the Service. It keeps versions: of two slices that disagree about one pod
// the newer one is right. The time of the change that it carries is kept when it is news.
func (t *trimmer) slice(s *discoveryv1.EndpointSlice) {
	version, generation := s.ResourceVersion, s.Generation
	s.TypeMeta, s.ObjectMeta = metav1.TypeMeta{}, t.meta(s.ObjectMeta)
	s.UID, s.ResourceVersion, s.Generation = "", version, generation
	asked, err := time.Parse(time.RFC3339Nano, s.Annotations[corev1.EndpointsLastChangeTriggerTime])
	if err != nil || asked.Before(t.start) {
		delete(s.Annotations, corev1.EndpointsLastChangeTriggerTime)
	}
	if len(s.Annotations) == 0 {
		s.Annotations = nil // an empty map is 300 bytes
	}
	s.AddressType = discoveryv1.AddressType(t.strings.one(string(s.AddressType)))
	s.Endpoints = t.endpoints(s.Endpoints)
	s.Ports = slices.Clone(s.Ports)
	for i, p := range s.Ports {
		protocol := (*corev1.Protocol)(t.strings.pointer((*string)(p.Protocol)))
		s.Ports[i] = discoveryv1.EndpointPort{Name: t.strings.pointer(p.Name), Protocol: protocol, Port: t.strings.port(p.Port)}
	}
}

// endpoints makes few and big allocations of what came as many small ones.
func (t *trimmer) endpoints(in []discoveryv1.Endpoint) []discoveryv1.Endpoint {
	out := make([]discoveryv1.Endpoint, len(in))
	targets := make([]corev1.ObjectReference, 0, len(in))
	addresses := make([]string, 0, len(in))
	parts := make([]*string, 0, 3*len(in))
	for i, e := range in {
		c := e.Conditions
		out[i] = discoveryv1.Endpoint{
			Conditions: discoveryv1.EndpointConditions{Ready: truth(c.Ready), Serving: truth(c.Serving), Terminating: truth(c.Terminating)},
			NodeName:   t.strings.pointer(e.NodeName),
			Zone:       t.strings.pointer(e.Zone),
			Hints:      t.hints(e.Hints),
		}
		if len(e.Addresses) > 0 { // the first counts: the API says of the others that they are interchangeable with it
			addresses = append(addresses, e.Addresses[0])
			n := len(addresses)
			out[i].Addresses = addresses[n-1 : n : n]
			parts = append(parts, &addresses[n-1])
		}
		if r := e.TargetRef; r != nil {
			targets = append(targets, t.target(r))
			out[i].TargetRef = &targets[len(targets)-1]
			parts = append(parts, &out[i].TargetRef.Name, (*string)(&out[i].TargetRef.UID))
		}
	}
	pack(parts)
	return out
}

// target keeps which pod it is, by name for people and by UID: two endpoints with one address may be two pods, or one
// pod twice. The namespace is that of the slice.
func (t *trimmer) target(r *corev1.ObjectReference) corev1.ObjectReference {
	return corev1.ObjectReference{Kind: t.strings.one(r.Kind), Name: r.Name, UID: r.UID}
}

// pack lets strings of one life share their memory.
func pack(parts []*string) {
	n := 0
	for _, p := range parts {
		n += len(*p)
	}
	var b strings.Builder
	b.Grow(n)
	for _, p := range parts {
		b.WriteString(*p)
	}
	whole := b.String()
	for _, p := range parts {
		*p, whole = whole[:len(*p)], whole[len(*p):]
	}
}

func (t *trimmer) hints(h *discoveryv1.EndpointHints) *discoveryv1.EndpointHints {
	if h == nil || len(h.ForZones)+len(h.ForNodes) == 0 {
		return nil
	}
	out := &discoveryv1.EndpointHints{ForZones: slices.Clone(h.ForZones), ForNodes: slices.Clone(h.ForNodes)}
	for i := range out.ForZones {
		out.ForZones[i].Name = t.strings.one(out.ForZones[i].Name)
	}
	for i := range out.ForNodes {
		out.ForNodes[i].Name = t.strings.one(out.ForNodes[i].Name)
	}
	return out
}

// node keeps what tells its addresses, its pods, its place and whether it is going away. It has no version: a kubelet
// writes its status all the time, and next to nothing of that is news.
func (t *trimmer) node(n *corev1.Node) {
	n.TypeMeta, n.ObjectMeta = metav1.TypeMeta{}, t.meta(n.ObjectMeta)
	n.Spec = corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: n.Spec.Taints}
	n.Status = corev1.NodeStatus{Addresses: n.Status.Addresses}
	for k, v := range n.Labels {
		n.Labels[k] = t.strings.one(v)
	}
	for i := range n.Spec.Taints {
		n.Spec.Taints[i].TimeAdded = nil
	}
}

// Values that all objects share, since nobody changes an object.
var (
	yes, no     = true, false
	local, all  = corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster
	allFamilies = [][]corev1.IPFamily{
		{corev1.IPv4Protocol}, {corev1.IPv6Protocol}, {corev1.IPv4Protocol, corev1.IPv6Protocol}, {corev1.IPv6Protocol, corev1.IPv4Protocol},
	}
)

func truth(b *bool) *bool {
	switch {
	case b == nil:
		return nil
	case *b:
		return &yes
	}
	return &no
}

func internalPolicy(p *corev1.ServiceInternalTrafficPolicy) *corev1.ServiceInternalTrafficPolicy {
	switch {
	case p != nil && *p == local:
		return &local
	case p != nil && *p == all:
		return &all
	}
	return p
}

func families(fs []corev1.IPFamily) []corev1.IPFamily {
	for _, known := range allFamilies {
		if slices.Equal(fs, known) {
			return known
		}
	}
	return fs
}

// interner makes equal strings one string. It is for names of which there are few: namespaces, nodes, zones, ports.
type interner struct {
	mu    sync.Mutex // one for all reflectors
	names map[string]*string
	ports map[int32]*int32
}

// internMost bounds a table. A table that is full starts over: the strings in use stay, and only find no new sharers.
const internMost = 1 << 14

func (in *interner) one(s string) string { return *in.pointer(&s) }

// pointer is like one, and makes the pointers one as well. The result must not be written to.
func (in *interner) pointer(s *string) *string {
	if s == nil {
		return nil
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if p, ok := in.names[*s]; ok {
		return p
	}
	if in.names == nil || len(in.names) >= internMost {
		in.names = map[string]*string{}
	}
	p := new(string)
	*p = strings.Clone(*s)
	in.names[*p] = p
	return p
}

func (in *interner) port(n *int32) *int32 {
	if n == nil {
		return nil
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if p, ok := in.ports[*n]; ok {
		return p
	}
	if in.ports == nil || len(in.ports) >= internMost {
		in.ports = map[int32]*int32{}
	}
	p := new(int32)
	*p = *n
	in.ports[*p] = p
	return p
}
