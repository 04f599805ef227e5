//go:build vmguest

package ipvs

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// BenchmarkScale measures the dataplane alone; see dptest.Scale.
func BenchmarkScale(b *testing.B) {
	ns, err := kernel.NewNS()
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		return dptest.Scale(b, func() (engine.Dataplane, error) { return New(Config{V4: true, V6: true, MasqueradeBit: 14}) })
	})
	if err != nil {
		b.Fatal(err)
	}
}

// counting counts changes.
type counting struct {
	conn
	changes int
}

func (c *counting) Do(b *kernel.IPVSBatch, done func(int, error)) error {
	c.changes += b.Len()
	return c.conn.Do(b, done)
}

// One endpoint that comes is one message to IPVS, and none to nf_tables, whatever frontends its Service has; one that goes too.
func TestOneChangeIsOneMessage(t *testing.T) {
	s := newSubject(t)
	opened, err := s.open()
	if err != nil {
		t.Fatal(err)
	}
	d := opened.(inside)
	defer d.Close()
	all := dptest.Many(300, 4)
	if err := d.Apply(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	c := &counting{conn: d.conn}
	d.conn = c
	p := all.Pools[100]
	few := slices.Clone(p.Backends)
	for i := range few {
		few[i].Local = false
	}
	more := append(slices.Clone(few), model.Backend{Addr: netip.AddrPortFrom(few[0].Addr.Addr(), 9)})
	apply := func(backends []model.Backend) {
		t.Helper()
		c.changes, p.Backends = 0, backends
		if err := d.Apply(context.Background(), model.Delta{Pools: []model.Pool{p}}); err != nil {
			t.Fatal(err)
		}
	}
	apply(few)
	before, err := s.w.passed.Generation()
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		says     string
		backends []model.Backend
		changes  int
	}{{"comes", more, 1}, {"stays", more, 0}, {"goes", few, 1}} {
		if apply(step.backends); c.changes != step.changes {
			t.Errorf("one endpoint %s: %d messages, want %d", step.says, c.changes, step.changes)
		}
	}
	if after, err := s.w.passed.Generation(); after != before {
		t.Errorf("nf_tables was written to: generation %d, then %d (%v)", before, after, err)
	}
}
