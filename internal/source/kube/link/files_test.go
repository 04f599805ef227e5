package link

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// watching notes what files say at each look.
type watching struct {
	mu    sync.Mutex
	files []string
	seen  map[string]string // the last
	looks int
	after func() // of each look; nil is nothing
}

// watchThese watches until the test ends, with a poll that never comes unless told.
func watchThese(t *testing.T, poll time.Duration, files ...string) *watching {
	t.Helper()
	w := &watching{files: files}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); watchFiles(ctx, w.these, poll, w.look) }()
	t.Cleanup(func() { cancel(); <-done })
	waitFor(t, "the first look", func() bool { return w.count() > 0 })
	time.Sleep(2 * calm) // what was new at the first look is over
	return w
}

func (w *watching) these() []string { w.mu.Lock(); defer w.mu.Unlock(); return w.files }

func (w *watching) count() int { w.mu.Lock(); defer w.mu.Unlock(); return w.looks }

func (w *watching) look() {
	seen := map[string]string{}
	for _, f := range w.these() {
		if b, err := os.ReadFile(f); err == nil {
			seen[f] = string(b)
		}
	}
	w.mu.Lock()
	w.seen = seen
	w.looks++
	after := w.after
	w.mu.Unlock()
	if after != nil {
		after()
	}
}

// sees waits until a look has found the file to say this; "" is that it is not there.
func (w *watching) sees(t *testing.T, file, text string) {
	t.Helper()
	waitFor(t, file+" to say "+text, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.seen[file] == text
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

const never = 24 * time.Hour

// Each way in which a file can become another is noticed, again and again, without the poll.
func TestWatchChanges(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, dir, text string){
		"written": func(t *testing.T, dir, text string) { put(t, dir+"/f", text) },
		"written in steps": func(t *testing.T, dir, text string) {
			f, err := os.Create(dir + "/f")
			must(t, err)
			for _, c := range text {
				_, err := f.WriteString(string(c))
				must(t, err)
				time.Sleep(calm / 5)
			}
			must(t, f.Close())
		},
		"replaced by an editor": func(t *testing.T, dir, text string) {
			put(t, dir+"/.f.swp", text)
			must(t, os.Rename(dir+"/.f.swp", dir+"/f"))
		},
		"moved away by an editor": func(t *testing.T, dir, text string) {
			os.Rename(dir+"/f", dir+"/f~")
			put(t, dir+"/f", text)
		},
		"removed and made": func(t *testing.T, dir, text string) {
			os.Remove(dir + "/f")
			time.Sleep(3 * calm)
			put(t, dir+"/f", text)
		},
		"directory removed and made": func(t *testing.T, dir, text string) {
			must(t, os.RemoveAll(dir))
			must(t, os.Mkdir(dir, 0o700))
			put(t, dir+"/f", text)
		},
		"directory removed and made slowly": func(t *testing.T, dir, text string) {
			must(t, os.RemoveAll(dir))
			time.Sleep(3 * calm)
			must(t, os.Mkdir(dir, 0o700))
			time.Sleep(3 * calm)
			put(t, dir+"/f", text)
		},
		"two directories removed and made": func(t *testing.T, dir, text string) {
			must(t, os.RemoveAll(filepath.Dir(dir)))
			must(t, os.MkdirAll(dir, 0o700))
			put(t, dir+"/f", text)
		},
		"upper directory exchanged": func(t *testing.T, dir, text string) {
			up := filepath.Dir(dir)
			must(t, os.MkdirAll(up+".new/"+filepath.Base(dir), 0o700))
			put(t, up+".new/"+filepath.Base(dir)+"/f", text)
			must(t, os.Rename(up, up+".old"))
			must(t, os.Rename(up+".new", up))
			must(t, os.RemoveAll(up+".old"))
		},
		"made readable": func(t *testing.T, dir, text string) {
			put(t, dir+"/f", text)
			must(t, os.Chmod(dir+"/f", 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "a", "b")
			must(t, os.MkdirAll(dir, 0o700))
			put(t, dir+"/f", "one")
			w := watchThese(t, never, dir+"/f")
			w.sees(t, dir+"/f", "one")
			for _, text := range []string{"two", "three", "four"} {
				change(t, dir, text)
				w.sees(t, dir+"/f", text)
			}
			must(t, os.Remove(dir+"/f"))
			w.sees(t, dir+"/f", "")
		})
	}
}

// The kubelet's way: f is a link to ..data/f, and ..data one to a directory of the time, which is swapped.
func TestWatchKubelet(t *testing.T) {
	dir := t.TempDir()
	at := func(gen, text string) {
		t.Helper()
		must(t, os.Mkdir(dir+"/.."+gen, 0o700))
		put(t, dir+"/.."+gen+"/f", text)
		swap(t, dir+"/..data", ".."+gen)
	}
	at("1", "one")
	must(t, os.Symlink("..data/f", dir+"/f"))
	w := watchThese(t, never, dir+"/f")
	w.sees(t, dir+"/f", "one")
	at("2", "two")
	w.sees(t, dir+"/f", "two")
	must(t, os.RemoveAll(dir+"/..1"))
	at("3", "three")
	w.sees(t, dir+"/f", "three")
	put(t, dir+"/..3/f", "in place")
	w.sees(t, dir+"/f", "in place")
}

// A link somewhere, over links elsewhere: a change of any of them, and of the end, is noticed.
func TestWatchLinks(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"a", "b", "c", "d", "d/sub"} {
		must(t, os.Mkdir(dir+"/"+d, 0o700))
	}
	put(t, dir+"/c/f", "one")
	must(t, os.Symlink("../b/f", dir+"/a/f"))
	must(t, os.Symlink(dir+"/b/over/f", dir+"/b/f"))
	must(t, os.Symlink("../d/sub/../../c", dir+"/b/over"))
	f := dir + "/a/f"
	w := watchThese(t, never, f)
	w.sees(t, f, "one")
	put(t, dir+"/c/f", "two") // the end
	w.sees(t, f, "two")
	put(t, dir+"/d/f", "three")
	swap(t, dir+"/b/over", "../d") // a directory on the way
	w.sees(t, f, "three")
	put(t, dir+"/d/f", "four")
	w.sees(t, f, "four")
	put(t, dir+"/d/g", "five")
	swap(t, dir+"/b/f", "../d/g") // the link in the middle
	w.sees(t, f, "five")
	must(t, os.Remove(f)) // the first
	put(t, f, "six")
	w.sees(t, f, "six")
	swap(t, f, "none")
	w.sees(t, f, "")
	put(t, dir+"/a/none", "seven") // a link that led nowhere
	w.sees(t, f, "seven")
	swap(t, f, "f") // a ring
	w.sees(t, f, "")
	swap(t, f, "../d/g")
	w.sees(t, f, "five")
}

// What is not there yet may come, directories and all; and others may be named.
func TestWatchLater(t *testing.T) {
	dir := t.TempDir()
	f, g := dir+"/x/y/f", dir+"/z/g"
	w := watchThese(t, never, f)
	must(t, os.Mkdir(dir+"/x", 0o700))
	time.Sleep(3 * calm)
	must(t, os.Mkdir(dir+"/x/y", 0o700))
	put(t, f, "one")
	w.sees(t, f, "one")
	w.mu.Lock()
	w.files = []string{f, g}
	w.mu.Unlock()
	put(t, f, "two") // a look, after which the other is watched
	w.sees(t, f, "two")
	time.Sleep(3 * calm)
	must(t, os.Mkdir(dir+"/z", 0o700))
	put(t, g, "three")
	w.sees(t, g, "three")
}

// What changes while it is looked at, in a directory that is new, is heard.
func TestWatchDuringLook(t *testing.T) {
	dir := t.TempDir()
	f := dir + "/a/f"
	must(t, os.Mkdir(dir+"/a", 0o700))
	put(t, f, "one")
	w := watchThese(t, never, f)
	w.sees(t, f, "one")
	must(t, os.Mkdir(dir+"/b", 0o700))
	put(t, dir+"/b/f", "two")
	var once sync.Once
	w.mu.Lock()
	w.after = func() { once.Do(func() { put(t, f, "three") }) }
	w.mu.Unlock()
	must(t, os.Rename(dir+"/a", dir+"/c"))
	must(t, os.Rename(dir+"/b", dir+"/a"))
	w.sees(t, f, "three")
}

// What happens beside the files is no reason to look.
func TestWatchOthers(t *testing.T) {
	dir := t.TempDir()
	put(t, dir+"/f", "one")
	w := watchThese(t, never, dir+"/f")
	before := w.count()
	for range 5 {
		put(t, dir+"/other", "x")
		time.Sleep(2 * calm)
	}
	if now := w.count(); now != before {
		t.Errorf("%d looks for nothing", now-before)
	}
	put(t, dir+"/f", "two")
	w.sees(t, dir+"/f", "two")
}

// A file that never stops changing is looked at all the same.
func TestWatchNeverStarves(t *testing.T) {
	dir := t.TempDir()
	put(t, dir+"/f", "0")
	w := watchThese(t, never, dir+"/f")
	before, end, done := w.count(), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			case <-time.After(calm / 10):
				_ = os.WriteFile(dir+"/f", []byte(strings.Repeat("x", i%10)), 0o600)
			}
		}
	}()
	waitFor(t, "a look", func() bool { return w.count() > before+1 })
	close(end)
	<-done
}

// Without the kernel's signs, the poll finds what changed.
func TestWatchDeaf(t *testing.T) {
	dir := t.TempDir()
	put(t, dir+"/f", "one")
	deaf := &ear{dirs: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	w := &watching{files: []string{dir + "/f"}}
	done := make(chan struct{})
	go func() { defer close(done); deaf.run(ctx, w.these, 20*time.Millisecond, w.look) }()
	w.sees(t, dir+"/f", "one")
	put(t, dir+"/f", "two")
	w.sees(t, dir+"/f", "two")
	cancel()
	<-done
}

// The poll comes in any case.
func TestWatchPoll(t *testing.T) {
	w := watchThese(t, 10*time.Millisecond, t.TempDir()+"/f")
	before := w.count()
	waitFor(t, "looks", func() bool { return w.count() > before+3 })
}
