package kube

import (
	"fmt"
	"hash/maphash"
	"strings"

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

// mirror is the store that a reflector fills. It implements [cache.TransformingStore], so that objects are told as they
// stream in, and [cache.ReflectorBookmarkStore]. Only the goroutine of its reflector calls it.
type mirror[T any, P object[T]] struct {
	track  *tracker
	listed func() // called once, after the first full list
	trim   func(P)
	tell   func(types.NamespacedName, P)

	complete bool // there was a full list

	seen map[string]uint64 // by namespace/name: fingerprints of what has been told
	seed maphash.Seed
	buf  []byte
}

func newMirror[T any, P object[T]](track *tracker, listed func(), trim func(P), tell func(types.NamespacedName, P)) *mirror[T, P] {
	return &mirror[T, P]{track: track, listed: listed, trim: trim, tell: tell, seen: map[string]uint64{}, seed: maphash.MakeSeed()}
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
	there := make(map[string]bool, len(list))
	for _, obj := range list {
		switch o := obj.(type) {
		case string: // told already; see Transformer
			there[o] = true
		case P:
			there[keyOf(o)] = true
		default:
			return fmt.Errorf("list %s: unexpected %T", m.track.resource, obj)
		}
	}
	for key := range m.seen {
		if !there[key] {
			m.gone(key)
		}
	}
	for _, obj := range list {
		if _, told := obj.(string); told {
			continue
		}
		if err := m.put(obj); err != nil {
			return err
		}
	}
	m.complete = true
	if m.track.listed(len(m.seen)) {
		m.listed()
	}
	return nil
}

// none takes note that the API has nothing of the kind, for us at least. It stands for a list.
func (m *mirror[T, P]) none(why error) {
	for key := range m.seen {
		m.gone(key)
	}
	if m.track.unserved(why) {
		m.listed()
	}
}

// Bookmark is the word of the API that there was nothing else until now.
func (m *mirror[T, P]) Bookmark(string) error { m.track.heard(len(m.seen)); return nil }

// Resync does nothing: the engine has a resync of its own.
func (m *mirror[T, P]) Resync() error { return nil }

// Transformer looks at the objects of a streamed list (KEP-3157) as they come, and leaves the names alone of those that need
// not wait for the end of the list: held together, the objects of a large cluster would be most of what the process ever
// needs. What is told already, is not held; and of the first list all is told as it comes, since nobody acts upon it before it
// is complete. News of a later list wait, so that what is gone is told before what takes its place.
func (m *mirror[T, P]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) {
		p, ok := obj.(P)
		if !ok {
			return obj, nil
		}
		if l := m.look(p); !l.news || !m.complete {
			m.take(p, l)
			return l.key, nil
		}
		return obj, nil
	}
}

func (m *mirror[T, P]) put(obj any) error {
	p, ok := obj.(P)
	if !ok {
		return fmt.Errorf("put %s: unexpected %T", m.track.resource, obj)
	}
	m.take(p, m.look(p))
	return nil
}

// looked is what a look at an object has found.
type looked struct {
	key   string
	print uint64
	news  bool // something that is left of it after trimming differs from what was told before
}

func (m *mirror[T, P]) look(p P) looked {
	m.trim(p)
	l := looked{key: keyOf(p), print: m.fingerprint(p)}
	old, ok := m.seen[l.key]
	l.news = !ok || old != l.print
	return l
}

// take tells of an object that is news.
func (m *mirror[T, P]) take(p P, l looked) {
	if l.news {
		m.seen[l.key] = l.print
		m.tell(types.NamespacedName{Namespace: p.GetNamespace(), Name: p.GetName()}, p)
	}
	m.track.heard(len(m.seen))
}

func (m *mirror[T, P]) gone(key string) {
	if _, ok := m.seen[key]; ok {
		delete(m.seen, key)
		namespace, name, _ := strings.Cut(key, "/")
		m.tell(types.NamespacedName{Namespace: namespace, Name: name}, nil)
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

func keyOf(o metav1.Object) string { return o.GetNamespace() + "/" + o.GetName() }
