package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NFNetlink is a socket to the netfilter subsystems of the kernel (NETLINK_NETFILTER): nf_tables, nfacct and others. It
// belongs to the network namespace in which it was opened. One goroutine at a time may use it.
//
// The kernel works inside sendmsg(2): when a request has been sent, its answer is already waiting, so that nothing here
// blocks for long.
type NFNetlink struct {
	fd   int
	port uint32
	seq  uint32
	in   []byte
	out  []byte

	buffer int // of sending, in bytes, as far as it is known
}

// NFMessage is a message from the kernel. Attrs are valid until the next one is read.
type NFMessage struct {
	Type   uint16 // subsystem<<8 | kind
	Port   uint32 // port of the socket that caused it
	Family uint8
	Attrs  []byte
}

// ErrDumpInterrupted says that the kernel's tables changed while they were being listed; ask again.
var ErrDumpInterrupted = errors.New("the tables changed while they were listed")

const (
	nlHeader = 16 // linux/netlink.h struct nlmsghdr
	nfHeader = 4  // linux/netfilter/nfnetlink.h struct nfgenmsg

	recvBuffer = 64 << 10 // a dump comes in pieces of up to 32 KiB (netlink_dump); an answer is smaller
)

// OpenNFNetlink opens a socket in the network namespace of the calling thread.
func OpenNFNetlink() (*NFNetlink, error) {
	fd, err := openNetfilter(0)
	if err != nil {
		return nil, err
	}
	c := &NFNetlink{fd: fd, in: make([]byte, recvBuffer)}
	if c.port, err = localPort(fd); err != nil {
		unix.Close(fd)
		return nil, err
	}
	tv := unix.Timeval{Sec: 30} // never reached; better an error than a program that stands still
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	return c, nil
}

// openNetfilter makes a bound socket that keeps its answers short and gives the kernel's own words with an error.
func openNetfilter(flags int) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, unix.NETLINK_NETFILTER)
	if err != nil {
		return -1, fmt.Errorf("open netfilter socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind netfilter socket: %w", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1) // since Linux 4.12; without it errors say less
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1) // since Linux 4.3
	return fd, nil
}

func localPort(fd int) (uint32, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return 0, fmt.Errorf("name of netfilter socket: %w", err)
	}
	return sa.(*unix.SockaddrNetlink).Pid, nil
}

// Port is the address of the socket: events carry it as their cause.
func (c *NFNetlink) Port() uint32 { return c.port }

// Close closes the socket.
func (c *NFNetlink) Close() error { return unix.Close(c.fd) }

// Dump asks for a list and gives each message to each. An error of each ends it. [ErrDumpInterrupted] says that what was
// given may be torn.
func (c *NFNetlink) Dump(typ uint16, family uint8, attrs []byte, each func(NFMessage) error) error {
	if err := c.request(typ, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, family, attrs); err != nil {
		return err
	}
	var failed error
	torn := false
	for {
		n, err := c.recv(0)
		if err != nil {
			return err
		}
		for b := c.in[:n]; len(b) >= nlHeader; {
			h, body, rest, ok := cutMessage(b)
			if b = rest; !ok {
				return errors.New("netfilter: message cut off")
			}
			if h.seq != c.seq {
				continue
			}
			torn = torn || h.flags&unix.NLM_F_DUMP_INTR != 0
			switch h.typ {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return errors.Join(failed, answerError(h.typ, body), interrupted(torn))
			}
			if failed == nil && len(body) >= nfHeader {
				failed = each(NFMessage{Type: h.typ, Port: h.port, Family: body[0], Attrs: body[nfHeader:]})
			}
		}
	}
}

func interrupted(torn bool) error {
	if torn {
		return ErrDumpInterrupted
	}
	return nil
}

// Get asks for one object. When there is none, the error is unix.ENOENT.
func (c *NFNetlink) Get(typ uint16, family uint8, attrs []byte) (NFMessage, error) {
	if err := c.request(typ, unix.NLM_F_REQUEST, family, attrs); err != nil {
		return NFMessage{}, err
	}
	for {
		n, err := c.recv(0)
		if err != nil {
			return NFMessage{}, err
		}
		h, body, _, ok := cutMessage(c.in[:n])
		switch {
		case !ok || h.seq != c.seq:
		case h.typ == unix.NLMSG_ERROR:
			return NFMessage{}, answerError(h.typ, body)
		case len(body) >= nfHeader:
			return NFMessage{Type: h.typ, Port: h.port, Family: body[0], Attrs: body[nfHeader:]}, nil
		}
	}
}

// Do sends one request that only succeeds or fails, outside of any transaction (nfacct and the like). Flags are of
// NLM_F_CREATE and its kin.
func (c *NFNetlink) Do(typ, flags uint16, family uint8, attrs []byte) error {
	if err := c.request(typ, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags, family, attrs); err != nil {
		return err
	}
	for {
		n, err := c.recv(0)
		if err != nil {
			return err
		}
		if h, body, _, ok := cutMessage(c.in[:n]); ok && h.seq == c.seq && h.typ == unix.NLMSG_ERROR {
			return answerError(h.typ, body)
		}
	}
}

func (c *NFNetlink) request(typ, flags uint16, family uint8, attrs []byte) error {
	c.seq++
	b := append(appendHead(c.out[:0], typ, flags, family, 0), attrs...)
	c.out = b
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint32(b[8:], c.seq)
	return c.send(b)
}

func (c *NFNetlink) send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err != unix.EINTR {
			return os.NewSyscallError("netfilter: sendto", err)
		}
	}
}

func (c *NFNetlink) recv(flags int) (int, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.in, flags)
		if err != unix.EINTR {
			return n, os.NewSyscallError("netfilter: recvfrom", err)
		}
	}
}

type header struct {
	typ, flags uint16
	seq, port  uint32
}

// cutMessage splits the first message off b.
func cutMessage(b []byte) (h header, body, rest []byte, ok bool) {
	if len(b) < nlHeader {
		return h, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint32(b))
	if n < nlHeader || n > len(b) {
		return h, nil, nil, false
	}
	h = header{
		typ:   binary.NativeEndian.Uint16(b[4:]),
		flags: binary.NativeEndian.Uint16(b[6:]),
		seq:   binary.NativeEndian.Uint32(b[8:]),
		port:  binary.NativeEndian.Uint32(b[12:]),
	}
	return h, b[nlHeader:n], b[min(align4(n), len(b)):], true
}

// appendHead appends both headers of a message, with length and sequence number left open.
func appendHead(b []byte, typ, flags uint16, family uint8, resource uint16) []byte {
	b = append(b, 0, 0, 0, 0)
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0)
	b = append(b, family, unix.NFNETLINK_V0)
	return binary.BigEndian.AppendUint16(b, resource)
}

// AnswerError is a refusal with the kernel's own words, where it gave some.
type AnswerError struct {
	Errno unix.Errno
	Words string
}

func (e *AnswerError) Error() string {
	if e.Words == "" {
		return e.Errno.Error()
	}
	return e.Errno.Error() + " (" + e.Words + ")"
}

// Unwrap gives the errno, for errors.Is.
func (e *AnswerError) Unwrap() error { return e.Errno }

// answerError reads NLMSG_ERROR and NLMSG_DONE, which both start with a negative errno; nil when it is 0. The kernel's
// words follow the header of the request (linux/netlink.h enum nlmsgerr_attrs).
func answerError(typ uint16, body []byte) error {
	if len(body) < 4 {
		return nil
	}
	n := int32(binary.NativeEndian.Uint32(body))
	if n >= 0 {
		return nil
	}
	e := &AnswerError{Errno: unix.Errno(-n)}
	words := body[4:]
	if typ == unix.NLMSG_ERROR {
		words = words[min(nlHeader, len(words)):]
	}
	for t, v := range Attrs(words) {
		if t == unix.NLMSGERR_ATTR_MSG {
			e.Words = string(AttrBytes(v))
		}
	}
	return e
}
