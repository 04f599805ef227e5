package ipvs

import "fairlead/internal/model"

// pools are the numbers of one family's pools. A pool keeps its number while the kernel has a virtual server for it, over restarts too.
type pools struct {
	by   map[model.PoolID]uint32
	used map[uint32]model.PoolID // the zero PoolID: by one that nobody knows any more
	next uint32
}

func newPools() pools {
	return pools{by: map[model.PoolID]uint32{}, used: map[uint32]model.PoolID{}, next: 1}
}

// take says that a pool has a number.
func (p *pools) take(n uint32, id model.PoolID) {
	if id != (model.PoolID{}) {
		p.by[id] = n
	}
	p.used[n] = id
	p.next = max(p.next, n+1)
}

// of is the number of a pool, which it gets when it has none.
func (p *pools) of(id model.PoolID) uint32 {
	if n, ok := p.by[id]; ok {
		return n
	}
	for range uint32(numbers) {
		n := p.next
		if p.next++; n >= numbers {
			p.next = 1
			continue
		}
		if _, taken := p.used[n]; !taken {
			p.by[id], p.used[n] = n, id
			return n
		}
	}
	return byAddress // a million pools are more than any node has
}

func (p *pools) free(n uint32) {
	if id, ok := p.used[n]; ok {
		delete(p.used, n)
		if p.by[id] == n {
			delete(p.by, id)
		}
	}
}
