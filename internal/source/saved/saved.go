// Package saved is a memory for outages: a source around the source of the Kubernetes API, which keeps on disk what that
// one tells, and tells it again when the process starts and the API does not answer. What it tells so is presumed
// (source.Sink.Presumed): it is served, and nothing is taken away for it. When the API has told all, what it did not name is
// told as gone.
//
// On disk there is one file, a journal (record.go has its format): a record for each change, in the order in which they were
// told, written at least each second; and now and then one that says when the API was last heard, from which the age of the
// journal counts. When most of it is outdated, the journal is written anew beside it, and put in its place. A process
// writes its first journal beside that of the process before, which stays until the API has told all.
//
// What is read is believed up to the first record that is not whole: what comes before it was the truth a little earlier. It
// must have begun with everything there was, which the first record about the API says; it must be of this node, not too
// old, and nobody else may have been able to write it: it decides where traffic goes.
//
// The disk is never waited for. When it can't be written, the journal is removed, since a stale one must not be believed later,
// and nothing is kept until the next start.
package saved

import (
	"context"
	"errors"
	"hash/maphash"
	"net/netip"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"fairlead/internal/source"
)

// Config says what is kept, where, and when it is believed.
type Config struct {
	Of     source.Source
	Dir    string           // where the journal is. It is made if it is not there, for our own user
	Node   string           // name of this node: the journal of another one is not believed
	MaxAge time.Duration    // a journal is not believed when the API was last heard longer ago
	Wait   time.Duration    // how long Of may take to tell all before the journal is told; 0 is 5 s
	Heard  func() time.Time // when the API was last heard; nil is when Of last told anything
}

const defaultWait = 5 * time.Second

// Status is what is kept.
type Status struct {
	Dir      string
	Problem  string    // why nothing is kept, in one line; empty: it is
	Ignored  string    // why what was kept before was not told, in one line; empty when it was, or was not needed
	Bytes    int64     // size of the journal
	Objects  int       // that are in it
	Replayed bool      // what was kept before was told, since the API did not answer
	AsOf     time.Time // when what was told was true: when the API had last been heard
}

// Source is Of with a memory. It implements [source.Source].
type Source struct {
	config Config
	disk   *disk
	seed   maphash.Seed

	wake  chan struct{} // one slot: something is to be written
	hurry chan struct{} // one slot: at once
	all   chan struct{} // closed when Of has told all

	beat    time.Time // that was last written; the writer's, as disk is
	cleared bool      // nothing is left that must not be believed

	mu       sync.Mutex
	status   Status
	to       source.Sink
	synced   bool
	toldAt   time.Time        // when Of last told anything
	sizes    map[uint64]int   // of the last record of each thing, by the hash of its key; before synced, 0 if it was told as gone
	replayed map[uint64]thing // told from the journal of before, and not by Of yet
	buf      []byte           // records that are to be written
	spare    []byte           // room for the next ones
	key      []byte           // room
	live     int64            // bytes of the records that count
}

// New returns a source. Nothing is read or written before Run.
func New(c Config) *Source {
	if c.Wait == 0 {
		c.Wait = defaultWait
	}
	s := &Source{config: c, disk: &disk{dir: c.Dir, node: c.Node}, seed: maphash.MakeSeed(),
		wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1), all: make(chan struct{}),
		status: Status{Dir: c.Dir}, sizes: map[uint64]int{}, replayed: map[uint64]thing{}}
	if s.config.Heard == nil {
		s.config.Heard = s.lastTold
	}
	return s
}

// Status may be called from any goroutine.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.status
	if now.Problem != "" {
		now.Objects, now.Bytes = 0, 0
	}
	return now
}

// Run tells what Of tells, and keeps it, until ctx ends or Of does.
func (s *Source) Run(ctx context.Context, to source.Sink) error {
	s.to = to
	before, err := s.disk.open()
	if err != nil {
		s.stop(err)
	}
	ended, end := context.WithCancel(context.WithoutCancel(ctx)) // what is told until Of has ended is written
	var running sync.WaitGroup
	running.Go(func() { s.keep(ended) })
	running.Go(func() { s.recall(ended, before) })
	err = s.config.Of.Run(ctx, sink{s})
	end()
	running.Wait()
	return err
}

// recall tells what was kept before, when Of takes too long.
func (s *Source) recall(ctx context.Context, before believed) {
	defer before.close()
	late := time.NewTimer(s.config.Wait)
	defer late.Stop()
	select {
	case <-ctx.Done():
		return
	case <-s.all:
		return
	case <-late.C:
	}
	if err := s.replay(ctx, before); err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.ErrorS(err, "The API does not answer, and what was known before can't be used", "dir", s.config.Dir)
		s.mu.Lock()
		s.status.Ignored = err.Error()
		s.mu.Unlock()
	}
}

func (s *Source) lastTold() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.toldAt
}

// sink is what Of tells. Objects are written down before they are handed on: after that, they belong to somebody else.
type sink struct{ *Source }

func (s sink) Service(n types.NamespacedName, o *corev1.Service) {
	s.told(thing{aService, n}, pointer(o), func() { s.to.Service(n, o) })
}

func (s sink) Slice(n types.NamespacedName, o *discoveryv1.EndpointSlice) {
	s.told(thing{aSlice, n}, pointer(o), func() { s.to.Slice(n, o) })
}

func (s sink) Node(name string, o *corev1.Node) {
	s.told(thing{aNode, types.NamespacedName{Name: name}}, pointer(o), func() { s.to.Node(name, o) })
}

func (s sink) ServiceCIDR(name string, o *networkingv1.ServiceCIDR) {
	s.told(thing{aServiceCIDR, types.NamespacedName{Name: name}}, pointer(o), func() { s.to.ServiceCIDR(name, o) })
}

// Addrs is handed on: the machine is asked for its addresses, not the API.
func (s sink) Addrs(all []netip.Addr) { s.to.Addrs(all) }

func (s sink) Presumed() { s.to.Presumed() }

// Synced says first what else was told from the journal of before, and is not there any more.
func (s sink) Synced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.synced {
		s.synced = true
		for _, t := range s.replayed {
			t.gone(s.to)
		}
		s.replayed = nil
		for h, size := range s.sizes {
			if size == 0 {
				delete(s.sizes, h)
			}
		}
		s.toldAt = time.Now()
		close(s.all)
		give(s.hurry)
	}
	s.to.Synced()
}

// told writes a thing down, and tells it. A nil object is gone.
func (s *Source) told(t thing, o object, tell func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note(t, o)
	tell()
}

// note writes a thing down, into memory.
func (s *Source) note(t thing, o object) {
	s.toldAt = time.Now()
	kept := s.status.Problem == ""
	if s.synced && !kept {
		return
	}
	s.key = t.appendTo(s.key[:0])
	h := maphash.Bytes(s.seed, s.key)
	delete(s.replayed, h)
	old, known := s.sizes[h]
	if o == nil && s.synced && !known {
		return
	}
	size := 0
	if kept {
		was := len(s.buf)
		s.buf = appendObject(s.buf, t, o)
		size = len(s.buf) - was
		s.wakeWriter(was)
	}
	s.count(h, old, o != nil, size)
}

// count keeps the account of what there is.
func (s *Source) count(h uint64, old int, there bool, size int) {
	s.live -= int64(old)
	if old > 0 {
		s.status.Objects--
	}
	switch {
	case there:
		s.sizes[h] = max(size, 1)
		s.live += int64(s.sizes[h])
		s.status.Objects++
	case s.synced:
		delete(s.sizes, h)
	default:
		s.sizes[h] = 0
	}
}

// wakeWriter is called after something was added to a buffer that was so long.
func (s *Source) wakeWriter(was int) {
	switch {
	case len(s.buf) > mostWaiting:
		s.stopLocked(errSlow)
	case len(s.buf) >= muchWaiting:
		give(s.hurry)
	case was == 0:
		give(s.wake)
	}
}

func give(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
