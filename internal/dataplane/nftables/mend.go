package nftables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"sync"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// damages are what Watch noticed since the kernel was read, or mended, last. Elements alone can be mended one by one.
type damages struct {
	mu       sync.Mutex
	elements map[spot]element // as they are now; one without a key is gone
	more     bool             // something else happened, or too much
}

// spot is where an element is.
type spot struct {
	v6  bool
	set setID
	key string
	end string // of an interval
}

// mendMost is the number of elements above which reading everything again is not dearer.
const mendMost = 1000

var errMoreDamage = errors.New("the damage is more than a few elements")

// add takes note of an event; nil, or an empty one, is one that nobody saw. It runs on the watch's goroutine.
func (d *damages) add(m *kernel.NFMessage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m == nil || m.Type != nftType(unix.NFT_MSG_NEWSETELEM) && m.Type != nftType(unix.NFT_MSG_DELSETELEM) {
		d.more = true
		return
	}
	_, name := cutNames(m.Attrs, unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET)
	set, _ := setNamed(name)
	if d.elements == nil {
		d.elements = map[spot]element{}
	}
	cutElements(m.Attrs, func(e element) {
		d.more = d.more || e.anything
		at := spot{m.Family == unix.NFPROTO_IPV6, set, string(e.key), string(e.end)}
		if m.Type == nftType(unix.NFT_MSG_DELSETELEM) {
			e = element{}
		}
		e.key, e.value = bytes.Clone(e.key), bytes.Clone(e.value)
		d.elements[at] = e
	})
	d.more = d.more || len(d.elements) > mendMost
}

// take gives what was noticed, and forgets it.
func (d *damages) take() (map[spot]element, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	elements, more := d.elements, d.more
	d.elements, d.more = nil, false
	return elements, more
}

// Mend puts right the elements that somebody else took out, changed or added; see engine.Mender. Its cost is that of the damage.
func (d *Dataplane) Mend() ([]model.Key, error) {
	elements, more := d.damage.take()
	if more || !d.loaded {
		d.damage.add(nil)
		return nil, errMoreDamage
	}
	w := d.writer()
	keys := map[model.Key]bool{}
	for at, is := range elements {
		if want := d.wanted(at); !alike(is, want) {
			if is.key != nil {
				w.drop(at.set, at.v6, []byte(at.key), bytesOrNil(at.end))
			}
			if want.key != nil {
				w.put(at.set, at.v6, want)
			}
		}
		if slices.Contains(rowSets[:], at.set) {
			keys[cutKey([]byte(at.key), at.v6)] = true
		}
	}
	if err := w.commit(); err != nil {
		d.damage.add(nil)
		return nil, err
	}
	out := make([]model.Key, 0, len(keys))
	for k := range keys {
		out = append(out, k)
	}
	return out, nil
}

func bytesOrNil(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

func alike(a, b element) bool {
	sameVerdict := a.verdict == b.verdict || a.verdict != nil && b.verdict != nil && *a.verdict == *b.verdict
	return (a.key == nil) == (b.key == nil) && bytes.Equal(a.value, b.value) && sameVerdict && a.comment == b.comment
}

// wanted is the element that should be at a place, by what the kernel was last made to hold; one without a key is none.
func (d *Dataplane) wanted(at spot) element {
	key := []byte(at.key)
	if len(key) != sizeOf(specs[at.set].key, at.v6) {
		return element{}
	}
	switch {
	case at.set.verdicts():
		if s, ok := d.shapes.Held(shapeID{at.v6, binary.NativeEndian.Uint32(key)}); ok {
			t := s[at.set-setFromPod]
			return element{key: key, verdict: verdictOf(t), comment: t.says()}
		}
	case slices.Contains(rowSets[:], at.set):
		k := cutKey(key, at.v6)
		r, ok := d.rows.Held(k)
		if f := d.fronts[k]; ok && f != nil {
			return r.element(at, f)
		}
	default:
		f := fact{at.set, cutAddr(key[:addrLen(at.v6)])}
		if _, ok := d.facts.Held(f); ok && bytes.Equal(key, f.key()) {
			return element{key: key}
		}
	}
	return element{}
}

// element is the one of a row that should be at a place.
func (r row) element(at spot, f *front) element {
	key, size := []byte(at.key), backendLen(at.v6)
	rest := key[keyLen(at.v6):]
	switch at.set {
	case setServices:
		return element{key: key, value: appendNumber(nil, r.shape), comment: string(f.about())}
	case setAllowed:
		n := addrLen(at.v6)
		allowed := r.getMore().allowed
		for i := range len(allowed) / (2 * n) {
			ends := part(allowed, i, 2*n)
			if end := at.key[:len(key)-n] + ends[n:]; ends[:n] == string(rest) && (at.end == end || at.end == "" && ends[:n] == ends[n:]) {
				return element{key: key, end: []byte(end)}
			}
		}
		return element{}
	}
	number := int(binary.NativeEndian.Uint32(rest))
	for scope, s := range r.scopes() {
		value := ""
		switch at.set {
		case setEndpoints + setID(scope):
			value = part(s.endpoints, number, size)
		case setStickyNumbers + setID(scope):
			value = part(s.numbers, number, numberLen)
		case setSticky + setID(scope):
			for i := range len(s.numbers) / numberLen {
				if part(s.numbers, i, numberLen) == string(rest) {
					value = part(s.endpoints, i, size)
				}
			}
		}
		if value != "" {
			return element{key: key, value: []byte(value)}
		}
	}
	return element{}
}
