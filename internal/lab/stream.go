package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// Stream sends UDP datagrams from one socket, hence one source port, all the time.
type Stream struct {
	conn   net.Conn
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu     sync.Mutex
	events []Answer // what came back, answers and ICMP errors; the last thousand
	sent   int
}

// StartStream sends a datagram now and every interval, until Stop or the end of the world.
func (c Call) StartStream(every time.Duration) (*Stream, error) {
	c.Proto = model.UDP
	conn, a := c.open(time.Now())
	if conn == nil {
		return nil, fmt.Errorf("stream from %s to %s: %w", c.From.Name, c.Dst, a.Err)
	}
	ctx, cancel := context.WithCancel(c.From.world.ctx)
	s := &Stream{conn: conn, cancel: cancel}
	s.done.Go(func() { s.send(ctx, every) })
	s.done.Go(func() { s.receive(ctx, a.Local) })
	context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
	c.From.running.Go(func() { s.done.Wait(); conn.Close() })
	return s, nil
}

func (s *Stream) send(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		_, err := s.conn.Write([]byte("stream\n"))
		s.mu.Lock()
		s.sent++
		s.mu.Unlock()
		if errors.Is(err, unix.ECONNREFUSED) { // the error of an earlier datagram: whoever asks first is told
			s.note(failed(Answer{At: time.Now()}, err))
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Stream) receive(ctx context.Context, local netip.AddrPort) {
	buf := make([]byte, 256)
	for ctx.Err() == nil {
		a := Answer{Local: local}
		n, err := s.conn.Read(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			a = failed(a, err)
		default:
			a = parseAnswer(a, string(buf[:n]))
		}
		a.At = time.Now()
		s.note(a)
	}
}

func (s *Stream) note(a Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, a)
	if n := len(s.events) - 1000; n > 0 {
		s.events = slices.Delete(s.events, 0, n)
	}
}

// Since lists what came back after t.
func (s *Stream) Since(t time.Time) []Answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.events, func(a Answer) bool { return a.At.After(t) })
	if i < 0 {
		return nil
	}
	return slices.Clone(s.events[i:])
}

// Sent counts the datagrams.
func (s *Stream) Sent() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent
}

// Stop ends the stream.
func (s *Stream) Stop() {
	s.cancel()
	s.done.Wait()
}
