package iptables

import (
	"context"
	"os"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
)

// BenchmarkScale measures the dataplane alone; see dptest.Scale. FAIRLEAD_BACKEND chooses the back end.
func BenchmarkScale(b *testing.B) {
	ns, err := kernel.NewNS()
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		return dptest.Scale(b, func() (engine.Dataplane, error) {
			return New(context.Background(), Config{V4: true, V6: true, MasqueradeBit: 14, Backend: os.Getenv("FAIRLEAD_BACKEND")})
		})
	})
	if err != nil {
		b.Fatal(err)
	}
}
