package story

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"fairlead/internal/lab"

	"rsc.io/script"
)

// flow handles connections that stay open: "flow open NAME FROM -> TO [A,B]", and what may be asked of them later.
func (st *stage) flow(_ context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	verb, name, rest := args[0], args[1], args[2:]
	if verb == "open" {
		return "", st.openFlows(name, rest)
	}
	flows, ok := st.flows[name]
	if !ok {
		return "", fmt.Errorf("no flow %q was opened", name)
	}
	var backends []string
	if len(rest) == 1 {
		backends = strings.Split(rest[0], ",")
	}
	switch verb {
	case "check":
		return "", eachFlow(flows, func(f *lab.Flow) error { return alive(f, backends) })
	case "dead":
		return "", eachFlow(flows, dead)
	case "close":
		delete(st.flows, name)
		return "", eachFlow(flows, func(f *lab.Flow) error { f.Close(); return nil })
	}
	return "", script.ErrUsage
}

func (st *stage) openFlows(name string, args []string) error {
	l, err := st.parseLine(args)
	if err != nil {
		return err
	}
	var backends []string
	if len(l.rest) == 1 {
		backends = strings.Split(l.rest[0], ",")
	}
	var mu sync.Mutex
	return l.each(func(r route) error {
		for range l.count {
			f, err := r.call.Open()
			if err != nil {
				return err
			}
			mu.Lock()
			st.flows[name] = append(st.flows[name], f)
			mu.Unlock()
			if by := f.First().By; backends != nil && !slices.Contains(backends, by) {
				return fmt.Errorf("the flow went to %s, want one of %v", by, backends)
			}
		}
		return nil
	})
}

func eachFlow(flows []*lab.Flow, fn func(*lab.Flow) error) error {
	errs := make([]error, len(flows))
	var wg sync.WaitGroup
	for i, f := range flows {
		wg.Go(func() { errs[i] = fn(f) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// alive asks on the flow: the backend that it began with must answer, or for UDP one of those given.
func alive(f *lab.Flow, backends []string) error {
	a := f.Ask()
	if a.Outcome != lab.Answered {
		return fmt.Errorf("the flow of %s to %s is cut: %s", f.First().Local, f.First().By, a)
	}
	if len(backends) == 0 {
		backends = []string{f.First().By}
	}
	if !slices.Contains(backends, a.By) {
		return fmt.Errorf("the flow of %s goes to %s, want one of %v", a.Local, a.By, backends)
	}
	return nil
}

func dead(f *lab.Flow) error {
	if a := f.Ask(); a.Outcome == lab.Answered {
		return fmt.Errorf("the flow of %s to %s lives", a.Local, a.By)
	}
	return nil
}

// load handles loads: "load start NAME FROM -> TO [OUTCOME]" and "load stop NAME [AT-LEAST] [gap D]".
func (st *stage) load(_ context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	switch name := args[1]; args[0] {
	case "start":
		return "", st.startLoad(name, args[2:])
	case "stop":
		least, gap, args := 20, time.Duration(0), args[2:]
		var err error
		if n := len(args); n >= 2 && args[n-2] == "gap" {
			if gap, err = time.ParseDuration(args[n-1]); err != nil {
				return "", err
			}
			args = args[:n-2]
		}
		if len(args) == 1 {
			if least, err = strconv.Atoi(args[0]); err != nil {
				return "", err
			}
		}
		return st.stopLoad(name, least, gap)
	}
	return "", script.ErrUsage
}

func (st *stage) startLoad(name string, args []string) error {
	l, err := st.parseLine(args)
	if err != nil {
		return err
	}
	good := func(*lab.Actor, lab.Answer) bool { return true }
	if len(l.rest) > 0 {
		w, err := parseWant(l.rest)
		if err != nil {
			return err
		}
		good = func(from *lab.Actor, a lab.Answer) bool { return w.check(st, from, a) == nil }
	} else {
		good = func(_ *lab.Actor, a lab.Answer) bool { return a.Outcome == lab.Answered }
	}
	for _, r := range l.routes {
		st.loads[name] = append(st.loads[name], r.call.StartLoad(l.rate, func(a lab.Answer) bool { return good(r.from, a) }))
	}
	return nil
}

func (st *stage) stopLoad(name string, least int, gap time.Duration) (string, error) {
	loads, ok := st.loads[name]
	if !ok {
		return "", fmt.Errorf("no load %q was started", name)
	}
	delete(st.loads, name)
	var out strings.Builder
	var errs []error
	for _, l := range loads {
		r := l.Stop()
		fmt.Fprintln(&out, r)
		switch {
		case gap > 0 && r.Gap > gap:
			errs = append(errs, fmt.Errorf("for %s connections did not end as they should, want %s at most", r.Gap, gap))
		case gap == 0 && r.BadCount > 0:
			errs = append(errs, fmt.Errorf("%d of %d connections did not end as they should", r.BadCount, r.Calls))
		}
		if r.Calls < least {
			errs = append(errs, fmt.Errorf("only %d connections were tried, want %d", r.Calls, least))
		}
	}
	return out.String(), errors.Join(errs...)
}

// stream handles datagrams from one socket.
func (st *stage) stream(_ context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	verb, name, rest := args[0], args[1], args[2:]
	if verb == "start" {
		return "", st.startStream(name, rest)
	}
	streams, ok := st.streams[name]
	if !ok {
		return "", fmt.Errorf("no stream %q was started", name)
	}
	switch verb {
	case "check":
		w, err := parseWant(rest)
		if err != nil {
			return "", err
		}
		if w.as != "" {
			return "", errors.New("a stream does not look at whom the backend sees")
		}
		var errs []error
		for _, s := range streams {
			errs = append(errs, st.checkStream(s, w))
		}
		return "", errors.Join(errs...)
	case "stop":
		delete(st.streams, name)
		for _, s := range streams {
			s.Stop()
		}
		return "", nil
	}
	return "", script.ErrUsage
}

func (st *stage) startStream(name string, args []string) error {
	l, err := st.parseLine(args)
	if err != nil {
		return err
	}
	for _, r := range l.routes {
		s, err := r.call.StartStream(l.every)
		if err != nil {
			return err
		}
		st.streams[name] = append(st.streams[name], s)
	}
	return nil
}

// streamWindow is how far back a check of a stream looks.
const streamWindow = 500 * time.Millisecond

// checkStream says whether the stream is as wanted lately: all that came back, and something did (or nothing, if silence
// is what is wanted).
func (st *stage) checkStream(s *lab.Stream, w want) error {
	lately := s.Since(time.Now().Add(-streamWindow))
	if w.outcome == "silence" {
		if len(lately) > 0 {
			return fmt.Errorf("%s came back; want silence", lately[len(lately)-1])
		}
		return nil
	}
	if len(lately) < 2 {
		return fmt.Errorf("only %d datagrams were answered in the last %s (%d sent so far)", len(lately), streamWindow, s.Sent())
	}
	for _, a := range lately {
		if err := w.check(st, nil, a); err != nil {
			return err
		}
	}
	return nil
}
