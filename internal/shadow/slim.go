package shadow

import "maps"

// Slim gives back room that was needed when there were more rows: a Go map keeps the room of its largest time.
func (t *Table[O, K, V]) Slim() {
	rows := make(map[K]row[V], len(t.rows))
	maps.Copy(rows, t.rows)
	owners := make(map[O][]K, len(t.owners))
	maps.Copy(owners, t.owners)
	t.rows, t.owners, t.keys = rows, owners, nil
}
