package kube

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// Status is how well one resource is known.
type Status struct {
	Resource  string    // "services", "endpointslices", "nodes", "servicecidrs"
	Synced    bool      // the first full list has been told
	Objects   int       // how many are known
	LastEvent time.Time // when the API last said anything about it: an answer, an event or, about once a minute, a bookmark. Zero is never
	LastError error     // why it can't be asked now; nil when the last try worked
	Since     time.Time // since when LastError, or one before it, lasts
	Doubt     string    // why what the API says is not taken as it is for now, in one line; empty: it is

	DoubtSince time.Time // since when Doubt lasts
}

// sayAgain is how long the same trouble is not logged again.
const sayAgain = time.Minute

// tracker keeps the status of one resource, and logs its ups and downs.
type tracker struct {
	resource string
	ahead    atomic.Int64 // see stopClock

	mu       sync.Mutex
	now      Status
	said     time.Time
	absent   bool          // the API does not serve it; see reflectIfServed
	outage   time.Duration // the longest since the last list
	listedAt time.Time     // when that was
	freshAt  time.Time     // when the back-off last started over by itself
}

func newTracker(resource string) *tracker {
	return &tracker{resource: resource, now: Status{Resource: resource}}
}

func (t *tracker) status() (now Status, served bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now, !t.absent
}

// heard notes that something came in.
func (t *tracker) heard(objects int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now.Objects, t.now.LastEvent = objects, time.Now()
}

// count notes how many objects are known, when it is not because something came in.
func (t *tracker) count(objects int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.now.Objects = objects
}

// doubt notes why the API is not believed; empty: it is.
func (t *tracker) doubt(why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case why == "":
		t.now.DoubtSince = time.Time{}
	case t.now.Doubt == "":
		t.now.DoubtSince = time.Now()
	}
	t.now.Doubt = why
}

// troubled tells whether the API could not be asked when that was last tried.
func (t *tracker) troubled() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.now.LastError != nil
}

// away is the longest outage since the last list, the one that lasts included.
func (t *tracker) away() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now.LastError == nil {
		return t.outage
	}
	since := t.now.Since
	if since.Before(t.listedAt) {
		since = t.listedAt
	}
	return max(t.outage, time.Since(since))
}

// fresh tells whether the back-off may start over: not again soon, or an API that takes one request and refuses the next would be
// asked as if it were well. Whether it can be reached at all, the link knows, which wakes everybody then.
func (t *tracker) fresh() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.freshAt) < backoffReset {
		return false
	}
	t.freshAt = time.Now()
	return true
}

// doubtful notes that what was heard until now is no base to go on from, as after an outage of longAway.
func (t *tracker) doubtful() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.outage = max(t.outage, longAway)
}

// listed notes a full list, and tells whether it was the first.
func (t *tracker) listed(objects int) (first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first = !t.now.Synced
	now := time.Now()
	t.now.Synced, t.now.Objects, t.now.LastEvent, t.outage, t.listedAt = true, objects, now, 0, now
	if first {
		klog.InfoS("First list is complete", "resource", t.resource, "objects", objects)
	}
	return first
}

// unserved notes that the API does not serve the resource, and tells whether it was waited for. It is logged once.
func (t *tracker) unserved(why error) (first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	first = !t.now.Synced
	if !t.absent {
		klog.InfoS("The Kubernetes API does not serve this to us; going on without", "resource", t.resource, "err", oneLine(why))
	}
	t.absent, t.now = true, Status{Resource: t.resource, Synced: true}
	return first
}

// asked notes how a request went, and tells whether it is the first that went well after trouble.
func (t *tracker) asked(ctx context.Context, err error) (again bool) {
	if ctx.Err() != nil {
		return false // our own end is no trouble of the API
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if err == nil {
		if t.absent {
			t.absent = false
			klog.InfoS("The Kubernetes API serves this now", "resource", t.resource)
		}
		if again = t.now.LastError != nil; again {
			klog.InfoS("The Kubernetes API answers again", "resource", t.resource, "after", now.Sub(t.now.Since).Round(time.Millisecond))
		}
		if again {
			t.outage = max(t.outage, now.Sub(t.now.Since))
		}
		t.now.LastError, t.now.Since, t.now.LastEvent, t.said = nil, time.Time{}, now, time.Time{}
		return again
	}
	if t.now.LastError == nil {
		t.now.Since = now
	}
	if t.now.LastError = oneLine(err); now.Sub(t.said) >= sayAgain {
		t.said = now
		klog.ErrorS(t.now.LastError, "The Kubernetes API can't be asked; trying again", "resource", t.resource, "since", t.now.Since.Format(time.RFC3339))
	}
	return false
}
