//go:build vmguest

package ipvs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// wire is a node in a network namespace of its own, on the real kernel: dptest's node, with an interface for pods and one for everybody
// else. Packets are put on the other ends of these, and looked for there.
type wire struct {
	node, outer *kernel.NS
	ends        map[string]*end // by name of the node's interface; "lo" too
	raw         [2]int          // sockets of the node that send what they are told, by family
	passed      *kernel.NFNetlink
	counts      map[string]uint64
	ports       map[netip.AddrPort]uint16
	serial      uint64
	sent        int
}

type end struct {
	fd, index int
	dst       net.HardwareAddr // of the node's interface
	src       net.HardwareAddr
}

const setup = `
link add veth-a type veth peer name pa netns OUTER
link add eth0 type veth peer name pe netns OUTER
link set veth-a arp off
link set eth0 arp off
link set veth-a up
link set eth0 up
addr add 10.244.0.1/24 dev veth-a
addr add fd00:244::1/64 dev veth-a nodad
addr add 192.168.7.1/24 dev eth0
addr add 192.168.7.2/24 dev eth0
addr add fd00:7::1/64 dev eth0 nodad
addr add fd00:7::2/64 dev eth0 nodad
route add default dev eth0
route add ::/0 dev eth0
`

const observer = `
add table inet seen
add counter inet seen passed
add chain inet seen input { type filter hook input priority 300 ; }
add rule inet seen input meta l4proto { 6, 17, 132 } th sport 1024-65535 ct state new counter name passed drop
add counter inet seen asked
add chain inet seen postrouting { type filter hook postrouting priority 99 ; }
add rule inet seen postrouting meta mark & 0x4000 == 0x4000 counter name asked
`

var settings = map[string]string{
	"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/default/rp_filter": "0",
	"net/ipv4/conf/eth0/rp_filter": "0", "net/ipv4/conf/veth-a/rp_filter": "0", "net/ipv4/icmp_ratelimit": "0", "net/ipv6/icmp/ratelimit": "0",
	"net/ipv4/conf/all/send_redirects": "0", "net/ipv4/conf/eth0/send_redirects": "0", "net/ipv4/conf/veth-a/send_redirects": "0",
	"net/ipv4/conf/all/accept_local": "0", "net/ipv4/conf/all/log_martians": "0",
}

func run(line, input string) error {
	words := strings.Fields(line)
	c := exec.Command(words[0], words[1:]...)
	c.Stdin = strings.NewReader(input)
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

func newWire() (w *wire, err error) {
	w = &wire{counts: map[string]uint64{}, ends: map[string]*end{}, ports: map[netip.AddrPort]uint16{}}
	if w.node, err = kernel.NewNS(); err != nil {
		return nil, err
	}
	if w.outer, err = kernel.NewNS(); err != nil {
		return nil, err
	}
	err = w.node.Do(func() error {
		if err := errors.Join(run("ip -batch -", strings.ReplaceAll(setup, "OUTER", w.outer.Path())), run("nft -f -", observer)); err != nil {
			return err
		}
		for name, value := range settings {
			if err := kernel.SetSysctl(name, value); err != nil {
				return err
			}
		}
		for i, f := range []int{unix.AF_INET, unix.AF_INET6} {
			fd, err := unix.Socket(f, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			w.raw[i] = fd
		}
		var err error
		if w.passed, err = kernel.OpenNFNetlink(); err != nil {
			return err
		}
		return w.listen("lo", "lo", nil)
	})
	if err != nil {
		return nil, err
	}
	macs := map[string]net.HardwareAddr{}
	err = w.node.Do(func() error {
		for _, name := range []string{"veth-a", "eth0"} {
			i, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			macs[name] = i.HardwareAddr
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return w, w.outer.Do(func() error {
		for name, peer := range map[string]string{"veth-a": "pa", "eth0": "pe"} {
			if err := errors.Join(run("ip link set "+peer+" up", ""), w.listen(name, peer, macs[name])); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w *wire) close() {
	for _, e := range w.ends {
		unix.Close(e.fd)
	}
	unix.Close(w.raw[0])
	unix.Close(w.raw[1])
	w.passed.Close()
	w.node.Close()
	w.outer.Close()
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }

func (w *wire) listen(name, local string, dst net.HardwareAddr) error {
	i, err := net.InterfaceByName(local)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: i.Index}); err != nil {
		return err
	}
	w.ends[name] = &end{fd: fd, index: i.Index, dst: dst, src: i.HardwareAddr}
	return nil
}

// send sends a packet that opens a flow, and tells what became of it.
func (w *wire) send(p model.Packet) (out dptest.Outcome, err error) {
	out.Verdict = model.Drop
	at := netip.AddrPortFrom(p.Src.Addr(), uint16(p.Proto)) // a port for each flow, or the kernel may give it another one on its way to the same endpoint
	if w.ports[at] < 1024 {
		w.ports[at] = 1024
	}
	w.ports[at]++
	p.Src = netip.AddrPortFrom(p.Src.Addr(), w.ports[at])
	w.serial++
	w.sent++
	payload := binary.BigEndian.AppendUint64([]byte("fairlead"), w.serial)
	w.drain(func(string, []byte) bool { return false })
	if err := w.inject(p, build(p, payload)); err != nil && !errors.Is(err, unix.EPERM) { // what was dropped on its way out
		return dptest.Outcome{}, err
	}
	if out, ok := w.seen(p, payload); ok {
		return out, nil
	}
	if err := w.fence(p, payload, &out); err != nil || out.Verdict != model.Drop {
		return out, err
	}
	if w.more("passed") {
		out.Verdict = model.Pass
	}
	return out, nil
}

// fence sends a packet that the node sends on to the same network. A processor does one packet after the other: when it comes, all that
// became of the one before has been seen.
func (w *wire) fence(p model.Packet, payload []byte, out *dptest.Outcome) error {
	w.serial++
	mine := binary.BigEndian.AppendUint64([]byte("fence..."), w.serial)
	f := model.Packet{Src: netip.MustParseAddrPort("203.0.113.254:9"), Dst: netip.MustParseAddrPort("203.0.113.253:9"), Proto: model.UDP, Interface: "eth0"}
	if err := w.inject(f, build(f, mine)); err != nil {
		return err
	}
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
		fenced := false
		w.drain(func(name string, b []byte) bool {
			if o, ok := w.outcome(p, payload, name, b); ok {
				*out = o
			}
			fenced = fenced || bytes.HasSuffix(b, mine)
			return false
		})
		if fenced {
			return nil
		}
		unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // the kernel's own thread may have it
	}
	return errors.New("the node forwards nothing any more")
}

func (w *wire) inject(p model.Packet, packet []byte) error {
	if p.Interface == "" {
		if p.Dst.Addr().Is6() {
			return unix.Sendto(w.raw[1], packet, 0, &unix.SockaddrInet6{Addr: p.Dst.Addr().As16()})
		}
		return unix.Sendto(w.raw[0], packet, 0, &unix.SockaddrInet4{Addr: p.Dst.Addr().As4()})
	}
	e := w.ends[p.Interface]
	typ := uint16(unix.ETH_P_IP)
	if p.Dst.Addr().Is6() {
		typ = unix.ETH_P_IPV6
	}
	frame := append(append(append([]byte{}, e.dst...), e.src...), byte(typ>>8), byte(typ))
	return unix.Sendto(e.fd, append(frame, packet...), 0, &unix.SockaddrLinklayer{Ifindex: e.index, Protocol: htons(typ)})
}

// more tells whether a counter of the observer has grown: "passed" counts what the node's own servers would have got, "asked" what shall
// be hidden.
func (w *wire) more(counter string) bool {
	b := kernel.AppendAttrString(nil, unix.NFTA_OBJ_TABLE, "seen")
	b = kernel.AppendAttrU32(kernel.AppendAttrString(b, unix.NFTA_OBJ_NAME, counter), unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
	m, err := w.passed.Get(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETOBJ, unix.NFPROTO_INET, b)
	if err != nil {
		panic(err)
	}
	var n uint64
	for typ, v := range kernel.Attrs(m.Attrs) {
		if typ == unix.NFTA_OBJ_DATA {
			for typ, v := range kernel.Attrs(v) {
				if typ == unix.NFTA_COUNTER_PACKETS {
					n = kernel.AttrU64(v)
				}
			}
		}
	}
	was := w.counts[counter]
	w.counts[counter] = n
	return n != was
}

// drain reads all that waits.
func (w *wire) drain(each func(name string, packet []byte) bool) bool {
	buf := make([]byte, 2048)
	for name, e := range w.ends {
		for {
			n, from, err := unix.Recvfrom(e.fd, buf, unix.MSG_DONTWAIT)
			if err != nil {
				break
			}
			ll := from.(*unix.SockaddrLinklayer)
			if name != "lo" && ll.Pkttype == unix.PACKET_OUTGOING || n < 14 {
				continue // what we sent
			}
			if each(name, buf[14:n]) {
				return true
			}
		}
	}
	return false
}

func (w *wire) seen(p model.Packet, payload []byte) (out dptest.Outcome, ok bool) {
	ok = w.drain(func(name string, b []byte) (ok bool) {
		out, ok = w.outcome(p, payload, name, b)
		return ok
	})
	return out, ok
}

// outcome is what a packet that was seen tells of the one that was sent.
func (w *wire) outcome(p model.Packet, payload []byte, name string, b []byte) (out dptest.Outcome, ok bool) {
	src, dst, proto, rest, ok := cut(b)
	if !ok {
		return out, false
	}
	unreachable := proto == 1 && rest[0] == 3 || proto == 58 && rest[0] == 1
	switch {
	case bytes.Contains(rest, payload) && proto == uint8(p.Proto):
		to := netip.AddrPortFrom(dst, binary.BigEndian.Uint16(rest[2:]))
		out = dptest.Outcome{Verdict: model.Forward, Backend: to, SNAT: w.hidden(p, rest) || src != p.Src.Addr()}
		if to == p.Dst && src == p.Src.Addr() {
			out = dptest.Outcome{Verdict: model.Pass}
		}
		return out, name != "lo" // there it is on its way in; whoever gets it tells
	case proto == uint8(model.TCP) && dst == p.Src.Addr() && binary.BigEndian.Uint16(rest[2:]) == p.Src.Port() && rest[13]&4 != 0,
		unreachable && dst == p.Src.Addr() && inner(rest[8:], p):
		return dptest.Outcome{Verdict: model.Reject}, true
	}
	return out, false
}

// hidden tells whether a packet of the node's was hidden behind the same address: its port is another one then. By itself that may just
// be a port that was taken.
func (w *wire) hidden(p model.Packet, l4 []byte) bool {
	return w.more("asked") && binary.BigEndian.Uint16(l4) != p.Src.Port()
}

// inner tells whether an ICMP error is about a packet; its payload may be cut off.
func inner(b []byte, p model.Packet) bool {
	_, dst, proto, rest, ok := cut(b)
	return ok && dst == p.Dst.Addr() && proto == uint8(p.Proto) && len(rest) >= 4 && binary.BigEndian.Uint16(rest) == p.Src.Port()
}

func cut(b []byte) (src, dst netip.Addr, proto uint8, rest []byte, ok bool) {
	switch {
	case len(b) >= 28 && b[0]>>4 == 4:
		src, _ = netip.AddrFromSlice(b[12:16])
		dst, _ = netip.AddrFromSlice(b[16:20])
		return src, dst, b[9], b[int(b[0]&15)*4:], true
	case len(b) >= 48 && b[0]>>4 == 6:
		src, _ = netip.AddrFromSlice(b[8:24])
		dst, _ = netip.AddrFromSlice(b[24:40])
		return src, dst, b[6], b[40:], true
	}
	return
}

// build makes a TCP SYN, a UDP datagram or an SCTP INIT.
func build(p model.Packet, payload []byte) []byte {
	var l4 []byte
	l4 = binary.BigEndian.AppendUint16(l4, p.Src.Port())
	l4 = binary.BigEndian.AppendUint16(l4, p.Dst.Port())
	check := 0
	switch p.Proto {
	case model.TCP:
		l4 = append(l4, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, 2, 0xff, 0xff, 0, 0, 0, 0)
		check = 16
	case model.UDP:
		l4 = append(l4, 0, byte(8+len(payload)), 0, 0)
		check = 6
	case model.SCTP:
		l4 = append(l4, 0, 0, 0, 0, 0, 0, 0, 0) // verification tag, checksum
		l4 = append(l4, 1, 0, 0, byte(20+4+len(payload)))
		l4 = append(l4, 0, 0, 0, 7, 0, 0, 0xff, 0xff, 0, 1, 0, 1, 0, 0, 0, 1)
		l4 = append(l4, 0x80, 0x42, 0, byte(4+len(payload))) // a parameter that nobody knows
	}
	l4 = append(l4, payload...)
	src, dst := p.Src.Addr().AsSlice(), p.Dst.Addr().AsSlice()
	if p.Proto == model.SCTP {
		binary.LittleEndian.PutUint32(l4[8:], crc32.Checksum(l4, crc32.MakeTable(crc32.Castagnoli)))
	} else {
		pseudo := append(append(append([]byte{}, src...), dst...), 0, byte(p.Proto), byte(len(l4)>>8), byte(len(l4)))
		binary.BigEndian.PutUint16(l4[check:], checksum(append(pseudo, l4...)))
	}
	if p.Src.Addr().Is6() {
		h := []byte{6 << 4, 0, 0, 0, byte(len(l4) >> 8), byte(len(l4)), byte(p.Proto), 64}
		return append(append(append(h, src...), dst...), l4...)
	}
	n := 20 + len(l4)
	h := []byte{4<<4 | 5, 0, byte(n >> 8), byte(n), 0, 0, 0x40, 0, 64, byte(p.Proto), 0, 0}
	h = append(append(h, src...), dst...)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return append(h, l4...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	if ^uint16(sum) == 0 {
		return 0xffff
	}
	return ^uint16(sum)
}

// text is all that the node's kernel holds.
func (w *wire) text() (out string, err error) {
	err = w.node.Do(func() error {
		for _, line := range []string{"nft -s list ruleset", "ip rule", "ip -6 rule", "ip route show table all type local", "ip -6 route show table all"} {
			words := strings.Fields(line)
			b, err := exec.Command(words[0], words[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", line, err, b)
			}
			out += line + "\n" + string(b)
		}
		b, err := os.ReadFile("/proc/thread-self/net/ip_vs")
		if err == nil {
			lines := strings.SplitN(string(b), "\n", 4)
			out += lines[len(lines)-1]
		}
		return nil
	})
	return out, err
}
