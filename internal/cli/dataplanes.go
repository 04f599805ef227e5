package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/dataplane/iptables"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
)

// families are the address families that are served.
type families struct{ v4, v6 bool }

// build makes the dataplane of one mode, for the families that this node can have.
type build func(context.Context, *config.Config) (engine.Dataplane, families, error)

// dataplanes has a line for each.
var dataplanes = map[string]build{
	"iptables":    buildIPTables,
	"nftables":    buildNFTables,
	config.Memory: buildMemory,
}

// built tells whether this build has the dataplane of a mode.
func built(mode string) error {
	if _, ok := dataplanes[mode]; ok {
		return nil
	}
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(dataplanes)), func(s string) bool { return s == config.Memory })
	return fmt.Errorf("proxy mode %s is not built yet (this build has %s)", mode, strings.Join(names, ", "))
}

// newDataplane makes the dataplane of the mode.
func newDataplane(ctx context.Context, c *config.Config) (engine.Dataplane, families, error) {
	if err := built(c.Mode); err != nil {
		return nil, families{}, err
	}
	return dataplanes[c.Mode](ctx, c)
}

func buildIPTables(ctx context.Context, c *config.Config) (engine.Dataplane, families, error) {
	return iptablesOf(ctx, c, "")
}

// iptablesOf uses a back end; empty is the node's own. Where one family can't be had, the other is served alone.
func iptablesOf(ctx context.Context, c *config.Config, backend string) (engine.Dataplane, families, error) {
	no4, no6 := iptables.Able(ctx, backend)
	f := families{no4 == nil, no6 == nil}
	switch {
	case !f.v4 && !f.v6:
		return nil, f, fmt.Errorf("iptables can't be used here: %w", no4)
	case !f.v4:
		klog.InfoS("IPv4 is not served", "why", no4)
	case !f.v6:
		klog.InfoS("IPv6 is not served", "why", no6)
	}
	d, err := iptables.New(ctx, iptables.Config{V4: f.v4, V6: f.v6, MasqueradeBit: c.MasqueradeBit,
		KeepInvalid: c.Proxy.Conntrack.TCPBeLiberal, Backend: backend,
		Log: func(err error) { klog.ErrorS(err, "iptables") }})
	if err != nil {
		return nil, f, err
	}
	return d, f, nil
}

// buildNFTables serves the families that the kernel can do it for.
func buildNFTables(_ context.Context, c *config.Config) (engine.Dataplane, families, error) {
	no4, no6 := nftables.Able(false), nftables.Able(true)
	f := families{no4 == nil, no6 == nil && kernel.IPv6Off() == ""}
	switch {
	case !f.v4 && !f.v6:
		return nil, f, no4
	case !f.v4:
		klog.InfoS("IPv4 is not served", "why", no4)
	case no6 != nil:
		klog.InfoS("IPv6 is not served", "why", no6)
	}
	d, err := nftables.New(nftables.Config{V4: f.v4, V6: f.v6, MasqueradeBit: c.MasqueradeBit,
		KeepInvalid: c.Proxy.Conntrack.TCPBeLiberal, Log: func(err error) { klog.ErrorS(err, "nftables") }})
	if err != nil {
		return nil, f, err
	}
	return d, f, nil
}

func buildMemory(context.Context, *config.Config) (engine.Dataplane, families, error) {
	return memory.New(new(memory.Kernel)), families{v4: true, v6: true}, nil
}

// removers take out what a dataplane, of this process or of one before it, has left. A dataplane with two back ends may have
// left something in both.
var removers = map[string]func(context.Context, *config.Config) (engine.Dataplane, families, error){
	"iptables (nf_tables)": func(ctx context.Context, c *config.Config) (engine.Dataplane, families, error) {
		return iptablesOf(ctx, c, "nf_tables")
	},
	"nftables": buildNFTables,
	"iptables (legacy)": func(ctx context.Context, c *config.Config) (engine.Dataplane, families, error) {
		if err := iptables.LegacyUsed(); err != nil {
			return nil, families{}, err
		}
		return iptablesOf(ctx, c, "legacy")
	},
}

// remove goes on after a failure. What this kernel can't have, it has nothing of; but when not one can be looked at,
// something is wrong.
func remove(ctx context.Context, c *config.Config) error {
	var failed, absent []error
	for _, name := range slices.Sorted(maps.Keys(removers)) {
		d, _, err := removers[name](ctx, c)
		if err != nil {
			absent = append(absent, fmt.Errorf("clean up %s: %w", name, err))
			continue
		}
		if err := errors.Join(d.Remove(ctx), d.Close()); err != nil {
			failed = append(failed, fmt.Errorf("clean up %s: %w", name, err))
		}
	}
	if len(absent) == len(removers) {
		failed = absent
	}
	return errors.Join(append(failed, removeGate(ctx))...)
}
