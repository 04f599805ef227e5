package ipvs

import (
	"net/netip"
	"time"

	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// service is one Service port in one family: its frontends and its pools.
type service struct {
	id     model.PoolID // of its cluster pool
	fronts map[model.Key]model.Frontend
	pools  [2]model.Pool // by scope
	keys   map[kernel.VirtualServer]bool
}

func serviceID(id model.PoolID) model.PoolID {
	id.Scope = model.Cluster
	return id
}

// ovfWeight is the number of connections that ovf gives one endpoint before it turns to the next. With 1, as elsewhere, it would refuse all
// others when each endpoint has one.
const ovfWeight = 1 << 15

// server is a virtual server as it should be.
type server struct {
	how    kernel.VirtualServerSettings
	weight uint32
	to     []netip.AddrPort // take new flows
	proto  model.Proto
	leave  map[netip.AddrPort]bool // no new flows, and those that are may go on whatever the protocol
}

// byAddress is the number in place of a pool's where a virtual server for the frontend's own address takes the packet: none has this mark.
const (
	byAddress = 1<<nftables.NumberBits - 1
	trial     = byAddress - 1 // tries out a scheduler
	numbers   = trial         // those of pools are below
)

// ours marks virtual servers that have no mark of ours. No scheduler asks for this flag.
const ours = kernel.IPVSSched3

// atAddress tells whether a frontend's packets for a pool go to a virtual server for its address. It has to be so where clients stick: with
// a mark, persistent virtual servers do not translate the port (ip_vs_sched_persist compares it with the server's own, which is 0 then). An
// address can have one pool: what outside clients meet. Others meet a server with a mark, that chooses by a hash of the client.
func atAddress(f model.Frontend, p model.Pool) bool {
	return p.Sticky > 0 && f.Routes[model.FromOutside].Pool.Scope == p.ID.Scope
}

// servers are what a service needs.
func (s *service) servers(cfg Config, n model.Node, number func(model.PoolID) uint32) map[kernel.VirtualServer]server {
	out := map[kernel.VirtualServer]server{}
	for _, p := range s.pools {
		if len(p.Backends) == 0 {
			continue
		}
		marked := false
		for _, f := range s.fronts {
			for _, o := range model.Origins {
				switch {
				case f.Routes[o].Pool != p.ID:
				case !atAddress(f, p):
					marked = true
				default:
					for _, a := range addresses(f.Key, n) {
						out[a] = s.server(cfg, p, false)
					}
				}
			}
		}
		if marked {
			out[markOf(number(p.ID), p.ID.V6)] = s.server(cfg, p, true)
		}
	}
	return out
}

func markOf(number uint32, v6 bool) kernel.VirtualServer {
	return kernel.VirtualServer{V6: v6, Mark: nftables.MarkOf(number)}
}

// addresses are those of a frontend; a NodePort has many.
func addresses(k model.Key, n model.Node) []kernel.VirtualServer {
	at := func(a netip.Addr) kernel.VirtualServer {
		return kernel.VirtualServer{V6: k.V6(), Addr: netip.AddrPortFrom(a, k.Port), Proto: uint8(k.Proto)}
	}
	if !k.NodePort() {
		return []kernel.VirtualServer{at(k.IP)}
	}
	var out []kernel.VirtualServer
	for _, a := range n.Addrs {
		if a.Is6() == k.V6() && !a.IsLoopback() && n.TakesNodePort(a) {
			out = append(out, at(a))
		}
	}
	return out
}

func (s *service) server(cfg Config, p model.Pool, marked bool) server {
	out := server{how: cfg.settings(p.Sticky, marked), weight: 1, proto: p.ID.Proto, leave: map[netip.AddrPort]bool{}}
	if out.how.Scheduler == "ovf" {
		out.weight = ovfWeight
	}
	for _, b := range p.Backends {
		if b.Addr.Addr().Is6() == p.ID.V6 {
			out.to = append(out.to, b.Addr)
		}
	}
	for _, b := range p.Draining {
		out.leave[b.Addr] = true
	}
	return out
}

// settings are how a pool is served.
func (c Config) settings(sticky time.Duration, marked bool) kernel.VirtualServerSettings {
	how := kernel.VirtualServerSettings{Scheduler: c.Scheduler, Flags: ours, Timeout: seconds(sticky)} // without persistence just a note
	switch {
	case sticky > 0 && marked:
		how.Scheduler = "mh"
	case sticky > 0:
		how.Flags |= kernel.IPVSPersistent
	case c.Scheduler == "mh":
		how.Flags |= kernel.IPVSSched2 // the client's port counts too (IP_VS_SVC_F_SCHED_MH_PORT), as in kube-proxy
	}
	return how
}

func seconds(d time.Duration) uint32 { return uint32((d + time.Second - 1) / time.Second) }
