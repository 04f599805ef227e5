package dptest

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/google/go-cmp/cmp"

	"fairlead/internal/model"
)

// seen is a frontend as far as rules can tell: what each origin meets there. A kernel can't tell the kind, which backends
// drain, which pool a route would lead to when it is empty, nor what would be met if a pool were.
type seen struct {
	Routes [3]meets
	Allow  []netip.Prefix
	Owned  bool
}

type meets struct {
	Verdict  model.Verdict
	Backends []netip.AddrPort
	SNAT     bool
	Sticky   time.Duration
}

// canon reduces a state to what rules tell, on a node: where nothing tells a pod, what pods meet is nowhere.
func canon(s *model.State, n model.Node) map[model.Key]seen {
	out := map[model.Key]seen{}
	for k, f := range s.Frontends {
		c := seen{Owned: f.Owned}
		if f.Allow != nil {
			c.Allow = slices.SortedFunc(slices.Values(f.Allow), func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
		}
		for _, o := range model.Origins {
			nobody := f.Allow != nil && len(f.Allow) == 0
			if !nobody && (o != model.FromPod || n.Detects(k.V6())) {
				c.Routes[o] = met(s, f.Routes[o])
			}
		}
		out[k] = c
	}
	return out
}

func met(s *model.State, r model.Route) meets {
	p := s.Pools[r.Pool]
	if len(p.Backends) == 0 {
		return meets{Verdict: r.Else}
	}
	return meets{model.Forward, addrs(p.Backends), r.SNAT, p.Sticky}
}

func addrs(bs []model.Backend) []netip.AddrPort {
	var out []netip.AddrPort
	for _, b := range bs {
		out = append(out, b.Addr)
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}

// checkDump compares what Dump tells with what should be.
func (h *harness) checkDump() error {
	got, err := h.plane.Dump(context.Background())
	if err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	opts := cmp.Options{cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b })}
	if d := cmp.Diff(canon(h.want, h.want.Node), canon(got, h.want.Node), opts); d != "" {
		return fmt.Errorf("Dump tells other frontends (-want +got):\n%s", d)
	}
	for id, p := range got.Pools {
		if w := h.want.Pools[id]; !slices.Equal(addrs(w.Backends), addrs(p.Backends)) || len(p.Backends) > 0 && w.Sticky != p.Sticky {
			return fmt.Errorf("Dump tells of pool %v with %v, sticky %v; wanted are %v, sticky %v", id, addrs(p.Backends), p.Sticky, addrs(w.Backends), w.Sticky)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got.Checks)) {
		if g, w := got.Checks[name].Port, h.want.Checks[name].Port; g != w {
			return fmt.Errorf("Dump tells of check port %d for %s, wanted is %d", g, name, w)
		}
	}
	return nil
}
