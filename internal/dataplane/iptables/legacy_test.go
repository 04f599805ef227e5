package iptables

import (
	"testing"

	"fairlead/internal/kernel"

	"github.com/google/go-cmp/cmp"
)

func openTestLegacy(t testing.TB) *legacy {
	l, err := newLegacy()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// iptables-legacy-save prints what we wrote exactly as our own text says it, and we read it back.
func TestLegacyRoundTrip(t *testing.T) {
	for _, v6 := range families() {
		inNS(t, func(*kernel.NS) {
			l := openTestLegacy(t)
			if err := l.Write(t.Context(), sampleChanges(v6)); err != nil {
				t.Fatal(err)
			}
			want := textOf(v6, "KUBE-SAMPLES")
			got := linesOf(run(t, "", tool("legacy", v6, "save"), "-t", "filter")+run(t, "", tool("legacy", v6, "save"), "-t", "nat"), "-A KUBE-SAMPLES")
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s: iptables-legacy-save (-ours +theirs):\n%s", familyName(v6), d)
			}
			checkRead(t, l, v6)
		})
	}
}
