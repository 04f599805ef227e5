package engine

import "context"

// Slimmer is a part that remembers things, and can give back the room that it needed when there were more of them. It is
// called on the engine's goroutine.
type Slimmer interface{ Slim() }

// Slim makes all parts give back room: worth its cost, that of all there is, when much has gone.
func (e *Engine) Slim(ctx context.Context) error {
	return e.Do(ctx, func(View) {
		e.state.Slim()
		parts := []any{e.config.Resolver, e.config.Dataplane}
		for _, o := range e.config.Observers {
			parts = append(parts, o)
		}
		for _, p := range parts {
			if s, ok := p.(Slimmer); ok {
				s.Slim()
			}
		}
	})
}
