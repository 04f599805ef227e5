package apiserver

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"
)

// load connects without end, from one client to one address, and keeps what went wrong.
type load struct {
	from *host
	to   netip.AddrPort

	mu     sync.Mutex
	done   int
	failed []error
}

// startLoad runs one load for each client and address; stop ends them and fails the test for each failed connection.
func startLoad(t *testing.T, loads ...*load) (stop func()) {
	t.Helper()
	end := make(chan struct{})
	var running sync.WaitGroup
	for _, l := range loads {
		running.Go(func() {
			for tick := time.Tick(2 * time.Millisecond); ; <-tick {
				select {
				case <-end:
					return
				default:
					l.once()
				}
			}
		})
	}
	return func() {
		t.Helper()
		close(end)
		running.Wait()
		for _, l := range loads {
			t.Logf("%s to %s: %d connections, %d failed", l.from.name, l.to, l.done, len(l.failed))
			if len(l.failed) > 0 {
				t.Errorf("first: %v", l.failed[0])
			}
		}
	}
}

func (l *load) once() {
	_, err := l.from.ask(l.to)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done++
	if err != nil {
		l.failed = append(l.failed, fmt.Errorf("%s to %s at %s: %w", l.from.name, l.to, time.Now().Format(time.TimeOnly), err))
	}
}

// more waits until each load has made n more connections.
func more(t *testing.T, n int, loads ...*load) {
	t.Helper()
	for _, l := range loads {
		count := func() int {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.done
		}
		until := count() + n
		eventually(t, "connections go on", func() error { return wantf(count() >= until, "%d of %d", count(), until) })
	}
}

// A proxy that dies takes nothing with it, and the next one finds all as it was, and what has changed meanwhile.
func TestKilledAndRestarted(t *testing.T) {
	p := startProxy(t)
	s := createService(t, "steady", both, nodePort)
	setEndpoints(t, "steady", ipv4, podA, podB)
	setEndpoints(t, "steady", ipv6, podA, podB)
	marker := front(createService(t, "marker"), 0)
	setEndpoints(t, "marker", ipv4, podA)
	port := uint16(s.Spec.Ports[0].NodePort)
	loads := []*load{
		{from: podC, to: front(s, 0)},
		{from: podC, to: front(s, 1)},
		{from: node, to: front(s, 0)},
		{from: outer, to: netip.AddrPortFrom(node.v4, port)},
		{from: outer, to: netip.AddrPortFrom(node.v6, port)},
	}
	for _, l := range loads {
		eventually(t, "the Service works", answers(l.from, l.to, podA, podB))
	}
	eventually(t, "the marker works", answers(podC, marker, podA))

	old, err := podC.dial(front(s, 0))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if _, err := readAnswer(old); err != nil {
		t.Fatal(err)
	}
	stop := startLoad(t, loads...)
	for range 2 {
		for _, pod := range []*host{podB, podA} {
			p.kill()
			setEndpoints(t, "marker", ipv4, pod)
			more(t, 20, loads...)
			p = startProxy(t)
			eventually(t, "the new proxy has caught up", answers(podC, marker, pod))
			more(t, 20, loads...)
		}
	}
	stop()
	if err := echo(old); err != nil {
		t.Errorf("the connection from before: %v", err)
	}
}

func echo(conn net.Conn) error {
	const word = "still there?"
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, word); err != nil {
		return err
	}
	back := make([]byte, len(word))
	_, err := io.ReadFull(conn, back)
	return wantf(err == nil && string(back) == word, "%q came back, %v", back, err)
}

// A proxy told to end leaves its rules: traffic goes on until the next one comes.
func TestTerminated(t *testing.T) {
	p := startProxy(t)
	vip := front(createService(t, "left"), 0)
	setEndpoints(t, "left", ipv4, podA)
	eventually(t, "the Service works", answers(podC, vip, podA))
	p.stop(t)
	always(t, fmt.Sprintf("%s still works", vip), answers(podC, vip, podA))
}
