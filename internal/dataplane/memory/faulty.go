package memory

import (
	"context"
	"fmt"
	"math/rand/v2"

	"fairlead/internal/engine"
	"fairlead/internal/model"
)

// Unlucky gives faults at a rate (0 to 1), half of them after taking effect. The same seed gives the same faults.
func Unlucky(rate float64, seed uint64) func() Fault {
	rnd := rand.New(rand.NewPCG(seed, seed))
	return func() Fault {
		switch p := rnd.Float64(); {
		case p < rate/2:
			return Before
		case p < rate:
			return After
		}
		return None
	}
}

// Faulty is a dataplane whose Apply fails as faults say. It is a Watcher when d is.
func Faulty(d engine.Dataplane, faults func() Fault) engine.Dataplane {
	f := faulty{d, faults}
	if w, ok := d.(engine.Watcher); ok {
		return struct {
			faulty
			engine.Watcher
		}{f, w}
	}
	return f
}

type faulty struct {
	engine.Dataplane
	faults func() Fault
}

func (f faulty) Apply(ctx context.Context, d model.Delta) error {
	fault := f.faults()
	if fault == Before {
		return fmt.Errorf("%w, before it was tried", ErrFault)
	}
	if err := f.Dataplane.Apply(ctx, d); err != nil {
		return err
	}
	if fault == After {
		return fmt.Errorf("%w, after it took effect", ErrFault)
	}
	return nil
}
