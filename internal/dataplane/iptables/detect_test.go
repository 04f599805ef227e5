package iptables

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

func emptyNS(t *testing.T, f func()) {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := ns.Do(func() error { f(); return nil }); err != nil {
		t.Fatal(err)
	}
}

// The back end is the one that other programs of Kubernetes use on the node, else that of the installed iptables, else what
// the kernel has; a name in the configuration decides alone.
func TestDetect(t *testing.T) {
	chain := func(flavour, name string) func(*testing.T) {
		return func(t *testing.T) { run(t, "", tool(flavour, true, ""), "-t", "mangle", "-N", name) }
	}
	installed := func(says string) func(*testing.T) {
		return func(t *testing.T) {
			dir := t.TempDir()
			script := "#!/bin/sh\necho 'iptables v1.8.9 " + says + "'\n"
			if err := os.WriteFile(filepath.Join(dir, "iptables"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
		}
	}
	none := func(t *testing.T) { t.Setenv("PATH", t.TempDir()) }
	for _, c := range []struct {
		name string
		do   []func(*testing.T)
		want string
	}{
		{"nothing there, installed nf_tables", []func(*testing.T){installed("(nf_tables)")}, flavourNFT},
		{"nothing there, installed legacy", []func(*testing.T){installed("(legacy)")}, flavourLegacy},
		{"installed before 1.8", []func(*testing.T){installed("")}, flavourLegacy},
		{"no iptables", []func(*testing.T){none}, flavourNFT},
		{"the kubelet in nf_tables", []func(*testing.T){chain("nft", "KUBE-KUBELET-CANARY"), installed("(legacy)")}, flavourNFT},
		{"the kubelet in legacy", []func(*testing.T){chain("legacy", "KUBE-KUBELET-CANARY"), installed("(nf_tables)")}, flavourLegacy},
		{"in both", []func(*testing.T){chain("legacy", "KUBE-X"), chain("nft", "KUBE-X"), installed("(legacy)")}, flavourLegacy},
		{"only others", []func(*testing.T){chain("legacy", "DOCKER"), installed("(nf_tables)")}, flavourNFT},
	} {
		t.Run(c.name, func(t *testing.T) {
			emptyNS(t, func() {
				for _, do := range c.do {
					do(t)
				}
				be, err := newBackend(t.Context(), Config{V4: true, V6: true})
				if err != nil {
					t.Fatal(err)
				}
				defer be.Close()
				if be.Name() != c.want {
					t.Errorf("back end %s, want %s", be.Name(), c.want)
				}
				for name, want := range map[string]string{"nft": flavourNFT, "nf_tables": flavourNFT, "legacy": flavourLegacy} {
					be, err := newBackend(t.Context(), Config{V4: true, V6: true, Backend: name})
					if err != nil || be.Name() != want {
						t.Errorf("asked for %s: %v, %v", name, be, err)
						continue
					}
					be.Close()
				}
			})
		})
	}
	if _, err := newBackend(t.Context(), Config{V4: true, Backend: "ebtables"}); err == nil || !strings.Contains(err.Error(), "ebtables") {
		t.Errorf("unknown name: %v", err)
	}
}

// Detecting loads no table.
func TestDetectLeavesNothing(t *testing.T) {
	emptyNS(t, func() {
		if _, err := detect(t.Context()); err != nil {
			t.Fatal(err)
		}
		x, err := kernel.LoadXTables(false)
		if err != nil {
			t.Fatal(err)
		}
		defer x.Close()
		if names, err := x.Tables(); err != nil || len(names) != 0 {
			t.Errorf("legacy tables %q, %v", names, err)
		}
		if out := run(t, "", "nft", "list", "ruleset"); out != "" {
			t.Errorf("nf_tables:\n%s", out)
		}
	})
}

func TestAble(t *testing.T) {
	emptyNS(t, func() {
		for _, name := range []string{flavourNFT, flavourLegacy} {
			if v4, v6 := Able(t.Context(), name); v4 != nil || v6 != nil {
				t.Errorf("%s: %v, %v", name, v4, v6)
			}
		}
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0o644); err != nil {
			t.Fatal(err)
		}
		v4, v6 := Able(t.Context(), flavourNFT)
		if v4 != nil || v6 == nil || !strings.Contains(v6.Error(), "disable_ipv6") {
			t.Errorf("IPv6 switched off: %v, %v", v4, v6)
		}
		if _, err := newBackend(t.Context(), Config{V4: true, V6: true}); err == nil || !strings.Contains(err.Error(), "disable_ipv6") {
			t.Errorf("asked for IPv6: %v", err)
		}
	})
}

// lame is a back end on a kernel that lacks something.
type lame struct {
	proven
	lacks []string
}

func (l lame) supports(_ bool, e kernel.Extension) (bool, error) {
	return !slices.Contains(l.lacks, e.Name), nil
}

func TestAbleSaysWhatIsMissing(t *testing.T) {
	emptyNS(t, func() {
		if _, err := able(lame{lacks: []string{"statistic"}}, false); err == nil || !strings.Contains(err.Error(), "match statistic (to share the load") {
			t.Errorf("without statistic: %v", err)
		}
		lacks, err := able(lame{lacks: []string{"recent"}}, false)
		if err != nil || len(lacks) != 1 || !strings.Contains(lacks[0], "match recent (for Services with ClientIP affinity)") {
			t.Errorf("without recent: %q, %v", lacks, err)
		}
	})
}

// The counters are made once, counted by rules, and read.
func TestAccounts(t *testing.T) {
	inNS(t, func(*kernel.NS) {
		a, err := openAccounts() // a second time
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		n := openTestNFT(t)
		mustWrite(t, n, change{Chain: ChainID{false, Filter, "OUTPUT"}, Rules: []Rule{{NFAcct: acctInvalid, Target: Target{Action: Accept}}}})
		if n, ok := a.packets(acctInvalid); n != 0 || !ok {
			t.Errorf("before: %d, %v", n, ok)
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		for range 3 {
			_ = unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}) // refused at the second
		}
		if n, ok := a.packets(acctInvalid); n == 0 || !ok {
			t.Errorf("after: %d, %v", n, ok)
		}
		if n, ok := a.packets("never_made"); n != 0 || ok {
			t.Errorf("missing: %d, %v", n, ok)
		}
	})
}

// A lock that another program holds is an error of its own, and nothing is changed.
func TestLegacyLocked(t *testing.T) {
	inNS(t, func(*kernel.NS) {
		path := filepath.Join(t.TempDir(), "xtables.lock")
		t.Setenv("XTABLES_LOCKFILE", path)
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		l := openTestLegacy(t)
		err = l.Write(t.Context(), []change{{Chain: natID(false, "KUBE-X")}})
		if !errors.Is(err, errLocked) {
			t.Errorf("while locked: %v", err)
		}
		f.Close()
		mustWrite(t, l, change{Chain: natID(false, "KUBE-X")})
	})
}
