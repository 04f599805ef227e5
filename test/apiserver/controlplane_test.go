package apiserver

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	adminConfig = "/run/testctl/admin.conf"
	proxyConfig = "/run/testctl/proxy.conf"
	namespace   = "default"
	nodeName    = "node-1"
)

var (
	api *kubernetes.Clientset // as cluster-admin
	ctx = context.Background()
)

// startControlPlane starts etcd and the API server, waits until they answer, and registers the node.
func startControlPlane() (stop func(), err error) {
	log, err := os.Create("/run/testctl.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	command := exec.Command(binary("testctl"), "-dir", "/run/testctl")
	command.Stderr = log
	out, err := command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := command.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		command.Process.Signal(syscall.SIGTERM)
		if err := command.Wait(); err != nil {
			fmt.Fprintf(os.Stderr, "testctl: %v; its last words:\n%s", err, lastLines(log.Name(), 40))
		}
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		stop()
		return nil, fmt.Errorf("testctl ended before it was ready: %q, %v", line, err)
	}
	if api, err = connect(adminConfig); err == nil {
		err = registerNode()
	}
	if err != nil {
		stop()
		return nil, fmt.Errorf("register node: %w", err)
	}
	return stop, nil
}

// registerNode makes the Node object, unless it is there.
func registerNode() error {
	_, err := api.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName}},
		Spec:       corev1.NodeSpec{PodCIDR: "10.244.1.0/24", PodCIDRs: []string{"10.244.1.0/24", "fd00:10:244:1::/64"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: node.v4.String()},
			{Type: corev1.NodeInternalIP, Address: node.v6.String()},
		}},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func connect(kubeconfig string) (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	return kubernetes.NewForConfig(config)
}

// createService makes a Service with one port, 80, and has it removed when the test ends.
func createService(t *testing.T, name string, edit ...func(*corev1.ServiceSpec)) *corev1.Service {
	t.Helper()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{
			{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt(podPort)},
		}},
	}
	for _, e := range edit {
		e(&s.Spec)
	}
	s, err := api.CoreV1().Services(namespace).Create(ctx, s, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create Service: %v", err)
	}
	t.Cleanup(func() { deleteService(t, name) })
	return s
}

func deleteService(t *testing.T, name string) {
	t.Helper()
	err := api.CoreV1().Services(namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Errorf("delete Service: %v", err)
	}
}

func updateService(t *testing.T, name string, edit func(*corev1.Service)) {
	t.Helper()
	services := api.CoreV1().Services(namespace)
	s, err := services.Get(ctx, name, metav1.GetOptions{})
	if err == nil {
		edit(s)
		_, err = services.Update(ctx, s, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatalf("update Service: %v", err)
	}
}

// setEndpoints makes the pods, ready and on this node, the endpoints of the Service in one family. No pods: an empty slice.
func setEndpoints(t *testing.T, service string, family discoveryv1.AddressType, pods ...*host) {
	t.Helper()
	port, protocol, portName, here := int32(podPort), corev1.ProtocolTCP, "http", nodeName
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name:   service + "-" + strings.ToLower(string(family)),
			Labels: map[string]string{discoveryv1.LabelServiceName: service},
		},
		AddressType: family,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Protocol: &protocol, Port: &port}},
	}
	for _, p := range pods {
		ip := p.v4
		if family == discoveryv1.AddressTypeIPv6 {
			ip = p.v6
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip.String()}, NodeName: &here})
	}
	slices := api.DiscoveryV1().EndpointSlices(namespace)
	_, err := slices.Create(ctx, slice, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		_, err = slices.Update(ctx, slice, metav1.UpdateOptions{})
	case err == nil:
		t.Cleanup(func() { slices.Delete(ctx, slice.Name, metav1.DeleteOptions{}) })
	}
	if err != nil {
		t.Fatalf("set endpoints: %v", err)
	}
}

// front is where the Service's port is reached at one of its addresses, by position among the cluster IPs.
func front(s *corev1.Service, i int) netip.AddrPort {
	return netip.AddrPortFrom(addr(s.Spec.ClusterIPs[i]), uint16(s.Spec.Ports[0].Port))
}

// What the tests rely on, without a proxy: the API is the version we say, and the proxy's user may do what a proxy
// must and no more.
func TestControlPlane(t *testing.T) {
	version, err := api.Discovery().ServerVersion()
	if err != nil || version.GitVersion != "v1.37.2" {
		t.Errorf("server version: %v, %v", version, err)
	}
	proxy, err := connect(proxyConfig)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := proxy.CoreV1().Services("").List(ctx, metav1.ListOptions{}); err != nil {
		t.Errorf("proxy user: list Services: %v", err)
	}
	if _, err := proxy.DiscoveryV1().EndpointSlices("").List(ctx, metav1.ListOptions{}); err != nil {
		t.Errorf("proxy user: list EndpointSlices: %v", err)
	}
	if _, err := proxy.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{}); err != nil {
		t.Errorf("proxy user: get Node: %v", err)
	}
	if _, err := proxy.CoreV1().Secrets("").List(ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("proxy user: list Secrets: want forbidden, got %v", err)
	}
	said := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Name: "said"},
		EventTime:           metav1.NowMicro(),
		ReportingController: "test", ReportingInstance: "test", Action: "Test", Reason: "Test", Type: corev1.EventTypeWarning,
		Regarding: corev1.ObjectReference{Kind: "Service", Namespace: namespace, Name: "nobody"},
		Note:      "mind 198.51.100.1",
	}
	if _, err := proxy.EventsV1().Events(namespace).Create(ctx, said, metav1.CreateOptions{}); err != nil {
		t.Errorf("proxy user: create Event: %v", err)
	}
	if err := warned("nobody", "198.51.100.1"); err != nil {
		t.Error(err)
	}
	if warned("nobody", "198.51.100.2") == nil || warned("somebody", "198.51.100.1") == nil {
		t.Error("an Event is taken for another")
	}
}

// The pods answer without a Service between, so that a failure elsewhere is the proxy's.
func TestWorld(t *testing.T) {
	for _, from := range []*host{outer, node, podC} {
		for _, ip := range []netip.Addr{podA.v4, podA.v6} {
			got, err := from.ask(netip.AddrPortFrom(ip, uint16(podPort)))
			if err != nil || got.pod != podA.name {
				t.Errorf("%s to pod a at %s: answered by %q, %v", from.name, ip, got.pod, err)
			}
		}
	}
}
