package apiserver

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The world of these tests: this process is the node, where the proxy and the API server run; pods hang off it, each
// in a network namespace; beyond its default route is a client who is no part of the cluster.
//
//	outside 192.0.2.2 ── 192.0.2.1 node 10.244.1.x ── 10.244.1.y pods a, b, c
//	    2001:db8::2 ── 2001:db8::1     fd00:10:244:1::x ── fd00:10:244:1::y
var (
	node    = &host{name: "node", v4: addr("192.0.2.1"), v6: addr("2001:db8::1")}
	outer   = &host{name: "outside", v4: addr("192.0.2.2"), v6: addr("2001:db8::2")}
	podA    = &host{name: "a", v4: addr("10.244.1.2"), v6: addr("fd00:10:244:1::2")}
	podB    = &host{name: "b", v4: addr("10.244.1.6"), v6: addr("fd00:10:244:1::6")}
	podC    = &host{name: "c", v4: addr("10.244.1.10"), v6: addr("fd00:10:244:1::a")}
	podNet  = "10.244.0.0/16,fd00:10:244::/56"
	podPort = 8080
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// host is a place packets come from and go to.
type host struct {
	name   string
	v4, v6 netip.Addr
	netns  *os.File // nil: the namespace of this process
}

// do runs f in the host's namespace. The thread that went there is never unlocked, so it ends with its goroutine and
// nothing else runs on it.
func (h *host) do(f func() error) error {
	if h.netns == nil {
		return f()
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(int(h.netns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// patience is generous: a slow machine is no failed connection, and a SYN is sent again after a second.
const patience = 5 * time.Second

// dial connects from the host. A literal address makes the socket on the calling thread, hence in its namespace.
func (h *host) dial(to netip.AddrPort) (conn net.Conn, err error) {
	err = h.do(func() error {
		conn, err = net.DialTimeout("tcp", to.String(), patience)
		return err
	})
	return conn, err
}

// answer is what a pod says first: who it is, and from where it sees the caller.
type answer struct {
	pod  string
	from netip.Addr
}

// ask connects once and returns who answered.
func (h *host) ask(to netip.AddrPort) (answer, error) {
	conn, err := h.dial(to)
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	return readAnswer(conn)
}

func readAnswer(from net.Conn) (answer, error) {
	from.SetReadDeadline(time.Now().Add(patience))
	line, err := bufio.NewReader(from).ReadString('\n')
	if err != nil {
		return answer{}, fmt.Errorf("read who answers: %w", err)
	}
	pod, caller, _ := strings.Cut(strings.TrimSpace(line), " ")
	ap, err := netip.ParseAddrPort(caller)
	return answer{pod, ap.Addr().Unmap()}, err
}

// serve answers on the pod's port, both families, and then echoes.
func (h *host) serve() error {
	return h.do(func() error {
		listener, err := net.Listen("tcp", fmt.Sprintf(":%d", podPort))
		if err != nil {
			return err
		}
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()
					fmt.Fprintf(conn, "%s %s\n", h.name, conn.RemoteAddr())
					io.Copy(conn, conn)
				}()
			}
		}()
		return nil
	})
}

func buildWorld() error {
	if err := prepareNamespace(true); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	for _, h := range []*host{outer, podA, podB, podC} {
		bits4, bits6 := 30, 126
		if h == outer {
			bits4, bits6 = 24, 64
		}
		if err := h.create(bits4, bits6); err != nil {
			return fmt.Errorf("%s: %w", h.name, err)
		}
	}
	// Before anything is translated, a packet of the node to a Service needs a route.
	for _, via := range []netip.Addr{outer.v4, outer.v6} {
		if err := netlink.RouteAdd(&netlink.Route{Gw: via.AsSlice()}); err != nil {
			return fmt.Errorf("node: default route via %s: %w", via, err)
		}
	}
	if err := runNft(turnAway); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	for _, h := range []*host{podA, podB, podC} {
		if err := h.serve(); err != nil {
			return fmt.Errorf("%s: serve: %w", h.name, err)
		}
	}
	return nil
}

// create makes the namespace and its link to the node, which has the address before the host's and is its gateway.
func (h *host) create(bits4, bits6 int) error {
	made := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			h.netns, err = os.Open("/proc/thread-self/ns/net")
		}
		made <- err
	}()
	if err := <-made; err != nil {
		return fmt.Errorf("new namespace: %w", err)
	}
	if err := h.do(func() error { return prepareNamespace(false) }); err != nil {
		return err
	}
	veth := netlink.NewLinkAttrs()
	veth.Name = "to-" + h.name
	if err := netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: veth, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(h.netns.Fd())),
	}); err != nil {
		return fmt.Errorf("add veth: %w", err)
	}
	gw4, gw6 := h.v4.Prev(), h.v6.Prev()
	if err := setUp(veth.Name, netip.PrefixFrom(gw4, bits4), netip.PrefixFrom(gw6, bits6)); err != nil {
		return err
	}
	return h.do(func() error {
		if err := setUp("eth0", netip.PrefixFrom(h.v4, bits4), netip.PrefixFrom(h.v6, bits6)); err != nil {
			return err
		}
		for _, gw := range []netip.Addr{gw4, gw6} {
			if err := netlink.RouteAdd(&netlink.Route{Gw: gw.AsSlice()}); err != nil {
				return fmt.Errorf("default route via %s: %w", gw, err)
			}
		}
		return nil
	})
}

// turnAway has the node answer "unreachable", after every rule of the proxy, to what is for a Service and was not
// translated. So it fails at once and leaves nothing in conntrack: an entry from before the Service was known would
// keep its source port from the Service for two minutes, and a later connection on that port would count as failed.
const turnAway = `
table inet test {
	chain unserved {
		ip daddr { 10.96.0.0/16, 198.51.100.0/24 } reject with icmp type net-unreachable
		ip6 daddr fd00:10:96::/112 reject with icmpv6 type no-route
	}
	chain forward {
		type filter hook forward priority 100
		jump unserved
	}
	chain output {
		type filter hook output priority 100
		jump unserved
	}
}`

func runNft(rules string) error {
	nft := exec.Command("nft", "-f", "-")
	nft.Stdin = strings.NewReader(rules)
	if out, err := nft.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func setSysctl(name, value string) error {
	if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl: %w", err)
	}
	return nil
}

// prepareNamespace sets the sysctls of the namespace this thread is in, and its loopback up.
func prepareNamespace(router bool) error {
	set := map[string]string{
		"ipv6/conf/all/accept_dad":     "0", // no waiting for addresses to prove unique
		"ipv6/conf/default/accept_dad": "0",
	}
	if router {
		set["ipv4/ip_forward"], set["ipv6/conf/all/forwarding"] = "1", "1"
		set["ipv4/icmp_ratelimit"], set["ipv6/icmp/ratelimit"] = "0", "0" // every refusal is told
	}
	for name, value := range set {
		if err := setSysctl(name, value); err != nil {
			return err
		}
	}
	return setUp("lo")
}

func setUp(name string, prefixes ...netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	for _, p := range prefixes {
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
			return fmt.Errorf("link %s: add %s: %w", name, p, err)
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("link %s: set up: %w", name, err)
	}
	return nil
}
