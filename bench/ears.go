package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ears hear, in the node's namespace, what ends the two stretches of a change: the packet that brings it to the program, and the
// kernel's notice that new rules are in force.
type ears struct {
	wire  int // a packet socket with what the API server sends to the program
	rules int // the netlink group of nf_tables
}

// hear listens to one program, which is connected to the API server by now.
func hear(p *program) (e *ears, err error) {
	e = &ears{wire: -1, rules: -1}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	ports, err := portsTo(apiPort, p.cmd.Process.Pid)
	if err != nil {
		return nil, fmt.Errorf("find the connections of %s: %w", p, err)
	}
	if e.wire, err = tap(ports); err != nil {
		return nil, fmt.Errorf("listen to the API server's packets: %w", err)
	}
	e.rules, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err == nil {
		err = unix.Bind(e.rules, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	}
	if err != nil {
		return nil, fmt.Errorf("listen to changes of rules: %w", err)
	}
	return e, nil
}

func (e *ears) close() {
	unix.Close(e.wire)
	unix.Close(e.rules)
}

// forget drops what was heard so far.
func (e *ears) forget() {
	e.packets(func(time.Time, []byte) {})
	e.notices()
}

// notice waits for the kernel's next notice of new rules, at most until then; it returns false when none came. What it says does
// not matter here. Legacy iptables gives none.
func (e *ears) notice(until time.Time) bool {
	if await(e.rules, unix.POLLIN, until) == unix.ETIMEDOUT {
		return false
	}
	e.notices()
	return true
}

// notices takes all that are there. ENOBUFS says that some were lost, which is a notice as well.
func (e *ears) notices() {
	for buffer := make([]byte, 1<<16); ; {
		if _, _, err := unix.Recvfrom(e.rules, buffer, 0); err == unix.EAGAIN {
			return
		}
	}
}

// delivery is when the change came to the program: the first packet of a size that an EndpointSlice needs, and a bookmark or a
// window of HTTP/2 does not.
func (e *ears) delivery() (at time.Time, err error) {
	const least = 300
	seen := 0
	e.packets(func(came time.Time, ip []byte) {
		seen++
		header := int(ip[0]&0xf) * 4
		if len(ip) < header+20 {
			return
		}
		tcp := ip[header:]
		data := int(binary.BigEndian.Uint16(ip[2:])) - header - int(tcp[12]>>4)*4
		if at.IsZero() && data >= least {
			at = came
		}
	})
	if at.IsZero() {
		err = fmt.Errorf("none of %d packets from the API server brought the change", seen)
	}
	return at, err
}

// packets gives each packet that is there, from its IP header on, with the kernel's time of it.
func (e *ears) packets(each func(at time.Time, ip []byte)) {
	packet, control := make([]byte, snap), make([]byte, 128)
	for {
		n, size, _, _, err := unix.Recvmsg(e.wire, packet, control, 0)
		if err != nil {
			return
		}
		messages, _ := unix.ParseSocketControlMessage(control[:size])
		for _, m := range messages {
			if m.Header.Type == unix.SCM_TIMESTAMPNS && len(m.Data) >= int(unsafe.Sizeof(unix.Timespec{})) && n >= 20 {
				at := *(*unix.Timespec)(unsafe.Pointer(&m.Data[0]))
				each(time.Unix(at.Unix()), packet[:n])
			}
		}
	}
}

// snap is how much of a packet is kept: the headers of IP and TCP with all their options.
const snap = 120

// tap opens a socket that keeps the packets to some TCP ports on the loopback interface, each with the time at which the kernel
// had it. Nobody wakes up for them.
func tap(ports []uint16) (int, error) {
	const (
		loopback = 1       // its index in every network namespace
		buffer   = 8 << 20 // packets count with all their memory, though little is kept of them
	)
	protocol := uint16(unix.ETH_P_IP<<8&0xff00 | unix.ETH_P_IP>>8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 22}} // destination port, behind an IPv4 header without options
	for i, port := range ports {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(port), Jt: uint8(len(ports) - i)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0}, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: snap})
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1), // each would be there twice
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: loopback}))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// portsTo are the local ports of a process's TCP connections to a port, by the numbers of its sockets.
func portsTo(port uint16, pid int) (ports []uint16, err error) {
	sockets := map[string]bool{}
	dir := fmt.Sprintf("/proc/%d/fd/", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if to, err := os.Readlink(dir + f.Name()); err == nil && strings.HasPrefix(to, "socket:[") {
			sockets[strings.Trim(to, "socket:[]")] = true
		}
	}
	text, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // sl local remote state queues timer retransmits uid timeout inode: proc_net_tcp
		if len(fields) < 10 || !sockets[fields[9]] || !strings.HasSuffix(fields[2], fmt.Sprintf(":%04X", port)) {
			continue
		}
		local, err := strconv.ParseUint(fields[1][strings.IndexByte(fields[1], ':')+1:], 16, 16)
		if err != nil {
			return nil, fmt.Errorf("/proc/net/tcp: %q: %w", line, err)
		}
		ports = append(ports, uint16(local))
	}
	if len(ports) == 0 {
		return nil, fmt.Errorf("none to port %d", port)
	}
	return ports, nil
}
