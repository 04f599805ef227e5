package resolve

import (
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"

	"fairlead/internal/model"
)

// ServiceCIDR objects (KEP-1880) say which ranges ClusterIPs are given from. Each counts for as long as it is there, also
// while it terminates: Services may still have addresses of it.

// serviceCIDR is what is kept of a ServiceCIDR object.
type serviceCIDR struct {
	ranges []netip.Prefix // that can be kept from everybody else
	flaws  []flaw
}

// mostCIDRs is more than any ServiceCIDR has (the API takes one of each family); it bounds what a bad one can cost.
const mostCIDRs = 16

func readServiceCIDR(c *networkingv1.ServiceCIDR) serviceCIDR {
	var out serviceCIDR
	for _, text := range c.Spec.CIDRs[:min(len(c.Spec.CIDRs), mostCIDRs)] {
		p, ok := parsePrefix(text)
		switch what := unsafeRange(p); {
		case !ok:
			out.flaws = append(out.flaws, flaw{Malformed, quote(text) + " is no CIDR; it keeps no addresses"})
		case what != "":
			out.flaws = append(out.flaws, flaw{UnsafeAddress, p.String() + " holds " + what + "; it keeps no addresses"})
		default:
			out.ranges = append(out.ranges, p)
		}
	}
	return out
}

// unsafeRanges hold addresses that no Service may have (see unsafeAddr). The broadcast address is not here: some clusters
// have their Services in 240.0.0.0/4.
var unsafeRanges = []netip.Prefix{
	netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
	netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("ff00::/8"),
	netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128"),
}

// unsafeRange says in words why nobody may be kept from a range; empty is safe. One such as 0.0.0.0/0, of whoever may write
// a ServiceCIDR, would cut off the node.
func unsafeRange(p netip.Prefix) string {
	for _, u := range unsafeRanges {
		if p.Overlaps(u) {
			return unsafeAddr(u.Addr())
		}
	}
	return ""
}

// ServiceCIDR tells what a ServiceCIDR is now; nil is gone.
func (r *Resolver) ServiceCIDR(name string, c *networkingv1.ServiceCIDR) {
	if c == nil {
		delete(r.cidrs, name)
	} else {
		r.cidrs[name] = readServiceCIDR(c)
	}
	r.locate()
}

// keep puts the union of all ranges of the families that are served into the node.
func (h *here) keep(cidrs map[string]serviceCIDR) {
	var all []netip.Prefix
	for _, c := range cidrs {
		for _, p := range c.ranges {
			if h.serves(p.Addr().Is6()) {
				all = append(all, p)
			}
		}
	}
	if len(all) > 0 {
		h.node.ServiceCIDRs = prefixes(all)
	}
}

// nodeNotices is what should be said that is about no Service.
func nodeNotices(c Config, cidrs map[string]serviceCIDR) []model.Notice {
	n := &notes{list: slices.Clone(c.notices())}
	for name, cidr := range cidrs {
		for _, f := range cidr.flaws {
			n.add(f.reason, "ServiceCIDR %s: spec.cidrs: %s", quote(name), f.message)
		}
	}
	return n.sorted()
}
