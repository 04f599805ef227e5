// Package engine is the one writer: it drains what the sources told, resolves it, applies the delta, retries without losing
// anything, and tells the observers.
//
// A round: wait (an event, a retry, the resync, a drift notice, a question), drain the queue, resolve, apply what is
// pending, and on success advance the state and tell the observers. Nothing is written until every source has said that it
// is synced. What failed stays pending; after a few failures it is sent as everything there is.
//
// A running engine changes its dataplane, the settings of its resolver and its pace with [Engine.Switch]: the old dataplane
// serves until the new one holds everything, and its rules are removed afterwards.
//
// State, resolver and dataplane belong to the goroutine of [Engine.Run] and are not locked. Others come in by a queue
// ([Engine.Sink]) or with a question ([Engine.Do]).
package engine
