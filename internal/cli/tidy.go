package cli

import (
	"context"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"

	"fairlead/internal/model"
)

// The runtime would let the heap grow to twice of what is in use before it collects, and keep what the first load of a large
// cluster needed: nothing is allocated afterwards that would make it collect again. On a node, memory is the pods'.
//
// Measured with 5,000 Services of 4 endpoints in iptables mode, from an API that streams them, RSS in MiB of which 19 are the
// program itself (peak, then 20 s later), and CPU until all rules were written:
//
//	GOGC 100, as it is    109, 109   2.5 s
//	GOGC 100, tidied up   109,  68   2.5 s
//	GOGC 50, tidied up     92,  64   3.1 s
//	GOGC 30, tidied up     86,  63   3.5 s
//
// and, since nobody keeps objects any more, with 30,000 Services of 4 endpoints in nftables mode:
//
//	GOGC 50, tidied up    171, 121   6.2 s
//	GOGC 30, tidied up    158, 121   6.1 s   (this)
//	GOGC 20, tidied up    145, 119   6.6 s
const gcPercent = 30

// calmPercent is for what comes after: changes of one thing or another. Each leaves some 8 KiB to collect, and a large heap
// would grow by much before that is done.
const calmPercent = 15

const (
	calmAfter = 2 * time.Second // after much work until its memory is given back
	seldom    = time.Minute     // after little work
	much      = 1000            // frontends and pools
)

// sparing makes the garbage collector hold less memory back, unless GOGC says otherwise.
func sparing(percent int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

// tidy is an engine.Observer that gives memory back to the system when work is done.
type tidy struct {
	worked chan time.Duration
	gone   atomic.Int64 // frontends and pools, since the room that they needed was given back
}

func newTidy() *tidy { return &tidy{worked: make(chan time.Duration, 1)} }

// Applied notes how much work there was.
func (t *tidy) Applied(d model.Delta, _ time.Duration) {
	gone := len(d.GoneFrontends) + len(d.GonePools)
	after := seldom
	if t.gone.Add(int64(gone)) >= much || len(d.Frontends)+len(d.Pools)+gone >= much {
		after = calmAfter
	}
	select {
	case t.worked <- after:
	default:
	}
}

// run tidies up until ctx ends. slim makes all parts give back the room of what is gone.
func (t *tidy) run(ctx context.Context, slim func(context.Context) error) error {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	for waits := false; ; {
		select {
		case <-ctx.Done():
			return nil
		case after := <-t.worked:
			if !waits || after == calmAfter {
				timer.Reset(after)
				waits = true
			}
		case <-timer.C:
			if t.gone.Load() >= much {
				t.gone.Store(0)
				_ = slim(ctx) // it fails when the engine has ended
			}
			sparing(calmPercent)
			debug.FreeOSMemory()
			waits = false
		}
	}
}
