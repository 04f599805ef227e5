package saved

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"pgregory.net/rapid"

	"fairlead/internal/source"
	"fairlead/internal/source/sourcetest"
)

func TestMain(m *testing.M) {
	quiet := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(quiet)
	_ = quiet.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})
	klog.SetOutput(io.Discard)
	goleak.VerifyTestMain(m)
}

// api tells what a test says.
type api struct{ ready chan source.Sink }

func (a api) Run(ctx context.Context, to source.Sink) error {
	a.ready <- to
	<-ctx.Done()
	return nil
}

// life is one process.
type life struct {
	*Source
	t    *testing.T
	sink *sourcetest.Sink // what the rest of the process hears
	api  source.Sink      // what the API tells
	end  func()
}

// begin starts a process in a bubble of fake time.
func begin(t *testing.T, c Config) *life {
	a := api{make(chan source.Sink, 1)}
	c.Of = a
	if c.Node == "" {
		c.Node = "n1"
	}
	if c.MaxAge == 0 {
		c.MaxAge = 24 * time.Hour
	}
	l := &life{Source: New(c), t: t, sink: &sourcetest.Sink{}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx, l.sink) }()
	l.end = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		done <- nil
	}
	l.api = <-a.ready
	return l
}

func bubble(t *testing.T, f func(t *testing.T, dir string)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) { f(t, dir) })
}

func name(n string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: n} }

func service(n, ip string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: n, CreationTimestamp: metav1.Unix(1_700_000_000, 0)},
		Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}}
}

func slice(n string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: n,
		Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-01T00:00:00Z", "fairlead.io/x": "y"}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.1"}}}}
}

// wait lets time pass, and all that happens meanwhile happen.
func (l *life) wait(d time.Duration) sourcetest.State {
	time.Sleep(d)
	synctest.Wait()
	return l.sink.Now()
}

func (l *life) told(what string, calls ...string) {
	l.t.Helper()
	if got := l.sink.Now().Calls; !slices.Equal(got, calls) {
		l.t.Errorf("%s: told %q, want %q", what, got, calls)
	}
	l.sink.Forget()
}

func has(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("the directory has %q (%v), want %q", got, err, want)
	}
}

// remember has a process know a, b and their company, and end.
func remember(t *testing.T, dir string) {
	t.Helper()
	l := begin(t, Config{Dir: dir})
	l.api.Service(name("a"), service("a", "10.0.0.1"))
	l.api.Service(name("gone"), service("gone", "10.0.0.9"))
	l.api.Slice(name("a-1"), slice("a-1"))
	l.api.Node("n1", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24"}})
	l.api.ServiceCIDR("k", &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.0.0.0/16"}}})
	l.api.Synced()
	l.wait(2 * time.Second)
	l.api.Service(name("gone"), nil)
	l.api.Service(name("b"), service("b", "10.0.0.2"))
	l.wait(0)
	l.end()
	if s := l.Status(); s.Problem != "" || s.Objects != 5 || s.Bytes < 400 || s.Replayed {
		t.Errorf("status %+v", s)
	}
	has(t, dir, journalName)
}

func TestRemembers(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		dir = filepath.Join(dir, "made", "by us")
		remember(t, dir)
		knew := time.Now()
		if info, _ := os.Stat(dir); info.Mode().Perm() != 0o700 {
			t.Errorf("the directory has mode %v", info.Mode())
		}
		if info, _ := os.Stat(filepath.Join(dir, journalName)); info.Mode().Perm() != 0o600 {
			t.Errorf("the journal has mode %v", info.Mode())
		}
		time.Sleep(time.Hour)

		l := begin(t, Config{Dir: dir})
		l.wait(defaultWait - time.Second)
		l.told("before the API is late")
		now := l.wait(2 * time.Second)
		l.told("when the API is late", "service ns/a", "slice ns/a-1", "node n1", "servicecidr k", "service ns/b", "presumed")
		if now.Services["ns/a"].Spec.ClusterIP != "10.0.0.1" || now.Nodes["n1"].Spec.PodCIDR != "10.1.0.0/24" || now.CIDRs["k"].Spec.CIDRs[0] != "10.0.0.0/16" ||
			now.Slices["ns/a-1"].Endpoints[0].Addresses[0] != "10.1.0.1" || !maps.Equal(now.Slices["ns/a-1"].Annotations, map[string]string{"fairlead.io/x": "y"}) {
			t.Errorf("told %+v", now)
		}
		if s := l.Status(); !s.Replayed || knew.Sub(s.AsOf) > time.Minute || s.Ignored != "" {
			t.Errorf("status %+v; it was true at %v", s, knew)
		}
		l.api.Service(name("b"), service("b", "10.0.0.3"))
		l.api.Service(name("c"), service("c", "10.0.0.4"))
		l.api.Node("n1", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
		l.api.Slice(name("a-1"), slice("a-1"))
		l.api.ServiceCIDR("k", nil)
		l.wait(time.Minute)
		has(t, dir, journalName, newName) // the old one serves if we die now
		l.sink.Forget()
		l.api.Synced()
		l.told("when the API has told all", "no service ns/a", "synced")
		l.wait(time.Second)
		l.end()
		has(t, dir, journalName)

		l = begin(t, Config{Dir: dir})
		l.wait(time.Minute)
		l.told("the next time", "service ns/b", "service ns/c", "node n1", "slice ns/a-1", "presumed")
		l.end()
		has(t, dir, journalName)
	})
}

// What the API says counts, also before the journal is told; and when it says all in time, the journal is not told.
func TestTheAPIComesFirst(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		remember(t, dir)
		l := begin(t, Config{Dir: dir, Wait: time.Second})
		l.api.Service(name("b"), service("b", "10.0.0.7"))
		l.api.Service(name("a"), nil) // listed, and deleted since
		l.api.Addrs([]netip.Addr{netip.MustParseAddr("10.0.0.1")})
		l.wait(2 * time.Second)
		l.told("beside the API", "service ns/b", "no service ns/a", "addrs 10.0.0.1", "slice ns/a-1", "node n1", "servicecidr k", "presumed")
		l.end()

		l = begin(t, Config{Dir: dir})
		l.api.Service(name("b"), service("b", "10.0.0.7"))
		l.api.Synced()
		l.wait(time.Hour)
		l.told("in time", "service ns/b", "synced")
		l.end()
	})
}

// A crash in the middle of the first list leaves what was known before.
func TestCrashInTheFirstList(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		remember(t, dir)
		l := begin(t, Config{Dir: dir})
		l.api.Service(name("c"), service("c", "10.0.0.7"))
		l.wait(3 * time.Second)
		half, err := os.ReadFile(filepath.Join(dir, newName))
		if err != nil || !strings.Contains(string(half), "10.0.0.7") {
			t.Fatalf("%q, %v", half, err)
		}
		l.end()
		if err := os.WriteFile(filepath.Join(dir, newName), half, 0o600); err != nil { // as if it had been killed
			t.Fatal(err)
		}
		l = begin(t, Config{Dir: dir})
		l.wait(time.Minute)
		l.told("after the crash", "service ns/a", "slice ns/a-1", "node n1", "servicecidr k", "service ns/b", "presumed")
		l.end()
	})
}

// A journal that may not be the truth is not told, and Status says why.
func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		what string
		do   func(path string) error
		c    Config
		want string
	}{
		{"none", os.Remove, Config{}, ""},
		{"too old", func(string) error { time.Sleep(3 * time.Hour); return nil }, Config{MaxAge: time.Hour}, "too old"},
		{"another node", func(string) error { return nil }, Config{Node: "n2"}, `of node "n1"`},
		{"a link", func(p string) error {
			if err := os.Rename(p, p+".real"); err != nil {
				return err
			}
			return os.Symlink(p+".real", p)
		}, Config{}, "symbolic link"},
		{"others may write", func(p string) error { return os.Chmod(p, 0o620) }, Config{}, "written by others"},
		{"a pipe", func(p string) error { os.Remove(p); return syscall.Mkfifo(p, 0o600) }, Config{}, "no regular file"},
		{"something else", func(p string) error { return os.WriteFile(p, []byte("#!/bin/sh\nexit\n# a long script\n"), 0o600) }, Config{}, "no journal"},
		{"nothing", func(p string) error { return os.Truncate(p, 0) }, Config{}, "no journal"},
		{"half of the first list", func(p string) error { return os.Truncate(p, 150) }, Config{}, "damaged"},
		{"all zeros after the beginning", func(p string) error {
			b, err := os.ReadFile(p)
			if err == nil {
				clear(b[30:])
				err = os.WriteFile(p, b, 0o600)
			}
			return err
		}, Config{}, "damaged"},
		{"another version", func(p string) error {
			b, err := os.ReadFile(p)
			if err == nil {
				b[len(magic)-2] = '2'
				err = os.WriteFile(p, b, 0o600)
			}
			return err
		}, Config{}, "another version"},
		{"another user", func(p string) error {
			if os.Geteuid() != 0 {
				return os.Chmod(p, 0o602) // who is not root can't give it away
			}
			return os.Chown(p, 4711, 4711)
		}, Config{}, map[bool]string{true: "another user", false: "written by others"}[os.Geteuid() == 0]},
	} {
		t.Run(tc.what, func(t *testing.T) {
			bubble(t, func(t *testing.T, dir string) {
				remember(t, dir)
				if err := tc.do(filepath.Join(dir, journalName)); err != nil {
					t.Fatal(err)
				}
				tc.c.Dir = dir
				l := begin(t, tc.c)
				l.wait(time.Minute)
				l.told("from it")
				if s := l.Status(); s.Replayed || s.Problem != "" || tc.want == "" && s.Ignored != "" || !strings.Contains(s.Ignored, tc.want) {
					t.Errorf("status %+v, want %q", s, tc.want)
				}
				l.api.Synced()
				l.wait(time.Second)
				if s := l.Status(); s.Problem != "" {
					t.Errorf("status %+v", s)
				}
				l.end()
				if b := believe(filepath.Join(dir, journalName)); b.problem != nil {
					t.Errorf("the new journal: %v", b.problem)
				} else {
					b.close()
				}
			})
		})
	}
}

// The age counts from when the API was last heard, not from the last write.
func TestAge(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		last := time.Now()
		l := begin(t, Config{Dir: dir, Heard: func() time.Time { return last }})
		l.api.Synced()
		l.wait(3 * time.Hour)
		last = time.Now()
		l.wait(time.Hour)
		l.end()
		l = begin(t, Config{Dir: dir, MaxAge: 59 * time.Minute})
		l.wait(time.Minute)
		if s := l.Status(); s.Replayed || !strings.Contains(s.Ignored, "too old") {
			t.Errorf("status %+v", s)
		}
		l.end()
		l = begin(t, Config{Dir: dir, MaxAge: 2 * time.Hour})
		l.wait(time.Minute)
		if s := l.Status(); !s.Replayed || !s.AsOf.Equal(last) {
			t.Errorf("status %+v, want as of %v", s, last)
		}
		l.end()
	})
}

// A journal from the future has no age.
func TestClockIsBehind(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		l := begin(t, Config{Dir: dir, Heard: func() time.Time { return time.Now().Add(30 * time.Hour) }})
		l.api.Synced()
		l.wait(time.Second)
		l.end()
		l = begin(t, Config{Dir: dir})
		l.wait(time.Minute)
		if s := l.Status(); s.Replayed || !strings.Contains(s.Ignored, "can't be told") {
			t.Errorf("status %+v", s)
		}
		l.end()
	})
}

// When the disk can't be written, what is there is removed, and traffic is not affected.
func TestDiskTrouble(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		file := filepath.Join(dir, "file")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		l := begin(t, Config{Dir: file})
		l.api.Service(name("a"), service("a", "10.0.0.1"))
		l.api.Synced()
		l.api.Service(name("a"), nil)
		l.wait(time.Minute)
		l.told("without a directory", "service ns/a", "synced", "no service ns/a")
		if s := l.Status(); !strings.Contains(s.Problem, "not a directory") || s.Objects != 0 {
			t.Errorf("status %+v", s)
		}
		l.end()

		for _, synced := range []bool{false, true} {
			dir := filepath.Join(dir, fmt.Sprint(synced))
			remember(t, dir)
			l = begin(t, Config{Dir: dir})
			if synced {
				l.api.Synced()
			}
			l.wait(2 * time.Second)
			writer := l.disk.f
			if l.disk.f, _ = os.Open(writer.Name()); l.disk.f == nil { // what is written from now on fails
				l.disk.f, _ = os.Open(filepath.Join(dir, journalName))
			}
			writer.Close()
			l.api.Service(name("a"), service("a", "10.0.0.1"))
			l.wait(2 * time.Second)
			if s := l.Status(); !strings.Contains(s.Problem, "bad file descriptor") {
				t.Errorf("status %+v", s)
			}
			if !synced {
				has(t, dir, journalName) // that of the run before, which is as true as ever
				l.api.Synced()
				l.wait(time.Second)
			}
			has(t, dir)
			if l.api.Service(name("b"), service("b", "10.0.0.2")); len(l.sink.Now().Services) != 2 {
				t.Errorf("told %v", l.sink.Now().Calls)
			}
			l.end()
			has(t, dir)
		}
	})
}

// A disk that hangs is not waited for.
func TestDiskHangs(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		l := begin(t, Config{Dir: dir})
		l.api.Synced()
		l.wait(time.Second)
		big := service("big", "10.0.0.1")
		big.Annotations = map[string]string{"fairlead.io/x": strings.Repeat("x", 1<<20)}
		l.mu.Lock()
		for range 16 { // as if the writer were stuck
			l.note(thing{aService, name("big")}, big)
		}
		l.mu.Unlock()
		l.wait(time.Second)
		if s := l.Status(); s.Problem != errSlow.Error() {
			t.Errorf("status %+v", s)
		}
		has(t, dir)
		l.end()
	})
}

// What was told before the end is written, also when the writer is busy just then.
func TestWrittenAtTheEnd(t *testing.T) {
	for range 20 {
		bubble(t, func(t *testing.T, dir string) {
			l := begin(t, Config{Dir: dir})
			for i := range 500 {
				l.api.Service(name(fmt.Sprint(i)), service(fmt.Sprint(i), "10.0.0.1"))
			}
			give(l.hurry)
			l.api.Synced()
			l.api.Service(name("last"), service("last", "10.0.0.1"))
			l.end()
			l = begin(t, Config{Dir: dir})
			if now := l.wait(time.Minute); len(now.Services) != 501 || now.Presumed != 1 {
				t.Errorf("told %d of 501 again", len(now.Services))
			}
			l.end()
		})
	}
}

// Who removes the journal of a process that runs, finds it again.
func TestJournalIsRemoved(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		l := begin(t, Config{Dir: dir})
		l.api.Service(name("a"), service("a", "10.0.0.1"))
		l.api.Synced()
		l.wait(time.Second)
		if err := os.Remove(filepath.Join(dir, journalName)); err != nil {
			t.Fatal(err)
		}
		l.wait(2 * beatEvery)
		l.end()
		l = begin(t, Config{Dir: dir})
		l.wait(time.Minute)
		l.told("afterwards", "service ns/a", "presumed")
		l.end()
	})
}

// The journal is written anew when most of it is out of date.
func TestCompaction(t *testing.T) {
	bubble(t, func(t *testing.T, dir string) {
		l := begin(t, Config{Dir: dir})
		for i := range 100 {
			l.api.Service(name(fmt.Sprint(i)), service(fmt.Sprint(i), "10.0.0.1"))
		}
		l.api.Synced()
		var most int64
		for i := range 40_000 {
			n := fmt.Sprint(i % 100)
			l.api.Service(name(n), service(n, fmt.Sprintf("10.0.%d.%d", i/200, i%200)))
			if i%100 == 0 {
				l.wait(2 * time.Second)
				most = max(most, l.Status().Bytes)
			}
		}
		l.api.Service(name("0"), nil)
		l.wait(2 * time.Second)
		l.disk.dirty = false
		if s := l.Status(); s.Problem != "" || s.Objects != 99 || most > floor+100_000 || most < floor/2 {
			t.Errorf("status %+v, at most %d bytes", s, most)
		}
		if err := l.disk.compact(l.seed, time.Now()); err != nil { // nothing else uses it now
			t.Fatal(err)
		}
		if l.disk.size != l.live+int64(len(magic))+int64(len(appendNode(nil, "n1"))+len(appendHeard(nil, time.Now()))) {
			t.Errorf("after a compaction the journal has %d bytes; %d count", l.disk.size, l.live)
		}
		l.end()
		has(t, dir, journalName)
		want := l.sink.Now()
		l = begin(t, Config{Dir: dir})
		compare(t, l.wait(time.Minute), want)
		l.end()
	})
}

func compare(t interface{ Fatalf(string, ...any) }, got, want sourcetest.State) {
	if g, w := text(got), text(want); g != w {
		t.Fatalf("told again:\n%s\nwant:\n%s", g, w)
	}
}

// text is what a sink knows of Services and slices.
func text(s sourcetest.State) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(s.Services)) {
		fmt.Fprintln(&b, s.Services[k].String())
	}
	for _, k := range slices.Sorted(maps.Keys(s.Slices)) {
		fmt.Fprintln(&b, s.Slices[k].String())
	}
	return b.String()
}

// TestHistories: what is told again is what had been told, over lives with changes before, during and after the first list. And
// wherever the journal is cut off, as by a crash, what is told again was true at some moment after the first list; or nothing is.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0))
		dir, err := os.MkdirTemp("", "saved")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		synctest.Test(t, func(t *testing.T) {
			for range rnd.IntN(3) + 1 {
				history(t, rnd, dir)
			}
		})
	})
}

func history(t *testing.T, rnd *rand.Rand, dir string) {
	l := begin(t, Config{Dir: dir, Wait: time.Duration(rnd.IntN(4)) * time.Second})
	heard := time.Now()
	l.config.Heard = func() time.Time { return heard }
	var moments []string // after the first list
	var last sourcetest.State
	synced := rnd.IntN(30)
	for i := range 30 + rnd.IntN(30) {
		n := fmt.Sprint(rnd.IntN(8))
		switch rnd.IntN(5) {
		case 0:
			l.api.Service(name(n), nil)
		case 1:
			l.api.Slice(name(n), nil)
		case 2:
			l.api.Slice(name(n), &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: n, Generation: int64(i)}})
		default:
			l.api.Service(name(n), service(n, fmt.Sprint(i)))
		}
		if i == synced {
			l.api.Synced()
		}
		if last = l.sink.Now(); i >= synced {
			moments = append(moments, text(last))
		}
		l.wait(time.Duration(rnd.IntN(3000)) * time.Millisecond)
		if heard = time.Now(); i >= synced && rnd.IntN(10) == 0 {
			if err := l.work(true); err != nil { // the writer sleeps
				t.Fatal(err)
			}
			if err := l.disk.compact(l.seed, heard); err != nil {
				t.Fatal(err)
			}
		}
	}
	l.wait(2 * time.Second)
	l.end()
	path := filepath.Join(dir, journalName)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for range 4 {
		cut := whole[:rnd.IntN(len(whole)+1)]
		if err := os.WriteFile(path, cut, 0o600); err != nil {
			t.Fatal(err)
		}
		next := begin(t, Config{Dir: dir})
		now := next.wait(time.Minute)
		next.end()
		switch told := text(now); {
		case now.Presumed == 0 && len(now.Calls) > 0:
			t.Fatalf("told %q, and nothing was presumed", now.Calls)
		case now.Presumed == 1 && !slices.Contains(moments, told):
			t.Fatalf("%d of %d bytes: told again what was never true:\n%s", len(cut), len(whole), told)
		case len(cut) == len(whole) && now.Presumed != 1:
			t.Fatalf("all of it: not believed: %+v", next.Status())
		}
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	next := begin(t, Config{Dir: dir})
	compare(t, next.wait(time.Minute), last)
	next.end()
}
