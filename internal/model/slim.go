package model

import "maps"

// Slim is m with the room that it needs now. A Go map keeps the room of the time when it was largest.
func Slim[K comparable, V any](m map[K]V) map[K]V {
	out := make(map[K]V, len(m))
	maps.Copy(out, m)
	return out
}

// Slim gives back room that the state needed when it was larger.
func (s *State) Slim() {
	s.Frontends, s.Pools, s.Checks = Slim(s.Frontends), Slim(s.Pools), Slim(s.Checks)
}
