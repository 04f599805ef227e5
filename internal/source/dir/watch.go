package dir

import (
	"errors"
	"fmt"
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

// isManifest tells by its name whether a file is read.
func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !hidden(name)
	}
	return false
}

// hidden tells of names that editors and the kubelet use for themselves.
func hidden(name string) bool {
	base := filepath.Base(name)
	return strings.HasPrefix(base, ".") || strings.HasSuffix(base, "~")
}

// stamp is how a file looks from outside.
type stamp struct {
	device, inode    uint64
	size             int64
	modified, status syscall.Timespec
	racy             bool // it changed just now, and may change again without looking different: time stamps are coarse
}

func stampOf(info fs.FileInfo) stamp {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{size: info.Size(), racy: true}
	}
	age := time.Since(time.Unix(st.Ctim.Unix()))
	return stamp{uint64(st.Dev), st.Ino, st.Size, st.Mtim, st.Ctim, age >= 0 && age < settle}
}

// found is what a look at the path found.
type found struct {
	files  map[string]stamp
	dirs   []string // whose changes matter
	unread []string // lines about what can't be read
	holes  []string // the paths of these
}

func (f *found) cannot(path string, err error) {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	f.holes = append(f.holes, path)
	f.unread = append(f.unread, oneLine(fmt.Sprintf("%s:1: can't be read: %s", path, err)))
}

// unsure tells whether a file may be there although it was not found.
func (f *found) unsure(path string) bool {
	return slices.ContainsFunc(f.holes, func(hole string) bool {
		return path == hole || strings.HasPrefix(path, strings.TrimSuffix(hole, "/")+"/")
	})
}

// scan lists the manifests at a path, and the folders in which they, and what links to them, are.
func scan(root string) found {
	f := found{files: map[string]stamp{}}
	info, err := os.Stat(root)
	switch {
	case err != nil:
		f.cannot(root, err)
		f.dirs = append(f.dirs, filepath.Dir(root))
	case info.IsDir():
		f.folder(root, info, nil)
		f.links(root)
	case info.Mode().IsRegular():
		f.files[root] = stampOf(info)
		f.dirs = append(f.dirs, filepath.Dir(root))
		f.links(root)
	default:
		f.cannot(root, errors.New("is neither a directory nor a file"))
	}
	return f
}

// links adds the folders of a link and of what it links to: a swap of the link, and a change of its end, matter.
func (f *found) links(path string) {
	if info, err := os.Lstat(path); err != nil || info.Mode()&fs.ModeSymlink == 0 {
		return
	}
	f.dirs = append(f.dirs, filepath.Dir(path))
	if end, err := filepath.EvalSymlinks(path); err == nil {
		f.dirs = append(f.dirs, filepath.Dir(end))
	}
}

// folder adds what is in a folder, and goes into its folders. above are the folders that it is in: a link to one of them
// is a ring.
func (f *found) folder(path string, info fs.FileInfo, above []fs.FileInfo) {
	if slices.ContainsFunc(above, func(a fs.FileInfo) bool { return os.SameFile(a, info) }) {
		return
	}
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.cannot(path, err)
	}
	f.dirs = append(f.dirs, path)
	above = append(slices.Clip(above), info)
	for _, e := range entries {
		if hidden(e.Name()) {
			continue
		}
		name := filepath.Join(path, e.Name())
		info, err := os.Stat(name)
		switch {
		case err != nil && isManifest(name) && !errors.Is(err, fs.ErrNotExist):
			f.cannot(name, err)
		case err != nil:
		case info.IsDir():
			f.folder(name, info, above)
		case isManifest(name) && info.Mode().IsRegular():
			f.files[name] = stampOf(info)
			f.links(name)
		}
	}
}

// ear hears the kernel's signs that something changed.
type ear struct {
	watcher *fsnotify.Watcher // nil when there is none
	watched map[string]bool
	deaf    bool // to something
}

func newEar(root string) *ear {
	e := &ear{watched: map[string]bool{}}
	var err error
	if e.watcher, err = fsnotify.NewWatcher(); err != nil {
		e.unheard(root, err)
	}
	return e
}

// unheard notes that path gives no signs.
func (e *ear) unheard(path string, err error) {
	if !e.deaf {
		klog.InfoS("Manifests can't be watched; looking for changes every moment", "path", path, "every", pollDeaf, "err", err)
	}
	e.deaf = true
}

func (e *ear) close() {
	if e.watcher != nil {
		e.watcher.Close()
	}
}

func (e *ear) signs() <-chan fsnotify.Event {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Events
}

func (e *ear) errors() <-chan error {
	if e.watcher == nil {
		return nil
	}
	return e.watcher.Errors
}

// means tells whether a sign may be about a manifest.
func (e *ear) means(sign fsnotify.Event) bool {
	base := filepath.Base(sign.Name)
	return strings.HasPrefix(base, "..") || !hidden(base) // the kubelet swaps a link named ..data
}

// watch watches these folders and no others. It tells whether one of them is new.
func (e *ear) watch(dirs []string) (fresh bool) {
	if e.watcher == nil {
		return false
	}
	for d := range e.watched {
		if !slices.Contains(dirs, d) {
			_ = e.watcher.Remove(d) // it may be gone already
			delete(e.watched, d)
		}
	}
	hears := true
	for _, d := range dirs {
		err := e.watcher.Add(d) // also when it is watched: another folder may have its name now
		if err == nil {
			fresh = fresh || !e.watched[d]
			e.watched[d] = true
		} else if !errors.Is(err, fs.ErrNotExist) {
			hears = false
			e.unheard(d, err)
		}
	}
	e.deaf = e.deaf && !hears
	return fresh
}
