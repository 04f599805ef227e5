package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// look is one look at files: what it read once, it does not read again.
type look struct {
	read  func(path string) ([]byte, error)
	paths []string // in the order in which they were read
	found map[string]text
}

func newLook(read func(string) ([]byte, error)) *look {
	return &look{read: read, found: map[string]text{}}
}

// text is what a file said, or why it did not.
type text struct {
	data []byte
	err  error
}

// file gives the content of a file. The error names it.
func (l *look) file(path string) ([]byte, error) {
	t, ok := l.found[path]
	if !ok {
		t.data, t.err = l.read(path)
		l.paths = append(l.paths, path)
		l.found[path] = t
	}
	return t.data, t.err
}

// inlineOr gives what is in the kubeconfig itself, or else the content of the file that it names; and where that was.
func (l *look) inlineOr(inline []byte, path, place string) (data []byte, from string, err error) {
	if len(inline) > 0 || path == "" {
		return inline, place, nil
	}
	data, err = l.file(path)
	return data, path, err
}

// stale tells whether a file says something else by now.
func (l *look) stale() bool {
	for _, path := range l.paths {
		t := l.found[path]
		data, err := l.read(path)
		if (err == nil) != (t.err == nil) || !bytes.Equal(data, t.data) {
			return true
		}
	}
	return false
}

// fileMost is more than any kubeconfig or bundle of authorities needs.
const fileMost = 8 << 20

// readFile is [os.ReadFile] of a file that can be read again and has an end: no pipe, no device.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would wait for somebody who writes
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, &fs.PathError{Op: "read", Path: path, Err: syscall.EISDIR}
	case !info.Mode().IsRegular():
		return nil, &fs.PathError{Op: "read", Path: path, Err: errors.New("it is no regular file, which could be read again when it changes")}
	}
	data, err := io.ReadAll(io.LimitReader(f, fileMost+1))
	if err == nil && len(data) > fileMost {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("it is larger than %d MiB", fileMost>>20)}
	}
	if err != nil {
		return nil, err
	}
	return data, nil
}

// How long a sign that a file changed is waited upon: who writes, writes in steps, and reading in the middle is of no use.
const (
	calm      = 50 * time.Millisecond  // since the last sign
	impatient = 300 * time.Millisecond // since the first
)

// watchFiles calls look soon after something may have happened to one of the files, and every poll in any case, until ctx
// ends. files are asked for anew after each look. It makes do without the kernel's signs, by the poll alone.
func watchFiles(ctx context.Context, files func() []string, poll time.Duration, look func()) {
	e := newEar()
	defer e.close()
	e.run(ctx, files, poll, look)
}

func (e *ear) run(ctx context.Context, files func() []string, poll time.Duration, look func()) {
	quiet, late, tick := stopped(), stopped(), time.NewTicker(poll)
	defer tick.Stop()
	for {
		e.watch(files())
		look()                // after the watch: what happens from now on is heard
		if e.watch(files()) { // other files, or a directory that came meanwhile: what was in it before it was watched, was not heard
			quiet.Reset(calm)
		}
		if !e.wait(ctx, quiet, late, tick.C) {
			return
		}
		quiet.Stop()
		late.Stop()
	}
}

// stopped is a timer that waits to be set.
func stopped() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// ear hears the kernel's signs that something changed.
type ear struct {
	watcher *fsnotify.Watcher // nil when there is none
	dirs    map[string]bool   // that are watched
	names   map[string]bool   // paths whose signs matter
	deaf    bool              // to something, and that was said
}

func newEar() *ear {
	e := &ear{dirs: map[string]bool{}}
	var err error
	if e.watcher, err = fsnotify.NewWatcher(); err != nil {
		e.unheard("", err)
	}
	return e
}

func (e *ear) close() {
	if e.watcher != nil {
		e.watcher.Close()
	}
}

// unheard notes that changes in dir give no signs.
func (e *ear) unheard(dir string, err error) {
	if !e.deaf {
		klog.InfoS("The files of the connection to the Kubernetes API can't be watched; looking at them now and then", "dir", dir, "err", err)
	}
	e.deaf = true
}

// wait waits until it is time for a look. It tells whether to go on.
func (e *ear) wait(ctx context.Context, quiet, late *time.Timer, tick <-chan time.Time) bool {
	var signs <-chan fsnotify.Event
	var errs <-chan error
	if e.watcher != nil {
		signs, errs = e.watcher.Events, e.watcher.Errors
	}
	waiting := false
	for {
		heard := false
		select {
		case <-ctx.Done():
			return false
		case <-tick:
			return true
		case <-quiet.C:
			return true
		case <-late.C:
			return true
		case sign := <-signs:
			heard = e.names[filepath.Clean(sign.Name)]
		case <-errs: // signs were lost: too many at once
			heard = true
		}
		if heard {
			quiet.Reset(calm)
			if !waiting {
				late.Reset(impatient)
			}
			waiting = true
		}
	}
}

// watch watches for changes of these files and of no others. It tells whether a directory is watched that was not.
func (e *ear) watch(files []string) (fresh bool) {
	e.names = map[string]bool{}
	for _, f := range files {
		e.follow(f)
	}
	if e.watcher == nil {
		return false
	}
	dirs := map[string]bool{}
	for name := range e.names {
		dirs[filepath.Dir(name)] = true
	}
	for d := range e.dirs {
		if !dirs[d] {
			_ = e.watcher.Remove(d) // it may be gone already
			delete(e.dirs, d)
		}
	}
	hears := true
	for d := range dirs {
		err := e.watcher.Add(d) // also when it is watched: another directory may have its name now
		switch {
		case err == nil:
			fresh = fresh || !e.dirs[d]
			e.dirs[d] = true
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
			delete(e.dirs, d)
		default:
			hears = false
			e.unheard(d, err)
		}
	}
	e.deaf = e.deaf && !hears
	return fresh
}

// linksMost bounds the links of a path, as the kernel does (MAXSYMLINKS).
const linksMost = 40

// follow adds the names whose change may change what a path leads to: the path, each directory and each link on the way to the
// end, as they are now.
func (e *ear) follow(path string) {
	path, err := filepath.Abs(path)
	if err != nil {
		return // no working directory
	}
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		step := rest[0]
		rest = rest[1:]
		switch step {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		name := filepath.Join(at, step)
		e.names[name] = true
		to, err := os.Readlink(name)
		if err != nil {
			at = name // no link, or not there
			continue
		}
		if links++; links > linksMost {
			return
		}
		if filepath.IsAbs(to) {
			at = "/"
		}
		rest = slices.Concat(strings.Split(to, "/"), rest)
	}
}
