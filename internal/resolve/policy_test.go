package resolve

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// oracle is kube-proxy's iptables mode for one port of one Service, written down from its rules, chain by chain, and in its
// terms (pkg/proxy/topology.go and pkg/proxy/iptables/proxier.go, v1.37). It shares nothing with the resolver.
type oracle struct {
	iTPLocal, eTPLocal    bool // eTPLocal already says that something outside can reach the Service
	external              bool // node port, external IP or load-balancer IP
	detector, masqAll     bool
	eps                   []oracleEndpoint
	cluster, local        []string
	hasAny, hasIn, hasOut bool
}

type oracleEndpoint struct {
	addr                              string
	here, ready, serving, terminating bool
}

// categorize is CategorizeEndpoints, without hints.
func (o *oracle) categorize() {
	add := func(only func(oracleEndpoint) bool) (out []string) {
		for _, e := range o.eps {
			if only(e) {
				out = append(out, e.addr)
			}
		}
		return out
	}
	fading := func(e oracleEndpoint) bool { return !e.ready && e.serving && e.terminating }
	if usesCluster := !o.iTPLocal || o.external; usesCluster {
		o.cluster = add(func(e oracleEndpoint) bool { return e.ready })
		if len(o.cluster) == 0 {
			o.cluster = add(fading)
		}
		o.hasAny = len(o.cluster) > 0
	}
	if usesLocal := o.iTPLocal || o.eTPLocal; usesLocal {
		o.hasAny = o.hasAny || len(add(func(e oracleEndpoint) bool { return e.ready || fading(e) })) > 0
		o.local = add(func(e oracleEndpoint) bool { return e.here && e.ready })
		if len(o.local) == 0 {
			o.local = add(func(e oracleEndpoint) bool { return e.here && fading(e) })
		}
	}
	o.hasIn = o.hasAny && !(o.iTPLocal && len(o.local) == 0)
	o.hasOut = o.hasAny && !(o.eTPLocal && len(o.local) == 0)
}

// send walks a packet through the chains: verdict, endpoints, masqueraded.
func (o *oracle) send(kind kind, from model.Origin) (string, []string, bool) {
	if kind == kindClusterIP {
		return o.services(from)
	}
	if !o.hasAny {
		return "reject", nil, false // filter KUBE-EXTERNAL-SERVICES
	}
	// nat KUBE-EXT
	if !o.eTPLocal {
		return "forward", o.cluster, true
	}
	if o.detector && from == model.FromPod {
		return "forward", o.cluster, false
	}
	if from == model.FromNode { // addrtype --src-type LOCAL: mark, then KUBE-SVC
		return "forward", o.cluster, true
	}
	if !o.hasOut {
		return "drop", nil, false // filter KUBE-EXTERNAL-SERVICES
	}
	return "forward", o.local, false
}

// services is nat and filter KUBE-SERVICES, and the head of KUBE-SVC or KUBE-SVL.
func (o *oracle) services(from model.Origin) (string, []string, bool) {
	switch {
	case !o.hasAny:
		return "reject", nil, false
	case !o.hasIn:
		return "drop", nil, false
	}
	masq := o.masqAll || o.detector && from != model.FromPod
	if o.iTPLocal {
		return "forward", o.local, masq
	}
	return "forward", o.cluster, masq
}

// placements are sets of endpoints that tell policies apart.
var placements = map[string][]oracleEndpoint{
	"none":                     nil,
	"here":                     {{"1", true, true, true, false}},
	"there":                    {{"1", false, true, true, false}},
	"both":                     {{"1", true, true, true, false}, {"2", false, true, true, false}},
	"here fading, there ready": {{"1", true, false, true, true}, {"2", false, true, true, false}},
	"here ready, there fading": {{"1", true, true, true, false}, {"2", false, false, true, true}},
	"both fading":              {{"1", true, false, true, true}, {"2", false, false, true, true}},
	"there fading":             {{"1", false, false, true, true}},
	"all dead":                 {{"1", true, false, false, true}, {"2", false, false, false, true}},
	"unready":                  {{"1", true, false, true, false}, {"2", false, false, false, false}},
	"ready while ending":       {{"1", true, true, true, true}, {"2", false, true, false, true}},
}

// Every kind of frontend × policies × detector × masqueradeAll × placement of endpoints × origin × family meets what kube-proxy's
// rules would do with it.
func TestPoliciesAgainstKubeProxy(t *testing.T) {
	cells := 0
	both := []bool{false, true}
	for place, eps := range placements {
		for i := range 1 << 5 {
			bit := func(n int) bool { return i>>n&1 == 1 }
			for _, v6 := range both {
				c := policyCase{place, eps, bit(0), bit(1), bit(2), bit(3), bit(4), v6}
				cells += c.run(t)
			}
		}
	}
	// 11 placements × 2 families × 16 settings × 3 origins × (4 kinds, or the ClusterIP alone)
	if want := len(placements) * 2 * 16 * 3 * (4 + 1); cells != want {
		t.Errorf("%d cells were compared, want %d", cells, want)
	}
}

type policyCase struct {
	place                                      string
	eps                                        []oracleEndpoint
	iTPLocal, eTPLocal, detector, masqAll, ext bool
	v6                                         bool
}

func (c policyCase) run(t *testing.T) int {
	o := oracle{iTPLocal: c.iTPLocal, eTPLocal: c.eTPLocal && c.ext, external: c.ext, detector: c.detector, masqAll: c.masqAll, eps: c.eps}
	o.categorize()
	state := All(c.config(), c.input())
	cells := 0
	for k, f := range state.Frontends {
		kind := map[model.Kind]kind{model.ClusterIP: kindClusterIP, model.NodePort: kindNodePort, model.ExternalIP: kindExternalIP, model.LoadBalancer: kindLoadBalancer}[f.About.Kind]
		for _, from := range model.Origins {
			cells++
			verdict, addrs, masq := o.send(kind, from)
			route := f.Routes[from]
			pool, ok := state.Pools[route.Pool]
			if !ok {
				t.Fatalf("%+v: %v leads to a pool that is not there", c, k)
			}
			got := "forward"
			if len(pool.Backends) == 0 {
				got = route.Else.String()
			}
			var ids []string
			for _, b := range pool.Backends {
				ids = append(ids, b.Addr.Addr().String()[len(b.Addr.Addr().String())-1:])
			}
			if got != verdict || !slices.Equal(ids, addrs) || verdict == "forward" && route.SNAT != masq {
				t.Errorf("%+v: %v from %v: %s to %v snat %v; kube-proxy: %s to %v snat %v", c, f.About.Kind, from, got, ids, route.SNAT, verdict, addrs, masq)
			}
		}
	}
	return cells
}

func (c policyCase) config() Config {
	cfg := Config{NodeName: "n1", IPv4: !c.v6, IPv6: c.v6, MasqueradeAll: c.masqAll, AllowExternalIPs: true}
	if c.detector {
		cfg.Detect = Detect{Mode: ByClusterCIDR, CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00:10::/32")}}
	}
	return cfg
}

func (c policyCase) input() Input {
	pick := func(v4, v6 string) string {
		if c.v6 {
			return v6
		}
		return v4
	}
	local := corev1.ServiceInternalTrafficPolicyLocal
	svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: pick("10.96.0.1", "fd00:96::1"), Ports: []corev1.ServicePort{{Port: 80}}}}
	if c.iTPLocal {
		svc.Spec.InternalTrafficPolicy = &local
	}
	if c.eTPLocal {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if c.ext {
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.Ports[0].NodePort = 30080
		svc.Spec.ExternalIPs = []string{pick("198.51.100.1", "2001:db8::1")}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: pick("203.0.113.1", "2001:db8::2")}}
	}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}}
	port := int32(8080)
	slice.AddressType, slice.Ports = discoveryv1.AddressType(familyName(c.v6)), []discoveryv1.EndpointPort{{Port: &port}}
	for _, e := range c.eps {
		node := "n2"
		if e.here {
			node = "n1"
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf(pick("10.0.1.%s", "fd00:10::%s"), e.addr)}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &e.ready, Serving: &e.serving, Terminating: &e.terminating},
		})
	}
	nn := types.NamespacedName{Namespace: "demo", Name: "web"}
	return Input{Services: map[types.NamespacedName]*corev1.Service{nn: svc}, Slices: map[types.NamespacedName]*discoveryv1.EndpointSlice{{Namespace: "demo", Name: "s"}: slice}}
}
