package vm

import (
	"crypto/sha256"
	_ "embed" // init.sh
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// initScript is process 1 of the guest.
//
//go:embed init.sh
var initScript string

// programs are taken from this machine, with their libraries. What the guest needs beside them is busybox's.
var programs = []string{
	"ip", "nft", "conntrack", "ipset", "ipvsadm", "ps", "modprobe", "lsmod", "depmod",
	"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore",
	"iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore",
	"iptables-legacy", "iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy", "ip6tables-legacy-save", "ip6tables-legacy-restore",
}

// extras are files of this machine that programs read, where there are any: iptables' modules, and names of protocols and ports.
var extras = []string{"/usr/lib/*/xtables/*.so", "/etc/protocols", "/etc/services"}

// base gives the part of the initramfs that changes seldom: programs, libraries and the kernel's modules. It is kept beside the
// kernel, under a name made of all that went into it.
func (k kernel) base() (string, error) {
	files, err := machineFiles()
	if err != nil {
		return "", err
	}
	path := filepath.Join(k.dir, "base-"+files.fingerprint()+".cpio")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	part, err := os.CreateTemp(k.dir, ".part-*.cpio")
	if err != nil {
		return "", err
	}
	defer os.Remove(part.Name())
	if err := errors.Join(k.writeBase(newArchive(part), files), part.Close()); err != nil {
		return "", err
	}
	old, _ := filepath.Glob(filepath.Join(k.dir, "base-*.cpio"))
	for _, o := range old {
		os.Remove(o) // of other tools, or another init
	}
	return path, os.Rename(part.Name(), path)
}

func (k kernel) writeBase(a *archive, files *closure) error {
	// Debian has merged /bin and its like with /usr: so paths of this machine hold there.
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		a.folder("/usr/" + dir)
		a.link("/"+dir, "usr/"+dir)
	}
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run", "/tmp"} {
		a.folder(dir)
	}
	a.script("/init", initScript, 0o755)
	for _, f := range files.order {
		if target := files.links[f]; target != "" {
			a.link(f, target)
		} else {
			a.file(f, f)
		}
	}
	if err := busyboxLinks(a); err != nil {
		return err
	}
	modules, err := k.chosenModules()
	if err != nil {
		return fmt.Errorf("modules: %w", err)
	}
	defer os.RemoveAll(modules)
	a.tree("/usr/lib/modules", filepath.Join(modules, "lib", "modules"))
	return a.close()
}

// machineFiles finds the programs and all they need.
func machineFiles() (*closure, error) {
	c := newClosure()
	var errs []error
	for _, name := range append([]string{"busybox"}, programs...) {
		path, err := exec.LookPath(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, c.add(path))
	}
	for _, pattern := range extras {
		paths, err := filepath.Glob(pattern)
		errs = append(errs, err)
		for _, path := range paths {
			errs = append(errs, c.add(path))
		}
	}
	return c, errors.Join(errs...)
}

// baseVersion is counted up when this package makes something else of the same files.
const baseVersion = 1

// fingerprint changes with any file of this machine, and with what this package makes of them.
func (c *closure) fingerprint() string {
	sum := sha256.New()
	fmt.Fprintln(sum, baseVersion, initScript, moduleDirs, moduleNames, programs)
	for _, f := range c.order {
		info, err := os.Lstat(f)
		if err != nil {
			continue // writing the archive will say so
		}
		fmt.Fprintln(sum, f, c.links[f], info.Size(), info.ModTime().UnixNano())
	}
	return fmt.Sprintf("%x", sum.Sum(nil)[:8])
}

// busyboxLinks gives busybox's programs their names, unless the real ones are there: those came first.
func busyboxLinks(a *archive) error {
	list, err := run("", "busybox", "--list")
	if err != nil {
		return err
	}
	path, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(list) {
		if !a.seen["/usr/sbin/"+name] && !a.seen["/usr/bin/"+name] {
			a.link("/usr/bin/"+name, path)
		}
	}
	return nil
}
