package story

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"fairlead/internal/lab"

	"sigs.k8s.io/yaml"
)

// service is what the engine itself needs to know of a Service: enough to find its addresses by name and to write its
// slices. The program under test reads the manifests on its own.
type service struct {
	Kind     string
	Metadata struct{ Name, Namespace string }
	Spec     struct {
		ClusterIP               string
		ClusterIPs, ExternalIPs []string
		Ports                   []port
	}
	Status struct {
		LoadBalancer struct{ Ingress []struct{ IP string } }
	}
}

type port struct {
	Name, Protocol string
	Port           int
	TargetPort     any // number or name
}

// namedPorts are the target ports that pods give a name to.
var namedPorts = map[string]int{"http": 8080, "alt": 8081, "dns": 53}

// servedPorts are what each pod serves, TCP and UDP.
var servedPorts = []uint16{8080, 8081, 53}

// servePod opens the servers of a pod; other actors have none until a story says so.
func servePod(a *lab.Actor) error {
	if a.Kind != lab.Pod {
		return nil
	}
	for _, p := range servedPorts {
		for _, network := range []string{"tcp", "udp"} {
			if _, err := a.Serve(network, netip.AddrPortFrom(netip.IPv6Unspecified(), p)); err != nil {
				return err
			}
		}
	}
	return nil
}

func parse(addrs []string) (good []netip.Addr) {
	for _, s := range addrs {
		if a, err := netip.ParseAddr(s); err == nil && !slices.Contains(good, a) {
			good = append(good, a)
		}
	}
	return good
}

func (s service) clusterIPs() []netip.Addr {
	return parse(append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...))
}
func (s service) externalIPs() []netip.Addr { return parse(s.Spec.ExternalIPs) }

func (s service) ingress() []netip.Addr {
	var ips []string
	for _, i := range s.Status.LoadBalancer.Ingress {
		ips = append(ips, i.IP)
	}
	return parse(ips)
}

func (p port) target() (int, error) {
	switch t := p.TargetPort.(type) {
	case nil:
		return p.Port, nil
	case float64:
		return int(t), nil
	case string:
		if n, ok := namedPorts[t]; ok {
			return n, nil
		}
	}
	return 0, fmt.Errorf("target port %v of port %d: no pod of the lab has it", p.TargetPort, p.Port)
}

// learn remembers the Services of a manifest file, for their names. What is no YAML is passed over: a story may be about
// just that. Nothing is forgotten when a file goes: packets to a Service that is gone are what stories send.
func (st *stage) learn(data []byte) {
	for _, doc := range bytes.Split(data, []byte("\n---")) {
		var s service
		if yaml.Unmarshal(doc, &s) == nil && s.Kind == "Service" {
			st.services[s.Metadata.Name] = s
		}
	}
}

// endpoint is one endpoint as a story writes it: "p1a", "p1a:8081", "p2a,terminating", "p1b,zone=a,node=n1".
type endpoint struct {
	actor                       *lab.Actor
	port                        int // 0: the Service's target port
	ready, serving, terminating bool
	zones, nodes                []string
}

func (st *stage) parseEndpoint(word string) (e endpoint, err error) {
	parts := strings.Split(word, ",")
	name, portText, hasPort := strings.Cut(parts[0], ":")
	if e.actor, err = st.world.Actor(name); err != nil {
		return e, err
	}
	if hasPort {
		if e.port, err = strconv.Atoi(portText); err != nil {
			return e, fmt.Errorf("endpoint %s: %w", word, err)
		}
	}
	e.ready, e.serving = true, true
	for _, p := range parts[1:] {
		key, value, _ := strings.Cut(p, "=")
		switch key {
		case "unready":
			e.ready, e.serving = false, false
		case "terminating": // and serving
			e.ready, e.terminating = false, true
		case "terminated": // and not serving
			e.ready, e.serving, e.terminating = false, false, true
		case "zone":
			e.zones = append(e.zones, value)
		case "node":
			e.nodes = append(e.nodes, value)
		default:
			return e, fmt.Errorf("endpoint %s: unknown word %q", word, p)
		}
	}
	return e, nil
}

// zone of a node: a for the first, b for the second.
func zone(node *lab.Actor) string {
	if node.Kind != lab.Node {
		return ""
	}
	return string(rune('a' + node.Index() - 1))
}

// yaml is the endpoint as an EndpointSlice holds it.
func (e endpoint) yaml(v6 bool) map[string]any {
	node := e.actor
	if node.Node != nil {
		node = node.Node
	}
	m := map[string]any{
		"addresses":  []string{e.actor.Addr(v6).String()},
		"nodeName":   node.Name,
		"zone":       zone(node),
		"conditions": map[string]bool{"ready": e.ready, "serving": e.serving, "terminating": e.terminating},
		"targetRef":  map[string]string{"kind": "Pod", "namespace": "default", "name": e.actor.Name, "uid": "uid-" + e.actor.Name},
	}
	if e.zones != nil || e.nodes != nil {
		named := func(names []string) (list []map[string]string) {
			for _, n := range names {
				list = append(list, map[string]string{"name": n})
			}
			return list
		}
		m["hints"] = map[string]any{"forZones": named(e.zones), "forNodes": named(e.nodes)}
	}
	return m
}

// writeSlices writes a Service's EndpointSlices: one a family, and one more for each endpoint port of its own.
func (st *stage) writeSlices(s service, endpoints []endpoint) error {
	groups := map[int][]endpoint{0: nil}
	for _, e := range endpoints {
		groups[e.port] = append(groups[e.port], e)
	}
	var out bytes.Buffer
	for p, group := range groups {
		for _, v6 := range []bool{false, true} {
			doc, err := slice(s, p, group, v6)
			if err != nil {
				return err
			}
			out.WriteString("---\n")
			out.Write(doc)
		}
	}
	return lab.WriteManifest(st.manifests, slicesFile(s), out.Bytes())
}

func slicesFile(s service) string { return "endpoints-" + s.Metadata.Name + ".yaml" }

func slice(s service, override int, group []endpoint, v6 bool) ([]byte, error) {
	family := map[bool]string{false: "IPv4", true: "IPv6"}[v6]
	var ports []map[string]any
	for _, p := range s.Spec.Ports {
		target, err := p.target()
		if err != nil {
			return nil, err
		}
		if override != 0 {
			target = override
		}
		ports = append(ports, map[string]any{"name": p.Name, "port": target, "protocol": p.protocol()})
	}
	list := []map[string]any{}
	for _, e := range group {
		list = append(list, e.yaml(v6))
	}
	namespace := s.Metadata.Namespace
	if namespace == "" {
		namespace = "default"
	}
	return yaml.Marshal(map[string]any{
		"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
		"metadata": map[string]any{
			"name": fmt.Sprintf("%s-%s-%d", s.Metadata.Name, strings.ToLower(family), override), "namespace": namespace,
			"labels": map[string]string{"kubernetes.io/service-name": s.Metadata.Name},
		},
		"endpoints": list, "ports": ports,
	})
}

func (p port) protocol() string {
	if p.Protocol == "" {
		return "TCP"
	}
	return p.Protocol
}

// writeNodes tells the agents of the nodes: zones a, b, … in order.
func (st *stage) writeNodes() error {
	var out bytes.Buffer
	for i, name := range st.config.Nodes {
		n, err := st.world.Actor(name)
		if err != nil {
			return err
		}
		doc, err := yaml.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Node",
			"metadata": map[string]any{"name": name, "labels": map[string]string{
				"kubernetes.io/hostname": name, "topology.kubernetes.io/zone": zone(n), "topology.kubernetes.io/region": "r"}},
			"spec": map[string]any{"podCIDRs": []string{fmt.Sprintf("10.244.%d.0/24", i+1), fmt.Sprintf("fd00:10:244:%d::/64", i+1)}},
			"status": map[string]any{"addresses": []map[string]string{
				{"type": "InternalIP", "address": n.Addr(false).String()}, {"type": "InternalIP", "address": n.Addr(true).String()}}},
		})
		if err != nil {
			return err
		}
		out.WriteString("---\n")
		out.Write(doc)
	}
	return lab.WriteManifest(st.manifests, "nodes.yaml", out.Bytes())
}

// put copies a file of the story to where the agents read.
func (st *stage) put(file string) error {
	data, err := os.ReadFile(filepath.Join(st.dir, file))
	if err != nil {
		return err
	}
	st.learn(data)
	return lab.WriteManifest(st.manifests, filepath.Base(file), data)
}

// take removes it again.
func (st *stage) take(file string) error {
	return os.Remove(filepath.Join(st.manifests, filepath.Base(file)))
}
