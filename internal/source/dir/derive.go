package dir

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	netutils "k8s.io/utils/net"
)

// managedBy is on the slices that are derived from Pods.
const managedBy = "manifests.fairlead.io"

// cluster is what derives slices, as the EndpointSlice controller does: a Service with a selector, for which the manifests
// hold no EndpointSlice, gets those of the Pods that the selector means.
type cluster struct {
	labelled map[string][]labelled // by namespace, label and value
	zones    map[string]string     // of nodes
}

// labelled is a Pod, or a workload with the labels of its pods.
type labelled struct {
	labels map[string]string
	ref    ref
	pod    *corev1.Pod
}

func newCluster() *cluster {
	return &cluster{labelled: map[string][]labelled{}, zones: map[string]string{}}
}

func (c *cluster) add(o object) {
	l := labelled{labels: templateLabels(o.Object), ref: o.ref}
	switch v := o.Object.(type) {
	case *corev1.Node:
		c.zones[v.Name] = v.Labels[corev1.LabelTopologyZone]
		return
	case *corev1.Pod:
		if v.Status.Phase == corev1.PodSucceeded || v.Status.Phase == corev1.PodFailed {
			return
		}
		l.labels, l.pod = v.Labels, v
	}
	for k, v := range l.labels {
		key := labelKey(o.ref.namespace, k, v)
		c.labelled[key] = append(c.labelled[key], l)
	}
}

func labelKey(namespace, label, value string) string {
	return namespace + "\x00" + label + "\x00" + value
}

// selected lists what a Service means: its Pods by name, and the workloads whose pods it means.
func (c *cluster) selected(s *corev1.Service) (pods []*corev1.Pod, workloads []ref) {
	var fewest []labelled
	first := true
	for k, v := range s.Spec.Selector {
		if with := c.labelled[labelKey(s.Namespace, k, v)]; first || len(with) < len(fewest) {
			fewest, first = with, false
		}
	}
	for _, l := range fewest {
		switch {
		case !matches(s.Spec.Selector, l.labels):
		case l.pod != nil:
			pods = append(pods, l.pod)
		default:
			workloads = append(workloads, l.ref)
		}
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return pods, workloads
}

func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// derive makes the slices of a Service, and says what looks like a mistake.
func (c *cluster) derive(s *corev1.Service) (out []*discoveryv1.EndpointSlice, odd []string) {
	pods, workloads := c.selected(s)
	addressed := false
	for _, family := range s.Spec.IPFamilies {
		groups := map[string]*discoveryv1.EndpointSlice{} // pods with the same ports share a slice
		for _, p := range pods {
			ip, ports := podIP(p, family), podPorts(s, p)
			addressed = addressed || ip != ""
			if ip == "" || len(ports) == 0 {
				continue
			}
			id := portsID(ports)
			if groups[id] == nil {
				groups[id] = emptySlice(s, family, len(groups), ports)
				out = append(out, groups[id])
			}
			groups[id].Endpoints = append(groups[id].Endpoints, c.endpoint(s, p, ip))
		}
	}
	switch {
	case addressed:
		odd = unnamed(s, pods)
	case len(pods) > 0:
		odd = []string{fmt.Sprintf("it has no endpoints: none of the pods it means (%d) has a status.podIP of its families", len(pods))}
	case len(workloads) > 0:
		odd = []string{fmt.Sprintf("it has no endpoints: it means the pods of %s, but none of them is among the manifests", workloads[0])}
	}
	return out, odd
}

// unnamed says which ports no pod has.
func unnamed(s *corev1.Service, pods []*corev1.Pod) (odd []string) {
	for _, sp := range s.Spec.Ports {
		if !slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return containerPort(p, sp) != 0 }) {
			odd = append(odd, fmt.Sprintf("port %q has no endpoints: none of its pods has a container port %q/%s", sp.Name, sp.TargetPort.StrVal, sp.Protocol))
		}
	}
	return odd
}

// portsID tells whether two lists of ports are the same.
func portsID(ports []discoveryv1.EndpointPort) string {
	var b strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&b, "%s/%s/%d ", *p.Name, *p.Protocol, *p.Port)
	}
	return b.String()
}

func emptySlice(s *corev1.Service, family corev1.IPFamily, n int, ports []discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace,
			Name:      fmt.Sprintf("%s-pods-%s-%d", s.Name, strings.ToLower(string(family)), n),
			Labels:    map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: managedBy},
		},
		AddressType: discoveryv1.AddressType(family),
		Ports:       ports,
	}
}

// podIP is the first address of a Pod that is of the family.
func podIP(p *corev1.Pod, family corev1.IPFamily) string {
	for _, ip := range p.Status.PodIPs {
		if got, ok := familyOf(ip.IP); ok && got == family {
			return netutils.ParseIPSloppy(ip.IP).String()
		}
	}
	return ""
}

// podPorts are the ports of a Service as one Pod has them. A port whose name the Pod does not know is left out.
func podPorts(s *corev1.Service, p *corev1.Pod) (out []discoveryv1.EndpointPort) {
	for _, sp := range s.Spec.Ports {
		if n := containerPort(p, sp); n != 0 {
			out = append(out, discoveryv1.EndpointPort{Name: new(sp.Name), Protocol: new(sp.Protocol), Port: new(n), AppProtocol: sp.AppProtocol})
		}
	}
	return out
}

// containerPort is the number of a target port in one Pod; 0 is none. Sidecars are init containers that go on.
func containerPort(p *corev1.Pod, sp corev1.ServicePort) int32 {
	if sp.TargetPort.Type == intstr.Int {
		return sp.TargetPort.IntVal
	}
	containers := slices.Clone(p.Spec.Containers)
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			containers = append(containers, c)
		}
	}
	for _, c := range containers {
		for _, port := range c.Ports {
			if port.Name == sp.TargetPort.StrVal && cmp.Or(port.Protocol, corev1.ProtocolTCP) == sp.Protocol {
				return port.ContainerPort
			}
		}
	}
	return 0
}

// endpoint says of a Pod what the EndpointSlice controller says of it
// (k8s.io/endpointslice/utils.go, podToEndpoint).
func (c *cluster) endpoint(s *corev1.Service, p *corev1.Pod, ip string) discoveryv1.Endpoint {
	serving, terminating := isReady(p), p.DeletionTimestamp != nil
	ready := s.Spec.PublishNotReadyAddresses || serving && !terminating
	e := discoveryv1.Endpoint{
		Addresses:  []string{ip},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
	}
	if p.Spec.NodeName != "" {
		e.NodeName = new(p.Spec.NodeName)
		if zone := c.zones[p.Spec.NodeName]; zone != "" {
			e.Zone = &zone
		}
	}
	return e
}

// isReady reads the Ready condition. A manifest by hand has no conditions; its pod is ready unless its phase says Pending.
func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return len(p.Status.Conditions) == 0 && (p.Status.Phase == "" || p.Status.Phase == corev1.PodRunning)
}
