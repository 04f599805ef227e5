// Package dir is the source that reads Kubernetes manifests from a directory, or from one file: a cluster without an API
// server.
//
// It takes Services, EndpointSlices, Nodes, ServiceCIDRs, Pods and workloads, as YAML of many documents, as JSON, and in Lists; all other
// kinds are passed over. What the API server would fill in is filled in, and what it would refuse is reported, "file:line:
// message", a line each. A Service without EndpointSlice has the Pods that its selector means. An address is never invented.
//
// An edit takes effect at once. A mistake changes nothing of what worked: a broken document is passed over, the others are
// taken, and as long as a file has one, what its last good version held stays.
package dir

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/source"
)

const (
	quiet    = 20 * time.Millisecond  // after the last sign of a change it is read: an editor writes in steps
	quietMax = 500 * time.Millisecond // after the first sign, when there is no end to them
	settle   = 50 * time.Millisecond  // a file that is gone or empty must stay so for as long: editors rename and truncate
	poll     = 10 * time.Second       // without any sign
	pollDeaf = time.Second            // while the kernel gives no signs, or something could not be read
	fileMost = 256 << 20              // bytes of one file
)

// Source watches a directory or a file. It implements [source.Source].
type Source struct {
	path   string
	report func(string)

	files  map[string]*tracked
	told   Objects
	odd    []string // what was wrong between files at the last merge
	unread []string // what could not be read at the last look

	mu  sync.Mutex
	now Status
}

// Status is how the manifests are.
type Status struct {
	Synced   bool
	Files    int
	Services int
	Slices   int // given and derived
	Nodes    int
	LastRead time.Time // when a change was last taken; zero before the first
	Reports  uint64    // lines reported, ever
}

// tracked is a file, and how it looked when it was read.
type tracked struct {
	file
	stamp stamp
	sum   [sha256.Size]byte
	doubt time.Time // since when it seems to be gone or empty; zero is not at all
	known bool      // it has been read
}

// New returns a source for path. report takes each line about a mistake, on the goroutine of Run; it may be nil. The lines
// are logged as well.
func New(path string, report func(string)) *Source {
	if report == nil {
		report = func(string) {}
	}
	return &Source{path: path, report: report, files: map[string]*tracked{}, told: newObjects()}
}

// Status tells how the manifests are.
func (s *Source) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// Run tells to what the manifests say, until ctx ends. It returns an error when there is nothing at the path at the start.
// If that goes away later it is reported, and taken for a mistake: everything stays.
func (s *Source) Run(ctx context.Context, to source.Sink) error {
	if _, err := os.Stat(s.path); err != nil {
		return fmt.Errorf("read manifests: %w", err)
	}
	e := newEar(s.path)
	defer e.close()
	next := time.NewTimer(s.look(e, to))
	defer next.Stop()
	s.mu.Lock()
	s.now.Synced = true
	s.mu.Unlock()
	to.Synced()
	var since time.Time // of the first sign that was not yet followed
	for {
		select {
		case <-ctx.Done():
			return nil
		case sign := <-e.signs():
			if !e.means(sign) {
				continue
			}
		case err := <-e.errors():
			klog.V(1).InfoS("Signs of changes were lost; reading all manifests", "err", err)
		case <-next.C:
			since = time.Time{}
			next.Reset(s.look(e, to))
			continue
		}
		if since.IsZero() {
			since = time.Now()
		}
		next.Reset(min(quiet, max(0, quietMax-time.Since(since))))
	}
}

// look reads what changed, tells it, and says after how long to look again.
func (s *Source) look(e *ear, to source.Sink) (again time.Duration) {
	again = poll
	found := scan(s.path)
	for fresh := e.watch(found.dirs); fresh; fresh = e.watch(found.dirs) {
		found = scan(s.path) // what came into a folder before it was watched
	}
	if e.deaf {
		again = pollDeaf
	}
	changed := false
	for _, name := range slices.Sorted(maps.Keys(found.files)) {
		taken, soon := s.take(name, found.files[name], &found)
		changed = changed || taken
		again = min(again, soon)
	}
	for name, f := range s.files {
		if _, ok := found.files[name]; ok || found.unsure(name) {
			continue
		}
		if !f.doubtful() {
			again = min(again, settle)
			continue
		}
		delete(s.files, name)
		changed = true
	}
	s.sayUnread(found.unread)
	if len(found.unread) > 0 {
		again = min(again, pollDeaf)
	}
	if changed {
		s.merge(to)
	}
	return again
}

// take reads a file that looks different, and tells whether that changed anything and when it wants to be looked at again.
func (s *Source) take(name string, st stamp, found *found) (changed bool, again time.Duration) {
	f := s.files[name]
	if f != nil && f.known && f.stamp == st && !st.racy && f.doubt.IsZero() {
		return false, poll
	}
	data, err := readFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, quiet // it was there a moment ago
	}
	if err != nil {
		found.cannot(name, err)
		return false, poll
	}
	if f == nil {
		f = new(tracked)
		s.files[name] = f
	}
	if len(f.objects) > 0 && len(bytes.TrimSpace(data)) == 0 && !f.doubtful() {
		return false, settle
	}
	again = poll
	if st.racy {
		again = settle // it may have changed since without looking different
	}
	sum := sha256.Sum256(data)
	same := f.known && f.sum == sum
	f.stamp, f.sum, f.known, f.doubt = st, sum, true, time.Time{}
	if same {
		return false, again
	}
	s.say(reports(name, f.read(name, data)))
	return true, again
}

// doubtful tells whether the doubt is old enough to be believed, and begins it when there was none.
func (f *tracked) doubtful() bool {
	if f.doubt.IsZero() {
		f.doubt = time.Now()
	}
	return time.Since(f.doubt) >= settle
}

func readFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, fileMost+1))
	if len(data) > fileMost {
		return nil, fmt.Errorf("has more than %d MiB", fileMost>>20)
	}
	return data, err
}

// sayUnread reports what can't be read, once.
func (s *Source) sayUnread(unread []string) {
	for _, line := range unread {
		if !slices.Contains(s.unread, line) {
			s.say([]string{line})
		}
	}
	s.unread = unread
}

func (s *Source) say(lines []string) {
	for _, line := range lines {
		s.mu.Lock()
		s.now.Reports++
		s.mu.Unlock()
		klog.InfoS("Manifest", "problem", line)
		s.report(line)
	}
}

// merge tells what is different now.
func (s *Source) merge(to source.Sink) {
	files := make(map[string]*file, len(s.files))
	for name, f := range s.files {
		f.away = !f.doubt.IsZero()
		files[name] = &f.file
	}
	now, odd := merge(files)
	for _, line := range odd {
		if !slices.Contains(s.odd, line) {
			s.say([]string{oneLine(line)})
		}
	}
	s.odd = odd
	tell(s.told.Services, now.Services, compareNames, to.Service)
	tell(s.told.Slices, now.Slices, compareNames, to.Slice)
	tell(s.told.Nodes, now.Nodes, strings.Compare, to.Node)
	tell(s.told.CIDRs, now.CIDRs, strings.Compare, to.ServiceCIDR)
	s.told = now
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Files, s.now.LastRead = len(files), time.Now()
	s.now.Services, s.now.Slices, s.now.Nodes = len(now.Services), len(now.Slices), len(now.Nodes)
}

// tell tells, in the order of the names, what differs between old and now. Objects that do not differ stay the old ones.
func tell[K comparable, T any](old, now map[K]*T, order func(a, b K) int, to func(K, *T)) {
	keys := slices.Collect(maps.Keys(now))
	for k := range old {
		if now[k] == nil {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, order)
	for _, k := range keys {
		switch o, n := old[k], now[k]; {
		case n == nil, o == nil:
			to(k, n)
		case o == n:
		case reflect.DeepEqual(o, n):
			now[k] = o
		default:
			to(k, n)
		}
	}
}
