package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"fairlead/internal/kernel"
)

// The address plan. Every endpoint address is real: the server's namespace takes all of them for its own.
//
//	client ── node ────── server     Services 10.96.0.0/16, endpoints 10.128.0.0/12
//	       ── bare ──────            10.161.1.1: the same two hops, no netfilter
//	       ── tracked ───            10.162.1.1: the same two hops, connection tracking
const (
	maxServices  = 30000
	maxEndpoints = 16
	servicePort  = 80
	podPort      = 8080
	clusterCIDR  = "10.128.0.0/9" // client and endpoints are pods
	nodeName     = "node-1"
	nodeAddress  = "192.0.2.1"
)

var (
	direct  = netip.MustParseAddrPort("10.161.1.1:8080")
	tracked = netip.MustParseAddrPort("10.162.1.1:8080")
)

// serviceAddr is the cluster IP of the i-th Service.
func serviceAddr(i int) netip.Addr { return nth(netip.MustParseAddr("10.96.1.0"), i) }

func serviceFront(i int) netip.AddrPort { return netip.AddrPortFrom(serviceAddr(i), servicePort) }

// endpointAddr is the e-th endpoint of the i-th Service, in one of its two sets.
func endpointAddr(i, set, e int) netip.Addr {
	return nth(netip.MustParseAddr("10.128.0.0"), (2*i+set)*maxEndpoints+e)
}

// owner is the Service and the set that an endpoint belongs to.
func owner(a netip.Addr) (service, set int) {
	b := a.As4()
	n := (int(b[0])<<24 | int(b[1])<<16 | int(b[2])<<8 | int(b[3])) - 10<<24 - 128<<16
	return n / maxEndpoints / 2, n / maxEndpoints % 2
}

func nth(base netip.Addr, n int) netip.Addr {
	b := base.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// privateMounts gives this process a /proc of its PID namespace, and a /run (locks, sockets, etcd) of its own.
func privateMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return nil
}

// world is where the packets go. This process, and with it the proxy and the API server, is in the node's namespace.
type world struct {
	client, server, bare, tracked *kernel.NS
	serving                       *exec.Cmd
}

func newWorld() (*world, error) {
	w := new(world)
	for _, ns := range []**kernel.NS{&w.client, &w.server, &w.bare, &w.tracked} {
		var err error
		if *ns, err = kernel.NewNS(); err != nil {
			return nil, err
		}
	}
	if err := prepareNode(); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	routers := []struct {
		ns     *kernel.NS // nil: this process's
		subnet string     // of the links
		routes []string   // to the server; the first also is how the client gets there
	}{
		{nil, "10.160.0", []string{"10.128.0.0/12"}},
		{w.bare, "10.161.0", []string{"10.161.1.0/24"}},
		{w.tracked, "10.162.0", []string{"10.162.1.0/24"}},
	}
	for i, r := range routers {
		toServer := []string{r.routes[0]}
		fromClient := []string{r.routes[0]}
		if i == 0 {
			fromClient = append(fromClient, "10.96.0.0/16")
		}
		if err := w.router(r.ns, i, r.subnet, fromClient, toServer); err != nil {
			return nil, fmt.Errorf("router %d: %w", i, err)
		}
	}
	if err := w.tracked.Do(func() error { return run("nft", track, "-f", "-") }); err != nil {
		return nil, err
	}
	return w, w.serve()
}

// track makes the kernel track connections in the namespace it is loaded in, as any ruleset that names a state does.
const track = `
table ip tracked {
	chain forwarded {
		type filter hook forward priority 0
		ct state invalid drop
	}
}`

// prepareNode sets up what is not the way of the packets. What is for a Service and not translated is dropped without a
// word, so that it leaves no trace in conntrack and no rate limit tells when to ask again.
func prepareNode() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(nodeAddress + "/32")}); err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{Dst: ipNet("10.96.0.0/16"), Type: unix.RTN_BLACKHOLE})
}

// router puts a namespace between client and server: client .2 ── .1 router .5 ── .6 server.
func (w *world) router(ns *kernel.NS, i int, subnet string, fromClient, toServer []string) error {
	here := func(f func() error) error {
		if ns == nil {
			return f()
		}
		return ns.Do(f)
	}
	name := "eth" + strconv.Itoa(i)
	err := here(func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		if err := link("to-client", subnet+".1/30", w.client, name); err != nil {
			return err
		}
		return link("to-server", subnet+".5/30", w.server, name)
	})
	if err != nil {
		return err
	}
	if err := w.client.Do(func() error { return address(name, subnet+".2/30", subnet+".1", fromClient...) }); err != nil {
		return fmt.Errorf("client: %w", err)
	}
	err = w.server.Do(func() error {
		if err := address(name, subnet+".6/30", subnet+".5", subnet+".0/30"); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, r := range toServer { // every address in there is the server's
			any := &netlink.Route{Dst: ipNet(r), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, LinkIndex: lo.Attrs().Index,
				Scope: netlink.SCOPE_HOST}
			if err := netlink.RouteAdd(any); err != nil {
				return fmt.Errorf("local route %s: %w", r, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("server: %w", err)
	}
	return here(func() error { return routes(subnet+".6", toServer...) })
}

// link makes a veth from the current namespace to another one, and gives our end an address.
func link(name, addr string, to *kernel.NS, peer string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer, PeerNamespace: netlink.NsFd(to.Fd())}); err != nil {
		return fmt.Errorf("add %s: %w", name, err)
	}
	return address(name, addr, "")
}

// address sets a link up, and routes what is given through it.
func address(name, addr, via string, to ...string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(addr)}); err != nil {
		return fmt.Errorf("link %s: address %s: %w", name, addr, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("link %s: set up: %w", name, err)
	}
	return routes(via, to...)
}

func routes(via string, to ...string) error {
	for _, r := range to {
		if ipNet(r).Contains(net.ParseIP(via)) {
			continue // on the link
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(r), Gw: net.ParseIP(via)}); err != nil {
			return fmt.Errorf("route %s via %s: %w", r, via, err)
		}
	}
	return nil
}

// ipNet keeps the host's bits, as an interface address needs. It is for literals.
func ipNet(s string) *net.IPNet {
	p := netip.MustParsePrefix(s)
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

// run runs a program in the current thread's namespace.
func run(name, stdin string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
