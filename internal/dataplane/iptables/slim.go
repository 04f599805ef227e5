package iptables

import (
	"slices"

	"fairlead/internal/model"
)

// Slim gives back room that was needed when there were more Services.
func (d *Dataplane) Slim() {
	d.state.Slim()
	d.table.Slim()
	d.services, d.owned, d.sizes = model.Slim(d.services), model.Slim(d.owned), model.Slim(d.sizes)
	for _, f := range d.trees {
		for _, t := range f.all() {
			t.entries, t.dirty = slices.Clone(t.entries), model.Slim(t.dirty)
		}
	}
}
