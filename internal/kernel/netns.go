package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// NS is an anonymous network namespace. It lives as long as this handle, a process, or a socket is in it; Close lets go
// of the handle. Nobody else in the program calls setns(2) or unshare(2) for a network namespace.
//
// The rule of locked threads. On Linux a namespace belongs to a thread, and Go moves goroutines between threads. So
// [NS.Do] locks the calling goroutine to its thread, moves the thread into the namespace, calls fn, moves it back and
// unlocks. It follows that
//
//   - only fn itself is inside. A goroutine that fn starts runs on another thread, in the program's own namespace; let it
//     call Do again;
//   - a socket stays where it was opened. Listen or dial inside Do, use it anywhere;
//   - a process that fn starts with os/exec is inside, for all its life;
//   - /proc/net is the namespace of the program's first thread. Inside Do read /proc/thread-self/net. /proc/sys/net is
//     the calling thread's, and right; /sys/class/net is of the namespace in which /sys was mounted;
//   - when a thread can't be moved back it is never unlocked: Go ends it together with its goroutine, and no other
//     goroutine can ever run on it. Do says so in its error.
type NS struct {
	file *os.File
}

// NewNS makes a network namespace with nothing in it but a loopback interface that is up. It needs CAP_SYS_ADMIN, in a
// user namespace at least.
func NewNS() (*NS, error) {
	n := new(NS)
	err := onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() (err error) {
		if n.file, err = currentNS(); err != nil {
			return err
		}
		return loopbackUp()
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("new network namespace: %w", err), n.Close())
	}
	return n, nil
}

// Do runs fn inside the namespace, on the calling goroutine, and returns its error. Calls may be nested.
func (n *NS) Do(fn func() error) error {
	enter := func() error {
		if err := unix.Setns(n.Fd(), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace: %w", err)
		}
		return nil
	}
	return onThread(enter, fn)
}

// Fd is the descriptor of the namespace, for setns(2) and for IFLA_NET_NS_FD. It is valid until Close; -1 after it.
func (n *NS) Fd() int { return int(n.file.Fd()) }

// Path names the namespace for other programs, such as "nsenter --net=PATH", while this process lives.
func (n *NS) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.Fd()) }

// Close lets go of the namespace. The kernel removes it when nothing else is in it.
func (n *NS) Close() error {
	if n.file == nil {
		return nil
	}
	return n.file.Close()
}

// onThread runs fn on a locked thread that enter has moved to another namespace, and moves it back.
func onThread(enter, fn func() error) (err error) {
	runtime.LockOSThread()
	home, err := currentNS()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer func() { // also when fn ends its goroutine, as testing.T.FailNow does
		back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		if back == nil {
			runtime.UnlockOSThread()
		} else {
			err = errors.Join(err, fmt.Errorf("leave network namespace (this thread is lost): %w", back))
		}
		home.Close()
	}()
	if err := enter(); err != nil {
		return err
	}
	return fn()
}

// currentNS opens the network namespace of the calling thread.
func currentNS() (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()))
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	ifr.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}
