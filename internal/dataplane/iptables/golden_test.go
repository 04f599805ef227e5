package iptables

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the goldens anew")

// golden is the suite's small cluster, with localhost served by rules.
func golden(v6 bool) model.Delta {
	d := dptest.Golden(v6)
	d.Node.LocalhostPort = true
	return d
}

// What iptables-save prints of the golden cluster is what testdata says, whichever back end wrote it.
func TestGolden(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, flavour := range []string{flavourNFT, flavourLegacy} {
			t.Run(fmt.Sprintf("%s v6=%v", flavour, v6), func(t *testing.T) {
				got := goldenSaved(t, golden(v6), flavour, v6)
				file := filepath.Join("testdata", map[bool]string{false: "golden4.rules", true: "golden6.rules"}[v6])
				if *update {
					if err := os.WriteFile(file, got, 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(string(want), string(got)); d != "" {
					t.Errorf("-want +got:\n%s", d)
				}
			})
		}
	}
}

var noise = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

// goldenSaved applies the delta in a namespace of its own and returns what iptables-save says, without times and counters, the
// chains in alphabetical order (the two back ends list them in different orders).
func goldenSaved(t *testing.T, delta model.Delta, flavour string, v6 bool) []byte {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var out bytes.Buffer
	err = ns.Do(func() error {
		d, err := New(context.Background(), Config{V4: true, V6: true, MasqueradeBit: 14, Backend: flavour})
		if err != nil {
			return err
		}
		defer d.Close()
		d.cfg.counters = false // not every kernel has them
		if err := d.Apply(context.Background(), delta); err != nil {
			return err
		}
		for _, table := range []string{"filter", "nat"} {
			b, err := exec.Command(saveProgram(flavour, v6), "-t", table).Output()
			if err != nil {
				return fmt.Errorf("iptables-save: %w", err)
			}
			out.WriteString(byChain(string(noise.ReplaceAll(b, nil))))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func saveProgram(flavour string, v6 bool) string {
	name := "iptables"
	if v6 {
		name = "ip6tables"
	}
	if flavour == flavourNFT {
		return name + "-nft-save"
	}
	return name + "-legacy-save"
}

// byChain groups the lines of iptables-save by chain.
func byChain(s string) string {
	rules := map[string][]string{}
	var head, order []string
	for _, l := range strings.Split(s, "\n") {
		switch {
		case strings.HasPrefix(l, "*"):
			head = append(head, l)
		case strings.HasPrefix(l, ":"):
			order = append(order, l)
		case strings.HasPrefix(l, "-A "):
			name := strings.Fields(l)[1]
			rules[name] = append(rules[name], l)
		}
	}
	slices.Sort(order)
	lines := append(head, order...)
	for _, o := range order {
		lines = append(lines, rules[strings.Fields(o[1:])[0]]...)
	}
	return strings.Join(lines, "\n") + "\n"
}
