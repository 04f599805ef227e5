package resolve

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxAddress is longer than any address in text form (RFC 4291 gives at most 45); what is longer is not read at all.
const maxAddress = 64

// parseAddr reads an address as generously as old API servers accepted it: with blanks around it and with leading zeros in
// IPv4 numbers, which are decimal (k8s.io/utils/net ParseIPSloppy). An IPv4 address in IPv6 clothes is IPv4. Zones are refused.
func parseAddr(s string) (netip.Addr, bool) {
	s = strings.TrimSpace(s)
	if len(s) > maxAddress {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, err = netip.ParseAddr(unpad(s))
	}
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// parsePrefix reads a CIDR as generously as parseAddr, and clears its host bits.
func parsePrefix(s string) (netip.Prefix, bool) {
	ip, bits, ok := strings.Cut(strings.TrimSpace(s), "/")
	if !ok || len(ip) > maxAddress {
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(unpad(ip) + "/" + bits)
	if err != nil || p.Addr().Is4In6() {
		return netip.Prefix{}, false
	}
	return p.Masked(), true
}

// unpad takes leading zeros from the decimal numbers of an IPv4 address, also at the end of an IPv6 one.
func unpad(s string) string {
	if !strings.Contains(s, ".") {
		return s
	}
	start := strings.LastIndexByte(s, ':') + 1
	fields := strings.Split(s[start:], ".")
	for i, f := range fields {
		if trimmed := strings.TrimLeft(f, "0"); trimmed != "" || f == "" {
			fields[i] = trimmed
		} else {
			fields[i] = "0"
		}
	}
	return s[:start] + strings.Join(fields, ".")
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// unsafeAddr says in words why no Service may have the address, or be served by it; empty is safe. These addresses mean
// something to every machine (or are no place at all), so a Service that took one would take it from the node itself.
func unsafeAddr(a netip.Addr) string {
	switch {
	case a.IsUnspecified():
		return "the unspecified address"
	case a.IsLoopback():
		return "a loopback address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.IsMulticast():
		return "a multicast address"
	case a == broadcast:
		return "the broadcast address"
	}
	return ""
}

// prefixes sorts ranges and drops those that lie inside another one. CIDRs either nest or are disjoint, so what is left
// overlaps nowhere.
func prefixes(ps []netip.Prefix) []netip.Prefix {
	slices.SortFunc(ps, netip.Prefix.Compare)
	out := ps[:0]
	for _, p := range ps {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
	}
	return slices.Clip(out)
}

// one is the range that holds just the address.
func one(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// quote makes a string of a stranger fit for a message: quoted, and not longer than a line can bear.
func quote(s string) string {
	if len(s) > maxAddress {
		s = s[:maxAddress] + "..."
	}
	return fmt.Sprintf("%q", s)
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}
