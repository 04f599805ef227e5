package resolve

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/model"
)

// claim is a Service's wish for a key.
type claim struct {
	by   *service
	kind kind
}

// beats settles who gets a key: a ClusterIP before all others, then the older Service, then by name. It never depends on
// the order in which Services were heard of, so that all nodes agree.
func (a claim) beats(b claim) bool {
	return cmp.Or(
		cmp.Compare(min(a.kind, kindClusterIP+1), min(b.kind, kindClusterIP+1)),
		compareSeniority(a.by, b.by),
	) < 0
}

func compareSeniority(a, b *service) int {
	return cmp.Or(cmp.Compare(a.facts.created, b.facts.created), compareNames(a, b))
}

func compareNames(a, b *service) int {
	aspace, aname, _ := strings.Cut(a.name, "/")
	bspace, bname, _ := strings.Cut(b.name, "/")
	return cmp.Or(cmp.Compare(aspace, bspace), cmp.Compare(aname, bname))
}

// index lists who has something to do with a key, in no order. Nearly every key concerns one; only for the others is there a
// list, which halves the memory of a large cluster.
type index[K, V comparable] struct {
	first map[K]V
	more  map[K][]V
}

func newIndex[K, V comparable]() index[K, V] { return index[K, V]{map[K]V{}, map[K][]V{}} }

func (x index[K, V]) add(k K, v V) {
	first, ok := x.first[k]
	switch {
	case !ok:
		x.first[k] = v
	case first != v && !slices.Contains(x.more[k], v):
		x.more[k] = append(x.more[k], v)
	}
}

func (x index[K, V]) remove(k K, v V) {
	first, ok := x.first[k]
	if !ok {
		return
	}
	rest := x.more[k]
	last := len(rest) - 1
	if first == v {
		if last < 0 {
			delete(x.first, k)
			return
		}
		x.first[k] = rest[last]
	} else if i := slices.Index(rest, v); i < 0 {
		return
	} else {
		rest[i] = rest[last]
	}
	if last == 0 {
		delete(x.more, k)
		return
	}
	clear(rest[last:]) // let go of what it points to
	x.more[k] = rest[:last]
}

// of lists all that were added for the key.
func (x index[K, V]) of(k K) iter.Seq[V] {
	return func(yield func(V) bool) {
		first, ok := x.first[k]
		if !ok || !yield(first) {
			return
		}
		for _, v := range x.more[k] {
			if !yield(v) {
				return
			}
		}
	}
}

// claims indexes what Services wish for and what nodes have, so that a change finds whom it concerns.
type claims struct {
	keys      index[model.Key, claim]
	clusterIP index[netip.Addr, *service]
	external  index[netip.Addr, *service] // who wishes for it as an external or load-balancer address
	health    index[uint16, *service]     // health-check node ports
	nodes     index[netip.Addr, string]   // in words, see nodeOf
}

func newClaims() claims {
	return claims{
		keys:      newIndex[model.Key, claim](),
		clusterIP: newIndex[netip.Addr, *service](),
		external:  newIndex[netip.Addr, *service](),
		health:    newIndex[uint16, *service](),
		nodes:     newIndex[netip.Addr, string](),
	}
}

// enter adds or removes what s wishes for, and calls touched for the other Services that this concerns.
func (c *claims) enter(s *service, wishes []wish, health uint16, remove bool, touched func(*service)) {
	for _, w := range wishes {
		put(c.keys, w.key, claim{s, w.kind}, remove)
		for other := range c.keys.of(w.key) {
			touched(other.by)
		}
		switch {
		case w.kind == kindClusterIP:
			put(c.clusterIP, w.key.IP, s, remove)
			each(c.external.of(w.key.IP), touched)
		case w.kind.external():
			put(c.external, w.key.IP, s, remove)
		case w.key.Proto == model.TCP:
			each(c.health.of(w.key.Port), touched)
		}
	}
	if health != 0 {
		put(c.health, health, s, remove)
		each(c.health.of(health), touched)
	}
}

func put[K, V comparable](x index[K, V], k K, v V, remove bool) {
	if remove {
		x.remove(k, v)
	} else {
		x.add(k, v)
	}
}

func each(ss iter.Seq[*service], f func(*service)) {
	for s := range ss {
		f(s)
	}
}

func (c *claims) clusterIPOf(ip netip.Addr, s *service) (string, bool) {
	owner := ""
	for o := range c.clusterIP.of(ip) {
		if o != s && (owner == "" || o.name < owner) {
			owner = o.name
		}
	}
	return owner, owner != ""
}

func (c *claims) nodeOf(ip netip.Addr) (string, bool) {
	name := ""
	for n := range c.nodes.of(ip) {
		if name == "" || n < name {
			name = n
		}
	}
	return name, name != ""
}

// winner is nil if nobody wishes for the key.
func (c *claims) winner(k model.Key) *service {
	var best claim
	for o := range c.keys.of(k) {
		if best.by == nil || o.beats(best) {
			best = o
		}
	}
	return best.by
}

// healthLoser: a node port beats a health-check node port, since traffic comes before questions about it; of two
// health-check node ports the older Service has it.
func (c *claims) healthLoser(port uint16, s *service) (string, bool) {
	for _, v6 := range [...]bool{false, true} {
		if k := (model.Key{IP: model.Unspecified(v6), Port: port, Proto: model.TCP}); c.winner(k) != nil {
			return "the node port of " + c.winner(k).name, true
		}
	}
	best := s
	for o := range c.health.of(port) {
		if compareSeniority(o, best) < 0 {
			best = o
		}
	}
	return best.name, best != s
}
