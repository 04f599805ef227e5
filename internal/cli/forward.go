package cli

import (
	"context"
	"errors"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/dataplane/iptables"
)

// gate is an iptables.Gate.
type gate interface {
	Keep(ctx context.Context, bit int) (changed []string, err error)
	Remove(ctx context.Context) (changed []string, err error)
	Close() error
}

var newGate = func() gate { return new(iptables.Gate) }

// forward sees to it that iptables forwards what Services hide, in the mode that can't do it by itself: nftables. In iptables mode
// KUBE-FORWARD does it.
type forward struct {
	gate gate
	gone bool      // and nothing will bring it back in this mode
	said string    // the last failure
	rest time.Time // after a failure, until then
}

// How often is looked whether the gate stands (iptables -F, Docker's restart), and how long a failure is not tried again.
const (
	forwardEvery = 500 * time.Millisecond
	forwardRest  = 1500 * time.Millisecond
)

func needsGate(c *config.Config) bool { return c.Mode == "nftables" }

// tend makes the gate what the mode needs. The caller has the turn.
func (f *forward) tend(ctx context.Context, c *config.Config) {
	needed := needsGate(c)
	if c.Mode == config.Memory || !needed && f.gone || time.Now().Before(f.rest) { // a dry run touches nothing
		return
	}
	if f.gate == nil {
		f.gate = newGate()
	}
	var changed []string
	var err error
	if needed {
		changed, err = f.gate.Keep(ctx, c.MasqueradeBit)
	} else {
		changed, err = f.gate.Remove(ctx)
	}
	if f.gone = !needed && err == nil; len(changed) > 0 {
		klog.InfoS("iptables: what lets Service traffic pass the FORWARD chain was brought up to date", "needed", needed, "changed", strings.Join(changed, ", "))
	}
	f.tell(ctx, err)
}

// tell says each failure once.
func (f *forward) tell(ctx context.Context, err error) {
	switch {
	case err == nil:
		f.said, f.rest = "", time.Time{}
	case ctx.Err() == nil:
		f.rest = time.Now().Add(forwardRest)
		if f.said != err.Error() {
			f.said = err.Error()
			klog.ErrorS(err, "What lets Service traffic pass the FORWARD chain of iptables can't be brought up to date", "retryIn", forwardRest)
		}
	}
}

// tendForward takes its turn.
func (a *agent) tendForward(ctx context.Context) {
	a.turn.Lock()
	defer a.turn.Unlock()
	a.forward.tend(ctx, a.now().c)
}

// keepForward looks again and again from when Services are served, until ctx ends. While somebody else has the turn there is a
// look less.
func (a *agent) keepForward(ctx context.Context, served <-chan struct{}) error {
	defer a.closeForward()
	select {
	case <-ctx.Done():
		return nil
	case <-served:
	}
	tick := time.NewTicker(forwardEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if a.turn.TryLock() {
			a.forward.tend(ctx, a.now().c)
			a.turn.Unlock()
		}
	}
}

func (a *agent) closeForward() {
	a.turn.Lock()
	defer a.turn.Unlock()
	if a.forward.gate != nil {
		_ = a.forward.gate.Close()
		a.forward.gate = nil
	}
}

// removeGate takes the gate out.
func removeGate(ctx context.Context) error {
	g := newGate()
	_, err := g.Remove(ctx)
	return errors.Join(err, g.Close())
}
