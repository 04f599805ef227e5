package nftables

import (
	"iter"
	"net/netip"
	"slices"
	"time"
	"unique"

	"fairlead/internal/model"
)

// row is all that the kernel holds of one frontend, apart from its key. Endpoints and ranges are packed as in elements:
// that is small, and == compares them.
type row struct {
	shape     uint32
	about     uint32              // checksum of the comment
	endpoints string              // each of backendLen bytes, by the number by which they are drawn
	more      unique.Handle[more] // the zero Handle is the zero more: most frontends have none
}

// more is what few frontends have.
type more struct {
	local   string    // endpoints of this node, as endpoints
	numbers [2]string // by scope, when clients stick to them: each one's own number, of numberLen bytes
	allowed string    // ranges, each the bytes of a first and a last address
}

func (r *row) setMore(m more) {
	if m != (more{}) {
		r.more = unique.Make(m)
	}
}

func (r row) getMore() more {
	if r.more == (unique.Handle[more]{}) {
		return more{}
	}
	return r.more.Value()
}

// numberLen is the length of a number.
const numberLen = 4

// scopes are the endpoints and own numbers of a row, by scope.
func (r row) scopes() [2]scoped {
	m := r.getMore()
	return [2]scoped{{r.endpoints, m.numbers[0]}, {m.local, m.numbers[1]}}
}

type scoped struct{ endpoints, numbers string }

// members are own numbers, each with its endpoint.
func (s scoped) members(size int) string {
	if s.numbers == "" {
		return ""
	}
	var out []byte
	for n := 0; n*numberLen < len(s.numbers); n++ {
		out = append(append(out, part(s.numbers, n, numberLen)...), part(s.endpoints, n, size)...)
	}
	return string(out)
}

// service is one Service port in one family: its frontends and its pools.
type service struct {
	id     model.PoolID // see serviceID
	fronts []*front
	pools  [2]pool // by scope
}

// front is a frontend, reduced to what its elements are made of.
type front struct {
	key     model.Key
	routes  [3]route
	allow   []netip.Prefix // nil is everyone
	owned   bool
	kind    model.Kind
	service *service
}

type route struct {
	scope model.Scope
	snat  bool
	or    model.Verdict
}

type pool struct {
	slots  string // endpoints, packed; those who stay keep their numbers
	here   string // the addresses of those on this node, packed
	sticky uint32 // seconds
}

// serviceID is a pool's without scope.
func serviceID(id model.PoolID) model.PoolID {
	id.Scope = model.Cluster
	return id
}

func newFront(f model.Frontend) *front {
	out := &front{key: f.Key, allow: f.Allow, owned: f.Owned, kind: f.About.Kind}
	for o, r := range f.Routes {
		out.routes[o] = route{r.Pool.Scope, r.SNAT, r.Else}
	}
	return out
}

// aboutMost is the longest comment that fits into an element's user data (NFT_USERDATA_MAXLEN, less type, length and NUL).
const aboutMost = 256 - 3

// about is the comment of a frontend: "default/web:http ClusterIP". A name that is too long, which Kubernetes does not allow,
// is cut.
func (f *front) about() []byte {
	b := append(make([]byte, 0, 128), f.service.id.Service...)
	if f.service.id.Port != "" {
		b = append(append(b, ':'), f.service.id.Port...)
	}
	b = append(append(b, ' '), f.kind...)
	return b[:min(len(b), aboutMost)]
}

// checksum is FNV-1a, of 32 bits.
func checksum(b []byte) uint32 {
	h := uint32(2166136261)
	for _, c := range b {
		h = (h ^ uint32(c)) * 16777619
	}
	return h
}

// shape is what each origin meets.
func (f *front) shape() shape {
	var out shape
	for o, r := range f.routes {
		t := target{verdict: r.or, nodePort: f.key.NodePort(), ranges: f.allow != nil}
		if p := f.service.pools[r.scope]; p.slots != "" {
			t.verdict, t.local, t.snat, t.sticky = model.Forward, r.scope == model.Local, r.snat, p.sticky
			t.n = len(p.slots) / backendLen(f.key.V6())
		}
		if t.verdict == model.Pass {
			t.verdict = model.Reject // an empty pool has no other meaning; no kernel should be told nonsense
		}
		out[o] = t.simple()
	}
	return out
}

// uses tells how many endpoints of a scope a shape leads to, and whether clients stick to them.
func (s shape) uses(scope int) (n int, sticky bool) {
	for _, t := range s {
		if t.verdict == model.Forward && b2i(t.local) == scope {
			n, sticky = max(n, t.n), sticky || t.sticky > 0
		}
	}
	return n, sticky
}

// row renders the frontend, its shape having got a number. own gives endpoints their own numbers.
func (f *front) row(s shape, number uint32, own func(endpoints string, size int) string) row {
	r, m := row{shape: number, about: checksum(f.about())}, more{allowed: packRanges(f.allow)}
	for scope, p := range f.service.pools {
		n, sticky := s.uses(scope)
		if n == 0 {
			continue
		}
		if scope == int(model.Local) {
			m.local = p.slots
		} else {
			r.endpoints = p.slots
		}
		if sticky {
			m.numbers[scope] = own(p.slots, backendLen(f.key.V6()))
		}
	}
	r.setMore(m)
	return r
}

func seconds(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32((d + time.Second - 1) / time.Second)
}

// hairpins are the pods of this node among a pool's endpoints: they may be their own clients.
func (p pool) hairpins(v6 bool) iter.Seq[fact] {
	n := addrLen(v6)
	return func(yield func(fact) bool) {
		for here := p.here; len(here) >= n; here = here[n:] {
			if !yield(fact{setHairpin, cutAddr([]byte(here[:n]))}) {
				return
			}
		}
	}
}

func packHere(bs []model.Backend, v6 bool) string {
	var out []byte
	for _, b := range bs {
		if b.Local && b.Addr.Addr().Is6() == v6 {
			out = appendAddr(out, b.Addr.Addr())
		}
	}
	return string(out)
}

// owns is the address that a frontend has for itself.
func (f *front) owns() iter.Seq[fact] {
	return func(yield func(fact) bool) {
		if f.owned {
			yield(fact{setClusterIPs, f.key.IP})
		}
	}
}

// pack packs the backends of a family, in their order.
func pack(bs []model.Backend, v6 bool) string {
	out := make([]byte, 0, backendLen(v6)*len(bs))
	for _, b := range bs {
		if b.Addr.Addr().Is6() == v6 {
			out = appendBackend(out, b.Addr)
		}
	}
	return string(out)
}

// arrange gives wanted endpoints numbers: those who had one below their count keep it, the others fill the gaps. So one
// endpoint that comes is one number, and one that goes is at most two. All is packed, size bytes each.
func arrange(had, want string, size int) string {
	if had == "" || had == want {
		return want
	}
	count := len(want) / size
	numbers := make(map[string]int, count)
	for i := 0; i < count && (i+1)*size <= len(had); i++ {
		numbers[had[i*size:(i+1)*size]] = i
	}
	out, taken := make([]byte, len(want)), make([]bool, count)
	var rest []string
	for i := range count {
		packed := want[i*size : (i+1)*size]
		if n, ok := numbers[packed]; ok {
			copy(out[n*size:], packed)
			taken[n] = true
		} else {
			rest = append(rest, packed)
		}
	}
	for n := 0; len(rest) > 0; n++ {
		if !taken[n] {
			copy(out[n*size:], rest[0])
			rest = rest[1:]
		}
	}
	return string(out)
}

// part is the n-th of packed things, or nothing.
func part(s string, n, size int) string {
	if (n+1)*size > len(s) {
		return ""
	}
	return s[n*size : (n+1)*size]
}

// packRanges packs prefixes that overlap nowhere: the kernel takes no intervals that do.
func packRanges(ps []netip.Prefix) string {
	if len(ps) == 0 {
		return ""
	}
	var out []byte
	var last netip.Prefix
	sorted := slices.SortedFunc(slices.Values(ps), func(a, b netip.Prefix) int {
		if c := a.Masked().Addr().Compare(b.Masked().Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	for _, p := range sorted {
		if p = p.Masked(); last.IsValid() && last.Overlaps(p) {
			continue // within the one before
		}
		last = p
		first := appendAddr(nil, p.Addr())
		out = append(append(out, first...), lastOf(first, p.Bits())...)
	}
	return string(out)
}

// lastOf is the last address of a prefix.
func lastOf(first []byte, bits int) []byte {
	out := slices.Clone(first)
	for i := bits; i < 8*len(out); i++ {
		out[i/8] |= 0x80 >> (i % 8)
	}
	return out
}

// unpackRanges is the way back. A range that is no prefix was not made by us.
func unpackRanges(s string, v6 bool) []netip.Prefix {
	out := []netip.Prefix{}
	n := addrLen(v6)
	for ; len(s) >= 2*n; s = s[2*n:] {
		first, last := s[:n], s[n:2*n]
		bits := 0
		for bits < 8*n && (first[bits/8]^last[bits/8])&(0x80>>(bits%8)) == 0 {
			bits++
		}
		out = append(out, netip.PrefixFrom(cutAddr([]byte(first)), bits))
	}
	return out
}
