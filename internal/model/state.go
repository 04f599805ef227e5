package model

import (
	"maps"
	"slices"
	"time"
)

// State is everything a dataplane should make true. One goroutine owns it; nothing in it is locked.
type State struct {
	Frontends map[Key]Frontend
	Pools     map[PoolID]Pool
	Checks    map[string]Check // by Service
	Node      Node
}

// NewState returns an empty state.
func NewState() *State {
	return &State{Frontends: map[Key]Frontend{}, Pools: map[PoolID]Pool{}, Checks: map[string]Check{}}
}

// Delta is a change of desired state: nouns, never verbs, of both families together. Applying one twice is the same as
// applying it once.
type Delta struct {
	Full          bool // everything of ours that is not listed must go
	Frontends     []Frontend
	Pools         []Pool
	Checks        []Check
	GoneFrontends []Key
	GonePools     []PoolID
	GoneChecks    []string    // by Service
	Node          *Node       // nil is unchanged
	Since         []time.Time // when the changes were asked for, where known (EndpointSlice annotation last-change-trigger-time)
}

// Empty tells whether there is nothing to do.
func (d Delta) Empty() bool {
	return !d.Full && d.Node == nil && len(d.Frontends)+len(d.Pools)+len(d.Checks) == 0 &&
		len(d.GoneFrontends)+len(d.GonePools)+len(d.GoneChecks) == 0
}

// Then is d followed by next, as one delta. It costs the size of both, and nothing when either is empty.
func (d Delta) Then(next Delta) Delta {
	if d.Empty() || next.Full {
		next.Since = slices.Concat(d.Since, next.Since)
		if next.Node == nil {
			next.Node = d.Node
		}
		return next
	}
	if next.Empty() {
		d.Since = slices.Concat(d.Since, next.Since)
		return d
	}
	out := Delta{Full: d.Full, Node: d.Node, Since: slices.Concat(d.Since, next.Since)}
	if next.Node != nil {
		out.Node = next.Node
	}
	out.Frontends, out.GoneFrontends = join(d.Full, d.Frontends, next.Frontends, d.GoneFrontends, next.GoneFrontends, frontendKey)
	out.Pools, out.GonePools = join(d.Full, d.Pools, next.Pools, d.GonePools, next.GonePools, poolKey)
	out.Checks, out.GoneChecks = join(d.Full, d.Checks, next.Checks, d.GoneChecks, next.GoneChecks, checkKey)
	return out
}

func frontendKey(f Frontend) Key { return f.Key }
func poolKey(p Pool) PoolID      { return p.ID }
func checkKey(c Check) string    { return c.Service }

// join merges one kind of noun: what next says of a key wins. Under full nothing needs to be listed as gone.
func join[K comparable, V any](full bool, a, b []V, goneA, goneB []K, key func(V) K) ([]V, []K) {
	set := make(map[K]int, len(a)+len(b))
	vals := make([]V, 0, len(a)+len(b))
	put := func(v V) {
		if i, ok := set[key(v)]; ok {
			vals[i] = v
			return
		}
		set[key(v)] = len(vals)
		vals = append(vals, v)
	}
	gone := map[K]bool{}
	for _, k := range goneA {
		gone[k] = true
	}
	for _, v := range a {
		put(v)
	}
	dead := map[K]bool{}
	for _, k := range goneB {
		gone[k], dead[k] = true, true
	}
	for _, v := range b {
		put(v)
		delete(gone, key(v))
		delete(dead, key(v))
	}
	vals = slices.DeleteFunc(vals, func(v V) bool { return dead[key(v)] })
	if full {
		return vals, nil
	}
	order := slices.Concat(goneA, goneB)
	out := make([]K, 0, len(gone))
	for _, k := range order {
		if gone[k] {
			out = append(out, k)
			delete(gone, k)
		}
	}
	return vals, out
}

// NamePools names the pools of routes that have none: what was read back from a kernel does not tell which pool is empty where
// packets are refused (a cluster pool) or dropped (a local one).
func (s *State) NamePools() {
	for k, f := range s.Frontends {
		for o, r := range f.Routes {
			if r.Pool == (PoolID{}) {
				id := PoolID{Service: f.About.Service, Port: f.About.Port, Proto: k.Proto, V6: k.V6()}
				if r.Else == Drop {
					id.Scope = Local
				}
				f.Routes[o].Pool = id
			}
		}
		s.Frontends[k] = f
	}
}

// Apply advances the state by d.
func (s *State) Apply(d Delta) {
	if d.Full {
		renew(&s.Frontends, len(d.Frontends))
		renew(&s.Pools, len(d.Pools))
		renew(&s.Checks, len(d.Checks))
	}
	for _, k := range d.GoneFrontends {
		delete(s.Frontends, k)
	}
	for _, k := range d.GonePools {
		delete(s.Pools, k)
	}
	for _, k := range d.GoneChecks {
		delete(s.Checks, k)
	}
	for _, f := range d.Frontends {
		s.Frontends[f.Key] = f
	}
	for _, p := range d.Pools {
		s.Pools[p.ID] = p
	}
	for _, c := range d.Checks {
		s.Checks[c.Service] = c
	}
	if d.Node != nil {
		s.Node = *d.Node
	}
}

// renew empties a map; one that was empty gets room for n.
func renew[K comparable, V any](m *map[K]V, n int) {
	if len(*m) == 0 {
		*m = make(map[K]V, n)
	}
	clear(*m)
}

// Full is the whole state as a delta, sorted.
func (s *State) Full() Delta {
	n := s.Node
	return Delta{Full: true, Frontends: s.SortedFrontends(), Pools: s.SortedPools(), Checks: s.SortedChecks(), Node: &n}
}

// SortedFrontends lists the frontends in the order of their keys.
func (s *State) SortedFrontends() []Frontend {
	return slices.SortedFunc(maps.Values(s.Frontends), func(a, b Frontend) int { return a.Key.Compare(b.Key) })
}

// SortedPools lists the pools in the order of their names.
func (s *State) SortedPools() []Pool {
	return slices.SortedFunc(maps.Values(s.Pools), func(a, b Pool) int { return a.ID.Compare(b.ID) })
}

// SortedChecks lists the health-check node ports in the order of their Services.
func (s *State) SortedChecks() []Check {
	return slices.SortedFunc(maps.Values(s.Checks), func(a, b Check) int {
		return PoolID{Service: a.Service}.Compare(PoolID{Service: b.Service})
	})
}

// Clone copies the maps; the slices inside are shared, since nobody changes a slice once it is in a State.
func (s *State) Clone() *State {
	return &State{Frontends: maps.Clone(s.Frontends), Pools: maps.Clone(s.Pools), Checks: maps.Clone(s.Checks), Node: s.Node}
}
