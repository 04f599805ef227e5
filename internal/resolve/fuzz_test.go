package resolve

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
)

// Whatever an API server or a file says, nothing panics, the twin agrees, and no unsafe address is served.
// Run with go test -fuzz FuzzObjects for more than the seeds.
func FuzzObjects(f *testing.F) {
	seeds := [][3]string{
		{`{}`, `{}`, `{}`},
		{
			`{"spec":{"clusterIP":"10.96.0.1","type":"LoadBalancer","externalTrafficPolicy":"Local","healthCheckNodePort":-1,"sessionAffinity":"ClientIP","sessionAffinityConfig":{"clientIP":{"timeoutSeconds":2147483647}},"ports":[{"port":80,"nodePort":-2147483648},{"port":2147483647}],"externalIPs":["::ffff:127.0.0.1","1.2.3.4"],"loadBalancerSourceRanges":["0.0.0.0/0","::/0","/","1.2.3.4/-1"]},"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.1","ipMode":"Proxy"},{"ip":"203.0.113.2"}]}}}`,
			`{"metadata":{"labels":{"kubernetes.io/service-name":"web"},"resourceVersion":"-1"},"addressType":"IPv4","ports":[{},{"port":0},{"port":8080,"protocol":""},{"name":null,"port":-5}],"endpoints":[{},{"addresses":[]},{"addresses":["10.0.0.1"],"hints":{"forZones":null,"forNodes":[{}]}},{"addresses":["010.0.0.01"],"targetRef":{},"nodeName":""}]}`,
			`{"metadata":{"labels":{"topology.kubernetes.io/zone":""}},"spec":{"podCIDRs":["","10.0.0.0/99"]},"status":{"addresses":[{"type":"InternalIP","address":"::"},{"type":"ExternalIP","address":"1.2.3.4"}]}}`,
		},
		{
			`{"metadata":{"annotations":{"fairlead.io/topology-keys":",,*,kubernetes.io/hostname,é"}},"spec":{"clusterIPs":["fd00::1","10.0.0.1",""],"ipFamilies":["IPv6",""],"ports":[{"name":"a","protocol":"SCTP","port":1},{"name":"a","protocol":"UDP","port":1},{"name":"a","protocol":"UDP","port":1}],"internalTrafficPolicy":"Local"}}`,
			`{"metadata":{"labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv6","ports":[{"name":"a","protocol":"SCTP","port":65535}],"endpoints":[{"addresses":["fe80::1%x"]},{"addresses":["fd00::2"],"conditions":{"ready":false,"terminating":true}}]}`,
			`{"spec":{"podCIDR":"::/0"}}`,
		},
	}
	for _, s := range seeds {
		f.Add(s[0], s[1], s[2])
	}
	f.Fuzz(func(t *testing.T, svcText, sliceText, nodeText string) {
		svc, slice, node := &corev1.Service{}, &discoveryv1.EndpointSlice{}, &corev1.Node{}
		if json.Unmarshal([]byte(svcText), svc) != nil || json.Unmarshal([]byte(sliceText), slice) != nil || json.Unmarshal([]byte(nodeText), node) != nil {
			t.Skip("not objects")
		}
		nn := types.NamespacedName{Namespace: "demo", Name: "web"}
		c := Config{NodeName: "n1", IPv4: true, IPv6: true, AllowExternalIPs: true, Detect: Detect{Mode: ByNodeCIDR}}
		in := Input{map[types.NamespacedName]*corev1.Service{nn: svc}, map[types.NamespacedName]*discoveryv1.EndpointSlice{nn: slice}, map[string]*corev1.Node{"n1": node}, []netip.Addr{netip.MustParseAddr("192.0.2.11"), {}}, nil}
		r := New(c)
		r.Node("n1", node)
		r.Addrs(in.Addrs)
		r.Slice(nn, slice)
		r.Service(nn, svc)
		state := model.NewState()
		state.Apply(r.Delta())
		if want := All(c, in); !reflect.DeepEqual(state, want) {
			t.Fatalf("incremental:\n%s\nfrom scratch:\n%s", state.Table(), want.Table())
		}
		safeState(t, state)
		r.Why(nn)
		r.Notices()
		r.Service(nn, nil)
		r.Slice(nn, nil)
		state.Apply(r.Delta())
		if len(state.Frontends)+len(state.Pools)+len(state.Checks) > 0 || len(r.services)+len(r.slices)+len(r.claims.keys.first)+len(r.claims.clusterIP.first)+len(r.claims.external.first)+len(r.claims.health.first)+len(r.board.held) > 0 {
			t.Fatalf("something stays of what is gone:\n%s", state.Table())
		}
	})
}

// safeState fails if a dataplane is handed what it must never be.
func safeState(t interface{ Fatalf(string, ...any) }, s *model.State) {
	for k, f := range s.Frontends {
		nodePort := f.About.Kind == model.NodePort
		if k != f.Key || k.Port == 0 || !k.IP.IsValid() || k.IP.Is4In6() || k.IP.Zone() != "" || k.IP.IsUnspecified() != nodePort || !nodePort && unsafeAddr(k.IP) != "" {
			t.Fatalf("unsafe frontend %+v", f)
		}
		for _, r := range f.Routes {
			if _, ok := s.Pools[r.Pool]; !ok || r.Else != model.Reject && r.Else != model.Drop {
				t.Fatalf("%v: bad route %+v", k, r)
			}
		}
	}
	for id, p := range s.Pools {
		for _, b := range append(p.Backends[:len(p.Backends):len(p.Backends)], p.Draining...) {
			if b.Addr.Port() == 0 || unsafeAddr(b.Addr.Addr()) != "" || b.Addr.Addr().Is6() != id.V6 || b.Addr.Addr().Is4In6() || b.Addr.Addr().Zone() != "" {
				t.Fatalf("%v: unsafe backend %v", id, b)
			}
		}
	}
}

// A nil object and an empty one are never a reason to fall over.
func TestNilAndEmpty(t *testing.T) {
	r := New(Config{})
	nn := types.NamespacedName{}
	r.Service(nn, nil)
	r.Slice(nn, nil)
	r.Node("", nil)
	r.Addrs(nil)
	r.ServiceCIDR("", nil)
	r.Delta()
	r.Service(nn, &corev1.Service{})
	r.Slice(nn, &discoveryv1.EndpointSlice{})
	r.Node("", &corev1.Node{})
	r.Addrs([]netip.Addr{{}})
	r.ServiceCIDR("", &networkingv1.ServiceCIDR{})
	if d := r.Delta(); len(d.Lines()) > 0 {
		t.Errorf("nothing was told, but: %v", d.Lines())
	}
	All(Config{IPv4: true}, Input{Services: map[types.NamespacedName]*corev1.Service{nn: nil}, Slices: map[types.NamespacedName]*discoveryv1.EndpointSlice{nn: nil}, Nodes: map[string]*corev1.Node{"": nil}, CIDRs: map[string]*networkingv1.ServiceCIDR{"": nil}})
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"1.2.3.4": "1.2.3.4", " 1.2.3.4 ": "1.2.3.4", "001.02.3.04": "1.2.3.4", "0.0.0.0": "0.0.0.0", "000.000.0.00": "0.0.0.0",
		"fd00::1": "fd00::1", "::ffff:1.2.3.4": "1.2.3.4", "::ffff:01.002.3.4": "1.2.3.4", "FD00::A": "fd00::a",
		"": "", "1.2.3": "", "1.2.3.4.5": "", "1.2.3.256": "", "fe80::1%eth0": "", "1..2.3": "", ".": "", strings.Repeat("0", 70) + "1.2.3.4": "", "localhost": "",
	} {
		got, ok := parseAddr(text)
		if ok != (want != "") || ok && got.String() != want {
			t.Errorf("address %q: %v %v, want %q", text, got, ok, want)
		}
	}
	for text, want := range map[string]string{
		"10.0.0.0/8": "10.0.0.0/8", " 010.1.2.3/8 ": "10.0.0.0/8", "fd00::1/64": "fd00::/64", "0.0.0.0/0": "0.0.0.0/0",
		"10.0.0.0": "", "10.0.0.0/33": "", "10.0.0.0/-1": "", "/8": "", "": "", "::ffff:10.0.0.0/104": "", "10.0.0.0/8/8": "", "fd00::/x": "", strings.Repeat("0", 70) + "1.2.3.4/8": "",
	} {
		got, ok := parsePrefix(text)
		if ok != (want != "") || ok && got.String() != want {
			t.Errorf("prefix %q: %v %v, want %q", text, got, ok, want)
		}
	}
}
