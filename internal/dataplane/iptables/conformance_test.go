package iptables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/model"
)

func TestConformance(t *testing.T) {
	dptest.Run(t, func(*testing.T) dptest.Subject { return subject() })
}

// subject is the dataplane over a kernel that keeps rules and walks packets through them.
func subject() dptest.Subject {
	k := newFakeKernel()
	rnd := rand.New(rand.NewPCG(1, 2))
	return dptest.Subject{
		Open: func() (engine.Dataplane, error) {
			return newDataplane(Config{V4: true, V6: true, MasqueradeBit: 14}, k), nil
		},
		Send: func(n model.Node, p model.Packet) (dptest.Outcome, error) {
			got := k.trace(n, p, rnd)
			return dptest.Outcome{Verdict: got.Verdict, Backend: got.To, SNAT: got.SNAT}, nil
		},
		Fail: func(faults func() memory.Fault) {
			k.fail = nil
			if faults != nil {
				k.fail = func() (before, after bool) {
					f := faults()
					return f == memory.Before, f == memory.After
				}
			}
		},
		Meddle: func(luck uint64) error { k.meddle(luck); return nil },
		Kernel: func() (string, error) { return k.String(), nil },
	}
}

// meddle damages a chain of ours: empties it, takes a rule out, or takes out our jumps from a built-in chain.
func (k *fakeKernel) meddle(luck uint64) {
	ids := k.sorted()
	ids = slices.DeleteFunc(ids, func(id ChainID) bool { return len(k.chains[id]) == 0 })
	if len(ids) == 0 {
		return
	}
	id := ids[luck%uint64(len(ids))]
	rules := k.chains[id]
	if luck&1 == 0 {
		k.chains[id] = nil
		return
	}
	i := int(luck>>8) % len(rules)
	k.chains[id] = slices.Delete(slices.Clone(rules), i, i+1)
}

func (k *fakeKernel) sorted() []ChainID {
	return slices.SortedFunc(maps.Keys(k.chains), func(a, b ChainID) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
}

func (k *fakeKernel) String() string {
	var b strings.Builder
	for _, id := range k.sorted() {
		fmt.Fprintln(&b, id, k.chains[id])
	}
	return b.String()
}
