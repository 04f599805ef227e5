package dptest

import (
	"net/netip"
	"time"

	"fairlead/internal/model"
)

// Golden is a small cluster with one of each, as a Full delta: dataplanes compare what the kernel prints of it with a file in their
// testdata.
func Golden(v6 bool) model.Delta {
	ip := func(v4, six string) netip.Addr {
		if v6 {
			return netip.MustParseAddr(six)
		}
		return netip.MustParseAddr(v4)
	}
	n := model.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")},
		Pods:         []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/48")},
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:96::/112")}}
	d := model.Delta{Full: true, Node: &n, Checks: []model.Check{{Service: "default/web", Port: 32000}}}
	id := func(service, port string, s model.Scope) model.PoolID {
		return model.PoolID{Service: service, Port: port, Proto: model.TCP, V6: v6, Scope: s}
	}
	routes := func(c, l model.PoolID, snatPod bool, other model.Verdict) (r [3]model.Route) {
		r[0] = model.Route{Pool: c, SNAT: snatPod, Else: model.Reject}
		r[1] = model.Route{Pool: c, SNAT: true, Else: model.Reject}
		r[2] = model.Route{Pool: l, SNAT: c == l, Else: other}
		return r
	}
	add := func(kind model.Kind, service, port string, a netip.Addr, n uint16, r [3]model.Route, allow ...netip.Prefix) {
		d.Frontends = append(d.Frontends, model.Frontend{Key: model.Key{IP: a, Port: n, Proto: model.TCP}, Routes: r, Allow: allow,
			Owned: kind == model.ClusterIP, About: model.About{Service: service, Port: port, Kind: kind}})
	}
	near, far := netip.AddrPortFrom(ip("10.244.1.10", "fd00:244:0:1::10"), 8080), netip.AddrPortFrom(ip("10.244.2.10", "fd00:244:0:2::10"), 8080)
	web, webLocal := id("default/web", "http", model.Cluster), id("default/web", "http", model.Local)
	d.Pools = append(d.Pools,
		model.Pool{ID: web, Backends: []model.Backend{{Addr: near, Local: true}, {Addr: far}}},
		model.Pool{ID: webLocal, Backends: []model.Backend{{Addr: near, Local: true}}},
		model.Pool{ID: id("default/sticky", "", model.Cluster), Sticky: 3 * time.Hour, Backends: []model.Backend{{Addr: near, Local: true}, {Addr: far}}},
		model.Pool{ID: id("default/remote", "", model.Cluster), Backends: []model.Backend{{Addr: far}}},
		model.Pool{ID: id("default/remote", "", model.Local)})
	add(model.ClusterIP, "default/web", "http", ip("10.96.0.10", "fd00:96::10"), 80, routes(web, web, false, model.Reject))
	add(model.NodePort, "default/web", "http", model.Unspecified(v6), 30080, routes(web, webLocal, false, model.Drop))
	add(model.LoadBalancer, "default/web", "http", ip("203.0.113.1", "2001:db8:3::1"), 80, routes(web, webLocal, false, model.Drop),
		netip.PrefixFrom(ip("198.51.100.0", "2001:db8:5::"), map[bool]int{false: 24, true: 64}[v6]))
	sticky := id("default/sticky", "", model.Cluster)
	add(model.ClusterIP, "default/sticky", "", ip("10.96.0.11", "fd00:96::11"), 443, routes(sticky, sticky, false, model.Reject))
	remote, none := id("default/remote", "", model.Cluster), id("default/remote", "", model.Local)
	add(model.ClusterIP, "default/remote", "", ip("10.96.0.12", "fd00:96::12"), 80, routes(remote, remote, false, model.Reject))
	add(model.ExternalIP, "default/remote", "", ip("203.0.113.2", "2001:db8:3::2"), 80, routes(remote, none, false, model.Drop))
	empty := id("default/empty", "", model.Cluster)
	add(model.ClusterIP, "default/empty", "", ip("10.96.0.13", "fd00:96::13"), 80, routes(empty, empty, false, model.Reject))
	add(model.NodePort, "default/empty", "", model.Unspecified(v6), 30081, routes(empty, empty, true, model.Reject))
	return d
}
