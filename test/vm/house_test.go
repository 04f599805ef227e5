//go:build vm

package vm

import (
	"cmp"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

const (
	repo  = "../.." // the repository, from here
	inVM  = "/repo" // and in the guest
	agent = inVM + "/bin/fairlead"
)

// TestKernelTests runs the tests that ask a kernel, on this one.
func TestKernelTests(t *testing.T) {
	for _, c := range []struct{ pkg, run string }{
		{"internal/kernel", "."},
		{"internal/conntrack", "."},
		{"internal/lab", "."},
		{"internal/dataplane/iptables", "^Test(Able|Clean|Detect|Gate|Golden|KernelKeeps|Legacy|NFT|Remove|Rule|Watch|Write)"},
		{"internal/dataplane/nftables", "^Test(Able|Elements?|Fake|Golden|Mend|OneChange|OtherSpellings|Stubborn)"},
	} {
		t.Run(path.Base(c.pkg), func(t *testing.T) {
			// Random histories tell of the fake, and take a guest too long.
			goTest(t, c.pkg, Config{Args: []string{"-test.run", c.run, "-test.skip", "/histories$"}, Timeout: 6 * time.Minute})
		})
	}
}

// told are the stories in which the kernel has most to say: FAIRLEAD_VM_STORIES names others, with patterns. Those left out change what is
// resolved and not how it is done, or send a great many packets.
const told = `affinity*.txtar clusterip.txtar drift-disguised.txtar drift-gap.txtar external-local.txtar families.txtar flushed.txtar foreign-table.txtar forward-policy.txtar
	leave-no-trace.txtar loadbalancer.txtar localhost-relay.txtar loopback-boundary.txtar migrate.txtar multi-port.txtar no-endpoints.txtar
	no-iptables.txtar nodeport.txtar port-reuse.txtar restart-in-drain.txtar switch.txtar take-over*.txtar terminating.txtar udp-drain.txtar
	unassigned.txtar unknown-port.txtar`

// TestStories tells stories in the guest, in the modes of FAIRLEAD_MODES.
func TestStories(t *testing.T) {
	for _, mode := range strings.Split(cmp.Or(os.Getenv("FAIRLEAD_MODES"), "iptables,nftables"), ",") {
		t.Run(mode, func(t *testing.T) {
			files := map[string]string{agent: build(t, "build", "./cmd/fairlead")}
			for _, pattern := range strings.Fields(cmp.Or(os.Getenv("FAIRLEAD_VM_STORIES"), told)) {
				stories, err := filepath.Glob(filepath.Join(repo, "test/stories", pattern))
				if err != nil || len(stories) == 0 {
					t.Fatalf("no story %s: %v", pattern, err)
				}
				for _, s := range stories {
					files[path.Join(inVM, "test/stories", filepath.Base(s))] = s
				}
			}
			want := len(files) // a result for each story, and one for all of them
			// One after the other: a guest has one processor.
			n := goTest(t, "test/stories", Config{Files: files, Args: []string{"-test.parallel", "1"}, Timeout: 30 * time.Minute,
				Env: []string{"FAIRLEAD=" + agent, "FAIRLEAD_MODES=" + mode}})
			if n != want {
				t.Errorf("%d results of %d stories", n-1, want-1)
			}
		})
	}
}

// build makes a program of this repository.
func build(t *testing.T, verb string, args ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	cmd := exec.Command("go", append([]string{verb, "-o", program}, args...)...)
	cmd.Dir, cmd.Env = repo, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	return program
}

// outcome is how a test of the guest ended: "    --- PASS: TestStories/nftables/affinity (12.31s)".
var outcome = regexp.MustCompile(`(?m)^ *--- (PASS|FAIL|SKIP): (\S+) \((\S+)s\)$`)

// goTest runs tests of a package in a guest of their own, as root. Those that ended, passed or failed, are reported by their names, and
// counted. None may be skipped: the guest is there to run them.
func goTest(t *testing.T, pkg string, c Config) int {
	t.Helper()
	dir := path.Join(inVM, pkg)
	if c.Files == nil {
		c.Files = map[string]string{}
	}
	program := path.Join(dir, path.Base(pkg)+".test")
	c.Files[program] = build(t, "test", "-c", "./"+pkg)
	data := filepath.Join(repo, pkg, "testdata")
	if _, err := os.Stat(data); err == nil {
		c.Files[path.Join(dir, "testdata")] = data
	}
	c.Kernel, c.Dir = guestKernel, dir
	c.Args = append([]string{program, "-test.v", "-test.timeout", (c.Timeout - 30*time.Second).String()}, c.Args...)
	if testing.Verbose() {
		c.Log = t.Output()
	}
	r, err := Boot(c)
	if err != nil {
		t.Fatal(err)
	}
	all := outcome.FindAllStringSubmatch(r.Output, -1)
	for _, o := range all {
		t.Logf("%s %s %ss", o[1], o[2], o[3])
		if o[1] != "PASS" {
			t.Errorf("%s: %s", o[1], o[2])
		}
	}
	if r.Exit != 0 || len(all) == 0 {
		t.Errorf("%s: status %d after %d tests", pkg, r.Exit, len(all))
	}
	if t.Failed() && !testing.Verbose() {
		t.Logf("what the guest wrote:\n%s", r.Output)
	}
	t.Logf("%s: %d tests in a guest that ran for %s", pkg, len(all), r.Took.Round(100*time.Millisecond))
	return len(all)
}
