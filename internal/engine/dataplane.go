package engine

import (
	"context"
	"time"

	"fairlead/internal/model"
)

// Dataplane makes a kernel (or a process) do what a state says. All calls come from one goroutine. Desired state goes in,
// never verbs; what the kernel may hold is the dataplane's to remember (package shadow), before it writes.
type Dataplane interface {
	// Apply makes it so. After an error nothing is lost: the engine calls again with the same delta, or with more.
	// With d.Full the dataplane reads the kernel again, so that foreign changes are put right too.
	Apply(ctx context.Context, d model.Delta) error
	// Dump reads what the kernel holds back into nouns: at a restart, for drift, for get --kernel. Nothing of ours there
	// gives an empty state. What the kernel can't tell (About.Kind, Draining) stays empty.
	Dump(ctx context.Context) (*model.State, error)
	// Remove leaves no trace. It is idempotent.
	Remove(ctx context.Context) error
	// Close lets go and leaves the rules.
	Close() error
}

// Watcher is a dataplane that can notice that somebody else changed what is ours. Watch calls drift (from its own
// goroutine) with a few words on what was found, until ctx ends; the engine answers with a Full Apply. A watch that may have
// missed something calls drift too. After an error Watch is called again, later; nil before ctx ends says that there is
// nothing to watch. What the dataplane writes itself is no drift.
type Watcher interface {
	Watch(ctx context.Context, drift func(what string)) error
}

// Mender is a Watcher that can put right small damage by itself: what its Watch noticed since the kernel was read or mended last.
// Mend returns the frontends that were not served as they should be. After an error, which may just say that the damage is not
// small, everything is applied again.
type Mender interface {
	Mend() ([]model.Key, error)
}

// Observer is told of every delta that became true; one that is Full lists as gone what it took away of the state before, or
// of what the kernel was found to hold at the start. It runs on the engine's goroutine and must be quick; a duty that
// fails there (conntrack) is the observer's to keep and to retry.
type Observer interface {
	Applied(d model.Delta, took time.Duration)
}

// FailureObserver is an observer that is also told of every delta that failed to become true.
type FailureObserver interface {
	Failed(err error, d model.Delta)
}

// DriftObserver is an observer that is also told when somebody else was found to have changed what is ours.
type DriftObserver interface {
	Drifted(what string)
}
