package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/model"
)

// heir is an engine.Observer that takes out, once our own rules are in force, what others have left: kube-proxy in another
// mode, or a fairlead that served in another one and crashed in the middle of a switch, or came back in the mode that is
// written. Their rules would go on catching packets. kube-proxy does the same when its mode changes, before its own rules
// are there. While what we serve is only presumed, theirs may know better, and stay.
type heir struct {
	synced        func() bool
	once, knowing sync.Once
	served        chan struct{} // closed when something is
	known         chan struct{} // closed when what is served is the truth
}

func newHeir(synced func() bool) *heir {
	return &heir{synced: synced, served: make(chan struct{}), known: make(chan struct{})}
}

// Applied begins, the first time.
func (h *heir) Applied(model.Delta, time.Duration) {
	h.once.Do(func() { close(h.served) })
	if h.synced() {
		h.knowing.Do(func() { close(h.known) })
	}
}

// kubeProxyTables is what no remover knows: it is nobody's but kube-proxy's.
const kubeProxyTables = "nftables of kube-proxy"

// patience of the heir: tries, and the wait before the second, three times as long before each further one.
const (
	heirTries = 5
	heirWait  = time.Second
)

// run takes out what is left, and ends when nothing is, or ctx.
func (h *heir) run(ctx context.Context, a *agent) error {
	select {
	case <-ctx.Done():
		return nil
	case <-h.known:
	}
	if a.now().c.Mode == config.Memory { // a dry run touches nothing
		return nil
	}
	a.tendForward(ctx) // before KUBE-FORWARD goes
	owed := append(slices.Sorted(maps.Keys(removers)), kubeProxyTables)
	for try, wait := 1, heirWait; ; try, wait = try+1, 3*wait {
		var err error
		if owed, err = a.inherit(ctx, owed); len(owed) == 0 || ctx.Err() != nil {
			return nil
		}
		if try == 1 || try == heirTries {
			klog.ErrorS(err, "What was left by another mode can't be removed", "again", try < heirTries)
		}
		if try == heirTries {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// inherit goes on after a failure, and gives the names of what is still owed. Each removal takes its turn with switches: what
// serves is never removed.
func (a *agent) inherit(ctx context.Context, names []string) (owed []string, failed error) {
	for _, name := range names {
		a.turn.Lock()
		err := a.inheritOne(ctx, name)
		a.turn.Unlock()
		if err != nil {
			owed, failed = append(owed, name), errors.Join(failed, fmt.Errorf("%s: %w", name, err))
		}
	}
	return owed, failed
}

func (a *agent) inheritOne(ctx context.Context, name string) error {
	now := a.now()
	switch {
	case name == kubeProxyTables:
		return removeTables()
	case now.needs(name):
		return nil
	}
	d, _, err := removers[name](ctx, now.c)
	if err != nil {
		klog.V(2).InfoS("What this kernel can't have, nobody has left there", "dataplane", name, "why", err)
		return nil
	}
	return errors.Join(d.Remove(ctx), d.Close())
}

// needs tells whether the rules that a remover takes out must stay: they serve. Where the legacy iptables serves, chains of
// nf_tables are the kubelet's, or of whoever else runs the other iptables; that was looked at when the back end was chosen.
func (c *current) needs(remover string) bool {
	return remover == c.place() || c.c.Mode == "iptables" && c.backend == "legacy" && remover == "iptables (nf_tables)"
}
