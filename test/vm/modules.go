package vm

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// moduleDirs and moduleNames say which of the kernel's modules the guest has; what they need comes along. A name that a kernel
// does not have is built into it, or is not for it.
var (
	moduleDirs  = []string{"kernel/net/netfilter/", "kernel/net/ipv4/", "kernel/net/ipv6/", "kernel/net/bridge/", "kernel/net/sctp/"}
	moduleNames = []string{"veth", "dummy", "virtio_pci", "virtio_console", "crc32c_generic", "crc32c-intel"}
)

// chosenModules makes a folder lib/modules/RELEASE with the modules of the guest, and depmod's lists of just those. The caller removes it.
func (k kernel) chosenModules() (dir string, err error) {
	dir, err = os.MkdirTemp("", "fairlead-vm-modules-")
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	needs, err := k.dependencies()
	if err != nil {
		return "", err
	}
	chosen := map[string]bool{}
	for file := range needs {
		if wanted(file) {
			choose(file, needs, chosen)
		}
	}
	if len(chosen) == 0 {
		return "", fmt.Errorf("%s has none", k.dir)
	}
	to := filepath.Join(dir, "lib", "modules", k.release())
	for file := range chosen {
		if err := copyModule(filepath.Join(k.modules, file), filepath.Join(to, file)); err != nil {
			return "", err
		}
	}
	for _, list := range []string{"modules.order", "modules.builtin", "modules.builtin.modinfo"} {
		if err := copyFile(filepath.Join(k.modules, list), filepath.Join(to, list)); err != nil {
			return "", err
		}
	}
	_, err = run("", "depmod", "-b", dir, k.release())
	return dir, err
}

func wanted(file string) bool {
	name, _, _ := strings.Cut(filepath.Base(file), ".")
	return slices.Contains(moduleNames, name) || slices.ContainsFunc(moduleDirs, func(dir string) bool { return strings.HasPrefix(file, dir) })
}

func choose(file string, needs map[string][]string, chosen map[string]bool) {
	if chosen[file] {
		return
	}
	chosen[file] = true
	for _, n := range needs[file] {
		choose(n, needs, chosen)
	}
}

// dependencies reads modules.dep, "a.ko: b.ko c.ko", which the package's own script would have made.
func (k kernel) dependencies() (map[string][]string, error) {
	path := filepath.Join(k.modules, "modules.dep")
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		if _, err := run("", "depmod", "-b", k.dir, k.release()); err != nil {
			return nil, err
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	needs := map[string][]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		file, list, _ := strings.Cut(lines.Text(), ":")
		needs[file] = strings.Fields(list)
	}
	return needs, lines.Err()
}

// copyModule unpacks modules that are packed (.ko.xz, of 6.12): here that is done once, in the guest at each start.
func copyModule(from, to string) error {
	plain, packed := strings.CutSuffix(to, ".xz")
	if !packed {
		return copyFile(from, to)
	}
	content, err := run("", "xz", "-dc", from)
	if err != nil {
		return err
	}
	return writeFile(plain, []byte(content))
}

func copyFile(from, to string) error {
	content, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return writeFile(to, content)
}

func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}
