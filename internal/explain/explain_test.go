package explain

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

func addr(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// world is a small node: DNS in both scopes, a web with a local policy and nobody here, an empty Service.
func world() *model.State {
	s := model.NewState()
	s.Node = model.Node{Name: "n1", Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.11")}}
	dns := model.PoolID{Service: "kube-system/kube-dns", Port: "dns", Proto: model.UDP}
	s.Pools[dns] = model.Pool{ID: dns, Sticky: time.Hour, Backends: []model.Backend{
		{Addr: addr("10.244.1.10:5353"), Local: true}, {Addr: addr("10.244.2.10:5353")}}}
	key := model.Key{IP: netip.MustParseAddr("10.96.0.10"), Port: 53, Proto: model.UDP}
	s.Frontends[key] = model.Frontend{Key: key, Owned: true, About: model.About{Service: "kube-system/kube-dns", Port: "dns", Kind: model.ClusterIP},
		Routes: [3]model.Route{{Pool: dns, Else: model.Reject}, {Pool: dns, SNAT: true, Else: model.Reject}, {Pool: dns, SNAT: true, Else: model.Reject}}}

	web := model.PoolID{Service: "default/web", Proto: model.TCP}
	local := web
	local.Scope = model.Local
	s.Pools[web] = model.Pool{ID: web, Backends: []model.Backend{{Addr: addr("10.244.2.20:80")}}}
	s.Pools[local] = model.Pool{ID: local}
	port := model.Key{IP: netip.IPv4Unspecified(), Port: 30080, Proto: model.TCP}
	s.Frontends[port] = model.Frontend{Key: port, About: model.About{Service: "default/web", Kind: model.NodePort},
		Routes: [3]model.Route{{Pool: web, Else: model.Reject}, {Pool: web, SNAT: true, Else: model.Reject}, {Pool: local, Else: model.Drop}}}

	none := model.PoolID{Service: "default/none", Proto: model.TCP}
	s.Pools[none] = model.Pool{ID: none}
	vip := model.Key{IP: netip.MustParseAddr("10.96.0.99"), Port: 80, Proto: model.TCP}
	s.Frontends[vip] = model.Frontend{Key: vip, Owned: true, About: model.About{Service: "default/none", Kind: model.ClusterIP},
		Routes: [3]model.Route{{Pool: none, Else: model.Reject}, {Pool: none, Else: model.Reject}, {Pool: none, Else: model.Reject}}}
	return s
}

type reasons map[string][]resolve.Choice

func (r reasons) Why(n types.NamespacedName) []resolve.Choice { return r[n.String()] }

func TestStory(t *testing.T) {
	why := reasons{"kube-system/kube-dns": {
		{Port: "dns", Proto: model.UDP, Addr: addr("10.244.1.10:5353"), Node: "n1", InCluster: true, Reason: "ready"},
		{Port: "dns", Proto: model.UDP, Addr: addr("10.244.2.10:5353"), Node: "n2", InCluster: true, Reason: "ready"},
		{Port: "dns", Proto: model.UDP, Addr: addr("10.244.2.11:5353"), Node: "n2", Reason: "not ready"},
		{Port: "metrics", Proto: model.TCP, Addr: addr("10.244.2.10:9153"), Node: "n2", InCluster: true, Reason: "ready"},
	}}
	for _, tc := range []struct{ packet, want string }{
		{"10.244.3.5 -> 10.96.0.10:53/udp", `
packet     10.244.3.5 -> 10.96.0.10:53/udp
origin     pod: 10.244.3.5 is in 10.244.0.0/16
frontend   10.96.0.10:53/udp, ClusterIP of kube-system/kube-dns:dns
route      from pod: pool kube-system/kube-dns:dns/udp v4 cluster, the client is seen by the backend, refuse while it is empty
answer     forward to one of 2 backends, which sees 10.244.3.5; always the same for one client, until it stays away for 1h0m0s

    ENDPOINT          NODE  POOL     REASON
->  10.244.1.10:5353  n1    cluster  ready
->  10.244.2.10:5353  n2    cluster  ready
    10.244.2.11:5353  n2    out      not ready
`},
		{"10.244.1.10 10.96.0.10:53/UDP", `
packet     10.244.1.10 -> 10.96.0.10:53/udp
origin     pod: 10.244.1.10 is in 10.244.0.0/16
frontend   10.96.0.10:53/udp, ClusterIP of kube-system/kube-dns:dns
route      from pod: pool kube-system/kube-dns:dns/udp v4 cluster, the client is seen by the backend, refuse while it is empty
answer     forward to one of 2 backends, which sees 10.244.1.10, or an address of this node where it is the client itself; always the same for one client, until it stays away for 1h0m0s

    ENDPOINT          NODE  POOL     REASON
->  10.244.1.10:5353  n1    cluster  ready
->  10.244.2.10:5353  n2    cluster  ready
    10.244.2.11:5353  n2    out      not ready
`},
		{"198.51.100.7:4000 to 192.0.2.11:30080", `
packet     198.51.100.7:4000 -> 192.0.2.11:30080/tcp
origin     outside: 198.51.100.7 is neither a pod nor this node
frontend   0.0.0.0:30080/tcp, NodePort of default/web (192.0.2.11 is an address of this node)
route      from outside: pool default/web/tcp v4 local, the client is seen by the backend, silence while it is empty
answer     drop in silence: default/web has no endpoint on this node, and its policy is Local
`},
		{"192.0.2.11:30080", `
packet     192.0.2.11 -> 192.0.2.11:30080/tcp
origin     node: this node itself sends it
frontend   0.0.0.0:30080/tcp, NodePort of default/web (192.0.2.11 is an address of this node)
route      from node: pool default/web/tcp v4 cluster, the client is hidden from the backend, refuse while it is empty
answer     forward to 10.244.2.20:80, which sees an address of this node
`},
		{"10.244.3.5->10.96.0.99:80", `
packet     10.244.3.5 -> 10.96.0.99:80/tcp
origin     pod: 10.244.3.5 is in 10.244.0.0/16
frontend   10.96.0.99:80/tcp, ClusterIP of default/none
route      from pod: pool default/none/tcp v4 cluster, the client is seen by the backend, refuse while it is empty
answer     refuse with a TCP reset: default/none has no endpoint
`},
		{"198.51.100.7 -> 203.0.113.9:80", `
packet     198.51.100.7 -> 203.0.113.9:80/tcp
origin     outside: 198.51.100.7 is neither a pod nor this node
answer     pass: no Service has this address and port; fairlead has no part in it
`},
		{"198.51.100.7 -> 10.96.0.99:22", `
packet     198.51.100.7 -> 10.96.0.99:22/tcp
origin     outside: 198.51.100.7 is neither a pod nor this node
answer     refuse with a TCP reset: 10.96.0.99 is the ClusterIP of default/none, which has no such port
`},
	} {
		q, err := Parse(strings.Fields(tc.packet)...)
		if err != nil {
			t.Error(err)
			continue
		}
		if diff := cmp.Diff(strings.TrimPrefix(tc.want, "\n"), Story(world(), why, q)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", tc.packet, diff)
		}
	}
}

// TestRelay: on loopback addresses the relay of localhost answers for TCP, and nobody for the rest.
func TestRelay(t *testing.T) {
	s := world()
	s.Node.LocalhostRelay = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	udp := s.Frontends[model.Key{IP: netip.IPv4Unspecified(), Port: 30080, Proto: model.TCP}]
	udp.Key.Proto = model.UDP
	s.Frontends[udp.Key] = udp
	for packet, want := range map[string]string{
		"127.0.0.1 -> 127.0.0.1:30080": `
packet     127.0.0.1 -> 127.0.0.1:30080/tcp
origin     node: this node itself sends it
frontend   0.0.0.0:30080/tcp, NodePort of default/web (127.0.0.1 is an address of this node)
route      by the relay of localhost, in the agent: pool default/web/tcp v4 cluster, the client is hidden from the backend, refuse while it is empty
answer     forward to 10.244.2.20:80, which sees an address of this node
`,
		"127.0.0.1 -> 127.0.0.2:30080/udp": `
packet     127.0.0.1 -> 127.0.0.2:30080/udp
origin     node: this node itself sends it
frontend   0.0.0.0:30080/udp, NodePort of default/web (127.0.0.2 is an address of this node)
route      none on loopback addresses
answer     refuse with ICMP port unreachable: on loopback addresses NodePorts are relayed, which is for TCP alone
`,
		"127.0.0.1 -> 127.0.0.2:30080": `
packet     127.0.0.1 -> 127.0.0.2:30080/tcp
origin     node: this node itself sends it
answer     pass: of the loopback addresses, NodePorts answer on 127.0.0.1 only; fairlead has no part in it
`,
	} {
		q, err := Parse(strings.Fields(packet)...)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(strings.TrimPrefix(want, "\n"), Story(s, reasons{}, q)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", packet, diff)
		}
	}
}

// TestStoryOfKernel has no reasons to tell.
func TestStoryOfKernel(t *testing.T) {
	q, err := Parse("10.244.3.5 -> 10.96.0.10:53/udp")
	if err != nil {
		t.Fatal(err)
	}
	got := Story(world(), nil, q)
	if want := "->  10.244.1.10:5353*\n->  10.244.2.10:5353\n"; !strings.HasSuffix(got, want) {
		t.Errorf("got\n%swant at the end\n%s", got, want)
	}
}

// TestInterface: pods that are known by interface.
func TestInterface(t *testing.T) {
	s := world()
	s.Node.Pods, s.Node.PodInterfaces = nil, []string{"cali+"}
	q, err := Parse("10.244.3.5 -> 10.96.0.10:53/udp")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := Story(s, nil, q), "pods are known by their interface (cali+): say which one it comes in by"; !strings.Contains(got, want) {
		t.Errorf("got\n%swant in it %q", got, want)
	}
	q.In = "cali123"
	if got, want := Story(s, nil, q), "origin     pod: it came in by cali123"; !strings.Contains(got, want) {
		t.Errorf("got\n%swant in it %q", got, want)
	}
}

func TestParseRefused(t *testing.T) {
	for words, want := range map[string]string{
		"":                              `packet "": want [SOURCE[:PORT] ->] DESTINATION:PORT[/tcp|udp|sctp]`,
		"a b c":                         `packet "a b c": want [SOURCE[:PORT] ->] DESTINATION:PORT[/tcp|udp|sctp]`,
		"10.0.0.1 -> 10.0.0.2":          `destination "10.0.0.2": it needs a port, as in 10.0.0.2:80`,
		"10.0.0.1 -> fd00::1":           `destination "fd00::1": it needs a port, as in [fd00::1]:80`,
		"10.0.0.1 -> web:80":            `destination "web:80": want an IP address, as 10.96.0.10:53 or [fd00::a]:53`,
		"pod -> 10.0.0.1:80":            `source "pod": want an IP address, as 10.96.0.10:53 or [fd00::a]:53`,
		"10.0.0.1 -> 10.0.0.2:99999":    `destination "10.0.0.2:99999": port "99999": want a number up to 65535`,
		"10.0.0.1 -> 10.0.0.2:http":     `destination "10.0.0.2:http": port "http": want a number up to 65535`,
		"10.0.0.1 -> 10.0.0.2:80/icmp":  `protocol "icmp": want tcp, udp or sctp`,
		"10.0.0.1 -> [fd00::1]:80/sctp": `10.0.0.1 and fd00::1 are of two families: no packet has both`,
	} {
		q, err := Parse(strings.Fields(words)...)
		if err == nil {
			err = q.Check()
		}
		if err == nil || err.Error() != want {
			t.Errorf("%q: got %v, want %s", words, err, want)
		}
	}
}

// FuzzParse: whatever is typed gets a story or one line.
func FuzzParse(f *testing.F) {
	f.Add("10.244.1.5 -> 10.96.0.10:53/udp")
	f.Add("[fd00::1%eth0]:1 → [::ffff:1.2.3.4]:80")
	f.Fuzz(func(t *testing.T, text string) {
		q, err := Parse(text)
		if err == nil {
			err = q.Check()
		}
		if err == nil {
			Story(world(), nil, q)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: two lines: %v", text, err)
		}
	})
}
