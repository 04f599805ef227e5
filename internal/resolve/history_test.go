package resolve

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"fairlead/internal/model"
)

// The world of random histories is small, so that things collide: few names, few addresses, few ports.
var (
	someIPs = []string{
		"10.96.0.1", "10.96.0.2", "10.96.0.3", "203.0.113.9", "203.0.113.010", "192.0.2.11", "192.0.2.12",
		"fd00:96::1", "fd00:96::2", "2001:db8::9", "2001:db8::11",
		"127.0.0.1", "169.254.169.254", "0.0.0.0", "::", "224.0.0.1", "fe80::1", "", "garbage", "None", "::ffff:10.96.0.2",
	}
	someEndpoints = []string{"10.244.1.10", "10.244.1.11", "10.244.2.10", "fd00:10::1", "fd00:10::2", "127.0.0.1", "", "x"}
	someRanges    = []string{"198.51.100.0/24", "192.0.2.0/24", "0.0.0.0/0", "fd00::/8", " 10.0.0.0/8 ", "", "bad", "2001:db8::/32"}
	someNodes     = []string{"n1", "n2", "n3"}
	someZones     = []string{"", "a", "b"}
	somePorts     = []int32{0, 80, 81, 31000, 31001, 70000, -1}
	someProtos    = []corev1.Protocol{"", corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP, "ICMP"}
	someKeys      = []string{"", "kubernetes.io/hostname", "topology.kubernetes.io/zone,*", "kubernetes.io/hostname,topology.kubernetes.io/zone", "wrong", "*"}
)

func pick[T any](t *rapid.T, from []T, what string) T { return rapid.SampledFrom(from).Draw(t, what) }

func some[T any](t *rapid.T, from []T, most int, what string) []T {
	return rapid.SliceOfN(rapid.SampledFrom(from), 0, most).Draw(t, what)
}

func maybe[T any](t *rapid.T, from []T, what string) *T {
	if rapid.Bool().Draw(t, what+"?") {
		return nil
	}
	v := pick(t, from, what)
	return &v
}

// odd is true now and then: most of what is drawn should be sane enough to reach the deep ends.
func odd(t *rapid.T) bool { return rapid.IntRange(0, 3).Draw(t, "odd") == 0 }

func anyService(t *rapid.T, nn types.NamespacedName) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: nn.Namespace, Name: nn.Name}}
	s.ResourceVersion = strconv.Itoa(rapid.IntRange(0, 9).Draw(t, "version"))
	s.CreationTimestamp = metav1.Unix(int64(rapid.IntRange(0, 2).Draw(t, "age")), 0)
	if rapid.IntRange(0, 20).Draw(t, "foreign") == 0 {
		s.Labels = map[string]string{LabelProxyName: "other"}
	}
	if key := maybe(t, someKeys, "keys"); key != nil {
		s.Annotations = map[string]string{AnnotationTopologyKeys: *key}
	}
	s.Spec.Type = pick(t, []corev1.ServiceType{"", "ClusterIP", "NodePort", "LoadBalancer", "LoadBalancer", "ExternalName"}, "type")
	if s.Spec.ClusterIP = pick(t, someIPs[:3], "sane clusterIP"); odd(t) {
		s.Spec.ClusterIPs = some(t, someIPs, 2, "clusterIPs")
		s.Spec.ClusterIP = pick(t, someIPs, "clusterIP")
		s.Spec.IPFamilies = some(t, []corev1.IPFamily{"IPv4", "IPv6"}, 2, "families")
	} else if rapid.Bool().Draw(t, "dual") {
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP, "fd00:96::1"}
	}
	s.Spec.ExternalIPs = some(t, someIPs, 3, "externalIPs")
	for _, ip := range some(t, someIPs, 3, "ingress") {
		mode := maybe(t, []corev1.LoadBalancerIPMode{"VIP", "Proxy", "VIP"}, "mode")
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip, IPMode: mode})
	}
	s.Spec.LoadBalancerSourceRanges = some(t, someRanges, 2, "ranges")
	s.Spec.ExternalTrafficPolicy = pick(t, []corev1.ServiceExternalTrafficPolicy{"", "Cluster", "Local", "Local"}, "eTP")
	s.Spec.InternalTrafficPolicy = maybe(t, []corev1.ServiceInternalTrafficPolicy{"Cluster", "Local"}, "iTP")
	s.Spec.HealthCheckNodePort = pick(t, somePorts[3:], "health")
	s.Spec.SessionAffinity = pick(t, []corev1.ServiceAffinity{"", "None", "ClientIP"}, "affinity")
	if rapid.Bool().Draw(t, "affinityConfig") {
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: maybe(t, []int32{0, 10, 90000}, "timeout")}}
	}
	if !odd(t) {
		s.Spec.Ports = []corev1.ServicePort{{Port: 80, NodePort: pick(t, []int32{0, 31000, 31001}, "sane nodePort")}}
	}
	for range rapid.IntRange(0, 2).Draw(t, "ports") {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{
			Name: pick(t, []string{"", "http", "dns"}, "name"), Protocol: pick(t, someProtos, "proto"),
			Port: pick(t, somePorts, "port"), NodePort: pick(t, somePorts, "nodePort"),
		})
	}
	return s
}

func anySlice(t *rapid.T, nn types.NamespacedName) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: nn.Namespace, Name: nn.Name}}
	s.ResourceVersion = pick(t, []string{"", "1", "2", "3", "x"}, "version")
	s.CreationTimestamp = metav1.Unix(int64(rapid.IntRange(0, 2).Draw(t, "age")), 0)
	if rapid.IntRange(0, 9).Draw(t, "nobody's") > 0 {
		s.Labels = map[string]string{discoveryv1.LabelServiceName: pick(t, []string{"a", "b", "c"}, "service")}
	}
	s.AddressType = pick(t, []discoveryv1.AddressType{"IPv4", "IPv4", "IPv6", "FQDN"}, "addressType")
	if !odd(t) {
		port := pick(t, []int32{8080, 8081}, "sane port")
		s.Ports = []discoveryv1.EndpointPort{{Port: &port}}
	}
	for range rapid.IntRange(0, 2).Draw(t, "ports") {
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{
			Name: maybe(t, []string{"", "http", "dns"}, "name"), Protocol: maybe(t, someProtos, "proto"), Port: maybe(t, somePorts, "port"),
		})
	}
	yesNo := []bool{true, false}
	for range rapid.IntRange(0, 4).Draw(t, "endpoints") {
		addresses := []string{pick(t, someEndpoints[:3], "sane address")}
		if odd(t) {
			addresses = some(t, someEndpoints, 2, "addresses")
		}
		e := discoveryv1.Endpoint{Addresses: addresses, NodeName: maybe(t, someNodes, "node"), Zone: maybe(t, someZones, "zone")}
		e.Conditions = discoveryv1.EndpointConditions{Ready: maybe(t, yesNo, "ready"), Serving: maybe(t, yesNo, "serving"), Terminating: maybe(t, yesNo, "terminating")}
		if uid := maybe(t, []types.UID{"", "u1", "u2"}, "uid"); uid != nil {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Name: pick(t, []string{"p1", "p2"}, "pod"), UID: *uid}
		}
		if rapid.Bool().Draw(t, "hints") {
			e.Hints = &discoveryv1.EndpointHints{}
			for _, z := range some(t, someZones, 2, "zones") {
				e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: z})
			}
			for _, n := range some(t, someNodes, 2, "nodes") {
				e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: n})
			}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func anyNode(t *rapid.T, name string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if zone := maybe(t, someZones, "zone"); zone != nil {
		n.Labels = map[string]string{corev1.LabelTopologyZone: *zone}
	}
	n.Spec.PodCIDRs = some(t, []string{"10.244.1.0/24", "fd00:10::/64", "bad"}, 2, "podCIDRs")
	for _, ip := range some(t, someIPs[3:12], 3, "addresses") {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: pick(t, []corev1.NodeAddressType{"InternalIP", "ExternalIP", "Hostname"}, "type"), Address: ip})
	}
	return n
}

func anyServiceCIDR(t *rapid.T, name string) *networkingv1.ServiceCIDR {
	c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}}
	c.Spec.CIDRs = some(t, []string{"10.96.0.0/16", "10.96.0.0/24", "10.97.0.1/16", "fd00:96::/112", "fd00:97::/108", "0.0.0.0/0", "fe80::/64", "bad", ""}, 3, "serviceCIDRs")
	return c
}

func anyConfig(t *rapid.T) Config {
	c := Config{
		NodeName: pick(t, []string{"n1", "n1", "n2", ""}, "self"),
		IPv4:     rapid.IntRange(0, 4).Draw(t, "v4") > 0, IPv6: rapid.Bool().Draw(t, "v6"),
		MasqueradeAll:      rapid.Bool().Draw(t, "masq"),
		NodePortAddresses:  some(t, []string{"primary", "localhost", "all", "192.0.2.0/24", "2001:db8::/32", "127.0.0.1/32", "::1/128", "bad"}, 2, "nodePortAddresses"),
		LocalhostNodePorts: rapid.Bool().Draw(t, "localhost"),
		LocalhostRelay:     rapid.Bool().Draw(t, "relay"),
		Standalone:         rapid.Bool().Draw(t, "standalone"),
		AllowExternalIPs:   rapid.IntRange(0, 4).Draw(t, "externals") > 0,
		AllowNodeAddresses: rapid.IntRange(0, 4).Draw(t, "nodeAddresses") == 0,
	}
	c.Detect.Mode = pick(t, []DetectMode{DetectNothing, ByClusterCIDR, ByNodeCIDR, ByBridgeInterface, ByInterfacePrefix}, "detect")
	c.Detect.CIDRs = some(t, []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:10::/32")}, 2, "cidrs")
	c.Detect.Interface = pick(t, []string{"", "br0"}, "interface")
	return c
}

// history is a resolver, what it was told, and what came of its deltas.
type history struct {
	r       *Resolver
	config  Config
	in      Input
	state   *model.State
	told    []model.Notice // notices that hold and were told
	changed bool           // a delta is expected to be Full
}

func (h *history) step(t *rapid.T) {
	names := []types.NamespacedName{{Namespace: "x", Name: "a"}, {Namespace: "x", Name: "b"}, {Namespace: "x", Name: "c"}, {Namespace: "y", Name: "a"}}
	gone := rapid.IntRange(0, 4).Draw(t, "gone") == 0
	switch what := rapid.IntRange(0, 99).Draw(t, "what"); {
	case what < 40:
		h.tellService(t, pick(t, names, "service"), gone)
	case what < 80:
		h.tellSlice(t, pick(t, names, "slice"), gone)
	case what < 84:
		h.tellCIDR(t, pick(t, []string{"kubernetes", "more"}, "cidr"), gone)
	case what < 90:
		h.tellNode(t, pick(t, someNodes, "node"), gone)
	case what < 95:
		h.in.Addrs = nil
		for _, text := range some(t, someIPs[3:11], 3, "addrs") {
			if a, ok := parseAddr(text); ok {
				h.in.Addrs = append(h.in.Addrs, a)
			}
		}
		h.r.Addrs(h.in.Addrs)
	case what < 98:
		h.config = anyConfig(t)
		h.r.SetConfig(h.config)
	default:
		h.changed = true
		h.r.MarkAll()
	}
}

func (h *history) tellService(t *rapid.T, nn types.NamespacedName, gone bool) {
	if gone {
		delete(h.in.Services, nn)
		h.r.Service(nn, nil)
		return
	}
	s := anyService(t, nn)
	if old := h.in.Services[nn]; old != nil && rapid.Bool().Draw(t, "small change") {
		s = smallChange(t, old.DeepCopy(), s)
	}
	h.in.Services[nn] = s
	h.r.Service(nn, s)
}

// smallChange takes one thing of another Service over.
func smallChange(t *rapid.T, s, from *corev1.Service) *corev1.Service {
	switch rapid.IntRange(0, 6).Draw(t, "changed") {
	case 0:
		s.ResourceVersion = from.ResourceVersion
	case 1:
		s.CreationTimestamp = from.CreationTimestamp
	case 2:
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = from.Spec.HealthCheckNodePort
	case 3:
		s.Spec.ExternalIPs = from.Spec.ExternalIPs
	case 4:
		s.Spec.ClusterIP = from.Spec.ClusterIP
	case 5:
		s.Spec.Ports = from.Spec.Ports
	case 6:
		s.Annotations = from.Annotations
	}
	return s
}

func (h *history) tellSlice(t *rapid.T, nn types.NamespacedName, gone bool) {
	if gone {
		delete(h.in.Slices, nn)
		h.r.Slice(nn, nil)
		return
	}
	h.in.Slices[nn] = anySlice(t, nn)
	h.r.Slice(nn, h.in.Slices[nn])
}

func (h *history) tellNode(t *rapid.T, name string, gone bool) {
	if gone {
		if name != h.config.NodeName { // this node's own end is not believed
			delete(h.in.Nodes, name)
		}
		h.r.Node(name, nil)
		return
	}
	h.in.Nodes[name] = anyNode(t, name)
	h.r.Node(name, h.in.Nodes[name])
}

func (h *history) tellCIDR(t *rapid.T, name string, gone bool) {
	if gone {
		delete(h.in.CIDRs, name)
		h.r.ServiceCIDR(name, nil)
		return
	}
	h.in.CIDRs[name] = anyServiceCIDR(t, name)
	h.r.ServiceCIDR(name, h.in.CIDRs[name])
}

// check takes a delta and holds everything against the twin.
func (h *history) check(t *rapid.T) {
	if rapid.IntRange(0, 3).Draw(t, "slim") == 0 {
		h.r.Slim()
	}
	before := h.state.Clone()
	d := h.r.Delta()
	if d.Full != h.changed {
		t.Fatalf("Full is %v, want %v", d.Full, h.changed)
	}
	h.changed = false
	h.state.Apply(d)
	want, notices, noLocal := all(h.config, h.in)
	if !reflect.DeepEqual(h.state, want) {
		t.Fatalf("incremental:\n%s\nfrom scratch:\n%s", h.state.Table(), want.Table())
	}
	if !d.Full {
		onlyChanges(t, before, d)
	}
	sortedDelta(t, d)
	safeState(t, h.state)
	h.checkNotices(t, notices)
	if got := h.r.Stats().NoLocal; got != noLocal {
		t.Fatalf("without local endpoints: %+v, want %+v", got, noLocal)
	}
	for nn := range h.in.Services {
		h.checkWhy(t, nn)
	}
}

// onlyChanges fails if the delta mentions what was so before.
func onlyChanges(t *rapid.T, before *model.State, d model.Delta) {
	mentioned := map[any]bool{}
	once := func(k any) {
		if mentioned[k] {
			t.Fatalf("the delta mentions %v twice", k)
		}
		mentioned[k] = true
	}
	for _, f := range d.Frontends {
		once(f.Key)
		if old, ok := before.Frontends[f.Key]; ok && reflect.DeepEqual(old, f) {
			t.Fatalf("the delta mentions %v, which did not change", f.Key)
		}
	}
	for _, p := range d.Pools {
		once(p.ID)
		if old, ok := before.Pools[p.ID]; ok && reflect.DeepEqual(old, p) {
			t.Fatalf("the delta mentions %v, which did not change", p.ID)
		}
	}
	for _, c := range d.Checks {
		once(c.Service)
		if old, ok := before.Checks[c.Service]; ok && old == c {
			t.Fatalf("the delta mentions the check of %v, which did not change", c.Service)
		}
	}
	for _, k := range d.GoneFrontends {
		once(k)
		if _, ok := before.Frontends[k]; !ok {
			t.Fatalf("the delta ends %v, which was not there", k)
		}
	}
	for _, k := range d.GonePools {
		once(k)
		if _, ok := before.Pools[k]; !ok {
			t.Fatalf("the delta ends %v, which was not there", k)
		}
	}
	for _, k := range d.GoneChecks {
		once(k)
		if _, ok := before.Checks[k]; !ok {
			t.Fatalf("the delta ends the check of %v, which was not there", k)
		}
	}
	if d.Node != nil && reflect.DeepEqual(*d.Node, before.Node) {
		t.Fatalf("the delta mentions the node, which did not change")
	}
}

// sortedDelta fails if rows depend on luck: Services come in order, and their rows in order of key.
func sortedDelta(t *rapid.T, d model.Delta) {
	if !slices.IsSortedFunc(d.Pools, func(a, b model.Pool) int { return a.ID.Compare(b.ID) }) {
		t.Fatalf("pools out of order: %v", d.Lines())
	}
	if !slices.IsSortedFunc(d.GonePools, model.PoolID.Compare) {
		t.Fatalf("gone pools out of order: %v", d.Lines())
	}
}

// checkNotices fails if a notice was not told once, or does not hold.
func (h *history) checkNotices(t *rapid.T, want []model.Notice) {
	if held := h.r.board.all(); !slices.Equal(held, want) {
		t.Fatalf("notices that hold: %v\nwant: %v", held, want)
	}
	var news []model.Notice
	for _, n := range want {
		if !slices.Contains(h.told, n) {
			news = append(news, n)
		}
	}
	if rapid.Bool().Draw(t, "listen") {
		if got := h.r.Notices(); !slices.Equal(got, news) {
			t.Fatalf("news: %v\nwant: %v", got, news)
		}
		h.told = want
	} else {
		h.told = slices.DeleteFunc(h.told, func(n model.Notice) bool { return !slices.Contains(want, n) })
	}
	count := map[string]int{}
	for _, r := range Reasons {
		count[r] = 0
	}
	for _, n := range want {
		count[n.Reason]++
	}
	if got := h.r.Refusals(); !maps.Equal(got, count) {
		t.Fatalf("counted %v, want %v", got, count)
	}
}

// checkWhy fails if an explanation and a pool disagree.
func (h *history) checkWhy(t *rapid.T, nn types.NamespacedName) {
	in, want := map[string]bool{}, map[string]bool{}
	for _, c := range h.r.Why(nn) {
		if c.Reason == "" {
			t.Fatalf("%v: no reason for %v", nn, c)
		}
		if c.InCluster {
			in[fmt.Sprint(c.Port, c.Proto, c.Addr, model.Cluster)] = true
		}
		if c.InLocal {
			in[fmt.Sprint(c.Port, c.Proto, c.Addr, model.Local)] = true
		}
	}
	for id, p := range h.state.Pools {
		for _, b := range p.Backends {
			if id.Service == nn.String() {
				want[fmt.Sprint(id.Port, id.Proto, b.Addr, id.Scope)] = true
			}
		}
	}
	if !maps.Equal(in, want) {
		t.Fatalf("%v: explained as in use: %v\nin pools: %v", nn, in, want)
	}
}

// Random histories of Services, slices, nodes, addresses and settings prove that the resolver equals its dumb twin after
// every step, says only what changed, and tells each notice once.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := &history{config: anyConfig(t), state: model.NewState(), changed: true}
		h.in = Input{map[types.NamespacedName]*corev1.Service{}, map[types.NamespacedName]*discoveryv1.EndpointSlice{}, map[string]*corev1.Node{}, nil, map[string]*networkingv1.ServiceCIDR{}}
		h.r = New(h.config)
		for range rapid.IntRange(1, 20).Draw(t, "rounds") {
			for range rapid.IntRange(0, 3).Draw(t, "steps") {
				h.step(t)
			}
			h.check(t)
		}
	})
}

// Two resolvers that hear of the same things in other orders come to the same tables.
func TestOrderDoesNotMatter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := anyConfig(t)
		var tell []func(*Resolver)
		for _, nn := range []types.NamespacedName{{Namespace: "x", Name: "a"}, {Namespace: "x", Name: "b"}, {Namespace: "x", Name: "c"}} {
			svc, slice := anyService(t, nn), anySlice(t, nn)
			tell = append(tell, func(r *Resolver) { r.Service(nn, svc) }, func(r *Resolver) { r.Slice(nn, slice) })
		}
		node := anyNode(t, "n1")
		tell = append(tell, func(r *Resolver) { r.Node("n1", node) })
		for _, name := range []string{"kubernetes", "more"} {
			cidr := anyServiceCIDR(t, name)
			tell = append(tell, func(r *Resolver) { r.ServiceCIDR(name, cidr) })
		}
		var states [2]*model.State
		for i := range states {
			r := New(c)
			states[i] = model.NewState()
			for _, f := range rapid.Permutation(tell).Draw(t, "order") {
				f(r)
				if rapid.Bool().Draw(t, "look") {
					states[i].Apply(r.Delta())
				}
			}
			states[i].Apply(r.Delta())
		}
		if !reflect.DeepEqual(states[0], states[1]) {
			t.Fatalf("one order:\n%s\nanother:\n%s", states[0].Table(), states[1].Table())
		}
	})
}

// A slice says when its change was asked for; the times go with the rows that answer it.
func TestSince(t *testing.T) {
	nn := types.NamespacedName{Namespace: "x", Name: "a"}
	at := func(second int, name string, addr string) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "a"}}}
		s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Unix(int64(second), 0).UTC().Format(time.RFC3339Nano)}
		if second == 0 {
			s.Annotations = nil
		}
		port := int32(8080)
		s.AddressType, s.Ports = discoveryv1.AddressTypeIPv4, []discoveryv1.EndpointPort{{Port: &port}}
		s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{addr}}}
		return s
	}
	svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
	s1, s2 := types.NamespacedName{Namespace: "x", Name: "s1"}, types.NamespacedName{Namespace: "x", Name: "s2"}
	for name, c := range map[string]struct {
		tell func(r *Resolver)
		want []int64
	}{
		"one":                 {func(r *Resolver) { r.Slice(s1, at(1, "s1", "10.0.0.1")) }, []int64{1}},
		"added, then updated": {func(r *Resolver) { r.Slice(s1, at(1, "s1", "10.0.0.1")); r.Slice(s1, at(2, "s1", "10.0.0.2")) }, []int64{1, 2}},
		"two slices":          {func(r *Resolver) { r.Slice(s1, at(1, "s1", "10.0.0.1")); r.Slice(s2, at(2, "s2", "10.0.0.2")) }, []int64{1, 2}},
		"no annotation":       {func(r *Resolver) { r.Slice(s1, at(0, "s1", "10.0.0.1")) }, nil},
		"told twice":          {func(r *Resolver) { r.Slice(s1, at(1, "s1", "10.0.0.1")); r.Slice(s1, at(1, "s1", "10.0.0.1")) }, []int64{1}},
		"added and deleted":   {func(r *Resolver) { r.Slice(s1, at(1, "s1", "10.0.0.1")); r.Slice(s1, nil) }, nil},
		"added, deleted, added": {func(r *Resolver) {
			r.Slice(s1, at(1, "s1", "10.0.0.1"))
			r.Slice(s1, nil)
			r.Slice(s1, at(3, "s1", "10.0.0.1"))
		}, []int64{3}},
		"deleted alone":        {func(r *Resolver) { r.Slice(s1, nil) }, nil},
		"no row changed by it": {func(r *Resolver) { r.Slice(s1, at(1, "s1", "")) }, nil},
		"annotation can't be read": {func(r *Resolver) {
			s := at(1, "s1", "10.0.0.1")
			s.Annotations[corev1.EndpointsLastChangeTriggerTime] = "soon"
			r.Slice(s1, s)
		}, nil},
		"unchanged since last time": {func(r *Resolver) {
			r.Slice(s1, at(1, "s1", "10.0.0.1"))
			r.Delta()
			r.Slice(s1, at(1, "s1", "10.0.0.2"))
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := New(Config{IPv4: true})
			r.Service(nn, svc)
			r.Delta()
			c.tell(r)
			var got []int64
			for _, s := range r.Delta().Since {
				got = append(got, s.Unix())
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("since %v, want %v", got, c.want)
			}
		})
	}
}

// Counters, and what is Full.
func TestStats(t *testing.T) {
	r := New(Config{NodeName: "n1", IPv4: true})
	nn := types.NamespacedName{Namespace: "x", Name: "a"}
	local := corev1.ServiceInternalTrafficPolicyLocal
	svc := &corev1.Service{Spec: corev1.ServiceSpec{Type: "NodePort", ClusterIP: "10.96.0.1", InternalTrafficPolicy: &local, ExternalTrafficPolicy: "Local", Ports: []corev1.ServicePort{{Port: 80}, {Port: 81, Name: "b"}}}}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}}, AddressType: "IPv4"}
	port := int32(80)
	slice.Ports, slice.Endpoints = []discoveryv1.EndpointPort{{Port: &port}}, []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}}
	r.Service(nn, svc)
	r.Service(nn, svc)
	r.Slice(nn, slice)
	if got, want := r.Stats(), (Stats{ServiceChanges: 2, EndpointChanges: 1, ServicesPending: 1, SlicesPending: 1}); got != want {
		t.Errorf("before a delta: %+v, want %+v", got, want)
	}
	if d := r.Delta(); !d.Full || d.Node == nil {
		t.Errorf("the first delta is not full: %v", d.Lines())
	}
	want := Stats{ServiceChanges: 2, EndpointChanges: 1, NoLocal: NoLocal{Internal: [2]int32{1, 0}, External: [2]int32{1, 0}}}
	if got := r.Stats(); got != want {
		t.Errorf("after a delta: %+v, want %+v", got, want)
	}
	r.SetConfig(Config{NodeName: "n1", IPv4: true})
	if d := r.Delta(); !d.Empty() {
		t.Errorf("the same settings again: %v", d.Lines())
	}
	r.MarkAll()
	if d := r.Delta(); !d.Full || d.Node == nil || len(d.Frontends) != 2 {
		t.Errorf("the delta after MarkAll is not full: %v", d.Lines())
	}
}

// An object as large as etcd takes them costs a moment, not the machine.
func TestHugeObjects(t *testing.T) {
	nn := types.NamespacedName{Namespace: "x", Name: "a"}
	svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1"}}
	for i := range 20000 {
		svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1)})
		svc.Spec.ExternalIPs = append(svc.Spec.ExternalIPs, fmt.Sprintf("20.0.%d.%d", i/256, i%256), fmt.Sprint("junk", i))
	}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "a"}}, AddressType: "IPv4"}
	name, port := "p0", int32(80)
	slice.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &port}}
	for range 20000 {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{"10.0.0.1"}, TargetRef: &corev1.ObjectReference{UID: "u"}})
	}
	r := New(Config{IPv4: true, AllowExternalIPs: true})
	r.Service(nn, svc)
	r.Slice(nn, slice)
	d := r.Delta()
	if len(d.Frontends) == 0 || len(d.Frontends) > maxWishes {
		t.Errorf("%d frontends", len(d.Frontends))
	}
	if got := len(r.Notices()); got != maxNotices+1 {
		t.Errorf("%d notices, want %d", got, maxNotices+1)
	}
}
