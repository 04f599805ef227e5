package iptables

import (
	"cmp"
	"context"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"fairlead/internal/kernel"
)

// The old iptables tells nobody of changes: its tables are read again and again, and compared with what they were. Their sizes
// cost next to nothing, and show a flush; their contents cost time, and show all.
const (
	sizesEvery    = 250 * time.Millisecond
	contentsShare = 50                      // contents are looked at after this many times the duration of the last such look, …
	contentsMost  = 1250 * time.Millisecond // … but at least so often
)

// place is a chain of ours, or the jumps from a built-in chain to one.
type place struct{ chain, to string }

// imprint tells the rules of a place apart from others.
type imprint struct {
	sum   uint64
	rules int
}

// prints are what is known of a table.
type prints struct {
	size kernel.TableSize
	sum  uint64 // of all of it, what is not ours included
	of   map[place]imprint
}

// fingerprint reads a table; without details just its sum.
func (l *legacy) fingerprint(id tableID, details bool) (p prints, err error) {
	x := l.tables[b2i(id.v6)]
	if x == nil {
		return p, nil
	}
	if p.size, err = x.Size(id.table.String()); err != nil {
		return p, err
	}
	var each func(kernel.XTRule)
	if details {
		p.of = make(map[place]imprint, len(l.known[id].of))
		each = p.add
	}
	p.sum, err = x.Rules(id.table.String(), each)
	return p, err
}

// add takes a rule in, if it is ours or leads to what is.
func (p *prints) add(r kernel.XTRule) {
	at := place{chain: string(r.Chain)}
	if !watchedName(at.chain) {
		if at.to = string(r.Jump); !watchedName(at.to) || !(ChainID{Name: at.chain}).builtin() {
			return
		}
	}
	was := p.of[at]
	p.of[at] = imprint{bits.RotateLeft64(was.sum, 9)*0x9e3779b97f4a7c15 + r.Sum, was.rules + 1}
}

// touched are the chains of a family that a write of ours concerns.
func touched(changes []change, v6 bool) map[ChainID]bool {
	own := map[ChainID]bool{}
	for i := range changes {
		if id := changes[i].Chain; id.V6 == v6 {
			own[id] = true
		}
	}
	return own
}

// look compares a table with what it was, but for the chains that we have just written ourselves, and takes note of what it
// is. A write is followed by one look: what others did to other chains meanwhile is found by that.
func (l *legacy) look(id tableID, own map[ChainID]bool) {
	now, err := l.fingerprint(id, true)
	if err != nil {
		l.seen.Saw(fmt.Sprintf("table %s can't be watched: %v", id, err))
		delete(l.known, id)
		return
	}
	if was, known := l.known[id]; known {
		l.compare(id, was.of, now.of, own)
	}
	l.known[id] = now
}

// lookAt looks at the tables of a family.
func (l *legacy) lookAt(v6 bool, own map[ChainID]bool) {
	for _, id := range tableIDs {
		if id.v6 == v6 {
			l.look(id, own)
		}
	}
}

// compare notes what somebody else changed: jumps first, since without them nothing works.
func (l *legacy) compare(id tableID, was, now map[place]imprint, own map[ChainID]bool) {
	var differ []place
	for at, p := range was {
		if now[at] != p {
			differ = append(differ, at)
		}
	}
	for at := range now {
		if _, ok := was[at]; !ok {
			differ = append(differ, at)
		}
	}
	slices.SortFunc(differ, func(a, b place) int {
		return cmp.Or(cmp.Compare(b.to, a.to), cmp.Compare(a.chain, b.chain))
	})
	for _, at := range differ {
		if chain := (ChainID{V6: id.v6, Table: id.table, Name: at.chain}); !own[chain] {
			l.seen.Saw(became(chain, at.to, was[at], now[at]))
		}
	}
}

// became says what became of a chain, or of its jumps to another one.
func became(id ChainID, to string, was, now imprint) string {
	what := "a rule was"
	if to != "" {
		what = fmt.Sprintf("a jump to %s was", to)
	}
	switch lost := was.rules - now.rules; {
	case to == "" && was.rules == 0:
		return fmt.Sprintf("%s was made", where(id))
	case to == "" && now.rules == 0:
		return fmt.Sprintf("%s was deleted", where(id))
	case lost > 0:
		return fmt.Sprintf("%s deleted from %s", what, where(id))
	case lost < 0:
		return fmt.Sprintf("%s added to %s", what, where(id))
	}
	return fmt.Sprintf("%s changed in %s", what, where(id))
}

// Watch calls drift when a chain of ours, or a jump to one, is not what it was after our last write; see backend. Who did it the
// kernel does not tell.
func (l *legacy) Watch(ctx context.Context, drift func(what string)) error {
	tick := time.NewTicker(sizesEvery)
	defer tick.Stop()
	for contents := time.Now(); ; {
		if start := time.Now(); !start.Before(contents) || l.resized() {
			if what := l.news(); what != "" {
				drift(what)
			}
			contents = time.Now().Add(min(contentsShare*time.Since(start), contentsMost))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// tableIDs are the tables that hold chains of ours.
var tableIDs = [...]tableID{{false, Nat}, {false, Filter}, {true, Nat}, {true, Filter}}

// resized tells whether a table has another size than it had.
func (l *legacy) resized() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range tableIDs {
		if x := l.tables[b2i(id.v6)]; x != nil {
			if size, err := x.Size(id.table.String()); err != nil || size != l.known[id].size {
				return true
			}
		}
	}
	return false
}

// news says what somebody else changed since the last time.
func (l *legacy) news() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range tableIDs {
		was, known := l.known[id]
		if now, err := l.fingerprint(id, false); err != nil || !known || now.sum != was.sum {
			l.look(id, nil)
		}
	}
	what := l.seen.String()
	l.seen = kernel.Sightings{}
	return what
}

// generation is another one whenever a table is.
func (l *legacy) generation() (string, error) {
	var sums []uint64
	for _, id := range tableIDs {
		p, err := l.fingerprint(id, false)
		if err != nil {
			return "", err
		}
		sums = append(sums, p.sum)
	}
	return fmt.Sprint(sums), nil
}
