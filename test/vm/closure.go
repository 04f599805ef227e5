package vm

import (
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// closure is a set of files of this machine with everything that is needed to run them: the files that links lead to, the
// libraries of programs, the loader.
type closure struct {
	order []string          // paths, links before what they lead to
	links map[string]string // path of a link: its target
	seen  map[string]bool
}

func newClosure() *closure {
	return &closure{links: map[string]string{}, seen: map[string]bool{}}
}

// libraryDirs are where Debian's loader looks (ld.so(8)) when it has no cache, as in the guest.
var libraryDirs = []string{"/usr/lib/x86_64-linux-gnu", "/usr/lib"}

// add adds a file and all that it needs.
func (c *closure) add(path string) error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return err
	}
	path = filepath.Join(dir, filepath.Base(path))
	if c.seen[path] {
		return nil
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	c.seen[path] = true
	c.order = append(c.order, path)
	if info.Mode()&os.ModeSymlink == 0 {
		return c.addNeeded(path)
	}
	target, err := os.Readlink(path)
	if err != nil {
		return err
	}
	c.links[path] = target
	if !filepath.IsAbs(target) {
		target = filepath.Join(dir, target)
	}
	return c.add(target)
}

// addNeeded adds the libraries and the loader of a program.
func (c *closure) addNeeded(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return nil // a text
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, lib := range libs {
		if err := c.addLibrary(lib); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	interp := f.Section(".interp")
	if interp == nil {
		return nil
	}
	loader, err := interp.Data()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	// The loader's path is built into programs, and may lead through a link of a folder that the guest has as well.
	return c.add(strings.TrimRight(string(loader), "\x00"))
}

func (c *closure) addLibrary(name string) error {
	for _, dir := range libraryDirs {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return c.add(filepath.Join(dir, name))
		}
	}
	return fmt.Errorf("no library %s in %v", name, libraryDirs)
}
