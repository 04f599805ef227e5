package demo

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func needsRoot(t *testing.T) {
	t.Helper()
	switch {
	case os.Getuid() == 0:
	case os.Getenv("FAIRLEAD_NO_ROOT") == "1":
		t.Skip("FAIRLEAD_NO_ROOT=1: no namespaces")
	default:
		t.Fatal("the demo needs root; set FAIRLEAD_NO_ROOT=1 to do without it")
	}
}

// The demo ends well with the real program, and shows each of its parts.
func TestDemo(t *testing.T) {
	needsRoot(t)
	binary := os.Getenv("FAIRLEAD")
	if binary == "" {
		binary = "../../bin/fairlead"
	}
	binary, err := filepath.Abs(binary)
	if err == nil {
		_, err = os.Stat(binary)
	}
	if err != nil {
		t.Fatalf("no fairlead to show (make build, or FAIRLEAD=path): %v", err)
	}
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			var out bytes.Buffer
			if err := Run(ctx, Options{Binary: binary, Mode: mode, Out: &out}); err != nil {
				t.Errorf("%v\n%s", err, out.String())
			}
			for _, part := range []string{"\n1  ", "\n2  ", "\n3  ", "\n4  ", "\n5  ", "\n6  ", "All of it was checked"} {
				if !strings.Contains(out.String(), part) {
					t.Errorf("the demo does not show %q", part)
				}
			}
			t.Log("\n" + out.String())
		})
	}
}

// A program that is no fairlead is told in one error, and nothing is left.
func TestDemoOfNothing(t *testing.T) {
	needsRoot(t)
	t.Setenv("TMPDIR", t.TempDir()) // other tests may have worlds at the same time
	err := Run(context.Background(), Options{Binary: "/bin/false", Out: new(bytes.Buffer)})
	if err == nil || !strings.Contains(err.Error(), "ended: exit status 1") {
		t.Errorf("have %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "fairlead-demo-*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestRulesOf(t *testing.T) {
	const save = `*nat
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 80 -m comment --comment "default/web:http cluster IP" -j KUBE-SVC-CDGGSHYLG3RE2FKL
-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp -m tcp --dport 80 -m comment --comment other -j KUBE-SVC-AAAAAAAAAAAAAAAA
-A KUBE-SVC-CDGGSHYLG3RE2FKL -m comment --comment "default/web:http -> a" -m statistic --mode random --probability 0.5 -j KUBE-SEP-BBBBBBBBBBBBBBBB
-A KUBE-SVC-CDGGSHYLG3RE2FKL -j KUBE-SEP-CCCCCCCCCCCCCCCC
-A KUBE-SEP-BBBBBBBBBBBBBBBB -p tcp -j DNAT --to-destination 10.244.1.10:8080
-A KUBE-SEP-CCCCCCCCCCCCCCCC -p tcp -j DNAT --to-destination 10.244.1.12:8080
-A KUBE-SVC-AAAAAAAAAAAAAAAA -j KUBE-SEP-DDDDDDDDDDDDDDDD
COMMIT
`
	got := rulesOf(save, webVIP)
	if strings.Contains(got, "comment") || strings.Contains(got, "AAAA") || strings.Count(got, "\n") != 4 {
		t.Errorf("have\n%s", got)
	}
}
