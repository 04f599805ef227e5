package memory_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

func TestConformance(t *testing.T) {
	dptest.Run(t, func(*testing.T) dptest.Subject { return dptest.Memory() })
}

func frontend(n byte) model.Frontend {
	return model.Frontend{Key: model.Key{IP: netip.AddrFrom4([4]byte{10, 0, 0, n}), Port: 80, Proto: model.TCP}}
}

// TestPartialFailure: one bad row does not stop the good ones, and only it is written again.
func TestPartialFailure(t *testing.T) {
	k := &memory.Kernel{}
	d := memory.New(k)
	n := 0
	k.Fail(func() memory.Fault {
		if n++; n == 2 {
			return memory.Before
		}
		return memory.None
	})
	delta := model.Delta{Full: true, Frontends: []model.Frontend{frontend(1), frontend(2), frontend(3)}}
	if err := d.Apply(t.Context(), delta); !errors.Is(err, memory.ErrFault) {
		t.Fatalf("got %v", err)
	}
	if held := len(k.State().Frontends); held != 2 {
		t.Errorf("the kernel holds %d rows of 3, one failed", held)
	}
	before := k.Version()
	delta.Full = false
	if err := d.Apply(t.Context(), delta); err != nil || k.Version() != before+1 {
		t.Errorf("again: %v, %d rows written, want 1", err, k.Version()-before)
	}
}

// TestFullWithoutNode: a nil Node is unchanged, in a Full delta too.
func TestFullWithoutNode(t *testing.T) {
	k := &memory.Kernel{}
	d := memory.New(k)
	for _, delta := range []model.Delta{{Full: true, Node: &model.Node{Name: "n1"}}, {Full: true, Frontends: []model.Frontend{frontend(1)}}} {
		if err := d.Apply(t.Context(), delta); err != nil {
			t.Fatal(err)
		}
	}
	if s := k.State(); s.Node.Name != "n1" || len(s.Frontends) != 1 {
		t.Errorf("the kernel holds %+v", s)
	}
}

func TestUnlucky(t *testing.T) {
	count := map[memory.Fault]int{}
	for f, i := memory.Unlucky(0.1, 7), 0; i < 100_000; i++ {
		count[f()]++
	}
	for _, f := range []memory.Fault{memory.Before, memory.After} {
		if n := count[f]; n < 4_500 || n > 5_500 {
			t.Errorf("fault %d came %d times in 100,000, want about 5,000", f, n)
		}
	}
}

type watcher struct{ engine.Dataplane }

func (watcher) Watch(_ context.Context, drift func(string)) error {
	drift("seen")
	return nil
}

func TestFaulty(t *testing.T) {
	k := &memory.Kernel{}
	var next memory.Fault
	d := memory.Faulty(watcher{memory.New(k)}, func() memory.Fault { return next })
	for _, c := range []struct {
		fault memory.Fault
		held  int
		fails bool
	}{{memory.Before, 0, true}, {memory.After, 1, true}, {memory.None, 2, false}} {
		next = c.fault
		err := d.Apply(t.Context(), model.Delta{Frontends: []model.Frontend{frontend(byte(c.held))}})
		if errors.Is(err, memory.ErrFault) != c.fails || len(k.State().Frontends) != c.held {
			t.Errorf("fault %d: %v, %d rows held", c.fault, err, len(k.State().Frontends))
		}
	}
	seen := ""
	if err := d.(engine.Watcher).Watch(t.Context(), func(what string) { seen = what }); err != nil || seen != "seen" {
		t.Errorf("a faulty watcher does not watch: %v", err)
	}
	if _, ok := memory.Faulty(memory.New(k), nil).(engine.Watcher); ok {
		t.Error("a dataplane that can't watch has learned it")
	}
}
