package saved

import (
	"bufio"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// Names in the directory.
const (
	journalName = "services.journal"
	newName     = journalName + ".new" // until it holds everything
)

// disk is the journal that is written. Only the goroutine of the writer uses it, once it is open.
type disk struct {
	dir, node string
	f         *os.File
	size      int64
	placed    bool      // it is where a later process looks for it
	dirty     bool      // something was written since it was last made sure that it is on the disk
	surely    time.Time // when that was
}

func (d *disk) path(name string) string { return filepath.Join(d.dir, name) }

// open begins a journal beside the one of before. That one is given too; whether it can be believed is another question, and
// an error is about the new one only.
func (d *disk) open() (before believed, err error) {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return believed{problem: err}, err
	}
	before = believe(d.path(journalName))
	d.f, d.size, err = d.begin()
	return before, err
}

// begin makes a new journal that has not its name yet.
func (d *disk) begin() (*os.File, int64, error) {
	path := d.path(newName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, 0, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, 0, err
	}
	n, err := f.Write(appendNode([]byte(magic), d.node))
	if err != nil {
		f.Close()
		os.Remove(path)
		return nil, 0, err
	}
	return f, int64(n), nil
}

func (d *disk) write(b []byte) error {
	n, err := d.f.Write(b)
	d.size += int64(n)
	d.dirty = d.dirty || n > 0
	return err
}

// sync makes sure that what was written is on the disk.
func (d *disk) sync() error {
	d.dirty, d.surely = false, time.Now()
	return d.f.Sync()
}

// place gives a new journal, which holds everything, its name.
func (d *disk) place(f *os.File) error {
	if err := f.Sync(); err != nil {
		return err
	}
	if !at(d.path(newName), f) {
		return fmt.Errorf("somebody else writes %s", d.path(newName))
	}
	if err := os.Rename(d.path(newName), d.path(journalName)); err != nil {
		return err
	}
	d.placed, d.dirty, d.surely = true, false, time.Now()
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// at tells whether a path is a file that is open.
func at(path string, f *os.File) bool {
	there, err := os.Lstat(path)
	if err != nil {
		return false
	}
	is, err := f.Stat()
	return err == nil && os.SameFile(there, is)
}

// missing tells that a later process would not find the journal.
func (d *disk) missing() bool { return d.placed && !at(d.path(journalName), d.f) }

// compact writes a journal of what is there now, and puts it in the place of the one that is written.
func (d *disk) compact(seed maphash.Seed, lastHeard time.Time) error {
	x, err := survey(io.NewSectionReader(d.f, 0, d.size), d.node, seed)
	if err == nil {
		err = x.torn
	}
	if err != nil {
		return fmt.Errorf("read it back: %w", err)
	}
	f, size, err := d.begin()
	if err != nil {
		return err
	}
	n, err := copyLast(f, io.NewSectionReader(d.f, 0, d.size), x, seed, lastHeard)
	if err == nil {
		err = d.place(f)
	}
	if err != nil {
		f.Close()
		os.Remove(d.path(newName))
		return err
	}
	d.f.Close()
	d.f, d.size = f, size+n
	return nil
}

// copyLast copies the last record of each thing that is not gone, and says then when the API was last heard.
func copyLast(to io.Writer, from io.Reader, x index, seed maphash.Seed, lastHeard time.Time) (int64, error) {
	r, _, err := read(from)
	if err != nil {
		return 0, err
	}
	out, n := bufio.NewWriterSize(to, 64<<10), int64(0)
	var rec []byte
	for {
		began := r.at
		body, err := r.next()
		if err == io.EOF {
			rec = appendHeard(rec[:0], lastHeard)
			out.Write(rec)
			return n + int64(len(rec)), out.Flush()
		}
		if err != nil {
			return 0, err
		}
		if _, keyed, ok := split(body); ok && keyed < len(body) && x.last[maphash.Bytes(seed, body[:keyed])] == began {
			rec = seal(append(append(rec[:0], make([]byte, prefix)...), body...), 0)
			n += int64(len(rec))
			if _, err := out.Write(rec); err != nil {
				return 0, err
			}
		}
	}
}

// discard removes what was written.
func (d *disk) discard() error {
	if d.f == nil {
		return nil
	}
	name, f := newName, d.f
	if d.placed {
		name = journalName
	}
	d.f = nil
	defer f.Close()
	if !at(d.path(name), f) {
		return nil
	}
	return os.Remove(d.path(name))
}

// forget removes the journal of an earlier process.
func (d *disk) forget() error {
	if err := os.Remove(d.path(journalName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// believed is the journal of an earlier process, if nobody else can have written it.
type believed struct {
	f       *os.File
	problem error
}

func (b believed) close() {
	if b.f != nil {
		b.f.Close()
	}
}

// believe opens a journal. What it says decides where traffic goes, so that it must be a file of our own or of root, which
// nobody else can write.
func believe(path string) believed {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, syscall.ELOOP) {
		err = fmt.Errorf("%s is a symbolic link", path)
	}
	if err != nil {
		return believed{problem: err}
	}
	info, err := f.Stat()
	if err == nil {
		err = trusted(path, info)
	}
	if err != nil {
		f.Close()
		return believed{problem: err}
	}
	return believed{f: f}
}

func trusted(path string, info fs.FileInfo) error {
	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is no regular file", path)
	case !ok || owner.Uid != 0 && int(owner.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to another user", path)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s can be written by others (mode %v)", path, info.Mode().Perm())
	}
	return nil
}
