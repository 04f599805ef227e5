package kube

import (
	"context"
	"math/rand/v2"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// How long after a refusal a resource that need not be there is asked for again: soon at first, since an API server that
// comes up knows no permissions for a moment; later so seldom that thousands of nodes do not matter. Doubled each time, and
// up to half as much again at random.
const (
	unservedFirst = 10 * time.Second
	unservedMost  = 10 * time.Minute
)

// isUnserved tells of an API server that has no such resource (it is older), or does not let us have it (a role that was
// written before we asked for it).
func isUnserved(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

// reflectIfServed is reflect for a resource that we can do without. Whenever the API turns out not to serve it, none is
// called; then it is asked for seldom, and when the API answers again after it was away.
func (r *resource) reflectIfServed(ctx context.Context, none func(why error)) {
	for wait := unservedFirst; ; wait = min(2*wait, unservedMost) {
		attempt, end := context.WithCancelCause(ctx)
		try := *r
		try.unserved = end
		try.reflect(attempt)
		end(nil)
		if ctx.Err() != nil {
			return
		}
		none(context.Cause(attempt))
		select {
		case <-time.After(wait + rand.N(wait/2)):
		case <-r.back.next():
		case <-ctx.Done():
			return
		}
	}
}
