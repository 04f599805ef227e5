package control

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// defaultDir holds the sockets of agents that were given no path.
const defaultDir = "/run/fairlead"

// onlyFirst is a setting that the kernel shows in the machine's first network namespace alone: it is registered for
// init_net (net/core/sysctl_net_core.c, net_core_table).
const onlyFirst = "/proc/sys/net/core/netdev_max_backlog"

// Path is where the agent of this network namespace listens: as configured, or /run/fairlead/fairlead.sock. An agent rules a
// network namespace, and several may share one file system (a lab on one machine), so that outside of the machine's first
// network namespace the default has the namespace's number in it.
func Path(configured string) string {
	if configured != "" {
		return configured
	}
	own, err := os.Readlink("/proc/self/ns/net")
	_, none := os.Stat(onlyFirst)
	return socketOf(own, err != nil || !errors.Is(none, fs.ErrNotExist))
}

func socketOf(own string, first bool) string {
	if first {
		return filepath.Join(defaultDir, "fairlead.sock")
	}
	return filepath.Join(defaultDir, fmt.Sprintf("fairlead-%s.sock", strings.Trim(own, "net:[]")))
}

// ErrBusy says that another agent answers there.
var ErrBusy = errors.New("another agent answers there")

// listen opens the socket. It comes into being in a directory that nobody else may enter and is moved to its place when it
// has its mode, so that there is no moment in which others may open it; one that a dead agent left there is replaced.
func listen(path string) (net.Listener, error) {
	if err := free(path); err != nil {
		return nil, err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(dir, ".s")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	at, err := os.Open(tmp) // the path through the descriptor is short, whatever the directory is called
	if err != nil {
		return nil, err
	}
	defer at.Close()
	short := fmt.Sprintf("/proc/self/fd/%d/s", at.Fd())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false) // it will have moved
	made := filepath.Join(tmp, "s")
	err = os.Chmod(made, 0o600)
	if err == nil {
		err = os.Rename(made, path)
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// free tells whether the path may be taken: nothing is there, or a socket that nobody listens on.
func free(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s exists and is no socket", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return nil
	}
	c.Close()
	return ErrBusy
}

// remove takes the socket away, unless another agent has put its own there since.
func remove(path string, ours fs.FileInfo) {
	if now, err := os.Lstat(path); err == nil && os.SameFile(now, ours) {
		os.Remove(path)
	}
}
