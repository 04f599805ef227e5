package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"fairlead/internal/engine"
	"fairlead/internal/kernel"
)

var _ interface {
	engine.Dataplane
	engine.Watcher
} = (*Dataplane)(nil)

// New finds out which back end this node uses and whether its kernel can do what the rules need. The error says in words
// what is missing.
func New(ctx context.Context, cfg Config) (*Dataplane, error) {
	if cfg.MasqueradeBit < 0 || cfg.MasqueradeBit > 31 {
		return nil, fmt.Errorf("masquerade bit %d: must be 0 to 31", cfg.MasqueradeBit)
	}
	be, err := newBackend(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("iptables: %w", err)
	}
	counters, err := openAccounts()
	cfg.counters = err == nil // a kernel without nfacct counts nothing, and does all the rest
	d := newDataplane(cfg, be)
	d.counters = counters
	d.sysctl = kernel.SetSysctl
	return d, nil
}

// Backend names the back end in use: "nf_tables" or "legacy".
func (d *Dataplane) Backend() string { return d.be.Name() }

// Watch reports foreign changes; see engine.Watcher.
func (d *Dataplane) Watch(ctx context.Context, drift func(string)) error {
	return d.be.Watch(ctx, drift)
}

// Close lets go of the kernel and leaves the rules.
func (d *Dataplane) Close() error {
	if d.counters == nil {
		return d.be.Close()
	}
	return errors.Join(d.counters.Close(), d.be.Close())
}

// Packets reads one of kube-proxy's nfacct counters; ok is false where the kernel has none.
func (d *Dataplane) Packets(name string) (n uint64, ok bool) {
	if d.counters == nil {
		return 0, false
	}
	return d.counters.packets(name)
}

// Remove takes out all of our chains and kube-proxy's, and the jumps to them. KUBE-FIREWALL stays where the kubelet uses it
// too.
func (d *Dataplane) Remove(ctx context.Context) error {
	var failed []error
	for _, v6 := range d.families() {
		chains, err := readAll(ctx, d.be, v6)
		if err != nil {
			return fmt.Errorf("read the rules: %w", err)
		}
		if err := remove(ctx, d.be, removal(chains)); err != nil {
			failed = append(failed, fmt.Errorf("remove the rules: %w", err))
		}
	}
	d.reset()
	d.loaded = false
	return errors.Join(failed...)
}

// remove makes changes that take out jumps, then chains. A chain that somebody else's rule leads to is left empty, and told.
func remove(ctx context.Context, be backend, changes []change) error {
	if len(changes) == 0 {
		return nil
	}
	err := be.Write(ctx, changes)
	if !errors.Is(err, errInUse) {
		return err
	}
	first := slices.IndexFunc(changes, func(c change) bool { return !c.Chain.builtin() })
	if first > 0 {
		if err := be.Write(ctx, changes[:first]); err != nil {
			return err
		}
	}
	var ids []ChainID
	for _, c := range changes[first:] {
		ids = append(ids, c.Chain)
	}
	used, err := deleteUnused(ctx, be, ids)
	for _, id := range used {
		err = errors.Join(err, fmt.Errorf("%s is left, empty: %w", where(id), errInUse))
	}
	return err
}

// removal takes out the jumps, then the chains.
func removal(chains map[ChainID]found) []change {
	var jumps, gone []change
	alone := guardAlone(chains)
	mine := func(id ChainID) bool { return ours(id) || alone && id.Table == Filter && id.Name == chainFirewall }
	for id, f := range chains {
		if !id.builtin() {
			if mine(id) {
				gone = append(gone, change{Chain: id, Gone: true})
			}
			continue
		}
		var rules []Rule
		for _, r := range f.Rules {
			if mine(ChainID{id.V6, id.Table, r.Target.Chain}) {
				rules = append(rules, r)
			}
		}
		if len(rules) > 0 {
			jumps = append(jumps, change{Chain: id, Rules: rules, Gone: true})
		}
	}
	slices.SortFunc(gone, func(a, b change) int { return strings.Compare(a.Chain.Name, b.Chain.Name) })
	return append(jumps, gone...)
}

// guardAlone tells whether KUBE-FIREWALL is nobody else's: no kubelet has left its canary, and the chain holds our rule only.
func guardAlone(chains map[ChainID]found) bool {
	for id, f := range chains {
		if id.Name == "KUBE-KUBELET-CANARY" || id.Name == chainFirewall && (!f.Exact || len(f.Rules) > 1) {
			return false
		}
	}
	return true
}
