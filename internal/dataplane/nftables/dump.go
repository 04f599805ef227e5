package nftables

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// snapshot is what a Dump has read, and the generation of nf_tables before it: nothing was written since as long as it is
// still that one.
type snapshot struct {
	found      []*held
	generation uint32
}

// generation is the number of the last transaction on nf_tables in this namespace.
func generation(c conn) (uint32, error) {
	m, err := c.Get(nftType(unix.NFT_MSG_GETGEN), unix.AF_UNSPEC, nil)
	if err != nil {
		return 0, err
	}
	for typ, v := range kernel.Attrs(m.Attrs) {
		if typ == unix.NFTA_GEN_ID {
			return kernel.AttrU32(v), nil
		}
	}
	return 0, errors.New("nf_tables generation: not in the answer")
}

// Dump tells what the kernel holds; see engine.Dataplane. It does not tell health-check ports, which no rule has, nor the
// node.
func (d *Dataplane) Dump(ctx context.Context) (*model.State, error) {
	s, _, err := d.dump(ctx)
	return s, err
}

func (d *Dataplane) dump(ctx context.Context) (*model.State, []*held, error) {
	g, genErr := generation(d.conn)
	d.last = snapshot{}
	found, err := d.look(ctx)
	if err != nil {
		return nil, nil, err
	}
	s := model.NewState()
	for _, h := range found {
		h.nouns(s)
	}
	if !d.loaded && genErr == nil { // at the start an Apply comes next
		d.last = snapshot{found, g}
	}
	return s, found, nil
}

// nouns adds what rows mean.
func (h *held) nouns(s *model.State) {
	for k, r := range h.rows {
		about := cutAbout(h.about[k])
		sh := h.shapes[shapeID{h.v6, r.shape}]
		f := model.Frontend{Key: k, About: about, Owned: h.has(setClusterIPs, k.IP)}
		if sh[0].ranges {
			f.Allow = unpackRanges(r.getMore().allowed, h.v6)
		}
		for o, t := range sh {
			id := model.PoolID{Service: about.Service, Port: about.Port, Proto: k.Proto, V6: h.v6}
			if t.local {
				id.Scope = model.Local
			}
			f.Routes[o] = model.Route{SNAT: t.snat, Else: t.verdict}
			if t.verdict == model.Forward {
				f.Routes[o].Pool, f.Routes[o].Else = id, model.Reject
				s.Pools[id] = h.pool(id, r.scopes()[id.Scope].endpoints, t.sticky)
			}
		}
		s.Frontends[k] = f
	}
}

func (h *held) has(s setID, a netip.Addr) bool {
	_, ok := h.facts[fact{s, a}]
	return ok
}

func (h *held) pool(id model.PoolID, packed string, sticky uint32) model.Pool {
	p := model.Pool{ID: id, Sticky: time.Duration(sticky) * time.Second}
	size := backendLen(h.v6)
	for ; len(packed) >= size; packed = packed[size:] {
		a := cutBackend([]byte(packed[:size]), h.v6)
		p.Backends = append(p.Backends, model.Backend{Addr: a, Local: h.has(setHairpin, a.Addr())})
	}
	slices.SortFunc(p.Backends, model.Backend.Compare)
	return p
}

// cutAbout reads a comment: "default/web:http ClusterIP".
func cutAbout(s string) model.About {
	name, kind, _ := strings.Cut(s, " ")
	service, port, _ := strings.Cut(name, ":")
	return model.About{Service: service, Port: port, Kind: model.Kind(kind)}
}
