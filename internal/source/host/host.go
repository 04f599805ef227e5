// Package host is the source that knows this machine: the addresses of its interfaces, as the kernel has them.
//
// Netlink says that something changed, and the whole list is read anew: it is short, and so nothing can drift. It is read
// once a minute too, without being told.
package host

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"fairlead/internal/source"
)

const (
	debounce = 50 * time.Millisecond // from the first change of a burst to the list
	relist   = time.Minute           // from a list to the next, without a change
	retry    = time.Second           // after a failure
	listMost = 5                     // tries for a list that nothing interrupts
)

// groups are the changes that are listened to (linux/rtnetlink.h).
const groups = unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR

// Source watches the addresses of this machine. It implements [source.Source].
type Source struct {
	list   func() ([]netip.Addr, error)
	listen func() (subscription, error)
}

// subscription hears of changes: Receive returns at each.
type subscription interface {
	Receive() ([]mdl.Message, error)
	Close() error
}

// New returns the source.
func New() *Source {
	return &Source{list: addrs, listen: func() (subscription, error) {
		return mdl.Dial(unix.NETLINK_ROUTE, &mdl.Config{Groups: groups})
	}}
}

// Run tells to all addresses, sorted, without zones, each once, at first and whenever they changed, until ctx ends. What
// the kernel refuses is logged and tried again.
//
// It opens all its sockets on the calling goroutine, so it watches the network namespace of the thread that this goroutine
// is locked to.
func (s *Source) Run(ctx context.Context, to source.Sink) error {
	t := &teller{list: s.list, to: to}
	for ctx.Err() == nil {
		err := s.follow(ctx, t)
		pause := retry
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS): // more changes than the socket holds: some are lost, so read the list again
			pause = debounce
			klog.V(1).InfoS("Changes of addresses came too fast; reading them all again")
		default:
			klog.ErrorS(err, "The addresses of this machine can't be followed; trying again")
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return nil
}

// follow listens, then lists: so what changes in between is not missed. It returns when listening or listing fails.
func (s *Source) follow(ctx context.Context, t *teller) error {
	sub, err := s.listen()
	if err != nil {
		return errors.Join(fmt.Errorf("subscribe to address changes: %w", err), t.tell())
	}
	changed, failed := make(chan struct{}, 1), make(chan error, 1)
	var hearing sync.WaitGroup
	hearing.Go(func() { failed <- hear(sub, changed) })
	defer hearing.Wait()
	defer sub.Close() // ends Receive

	next, soon := time.After(0), false
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return fmt.Errorf("listen for address changes: %w", err)
		case <-changed:
			if !soon {
				next, soon = time.After(debounce), true
			}
		case <-next:
			if err := t.tell(); err != nil {
				return err
			}
			next, soon = time.After(relist), false
		}
	}
}

// hear rings at each change, until sub fails or is closed.
func hear(sub subscription, changed chan<- struct{}) error {
	for {
		if _, err := sub.Receive(); err != nil {
			return err
		}
		select {
		case changed <- struct{}{}:
		default: // it rings already
		}
	}
}

// teller tells a sink what is different.
type teller struct {
	list   func() ([]netip.Addr, error)
	to     source.Sink
	told   []netip.Addr
	synced bool
}

func (t *teller) tell() error {
	now, err := t.list()
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	if !t.synced || !slices.Equal(t.told, now) {
		t.told = now
		t.to.Addrs(now)
	}
	if !t.synced {
		t.synced = true
		t.to.Synced()
	}
	return nil
}

// addrs reads the addresses of all interfaces. A dump that a change interrupts may be torn, and is read again.
func addrs() ([]netip.Addr, error) {
	for try := 1; ; try++ {
		all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err == nil {
			return tidy(withoutVIPs(all)), nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) || try == listMost {
			return nil, err
		}
	}
}

// withoutVIPs leaves out the addresses of kube-ipvs0, the interface where kube-proxy in ipvs mode keeps those of Services:
// they are no node's, and refusing them to their Services would end the traffic of a node that changes over.
func withoutVIPs(all []netlink.Addr) []netlink.Addr {
	link, err := netlink.LinkByName("kube-ipvs0")
	if err != nil {
		return all // there is none, as nearly everywhere
	}
	return slices.DeleteFunc(all, func(a netlink.Addr) bool { return a.LinkIndex == link.Attrs().Index })
}

// tidy keeps the addresses that the kernel answers for, sorted, without zones, each once.
func tidy(all []netlink.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, len(all))
	for _, a := range all {
		if a.IPNet == nil || !ours(a.Flags) {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IPNet.IP); ok {
			out = append(out, ip.Unmap())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// ours tells whether the kernel takes packets for an address with these flags (linux/if_addr.h). It does for temporary
// (RFC 8981) and deprecated ones (RFC 4862 §5.5.4: only no source for new flows), which live connections may use. It does
// not for one whose uniqueness is still being checked, unless optimistically (RFC 4429), or was disproved: somebody else may
// have it. That check's end is a change that netlink tells.
func ours(flags int) bool {
	tentative := flags&unix.IFA_F_TENTATIVE != 0 && flags&unix.IFA_F_OPTIMISTIC == 0
	return !tentative && flags&unix.IFA_F_DADFAILED == 0
}
