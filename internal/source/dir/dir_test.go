package dir

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fairlead/internal/source/sourcetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func web(name, ip string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec: {clusterIP: %s, ports: [{port: 80}]}\n", name, ip)
}

// world is a source that runs on a directory.
type world struct {
	t    *testing.T
	dir  string
	src  *Source
	sink *sourcetest.Sink

	mu   sync.Mutex
	said []string
}

// run starts a source on path, relative to the directory.
func run(t *testing.T, dir, path string) *world {
	w := &world{t: t, dir: dir, sink: new(sourcetest.Sink)}
	w.src = New(filepath.Join(dir, path), func(line string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.said = append(w.said, strings.ReplaceAll(line, dir+"/", ""))
	})
	sourcetest.Run(t, w.src, w.sink)
	w.sink.Until(t, "synced", func(s sourcetest.State) bool { return s.Synced == 1 })
	return w
}

func (w *world) reports() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.said)
}

func put(t *testing.T, parts ...string) {
	t.Helper()
	path, text := filepath.Join(parts[:len(parts)-1]...), parts[len(parts)-1]
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// services waits until the sink has just these: "name=ip ...".
func (w *world) services(want string) sourcetest.State {
	w.t.Helper()
	return w.sink.Until(w.t, want, func(s sourcetest.State) bool { return names(s) == want })
}

func names(s sourcetest.State) string {
	var out []string
	for key, v := range s.Services {
		out = append(out, strings.TrimPrefix(key, "default/")+"="+v.Spec.ClusterIP)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// ServiceCIDRs come, change and go with their file.
func TestServiceCIDRs(t *testing.T) {
	dir := t.TempDir()
	file := func(cidr string) string {
		return "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes}\nspec: {cidrs: [" + cidr + "]}\n"
	}
	put(t, dir, "cidr.yaml", file("10.96.0.0/16"))
	w := run(t, dir, "")
	has := func(want string) {
		t.Helper()
		w.sink.Until(t, want, func(s sourcetest.State) bool {
			c := s.CIDRs["kubernetes"]
			return c == nil && want == "" || c != nil && c.Spec.CIDRs[0] == want
		})
	}
	has("10.96.0.0/16")
	put(t, dir, "cidr.yaml", file("10.97.0.0/16"))
	has("10.97.0.0/16")
	must(t, os.Remove(filepath.Join(dir, "cidr.yaml")))
	has("")
}

// Edits of every kind take effect, and only what they change is told.
func TestEdits(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", web("a", "10.0.0.1")+web("b", "10.0.0.2"))
	put(t, dir, "deep/er/c.yml", web("c", "10.0.0.3"))
	put(t, dir, "notes.txt", web("no", "10.0.0.9"))
	put(t, dir, ".a.yaml.swp", web("no", "10.0.0.9"))
	put(t, dir, ".git/x.yaml", web("no", "10.0.0.9"))
	w := run(t, dir, "")
	w.services("a=10.0.0.1 b=10.0.0.2 c=10.0.0.3")

	for _, step := range []struct {
		what, want, calls string
		do                func()
	}{
		{"write in place", "a=10.0.0.1 b=10.0.0.4 c=10.0.0.3", "service default/b", func() { put(t, dir, "a.yaml", web("a", "10.0.0.1")+web("b", "10.0.0.4")) }},
		{"same length, at once after", "a=10.0.0.1 b=10.0.0.5 c=10.0.0.3", "service default/b", func() { put(t, dir, "a.yaml", web("a", "10.0.0.1")+web("b", "10.0.0.5")) }},
		{"an editor that renames", "a=10.0.0.6 b=10.0.0.5 c=10.0.0.3", "*", func() {
			must(t, os.Rename(filepath.Join(dir, "a.yaml"), filepath.Join(dir, "a.yaml~")))
			put(t, dir, "a.yaml.tmp", web("a", "10.0.0.6")+web("b", "10.0.0.5"))
			must(t, os.Rename(filepath.Join(dir, "a.yaml.tmp"), filepath.Join(dir, "a.yaml")))
		}},
		{"a document less", "a=10.0.0.6 c=10.0.0.3", "no service default/b", func() { put(t, dir, "a.yaml", web("a", "10.0.0.6")) }},
		{"a file in a new folder", "a=10.0.0.6 c=10.0.0.3 d=10.0.0.8", "service default/d", func() {
			put(t, dir, "x/y/z/d.json", `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "d"}, "spec": {"clusterIP": "10.0.0.8", "ports": [{"port": 80}]}}`)
		}},
		{"a file that moves", "a=10.0.0.6 c=10.0.0.3 d=10.0.0.8", "", func() { must(t, os.Rename(filepath.Join(dir, "deep/er/c.yml"), filepath.Join(dir, "c.yaml"))) }},
		{"a file less", "c=10.0.0.3 d=10.0.0.8", "no service default/a", func() { must(t, os.Remove(filepath.Join(dir, "a.yaml"))) }},
		{"an empty file", "d=10.0.0.8", "no service default/c", func() { put(t, dir, "c.yaml", "") }},
		{"a folder less", "", "no service default/d", func() { must(t, os.RemoveAll(filepath.Join(dir, "x"))) }},
		{"a folder again", "d=10.0.0.1", "service default/d", func() { put(t, dir, "x/y/z/d.yaml", web("d", "10.0.0.1")) }},
		{"and again", "d=10.0.0.2", "service default/d", func() { put(t, dir, "x/y/z/d.yaml", web("d", "10.0.0.2")) }},
	} {
		w.sink.Forget()
		begin := time.Now()
		step.do()
		if step.calls == "" {
			time.Sleep(300 * time.Millisecond) // there is nothing to wait for
		}
		now := w.services(step.want)
		t.Logf("%s: %v", step.what, time.Since(begin).Round(time.Millisecond))
		if got := strings.Join(now.Calls, ", "); got != step.calls && step.calls != "*" {
			t.Errorf("%s: calls %q, want %q", step.what, got, step.calls)
		}
	}
	if said := w.reports(); len(said) > 0 {
		t.Errorf("reports %q", said)
	}
}

// A mounted ConfigMap changes by the swap of a link to a folder.
func TestConfigMap(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "m"), 0o755))
	version := func(name, text string) {
		put(t, dir, "m", name, "a.yaml", text)
		must(t, os.Symlink(name, filepath.Join(dir, "m", "..data_tmp")))
		must(t, os.Rename(filepath.Join(dir, "m", "..data_tmp"), filepath.Join(dir, "m", "..data")))
	}
	version("..1", web("a", "10.0.0.1"))
	must(t, os.Symlink("..data/a.yaml", filepath.Join(dir, "m", "a.yaml")))
	whole, one := run(t, dir, "m"), run(t, dir, "m/a.yaml")
	whole.services("a=10.0.0.1")
	one.services("a=10.0.0.1")
	for i, ip := range []string{"10.0.0.2", "10.0.0.3"} {
		version(fmt.Sprintf("..%d", i+2), web("a", ip))
		must(t, os.RemoveAll(filepath.Join(dir, "m", fmt.Sprintf("..%d", i+1))))
		whole.services("a=" + ip)
		one.services("a=" + ip)
	}
	if said := append(whole.reports(), one.reports()...); len(said) > 0 {
		t.Errorf("reports %q", said)
	}
}

// The path itself may be a link that is swapped, and a file a link to one elsewhere.
func TestLinks(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "v1/a.yaml", web("a", "10.0.0.1"))
	put(t, dir, "v2/a.yaml", web("a", "10.0.0.2"))
	put(t, dir, "else/b.yaml", web("b", "10.0.0.1"))
	must(t, os.Symlink("v1", filepath.Join(dir, "now")))
	must(t, os.Symlink("../else/b.yaml", filepath.Join(dir, "v1/b.yaml")))
	must(t, os.Symlink("../else/b.yaml", filepath.Join(dir, "v2/b.yaml")))
	must(t, os.Symlink("..", filepath.Join(dir, "else/ring")))
	must(t, os.Symlink("nowhere", filepath.Join(dir, "v1/dangling.yaml")))
	w := run(t, dir, "now")
	w.services("a=10.0.0.1 b=10.0.0.1")
	put(t, dir, "else/b.yaml", web("b", "10.0.0.2"))
	w.services("a=10.0.0.1 b=10.0.0.2")
	must(t, os.Symlink("v2", filepath.Join(dir, "next")))
	must(t, os.Rename(filepath.Join(dir, "next"), filepath.Join(dir, "now")))
	w.services("a=10.0.0.2 b=10.0.0.2")
	put(t, dir, "v2/a.yaml", web("a", "10.0.0.3"))
	w.services("a=10.0.0.3 b=10.0.0.2")
	if said := w.reports(); len(said) > 0 {
		t.Errorf("reports %q", said)
	}
}

// Mistakes are reported once, take nothing away, and end when they are mended.
func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", web("a", "10.0.0.1"))
	put(t, dir, "bad.yaml", "}")
	w := run(t, dir, "") // synced all the same
	w.services("a=10.0.0.1")
	put(t, dir, "a.yaml", web("a", "10.0.0.300")+web("b", "10.0.0.2"))
	w.services("a=10.0.0.1 b=10.0.0.2")
	put(t, dir, "c.yaml", web("a", "10.0.0.7")) // where a is now: what a.yaml had was only kept
	w.services("a=10.0.0.7 b=10.0.0.2")
	put(t, dir, "c.yaml", web("b", "10.0.0.7"))
	w.services("a=10.0.0.1 b=10.0.0.2")
	put(t, dir, "a.yaml", web("a", "10.0.0.3"))
	w.services("a=10.0.0.3 b=10.0.0.7")
	want := []string{
		"bad.yaml:1: YAML: did not find expected node content",
		`a.yaml:5: Service default/a: spec.clusterIPs[0]: "10.0.0.300" is no IP address`,
		"c.yaml:2: Service default/b is in a.yaml:7 already; that one counts",
	}
	if said := w.reports(); !slices.Equal(said, want) {
		t.Errorf("reports\n%s\nwant\n%s", strings.Join(said, "\n"), strings.Join(want, "\n"))
	}
	if st := w.src.Status(); st.Reports != 3 || st.Files != 3 || st.Services != 2 || !st.Synced || st.LastRead.IsZero() {
		t.Errorf("status %+v", st)
	}
}

// When the path goes away that is a mistake, not an order: everything stays. When it is back it is read.
func TestPathGone(t *testing.T) {
	for _, path := range []string{"m", "m/a.yaml"} {
		dir := t.TempDir()
		put(t, dir, "m/a.yaml", web("a", "10.0.0.1"))
		w := run(t, dir, path)
		must(t, os.RemoveAll(filepath.Join(dir, "m")))
		waitFor(t, "a report", func() bool { return len(w.reports()) > 0 })
		if now := names(w.sink.Now()); now != "a=10.0.0.1" {
			t.Errorf("%s: Services %q", path, now)
		}
		put(t, dir, "m/a.yaml", web("a", "10.0.0.2"))
		w.services("a=10.0.0.2")
		if said := w.reports(); len(said) != 1 || said[0] != path+":1: can't be read: no such file or directory" {
			t.Errorf("%s: reports %q", path, said)
		}
	}
}

func TestNothingThere(t *testing.T) {
	err := New(filepath.Join(t.TempDir(), "none"), nil).Run(t.Context(), new(sourcetest.Sink))
	if err == nil || !strings.Contains(err.Error(), "read manifests") || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("error %v", err)
	}
}

// A named pipe or a directory with the name of a manifest must not stop the others.
func TestOddFiles(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", web("a", "10.0.0.1"))
	put(t, dir, "folder.yaml/b.yaml", web("b", "10.0.0.2"))
	must(t, syscall.Mkfifo(filepath.Join(dir, "pipe.yaml"), 0o644))
	run(t, dir, "").services("a=10.0.0.1 b=10.0.0.2")
}

// A file that is gone or empty for a moment, between two steps of an editor, loses nothing.
func TestDoubt(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.yaml")
	put(t, path, web("a", "10.0.0.1")+web("b", "10.0.0.2"))
	s, sink, e := New(dir, nil), new(sourcetest.Sink), newEar(dir)
	defer e.close()
	s.look(e, sink)
	later := func() { s.files[path].doubt = s.files[path].doubt.Add(-settle) }
	for _, step := range []struct {
		what, want string
		do         func()
	}{
		{"empty", "", func() { put(t, path, "") }},
		{"written", "service default/a", func() { put(t, path, web("a", "10.0.0.3")+web("b", "10.0.0.2")) }},
		{"gone", "", func() { must(t, os.Rename(path, path+"~")) }},
		{"back", "service default/a", func() { put(t, path, web("a", "10.0.0.4")+web("b", "10.0.0.2")) }},
		{"empty again", "", func() { put(t, path, "# nothing\n \n"); put(t, path, "") }},
		{"and stays empty", "no service default/a, no service default/b", later},
		{"written again", "service default/a", func() { put(t, path, web("a", "10.0.0.4")) }},
		{"gone again", "", func() { must(t, os.Remove(path)) }},
		{"and stays gone", "no service default/a", later},
	} {
		sink.Forget()
		step.do()
		again := s.look(e, sink)
		if got := strings.Join(sink.Now().Calls, ", "); got != step.want || step.want == "" && again > settle {
			t.Errorf("%s: calls %q, want %q; looks again after %v", step.what, got, step.want, again)
		}
	}
}

// What the kernel gives no sign of is found all the same.
func TestDeaf(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a.yaml", web("a", "10.0.0.1"))
	s, sink := New(dir, nil), new(sourcetest.Sink)
	e := &ear{watched: map[string]bool{}, deaf: true}
	if again := s.look(e, sink); again > pollDeaf {
		t.Errorf("looks again after %v", again)
	}
	put(t, dir, "a.yaml", web("a", "10.0.0.2"))
	s.look(e, sink)
	if got := names(sink.Now()); got != "a=10.0.0.2" {
		t.Errorf("Services %q", got)
	}
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("waited in vain for %s", what)
}
