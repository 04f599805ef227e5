package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// ask connects from the current thread's namespace, and returns the address that the server was reached at. It ends with a
// reset: nothing of it stays in either socket table.
func ask(to netip.AddrPort, patience time.Duration) (netip.Addr, error) {
	until := time.Now().Add(patience)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return netip.Addr{}, err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return netip.Addr{}, err
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	if err == unix.EINPROGRESS || err == unix.EINTR {
		err = await(fd, unix.POLLOUT, until)
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("connect to %s: %w", to, err)
	}
	if err := await(fd, unix.POLLIN, until); err != nil {
		return netip.Addr{}, fmt.Errorf("wait for %s to speak: %w", to, err)
	}
	var answer [4]byte
	if n, err := unix.Read(fd, answer[:]); err != nil || n != len(answer) {
		return netip.Addr{}, fmt.Errorf("read from %s: %d bytes, %v", to, n, err)
	}
	return netip.AddrFrom4(answer), nil
}

// await waits for an event on a socket; the Go runtime's signals may interrupt it.
func await(fd int, event int16, until time.Time) error {
	for {
		left := time.Until(until)
		if left <= 0 {
			return unix.ETIMEDOUT
		}
		timeout := unix.NsecToTimespec(left.Nanoseconds())
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: event}}, &timeout, nil)
		if err == unix.EINTR || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return err
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && code != 0 {
			err = unix.Errno(code)
		}
		return err
	}
}

// served says whether a Service leads to one of its own endpoints.
func served(i int, patience time.Duration) error {
	at, err := ask(serviceFront(i), patience)
	if err != nil {
		return err
	}
	if s, _ := owner(at); s != i {
		return fmt.Errorf("Service %d leads to an endpoint of Service %d", i, s)
	}
	return nil
}

// probePatience is how long a probe waits before it is sent anew. What no rule takes is dropped, so this is also how exactly the
// first that gets through is timed; and probing must not take the processor from what it waits for.
const probePatience = 10 * time.Millisecond

// waitAll waits until the last Service is served and then every hundredth, all from the client. It returns false at
// the deadline.
func (w *world) waitAll(services int, deadline time.Time, alive func() error) (done bool, err error) {
	left := []int{services - 1}
	for i := 0; i < services; i += 100 {
		left = append(left, i)
	}
	err = w.client.Do(func() error {
		for len(left) > 0 {
			if err := alive(); err != nil {
				return err
			}
			if time.Now().After(deadline) {
				return nil
			}
			if asked := time.Now(); served(left[0], probePatience) != nil {
				time.Sleep(probePatience - time.Since(asked)) // where it was refused
				continue
			}
			left = left[1:]
		}
		done = true
		return nil
	})
	return done, err
}

// unserved counts the Services that do not lead to their own endpoints, of all.
func (w *world) unserved(services int) (bad int, first error) {
	err := w.client.Do(func() error {
		for i := range services {
			if err := served(i, 2*time.Second); err != nil {
				bad++
				if first == nil {
					first = err
				}
				if bad > 100 {
					break // each may take two seconds
				}
			}
		}
		return nil
	})
	return bad, errors.Join(err, first)
}

// probeEvery is how often a connection is made without a notice: legacy iptables gives none.
const probeEvery = time.Millisecond

// waitSet connects now and then, and whenever there is a notice if e is not nil, until the Service leads to an endpoint of the
// set. It returns when that connection had got its answer, and when the last notice before it was heard.
func (w *world) waitSet(i, set int, e *ears, deadline time.Time, alive func() error) (noticed, at time.Time, err error) {
	err = w.client.Do(func() error {
		for {
			if e == nil {
				time.Sleep(probeEvery)
			} else if e.notice(time.Now().Add(probeEvery)) {
				noticed = time.Now()
			}
			got, err := ask(serviceFront(i), probePatience)
			at = time.Now()
			if err == nil {
				if s, now := owner(got); s == i && now == set {
					return nil
				}
			}
			if err := alive(); err != nil {
				return err
			}
			if at.After(deadline) {
				return fmt.Errorf("Service %d: its new endpoints are not reached in time (last: %v, %w)", i, got, err)
			}
		}
	})
	return noticed, at, err
}

// loop connects again and again until stop is closed.
type loop struct {
	stop      chan struct{}
	done      chan struct{}
	connected int
	failed    int
	slowest   time.Duration
	err       error // the first failure
}

// startLoop connects from the client about 500 times a second, to Services far apart.
func (w *world) startLoop(services int) *loop {
	l := &loop{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		err := w.client.Do(func() error {
			for n := 0; ; n++ {
				select {
				case <-l.stop:
					return nil
				default:
				}
				began := time.Now()
				err := served(n*7919%services, 5*time.Second)
				l.slowest = max(l.slowest, time.Since(began))
				l.connected++
				if err != nil {
					l.failed++
					if l.err == nil {
						l.err = err
					}
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
		l.err = errors.Join(l.err, err)
	}()
	return l
}

func (l *loop) end() {
	close(l.stop)
	<-l.done
}
