//go:build vm

// The tests of this package boot guests, and take minutes: make test-vm. Without the tag nobody boots one by accident.

package vm

import (
	"os"
	"strings"
	"testing"
	"time"
)

// guestKernel is another kernel's package than [DefaultKernel]: make test-vm KERNEL=linux-image-6.12-cloud-amd64.
var guestKernel = os.Getenv("FAIRLEAD_VM_KERNEL")

// sh is a guest that runs a few lines of shell.
func sh(script string) Config {
	return Config{Kernel: guestKernel, Args: []string{"/bin/sh", "-c", script}, Timeout: 2 * time.Minute}
}

func TestExitStatus(t *testing.T) {
	c := sh(`echo "$GREETING"; pwd; cat file; echo "$#:$1"; ls /sys/module | grep -c '^ip_vs'; exit 7`)
	c.Args = append(c.Args, "name", "two words | $HOME")
	c.Env = []string{"GREETING=good morning"}
	c.Dir, c.Files = "/there", map[string]string{"/there/file": writeTemp(t, "what it holds\n")}
	r, err := Boot(c)
	if err != nil {
		t.Fatal(err)
	}
	if r.Exit != 7 {
		t.Errorf("status %d, want 7", r.Exit)
	}
	want := "good morning\n/there\nwhat it holds\n1:two words | $HOME\n"
	rest, ok := strings.CutPrefix(r.Output, want)
	if !ok {
		t.Errorf("it wrote %q, want %q", r.Output, want)
	}
	if n := strings.TrimSpace(rest); len(n) < 2 { // IPVS itself and its schedulers
		t.Errorf("%s modules of IPVS", n)
	}
	t.Logf("the guest took %s", r.Took.Round(time.Millisecond))
}

func writeTemp(t *testing.T, content string) string {
	t.Helper()
	path := t.TempDir() + "/file"
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTrouble: whatever ends a guest but the end of its command is an error that shows how far it came.
func TestTrouble(t *testing.T) {
	for _, c := range []struct {
		name, script string
		timeout      time.Duration
		want         []string
	}{
		{"panic", "echo before; sleep 1; echo c >/proc/sysrq-trigger; echo after", time.Minute, []string{"the guest's kernel complained", "before", "Kernel panic"}},
		{"hang", "while :; do :; done", 20 * time.Second, []string{"hung, or was too slow"}},
		{"off", "echo before; sleep 1; reboot -f", time.Minute, []string{"its command did not", "before"}},
		{"warning", "echo '<4>WARNING: CPU: 0 PID: 1 at somewhere' >/dev/kmsg", time.Minute, []string{"the guest's kernel complained", "WARNING: CPU: 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := sh(c.script)
			config.Timeout = c.timeout
			r, err := Boot(config)
			if err == nil {
				t.Fatalf("no error; %+v", r)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("no %q in: %v", want, err)
				}
			}
			if strings.Contains(r.Output, "after") {
				t.Errorf("it wrote %q", r.Output)
			}
		})
	}
}

func TestUnknownKernel(t *testing.T) {
	c := sh("true")
	c.Kernel = "linux-image-of-nobody"
	if _, err := Boot(c); err == nil || !strings.Contains(err.Error(), c.Kernel) {
		t.Errorf("error %v, want one that names %s", err, c.Kernel)
	}
}

func TestLineEnd(t *testing.T) {
	if _, err := Boot(sh("true\nfalse")); err == nil || !strings.Contains(err.Error(), "line end") {
		t.Errorf("error %v, want one about the line end", err)
	}
}
