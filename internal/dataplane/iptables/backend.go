package iptables

import (
	"context"
	"errors"
	"slices"
)

// change is one chain as it should be: with exactly these rules, or gone. In a built-in chain (PREROUTING …) only the
// jumps listed are ours: missing ones are put at the top, in this order, and with gone they are taken out.
type change struct {
	Chain ChainID
	Rules []Rule
	Gone  bool
}

// builtin tells whether the chain belongs to the kernel (upper case, no KUBE- prefix) and is shared with others.
func (c ChainID) builtin() bool {
	switch c.Name {
	case "PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING":
		return true
	}
	return false
}

// backend is one of the two ways iptables rules reach the kernel: nf_tables by netlink, or the old xtables by
// iptables-legacy-restore. It remembers nothing.
type backend interface {
	// Write makes all changes, in an order in which no rule ever jumps to a chain that is not there. With few changes it is
	// one transaction (per family, for the legacy back end per table); a large load may be split between chains that nothing
	// refers to yet, so that what packets see changes at once. Chains that are gone are flushed with the rest and
	// deleted last.
	Write(ctx context.Context, changes []change) error
	// scan visits every chain of a family whose name has the prefix KUBE-, and the built-in chains with those of their
	// rules that jump to such chains; each once, in memory of one chain: what a found holds is valid during the call only.
	scan(ctx context.Context, v6 bool, each func(ChainID, found)) error
	// generation differs when somebody changed rules in between.
	generation() (string, error)
	// Watch calls drift when somebody else changed a chain with our prefix, until ctx ends.
	Watch(ctx context.Context, drift func(what string)) error
	Name() string // "nf_tables" or "legacy", as iptables --version says
	Close() error
}

// readAll is all that scan visits, at once.
func readAll(ctx context.Context, be backend, v6 bool) (map[ChainID]found, error) {
	chains := map[ChainID]found{}
	err := be.scan(ctx, v6, func(id ChainID, f found) {
		f.Rules = slices.Clone(f.Rules)
		chains[id] = f
	})
	return chains, err
}

// errInUse says that a chain can't be deleted, since a rule that is not ours leads to it.
var errInUse = errors.New("a rule elsewhere still refers to it")

// found is a chain as the kernel holds it.
type found struct {
	Rules []Rule
	Exact bool // every rule was understood completely; otherwise the chain must be written again
}
