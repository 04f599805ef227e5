package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Server answers "name client-ip:port own-port" in one line: once when a TCP connection opens and once more for every
// line it is sent, and to each UDP datagram. The line "bye" makes it close the connection, so that the client's port is
// free at once.
type Server struct {
	actor    *Actor
	addr     netip.AddrPort
	listener net.Listener   // TCP
	packets  net.PacketConn // UDP
	hits     atomic.Int64   // connections or datagrams so far

	mu    sync.Mutex
	conns map[net.Conn]bool
	done  bool
}

// Serve opens a server at an address of the actor; an unspecified address takes both families. It ends with the world.
func (a *Actor) Serve(network string, at netip.AddrPort) (*Server, error) {
	s := &Server{actor: a, addr: at, conns: map[net.Conn]bool{}}
	err := a.Do(func() (err error) {
		// The address is taken even if it is not there yet (IP_FREEBIND), as host daemons in a story may want it.
		lc := net.ListenConfig{Control: control(unix.SOL_IP, unix.IP_FREEBIND), KeepAlive: -1}
		switch network {
		case "tcp":
			s.listener, err = lc.Listen(context.Background(), network, listenAddr(at))
		case "udp":
			s.packets, err = lc.ListenPacket(context.Background(), network, listenAddr(at))
		default:
			err = fmt.Errorf("can't serve %q: want tcp or udp", network)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("serve %s: %w", at, err)
	}
	a.mu.Lock()
	a.servers = append(a.servers, s)
	a.mu.Unlock()
	if s.listener != nil {
		a.running.Go(s.accept)
	} else {
		a.running.Go(s.answerDatagrams)
	}
	context.AfterFunc(a.world.ctx, s.Close)
	return s, nil
}

// listenAddr is how Go wants to be told of both families: no address at all.
func listenAddr(at netip.AddrPort) string {
	if at.Addr().IsUnspecified() {
		return fmt.Sprintf(":%d", at.Port())
	}
	return at.String()
}

func control(level, option int) func(string, string, syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }), err)
	}
}

// Hits counts the connections or datagrams the server has had.
func (s *Server) Hits() int64 { return s.hits.Load() }

// Close ends the server and its connections.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = true
	if s.listener != nil {
		s.listener.Close()
	} else {
		s.packets.Close()
	}
	for c := range s.conns {
		c.Close()
	}
}

// Hits counts the connections and datagrams that all servers of the actor have had.
func (a *Actor) Hits() (n int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.servers {
		n += s.Hits()
	}
	return n
}

// StopServing closes all servers of the actor: to its clients it is dead.
func (a *Actor) StopServing() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.servers {
		s.Close()
	}
	a.servers = nil
}

func (s *Server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return // closed
		}
		s.hits.Add(1)
		if !s.keep(c) {
			c.Close()
			return
		}
		s.actor.running.Go(func() {
			defer s.drop(c)
			s.talk(c)
		})
	}
}

func (s *Server) keep(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.done {
		s.conns[c] = true
	}
	return !s.done
}

func (s *Server) drop(c net.Conn) {
	c.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

func (s *Server) talk(c net.Conn) {
	answer := s.line(c.RemoteAddr())
	for lines := bufio.NewScanner(c); ; {
		if _, err := c.Write(answer); err != nil {
			return
		}
		if !lines.Scan() || strings.TrimSpace(lines.Text()) == "bye" {
			return
		}
	}
}

func (s *Server) answerDatagrams() {
	buf := make([]byte, 2048)
	for {
		_, from, err := s.packets.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error for an answer that nobody wanted
		}
		s.hits.Add(1)
		s.packets.WriteTo(s.line(from), from) // a lost answer is a lost datagram
	}
}

func (s *Server) line(client net.Addr) []byte {
	ap, err := netip.ParseAddrPort(client.String())
	if err != nil {
		return nil
	}
	return fmt.Appendf(nil, "%s %s %d\n", s.actor.Name, netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), s.addr.Port())
}
