package events

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead/internal/engine"
	"fairlead/internal/model"
)

var (
	_ engine.Observer        = (*Teller)(nil)
	_ engine.FailureObserver = (*Teller)(nil)
	_ engine.DriftObserver   = (*Teller)(nil)
)

type book []string

func (b *book) Event(r corev1.ObjectReference, kind, reason, note string) {
	*b = append(*b, fmt.Sprintf("%s %s/%s %s: %s %s: %s", r.Kind, r.Namespace, r.Name, r.UID, kind, reason, note))
}

func newTeller() (*Teller, *book, *time.Time) {
	b, now := new(book), time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	t := New(Config{Node: "n1", Recorder: b})
	t.now = func() time.Time { return now }
	return t, b, &now
}

func (b *book) want(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(*b, want) {
		t.Errorf("told %q\nwant %q", *b, want)
	}
	*b = nil
}

func TestTeller(t *testing.T) {
	tell, b, now := newTeller()
	tell.Starting("fairlead v1 starts")
	b.want(t, "Node /n1 n1: Normal Starting: fairlead v1 starts")
	stolen := model.Notice{Service: "ns/a", Reason: "NodeAddress", Message: "192.0.2.1 is n2's", UID: "u1"}
	tell.Notices(stolen, model.Notice{Service: "ns/a", Reason: "NodeAddress", Message: "192.0.2.2 is n3's", UID: "u1"}, stolen)
	b.want(t, "Service ns/a u1: Warning NodeAddress: 192.0.2.1 is n2's", "Service ns/a u1: Warning NodeAddress: 192.0.2.2 is n3's")
	*now = now.Add(repeatAfter - 1)
	tell.Notices(stolen)
	b.want(t)
	*now = now.Add(1)
	tell.Notices(stolen)
	b.want(t, "Service ns/a u1: Warning NodeAddress: 192.0.2.1 is n2's")
	tell.Over(model.Notice{Reason: ViewFresh, Message: "up to date again"})
	b.want(t, "Node /n1 n1: Normal ViewFresh: up to date again")
	tell.Drifted("chain KUBE-SERVICES is gone")
	b.want(t, "Node /n1 n1: Warning DriftRepair: somebody else changed the rules of fairlead, which puts them right: chain KUBE-SERVICES is gone")
}

// A failure or two is nothing; more are told once, and so is their end.
func TestFailures(t *testing.T) {
	tell, b, _ := newTeller()
	busy := errors.New("busy")
	for range 10 {
		tell.Failed(busy, model.Delta{})
		tell.Failed(busy, model.Delta{})
		tell.Applied(model.Delta{}, 0)
	}
	b.want(t)
	for range 10 {
		tell.Failed(busy, model.Delta{})
	}
	tell.Applied(model.Delta{}, 0)
	tell.Applied(model.Delta{}, 0)
	b.want(t, "Node /n1 n1: Warning ApplyFails: changes can't be written to the kernel and are tried again: busy",
		"Node /n1 n1: Normal ApplyWorks: changes are written to the kernel again")
}

func TestFlood(t *testing.T) {
	tell, b, now := newTeller()
	flood := func(n int, word string) {
		for i := range n {
			tell.Notices(model.Notice{Service: "ns/a", Reason: "R", Message: fmt.Sprint(word, i)})
		}
	}
	flood(1000, "first")
	if len(*b) != burst {
		t.Errorf("told %d, want %d", len(*b), burst)
	}
	if tell.left != 1000-burst {
		t.Errorf("left out %d", tell.left)
	}
	*now = now.Add(5 * every)
	flood(1000, "second")
	if len(*b) != burst+5 {
		t.Errorf("told %d, want %d", len(*b), burst+5)
	}
	*b = nil
	for i := range 3 * rememberMax {
		*now = now.Add(every)
		flood(1, fmt.Sprint("wave", i, "-"))
	}
	if len(*b) != 3*rememberMax || len(tell.said) > rememberMax {
		t.Errorf("told %d, remembers %d", len(*b), len(tell.said))
	}
}

func TestLogOnly(t *testing.T) {
	New(Config{Node: "n1"}).Notices(model.Notice{Service: "ns/a", Reason: "R", Message: "m"}, model.Notice{Service: "odd", Reason: "R"})
}
