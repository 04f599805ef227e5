package kube

import (
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func ptr[T any](v T) *T { return &v }

func TestTrimService(t *testing.T) {
	s := bigService(1)
	s.Annotations["fairlead.io/topology-keys"] = "*"
	s.Labels["service.kubernetes.io/service-proxy-name"] = "other"
	s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.HealthCheckNodePort = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal, 30001
	s.Spec.ExternalIPs, s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.1"}, []string{"198.51.100.0/24"}
	s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr(int32(10))}}
	s.Spec.Ports[0].NodePort, s.Spec.Ports[0].AppProtocol = 30002, ptr("h2c")
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1", IPMode: ptr(corev1.LoadBalancerIPModeVIP), Ports: []corev1.PortStatus{{Port: 80}}}}
	s.Status.Conditions = []metav1.Condition{{Type: "x"}}
	want := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-1", Name: "service-00001", UID: s.UID, CreationTimestamp: s.CreationTimestamp,
			Labels: map[string]string{"service.kubernetes.io/service-proxy-name": "other"}, Annotations: map[string]string{"fairlead.io/topology-keys": "*"}},
		Spec: corev1.ServiceSpec{
			Type: "LoadBalancer", ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, IPFamilies: []corev1.IPFamily{"IPv4"},
			Ports:       []corev1.ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30002}},
			ExternalIPs: []string{"192.0.2.1"}, LoadBalancerSourceRanges: []string{"198.51.100.0/24"}, HealthCheckNodePort: 30001,
			ExternalTrafficPolicy: "Local", InternalTrafficPolicy: ptr(corev1.ServiceInternalTrafficPolicyCluster),
			SessionAffinity: "ClientIP", SessionAffinityConfig: s.Spec.SessionAffinityConfig,
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "203.0.113.1", IPMode: ptr(corev1.LoadBalancerIPModeVIP)}}}},
	}
	trim := newTrimmer()
	for range 2 { // a second time changes nothing
		trim.service(s)
		if d := cmp.Diff(want, s); d != "" {
			t.Fatal(d)
		}
	}
}

func TestTrimSlice(t *testing.T) {
	trim := newTrimmer()
	s := bigSlice(1, 1)
	s.Annotations[corev1.EndpointsLastChangeTriggerTime] = trim.start.Add(time.Minute).Format(time.RFC3339Nano)
	e := &s.Endpoints[0]
	e.Addresses = append(e.Addresses, "10.0.0.9")
	e.Hostname, e.Conditions.Serving = ptr("x"), nil
	e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}, ForNodes: []discoveryv1.ForNode{{Name: "n"}}}
	s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{}) // says nothing, and must not panic
	s.Ports = append(s.Ports, discoveryv1.EndpointPort{})
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-1", Name: "service-00001-x7k2p", ResourceVersion: "1000001", Generation: 3, CreationTimestamp: s.CreationTimestamp,
			Labels:      map[string]string{discoveryv1.LabelServiceName: "service-00001"},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: s.Annotations[corev1.EndpointsLastChangeTriggerTime]}},
		AddressType: "IPv4",
		Ports:       []discoveryv1.EndpointPort{{Name: ptr("http"), Port: ptr(int32(8080)), Protocol: ptr(corev1.ProtocolTCP)}, {}},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{"10.128.0.1"}, Conditions: discoveryv1.EndpointConditions{Ready: ptr(true), Terminating: ptr(false)},
			NodeName: ptr("node-0001"), Zone: ptr("eu-central-1a"), Hints: e.Hints,
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: "service-00001-6d4cf56db6-00000", UID: "00000001-aaaa-bbbb-0000-dddddddddddd"},
		}, {}},
	}
	for range 2 {
		trim.slice(s)
		if d := cmp.Diff(want, s); d != "" {
			t.Fatal(d)
		}
	}
	s.Annotations[corev1.EndpointsLastChangeTriggerTime] = trim.start.Add(-time.Minute).Format(time.RFC3339Nano)
	if trim.slice(s); s.Annotations != nil {
		t.Errorf("a change from before the start is kept: %v", s.Annotations)
	}
}

func TestTrimNode(t *testing.T) {
	n := node("n1")
	n.UID, n.ResourceVersion, n.Labels = "u", "7", map[string]string{corev1.LabelTopologyZone: "z", "beta.kubernetes.io/arch": "amd64"}
	n.Annotations = map[string]string{"volumes.kubernetes.io/controller-managed-attach-detach": "true"}
	n.Spec.ProviderID, n.Spec.Taints = "aws:///x", []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", TimeAdded: &metav1.Time{Time: time.Now()}}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
	n.Status.Images = []corev1.ContainerImage{{Names: []string{"much"}}}
	want := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u", Labels: map[string]string{corev1.LabelTopologyZone: "z"}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.1.0/24", Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}},
	}
	if newTrimmer().node(n); !cmp.Equal(want, n) {
		t.Error(cmp.Diff(want, n))
	}
}

func TestTrimServiceCIDR(t *testing.T) {
	c := serviceCIDR("kubernetes", "10.96.0.0/16", "fd00:96::/112")
	c.UID, c.ResourceVersion, c.Finalizers = "u", "7", []string{"networking.k8s.io/service-cidr-finalizer"}
	c.DeletionTimestamp = &metav1.Time{Time: time.Now()} // counts until it is gone
	c.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionFalse}}
	want := serviceCIDR("kubernetes", "10.96.0.0/16", "fd00:96::/112")
	if newTrimmer().serviceCIDR(c); !cmp.Equal(want, c) {
		t.Error(cmp.Diff(want, c))
	}
}

// A table that is full starts over: it never grows without bound, and what it gives stays right.
func TestInternerIsBounded(t *testing.T) {
	var in interner
	for i := range 3 * internMost {
		text := strings.Repeat("x", i%7) + time.Duration(i).String()
		if got := in.one(text); got != text {
			t.Fatalf("%q for %q", got, text)
		}
	}
	if len(in.names) > internMost {
		t.Errorf("%d names", len(in.names))
	}
	a, b := in.one(strings.Clone("zone")), in.one(strings.Clone("zone"))
	if unsafe.StringData(a) != unsafe.StringData(b) {
		t.Error("equal strings are two")
	}
}
