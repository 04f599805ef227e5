package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// NFListener hears what the kernel tells about changes in a netfilter subsystem, in the network namespace in which it was
// opened.
type NFListener struct {
	file *os.File
	raw  syscall.RawConn
	in   []byte
}

// ErrEventsLost says that more happened than the socket could hold; what it was is not known.
var ErrEventsLost = errors.New("events were lost")

// listenBuffer holds the events of a transaction of some 10,000 rules by others while the reader is busy.
const listenBuffer = 8 << 20

// ListenNFNetlink subscribes to a group (unix.NFNLGRP_*). Events that the socket with the port except caused are left out by
// the kernel, so that our own large writes do not fill the buffer; 0 is none.
func ListenNFNetlink(group int, except uint32) (*NFListener, error) {
	fd, err := openNetfilter(unix.SOCK_NONBLOCK)
	if err != nil {
		return nil, err
	}
	if err := subscribe(fd, group, except); err != nil {
		unix.Close(fd)
		return nil, err
	}
	l := &NFListener{file: os.NewFile(uintptr(fd), "nfnetlink events"), in: make([]byte, recvBuffer)}
	if l.raw, err = l.file.SyscallConn(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func subscribe(fd, group int, except uint32) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenBuffer); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, listenBuffer) // as much as is allowed
	}
	if except != 0 {
		if err := ignorePort(fd, except); err != nil {
			return fmt.Errorf("filter netfilter events: %w", err)
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
		return fmt.Errorf("subscribe to netfilter events: %w", err)
	}
	return nil
}

// ignorePort attaches a socket filter: all messages that come together have one cause, so the first header decides. The filter
// loads numbers in network byte order.
func ignorePort(fd int, port uint32) error {
	var raw [4]byte
	binary.NativeEndian.PutUint32(raw[:], port)
	prog := [...]unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 12}, // nlmsg_pid
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: binary.BigEndian.Uint32(raw[:])},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
}

// Close ends the subscription.
func (l *NFListener) Close() error { return l.file.Close() }

// Receive waits for events, at most for the given time (0 is for ever), and gives those that came together to each. Its error
// is [ErrEventsLost], os.ErrDeadlineExceeded, that of ctx, or of the socket.
func (l *NFListener) Receive(ctx context.Context, wait time.Duration, each func(NFMessage)) error {
	var until time.Time
	if wait > 0 {
		until = time.Now().Add(wait)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.file.SetReadDeadline(time.Now()) })
	defer stop()
	if err := l.file.SetReadDeadline(until); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // its deadline may have come before ours and be gone
		return err
	}
	n, err := l.read()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, unix.ENOBUFS):
		return ErrEventsLost
	case err != nil:
		return err
	}
	for b := l.in[:n]; len(b) >= nlHeader; {
		h, body, rest, ok := cutMessage(b)
		if !ok {
			break
		}
		b = rest
		if len(body) >= nfHeader && h.typ >= unix.NLMSG_MIN_TYPE {
			each(NFMessage{Type: h.typ, Port: h.port, Family: body[0], Attrs: body[nfHeader:]})
		}
	}
	return nil
}

func (l *NFListener) read() (n int, err error) {
	waitErr := l.raw.Read(func(fd uintptr) bool {
		n, _, err = unix.Recvfrom(int(fd), l.in, 0)
		return err != unix.EAGAIN && err != unix.EINTR
	})
	if waitErr != nil {
		return 0, waitErr
	}
	return n, os.NewSyscallError("netfilter: recvfrom", err)
}
