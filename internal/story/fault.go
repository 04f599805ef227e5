package story

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"fairlead/internal/lab"

	"golang.org/x/sys/unix"
	"rsc.io/script"
)

// Faults at a rate are put between the agent and iptables-restore: a directory at the front of the agent's PATH holds this very
// program under the names of the tools, and this program, called so, fails now and then. An agent that writes by netlink has
// its switch turned on again and again (kernel.TryFault). A single fault is the switch, in all modes.
const (
	faultRate = "FAIRLEAD_STORY_FAULT_RATE"
	faultPath = "FAIRLEAD_STORY_REAL_PATH"
)

var faultTools = []string{"iptables-restore", "ip6tables-restore", "iptables-legacy-restore", "ip6tables-legacy-restore"}

// MaybeFault must come first in the TestMain of a program that runs stories: when it was called as one of the tools, it
// plays that tool and never returns. Of the failures, half happen before the real tool has run and half after it.
func MaybeFault() {
	rate, err := strconv.ParseFloat(os.Getenv(faultRate), 64)
	if err != nil {
		return
	}
	name := filepath.Base(os.Args[0])
	os.Setenv("PATH", os.Getenv(faultPath))
	tool, err := exec.LookPath(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	writes := true
	for _, a := range os.Args[1:] {
		writes = writes && a != "--version" && a != "-V"
	}
	if !writes || rand.Float64() >= rate {
		err := unix.Exec(tool, os.Args, os.Environ())
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if rand.IntN(2) == 0 {
		fmt.Fprintln(os.Stderr, "fault: another app is currently holding the xtables lock")
		os.Exit(4) // RESOURCE_PROBLEM, as xtables says it
	}
	cmd := exec.Command(tool, os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Run() // whatever it was, we tell a failure
	fmt.Fprintln(os.Stderr, "fault: failed after the write")
	os.Exit(1)
}

func (st *stage) fault(_ context.Context, args []string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	if args[0] == "once" {
		return "", st.faultOnce(args[1:])
	}
	if _, err := strconv.ParseFloat(args[0], 64); err != nil || len(args) > 1 {
		return "", script.ErrUsage
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(st.dir, "fault-bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for _, tool := range faultTools {
		if err := os.Symlink(self, filepath.Join(dir, tool)); err != nil && !os.IsExist(err) {
			return "", err
		}
	}
	st.rate = args[0]
	return "", nil
}

// faultOnce makes the next write fail, before or after it takes effect.
func (st *stage) faultOnce(args []string) error {
	node, args := st.node(args)
	a, err := st.agent(node)
	if err != nil {
		return err
	}
	switch when := strings.Join(args, " "); when {
	case "", "before", "after":
		return os.WriteFile(a.FaultFile(), []byte(when), 0o600)
	}
	return script.ErrUsage
}

// failOften lets writes by netlink fail at about the rate, as long as the agent's node is there.
func (st *stage) failOften(a *lab.Agent) {
	rate, err := strconv.ParseFloat(st.rate, 64)
	if err != nil || st.options.Legacy || st.failing[a.Node.Name] {
		return
	}
	st.failing[a.Node.Name] = true
	a.FailOften(rate)
}

// faultEnv is what the agent's environment needs for the faults, if any.
func (st *stage) faultEnv() []string {
	if st.rate == "" {
		return nil
	}
	path := os.Getenv("PATH")
	if st.config.Bin != "" {
		path = st.config.Bin + ":" + path
	}
	return []string{faultRate + "=" + st.rate, faultPath + "=" + path, "PATH=" + filepath.Join(st.dir, "fault-bin") + ":" + path}
}
