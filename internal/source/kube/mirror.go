package kube

import (
	"fmt"
	"hash/maphash"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// object is what a mirror can hold: a Kubernetes object that can write itself as protobuf.
type object[T any] interface {
	*T
	metav1.Object
	Size() int
	MarshalToSizedBuffer([]byte) (int, error)
}

// mirror is the store that a reflector fills. It implements [cache.TransformingStore], so that objects are trimmed as they
// stream in, and [cache.ReflectorBookmarkStore]. Only the goroutine of its reflector calls it.
type mirror[T any, P object[T]] struct {
	track  *tracker
	listed func() // called once, after the first full list
	trim   func(P)
	tell   func(types.NamespacedName, P)

	seen map[types.NamespacedName]uint64 // fingerprints of what has been told
	seed maphash.Seed
	buf  []byte
}

func newMirror[T any, P object[T]](track *tracker, listed func(), trim func(P), tell func(types.NamespacedName, P)) *mirror[T, P] {
	return &mirror[T, P]{track: track, listed: listed, trim: trim, tell: tell, seen: map[types.NamespacedName]uint64{}, seed: maphash.MakeSeed()}
}

var _ cache.TransformingStore = (*mirror[nothing, *nothing])(nil)
var _ cache.ReflectorBookmarkStore = (*mirror[nothing, *nothing])(nil)

type nothing struct{ metav1.ObjectMeta }

// Add takes a new object.
func (m *mirror[T, P]) Add(obj any) error { return m.put(obj) }

// Update takes an object that changed.
func (m *mirror[T, P]) Update(obj any) error { return m.put(obj) }

// Delete takes an object that is gone.
func (m *mirror[T, P]) Delete(obj any) error {
	p, ok := obj.(P)
	if !ok {
		return fmt.Errorf("delete %s: unexpected %T", m.track.resource, obj)
	}
	m.gone(keyOf(p))
	m.track.heard(len(m.seen))
	return nil
}

// Replace takes everything that exists. What is not in the list is gone.
func (m *mirror[T, P]) Replace(list []any, _ string) error {
	there := make(map[types.NamespacedName]bool, len(list))
	for _, obj := range list {
		p, ok := obj.(P)
		if !ok {
			return fmt.Errorf("list %s: unexpected %T", m.track.resource, obj)
		}
		there[keyOf(p)] = true
	}
	for key := range m.seen {
		if !there[key] {
			m.gone(key)
		}
	}
	for _, obj := range list {
		if err := m.put(obj); err != nil {
			return err
		}
	}
	if m.track.listed(len(m.seen)) {
		m.listed()
	}
	return nil
}

// Bookmark is the word of the API that there was nothing else until now.
func (m *mirror[T, P]) Bookmark(string) error { m.track.heard(len(m.seen)); return nil }

// Resync does nothing: the engine has a resync of its own.
func (m *mirror[T, P]) Resync() error { return nil }

// Transformer trims.
func (m *mirror[T, P]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		if p, ok := obj.(P); ok {
			m.trim(p)
		}
		return obj, nil
	}
}

// put tells of an object, unless nothing that is left of it after trimming differs from what was told before.
func (m *mirror[T, P]) put(obj any) error {
	p, ok := obj.(P)
	if !ok {
		return fmt.Errorf("put %s: unexpected %T", m.track.resource, obj)
	}
	m.trim(p)
	key, print := keyOf(p), m.fingerprint(p)
	if old, ok := m.seen[key]; !ok || old != print {
		m.seen[key] = print
		m.tell(key, p)
	}
	m.track.heard(len(m.seen))
	return nil
}

func (m *mirror[T, P]) gone(key types.NamespacedName) {
	if _, ok := m.seen[key]; ok {
		delete(m.seen, key)
		m.tell(key, nil)
	}
}

// fingerprint is a hash of the object's protobuf form, in which maps are sorted. Two versions of one object that differ
// have the same one once in 2^64.
func (m *mirror[T, P]) fingerprint(p P) uint64 {
	n := p.Size()
	if n > len(m.buf) {
		m.buf = make([]byte, 2*n)
	}
	if _, err := p.MarshalToSizedBuffer(m.buf[:n]); err != nil {
		return maphash.Comparable(m.seed, err.Error()+p.GetResourceVersion()) // can't be compared: always news
	}
	return maphash.Bytes(m.seed, m.buf[:n])
}

func keyOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}
