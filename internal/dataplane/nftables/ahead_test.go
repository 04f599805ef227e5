package nftables

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// What nft prints of the golden cluster in a table ahead of IPVS is what testdata says, and is read back as it was written.
func TestGoldenAhead(t *testing.T) {
	number := func(_ model.Key, p model.PoolID) uint32 { return uint32(len(p.Service))<<1 | uint32(p.Scope) }
	for _, v6 := range []bool{false, true} {
		t.Run(familyName(v6), func(t *testing.T) {
			var got string
			cfg := Config{V4: true, V6: true, MasqueradeBit: 14, Ahead: &Ahead{Table: "ahead", Number: number}}
			inAheadNS(t, cfg, func(d *Dataplane) error {
				want := dptest.Golden(v6)
				if err := d.Apply(context.Background(), want); err != nil {
					return err
				}
				s, numbers, err := d.DumpAhead(context.Background())
				if err != nil {
					return err
				}
				if len(s.Frontends) != len(want.Frontends) || len(numbers.Of) != len(want.Frontends) || len(numbers.Here) != 1 {
					t.Errorf("%d frontends, %d with numbers, %d endpoints here; %d frontends were written", len(s.Frontends), len(numbers.Of), len(numbers.Here), len(want.Frontends))
				}
				text, err := exec.Command("nft", "list", "table", map[bool]string{false: "ip", true: "ip6"}[v6], "ahead").CombinedOutput()
				got = sortElements(string(text))
				if err != nil {
					return fmt.Errorf("nft: %w: %s", err, text)
				}
				return AbleAhead(cfg, v6)
			})
			file := filepath.Join("testdata", map[bool]string{false: "ahead4.nft", true: "ahead6.nft"}[v6])
			asFile(t, file, got)
		})
	}
}

func inAheadNS(t *testing.T, cfg Config, f func(d *Dataplane) error) {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		d, err := New(cfg)
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
