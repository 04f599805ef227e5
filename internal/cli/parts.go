package cli

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// parts are the goroutines of an agent. One that fails ends them all.
type parts struct {
	fail context.CancelCauseFunc
	wait sync.WaitGroup
}

func (p *parts) run(name string, f func() error) {
	p.wait.Go(func() {
		if err := f(); err != nil {
			p.fail(fmt.Errorf("%s: %w", name, err))
		}
	})
}

// end waits for all of them, up to a limit.
func (p *parts) end(limit time.Duration) {
	done := make(chan struct{})
	go func() { p.wait.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(limit):
		klog.InfoS("Not everything ended in time", "limit", limit)
	}
}
