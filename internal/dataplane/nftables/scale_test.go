package nftables

import (
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
)

// BenchmarkScale measures the dataplane alone; see dptest.Scale.
func BenchmarkScale(b *testing.B) {
	ns, err := kernel.NewNS()
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		return dptest.Scale(b, func() (engine.Dataplane, error) {
			return New(Config{V4: true, V6: true, MasqueradeBit: 14})
		})
	})
	if err != nil {
		b.Fatal(err)
	}
}
