package resolve

import "fairlead/internal/model"

// topology is what the choice of the cluster pool went by.
type topology string

const (
	byNothing  topology = ""                // every ready endpoint fits
	byNodeHint topology = "node hints"      // hints.forNodes names this node
	byZoneHint topology = "zone hints"      // hints.forZones names this node's zone
	byKey      topology = "topology keys"   // the key of the annotation that won
	byNoKey    topology = "no topology key" // the annotation has keys, and no endpoint fits one
)

// choice is how the endpoints of one port were chosen.
type choice struct {
	by        topology
	key       string // byKey: which
	fading    bool   // the cluster pool took endpoints that terminate, since none is ready
	anyUsable bool   // there is an endpoint somewhere that could be used
	anyLocal  bool   // the local pool is not empty
}

// choose marks which endpoints are in the cluster and in the local pool (kube-proxy's pkg/proxy/topology.go). The two fall
// back on their own to endpoints that terminate but serve.
func (h *here) choose(es []endpoint, keys []string) choice {
	var c choice
	anyReady, localReady := false, false
	for i := range es {
		if e := &es[i]; e.twin == nil {
			c.anyUsable = c.anyUsable || e.usable()
			anyReady = anyReady || e.ready
			localReady = localReady || e.ready && e.local
		}
	}
	can := (*endpoint).fading
	if anyReady {
		can = func(e *endpoint) bool { return e.ready }
	}
	c.by, c.key = h.topology(es, keys, can)
	c.fading = c.anyUsable && !anyReady
	for i := range es {
		e := &es[i]
		if e.twin != nil {
			continue
		}
		e.inCluster = can(e) && h.fits(e, c.by, c.key)
		e.inLocal = e.local && (e.ready || !localReady && e.fading())
		c.anyLocal = c.anyLocal || e.inLocal
	}
	return c
}

// topology decides what the cluster pool goes by. Keys of the Service come before hints; hints are for ready endpoints only.
func (h *here) topology(es []endpoint, keys []string, can func(*endpoint) bool) (topology, string) {
	if len(keys) > 0 {
		for _, key := range keys {
			for i := range es {
				if e := &es[i]; e.twin == nil && can(e) && h.fits(e, byKey, key) {
					return byKey, key
				}
			}
		}
		return byNoKey, ""
	}
	for _, by := range []topology{byNodeHint, byZoneHint} {
		if h.hinted(es, by) {
			return by, ""
		}
	}
	return byNothing, ""
}

// hinted tells whether every ready endpoint has a hint of the sort, and one of them fits.
func (h *here) hinted(es []endpoint, by topology) bool {
	fit := false
	for i := range es {
		e := &es[i]
		if e.twin != nil || !e.ready {
			continue
		}
		if e.site.Value().hint(by) == "" {
			return false
		}
		fit = fit || h.fits(e, by, "")
	}
	return fit
}

// hint is the hint of one sort.
func (s site) hint(by topology) hint {
	if by == byNodeHint {
		return s.forNodes
	}
	return s.forZones
}

func (h *here) fits(e *endpoint, by topology, key string) bool {
	switch by {
	case byNoKey:
		return false
	case byKey:
		return key == keyAny || key == keyHostname && e.local || key == keyZone && h.zone != "" && e.site.Value().zone == h.zone
	case byNodeHint:
		return h.NodeName != "" && e.site.Value().forNodes.has(h.NodeName)
	case byZoneHint:
		return h.zone != "" && e.site.Value().forZones.has(h.zone)
	}
	return true
}

// pool makes the pool of one scope from endpoints that were chosen among.
func pool(id model.PoolID, es []endpoint, p policy) model.Pool {
	chosen := func(e *endpoint) bool {
		if id.Scope == model.Local {
			return e.inLocal
		}
		return e.inCluster
	}
	in, draining := 0, 0
	for i := range es {
		if chosen(&es[i]) {
			in++
		} else if es[i].twin == nil && es[i].serving {
			draining++
		}
	}
	out := model.Pool{ID: id, Sticky: p.sticky}
	if in > 0 {
		out.Backends = make([]model.Backend, 0, in)
	}
	if draining > 0 {
		out.Draining = make([]model.Backend, 0, draining)
	}
	for i := range es {
		b := model.Backend{Addr: es[i].at, Local: es[i].local}
		if chosen(&es[i]) {
			out.Backends = append(out.Backends, b)
		} else if es[i].twin == nil && es[i].serving {
			out.Draining = append(out.Draining, b)
		}
	}
	return out
}
