package vm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
)

// DefaultKernel is the package that names Debian's newest kernel for clouds: small, and without what only real machines need.
const DefaultKernel = "linux-image-cloud-amd64"

// kernel is an unpacked kernel package.
type kernel struct {
	dir     string // <cache>/fairlead/vm/<package>_<version>
	image   string // vmlinuz
	modules string // <dir>/lib/modules/<release>
}

// release is what uname -r says in the guest.
func (k kernel) release() string { return filepath.Base(k.modules) }

// found keeps the kernels of this process by the names they were asked for: apt takes a second or two for an answer.
var found struct {
	sync.Mutex
	kernels map[string]kernel
}

// findKernel gives the kernel of a package.
func findKernel(pkg string) (k kernel, err error) {
	found.Lock()
	defer found.Unlock()
	if k, ok := found.kernels[pkg]; ok {
		return k, nil
	}
	if k, err = fetchKernel(pkg); err != nil {
		return kernel{}, err
	}
	if found.kernels == nil {
		found.kernels = map[string]kernel{}
	}
	found.kernels[pkg] = k
	return k, nil
}

// fetchKernel has apt fetch the package the first time. It is not installed: that would make an initrd and change /boot.
func fetchKernel(pkg string) (kernel, error) {
	name, version, err := resolve(pkg)
	if err != nil {
		return kernel{}, err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return kernel{}, err
	}
	dir := filepath.Join(cache, "fairlead", "vm", name+"_"+version)
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		err = unpackKernel(name+"="+version, dir)
		if err != nil {
			return kernel{}, fmt.Errorf("fetch %s: %w", name, err)
		}
	}
	images, _ := filepath.Glob(filepath.Join(dir, "boot", "vmlinuz-*"))
	modules, _ := filepath.Glob(filepath.Join(dir, "lib", "modules", "*"))
	if len(images) != 1 || len(modules) != 1 {
		return kernel{}, fmt.Errorf("%s holds %d kernels and modules for %d, want one each: is %s a kernel?", dir, len(images), len(modules), pkg)
	}
	return kernel{dir: dir, image: images[0], modules: modules[0]}, nil
}

// dependsOnImage finds the package that a metapackage is there to name: "Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)".
var (
	dependsOnImage = regexp.MustCompile(`(?m)^Depends:.*\b(linux-image-\d\S*)`)
	versionField   = regexp.MustCompile(`(?m)^Version: (\S+)$`)
)

// resolve asks apt's lists for the real package behind a name, and its version.
func resolve(pkg string) (name, version string, err error) {
	text, err := run("", "apt-cache", "show", "--no-all-versions", pkg)
	if err != nil {
		return "", "", fmt.Errorf("apt knows no package %s (apt-get update?): %w", pkg, err)
	}
	if m := dependsOnImage.FindStringSubmatch(text); m != nil && m[1] != pkg {
		return resolve(m[1])
	}
	m := versionField.FindStringSubmatch(text)
	if m == nil {
		return "", "", fmt.Errorf("apt tells no version of %s", pkg)
	}
	return pkg, m[1], nil
}

// unpackKernel makes dir, whole or not at all.
func unpackKernel(pkg, dir string) (err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	part, err := os.MkdirTemp(filepath.Dir(dir), ".part-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(part)) }()
	if _, err := run(part, "apt-get", "download", "-q", pkg); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(part, "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download left %d packages: %w", len(debs), err)
	}
	root := filepath.Join(part, "root")
	if _, err := run("", "dpkg-deb", "-x", debs[0], root); err != nil {
		return err
	}
	if err := os.Rename(root, dir); err != nil {
		if _, there := os.Stat(dir); there == nil {
			return nil // somebody else was faster
		}
		return err
	}
	return nil
}

// run runs a program and returns what it wrote; its complaint is in the error.
func run(dir, name string, args ...string) (string, error) {
	var out, complaint bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &complaint
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(append([]string{name}, args...), " "), err, tail(complaint.String()))
	}
	return out.String(), nil
}
