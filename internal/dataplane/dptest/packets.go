package dptest

import (
	"net/netip"
	"slices"

	"fairlead/internal/model"
)

// sender is where a packet comes from: an address, and the interface it comes in by.
type sender struct {
	ip netip.Addr
	in string
}

// senders are all who knock, in one family; pods of this node among them are backends too, which makes for hairpins.
func (f family) senders() []sender {
	return []sender{
		{f.localPod(10), podInterface},
		{f.localPod(99), podInterface},
		{f.remotePod(99), outsideInterface},
		{f.node(1), ""},
		{f.bridge(), ""},
		{f.loopback(), ""},
		{f.client(5), outsideInterface},
		{f.stranger(), outsideInterface},
	}
}

// packets are the ones of interest about some keys, whether or not a frontend is there (yet, or any more).
func packets(keys []model.Key) []model.Packet {
	var out []model.Packet
	for _, k := range keys {
		f := family{k.V6()}
		for _, dst := range destinations(f, k) {
			for _, s := range f.senders() {
				if possible(s, dst.Addr()) {
					out = append(out, s.packet(dst, k.Proto))
				}
			}
		}
		dst := destinations(f, k)[0]
		stranger := sender{f.client(5), outsideInterface}
		out = append(out, stranger.packet(netip.AddrPortFrom(dst.Addr(), 9), k.Proto), stranger.packet(dst, otherProto(k.Proto)))
	}
	return out
}

// destinations are the addresses that a key may stand for, and one that a NodePort never stands for.
func destinations(f family, k model.Key) []netip.AddrPort {
	ips := []netip.Addr{k.IP}
	if k.NodePort() {
		ips = []netip.Addr{f.node(1), f.node(2), f.loopback(), f.vip(250)}
	}
	var out []netip.AddrPort
	for _, ip := range ips {
		out = append(out, netip.AddrPortFrom(ip, k.Port))
	}
	return out
}

// nobodys are packets to addresses that no Service ever has: two of the range of ClusterIPs, one beside it, and those of a
// node elsewhere, of a pod there, and of this node.
func nobodys() []model.Packet {
	var out []model.Packet
	for _, f := range families {
		for _, dst := range []netip.Addr{f.clusterIP(200), f.clusterIP(255), f.vip(250), f.node(77), f.remotePod(77), f.node(2)} {
			for i, s := range f.senders() {
				if possible(s, dst) {
					out = append(out, s.packet(netip.AddrPortFrom(dst, 4321), []model.Proto{model.TCP, model.UDP, model.SCTP}[i%3]))
				}
			}
		}
	}
	return out
}

// possible leaves out what no kernel sends: the node talks to its loopback addresses from one of them, and to others not.
func possible(s sender, dst netip.Addr) bool {
	return s.in != "" || s.ip.IsLoopback() == dst.IsLoopback()
}

func otherProto(p model.Proto) model.Proto {
	if p == model.TCP {
		return model.UDP
	}
	return model.TCP
}

// packet opens a flow. Each client port is used as often as the suite likes: every packet is the first of its flow.
func (s sender) packet(dst netip.AddrPort, p model.Proto) model.Packet {
	return model.Packet{Src: netip.AddrPortFrom(s.ip, 40000), Dst: dst, Proto: p, Interface: s.in}
}

// another is the same packet from another client of the same kind, so that stickiness does not hide backends. The node has
// no other self.
func another(p model.Packet, i int) (model.Packet, bool) {
	for _, f := range families {
		from := f.client
		switch p.Src.Addr() {
		case f.client(5):
		case f.localPod(99):
			from = f.localPod
		default:
			continue
		}
		p.Src = netip.AddrPortFrom(from(100+i%100), p.Src.Port())
		return p, true
	}
	return p, false
}

func has(bs []model.Backend, a netip.AddrPort) bool {
	return slices.ContainsFunc(bs, func(b model.Backend) bool { return b.Addr == a })
}
