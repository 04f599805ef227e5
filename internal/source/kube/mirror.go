package kube

import (
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"time"

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
// stream in, and [cache.ReflectorBookmarkStore]. Only the goroutine of its reflector calls it, and a timer of its own.
// When the API seems to go back in time, it has a [doubt].
type mirror[T any, P object[T]] struct {
	track  *tracker
	listed func() // called once, after the first full list
	trim   func(P)
	tell   func(types.NamespacedName, P)
	bare   func(P) bool // the object is as good as gone; nil: none ever is
	expect func() bool  // there was something before we started; nil: nobody knows
	behind func(error)  // called when a list is older than what is known; nil: nobody wants to know

	mu       sync.Mutex
	complete bool   // there was a full list
	version  uint64 // the newest that was heard of, and during a doubt before it; zero is not known
	doubt    *doubt[P]
	timer    *time.Timer // ends the doubt, or the wait for a first list that is not empty; nil: not now

	seen map[string]told // by namespace/name
	seed maphash.Seed
	buf  []byte
}

func newMirror[T any, P object[T]](track *tracker, listed func(), trim func(P), tell func(types.NamespacedName, P)) *mirror[T, P] {
	return &mirror[T, P]{track: track, listed: listed, trim: trim, tell: tell, seen: map[string]told{}, seed: maphash.MakeSeed()}
}

// told is what has been told of an object.
type told struct {
	print   uint64 // fingerprint
	version uint64 // the newest in which it was seen
}

var _ cache.TransformingStore = (*mirror[nothing, *nothing])(nil)
var _ cache.ReflectorBookmarkStore = (*mirror[nothing, *nothing])(nil)

type nothing struct{ metav1.ObjectMeta }

// Add takes a new object.
func (m *mirror[T, P]) Add(obj any) error { return m.put(obj) }

// Update takes an object that changed.
func (m *mirror[T, P]) Update(obj any) error { return m.put(obj) }

func (m *mirror[T, P]) put(obj any) error {
	p, ok := obj.(P)
	if !ok {
		return fmt.Errorf("put %s: unexpected %T", m.track.resource, obj)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.look(p)
	if l.news && m.older(l.key, l.version) && m.bare != nil && m.bare(p) {
		m.doubt.held[l.key] = p
	} else {
		m.take(p, l)
	}
	m.heard(l.version)
	return nil
}

// Delete takes an object that is gone.
func (m *mirror[T, P]) Delete(obj any) error {
	p, ok := obj.(P)
	if !ok {
		return fmt.Errorf("delete %s: unexpected %T", m.track.resource, obj)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	key, version := keyOf(p), versionOf(p.GetResourceVersion())
	if m.older(key, version) {
		m.doubt.held[key] = nil
	} else {
		m.gone(key)
	}
	m.heard(version)
	return nil
}

// Replace takes everything that exists. What is not in the list is gone, unless the list is doubted.
func (m *mirror[T, P]) Replace(list []any, version string) error {
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
	m.mu.Lock()
	defer m.mu.Unlock()
	m.weigh(versionOf(version), len(list) == 0)
	for key := range m.seen {
		switch {
		case there[key]:
		case m.doubt != nil:
			m.doubt.held[key] = nil
		default:
			m.gone(key)
		}
	}
	for _, obj := range list {
		p, ok := obj.(P)
		if !ok {
			continue // told already
		}
		if l := m.look(p); l.news && m.older(l.key, l.version) {
			m.doubt.held[l.key] = p
		} else {
			m.take(p, l)
		}
	}
	if !m.complete && len(list) == 0 && m.expect != nil && m.expect() {
		m.await()
		return nil
	}
	m.first()
	return nil
}

// first is called after a full list, of which the first is told.
func (m *mirror[T, P]) first() {
	if !m.complete {
		m.believe(m.version)
	}
	m.complete = true
	if m.track.listed(len(m.seen)) {
		m.listed()
	}
}

// none takes note that the API has nothing of the kind, for us at least. It stands for a list.
func (m *mirror[T, P]) none(why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.believe(0)
	for key := range m.seen {
		m.gone(key)
	}
	if m.track.unserved(why) {
		m.listed()
	}
}

// Bookmark is the word of the API that there was nothing else until this version.
func (m *mirror[T, P]) Bookmark(version string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.heard(versionOf(version))
	return nil
}

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
		m.mu.Lock()
		defer m.mu.Unlock()
		m.track.heard(len(m.seen))
		version := p.GetResourceVersion()
		switch l := m.look(p); {
		case !m.complete:
			m.take(p, l)
			return l.key, nil
		case !l.news:
			m.note(l)
			return l.key, nil
		}
		p.SetResourceVersion(version) // trimmed; Replace needs it
		return obj, nil
	}
}

// looked is what a look at an object has found.
type looked struct {
	key     string
	print   uint64
	version uint64 // see versionOf; trimming drops it
	news    bool   // something that is left of it after trimming differs from what was told before
}

func (m *mirror[T, P]) look(p P) looked {
	l := looked{key: keyOf(p), version: versionOf(p.GetResourceVersion())}
	m.trim(p)
	l.print = m.fingerprint(p)
	old, ok := m.seen[l.key]
	l.news = !ok || old.print != l.print
	return l
}

// take tells of an object that is news.
func (m *mirror[T, P]) take(p P, l looked) {
	m.note(l)
	if m.doubt != nil {
		delete(m.doubt.held, l.key)
	}
	if l.news {
		m.tell(types.NamespacedName{Namespace: p.GetNamespace(), Name: p.GetName()}, p)
	}
}

// note remembers what is told. An older version does not make us forget that there was a newer one: in a doubt the older
// one may be history, and what follows upon it too.
func (m *mirror[T, P]) note(l looked) {
	m.seen[l.key] = told{l.print, max(l.version, m.seen[l.key].version)}
}

func (m *mirror[T, P]) gone(key string) {
	if m.doubt != nil {
		delete(m.doubt.held, key)
	}
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
