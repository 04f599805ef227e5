package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	apiPort      = 46443 // testctl's; the next one is etcd's
	controlDir   = "/run/testctl"
	proxyConfig  = controlDir + "/proxy.conf"
	servicesPath = "/api/v1/namespaces/default/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

// control is a real API server, and a client of it with all rights.
type control struct {
	command *exec.Cmd
	host    string
	http    *http.Client
}

func startControlPlane(testctl string) (*control, error) {
	c := &control{command: exec.Command(testctl, "-dir", controlDir)}
	log, err := os.Create("/run/testctl.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.command.Stderr = log
	out, err := c.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.command.Start(); err != nil {
		return nil, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
		c.stop()
		return nil, fmt.Errorf("testctl ended before it was ready: %q, %v", line, err)
	}
	if err := c.connect(); err != nil {
		c.stop()
		return nil, err
	}
	return c, nil
}

func (c *control) connect() error {
	config, err := clientcmd.BuildConfigFromFlags("", controlDir+"/admin.conf")
	if err != nil {
		return err
	}
	if c.http, err = rest.HTTPClientFor(config); err != nil {
		return err
	}
	c.host = config.Host
	return c.send(http.MethodPost, "/api/v1/nodes", &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName}},
		Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: nodeAddress}}},
	}, nil)
}

func (c *control) stop() {
	c.command.Process.Signal(syscall.SIGTERM)
	c.command.Wait()
}

// send sends an object as JSON, if there is one, and decodes the answer unless it is not wanted.
func (c *control) send(method, path string, object, answer any) error {
	var body []byte
	if object != nil {
		var err error
		if body, err = json.Marshal(object); err != nil {
			return err
		}
	}
	request, err := http.NewRequest(method, c.host+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, text)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(text, answer)
}

func serviceName(i int) string { return fmt.Sprintf("service-%05d", i) }

func sliceName(i int) string { return serviceName(i) + "-x7k2p" }

func serviceObject(i int) *corev1.Service {
	ip := serviceAddr(i).String()
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: serviceName(i), Labels: map[string]string{"app": serviceName(i)}},
		Spec: corev1.ServiceSpec{ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: servicePort}}},
	}
}

// sliceObject looks like one of the EndpointSlice controller's: endpoints have pods and nodes.
func sliceObject(i, set, endpoints int) *discoveryv1.EndpointSlice {
	name, protocol, port, yes := "http", corev1.ProtocolTCP, int32(podPort), true
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: sliceName(i), Labels: map[string]string{
			discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "bench"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &protocol, Port: &port}},
	}
	for e := range endpoints {
		node := fmt.Sprintf("node-%d", e+1)
		pod := fmt.Sprintf("%s-5d8f9c7b6d-%d%03d", serviceName(i), set, e)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{endpointAddr(i, set, e).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes},
			NodeName:   &node,
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: pod},
		})
	}
	return s
}

// endpoints makes one set the endpoints of a Service.
func (c *control) endpoints(i, set, endpoints int) error {
	s := sliceObject(i, set, endpoints)
	return c.send(http.MethodPut, slicesPath+"/"+s.Name, s, nil)
}

// manifestFile holds the objects when there is no API server.
const manifestFile = "/run/bench.yaml"

// writeManifests writes what resize has in an API server, one JSON document (which is YAML too) after the other.
func writeManifests(services, endpoints int) error {
	f, err := os.Create(manifestFile)
	if err != nil {
		return err
	}
	defer f.Close()
	out := bufio.NewWriter(f)
	for i := range services {
		s, e := serviceObject(i), sliceObject(i, 0, endpoints)
		s.Namespace, e.Namespace = "default", "default"
		s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
		e.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
		for _, o := range []any{s, e} {
			b, err := json.Marshal(o)
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "---\n%s\n", b)
		}
	}
	return out.Flush()
}
