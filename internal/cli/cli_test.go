package cli

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"rsc.io/script"
	"rsc.io/script/scripttest"

	"fairlead/internal/config"
	"fairlead/internal/control"
)

// asProgram makes the test binary the program itself.
const asProgram = "FAIRLEAD_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args, os.Stdout, os.Stderr))
	}
	if s := os.Getenv(asAPI); s != "" {
		fmt.Fprintln(os.Stderr, serveScale(s))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// patience bounds a failing test, and measures nothing.
const patience = 20 * time.Second

// names makes the program runnable under both of its names.
func names(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"fairlead", "kube-proxy"} {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func terminate(c *exec.Cmd) error { return c.Process.Signal(syscall.SIGTERM) }

// TestScripts runs the command line as people type it: one file a subject.
func TestScripts(t *testing.T) {
	dir := names(t)
	e := &script.Engine{Cmds: scripttest.DefaultCmds(), Conds: scripttest.DefaultConds()}
	for _, name := range []string{"fairlead", "kube-proxy"} {
		e.Cmds[name] = script.Program(filepath.Join(dir, name), terminate, patience)
	}
	e.Cmds["ready"] = ready()
	scripttest.Test(t, t.Context(), e, append(os.Environ(), asProgram+"=1"), "testdata/*.txt")
}

// ready waits until an agent has written what its sources told.
func ready() script.Cmd {
	return script.Command(script.CmdUsage{Summary: "wait for an agent", Args: "socket"},
		func(s *script.State, args ...string) (script.WaitFunc, error) {
			if len(args) != 1 {
				return nil, script.ErrUsage
			}
			return nil, await(s.Context(), s.Path(args[0]))
		})
}

func await(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		s, err := control.NewClient(socket).Status(ctx)
		if err == nil && !s.Engine.LastSuccess.IsZero() {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no agent got ready at %s: %+v, %v", socket, s, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// harmless are flags that keep an agent off everything that belongs to the machine.
var harmless = []string{"--proxy-mode=memory", "--hostname-override=n1", "--healthz-bind-address=", "--metrics-bind-address=",
	"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--oom-score-adj=0"}

// TestSignals: SIGTERM and SIGINT end the agent, with exit code 0 and well before a kubelet loses patience.
func TestSignals(t *testing.T) {
	dir, manifests := names(t), t.TempDir()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			var log bytes.Buffer
			args := append([]string{"run", "--manifests=" + manifests, "--control-socket=" + socket}, harmless...)
			cmd := exec.Command(filepath.Join(dir, "fairlead"), args...)
			cmd.Env = append(os.Environ(), asProgram+"=1")
			cmd.Stdout, cmd.Stderr = &log, &log
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			defer cmd.Process.Kill()
			if err := await(t.Context(), socket); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-ended:
				if err != nil {
					t.Errorf("ended with %v\n%s", err, log.String())
				}
			case <-time.After(patience):
				t.Error("does not end")
			}
			if strings.Contains(log.String(), "Not everything ended in time") {
				t.Errorf("a part hung:\n%s", log.String())
			}
			if _, err := os.Lstat(socket); !os.IsNotExist(err) {
				t.Errorf("the socket is still there: %v", err)
			}
		})
	}
}

// TestEveryCommandHasHelp: what it is for in one line, and flags that say what they do.
func TestEveryCommandHasHelp(t *testing.T) {
	for _, cmd := range newRoot().Commands() {
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: help %q", cmd.Name(), cmd.Short)
		}
	}
}

// TestEveryModeIsAnswered: a mode that may be configured is either built or says that it is not.
func TestEveryModeIsAnswered(t *testing.T) {
	for _, mode := range append(slices.Clone(config.Modes), config.Memory) {
		err := built(mode)
		if _, ok := dataplanes[mode]; ok != (err == nil) || err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", mode, err)
		}
	}
}

func TestConntrackMax(t *testing.T) {
	for _, tc := range []struct{ perCore, least, cpus, want int }{
		{32768, 131072, 2, 131072},
		{32768, 131072, 8, 262144},
		{32768, 131072, 64, 1 << 20},
		{0, 131072, 8, 0},
		{32768, 2 << 20, 64, 2 << 20}, // kube-proxy stops at a million here
	} {
		if got := conntrackMax(tc.perCore, tc.least, tc.cpus); got != tc.want {
			t.Errorf("%+v: got %d", tc, got)
		}
	}
}

func TestCountCPUs(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3": 4, "0-3,8,10-11": 7, "": 0, "x": 0, "3-1": 0, "0-x": 0} {
		if got := countCPUs(list); got != want {
			t.Errorf("%q: got %d, want %d", list, got, want)
		}
	}
}
