package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
	"fairlead/internal/shadow"
)

// Dataplane keeps Services in IPVS, behind rules of nf_tables. Use New.
type Dataplane struct {
	mu    sync.Mutex // Watch looks after what drains
	cfg   Config
	front *nftables.Dataplane
	conn  conn

	node     model.Node
	services map[model.PoolID]*service
	owners   map[model.Key]*service

	loaded   bool // the tables below say what the kernel holds
	diverted bool // and packets come here
	live     map[kernel.VirtualServer]*live
	numbers  [2]pools
	servers  *shadow.Table[kernel.VirtualServer, kernel.VirtualServer, kernel.VirtualServerSettings]
	dests    *shadow.Table[destination, destination, weight]
}

// conn is the kernel's IPVS, as [kernel.IPVS] speaks to it.
type conn interface {
	Servers(each func(kernel.VirtualServer, kernel.VirtualServerSettings)) error
	Destinations(s kernel.VirtualServer, each func(kernel.Destination)) error
	Do(b *kernel.IPVSBatch, done func(i int, err error)) error
	Close() error
}

type destination struct {
	of kernel.VirtualServer
	to netip.AddrPort
}

// weight of a destination, and one: what is not there has none.
type weight uint32

const draining weight = 1

// live is a virtual server that is there, or about to be.
type live struct {
	owner *service                     // nil: it only drains
	dests map[netip.AddrPort]time.Time // since when it drains; zero is not at all
}

// Apply makes it so; see engine.Dataplane. What takes new flows comes before the rules that lead to it, what goes comes after.
func (d *Dataplane) Apply(ctx context.Context, delta model.Delta) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.divert(); err != nil {
		return err
	}
	touched, err := d.take(ctx, delta)
	if err != nil {
		return err
	}
	for s := range touched {
		d.want(s)
	}
	for _, k := range delta.GoneFrontends {
		d.unclaim(addresses(k, d.node))
	}
	if !d.loaded { // all is to be asked for again
		for _, s := range d.services {
			d.want(s)
		}
		d.orphans()
	}
	d.loaded = false // until all of it is known to be true
	gone, err := d.put()
	if err != nil {
		return err
	}
	if err := d.front.Apply(ctx, delta); err != nil {
		return err
	}
	if err := d.drop(gone); err != nil {
		return err
	}
	d.loaded = true
	return nil
}

// divert sees to it that packets to Services come to IPVS.
func (d *Dataplane) divert() error {
	if d.diverted {
		return nil
	}
	for _, v6 := range d.cfg.families() {
		if err := diversion(d.cfg, v6).Set(); err != nil {
			return fmt.Errorf("route Service traffic to IPVS: %w", err)
		}
	}
	d.diverted = true
	return nil
}

// take takes a delta into what is wanted, after reading the kernel if that is due, and tells which services it touches.
func (d *Dataplane) take(ctx context.Context, delta model.Delta) (map[*service]bool, error) {
	if delta.Full || !d.loaded {
		d.diverted = false
		if err := errors.Join(d.divert(), d.load(ctx)); err != nil {
			return nil, err
		}
	}
	if delta.Full {
		d.services, d.owners = map[model.PoolID]*service{}, map[model.Key]*service{}
	}
	touched := map[*service]bool{}
	for _, k := range delta.GoneFrontends {
		d.part(k, touched)
	}
	for _, id := range delta.GonePools {
		if s := d.services[serviceID(id)]; s != nil {
			s.pools[id.Scope] = model.Pool{}
			touched[s] = true
		}
	}
	for _, f := range delta.Frontends {
		if d.cfg.serves(f.Key.V6()) {
			d.part(f.Key, touched)
			s := d.service(f.Routes[model.FromOutside].Pool)
			s.fronts[f.Key], d.owners[f.Key] = f, s
			touched[s] = true
		}
	}
	for _, p := range delta.Pools {
		if d.cfg.serves(p.ID.V6) {
			s := d.service(p.ID)
			s.pools[p.ID.Scope] = p
			touched[s] = true
		}
	}
	if delta.Node != nil {
		d.node = *delta.Node
		d.touchNodePorts(touched)
	}
	return touched, nil
}

func (d *Dataplane) part(k model.Key, touched map[*service]bool) {
	if s := d.owners[k]; s != nil {
		delete(s.fronts, k)
		delete(d.owners, k)
		touched[s] = true
	}
}

func (d *Dataplane) service(id model.PoolID) *service {
	id = serviceID(id)
	s := d.services[id]
	if s == nil {
		s = &service{id: id, fronts: map[model.Key]model.Frontend{}, keys: map[kernel.VirtualServer]bool{}}
		d.services[id] = s
	}
	return s
}

// touchNodePorts are those of Services whose clients stick: they have a virtual server for each address.
func (d *Dataplane) touchNodePorts(touched map[*service]bool) {
	for k, s := range d.owners {
		if k.NodePort() && (s.pools[0].Sticky > 0 || s.pools[1].Sticky > 0) {
			touched[s] = true
		}
	}
}

// want says which virtual servers and destinations a service asks for. A server that two services ask for in turn is the last one's.
func (d *Dataplane) want(s *service) {
	now := s.servers(d.cfg, d.node, d.number)
	for k := range s.keys {
		if _, ok := now[k]; !ok {
			delete(s.keys, k)
			if l := d.live[k]; l != nil && l.owner == s {
				l.owner = nil
				d.leave(k, l, server{proto: s.id.Proto})
			}
		}
	}
	for k, srv := range now {
		l := d.live[k]
		if l == nil {
			l = &live{dests: map[netip.AddrPort]time.Time{}}
			d.live[k] = l
		}
		l.owner = s
		s.keys[k] = true
		d.servers.Want(k, srv.how)
		for _, to := range srv.to {
			l.dests[to] = time.Time{}
			d.dests.Want(destination{k, to}, weightOf(srv.weight))
		}
		d.leave(k, l, srv)
	}
	if len(s.fronts) == 0 && len(s.pools[0].Backends) == 0 && len(s.pools[1].Backends) == 0 && d.services[s.id] == s {
		delete(d.services, s.id)
	}
}

// leave lets go of the destinations that a server should not have. UDP has no end that could be waited for: its flows find another
// endpoint at once, unless this one still serves.
func (d *Dataplane) leave(k kernel.VirtualServer, l *live, srv server) {
	stay := map[netip.AddrPort]bool{}
	for _, to := range srv.to {
		stay[to] = true
	}
	for to, since := range l.dests {
		switch {
		case stay[to]:
		case srv.proto == model.UDP && !srv.leave[to], l.owner == nil && !d.claimed(k):
			d.forget(k, l, to)
		default:
			if since.IsZero() {
				l.dests[to] = time.Now()
			}
			d.dests.Want(destination{k, to}, draining)
		}
	}
	d.end(k, l)
}

// claimed tells whether the rules take all new packets for a virtual server. One for an address that no frontend has any more has to end at
// once, with its flows: it would take what is now for somebody else, this machine perhaps.
func (d *Dataplane) claimed(k kernel.VirtualServer) bool {
	if k.Mark != 0 {
		return true
	}
	at := model.Key{IP: k.Addr.Addr(), Port: k.Addr.Port(), Proto: model.Proto(k.Proto)}
	port := at
	port.IP = model.Unspecified(k.V6)
	return d.owners[at] != nil || d.owners[port] != nil && slices.Contains(d.node.Addrs, at.IP) && d.node.TakesNodePort(at.IP)
}

// unclaim ends what drained at addresses that no frontend has any more.
func (d *Dataplane) unclaim(at []kernel.VirtualServer) {
	for _, k := range at {
		if l := d.live[k]; l != nil && l.owner == nil {
			d.leave(k, l, server{})
		}
	}
}

// forget takes out a destination.
func (d *Dataplane) forget(k kernel.VirtualServer, l *live, to netip.AddrPort) {
	delete(l.dests, to)
	d.dests.Unwant(destination{k, to})
}

// end takes out a server that has nothing more to do.
func (d *Dataplane) end(k kernel.VirtualServer, l *live) {
	if l.owner != nil || len(l.dests) > 0 {
		return
	}
	delete(d.live, k)
	d.servers.Unwant(k)
	if n, ok := nftables.NumberOf(k.Mark); ok {
		d.numbers[b2i(k.V6)].free(n)
	}
}

// orphans drain: nobody has asked for them since the kernel was read.
func (d *Dataplane) orphans() {
	for k, l := range d.live {
		if l.owner == nil {
			if how, ok := d.servers.Held(k); ok {
				d.servers.Want(k, how)
			}
			d.leave(k, l, server{})
		}
	}
}

// load takes note of what the kernel holds.
func (d *Dataplane) load(ctx context.Context) error {
	d.loaded = false
	found, err := look(d.conn)
	if err != nil {
		return err
	}
	state, used, err := d.front.DumpAhead(ctx)
	if err != nil {
		return err
	}
	d.live = map[kernel.VirtualServer]*live{}
	d.servers.Loaded(func(yield func(kernel.VirtualServer, kernel.VirtualServerSettings) bool) {
		for k, f := range found {
			if !yield(k, f.how) {
				return
			}
		}
	})
	d.dests.Loaded(func(yield func(destination, weight) bool) {
		for k, f := range found {
			for _, to := range f.dests {
				if !yield(destination{k, to.Addr}, weightOf(to.Weight)) {
					return
				}
			}
		}
	})
	d.numbers = [2]pools{newPools(), newPools()}
	for k, f := range found {
		l := &live{dests: map[netip.AddrPort]time.Time{}}
		for _, to := range f.dests {
			l.dests[to.Addr] = time.Time{}
		}
		d.live[k] = l
		if n, ok := nftables.NumberOf(k.Mark); ok {
			d.numbers[b2i(k.V6)].take(n, model.PoolID{})
		}
	}
	for k, ns := range used.Of {
		about := state.Frontends[k].About
		for scope, n := range ns {
			if n >= 0 && n != byAddress {
				d.numbers[b2i(k.V6())].take(uint32(n), model.PoolID{Service: about.Service, Port: about.Port, Proto: k.Proto, V6: k.V6(), Scope: model.Scope(scope)})
			}
		}
	}
	for _, s := range d.services {
		clear(s.keys)
	}
	return nil
}

func weightOf(w uint32) weight { return weight(w) + 1 }

func (d *Dataplane) number(id model.PoolID) uint32 { return d.numbers[b2i(id.V6)].of(id) }

// numberAt is what the rules ask for.
func (d *Dataplane) numberAt(k model.Key, id model.PoolID) uint32 {
	if s := d.owners[k]; s != nil && atAddress(s.fronts[k], s.pools[id.Scope]) {
		return byAddress
	}
	return d.number(id)
}

// put writes servers and destinations that are to be there, and returns what is to go.
func (d *Dataplane) put() (removal, error) {
	servers, oldServers := d.servers.Changes()
	dests, oldDests := d.dests.Changes()
	var b kernel.IPVSBatch
	for _, r := range servers {
		b.Serve(r.Key, r.Val, !r.Sure || r.Was != kernel.VirtualServerSettings{})
	}
	for _, r := range dests {
		b.Send(r.Key.of, kernel.Destination{Addr: r.Key.to, Weight: uint32(r.Val - 1)}, !r.Sure || r.Was != 0)
	}
	err := d.do(&b, func(i int) {
		if i < len(servers) {
			d.servers.Settled(servers[i].Key)
		} else {
			d.dests.Settled(dests[i-len(servers)].Key)
		}
	})
	return removal{shadow.Keys(oldServers), shadow.Keys(oldDests)}, err
}

// removal is what goes.
type removal struct {
	servers []kernel.VirtualServer
	dests   []destination
}

func (d *Dataplane) drop(r removal) error {
	var b kernel.IPVSBatch
	for _, k := range r.dests {
		b.Unsend(k.of, kernel.Destination{Addr: k.to})
	}
	for _, k := range r.servers {
		b.Unserve(k)
	}
	return d.do(&b, func(i int) {
		if i < len(r.dests) {
			d.dests.Settled(r.dests[i])
		} else {
			d.servers.Settled(r.servers[i-len(r.dests)])
		}
	})
}

// errorsMost is how many refusals are told.
const errorsMost = 5

// do makes changes; one that is refused does not keep the others from being made.
func (d *Dataplane) do(b *kernel.IPVSBatch, settled func(i int)) error {
	var failed []error
	more := 0
	err := d.conn.Do(b, func(i int, err error) {
		switch {
		case err == nil:
			settled(i)
		case len(failed) < errorsMost:
			failed = append(failed, err)
		default:
			more++
		}
	})
	if more > 0 {
		failed = append(failed, fmt.Errorf("and %d more", more))
	}
	if err := errors.Join(append(failed, err)...); err != nil {
		return fmt.Errorf("IPVS: %w", err)
	}
	return nil
}

// Remove takes everything out; see engine.Dataplane.
func (d *Dataplane) Remove(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.loaded, d.diverted = false, false
	d.services, d.owners = map[model.PoolID]*service{}, map[model.Key]*service{}
	failed := d.front.Remove(ctx)
	found, err := look(d.conn)
	failed = errors.Join(failed, err)
	var b kernel.IPVSBatch
	for k := range found {
		b.Unserve(k)
	}
	failed = errors.Join(failed, d.do(&b, func(int) {}))
	for _, v6 := range [...]bool{false, true} {
		if err := diversion(d.cfg, v6).Unset(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("route Service traffic to IPVS no more: %w", err))
		}
	}
	return failed
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
