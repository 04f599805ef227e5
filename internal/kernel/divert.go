package kernel

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Diversion takes packets with a bit in their mark into this machine, whatever address they are for, before any routing table but the
// local one is asked.
//
// Its first rule keeps it from what this machine sends, and from the look-ups by which the kernel checks a source
// (net/ipv4/fib_frontend.c __fib_validate_source) where net.ipv4.conf.*.src_valid_mark is set, as wg-quick does: both come from lo.
type Diversion struct {
	V6       bool
	Bit      uint32
	Table    int // a routing table of its own
	Priority int // of the first rule; the second has the next
}

func (d Diversion) family() int {
	if d.V6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (d Diversion) rules() []*netlink.Rule {
	rule := func(priority, table int, iif string) *netlink.Rule {
		r := netlink.NewRule()
		mask := d.Bit
		r.Family, r.Priority, r.Table, r.IifName, r.Mark, r.Mask = d.family(), priority, table, iif, d.Bit, &mask
		return r
	}
	return []*netlink.Rule{rule(d.Priority, unix.RT_TABLE_MAIN, "lo"), rule(d.Priority+1, d.Table, "")}
}

func (d Diversion) route() (*netlink.Route, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	all := &net.IPNet{IP: make(net.IP, 4), Mask: make(net.IPMask, 4)}
	if d.V6 {
		all = &net.IPNet{IP: make(net.IP, 16), Mask: make(net.IPMask, 16)}
	}
	return &netlink.Route{Family: d.family(), LinkIndex: lo.Attrs().Index, Dst: all, Table: d.Table,
		Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST}, nil
}

// Set makes it so; what is there already is let be.
func (d Diversion) Set() error {
	return TryFault(func() error {
		route, err := d.route()
		if err != nil {
			return err
		}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("route of table %d: %w", d.Table, err)
		}
		for _, r := range d.rules() {
			if err := netlink.RuleAdd(r); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("routing rule %d: %w", r.Priority, err)
			}
		}
		return nil
	})
}

// Unset takes it out. What is not there is no error.
func (d Diversion) Unset() error {
	return TryFault(func() error {
		var failed error
		for _, r := range d.rules() {
			err := netlink.RuleDel(r)
			for err == nil { // somebody may have added it twice
				err = netlink.RuleDel(r)
			}
			if !isGone(err) {
				failed = errors.Join(failed, fmt.Errorf("routing rule %d: %w", r.Priority, err))
			}
		}
		route, err := d.route()
		if err != nil {
			return errors.Join(failed, err)
		}
		if err := netlink.RouteDel(route); err != nil && !isGone(err) {
			failed = errors.Join(failed, fmt.Errorf("route of table %d: %w", d.Table, err))
		}
		return failed
	})
}

func isGone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.ENODEV)
}
