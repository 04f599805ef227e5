// Package shadow remembers what the kernel may hold, so that a dataplane writes only what differs and never loses or leaks
// a row, whatever fails in between.
//
// The one rule it keeps: what the kernel may hold is recorded before it is written, never after success. A write that
// failed may have taken effect all the same, so its rows are unknown from the moment they are handed out until somebody
// says that they are settled; unknown rows are written again.
package shadow

import (
	"iter"
	"slices"
)

// Row is one row to write.
type Row[K comparable, V any] struct {
	Key  K
	Val  V    // none when it is to be deleted
	Was  V    // what the kernel holds of it now, when Sure; none when it holds nothing
	Sure bool // false after a failed write: it may hold any value, or none
}

// Keys are the keys of rows.
func Keys[K comparable, V any](rows []Row[K, V]) []K {
	out := make([]K, len(rows))
	for i, r := range rows {
		out[i] = r.Key
	}
	return out
}

// Writer writes into the kernel. Puts come before deletes, and both must be idempotent: after an error any of them may or
// may not have taken effect, and all come again.
type Writer[K comparable, V any] interface {
	Write(puts []Row[K, V], deletes []K) error
}

// WriterFunc is a function as a Writer.
type WriterFunc[K comparable, V any] func(puts []Row[K, V], deletes []K) error

// Write calls f.
func (f WriterFunc[K, V]) Write(puts []Row[K, V], deletes []K) error { return f(puts, deletes) }

// Table holds the rows that owners want, and what the kernel may hold of them. It is not safe for concurrent use.
type Table[O, K comparable, V any] struct {
	same   func(a, b V) bool
	trim   func(V) V
	rows   map[K]row[V]
	owners map[O][]K
	queue  []K  // rows that may need a write, in the order of the changes; those no longer queued count for nothing
	queued int  // how many of them are
	swept  bool // whether all rows that nobody wants are in the queue
	keys   []K  // scratch of Set
}

type row[V any] struct {
	want, held V
	refs       uint32 // how often it is wanted
	state      state
	queued     bool
}

type state uint8

const (
	absent   state = iota // not in the kernel
	held                  // in the kernel, with the value held
	putting               // unknown: it may hold the old value, the new, or none
	deleting              // unknown: it may be there yet
)

// New returns an empty table over an empty kernel. same compares values; trim, when not nil, reduces a value to what same
// needs, for rows that are settled (to remember a checksum and not the text, say).
func New[O, K comparable, V any](same func(a, b V) bool, trim func(V) V) *Table[O, K, V] {
	if trim == nil {
		trim = func(v V) V { return v }
	}
	return &Table[O, K, V]{same: same, trim: trim, rows: map[K]row[V]{}, owners: map[O][]K{}, swept: true}
}

// Same is == for New.
func Same[V comparable](a, b V) bool { return a == b }

// Grow makes room for so many rows in a table that has none.
func (t *Table[O, K, V]) Grow(n int) {
	if len(t.rows) == 0 {
		t.rows = make(map[K]row[V], n)
	}
}

// Loaded starts over with what a dump found: the kernel holds these rows, and nobody wants any yet. A Flush after it
// deletes all that was not wanted in between.
func (t *Table[O, K, V]) Loaded(rows iter.Seq2[K, V]) {
	clear(t.rows)
	clear(t.owners)
	t.queue, t.queued, t.swept = nil, 0, false
	for k, v := range rows {
		t.rows[k] = row[V]{held: t.trim(v), state: held}
	}
}

// Set says which rows owner wants, all of them; nil or none releases what it had. Owners may share a row: it stays until the
// last lets go, and the value set last counts.
func (t *Table[O, K, V]) Set(owner O, rows iter.Seq2[K, V]) {
	old := t.owners[owner]
	t.keys = t.keys[:0]
	if rows != nil {
		for k, v := range rows {
			t.keys = append(t.keys, k)
			t.want(k, v)
		}
	}
	for _, k := range old {
		t.release(k)
	}
	if len(t.keys) == 0 {
		delete(t.owners, owner)
		return
	}
	t.owners[owner] = slices.Clone(t.keys)
}

// Want says that a row is wanted for its own sake: it is its own owner, and no list of owners is kept. Unwant lets go of it. A
// row that owners Set is not for these.
func (t *Table[O, K, V]) Want(key K, v V) {
	r := t.rows[key]
	r.want, r.refs = v, 1
	if t.settled(r) {
		r.want = r.held
	}
	t.put(key, r)
}

// Unwant lets go of a row that was wanted for its own sake.
func (t *Table[O, K, V]) Unwant(key K) {
	if t.rows[key].refs > 0 {
		t.release(key)
	}
}

// Ref wants a row once more, for an owner of whom no list is kept: whoever refs must unref as often.
func (t *Table[O, K, V]) Ref(key K, v V) { t.want(key, v) }

// Unref wants it once less.
func (t *Table[O, K, V]) Unref(key K) { t.release(key) }

func (t *Table[O, K, V]) want(k K, v V) {
	r := t.rows[k]
	r.want, r.refs = v, r.refs+1
	if t.settled(r) {
		r.want = r.held
	}
	t.put(k, r)
}

func (t *Table[O, K, V]) release(k K) {
	r := t.rows[k]
	if r.refs--; r.refs == 0 {
		var none V
		r.want = none
	}
	t.put(k, r)
}

// put stores a row and queues it when it may need a write.
func (t *Table[O, K, V]) put(k K, r row[V]) {
	if !r.queued && !t.settled(r) {
		r.queued = true
		t.queue = append(t.queue, k)
		t.queued++
	}
	t.rows[k] = r
}

// drop takes a row out of the queue, and out of the table when nobody wants it and the kernel has it not.
func (t *Table[O, K, V]) drop(k K, r row[V]) {
	if r.queued {
		r.queued = false
		t.queued--
	}
	if t.queued == 0 {
		t.queue = nil
	}
	if r.refs == 0 && r.state == absent {
		delete(t.rows, k)
		return
	}
	t.rows[k] = r
}

// settled tells whether the kernel holds what is wanted, for certain.
func (t *Table[O, K, V]) settled(r row[V]) bool {
	if r.refs == 0 {
		return r.state == absent
	}
	return r.state == held && t.same(r.want, r.held)
}

// Held is what the kernel holds of a row; ok is false when it holds none, or when that is not certain.
func (t *Table[O, K, V]) Held(key K) (v V, ok bool) {
	r := t.rows[key]
	return r.held, r.state == held
}

// Changes lists what must be written, in the order it was asked for (deletes that Loaded brought in, in any order), and
// takes note that from now on the kernel may hold it. What is not Settled comes again. It is for dataplanes that write in
// pieces or that order several tables; the others Flush.
func (t *Table[O, K, V]) Changes() (puts, deletes []Row[K, V]) {
	t.sweep()
	queue := t.takeQueue()
	puts = make([]Row[K, V], 0, len(queue))
	for _, k := range queue {
		r := t.rows[k]
		if t.settled(r) {
			t.drop(k, r)
			continue
		}
		row := Row[K, V]{k, r.want, r.held, r.state == held || r.state == absent}
		if r.refs > 0 {
			puts = append(puts, row)
			r.state = putting
		} else {
			deletes = append(deletes, row)
			r.state = deleting
		}
		r.held = r.want
		t.put(k, r)
	}
	return puts, deletes
}

// takeQueue empties the queue and returns what was in it, each row once.
func (t *Table[O, K, V]) takeQueue() []K {
	queue, n := t.queue, 0
	for _, k := range queue {
		if r := t.rows[k]; r.queued {
			r.queued = false
			t.rows[k] = r
			queue[n] = k
			n++
		}
	}
	t.queue, t.queued = nil, 0
	return queue[:n]
}

// sweep queues the rows that Loaded found and nobody wants.
func (t *Table[O, K, V]) sweep() {
	if t.swept {
		return
	}
	for k, r := range t.rows {
		t.put(k, r)
	}
	t.swept = true
}

// Settled says that the last Changes of key took effect.
func (t *Table[O, K, V]) Settled(key K) {
	r := t.rows[key]
	switch r.state {
	case putting:
		r.state, r.held = held, t.trim(r.held)
	case deleting:
		r.state = absent
	}
	if !t.settled(r) { // wanted otherwise in the meantime
		t.put(key, r)
		return
	}
	if r.refs > 0 {
		r.want = r.held
	}
	t.drop(key, r)
}

// Flush writes all that differs, in one Write, and nothing when nothing does. Its cost is that of the change.
func (t *Table[O, K, V]) Flush(w Writer[K, V]) error {
	puts, deletes := t.Changes()
	if len(puts)+len(deletes) == 0 {
		return nil
	}
	gone := Keys(deletes)
	if err := w.Write(puts, gone); err != nil {
		return err
	}
	for _, p := range puts {
		t.Settled(p.Key)
	}
	for _, k := range gone {
		t.Settled(k)
	}
	return nil
}
