package lab

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"fairlead/internal/kernel"

	"github.com/vishvananda/netlink"
)

// Kind is what an actor is.
type Kind uint8

// The kinds of actors.
const (
	Client Kind = iota // a machine on the LAN that is no node
	Node
	Pod
	lanSwitch
)

// Actor is somebody in the world: it has a network namespace, can send and can serve.
type Actor struct {
	Name string
	Kind Kind
	Node *Actor // the node of a pod

	world   *World
	ns      *kernel.NS
	index   int // of a node or pod among its peers, from 1
	v4, v6  netip.Addr
	running sync.WaitGroup // servers, processes, clients inside

	mu      sync.Mutex
	servers []*Server
	pods    int // made on this node so far
}

// Addr is the actor's own address of one family.
func (a *Actor) Addr(v6 bool) netip.Addr {
	if v6 {
		return a.v6
	}
	return a.v4
}

// Do runs fn inside the actor's network namespace; see [kernel.NS.Do].
func (a *Actor) Do(fn func() error) error {
	if err := a.ns.Do(fn); err != nil {
		return fmt.Errorf("%s: %w", a.Name, err)
	}
	return nil
}

// Index is the place of a node, or of a pod on its node, from 1.
func (a *Actor) Index() int { return a.index }

// Owns tells whether addr is on one of the actor's interfaces, now.
func (a *Actor) Owns(addr netip.Addr) (bool, error) {
	var own []netip.Addr
	err := a.Do(func() error {
		addrs, err := net.InterfaceAddrs()
		for _, x := range addrs {
			if p, err := netip.ParsePrefix(x.String()); err == nil {
				own = append(own, p.Addr())
			}
		}
		return err
	})
	return slices.Contains(own, addr), err
}

// AddAddr puts one more address on an interface of the actor. It never becomes the source of a flow by itself.
func (a *Actor) AddAddr(link string, p netip.Prefix) error {
	return a.Do(func() error { return addAddr(link, p, true) })
}

// DelAddr takes an address away from an interface of the actor.
func (a *Actor) DelAddr(link string, p netip.Prefix) error {
	return a.Do(func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return fmt.Errorf("interface %s: %w", link, err)
		}
		if err := netlink.AddrDel(l, &netlink.Addr{IPNet: ipNet(p)}); err != nil {
			return fmt.Errorf("take %s from %s: %w", p, link, err)
		}
		return nil
	})
}

// AddRoute sends dst through a gateway, or straight out of an interface where via is not valid.
func (a *Actor) AddRoute(dst netip.Prefix, via netip.Addr, link string) error {
	return a.Do(func() error { return addRoute(dst, via, link) })
}

// Sysctl sets a kernel parameter of the actor's namespace, by its path below /proc/sys or in dotted form.
func (a *Actor) Sysctl(key, value string) error {
	if !strings.Contains(key, "/") {
		key = strings.ReplaceAll(key, ".", "/")
	}
	if !strings.HasPrefix(key, "net/") {
		return fmt.Errorf("sysctl %s is not of a network namespace", key)
	}
	return a.Do(func() error { return writeSysctl(key, value) })
}
