package apiserver

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

const (
	ipv4 = discoveryv1.AddressTypeIPv4
	ipv6 = discoveryv1.AddressTypeIPv6
)

// answers is right if one of the pods answers the client at that address.
func answers(from *host, to netip.AddrPort, pods ...*host) func() error {
	return func() error {
		got, err := from.ask(to)
		if err != nil {
			return err
		}
		known := slices.ContainsFunc(pods, func(p *host) bool { return p.name == got.pod })
		return wantf(known, "%s to %s: answered by pod %s", from.name, to, got.pod)
	}
}

// refuses is right if the client is told that nobody is there.
func refuses(from *host, to netip.AddrPort) func() error {
	return func() error {
		got, err := from.ask(to)
		return wantf(errors.Is(err, syscall.ECONNREFUSED), "%s to %s: want refused, got %v %v", from.name, to, got, err)
	}
}

// unreachable is right if the client gets no answer, be it in silence or in words.
func unreachable(from *host, to netip.AddrPort) func() error {
	return func() error {
		got, err := from.ask(to)
		return wantf(err != nil, "%s to %s: answered by pod %s", from.name, to, got.pod)
	}
}

func both(s *corev1.ServiceSpec) {
	policy := corev1.IPFamilyPolicyRequireDualStack
	s.IPFamilyPolicy = &policy
}

func nodePort(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort }

func TestServiceLife(t *testing.T) {
	startProxy(t)
	vip := front(createService(t, "life"), 0)
	eventually(t, "a Service without endpoints refuses", refuses(podC, vip))

	setEndpoints(t, "life", ipv4, podA)
	for _, from := range []*host{podC, podA, node, outer} { // pod a calls itself through the Service
		eventually(t, "an endpoint appears", answers(from, vip, podA))
	}

	old, err := podC.dial(vip)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	setEndpoints(t, "life", ipv4, podB)
	eventually(t, "endpoints change", answers(podC, vip, podB))
	always(t, "all new connections follow", answers(podC, vip, podB))
	if got, err := readAnswer(old); err != nil || got.pod != podA.name {
		t.Errorf("the old connection has lost its pod: %v, %v", got, err)
	}

	setEndpoints(t, "life", ipv4)
	eventually(t, "the last endpoint goes", refuses(podC, vip))
	eventually(t, "also for the node", refuses(node, vip))

	setEndpoints(t, "life", ipv4, podA)
	eventually(t, "an endpoint comes back", answers(podC, vip, podA))
	deleteService(t, "life")
	eventually(t, "the Service is deleted", unreachable(podC, vip))
}

func TestSpread(t *testing.T) {
	startProxy(t)
	vip := front(createService(t, "spread"), 0)
	setEndpoints(t, "spread", ipv4, podA, podB)
	for _, p := range []*host{podA, podB} {
		eventually(t, "each endpoint has its share", answers(podC, vip, p))
	}
}

func TestNodePort(t *testing.T) {
	startProxy(t)
	s := createService(t, "nodeport", both, nodePort)
	setEndpoints(t, "nodeport", ipv4, podA)
	setEndpoints(t, "nodeport", ipv6, podA)
	port := uint16(s.Spec.Ports[0].NodePort)
	v4, v6 := netip.AddrPortFrom(node.v4, port), netip.AddrPortFrom(node.v6, port)
	seen := func(to netip.AddrPort, as func(netip.Addr) error) func() error {
		return func() error {
			got, err := outer.ask(to)
			if err != nil {
				return err
			}
			return as(got.from)
		}
	}
	hidden := func(from netip.Addr) error {
		return wantf(from != outer.v4 && from != outer.v6, "the pod sees the client's own address %s", from)
	}
	shown := func(from netip.Addr) error {
		return wantf(from == outer.v4 || from == outer.v6, "the pod sees %s", from)
	}
	for _, to := range []netip.AddrPort{v4, v6} {
		eventually(t, "policy Cluster: the node stands for the client", seen(to, hidden))
		eventually(t, "the node reaches its own port", answers(node, to, podA))
	}
	updateService(t, s.Name, func(s *corev1.Service) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	})
	for _, to := range []netip.AddrPort{v4, v6} {
		eventually(t, "policy Local: the client shows", seen(to, shown))
	}
	deleteService(t, s.Name)
	eventually(t, "the Service is deleted", refuses(outer, v4))
}

func TestDualStack(t *testing.T) {
	startProxy(t)
	s := createService(t, "dual", both)
	setEndpoints(t, "dual", ipv4, podA)
	setEndpoints(t, "dual", ipv6, podB)
	v4, v6 := front(s, 0), front(s, 1)
	if !v4.Addr().Is4() || !v6.Addr().Is6() {
		t.Fatalf("cluster IPs %v: want IPv4, then IPv6", s.Spec.ClusterIPs)
	}
	for _, from := range []*host{podC, node} {
		eventually(t, "IPv4", answers(from, v4, podA))
		eventually(t, "IPv6", answers(from, v6, podB))
	}
	setEndpoints(t, "dual", ipv6)
	eventually(t, "IPv6 loses its endpoint", refuses(podC, v6))
	always(t, "IPv4 keeps its own", answers(podC, v4, podA))
}

func TestServiceProxyName(t *testing.T) {
	startProxy(t)
	vip := front(createService(t, "labelled"), 0)
	setEndpoints(t, "labelled", ipv4, podA)
	const label = "service.kubernetes.io/service-proxy-name"
	for i := range 2 {
		eventually(t, fmt.Sprintf("without the label, time %d", i+1), answers(podC, vip, podA))
		updateService(t, "labelled", func(s *corev1.Service) { s.Labels = map[string]string{label: "another"} })
		eventually(t, "another proxy's", unreachable(podC, vip))
		updateService(t, "labelled", func(s *corev1.Service) { delete(s.Labels, label) })
	}
	eventually(t, "ours again", answers(podC, vip, podA))
}
