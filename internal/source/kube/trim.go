package kube

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// trimmer reduces objects, in place, to what a Service proxy reads: what else changes in them is no news. It names what is
// kept: what a later Kubernetes adds costs nothing until somebody needs it. Nobody keeps objects; of the strings in them
// that are kept, those that are alike become one.
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
		Labels:            keep(m.Labels, keptLabels),
		Annotations:       keep(m.Annotations, keptAnnotations),
	}
}

func keep(all map[string]string, prefixes []string) map[string]string {
	maps.DeleteFunc(all, func(k, _ string) bool {
		return !slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(k, p) })
	})
	if len(all) == 0 {
		return nil
	}
	return all
}

// service drops, besides, what only controllers read: the selector, target ports, what asked for an address.
func (t *trimmer) service(s *corev1.Service) {
	s.TypeMeta, s.ObjectMeta = metav1.TypeMeta{}, t.meta(s.ObjectMeta)
	in := &s.Spec
	s.Spec = corev1.ServiceSpec{
		Ports:                    t.servicePorts(in.Ports),
		ClusterIP:                in.ClusterIP,
		ClusterIPs:               in.ClusterIPs,
		Type:                     in.Type,
		ExternalIPs:              in.ExternalIPs,
		SessionAffinity:          in.SessionAffinity,
		SessionAffinityConfig:    in.SessionAffinityConfig,
		LoadBalancerSourceRanges: in.LoadBalancerSourceRanges,
		ExternalTrafficPolicy:    in.ExternalTrafficPolicy,
		HealthCheckNodePort:      in.HealthCheckNodePort,
		IPFamilies:               in.IPFamilies,
		InternalTrafficPolicy:    in.InternalTrafficPolicy,
	}
	s.Status = corev1.ServiceStatus{LoadBalancer: s.Status.LoadBalancer}
	for i := range s.Status.LoadBalancer.Ingress {
		s.Status.LoadBalancer.Ingress[i].Ports = nil
	}
}

func (t *trimmer) servicePorts(ports []corev1.ServicePort) []corev1.ServicePort {
	for i, p := range ports {
		ports[i] = corev1.ServicePort{Name: t.strings.one(p.Name), Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort}
	}
	return ports
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
		s.Annotations = nil
	}
	for i := range s.Endpoints {
		trimEndpoint(&s.Endpoints[i])
	}
	for i, p := range s.Ports {
		s.Ports[i] = discoveryv1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
		if p.Name != nil {
			*p.Name = t.strings.one(*p.Name)
		}
	}
}

// trimEndpoint keeps the first address: the API says of the others that they are interchangeable with it. Of the target it
// keeps which pod it is, since two endpoints with one address may be two pods, or one pod twice. The namespace is that of
// the slice.
func trimEndpoint(e *discoveryv1.Endpoint) {
	*e = discoveryv1.Endpoint{
		Addresses: e.Addresses[:min(1, len(e.Addresses))], Conditions: e.Conditions,
		NodeName: e.NodeName, Zone: e.Zone, Hints: e.Hints, TargetRef: e.TargetRef,
	}
	if r := e.TargetRef; r != nil {
		*r = corev1.ObjectReference{Kind: r.Kind, Name: r.Name, UID: r.UID}
	}
	if h := e.Hints; h != nil && len(h.ForZones)+len(h.ForNodes) == 0 {
		e.Hints = nil
	}
}

// node keeps what tells its addresses, its pods, its place and whether it is going away. It has no version: a kubelet
// writes its status all the time, and next to nothing of that is news.
func (t *trimmer) node(n *corev1.Node) {
	n.TypeMeta, n.ObjectMeta = metav1.TypeMeta{}, t.meta(n.ObjectMeta)
	n.Spec = corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: n.Spec.Taints}
	n.Status = corev1.NodeStatus{Addresses: n.Status.Addresses}
	for i := range n.Spec.Taints {
		n.Spec.Taints[i].TimeAdded = nil
	}
}

// serviceCIDR keeps the ranges.
func (t *trimmer) serviceCIDR(c *networkingv1.ServiceCIDR) {
	c.TypeMeta, c.ObjectMeta, c.Status = metav1.TypeMeta{}, metav1.ObjectMeta{Name: c.Name}, networkingv1.ServiceCIDRStatus{}
}

// interner makes equal strings one string. It is for names of which there are few: namespaces, ports.
type interner struct {
	mu    sync.Mutex // one for all reflectors
	names map[string]string
}

// internMost bounds the table. One that is full starts over: the strings in use stay, and only find no new sharers.
const internMost = 1 << 14

func (in *interner) one(s string) string {
	in.mu.Lock()
	defer in.mu.Unlock()
	if one, ok := in.names[s]; ok {
		return one
	}
	if in.names == nil || len(in.names) >= internMost {
		in.names = map[string]string{}
	}
	in.names[s] = s
	return s
}
