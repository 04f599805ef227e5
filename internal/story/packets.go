package story

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"fairlead/internal/lab"

	"rsc.io/script"
)

// refusalLimit is how long a refusal may take. A TCP client that misses the answer to its first SYN hears nothing for a
// second (RFC 6298 section 2.1, the initial retransmission time-out): below that, the first answer came.
const refusalLimit = 900 * time.Millisecond

// want is what must become of the packets of a line.
type want struct {
	outcome  string   // reaches, refused, reset, unreachable, silence
	backends []string // of reaches
	as       string   // whom a backend must see: "client", the name of an actor, or nobody in particular
	in       time.Duration
}

func parseWant(words []string) (want, error) {
	if len(words) == 0 {
		return want{}, errors.New("want an outcome: reaches A,B [as WHO], refused, reset, unreachable or silence")
	}
	w := want{outcome: words[0]}
	if w.outcome != "reaches" {
		if len(words) > 1 || !slices.Contains([]string{"refused", "reset", "unreachable", "silence"}, w.outcome) {
			return w, fmt.Errorf("strange outcome %q", strings.Join(words, " "))
		}
		return w, nil
	}
	if len(words)%2 != 0 {
		return w, fmt.Errorf("strange outcome %q", strings.Join(words, " "))
	}
	w.backends = strings.Split(words[1], ",")
	for i := 2; i < len(words); i += 2 {
		var err error
		switch words[i] {
		case "as":
			w.as = words[i+1]
		case "in":
			w.in, err = time.ParseDuration(words[i+1])
		default:
			err = fmt.Errorf("strange outcome %q", strings.Join(words, " "))
		}
		if err != nil {
			return w, err
		}
	}
	return w, nil
}

// check says what is wrong with one answer, nil if nothing.
func (w want) check(st *stage, from *lab.Actor, a lab.Answer) error {
	ok := false
	switch w.outcome {
	case "reaches":
		if a.Outcome != lab.Answered || w.index(a) < 0 {
			return fmt.Errorf("%s; want an answer of %s", a, strings.Join(w.backends, ","))
		}
		if w.in > 0 && a.Took > w.in {
			return fmt.Errorf("%s answered after %s, want it in %s", a, a.Took, w.in)
		}
		return w.checkSeen(st, from, a)
	case "refused":
		ok = a.Outcome.Refused() && a.Took < refusalLimit
	case "reset":
		ok = a.Outcome == lab.Reset && a.Took < refusalLimit
	case "unreachable":
		ok = a.Outcome == lab.Unreachable && a.Took < refusalLimit
	case "silence":
		ok = a.Outcome == lab.Silence
	}
	if !ok {
		return fmt.Errorf("%s; want it %s", a, w.outcome)
	}
	return nil
}

// index is which of the wanted backends answered. A backend is "name" or "name:port".
func (w want) index(a lab.Answer) int {
	return slices.IndexFunc(w.backends, func(b string) bool { return b == a.By || b == a.Backend() })
}

// checkSeen checks whom the backend saw. A backend that reaches itself must never see itself: its answer would not pass
// the node, and not be translated back.
func (w want) checkSeen(st *stage, from *lab.Actor, a lab.Answer) error {
	if w.as == "" {
		return nil
	}
	who := from
	switch {
	case a.By == from.Name && from.Node != nil:
		who = from.Node
	case w.as != "client":
		var err error
		if who, err = st.world.Actor(w.as); err != nil {
			return err
		}
	}
	own, err := who.Owns(a.Seen.Addr())
	if err != nil {
		return err
	}
	if !own {
		return fmt.Errorf("%s; want it to see %s", a, who.Name)
	}
	return nil
}

// each runs one function for every route of a line, all at once, and joins what went wrong.
func (l *line) each(fn func(route) error) error {
	errs := make([]error, len(l.routes))
	var wg sync.WaitGroup
	for i, r := range l.routes {
		wg.Go(func() {
			if err := fn(r); err != nil {
				errs[i] = fmt.Errorf("%s: %w", r.name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// send tries until every backend has answered, and a few times anyhow; no try may end otherwise than the story says.
func (st *stage) send(_ context.Context, args []string) (string, error) {
	l, err := st.parseLine(args)
	if err != nil {
		return "", err
	}
	w, err := parseWant(l.rest)
	if err != nil {
		return "", err
	}
	return "", l.each(func(r route) error { return st.try(r, w, l.n) })
}

// The number of tries: with k backends a random choice misses one of them in 40·k tries once in 10¹⁷.
func tries(w want) (least, most int) {
	switch w.outcome {
	case "reaches":
		return 6 * len(w.backends), 40 * len(w.backends)
	case "silence":
		return 1, 1
	}
	return 3, 3
}

func (st *stage) try(r route, w want, n int) error {
	least, most := tries(w)
	if n > 0 {
		least, most = n, max(n, most)
	}
	seen := map[int]bool{}
	for i := range most {
		if i >= least && len(seen) >= len(w.backends) {
			return nil
		}
		a := r.call.Do()
		if err := w.check(st, r.from, a); err != nil {
			return fmt.Errorf("try %d: %w", i+1, err)
		}
		if w.outcome == "reaches" {
			seen[w.index(a)] = true
		}
	}
	if len(seen) < len(w.backends) {
		return fmt.Errorf("%d tries met only %d of %s", most, len(seen), strings.Join(w.backends, ","))
	}
	return nil
}

// spread counts who answers. With 1000 connections and the usual 8 points the allowance is five standard deviations.
func (st *stage) spread(_ context.Context, args []string) (string, error) {
	l, err := st.parseLine(args)
	if err != nil {
		return "", err
	}
	if len(l.rest) != 2 && len(l.rest) != 4 || l.rest[0] != "over" {
		return "", script.ErrUsage
	}
	over, within := strings.Split(l.rest[1], ","), 8.0
	if len(l.rest) == 4 {
		if within, err = strconv.ParseFloat(l.rest[3], 64); err != nil {
			return "", err
		}
	}
	n := l.n
	if n == 0 {
		n = 1000
	}
	var mu sync.Mutex
	var out strings.Builder
	err = l.each(func(r route) error {
		w := want{outcome: "reaches", backends: over}
		got := map[string]int{}
		for range n {
			a := r.call.Do()
			if err := w.check(st, r.from, a); err != nil {
				return err
			}
			got[over[w.index(a)]]++
		}
		mu.Lock()
		fmt.Fprintf(&out, "%s: %v\n", r.name, got)
		mu.Unlock()
		for _, b := range over {
			share, fair := 100*float64(got[b])/float64(n), 100/float64(len(over))
			if share < fair-within || share > fair+within {
				return fmt.Errorf("%s took %.1f %% of %d connections, want %.1f ± %.0f %%: %v", b, share, n, fair, within, got)
			}
		}
		return nil
	})
	return out.String(), err
}

// meet makes n connections with pauses and counts who answered.
func meet(r route, n int, pause time.Duration, enough func(map[string]int) bool) (map[string]int, error) {
	got := map[string]int{}
	for i := range n {
		if i > 0 {
			time.Sleep(pause)
		}
		a := r.call.Do()
		if a.Outcome != lab.Answered {
			return got, fmt.Errorf("try %d: %s", i+1, a)
		}
		got[a.By]++
		if enough(got) {
			break
		}
	}
	return got, nil
}

func (st *stage) sticky(_ context.Context, args []string) (string, error) {
	l, err := st.parseLine(args)
	if err != nil {
		return "", err
	}
	on := ""
	if len(l.rest) == 2 && l.rest[0] == "on" {
		on = l.rest[1]
	} else if len(l.rest) != 0 {
		return "", script.ErrUsage
	}
	n := l.n
	if n == 0 {
		n = 20
	}
	return "", l.each(func(r route) error {
		got, err := meet(r, n, l.pause, func(map[string]int) bool { return false })
		if err != nil {
			return err
		}
		if len(got) != 1 || on != "" && got[on] == 0 {
			return fmt.Errorf("not sticky %s: %v", on, got)
		}
		return nil
	})
}

func (st *stage) wander(_ context.Context, args []string) (string, error) {
	l, err := st.parseLine(args)
	if err != nil {
		return "", err
	}
	n := l.n
	if n == 0 {
		n = 30
	}
	return "", l.each(func(r route) error {
		got, err := meet(r, n, l.pause, func(got map[string]int) bool { return len(got) > 1 })
		if err == nil && len(got) < 2 {
			err = fmt.Errorf("%d connections with pauses of %s met one backend: %v", n, l.pause, slices.Collect(maps.Keys(got)))
		}
		return err
	})
}

// idle checks that nothing reaches the servers of an actor for a while.
func (st *stage) idle(_ context.Context, args []string) (string, error) {
	if len(args) != 2 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	d, err := time.ParseDuration(args[1])
	if err != nil {
		return "", err
	}
	before := a.Hits()
	time.Sleep(d)
	if n := a.Hits() - before; n > 0 {
		return "", fmt.Errorf("%s got %d connections or datagrams in %s", a.Name, n, d)
	}
	return "", nil
}
