package control

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/engine"
	"fairlead/internal/explain"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// oneState is an engine that has nothing else to do.
type oneState struct {
	state *model.State
	ended bool
}

func (o oneState) Do(_ context.Context, f func(engine.View)) error {
	if o.ended {
		return engine.ErrEnded
	}
	f(engine.View{State: o.state, Resolver: known{}, Status: engine.Status{Synced: true, Rounds: 7, LastError: errors.New("disk full")}})
	return nil
}

type known struct{ engine.Resolver }

func (known) Why(n types.NamespacedName) []resolve.Choice {
	return []resolve.Choice{{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Proto: model.TCP, Reason: "of " + n.String()}}
}
func (known) Refusals() map[string]int { return map[string]int{"Malformed": 2} }

func sample() *model.State {
	s := model.NewState()
	s.Node = model.Node{Name: "n1", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.11")}, NodePorts: []netip.Prefix{}}
	for _, name := range []string{"default/a", "other/b"} {
		id := model.PoolID{Service: name, Port: "http", Proto: model.TCP}
		key := model.Key{IP: netip.AddrFrom4([4]byte{10, 96, 0, byte(len(s.Pools) + 1)}), Port: 80, Proto: model.TCP}
		s.Pools[id] = model.Pool{ID: id, Backends: []model.Backend{{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Local: true}}, Sticky: time.Hour}
		s.Frontends[key] = model.Frontend{Key: key, Owned: true, Allow: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			Routes: [3]model.Route{{Pool: id, Else: model.Reject}, {Pool: id, SNAT: true, Else: model.Drop}, {Pool: id}},
			About:  model.About{Service: name, Port: "http", Kind: model.ClusterIP}}
		s.Checks[name] = model.Check{Service: name, Port: 31000, Ready4: 1}
	}
	return s
}

// serve runs a server until the test ends.
func serve(t *testing.T, path string, e Engine) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		New(path, e, func() About { return About{Version: "v9", Mode: "memory"} }).Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	for range 200 {
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
			if c, err := net.Dial("unix", path); err == nil {
				c.Close()
				return
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the server does not answer")
}

var comparable = cmp.Options{cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }), cmpopts.EquateErrors()}

func TestQuestions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "deep", "s.sock")
	serve(t, path, oneState{state: sample()})
	c, ctx := NewClient(path), t.Context()

	got, err := c.State(ctx, "")
	if diff := cmp.Diff(sample(), got, comparable); diff != "" || err != nil {
		t.Errorf("state: %v -want +got:\n%s", err, diff)
	}
	got, err = c.State(ctx, "a")
	if err != nil || len(got.Frontends) != 1 || len(got.Pools) != 1 || len(got.Checks) != 1 || got.Node.Name != "n1" {
		t.Errorf("state of one Service: %v, %v", got, err)
	}
	why, err := c.Why(ctx, "other/b")
	if err != nil || len(why) != 1 || why[0].Reason != "of other/b" {
		t.Errorf("why: %v, %v", why, err)
	}
	q, err := explain.Parse("10.9.0.1 -> 10.96.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	story, err := c.Explain(ctx, q)
	if err != nil || story != explain.Story(sample(), known{}, q) {
		t.Errorf("story: %v\n%s", err, story)
	}
	if _, err := c.Explain(ctx, explain.Question{}); err == nil || !strings.HasPrefix(err.Error(), "ask the agent: no destination") {
		t.Errorf("empty question: %v", err)
	}
	status, err := c.Status(ctx)
	if err != nil || status.About.Version != "v9" || status.Engine.Rounds != 7 || status.LastError != "disk full" || status.Frontends != 2 || status.Refusals["Malformed"] != 2 {
		t.Errorf("status: %+v, %v", status, err)
	}
}

func TestEnded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	serve(t, path, oneState{ended: true})
	if _, err := NewClient(path).State(t.Context(), ""); err == nil || err.Error() != "ask the agent: the engine has ended" {
		t.Errorf("got %v", err)
	}
}

func TestMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	serve(t, path, oneState{state: sample()})
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
		t.Errorf("beside the socket: %v, %v", left, err)
	}
}

// TestStale: a dead agent's socket is replaced; a living one's, or a file, is not.
func TestStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := listen(path); !errors.Is(err, ErrBusy) {
		t.Errorf("beside a living agent: %v, want ErrBusy", err)
	}
	old.SetUnlinkOnClose(false)
	old.Close()
	l, err := listen(path)
	if err != nil {
		t.Fatalf("after a dead agent: %v", err)
	}
	l.Close()

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listen(file); err == nil || !strings.Contains(err.Error(), "exists and is no socket") {
		t.Errorf("where a file is: %v", err)
	}
	if b, err := os.ReadFile(file); string(b) != "precious" || err != nil {
		t.Errorf("the file is now %q, %v", b, err)
	}
}

// TestGone: the socket goes with the agent, but not another one's.
func TestGone(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s.sock")
	t.Run("run", func(t *testing.T) { serve(t, path, oneState{state: sample()}) })
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the end: %v", err)
	}
	t.Run("taken over", func(t *testing.T) {
		serve(t, path, oneState{state: sample()})
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("another's file: %v", err)
	}
}

func TestNoAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	_, err := NewClient(path).Status(t.Context())
	want := "no agent answers at " + path + " (is `fairlead run` running in this network namespace? --control-socket names another)"
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestPath: agents of two network namespaces that share a file system do not meet.
func TestPath(t *testing.T) {
	if got := Path("/x/y"); got != "/x/y" {
		t.Errorf("configured: %s", got)
	}
	if got := socketOf("net:[4026531833]", true); got != "/run/fairlead/fairlead.sock" {
		t.Errorf("in the first network namespace: %s", got)
	}
	if got := socketOf("net:[4026532176]", false); got != "/run/fairlead/fairlead-4026532176.sock" {
		t.Errorf("in another one: %s", got)
	}
}
