package resolve

import "fairlead/internal/model"

// Slim gives back room that was needed when there were more Services.
func (r *Resolver) Slim() {
	r.services, r.slices, r.nodes = model.Slim(r.services), model.Slim(r.slices), model.Slim(r.nodes)
	r.cidrs = model.Slim(r.cidrs)
	r.since = model.Slim(r.since)
	c := &r.claims
	c.keys, c.clusterIP, c.external, c.health, c.nodes = c.keys.slim(), c.clusterIP.slim(), c.external.slim(), c.health.slim(), c.nodes.slim()
	r.board.held, r.board.fresh = model.Slim(r.board.held), model.Slim(r.board.fresh)
}

func (x index[K, V]) slim() index[K, V] { return index[K, V]{model.Slim(x.first), model.Slim(x.more)} }
