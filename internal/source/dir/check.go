package dir

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	netutils "k8s.io/utils/net"
)

// check fills in what the API server fills in, and looks for the mistakes that it would refuse. It is milder than the API
// server in one thing: in a list of addresses a bad one is reported and left to the resolver, which passes it over; the
// others are served.
type check struct {
	at       *lines
	path     string // of the object in its document
	kind     string
	name     string
	problems []problem
	refused  bool
}

func (c *check) refuse(field, format string, args ...any) {
	c.refused = true
	c.add(true, field, format, args)
}

func (c *check) note(field, format string, args ...any) { c.add(false, field, format, args) }

func (c *check) add(refuse bool, field, format string, args []any) {
	text := fmt.Sprintf(format, args...)
	if field != "" {
		text = field + ": " + text
	}
	c.problems = append(c.problems, problem{c.at.of(join(c.path, field)), c.name + ": " + text, refuse})
}

// word reports a value that is none of the words.
func word[T ~string](c *check, field string, value T, words ...T) {
	if !slices.Contains(words, value) {
		c.refuse(field, "%q is none of %q", value, words)
	}
}

func fill[T comparable](p *T, otherwise T) {
	var zero T
	if *p == zero {
		*p = otherwise
	}
}

func (c *check) object(obj metav1.Object) {
	c.identity(obj)
	switch o := obj.(type) {
	case *corev1.Service:
		c.service(o)
	case *discoveryv1.EndpointSlice:
		c.slice(o)
	case *corev1.Node:
		c.node(o)
	case *networkingv1.ServiceCIDR:
		c.serviceCIDR(o)
	case *corev1.Pod:
		c.pod(o)
	}
}

func (c *check) identity(obj metav1.Object) {
	c.name = c.kind
	global := isGlobal(obj)
	if global {
		obj.SetNamespace("") // it has none, whatever is written
	} else if obj.GetNamespace() == "" {
		obj.SetNamespace(metav1.NamespaceDefault)
	}
	if obj.GetName() == "" {
		c.refuse("metadata.name", "is missing")
		return
	}
	c.name = ref{c.kind, obj.GetNamespace(), obj.GetName()}.String()
	valid := validation.IsDNS1123Subdomain
	if _, ok := obj.(*corev1.Service); ok {
		valid = validation.IsDNS1123Label
	}
	if bad := valid(obj.GetName()); bad != nil {
		c.refuse("metadata.name", "%s", bad[0])
	}
	if bad := validation.IsDNS1123Label(obj.GetNamespace()); bad != nil && !global {
		c.refuse("metadata.namespace", "%s", bad[0])
	}
}

// isGlobal tells of kinds that are in no namespace.
func isGlobal(obj metav1.Object) bool {
	switch obj.(type) {
	case *corev1.Node, *networkingv1.ServiceCIDR:
		return true
	}
	return false
}

func (c *check) service(s *corev1.Service) {
	fill(&s.Spec.Type, corev1.ServiceTypeClusterIP)
	word(c, "spec.type", s.Spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		return
	}
	c.clusterIPs(&s.Spec)
	c.policies(&s.Spec)
	if !headless(s) && len(s.Spec.Ports) == 0 {
		c.refuse("spec.ports", "a Service needs a port")
	}
	for i := range s.Spec.Ports {
		c.servicePort(s, i)
	}
	for i, ip := range s.Spec.ExternalIPs {
		c.address(fmt.Sprintf("spec.externalIPs[%d]", i), ip)
	}
	for i, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			c.address(fmt.Sprintf("status.loadBalancer.ingress[%d].ip", i), in.IP)
		}
	}
	for i, cidr := range s.Spec.LoadBalancerSourceRanges {
		if _, _, err := netutils.ParseCIDRSloppy(strings.TrimSpace(cidr)); err != nil {
			c.note(fmt.Sprintf("spec.loadBalancerSourceRanges[%d]", i), "%q is no CIDR, such as 192.0.2.0/24", cidr)
		}
	}
}

func headless(s *corev1.Service) bool {
	return s.Spec.ClusterIP == corev1.ClusterIPNone || len(s.Spec.ClusterIPs) > 0 && s.Spec.ClusterIPs[0] == corev1.ClusterIPNone
}

// clusterIPs settles the addresses and their families. Nobody hands out addresses here, so a Service must bring its own.
func (c *check) clusterIPs(s *corev1.ServiceSpec) {
	switch {
	case s.ClusterIP == "" && len(s.ClusterIPs) == 0:
		c.note("spec.clusterIP", "is missing, so the Service is not served: without an API server a manifest has to say its address (or None)")
		return
	case s.ClusterIP == "":
		s.ClusterIP = s.ClusterIPs[0]
	case len(s.ClusterIPs) == 0:
		s.ClusterIPs = []string{s.ClusterIP}
	case s.ClusterIP != s.ClusterIPs[0]:
		c.refuse("spec.clusterIPs[0]", "is %q, and spec.clusterIP is %q", s.ClusterIPs[0], s.ClusterIP)
	}
	if s.ClusterIP == corev1.ClusterIPNone && len(s.ClusterIPs) == 1 {
		return
	}
	var families []corev1.IPFamily
	for i, ip := range s.ClusterIPs {
		family, ok := familyOf(ip)
		if !ok {
			c.refuse(fmt.Sprintf("spec.clusterIPs[%d]", i), "%q is no IP address", ip)
		} else if slices.Contains(families, family) {
			c.refuse(fmt.Sprintf("spec.clusterIPs[%d]", i), "%q is the second %s address; there may be one of each family", ip, family)
		}
		families = append(families, family)
	}
	for i, f := range s.IPFamilies {
		word(c, fmt.Sprintf("spec.ipFamilies[%d]", i), f, corev1.IPv4Protocol, corev1.IPv6Protocol)
	}
	if len(s.IPFamilies) == 0 {
		s.IPFamilies = families
	}
	if s.IPFamilyPolicy == nil {
		s.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		if len(families) > 1 {
			*s.IPFamilyPolicy = corev1.IPFamilyPolicyRequireDualStack
		}
	}
}

func familyOf(ip string) (corev1.IPFamily, bool) {
	switch parsed := netutils.ParseIPSloppy(ip); {
	case parsed == nil:
		return "", false
	case parsed.To4() != nil:
		return corev1.IPv4Protocol, true
	}
	return corev1.IPv6Protocol, true
}

// address reports what is no IP address, in any form that Kubernetes ever took.
func (c *check) address(field, ip string) {
	if netutils.ParseIPSloppy(ip) == nil {
		c.note(field, "%q is no IP address; it is passed over", ip)
	}
}

func (c *check) policies(s *corev1.ServiceSpec) {
	fill(&s.SessionAffinity, corev1.ServiceAffinityNone)
	word(c, "spec.sessionAffinity", s.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if s.SessionAffinity == corev1.ServiceAffinityClientIP {
		if s.SessionAffinityConfig == nil || s.SessionAffinityConfig.ClientIP == nil || s.SessionAffinityConfig.ClientIP.TimeoutSeconds == nil {
			s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(corev1.DefaultClientIPServiceAffinitySeconds)}}
		}
		if n := *s.SessionAffinityConfig.ClientIP.TimeoutSeconds; n < 1 || n > 86400 { // validation of the API server
			c.refuse("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not from 1 to 86400", n)
		}
	}
	if s.InternalTrafficPolicy == nil {
		s.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	}
	word(c, "spec.internalTrafficPolicy", *s.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	if s.Type != corev1.ServiceTypeClusterIP || len(s.ExternalIPs) > 0 {
		fill(&s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	if s.ExternalTrafficPolicy != "" {
		word(c, "spec.externalTrafficPolicy", s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	if n := s.HealthCheckNodePort; n != 0 {
		c.port("spec.healthCheckNodePort", n)
	}
}

func (c *check) port(field string, n int32) {
	if n < 1 || n > 65535 {
		c.refuse(field, "%d is not from 1 to 65535", n)
	}
}

func (c *check) protocol(field string, p corev1.Protocol) {
	word(c, field, p, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

func (c *check) servicePort(s *corev1.Service, i int) {
	p := &s.Spec.Ports[i]
	field := fmt.Sprintf("spec.ports[%d]", i)
	fill(&p.Protocol, corev1.ProtocolTCP)
	c.protocol(field+".protocol", p.Protocol)
	c.port(field+".port", p.Port)
	c.targetPort(field+".targetPort", p)
	switch {
	case p.NodePort != 0:
		c.port(field+".nodePort", p.NodePort)
	case s.Spec.Type == corev1.ServiceTypeNodePort && !headless(s):
		c.note(field+".nodePort", "is missing, so the port has none: without an API server a manifest has to say it")
	}
	c.portName(field+".name", p.Name, len(s.Spec.Ports) > 1)
	for _, o := range s.Spec.Ports[:i] {
		switch {
		case o.Name == p.Name && p.Name != "":
			c.refuse(field+".name", "%q is taken by an earlier port", p.Name)
		case o.Port == p.Port && o.Protocol == p.Protocol:
			c.refuse(field+".port", "%d/%s is taken by an earlier port", p.Port, p.Protocol)
		case o.NodePort == p.NodePort && p.NodePort != 0 && o.Protocol == p.Protocol:
			c.refuse(field+".nodePort", "%d/%s is taken by an earlier port", p.NodePort, p.Protocol)
		}
	}
}

func (c *check) targetPort(field string, p *corev1.ServicePort) {
	switch t := &p.TargetPort; {
	case *t == intstr.IntOrString{} || *t == intstr.FromString(""):
		*t = intstr.FromInt32(p.Port)
	case t.Type == intstr.Int:
		c.port(field, t.IntVal)
	default:
		if bad := validation.IsValidPortName(t.StrVal); bad != nil {
			c.refuse(field, "%q: %s", t.StrVal, bad[0])
		}
	}
}

func (c *check) portName(field, name string, needed bool) {
	if name == "" {
		if needed {
			c.refuse(field, "is missing: of several ports each needs a name")
		}
		return
	}
	if bad := validation.IsDNS1123Label(name); bad != nil {
		c.refuse(field, "%q: %s", name, bad[0])
	}
}

func (c *check) slice(s *discoveryv1.EndpointSlice) {
	word(c, "addressType", s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	if s.Labels[discoveryv1.LabelServiceName] == "" {
		c.note("metadata.labels", "%s is missing, so the slice belongs to no Service", discoveryv1.LabelServiceName)
	}
	names := map[string]bool{}
	for i := range s.Ports {
		p := &s.Ports[i]
		field := fmt.Sprintf("ports[%d]", i)
		if p.Name == nil {
			p.Name = new("")
		}
		if p.Protocol == nil {
			p.Protocol = new(corev1.ProtocolTCP)
		}
		c.protocol(field+".protocol", *p.Protocol)
		if p.Port != nil {
			c.port(field+".port", *p.Port)
		}
		c.portName(field+".name", *p.Name, false)
		if names[*p.Name] {
			c.refuse(field+".name", "%q is taken by an earlier port", *p.Name)
		}
		names[*p.Name] = true
	}
	for i, e := range s.Endpoints {
		field := fmt.Sprintf("endpoints[%d].addresses", i)
		if len(e.Addresses) == 0 {
			c.note(field, "is empty")
		}
		for j, ip := range e.Addresses {
			if family, _ := familyOf(ip); s.AddressType != discoveryv1.AddressTypeFQDN && string(family) != string(s.AddressType) {
				c.note(fmt.Sprintf("%s[%d]", field, j), "%q is no %s address; it is passed over", ip, s.AddressType)
			}
		}
	}
}

func (c *check) node(n *corev1.Node) {
	if n.Spec.PodCIDR == "" && len(n.Spec.PodCIDRs) > 0 {
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	}
	if n.Spec.PodCIDR != "" && len(n.Spec.PodCIDRs) == 0 {
		n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
	}
	for i, cidr := range n.Spec.PodCIDRs {
		if _, _, err := netutils.ParseCIDRSloppy(cidr); err != nil {
			c.note(fmt.Sprintf("spec.podCIDRs[%d]", i), "%q is no CIDR; it is passed over", cidr)
		}
	}
	for i, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			c.address(fmt.Sprintf("status.addresses[%d].address", i), a.Address)
		}
	}
}

func (c *check) serviceCIDR(s *networkingv1.ServiceCIDR) {
	if len(s.Spec.CIDRs) == 0 {
		c.refuse("spec.cidrs", "is missing")
	}
	for i, cidr := range s.Spec.CIDRs {
		if _, _, err := netutils.ParseCIDRSloppy(cidr); err != nil {
			c.note(fmt.Sprintf("spec.cidrs[%d]", i), "%q is no CIDR; it is passed over", cidr)
		}
	}
}

func (c *check) pod(p *corev1.Pod) {
	if len(p.Status.PodIPs) == 0 && p.Status.PodIP != "" {
		p.Status.PodIPs = []corev1.PodIP{{IP: p.Status.PodIP}}
		c.address("status.podIP", p.Status.PodIP)
		return
	}
	for i, ip := range p.Status.PodIPs {
		c.address(fmt.Sprintf("status.podIPs[%d].ip", i), ip.IP)
	}
}

// templateLabels are the labels of the pods that a workload makes; nil when it is none.
func templateLabels(o metav1.Object) map[string]string {
	switch w := o.(type) {
	case *appsv1.Deployment:
		return w.Spec.Template.Labels
	case *appsv1.ReplicaSet:
		return w.Spec.Template.Labels
	case *appsv1.StatefulSet:
		return w.Spec.Template.Labels
	case *appsv1.DaemonSet:
		return w.Spec.Template.Labels
	}
	return nil
}
