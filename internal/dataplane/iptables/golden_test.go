package iptables

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the goldens anew")

// golden is a small cluster with one of each: what the rules look like is in testdata, in the words of iptables-save.
func golden(v6 bool) model.Delta {
	ip := func(v4, six string) netip.Addr {
		if v6 {
			return netip.MustParseAddr(six)
		}
		return netip.MustParseAddr(v4)
	}
	n := model.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")},
		Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("fd00:244::/48")}, LocalhostPort: true}
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

// What iptables-save prints of the golden cluster is what testdata says, whichever back end wrote it.
func TestGolden(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, flavour := range []string{flavourNFT, flavourLegacy} {
			t.Run(fmt.Sprintf("%s v6=%v", flavour, v6), func(t *testing.T) {
				got := goldenSaved(t, golden(v6), flavour, v6)
				file := filepath.Join("testdata", map[bool]string{false: "golden4.rules", true: "golden6.rules"}[v6])
				if *update {
					if err := os.WriteFile(file, got, 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(string(want), string(got)); d != "" {
					t.Errorf("-want +got:\n%s", d)
				}
			})
		}
	}
}

var noise = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

// goldenSaved applies the delta in a namespace of its own and returns what iptables-save says, without times and counters, the
// chains in alphabetical order (the two back ends list them in different orders).
func goldenSaved(t *testing.T, delta model.Delta, flavour string, v6 bool) []byte {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var out bytes.Buffer
	err = ns.Do(func() error {
		d, err := New(context.Background(), Config{V4: true, V6: true, MasqueradeBit: 14, Backend: flavour})
		if err != nil {
			return err
		}
		defer d.Close()
		d.cfg.counters = false // not every kernel has them
		if err := d.Apply(context.Background(), delta); err != nil {
			return err
		}
		for _, table := range []string{"filter", "nat"} {
			b, err := exec.Command(saveProgram(flavour, v6), "-t", table).Output()
			if err != nil {
				return fmt.Errorf("iptables-save: %w", err)
			}
			out.WriteString(byChain(string(noise.ReplaceAll(b, nil))))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func saveProgram(flavour string, v6 bool) string {
	name := "iptables"
	if v6 {
		name = "ip6tables"
	}
	if flavour == flavourNFT {
		return name + "-nft-save"
	}
	return name + "-legacy-save"
}

// byChain groups the lines of iptables-save by chain.
func byChain(s string) string {
	rules := map[string][]string{}
	var head, order []string
	for _, l := range strings.Split(s, "\n") {
		switch {
		case strings.HasPrefix(l, "*"):
			head = append(head, l)
		case strings.HasPrefix(l, ":"):
			order = append(order, l)
		case strings.HasPrefix(l, "-A "):
			name := strings.Fields(l)[1]
			rules[name] = append(rules[name], l)
		}
	}
	slices.Sort(order)
	lines := append(head, order...)
	for _, o := range order {
		lines = append(lines, rules[strings.Fields(o[1:])[0]]...)
	}
	return strings.Join(lines, "\n") + "\n"
}
