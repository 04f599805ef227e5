package kernel

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// inode names the network namespace of the calling thread.
func inode(t *testing.T) uint64 {
	runtime.LockOSThread() // or another goroutine could enter a namespace on this thread while it is looked at
	defer runtime.UnlockOSThread()
	t.Helper()
	f, err := currentNS()
	if err != nil {
		t.Error(err)
		return 0
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Error(err)
	}
	return st.Ino
}

func newNS(t *testing.T) *NS {
	t.Helper()
	n, err := NewNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func TestNS(t *testing.T) {
	home, a, b := inode(t), newNS(t), newNS(t)
	if got := inode(t); got != home {
		t.Fatalf("NewNS left the thread in another namespace: %d, want %d", got, home)
	}
	want := errors.New("fn's own")
	err := a.Do(func() error {
		inA := inode(t)
		if inA == home {
			t.Error("Do did not enter")
		}
		if err := b.Do(func() error {
			if got := inode(t); got == inA || got == home {
				t.Error("nested Do did not enter")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		if got := inode(t); got != inA {
			t.Error("nested Do did not go back to the outer namespace")
		}
		return want
	})
	if !errors.Is(err, want) {
		t.Errorf("Do returned %v", err)
	}
	if got := inode(t); got != home {
		t.Errorf("Do did not go back: %d, want %d", got, home)
	}
}

// Traffic on lo works in both families, sockets stay in their namespace, and two namespaces don't hear each other.
func TestNSLoopback(t *testing.T) {
	a, b := newNS(t), newNS(t)
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		var l net.Listener
		if err := a.Do(func() (err error) {
			l, err = net.Listen("tcp", host+":7777")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		dial := func() error {
			c, err := net.Dial("tcp", host+":7777")
			if err == nil {
				c.Close()
			}
			return err
		}
		if err := a.Do(dial); err != nil {
			t.Error(err)
		}
		if err := b.Do(dial); err == nil {
			t.Errorf("%s of one namespace answers in another", host)
		}
	}
}

func TestNSPath(t *testing.T) {
	n := newNS(t)
	var want, got os.FileInfo
	var err error
	if got, err = os.Stat(n.Path()); err != nil {
		t.Fatal(err)
	}
	if err := n.Do(func() error {
		f, err := currentNS()
		if err != nil {
			return err
		}
		defer f.Close()
		want, err = f.Stat()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(want, got) {
		t.Errorf("%s is not the namespace", n.Path())
	}
	var out []byte
	if err := n.Do(func() error { // a child is inside
		out, err = exec.Command("stat", "-L", "-c", "%i", "/proc/self/ns/net").Output()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(out) == 0 {
		t.Error("child said nothing")
	}
}

func TestNSClosed(t *testing.T) {
	home, n := inode(t), newNS(t)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Do(func() error { t.Error("fn was called"); return nil }); err == nil {
		t.Error("a closed namespace was entered")
	}
	if got := inode(t); got != home {
		t.Error("thread left home")
	}
}

// Many goroutines at once never meet in the wrong namespace, and no thread is left behind in one.
func TestNSConcurrent(t *testing.T) {
	home := inode(t)
	ns := []*NS{newNS(t), newNS(t), newNS(t)}
	want := make([]uint64, len(ns))
	for i, n := range ns {
		if err := n.Do(func() error { want[i] = inode(t); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for g := range 30 {
		wg.Go(func() {
			for range 20 {
				i := g % len(ns)
				_ = ns[i].Do(func() error {
					if got := inode(t); got != want[i] {
						t.Errorf("in %d, want %d", got, want[i])
					}
					return nil
				})
				if got := inode(t); got != home {
					t.Errorf("at %d, want home %d", got, home)
				}
			}
		})
	}
	wg.Wait()
}
