package lab

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	uplink    = "eth0" // of pods, nodes and clients
	podBridge = "cni0" // of a node, when pods share a bridge
	podPrefix = "pod-" // of a node, otherwise: one interface a pod, "pod-p1a"
)

var (
	defaults = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	lanBits  = [2]int{24, 64}
)

// addr4 and addr6 are the addresses of the plan above New. The last part of an IPv6 address reads like the IPv4 one:
// 192.0.2.11 is 2001:db8::11.
func addr4(format string, args ...any) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(format, args...))
}
func addr6(format string, args ...any) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(format, args...))
}

// addLAN makes the switch.
func (w *World) addLAN() (err error) {
	if w.lan, err = w.newActor("lan", lanSwitch); err != nil {
		return err
	}
	return w.lan.Do(func() error {
		// Frames between machines are not the switch's to filter. The file is there only where br_netfilter is.
		for _, f := range []string{"iptables", "ip6tables"} {
			if err := writeSysctl("net/bridge/bridge-nf-call-"+f, "0"); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		return addBridge("br0")
	})
}

// join plugs an actor into the LAN.
func (w *World) join(a *Actor) error {
	if err := addVeth(w.lan, "to-"+a.Name, a, uplink); err != nil {
		return err
	}
	if err := w.lan.Do(func() error { return enslave("to-"+a.Name, "br0", false) }); err != nil {
		return err
	}
	return a.Do(func() error {
		return errors.Join(setUp(uplink), addAddr(uplink, netip.PrefixFrom(a.v4, lanBits[0]), false),
			addAddr(uplink, netip.PrefixFrom(a.v6, lanBits[1]), false))
	})
}

// addClient makes a machine outside the cluster. It has spare addresses to send from: .101 and .102 on the LAN, and
// 198.51.100.7 of a network far away.
func (w *World) addClient(name string) (*Actor, error) {
	a, err := w.newActor(name, Client)
	if err != nil {
		return nil, err
	}
	a.v4, a.v6 = addr4("192.0.2.100"), addr6("2001:db8::100")
	if err := w.join(a); err != nil {
		return nil, err
	}
	return a, a.Do(func() error {
		for _, p := range []string{"192.0.2.101/24", "2001:db8::101/64", "192.0.2.102/24", "2001:db8::102/64",
			"198.51.100.7/24", "2001:db8:51::7/64"} {
			if err := addAddr(uplink, netip.MustParsePrefix(p), true); err != nil {
				return err
			}
		}
		return nil
	})
}

// addNode makes a node, with routes from and to all that are there.
func (w *World) addNode(name string) (*Actor, error) {
	nodes := w.nodes()
	a, err := w.newActor(name, Node)
	if err != nil {
		return nil, err
	}
	a.index = len(nodes) + 1
	a.v4, a.v6 = addr4("192.0.2.%d", 10+a.index), addr6("2001:db8::%d", 10+a.index)
	if err := a.Do(routerSysctls); err != nil {
		return nil, err
	}
	if err := w.join(a); err != nil {
		return nil, err
	}
	if err := a.Do(func() error { return routeAll(defaults, w.Must("ext"), uplink) }); err != nil {
		return nil, err
	}
	if w.config.Bridge {
		if err := a.Do(func() error { return addPodBridge(a) }); err != nil {
			return nil, err
		}
	}
	for _, peer := range nodes {
		err := errors.Join(
			a.Do(func() error { return routeAll(podNets(peer), peer, uplink) }),
			peer.Do(func() error { return routeAll(podNets(a), a, uplink) }))
		if err != nil {
			return nil, err
		}
	}
	return a, w.Must("ext").Do(func() error {
		if a.index == 1 {
			if err := errors.Join(routeAll(ServiceCIDRs, a, uplink), routeAll(LBPools, a, uplink)); err != nil {
				return err
			}
		}
		return routeAll(podNets(a), a, uplink)
	})
}

func (w *World) nodes() (nodes []*Actor) {
	for _, a := range w.Actors() {
		if a.Kind == Node {
			nodes = append(nodes, a)
		}
	}
	return nodes
}

// podNets are the ranges of a node's pods, podGateways the node's own addresses in them.
func podNets(node *Actor) []netip.Prefix {
	return []netip.Prefix{
		netip.PrefixFrom(addr4("10.244.%d.0", node.index), 24), netip.PrefixFrom(addr6("fd00:10:244:%d::", node.index), 64)}
}

func podGateways(node *Actor) [2]netip.Addr {
	return [2]netip.Addr{addr4("10.244.%d.1", node.index), addr6("fd00:10:244:%d::1", node.index)}
}

// AddPod makes a pod on a node.
func (w *World) AddPod(name, node string) (*Actor, error) {
	n, err := w.Actor(node)
	if err != nil {
		return nil, err
	}
	if n.Kind != Node || len(podPrefix+name) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("pod %s on %s: want a node, and a name of at most %d letters", name, node, unix.IFNAMSIZ-1-len(podPrefix))
	}
	a, err := w.newActor(name, Pod)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.pods++
	a.Node, a.index = n, n.pods
	n.mu.Unlock()
	a.v4, a.v6 = addr4("10.244.%d.%d", n.index, 9+a.index), addr6("fd00:10:244:%d::%d", n.index, 9+a.index)
	if err := addVeth(n, podPrefix+name, a, uplink); err != nil {
		return nil, err
	}
	if err := n.Do(func() error { return podPort(a, w.config.Bridge) }); err != nil {
		return nil, err
	}
	return a, a.Do(func() error {
		gw := podGateways(n)
		return errors.Join(setUp(uplink), addAddr(uplink, netip.PrefixFrom(a.v4, 32), false), addAddr(uplink, netip.PrefixFrom(a.v6, 128), false),
			addRoute(netip.PrefixFrom(gw[0], 32), netip.Addr{}, uplink), addRoute(netip.PrefixFrom(gw[1], 128), netip.Addr{}, uplink),
			addRoute(defaults[0], gw[0], uplink), addRoute(defaults[1], gw[1], uplink))
	})
}

// podPort sets up the node's end of a pod's interface. Runs inside the node.
func podPort(pod *Actor, bridge bool) error {
	link := podPrefix + pod.Name
	if bridge {
		return enslave(link, podBridge, true)
	}
	gw := podGateways(pod.Node)
	return errors.Join(setUp(link), addAddr(link, netip.PrefixFrom(gw[0], 32), false), addAddr(link, netip.PrefixFrom(gw[1], 128), false),
		addRoute(netip.PrefixFrom(pod.v4, 32), netip.Addr{}, link), addRoute(netip.PrefixFrom(pod.v6, 128), netip.Addr{}, link))
}

func addPodBridge(node *Actor) error {
	gw := podGateways(node)
	return errors.Join(addBridge(podBridge), addAddr(podBridge, netip.PrefixFrom(gw[0], 24), false),
		addAddr(podBridge, netip.PrefixFrom(gw[1], 64), false),
		// Answers between two pods of one bridge must pass the node's netfilter, or they are never translated back.
		writeSysctl("net/bridge/bridge-nf-call-iptables", "1"), writeSysctl("net/bridge/bridge-nf-call-ip6tables", "1"))
}

// quietLinks keeps IPv6 from talking by itself: an address is usable at once.
func quietLinks(a *Actor) error {
	return a.Do(func() error {
		for _, conf := range []string{"all", "default"} {
			for key, value := range map[string]string{"accept_dad": "0", "dad_transmits": "0", "accept_ra": "0", "router_solicitations": "0"} {
				if err := writeSysctl("net/ipv6/conf/"+conf+"/"+key, value); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// routerSysctls makes a node of a machine. ICMP errors are not rate-limited (of ICMPv6, only type 2 is): a story that is
// refused a hundred times at once wants a hundred answers.
func routerSysctls() error {
	for _, kv := range [][2]string{
		{"net/ipv4/ip_forward", "1"}, {"net/ipv6/conf/all/forwarding", "1"},
		{"net/ipv4/conf/all/rp_filter", "0"}, {"net/ipv4/conf/default/rp_filter", "0"},
		{"net/ipv4/conf/all/send_redirects", "0"}, {"net/ipv4/conf/default/send_redirects", "0"},
		{"net/ipv4/icmp_ratemask", "0"}, {"net/ipv6/icmp/ratemask", "2"},
	} {
		if err := writeSysctl(kv[0], kv[1]); err != nil {
			return err
		}
	}
	return nil
}

// awaitLinks waits until every interface carries packets: the kernel brings a bridge up a little after it was told to.
func (w *World) awaitLinks() error {
	end := time.Now().Add(5 * time.Second)
	for _, a := range w.Actors() {
		for {
			var down []string
			err := a.Do(func() (err error) { down, err = linksDown(); return err })
			if err != nil {
				return err
			}
			if len(down) == 0 {
				break
			}
			if time.Now().After(end) {
				return fmt.Errorf("%s: interfaces %v stay down", a.Name, down)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	return nil
}

// What follows runs inside a namespace.

func linksDown() (down []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if a := l.Attrs(); a.Flags&net.FlagLoopback == 0 && a.OperState != netlink.OperUp {
			down = append(down, a.Name)
		}
	}
	return down, nil
}

func writeSysctl(path, value string) error {
	if err := os.WriteFile("/proc/sys/"+path, []byte(value), 0o644); err != nil {
		return fmt.Errorf("sysctl %s=%s: %w", path, value, err)
	}
	return nil
}

func addBridge(name string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	noSnooping := false
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &noSnooping}); err != nil {
		return fmt.Errorf("add bridge %s: %w", name, err)
	}
	return setUp(name)
}

// addVeth joins two actors with a cable.
func addVeth(a *Actor, linkA string, b *Actor, linkB string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = linkA
	return a.Do(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: linkB, PeerNamespace: netlink.NsFd(b.ns.Fd())}); err != nil {
			return fmt.Errorf("add cable %s to %s: %w", linkA, b.Name, err)
		}
		return nil
	})
}

func setUp(link string) error {
	l, err := netlink.LinkByName(link)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("set %s up: %w", link, err)
	}
	return nil
}

// enslave makes link a port of a bridge; a hairpin port may send a frame back to where it came from.
func enslave(link, bridge string, hairpin bool) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("port %s: %w", link, err)
	}
	br, err := netlink.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", bridge, err)
	}
	if err := netlink.LinkSetMaster(l, br); err != nil {
		return fmt.Errorf("plug %s into %s: %w", link, bridge, err)
	}
	if hairpin {
		if err := netlink.LinkSetHairpin(l, true); err != nil {
			return fmt.Errorf("hairpin on %s: %w", link, err)
		}
	}
	return setUp(link)
}

// addAddr puts an address on an interface. A spare IPv6 address is a deprecated one: usable, never chosen as a source.
func addAddr(link string, p netip.Prefix, spare bool) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("interface %s: %w", link, err)
	}
	addr := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
		if spare {
			addr.ValidLft = math.MaxInt32
		}
	}
	if err := netlink.AddrAdd(l, addr); err != nil {
		return fmt.Errorf("add %s to %s: %w", p, link, err)
	}
	return nil
}

func addRoute(dst netip.Prefix, via netip.Addr, link string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("interface %s: %w", link, err)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(dst)}
	if via.IsValid() {
		r.Gw = via.AsSlice()
	} else if dst.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("route %s via %s %s: %w", dst, via, link, err)
	}
	return nil
}

// routeAll sends each range to the gateway's address of its family.
func routeAll(dsts []netip.Prefix, gateway *Actor, link string) error {
	for _, dst := range dsts {
		if err := addRoute(dst, gateway.Addr(dst.Addr().Is6()), link); err != nil {
			return err
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
