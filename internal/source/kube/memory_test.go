package kube

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// A cluster, as an API server streams it, costs the mirror names and fingerprints, and until the list is complete the names
// once more: never the objects. The bounds are a quarter above what was measured, with 10,000 Services of 4 endpoints each.
func TestMemory(t *testing.T) {
	const services, perService = 10_000, 4
	track, trim := newTracker("test"), newTrimmer()
	told := 0
	sm := newMirror(track, func() {}, trim.service, func(types.NamespacedName, *corev1.Service) { told++ })
	em := newMirror(track, func() {}, trim.slice, func(types.NamespacedName, *discoveryv1.EndpointSlice) { told++ })
	before := heap()
	since := func() float64 { return (float64(heap()) - float64(before)) / (1 << 20) }
	list := [2][]any{}
	for i := range services {
		s, e := new(corev1.Service), new(discoveryv1.EndpointSlice)
		wire(t, bigService(i), s)
		wire(t, bigSlice(i, perService), e)
		for at, add := range []func() (any, error){func() (any, error) { return sm.Transformer()(s) }, func() (any, error) { return em.Transformer()(e) }} {
			o, err := add()
			if err != nil {
				t.Fatal(err)
			}
			list[at] = append(list[at], o)
		}
	}
	streaming := since()
	if err := errors.Join(sm.Replace(list[0], ""), em.Replace(list[1], "")); err != nil || told != 2*services {
		t.Fatalf("told of %d objects, want %d; %v", told, 2*services, err)
	}
	list = [2][]any{}
	own := since()
	if own > 3 || streaming > 4.5 {
		t.Errorf("%.1f MiB, want at most 3; while the list streams %.1f MiB, want at most 4.5", own, streaming)
	}
	t.Logf("%.1f MiB, while the list streams %.1f MiB", own, streaming)
	runtime.KeepAlive(sm)
	runtime.KeepAlive(em)
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// wire sends an object through protobuf, so that it owns its strings as decoded ones do.
func wire(t *testing.T, from interface{ Marshal() ([]byte, error) }, to interface{ Unmarshal([]byte) error }) {
	t.Helper()
	raw, err := from.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if err := to.Unmarshal(raw); err != nil {
		t.Fatal(err)
	}
}

func bigService(i int) *corev1.Service {
	ip := fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)
	single, all := corev1.IPFamilyPolicySingleStack, corev1.ServiceInternalTrafficPolicyCluster
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("team-%d", i%100), Name: fmt.Sprintf("service-%05d", i), UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-cccc-dddddddddddd", i)),
			ResourceVersion: "123456", CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			Labels: map[string]string{"app": "web", "helm.sh/chart": "web-1.2.3"}, Annotations: map[string]string{"kubectl.kubernetes.io/last-applied-configuration": "{ much }"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", Operation: "Apply", FieldsV1: &metav1.FieldsV1{Raw: make([]byte, 500)}}},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": fmt.Sprintf("service-%05d", i)},
			Ports:           []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromString("http")}},
			SessionAffinity: corev1.ServiceAffinityNone, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single, InternalTrafficPolicy: &all,
		},
	}
}

func bigSlice(i, endpoints int) *discoveryv1.EndpointSlice {
	port, name, tcp, zone, yes, no := int32(8080), "http", corev1.ProtocolTCP, "eu-central-1a", true, false
	service := fmt.Sprintf("service-%05d", i)
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("team-%d", i%100), Name: service + "-x7k2p", GenerateName: service + "-", UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-cccc-eeeeeeeeeeee", i)),
			ResourceVersion: fmt.Sprint(1_000_000 + i), Generation: 3, CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			Labels:          map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io", "app": "web"},
			Annotations:     map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-11-30T19:00:00Z"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "Service", Name: service, UID: "x"}},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
	}
	for e := range endpoints {
		node := fmt.Sprintf("node-%04d", (i+e)%5000)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+e, i>>8&255, i&255)}, Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName: &node, Zone: &zone, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace,
				Name: fmt.Sprintf("%s-6d4cf56db6-%05d", service, e), UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-%04d-dddddddddddd", i, e))},
		})
	}
	return s
}
