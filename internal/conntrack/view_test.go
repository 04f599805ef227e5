package conntrack

import (
	"net/netip"
	"testing"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

func key(s string, p model.Proto) model.Key {
	ap := netip.MustParseAddrPort(s)
	return model.Key{IP: ap.Addr(), Port: ap.Port(), Proto: p}
}

func poolID(name string, p model.Proto, v6 bool, s model.Scope) model.PoolID {
	return model.PoolID{Service: name, Proto: p, V6: v6, Scope: s}
}

func pool(id model.PoolID, addrs ...string) model.Pool {
	p := model.Pool{ID: id}
	for _, a := range addrs {
		p.Backends = append(p.Backends, model.Backend{Addr: netip.MustParseAddrPort(a)})
	}
	return p
}

// front is a frontend with all origins at one pool; with a local pool for strangers when local is true.
func front(k model.Key, id model.PoolID, local bool) model.Frontend {
	f := model.Frontend{Key: k, About: model.About{Service: id.Service}}
	for o := range f.Routes {
		f.Routes[o] = model.Route{Pool: id, Else: model.Reject}
	}
	if local {
		id.Scope = model.Local
		f.Routes[model.FromOutside] = model.Route{Pool: id, Else: model.Drop}
	}
	return f
}

func node(addrs ...string) *model.Node {
	n := &model.Node{Name: "n1"}
	for _, a := range addrs {
		n.Addrs = append(n.Addrs, netip.MustParseAddr(a))
	}
	return n
}

// dns is one Service of each kind of frontend, in UDP; sig the same in SCTP, web in TCP.
func world() model.Delta {
	d := model.Delta{Full: true, Node: node("127.0.0.1", "192.0.2.11")}
	for _, s := range []struct {
		name  string
		proto model.Proto
		ip    string
	}{{"ns/dns", model.UDP, "10.96.0.10:53"}, {"ns/sig", model.SCTP, "10.96.0.10:53"}, {"ns/web", model.TCP, "10.96.0.10:53"}} {
		id := poolID(s.name, s.proto, false, model.Cluster)
		p := pool(id, "10.244.1.10:5353", "10.244.2.10:5353")
		p.Draining = []model.Backend{{Addr: netip.MustParseAddrPort("10.244.3.10:5353")}}
		d.Pools = append(d.Pools, p)
		for _, k := range []string{s.ip, "203.0.113.1:53", "198.51.100.1:53", "0.0.0.0:30053"} {
			d.Frontends = append(d.Frontends, front(key(k, s.proto), id, false))
		}
	}
	id := poolID("ns/none", model.UDP, false, model.Cluster)
	d.Pools = append(d.Pools, pool(id))
	d.Frontends = append(d.Frontends, front(key("10.96.0.99:99", model.UDP), id, false))
	id = poolID("ns/local", model.UDP, false, model.Cluster)
	local := id
	local.Scope = model.Local
	d.Pools = append(d.Pools, pool(id, "10.244.1.20:1", "10.244.2.20:1"), pool(local, "10.244.1.20:1"))
	d.Frontends = append(d.Frontends, front(key("203.0.113.2:1", model.UDP), id, true))
	id = poolID("ns/dns", model.UDP, true, model.Cluster)
	d.Pools = append(d.Pools, pool(id, "[fd00:244::1]:5353"))
	d.Frontends = append(d.Frontends, front(key("[fd00:96::10]:53", model.UDP), id, false))
	return d
}

func TestStale(t *testing.T) {
	v := newView()
	v.apply(tracked(world()))
	gone := map[model.Key]bool{
		key("10.96.0.50:53", model.UDP):    true,
		key("10.96.0.10:54", model.UDP):    true,
		key("0.0.0.0:30099", model.UDP):    true,
		key("192.0.2.77:30053", model.UDP): true,
	}
	const udp, sctp, tcp = 17, 132, 6
	for _, c := range []struct {
		proto     uint8
		dst, from string
		want      bool
		why       string
	}{
		{udp, "10.96.0.10:53", "10.244.1.10:5353", false, "a backend"},
		{udp, "10.96.0.10:53", "10.244.3.10:5353", false, "a draining backend"},
		{udp, "10.96.0.10:53", "10.244.9.10:5353", true, "a backend that is gone"},
		{udp, "203.0.113.1:53", "10.244.9.10:5353", true, "the same, LB"},
		{udp, "198.51.100.1:53", "10.244.9.10:5353", true, "the same, external IP"},
		{udp, "192.0.2.11:30053", "10.244.9.10:5353", true, "the same, NodePort"},
		{udp, "192.0.2.11:30053", "10.244.2.10:5353", false, "a backend, NodePort"},
		{udp, "10.96.0.10:53", "10.244.1.10:5354", true, "a backend with another port"},
		{udp, "10.96.0.10:53", "10.96.0.10:53", true, "untranslated"},
		{udp, "10.96.0.99:99", "10.96.0.99:99", true, "untranslated, no endpoint"},
		{udp, "10.96.0.99:99", "10.244.1.10:5353", true, "scaled to zero"},
		{udp, "10.96.0.10:55", "10.244.9.10:5353", false, "a port that is not the Service's"},
		{udp, "192.0.2.99:30053", "10.244.9.10:5353", false, "a NodePort of another machine"},
		{udp, "127.0.0.1:30053", "10.244.9.10:5353", false, "loopback, which takes no NodePort"},
		{udp, "8.8.8.8:53", "8.8.8.8:53", false, "nothing of ours"},
		{udp, "203.0.113.2:1", "10.244.2.20:1", false, "in one pool of two"},
		{udp, "203.0.113.2:1", "10.244.3.20:1", true, "in no pool of two"},
		{sctp, "10.96.0.10:53", "10.244.9.10:5353", true, "SCTP"},
		{sctp, "10.96.0.10:53", "10.244.1.10:5353", false, "SCTP, a backend"},
		{tcp, "10.96.0.10:53", "10.244.9.10:5353", false, "TCP"},
		{udp, "[fd00:96::10]:53", "[fd00:244::2]:5353", true, "IPv6"},
		{udp, "[fd00:96::10]:53", "[fd00:244::1]:5353", false, "IPv6, a backend"},
		{udp, "10.96.0.50:53", "10.244.1.10:5353", true, "Service deleted"},
		{udp, "10.96.0.50:53", "10.96.0.50:53", false, "Service deleted, untranslated"},
		{udp, "10.96.0.10:54", "10.244.1.10:5353", true, "one port deleted"},
		{udp, "192.0.2.11:30099", "10.244.1.10:5353", true, "NodePort deleted"},
		{udp, "192.0.2.99:30099", "10.244.1.10:5353", false, "NodePort deleted, another machine"},
		{udp, "192.0.2.77:30053", "10.244.1.10:5353", true, "an address that the node had"},
		{sctp, "10.96.0.50:53", "10.244.1.10:5353", false, "the same port in another protocol was deleted"},
	} {
		f := kernel.Flow{Proto: c.proto, Src: netip.MustParseAddrPort("192.0.2.1:1000"),
			Dst: netip.MustParseAddrPort(c.dst), ReplySrc: netip.MustParseAddrPort(c.from)}
		if got := v.stale(f, gone); got != c.want {
			t.Errorf("%d %s answered by %s: stale %v, want %v (%s)", c.proto, c.dst, c.from, got, c.want, c.why)
		}
		f.Zone = true
		if v.stale(f, gone) {
			t.Errorf("%s: stale in another zone", c.why)
		}
	}
}

func TestLoopbackNodePort(t *testing.T) {
	d := world()
	d.Node.LocalhostPort = true
	v := newView()
	v.apply(tracked(d))
	f := kernel.Flow{Proto: 17, Dst: netip.MustParseAddrPort("127.0.0.1:30053"), ReplySrc: netip.MustParseAddrPort("10.244.9.10:5353")}
	if !v.stale(f, nil) {
		t.Error("NodePort on loopback is not seen")
	}
}

// What a change makes us look at: nothing more than needed, and never too little.
func TestApply(t *testing.T) {
	udp4, sctp4, udp6 := kind{false, model.UDP}, kind{false, model.SCTP}, kind{true, model.UDP}
	dns, dnsKey := poolID("ns/dns", model.UDP, false, model.Cluster), key("10.96.0.10:53", model.UDP)
	drained := pool(dns, "10.244.2.10:5353", "10.244.4.10:5353")
	drained.Draining = []model.Backend{{Addr: netip.MustParseAddrPort("10.244.1.10:5353")}, {Addr: netip.MustParseAddrPort("10.244.3.10:5353")}}
	more := pool(dns, "10.244.1.10:5353", "10.244.2.10:5353", "10.244.3.10:5353", "10.244.4.10:5353")
	for _, c := range []struct {
		name  string
		d     model.Delta
		kinds []kind
		gone  []model.Key
	}{
		{"full", world(), []kind{udp4, sctp4, udp6}, nil},
		{"TCP only", model.Delta{Pools: []model.Pool{pool(poolID("ns/web", model.TCP, false, 0))}}, nil, nil},
		{"a check", model.Delta{Checks: []model.Check{{Service: "ns/x"}}}, nil, nil},
		{"a backend more", model.Delta{Pools: []model.Pool{more}}, nil, nil},
		{"a backend drains", model.Delta{Pools: []model.Pool{drained}}, nil, nil},
		{"a backend less", model.Delta{Pools: []model.Pool{pool(dns, "10.244.1.10:5353")}}, []kind{udp4}, nil},
		{"first backend", model.Delta{Pools: []model.Pool{pool(poolID("ns/none", model.UDP, false, 0), "10.244.1.1:1")}}, []kind{udp4}, nil},
		{"new frontend", model.Delta{Frontends: []model.Frontend{front(key("10.96.0.11:53", model.UDP), dns, false)}}, []kind{udp4}, nil},
		{"same frontend", model.Delta{Frontends: []model.Frontend{front(dnsKey, dns, false)}}, nil, nil},
		{"frontend to another pool", model.Delta{Frontends: []model.Frontend{front(dnsKey, dns, true)}}, []kind{udp4}, nil},
		{"frontend gone", model.Delta{GoneFrontends: []model.Key{dnsKey}}, []kind{udp4}, []model.Key{dnsKey}},
		{"unknown frontend gone", model.Delta{GoneFrontends: []model.Key{key("10.96.7.7:53", model.UDP)}}, nil, nil},
		{"pool gone", model.Delta{GonePools: []model.PoolID{poolID("ns/sig", model.SCTP, false, 0)}}, []kind{sctp4}, nil},
		{"node as it was", model.Delta{Node: node("127.0.0.1", "192.0.2.11")}, nil, nil},
		{"address lost", model.Delta{Node: node("127.0.0.1")}, []kind{udp4, sctp4},
			[]model.Key{key("192.0.2.11:30053", model.UDP), key("192.0.2.11:30053", model.SCTP)}},
		{"address more", model.Delta{Node: node("127.0.0.1", "192.0.2.11", "192.0.2.12")}, []kind{udp4, sctp4}, nil},
		{"full, all gone but one", model.Delta{Full: true, Node: node("127.0.0.1", "192.0.2.11"), Frontends: []model.Frontend{front(dnsKey, dns, false)}},
			[]kind{udp4, sctp4, udp6}, []model.Key{key("[fd00:96::10]:53", model.UDP)}},
	} {
		v := newView()
		v.apply(tracked(world()))
		d := tracked(c.d)
		var w work
		if !d.Empty() {
			w = v.apply(d)
		}
		if len(w.kinds) != len(c.kinds) {
			t.Errorf("%s: look at %v, want %v", c.name, w.kinds, c.kinds)
		}
		for _, k := range c.kinds {
			if !w.kinds[k] {
				t.Errorf("%s: look at %v, want %v", c.name, w.kinds, c.kinds)
			}
		}
		for _, k := range c.gone {
			if !w.gone[k] {
				t.Errorf("%s: gone %v, want %v", c.name, w.gone, c.gone)
			}
		}
		if len(c.gone) == 0 && len(w.gone) > 0 {
			t.Errorf("%s: gone %v, want none", c.name, w.gone)
		}
	}
}
