package conntrack

import (
	"net/netip"
	"slices"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// kind is what one reading of the kernel's table is about.
type kind struct {
	V6    bool
	Proto model.Proto
}

func kindOf(k model.Key) kind { return kind{k.V6(), k.Proto} }

// work is what must be looked at: the kinds of entries, and the frontends that are no more.
type work struct {
	kinds map[kind]bool
	gone  map[model.Key]bool
}

func (w *work) empty() bool { return len(w.kinds) == 0 }

func (w *work) look(k kind) {
	if w.kinds == nil {
		w.kinds = map[kind]bool{}
	}
	w.kinds[k] = true
}

func (w *work) lost(k model.Key) {
	if w.gone == nil {
		w.gone = map[model.Key]bool{}
	}
	w.gone[k] = true
	w.look(kindOf(k))
}

func (w *work) add(o work) {
	for k := range o.kinds {
		w.look(k)
	}
	for k := range o.gone {
		w.lost(k)
	}
}

// view is the part of the state that is about UDP and SCTP. It says which entries are stale.
type view struct {
	state *model.State
	own   map[netip.Addr]bool // Node.Addrs
}

func newView() *view { return &view{state: model.NewState()} }

// tracked cuts a delta down to what the view keeps. It costs the size of the delta.
func tracked(d model.Delta) model.Delta {
	out := model.Delta{Full: d.Full, Node: d.Node}
	for _, f := range d.Frontends {
		if f.Key.Proto != model.TCP {
			out.Frontends = append(out.Frontends, f)
		}
	}
	for _, p := range d.Pools {
		if p.ID.Proto != model.TCP {
			out.Pools = append(out.Pools, p)
		}
	}
	for _, k := range d.GoneFrontends {
		if k.Proto != model.TCP {
			out.GoneFrontends = append(out.GoneFrontends, k)
		}
	}
	for _, id := range d.GonePools {
		if id.Proto != model.TCP {
			out.GonePools = append(out.GonePools, id)
		}
	}
	return out
}

// apply advances the view by a tracked delta and tells which entries the change may have made stale.
func (v *view) apply(d model.Delta) (w work) {
	v.lostAddresses(d, &w)
	for _, k := range v.goneFrontends(d) {
		w.lost(k)
	}
	for _, f := range d.Frontends {
		old, ok := v.state.Frontends[f.Key]
		if d.Full || !ok || pools(old) != pools(f) {
			w.look(kindOf(f.Key))
		}
	}
	for _, p := range d.Pools {
		if staleAfter(v.state.Pools[p.ID], p) {
			w.look(kind{p.ID.V6, p.ID.Proto})
		}
	}
	for _, id := range d.GonePools {
		if _, ok := v.state.Pools[id]; ok {
			w.look(kind{id.V6, id.Proto})
		}
	}
	v.state.Apply(d)
	if d.Node != nil {
		v.own = make(map[netip.Addr]bool, len(d.Node.Addrs))
		for _, a := range d.Node.Addrs {
			v.own[a] = true
		}
	}
	return w
}

// lostAddresses finds the NodePort addresses that come or go. What was sent to one that goes must not stay translated:
// the address may live on another node by now.
func (v *view) lostAddresses(d model.Delta, w *work) {
	if d.Node == nil {
		return
	}
	takes := func(n model.Node) []netip.Addr {
		return slices.DeleteFunc(slices.Clone(n.Addrs), func(a netip.Addr) bool { return !n.TakesNodePort(a) })
	}
	before, after := takes(v.state.Node), takes(*d.Node)
	if slices.Equal(before, after) {
		return
	}
	left := slices.DeleteFunc(before, func(a netip.Addr) bool {
		_, stays := slices.BinarySearchFunc(after, a, netip.Addr.Compare)
		return stays
	})
	for k := range v.state.Frontends {
		if !k.NodePort() {
			continue
		}
		w.look(kindOf(k))
		for _, a := range left {
			if a.Is6() == k.V6() {
				w.lost(model.Key{IP: a, Port: k.Port, Proto: k.Proto})
			}
		}
	}
}

// goneFrontends are the frontends that d takes away: of the view, or of the rules of a previous run.
func (v *view) goneFrontends(d model.Delta) (gone []model.Key) {
	if d.Full {
		gone = slices.Clone(d.GoneFrontends)
		stay := make(map[model.Key]bool, len(d.Frontends))
		for _, f := range d.Frontends {
			stay[f.Key] = true
		}
		for k := range v.state.Frontends {
			if !stay[k] {
				gone = append(gone, k)
			}
		}
		return gone
	}
	for _, k := range d.GoneFrontends {
		if _, ok := v.state.Frontends[k]; ok {
			gone = append(gone, k)
		}
	}
	return gone
}

func pools(f model.Frontend) (ids [3]model.PoolID) {
	for i, r := range f.Routes {
		ids[i] = r.Pool
	}
	return ids
}

// staleAfter tells whether a change of a pool may leave stale entries: it lost a backend, or it got its first ones, so
// that flows which passed by untranslated are to be translated now. A backend more to a pool that has some changes nothing.
func staleAfter(old, p model.Pool) bool {
	if len(old.Backends) == 0 && len(p.Backends) > 0 {
		return true
	}
	lost := func(b model.Backend) bool { return !serves(p, b.Addr) }
	return slices.ContainsFunc(old.Backends, lost) || slices.ContainsFunc(old.Draining, lost)
}

// serves tells whether flows to addr may live on. Both lists are sorted by address.
func serves(p model.Pool, addr netip.AddrPort) bool {
	byAddr := func(b model.Backend, a netip.AddrPort) int { return b.Addr.Compare(a) }
	if _, ok := slices.BinarySearchFunc(p.Backends, addr, byAddr); ok {
		return true
	}
	_, ok := slices.BinarySearchFunc(p.Draining, addr, byAddr)
	return ok
}

// stale tells whether an entry leads where its frontend leads no more. gone are frontends that were taken away.
func (v *view) stale(f kernel.Flow, gone map[model.Key]bool) bool {
	if f.Zone {
		return false
	}
	exact := model.Key{IP: f.Dst.Addr(), Port: f.Dst.Port(), Proto: model.Proto(f.Proto)}
	port := exact
	if v.takesNodePort(exact.IP) {
		port.IP = model.Unspecified(exact.V6())
	}
	front, ok := v.state.Frontends[exact]
	if !ok {
		front, ok = v.state.Frontends[port]
	}
	if !ok {
		return f.ReplySrc != f.Dst && (gone[exact] || gone[port])
	}
	for _, r := range front.Routes {
		if serves(v.state.Pools[r.Pool], f.ReplySrc) {
			return false
		}
	}
	return true
}

func (v *view) takesNodePort(a netip.Addr) bool {
	return (v.own[a] || a.Is4() && a.IsLoopback()) && v.state.Node.TakesNodePort(a)
}
