package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// Outcome is how a try ended.
type Outcome uint8

// The outcomes.
const (
	Answered    Outcome = iota
	Reset               // refused with a TCP reset
	Unreachable         // refused with an ICMP port unreachable
	Silence             // no answer of any kind in time
	Cut                 // connected, and lost before the answer
	Failed              // anything else; Err says what
)

func (o Outcome) String() string {
	return [...]string{"answered", "reset", "unreachable", "silence", "cut", "failed"}[o]
}

// Refused tells whether somebody said no.
func (o Outcome) Refused() bool { return o == Reset || o == Unreachable }

// Answer is what one try brought.
type Answer struct {
	Outcome Outcome
	By      string         // the name of who answered
	Port    uint16         // the port it listens on
	Seen    netip.AddrPort // the client, as the server saw it
	Local   netip.AddrPort // the client, as it is
	Took    time.Duration
	Err     error // what the client's kernel said, if it did
	At      time.Time
}

// Backend is "name:port" of who answered.
func (a Answer) Backend() string { return fmt.Sprintf("%s:%d", a.By, a.Port) }

// String prints the answer as people read it.
func (a Answer) String() string {
	switch {
	case a.Outcome == Answered:
		return fmt.Sprintf("%s (saw %s)", a.Backend(), a.Seen)
	case a.Err != nil:
		return fmt.Sprintf("%s after %s (%v)", a.Outcome, a.Took.Round(time.Millisecond), a.Err)
	}
	return fmt.Sprintf("%s after %s", a.Outcome, a.Took.Round(time.Millisecond))
}

// Call is one try to reach somebody.
type Call struct {
	From  *Actor
	Proto model.Proto    // TCP or UDP
	Src   netip.AddrPort // to send from; the zero value, or its parts, leave the choice to the kernel
	Dst   netip.AddrPort
	Wait  time.Duration // until silence is silence; 0 is a second
}

func (c Call) wait() time.Duration {
	if c.Wait == 0 {
		return time.Second
	}
	return c.Wait
}

// Do sends, waits for the answer, and hangs up.
func (c Call) Do() Answer {
	at := time.Now()
	conn, a := c.open(at)
	if conn != nil {
		defer conn.Close()
		a = c.listen(conn, a)
		if a.Outcome == Answered && c.Proto == model.TCP {
			hangUp(conn)
		}
	}
	a.At, a.Took = at, time.Since(at)
	return a
}

// hangUp lets the server close first: TIME_WAIT is then on its side, and the client's port can be used again.
func hangUp(conn net.Conn) {
	conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := conn.Write([]byte("bye\n")); err == nil {
		io.Copy(io.Discard, conn) // until the server's FIN; whatever else happens, the caller closes
	}
}

// listen waits for the server's line.
func (c Call) listen(conn net.Conn, a Answer) Answer {
	conn.SetDeadline(time.Now().Add(c.wait()))
	if c.Proto == model.UDP {
		_, err := conn.Write([]byte("hello\n"))
		if errors.Is(err, unix.EPERM) { // the sender's own netfilter dropped it; it may have sent an ICMP error, too
			conn.SetDeadline(time.Now().Add(min(c.wait(), 200*time.Millisecond)))
		} else if err != nil {
			return failed(a, err)
		}
	}
	line, err := bufio.NewReaderSize(conn, 128).ReadString('\n')
	if err != nil {
		a = failed(a, err)
		if a.Outcome != Silence && c.Proto == model.TCP {
			a.Outcome = Cut
		}
		return a
	}
	return parseAnswer(a, line)
}

// parseAnswer reads "name client-ip:port own-port".
func parseAnswer(a Answer, line string) Answer {
	f := strings.Fields(line)
	if len(f) != 3 {
		a.Outcome, a.Err = Failed, fmt.Errorf("strange answer %q", line)
		return a
	}
	seen, err := netip.ParseAddrPort(f[1])
	port, err2 := strconv.ParseUint(f[2], 10, 16)
	if err := errors.Join(err, err2); err != nil {
		a.Outcome, a.Err = Failed, fmt.Errorf("strange answer %q: %w", line, err)
		return a
	}
	a.Outcome, a.By, a.Seen, a.Port = Answered, f[0], seen, uint16(port)
	return a
}

// failed sorts an error of the kernel into an outcome.
func failed(a Answer, err error) Answer {
	a.Err = err
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		a.Outcome, a.Err = Silence, nil
	case errors.Is(err, unix.ECONNREFUSED):
		a.Outcome = Unreachable
	default:
		a.Outcome = Failed
	}
	return a
}

// open makes the connection: a net.Conn, or the answer that says why there is none. A source port that was used a moment
// ago may still wait for the last acknowledgement of its last connection: it is tried again, as long as there is time.
func (c Call) open(at time.Time) (net.Conn, Answer) {
	for {
		conn, a := c.tryOpen(at)
		if !errors.Is(a.Err, unix.EADDRNOTAVAIL) || c.Src.Port() == 0 || time.Since(at) > c.wait() {
			return conn, a
		}
		time.Sleep(time.Millisecond)
	}
}

func (c Call) tryOpen(at time.Time) (net.Conn, Answer) {
	fd, err := c.socket()
	if err != nil {
		return nil, Answer{Outcome: Failed, Err: err}
	}
	recverr(fd, c.Dst.Addr().Is6(), c.Proto == model.TCP) // for connect, to tell a reset from an ICMP error
	f := os.NewFile(uintptr(fd), "lab call")
	defer f.Close() // net.FileConn below works on a copy
	if err := f.SetDeadline(at.Add(c.wait())); err != nil {
		return nil, Answer{Outcome: Failed, Err: fmt.Errorf("set deadline: %w", err)}
	}
	if a, ok := c.connect(f); !ok {
		return nil, a
	}
	recverr(fd, c.Dst.Addr().Is6(), false) // an ICMP error must not end a flow that stands
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, Answer{Outcome: Failed, Err: err}
	}
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		conn.Close()
		return nil, Answer{Outcome: Failed, Err: err}
	}
	return conn, Answer{Local: local}
}

// socket opens and binds the client's socket inside its namespace.
func (c Call) socket() (fd int, err error) {
	family := unix.AF_INET
	if c.Dst.Addr().Is6() {
		family = unix.AF_INET6
	}
	kind := unix.SOCK_STREAM
	if c.Proto == model.UDP {
		kind = unix.SOCK_DGRAM
	}
	err = c.From.Do(func() (err error) {
		fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil && (c.Src.Port() != 0 || c.Src.Addr().IsValid()) {
		err = unix.Bind(fd, sockaddr(c.source()))
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("bind %s: %w", c.Src, err)
	}
	return fd, nil
}

// recverr asks the kernel to queue ICMP errors (ip(7), IP_RECVERR), or not. Where it can't, a reset is what is told.
func recverr(fd int, v6, on bool) {
	level, option := unix.SOL_IP, unix.IP_RECVERR
	if v6 {
		level, option = unix.SOL_IPV6, unix.IPV6_RECVERR
	}
	value := 0
	if on {
		value = 1
	}
	unix.SetsockoptInt(fd, level, option, value)
}

func (c Call) source() netip.AddrPort {
	if c.Src.Addr().IsValid() {
		return c.Src
	}
	return netip.AddrPortFrom(model.Unspecified(c.Dst.Addr().Is6()), c.Src.Port())
}

func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: ap.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
}

// connect connects the socket; when it can't, it tells why.
func (c Call) connect(f *os.File) (Answer, bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return Answer{Outcome: Failed, Err: err}, false
	}
	var (
		begun, icmp bool
		result      error
	)
	err = raw.Write(func(fd uintptr) bool {
		if !begun {
			begun = true
			result = unix.Connect(int(fd), sockaddr(c.Dst))
			return result != unix.EINPROGRESS
		}
		errno, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			result = err
			return true
		}
		if errno == 0 {
			_, notYet := unix.Getpeername(int(fd)) // the poller wakes too early at times
			result = nil
			return notYet == nil
		}
		result, icmp = unix.Errno(errno), hasICMP(int(fd))
		return true
	})
	if err == nil {
		err = result
	}
	if err == nil {
		return Answer{}, true
	}
	a := failed(Answer{}, err)
	if a.Outcome == Unreachable && !icmp && c.Proto == model.TCP {
		a.Outcome = Reset
	}
	return a, false
}

// hasICMP tells whether the socket's error came in an ICMP message (ip(7), IP_RECVERR): a TCP reset leaves none.
func hasICMP(fd int) bool {
	oob := make([]byte, 512)
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 64), oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	return err == nil && n > 0
}
