package cli

import (
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"

	"fairlead/internal/source"
)

// toBeDeleted is the taint of a node that the cluster autoscaler is about to remove (KEP-3836): load balancers should leave
// it while its connections end.
const toBeDeleted = "ToBeDeletedByClusterAutoscaler"

// nodeWatch looks at the Node objects that pass by, for our own.
type nodeWatch struct {
	name    string
	unknown bool // a node without an object should get no traffic from load balancers

	known, leaving, synced atomic.Bool
}

// eligible tells whether load balancers should send traffic here. As long as nobody knows the node, they should go on: the rules of
// the run before serve, and an API server that is away is no reason for them to leave.
func (n *nodeWatch) eligible() bool {
	if !n.known.Load() {
		return !n.unknown || !n.synced.Load()
	}
	return !n.leaving.Load()
}

// in puts the watch in the way to a sink.
func (n *nodeWatch) in(to source.Sink) source.Sink { return watchedSink{to, n} }

type watchedSink struct {
	source.Sink
	watch *nodeWatch
}

func (w watchedSink) Node(name string, obj *corev1.Node) {
	if name == w.watch.name {
		w.watch.see(obj)
	}
	w.Sink.Node(name, obj)
}

// Synced implements [source.Sink].
func (w watchedSink) Synced() {
	w.watch.synced.Store(true)
	w.Sink.Synced()
}

func (n *nodeWatch) see(obj *corev1.Node) {
	leaving := obj != nil && obj.DeletionTimestamp != nil
	if obj != nil {
		for _, t := range obj.Spec.Taints {
			leaving = leaving || t.Key == toBeDeleted
		}
	}
	n.leaving.Store(leaving)
	n.known.Store(obj != nil)
}
