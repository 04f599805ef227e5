package explain

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"fairlead/internal/model"
)

// Question is a packet as a person describes it.
type Question struct {
	From  netip.AddrPort // port 0 is any; an address that is not valid is this node itself
	To    netip.AddrPort
	Proto model.Proto
	In    string // interface that the packet comes in by; empty is not said
}

// Usage is the shape that Parse reads, for messages.
const Usage = "[SOURCE[:PORT] ->] DESTINATION:PORT[/tcp|udp|sctp]"

// Parse reads "10.244.1.5 -> 10.96.0.10:53/udp" and its shorter forms. The arrow may be the word "to", or left out.
func Parse(words ...string) (Question, error) {
	q := Question{Proto: model.TCP}
	text := strings.NewReplacer("->", " ", "→", " ").Replace(strings.Join(words, " "))
	f := slices.DeleteFunc(strings.Fields(text), func(w string) bool { return w == "to" })
	if len(f) == 0 || len(f) > 2 {
		return q, fmt.Errorf("packet %q: want %s", strings.Join(words, " "), Usage)
	}
	to, proto, named := strings.Cut(f[len(f)-1], "/")
	if named {
		if err := q.SetProto(proto); err != nil {
			return q, err
		}
	}
	if err := q.SetTo(to); err != nil {
		return q, err
	}
	if len(f) == 2 {
		if err := q.SetFrom(f[0]); err != nil {
			return q, err
		}
	}
	return q, nil
}

// SetProto takes the name of a protocol, in any case.
func (q *Question) SetProto(name string) error {
	for _, p := range []model.Proto{model.TCP, model.UDP, model.SCTP} {
		if strings.EqualFold(name, p.String()) {
			q.Proto = p
			return nil
		}
	}
	return fmt.Errorf("protocol %q: want tcp, udp or sctp", name)
}

// SetTo takes the destination; it needs a port.
func (q *Question) SetTo(s string) error {
	to, err := addrPort(s)
	switch {
	case err != nil:
		return fmt.Errorf("destination %q: %w", s, err)
	case to.Port() == 0:
		return fmt.Errorf("destination %q: it needs a port, as in %s", s, netip.AddrPortFrom(to.Addr(), 80))
	}
	q.To = to
	return nil
}

// SetFrom takes the source; it may have a port.
func (q *Question) SetFrom(s string) error {
	from, err := addrPort(s)
	if err != nil {
		return fmt.Errorf("source %q: %w", s, err)
	}
	q.From = from
	return nil
}

// Check tells whether both ends can be of one packet.
func (q Question) Check() error {
	if !q.To.IsValid() {
		return errors.New("no destination: want " + Usage)
	}
	if q.From.IsValid() && q.From.Addr().Is4() != q.To.Addr().Is4() {
		return fmt.Errorf("%s and %s are of two families: no packet has both", q.From.Addr(), q.To.Addr())
	}
	return nil
}

// addrPort reads an address with or without a port; port 0 is none.
func addrPort(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port()), nil
	}
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil {
		return netip.AddrPortFrom(a.Unmap().WithZone(""), 0), nil
	}
	if host, port, ok := cutLast(s); ok {
		if _, err := netip.ParseAddr(host); err == nil {
			if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
				return netip.AddrPort{}, fmt.Errorf("port %q: want a number up to 65535", port)
			}
		}
	}
	return netip.AddrPort{}, errors.New("want an IP address, as 10.96.0.10:53 or [fd00::a]:53")
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return s, "", false
	}
	return strings.Trim(s[:i], "[]"), s[i+1:], true
}

// unknownInterface stands for one that nobody named. No interface can have the name (dev_valid_name in net/core/dev.c).
const unknownInterface = "/"

// packet completes the question with what the node knows. The kernel knows by which interface a packet came in; of a
// person's packet it is guessed: a source that is the node's own is sent by the node.
func (q Question) packet(n model.Node) model.Packet {
	p := model.Packet{Src: q.From, Dst: q.To, Proto: q.Proto, Interface: q.In}
	if !p.Src.IsValid() {
		p.Src = netip.AddrPortFrom(ownAddr(n, q.To.Addr().Is6()), 0)
	}
	own := p.Src.Addr().IsLoopback() || slices.Contains(n.Addrs, p.Src.Addr()) || !q.From.IsValid()
	if p.Interface == "" && !own {
		p.Interface = unknownInterface
	}
	return p
}

// ownAddr is what the node would send from, as well as can be known here.
func ownAddr(n model.Node, v6 bool) netip.Addr {
	for _, a := range n.Addrs {
		if a.Is6() == v6 && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			return a
		}
	}
	if v6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}
