package nftables

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
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
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "write the goldens anew")

// What nft prints of the golden cluster is what testdata says. That it prints it at all is worth a test: some versions abort
// on values that go from one map into another.
func TestGolden(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(familyName(v6), func(t *testing.T) {
			d := dptest.Golden(v6)
			d.Node.LocalhostRelay = loopbacks
			got := printed(t, d, v6)
			file := filepath.Join("testdata", map[bool]string{false: "golden4.nft", true: "golden6.nft"}[v6])
			asFile(t, file, got)
		})
	}
}

func inNS(t *testing.T, f func(d *Dataplane) error) {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		d, err := New(Config{V4: true, V6: true, MasqueradeBit: 14})
		if err != nil {
			return err
		}
		defer d.Close()
		return f(d)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func printed(t *testing.T, delta model.Delta, v6 bool) (out string) {
	inNS(t, func(d *Dataplane) error {
		if err := d.Apply(context.Background(), delta); err != nil {
			return err
		}
		text, err := exec.Command("nft", "list", "table", map[bool]string{false: "ip", true: "ip6"}[v6], tableName).CombinedOutput()
		if err != nil {
			return fmt.Errorf("nft: %w: %s", err, text)
		}
		out = sortElements(string(text))
		return nil
	})
	return out
}

var elements = regexp.MustCompile(`(?s)elements = \{ (.*?) \}\n`)

// sortElements puts elements, which the kernel lists in any order, in one: a line each.
func sortElements(text string) string {
	return elements.ReplaceAllStringFunc(text, func(list string) string {
		list = strings.TrimSuffix(strings.TrimPrefix(list, "elements = { "), " }\n")
		all := strings.Split(strings.Join(strings.Fields(list), " "), ", ")
		slices.Sort(all)
		return "elements = {\n\t\t\t" + strings.Join(all, ",\n\t\t\t") + "\n\t\t}\n"
	})
}

// The kernel can do it here, and the trial leaves nothing behind.
func TestAble(t *testing.T) {
	inNS(t, func(*Dataplane) error {
		for _, v6 := range []bool{false, true} {
			if err := Able(v6); err != nil {
				return err
			}
		}
		if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(bytes.TrimSpace(out)) > 0 {
			return fmt.Errorf("after the trial nft prints %q, %v", out, err)
		}
		return nil
	})
}

// One endpoint that changes is two elements, one that goes is one and the number of its Service's routes; nothing else is
// written, however many Services there are.
func TestOneChangeIsTwoElements(t *testing.T) {
	k := &counting{conn: newFakeKernel()}
	d := newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k)
	all := dptest.Many(300, 4)
	if err := d.Apply(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	apply := func(p model.Pool) {
		t.Helper()
		k.messages = nil
		if err := d.Apply(context.Background(), model.Delta{Pools: []model.Pool{p}}); err != nil {
			t.Fatal(err)
		}
	}
	p := all.Pools[100]
	p.Backends = slices.Clone(p.Backends)
	p.Backends[1].Addr = netip.AddrPortFrom(p.Backends[1].Addr.Addr(), 9999)
	apply(p)
	if want := []string{"delete 1", "add 1"}; !slices.Equal(k.messages, want) {
		t.Errorf("one endpoint changed: messages %q, want %q", k.messages, want)
	}
	fewer := p
	fewer.Backends = p.Backends[:3]
	apply(fewer) // the first time, the chain for three is made
	apply(p)
	apply(fewer)
	if want := []string{"delete 1", "add 1", "delete 1"}; !slices.Equal(k.messages, want) {
		t.Errorf("one endpoint fewer: messages %q, want %q", k.messages, want)
	}
	apply(fewer)
	if len(k.messages) > 0 {
		t.Errorf("nothing changed: messages %q", k.messages)
	}
}

// A table that looks right and takes nothing is made anew, after the kernel has refused twice what follows from what was read.
func TestStubbornTable(t *testing.T) {
	k := newFakeKernel()
	all := dptest.Many(10, 2)
	d := newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k)
	if err := d.Apply(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	d.conn = stubborn{k}
	more := dptest.Many(20, 2)
	for i := range patience {
		if err := d.Apply(context.Background(), more); !errors.Is(err, unix.ENFILE) {
			t.Fatalf("try %d: %v", i+1, err)
		}
	}
	if err := d.Apply(context.Background(), more); err != nil {
		t.Fatalf("at last: %v", err)
	}
	d.conn = k
	s, err := d.Dump(context.Background())
	if err != nil || len(s.Frontends) != 20 {
		t.Errorf("the kernel holds %d frontends, %v", len(s.Frontends), err)
	}
}

// stubborn refuses everything but a table that is made anew.
type stubborn struct{ conn }

func (s stubborn) Commit(b *kernel.NFBatch) error {
	anew := false
	b.Messages(func(kind uint8, _ uint16, _ uint8, _ []byte) { anew = anew || kind == unix.NFT_MSG_DELTABLE })
	if anew {
		return s.conn.Commit(b)
	}
	return &kernel.BatchError{Index: 0, Err: unix.ENFILE}
}

// counting notes which messages about elements are sent, and with how many.
type counting struct {
	conn
	messages []string
}

func (c *counting) Commit(b *kernel.NFBatch) error {
	b.Messages(func(kind uint8, _ uint16, _ uint8, attrs []byte) {
		n := 0
		cutElements(attrs, func(element) { n++ })
		c.messages = append(c.messages, fmt.Sprintf("%s %d", map[uint8]string{12: "add", 14: "delete"}[kind], n))
	})
	return c.conn.Commit(b)
}

// asFile compares what nft prints with a file of testdata.
func asFile(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("nft prints something else (-want +got; -update writes it anew):\n%s", d)
	}
}
