package kube

import (
	"fmt"
	"strconv"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/klog/v2"
)

// doubtFor is how long a list is doubted that would take us back. An API server that lags behind the others catches up in
// less; one that is where it is for longer was restored from a backup, and is right whatever we knew.
const doubtFor = 30 * time.Second

// doubt is about a list that is older than what was heard before it, or that says that everything is gone.
//
// What the API says from that list on is its state as ever, and all of it is told, but for the differences in held: objects
// that the list lacks, or has in an older version than was known. Neither can be told from a restored backup at first: there
// an object may be gone for good, or have been changed for good; on a server that lags it will come back as it was. So events
// are told, except those that take away what is known in a newer version. The doubt ends when the API says something as
// new as what was known, or after [doubtFor] with it; then what is still held is told.
type doubt[P any] struct {
	held    map[string]P // by namespace/name: what the API says of an object, and was not told. Nil: it is gone
	version uint64       // the newest that was heard since
	wiped   bool         // the list is not older, but takes everything away
}

// versionOf is a resourceVersion as a number, by which newer can be told from older (KEP-5504). Zero is one that is not.
func versionOf(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// weigh decides whether a list is believed or doubted.
func (m *mirror[T, P]) weigh(version uint64, empty bool) {
	older := version != 0 && version < m.version
	wiped := empty && len(m.seen) > 0
	if !m.complete || !older && !wiped {
		if m.doubt != nil {
			klog.InfoS("The Kubernetes API has caught up", "resource", m.track.resource, "version", version)
		}
		m.believe(version)
		return
	}
	if older && m.behind != nil {
		m.behind(fmt.Errorf("%w: %s are listed at version %d, we are at %d", errWentBack, m.track.resource, version, m.version))
	}
	if m.doubt == nil {
		why := fmt.Sprintf("The Kubernetes API went back in time, from version %d to %d", m.version, version)
		if !older {
			why = fmt.Sprintf("The Kubernetes API says that all %d are gone", len(m.seen))
		}
		why += fmt.Sprintf("; taking nothing away for %s", doubtFor)
		klog.InfoS(why, "resource", m.track.resource)
		m.track.doubt(why)
	}
	m.doubt = &doubt[P]{held: map[string]P{}, version: version, wiped: !older}
	if !older {
		m.version = max(m.version, version)
	}
	m.arm()
}

// believe ends a doubt.
func (m *mirror[T, P]) believe(version uint64) {
	m.disarm()
	m.doubt, m.version = nil, version
	m.track.doubt("")
}

// older tells whether what is heard of an object in this version is history, or else comes from another history than ours.
func (m *mirror[T, P]) older(key string, version uint64) bool {
	return m.doubt != nil && version != 0 && version < m.seen[key].version
}

// heard takes note of a version that the API has come to.
func (m *mirror[T, P]) heard(version uint64) {
	switch d := m.doubt; {
	case version == 0:
	case d == nil:
		m.version = max(m.version, version)
	default:
		d.version = max(d.version, version)
		switch {
		case d.wiped: // its versions are those of the history we know
			m.version = max(m.version, version)
		case version >= m.version:
			m.settle("The Kubernetes API has caught up")
		}
	}
	m.track.heard(len(m.seen))
}

// settle ends a doubt, and tells what was held.
func (m *mirror[T, P]) settle(why string) {
	d := m.doubt
	m.believe(d.version)
	for key, p := range d.held {
		if p == nil {
			m.gone(key)
		}
	}
	for _, p := range d.held {
		if p != nil {
			m.take(p, m.look(p))
		}
	}
	m.track.count(len(m.seen))
	klog.InfoS(why, "resource", m.track.resource, "version", d.version, "gone or changed", len(d.held))
}

// await puts off that the first list is complete: it is empty, and there was something before we started. Events do not end
// the wait, since they are no full view; another list does, that has something.
func (m *mirror[T, P]) await() {
	why := fmt.Sprintf("The Kubernetes API says that there is nothing, and there was before; not believing it for %s", doubtFor)
	klog.InfoS(why, "resource", m.track.resource)
	m.track.doubt(why)
	m.track.count(len(m.seen))
	m.arm()
}

// arm has the doubt end in time, provided that the API can be asked then: in an outage nobody knows what it would have said.
func (m *mirror[T, P]) arm() {
	m.disarm()
	var timer *time.Timer
	timer = time.AfterFunc(doubtFor, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		switch {
		case m.timer != timer: // it was stopped too late
		case m.track.troubled():
			m.arm()
		case m.doubt != nil:
			m.settle("The Kubernetes API stays where it is (restored from a backup?); taken as it is")
		default:
			m.first()
		}
	})
	m.timer = timer
}

func (m *mirror[T, P]) disarm() {
	if m.timer != nil {
		m.timer.Stop()
		m.timer = nil
	}
}

// adrift says that nothing will be heard of before another list, which [mirror.Replace] will judge anew: until then time does not settle a doubt.
func (m *mirror[T, P]) adrift() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.disarm()
}

// bare tells of a slice that is as good as gone: none of its endpoints takes traffic.
func bare(s *discoveryv1.EndpointSlice) bool {
	for _, e := range s.Endpoints {
		if c := e.Conditions; c.Ready == nil || *c.Ready || c.Serving != nil && *c.Serving {
			return false
		}
	}
	return true
}
