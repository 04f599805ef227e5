package kernel

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestFault: the switch makes one write fail, before or after it takes effect, and is off then.
func TestFault(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fault")
	before := fault
	t.Cleanup(func() { fault = before })
	for _, c := range []struct {
		name, file, content string
		there, fails, done  bool
	}{
		{"no variable", "", "before", true, false, true},
		{"no file", file, "", false, false, true},
		{"empty", file, "", true, true, false},
		{"before", file, "before\n", true, true, false},
		{"after", file, "after\n", true, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			fault = faultSwitch{c.file}
			_ = os.Remove(file)
			if c.there {
				if err := os.WriteFile(file, []byte(c.content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for i, fails := range []bool{c.fails, false} {
				done := false
				err := TryFault(func() error { done = true; return nil })
				if errors.Is(err, ErrFault) != fails || (err != nil) != fails || done != (c.done || i > 0) {
					t.Errorf("write %d: done %v, %v", i+1, done, err)
				}
			}
			if _, err := os.Stat(file); c.file != "" && !os.IsNotExist(err) {
				t.Errorf("the switch is still on: %v", err)
			}
		})
	}
}
