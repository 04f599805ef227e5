package cli

import (
	"context"
	"os"
	"runtime/debug"
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
//	GOGC 50, tidied up     92,  64   3.1 s   (this)
//	GOGC 30, tidied up     86,  63   3.5 s
const gcPercent = 50

const (
	calmAfter = 2 * time.Second // after much work until its memory is given back
	seldom    = time.Minute     // after little work
	much      = 1000            // frontends and pools
)

// sparing makes the garbage collector hold less memory back, unless GOGC says otherwise.
func sparing() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
}

// tidy is an engine.Observer that gives memory back to the system when work is done.
type tidy struct{ worked chan time.Duration }

func newTidy() tidy { return tidy{make(chan time.Duration, 1)} }

// Applied notes how much work there was.
func (t tidy) Applied(d model.Delta, _ time.Duration) {
	after := seldom
	if len(d.Frontends)+len(d.Pools)+len(d.GoneFrontends)+len(d.GonePools) >= much {
		after = calmAfter
	}
	select {
	case t.worked <- after:
	default:
	}
}

func (t tidy) run(ctx context.Context) error {
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
			debug.FreeOSMemory()
			waits = false
		}
	}
}
