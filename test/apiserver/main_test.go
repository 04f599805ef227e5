package apiserver

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

var (
	// program is the proxy under test. kube-proxy itself may stand in, which tests the tests.
	program = env("FAIRLEAD", "../../bin/fairlead")
	mode    = env("FAIRLEAD_MODE", "iptables")
	// storyMode is the dataplane of the stories, which are about the API and not about rules.
	storyMode = env("FAIRLEAD_MODE", "nftables")
	standIn   = filepath.Base(program) == "kube-proxy"
)

// insideKey is set in the process that runs the tests, and tells it the folder with the binaries.
const insideKey = "FAIRLEAD_TEST_INSIDE"

// binaries are what the tests need of cmd/build.
var binaries = []string{"testctl"}

func binary(name string) string { return filepath.Join(os.Getenv(insideKey), name) }

func env(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// The main thread stays with the main goroutine: other threads enter namespaces and must not be it. The program is named by
// its whole path from here on: stories run elsewhere.
func init() {
	runtime.LockOSThread()
	if path, err := filepath.Abs(program); err == nil && strings.Contains(program, "/") {
		program = path
		os.Setenv("FAIRLEAD", path)
	}
}

// TestMain runs the tests in a second process, the first of its own PID, mount and network namespace. However it
// ends, the kernel ends all it started and takes back every interface, rule and file.
func TestMain(m *testing.M) {
	flag.Parse()
	run := outside
	switch file := os.Getenv(storyKey); {
	case file != "":
		run = func() (int, error) { return tell(file) }
	case os.Getenv(insideKey) != "":
		run = func() (int, error) { return inside(m) }
	}
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func outside() (int, error) {
	build := exec.Command("go", append([]string{"run", "./cmd/build"}, binaries...)...)
	build.Stderr = os.Stderr
	paths, err := build.Output()
	if err != nil {
		return 0, fmt.Errorf("build %s: %w", strings.Join(binaries, " and "), err)
	}
	first, _, _ := strings.Cut(string(paths), "\n")
	err = again(os.Stdout, insideKey+"="+filepath.Dir(first))
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		return 1, nil // the tests have said why
	}
	return 0, err
}

// again runs this program again, as the first process of new namespaces, with one more variable.
func again(out io.Writer, variable string) error {
	runtime.LockOSThread() // Pdeathsig is about the thread
	defer runtime.UnlockOSThread()
	self := exec.Command("/proc/self/exe", os.Args[1:]...)
	self.Env = append(os.Environ(), variable)
	self.Stdin, self.Stdout, self.Stderr = os.Stdin, out, out
	if out == os.Stdout {
		self.Stderr = os.Stderr
	}
	self.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET,
		Pdeathsig:  unix.SIGKILL,
	}
	if os.Getuid() != 0 { // then be root in a user namespace
		self.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		self.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		self.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	return self.Run()
}

func inside(m *testing.M) (int, error) {
	if err := privateMounts(); err != nil {
		return 0, err
	}
	if strings.Trim(flag.Lookup("test.run").Value.String(), "^$") == "TestStories" {
		return m.Run(), nil // stories have worlds of their own
	}
	if err := buildWorld(); err != nil {
		return 0, fmt.Errorf("build world: %w", err)
	}
	stop, err := startControlPlane()
	if err != nil {
		return 0, fmt.Errorf("start control plane: %w", err)
	}
	defer stop()
	return m.Run(), nil
}

// privateMounts gives this process a /proc of its PID namespace and a /run (locks, sockets) of its own.
func privateMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	return nil
}
