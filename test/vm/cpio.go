package vm

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// archive writes the "newc" form of cpio, which the kernel reads (Documentation/driver-api/early-userspace/buffer-format.rst).
// Folders are made as they are needed; what is written twice counts once. The first error is kept until close.
type archive struct {
	w    *bufio.Writer
	n    int64
	seen map[string]bool
	err  error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), seen: map[string]bool{"/": true}}
}

// close writes the trailer, and zeros up to a full block, so that another archive may follow.
func (a *archive) close() error {
	a.record("TRAILER!!!", 0, 0, strings.NewReader(""))
	a.pad(512)
	if a.err == nil {
		a.err = a.w.Flush()
	}
	return a.err
}

// first tells whether name is new, and sees to its folder.
func (a *archive) first(name string) bool {
	if a.err != nil || a.seen[name] {
		return false
	}
	a.folder(path.Dir(name))
	a.seen[name] = true
	return true
}

func (a *archive) folder(name string) {
	if a.first(name) {
		a.record(name, 0o040755, 0, strings.NewReader(""))
	}
}

func (a *archive) link(name, target string) {
	if a.first(name) {
		a.record(name, 0o120777, int64(len(target)), strings.NewReader(target))
	}
}

func (a *archive) text(name, content string) {
	a.script(name, content, 0o644)
}

func (a *archive) script(name, content string, mode uint32) {
	if a.first(name) {
		a.record(name, 0o100000|mode, int64(len(content)), strings.NewReader(content))
	}
}

// file copies a file of this machine, with its permission to be run.
func (a *archive) file(name, host string) {
	if !a.first(name) {
		return
	}
	f, err := os.Open(host)
	if err != nil {
		a.err = err
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		a.err = err
		return
	}
	a.record(name, 0o100000|uint32(info.Mode().Perm()), info.Size(), f)
}

// tree copies a file or a folder, with all that is in it.
func (a *archive) tree(name, host string) {
	err := filepath.WalkDir(host, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(host, p)
		if err != nil {
			return err
		}
		at := path.Join(name, filepath.ToSlash(inside))
		switch {
		case d.IsDir():
			a.folder(at)
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			a.link(at, target)
		case d.Type().IsRegular():
			a.file(at, p)
		}
		return a.err
	})
	if a.err == nil {
		a.err = err
	}
}

// record writes one entry: thirteen numbers, the name, the content, each padded to four bytes.
func (a *archive) record(name string, mode uint32, size int64, content io.Reader) {
	if a.err != nil {
		return
	}
	name = strings.TrimPrefix(name, "/")
	header := slices.Repeat([]any{0}, 13)
	header[0], header[1], header[4], header[6], header[11] = len(a.seen), mode, 1, size, len(name)+1 // inode, mode, links, size, length of name
	a.write(strings.NewReader("070701" + fmt.Sprintf(strings.Repeat("%08x", 13), header...) + name + "\x00"))
	a.pad(4)
	if n := a.write(content); a.err == nil && n != size {
		a.err = fmt.Errorf("%s: %d bytes, and not %d, as its folder says", name, n, size)
	}
	a.pad(4)
}

func (a *archive) write(r io.Reader) int64 {
	if a.err != nil {
		return 0
	}
	n, err := io.Copy(a.w, r)
	a.n, a.err = a.n+n, err
	return n
}

func (a *archive) pad(to int64) {
	a.write(strings.NewReader(strings.Repeat("\x00", int((to-a.n%to)%to))))
}
