package ipvs

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// held is a virtual server that the kernel holds.
type held struct {
	how   kernel.VirtualServerSettings
	dests []kernel.Destination
}

// look reads the virtual servers that are ours.
func look(c conn) (map[kernel.VirtualServer]*held, error) {
	var out map[kernel.VirtualServer]*held
	for range 20 {
		out = map[kernel.VirtualServer]*held{}
		err := c.Servers(func(s kernel.VirtualServer, how kernel.VirtualServerSettings) {
			if isOurs(s, how) {
				out[s] = &held{how: how}
			}
		})
		if errors.Is(err, kernel.ErrDumpInterrupted) {
			continue
		}
		if err != nil {
			return nil, err
		}
		break
	}
	for s, h := range out {
		if err := c.Destinations(s, func(d kernel.Destination) { h.dests = append(h.dests, d) }); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// isOurs tells our virtual servers from those of others: by the mark, or by a flag.
func isOurs(s kernel.VirtualServer, how kernel.VirtualServerSettings) bool {
	if s.Mark != 0 {
		_, ok := nftables.NumberOf(s.Mark)
		return ok
	}
	return how.Flags&ours != 0
}

// Dump tells what the kernel holds; see engine.Dataplane.
func (d *Dataplane) Dump(ctx context.Context) (*model.State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	found, err := look(d.conn)
	if err != nil {
		return nil, err
	}
	s, used, err := d.front.DumpAhead(ctx)
	if err != nil {
		return nil, err
	}
	ports := map[model.Key]*held{} // any one of a NodePort's
	for k, h := range found {
		if k.Mark == 0 {
			ports[model.Key{IP: model.Unspecified(k.V6), Port: k.Addr.Port(), Proto: model.Proto(k.Proto)}] = h
		}
	}
	clear(s.Pools)
	for k, f := range s.Frontends {
		for _, r := range f.Routes {
			if r.Pool.Service == "" {
				continue // refused or dropped
			}
			n := used.Of[k][r.Pool.Scope]
			h := found[markOf(uint32(n), k.V6())]
			if n == byAddress {
				if h = ports[k]; !k.NodePort() {
					h = found[addresses(k, model.Node{})[0]]
				}
			}
			if p := h.pool(r.Pool, used.Here); len(s.Pools[r.Pool].Backends) == 0 || p.Sticky > 0 {
				s.Pools[r.Pool] = p
			}
		}
	}
	return s, nil
}

// pool is what a virtual server holds of a pool; nil holds nothing.
func (h *held) pool(id model.PoolID, here map[netip.Addr]struct{}) model.Pool {
	p := model.Pool{ID: id}
	if h == nil {
		return p
	}
	p.Sticky = time.Duration(h.how.Timeout) * time.Second
	for _, to := range h.dests {
		_, local := here[to.Addr.Addr()]
		b := model.Backend{Addr: to.Addr, Local: local}
		if to.Weight == 0 {
			p.Draining = append(p.Draining, b)
		} else {
			p.Backends = append(p.Backends, b)
		}
	}
	slices.SortFunc(p.Backends, model.Backend.Compare)
	slices.SortFunc(p.Draining, model.Backend.Compare)
	return p
}
