package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"fairlead/internal/kernel"
)

// legacy is the back end for the old xtables: text for iptables-legacy-restore, one call a family. The kernel takes the whole
// table anew each time, so a change costs what the table costs.
type legacy struct {
	tables [2]*kernel.XTables // by family; nil where the kernel has none

	mu    sync.Mutex // Write against Watch
	known map[tableID]prints
	seen  kernel.Sightings // of what somebody else changed, until Watch tells it
}

// tableID names a table of one family.
type tableID struct {
	v6    bool
	table Table
}

func (id tableID) String() string {
	if id.v6 {
		return "ip6 " + id.table.String()
	}
	return "ip " + id.table.String()
}

// errLocked says that another program holds the lock of xtables: nothing was done, and it may be tried again at once.
var errLocked = errors.New("another program holds the xtables lock")

const (
	exitLocked  = 4   // iptables' RESOURCE_PROBLEM
	lockSeconds = "5" // how long to wait for the lock, as kube-proxy does
)

func newLegacy() (*legacy, error) {
	l := &legacy{known: map[tableID]prints{}}
	var err4, err6 error
	l.tables[0], err4 = kernel.LoadXTables(false)
	l.tables[1], err6 = kernel.LoadXTables(true)
	if err4 != nil && err6 != nil {
		return nil, err4
	}
	return l, nil
}

func (l *legacy) Name() string { return flavourLegacy }

func (l *legacy) Close() error {
	var errs []error
	for _, x := range l.tables {
		if x != nil {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}

// program is the name of one of iptables' programs of the old flavour, where it has a name of its own.
func program(v6 bool, what string) string {
	base := "iptables-"
	if v6 {
		base = "ip6tables-"
	}
	if own := base + "legacy-" + what; kernel.Installed(own) {
		return own
	}
	return base + what
}

// Write makes the changes; see backend. Each family is one call of iptables-restore, and each table in it one transaction.
func (l *legacy) Write(ctx context.Context, changes []change) error {
	if err := checkAll(changes); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, v6 := range [...]bool{false, true} {
		own := touched(changes, v6)
		if len(own) == 0 {
			continue
		}
		err := l.writeFamily(ctx, v6, changes)
		l.lookAt(v6, own)
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *legacy) writeFamily(ctx context.Context, v6 bool, changes []change) error {
	var tables [3][]*change
	builtin := false
	for i := range changes {
		if c := &changes[i]; c.Chain.V6 == v6 {
			tables[c.Chain.Table] = append(tables[c.Chain.Table], c)
			builtin = builtin || c.Chain.builtin()
		}
	}
	if err := l.present(v6, &tables); err != nil {
		return err
	}
	if len(tables[Nat])+len(tables[Filter])+len(tables[Mangle]) == 0 {
		return nil
	}
	p := restorePlan{tables: tables}
	if builtin {
		var err error
		if p.held, err = l.builtins(ctx, v6); err != nil {
			return err
		}
	}
	return p.run(ctx, v6)
}

// present leaves out tables that are not loaded and in which only something should be gone.
func (l *legacy) present(v6 bool, tables *[3][]*change) error {
	x := l.tables[b2i(v6)]
	for t, cs := range tables {
		wanted := false
		for _, c := range cs {
			wanted = wanted || !c.Gone
		}
		if wanted || len(cs) == 0 {
			continue
		}
		if x == nil {
			tables[t] = nil
			continue
		}
		there, err := x.Has(Table(t).String())
		if err != nil {
			return err
		}
		if !there {
			tables[t] = nil
		}
	}
	return nil
}

// heldLine is a rule of a built-in chain as iptables-save prints it.
type heldLine struct {
	text  string
	rule  Rule
	exact bool
}

// builtins reads the rules of the built-in chains that jump to our chains.
func (l *legacy) builtins(ctx context.Context, v6 bool) (map[ChainID][]heldLine, error) {
	held := map[ChainID][]heldLine{}
	err := save(ctx, v6, func(id ChainID, line string) {
		if line == "" || !id.builtin() {
			return
		}
		if _, r, exact := parseText(line, v6); strings.HasPrefix(r.Target.Chain, kubePrefix) || r.Target.Chain == chainGate {
			held[id] = append(held[id], heldLine{line, r, exact})
		}
	})
	return held, err
}

// restorePlan is what one call of iptables-restore is told.
type restorePlan struct {
	tables [3][]*change
	held   map[ChainID][]heldLine
}

// lines yields the input of iptables-restore. A line is valid until the next one.
func (p restorePlan) lines() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		var b []byte
		line := func(parts ...string) bool {
			b = b[:0]
			for _, s := range parts {
				b = append(b, s...)
			}
			return yield(append(b, '\n'))
		}
		for _, t := range [...]Table{Filter, Nat, Mangle} {
			if cs := p.tables[t]; len(cs) > 0 {
				if !line("*", t.String()) || !p.chains(cs, line) || !p.rules(cs, yield) || !p.jumps(cs, line) || !p.remove(cs, line) || !line("COMMIT") {
					return
				}
			}
		}
	}
}

// chains makes all chains that are named, or empties them.
func (p restorePlan) chains(cs []*change, line func(...string) bool) bool {
	for _, c := range cs {
		if !c.Chain.builtin() && !line(":", c.Chain.Name, " - [0:0]") {
			return false
		}
	}
	return true
}

func (p restorePlan) rules(cs []*change, yield func([]byte) bool) bool {
	var b []byte
	for _, c := range cs {
		if c.Chain.builtin() || c.Gone {
			continue
		}
		for i := range c.Rules {
			b = append(c.Rules[i].appendText(b[:0], c.Chain.Name, c.Chain.V6), '\n')
			if !yield(b) {
				return false
			}
		}
	}
	return true
}

// jumps puts the missing jumps at the top of the built-in chains, and takes out those that are gone or lead to a chain that
// is.
func (p restorePlan) jumps(cs []*change, line func(...string) bool) bool {
	lost := map[string]bool{}
	for _, c := range cs {
		lost[c.Chain.Name] = lost[c.Chain.Name] || c.Gone && !c.Chain.builtin()
	}
	for _, c := range cs {
		if !c.Chain.builtin() {
			continue
		}
		there := map[Rule]bool{}
		for _, h := range p.held[c.Chain] {
			if lost[h.rule.Target.Chain] || c.Gone && h.exact && slices.Contains(c.Rules, h.rule) {
				if !line("-D ", strings.TrimPrefix(h.text, "-A ")) {
					return false
				}
				continue
			}
			there[h.rule] = there[h.rule] || h.exact
		}
		for i := len(c.Rules) - 1; i >= 0 && !c.Gone; i-- {
			if text := c.Rules[i].appendText(nil, c.Chain.Name, c.Chain.V6); !there[c.Rules[i]] && !line("-I ", string(text[len("-A "):])) {
				return false
			}
		}
	}
	return true
}

func (p restorePlan) remove(cs []*change, line func(...string) bool) bool {
	for _, c := range cs {
		if c.Gone && !c.Chain.builtin() && !line("-X ", c.Chain.Name) {
			return false
		}
	}
	return true
}

// run gives the plan to iptables-restore.
func (p restorePlan) run(ctx context.Context, v6 bool) error {
	cmd := kernel.Command{Name: program(v6, "restore"), Args: []string{"-w", lockSeconds, "--noflush"}}
	cmd.Stdin = func(w io.Writer) error {
		buf := bufio.NewWriterSize(w, 64<<10)
		for line := range p.lines() {
			if _, err := buf.Write(line); err != nil {
				return err
			}
		}
		return buf.Flush()
	}
	err := kernel.TryFault(func() error { return cmd.Run(ctx) })
	var exit *kernel.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	if exit.Code == exitLocked {
		return fmt.Errorf("%w: %w", errLocked, err)
	}
	switch line, table := p.blamed(exit.Stderr); {
	case line == "":
		return err
	case strings.HasPrefix(line, "-X "):
		return fmt.Errorf("table %s: %s: %w: %w", table, line, errInUse, err)
	case line == "COMMIT":
		return fmt.Errorf("%w (the kernel refused table %s as a whole: a loop of jumps, or a match, target or counter it does not have)", err, table)
	default:
		return fmt.Errorf("table %s: %w (the line is: %s)", table, err, line)
	}
}

// lineNumber finds the line in what iptables-restore complains: "line 7 failed", "Error occurred at line: 7".
var lineNumber = regexp.MustCompile(`line:? (\d+)`)

// blamed is the line that iptables-restore names in its complaint, and its table.
func (p restorePlan) blamed(words string) (line, table string) {
	m := lineNumber.FindStringSubmatch(words)
	if m == nil {
		return "", ""
	}
	n, err := strconv.Atoi(m[1])
	if err != nil {
		return "", ""
	}
	for b := range p.lines() {
		line = strings.TrimSuffix(string(b), "\n")
		if strings.HasPrefix(line, "*") {
			table = line[1:]
		}
		if n--; n == 0 {
			return line, table
		}
	}
	return "", ""
}

// scan gives chain after chain, each once; Rules are valid during the call only. Where no table is loaded it needs no program.
func (l *legacy) scan(ctx context.Context, v6 bool, each func(ChainID, found)) error {
	if x := l.tables[b2i(v6)]; x != nil {
		if loaded, err := x.Tables(); err != nil || len(loaded) == 0 {
			return err
		}
	}
	l.mu.Lock()
	l.lookAt(v6, nil) // before it is read: what changes meanwhile is noticed
	l.mu.Unlock()
	g := chainGiver{left: map[ChainID]bool{}, each: each}
	err := save(ctx, v6, func(id ChainID, line string) {
		if line == "" {
			if id.builtin() || strings.HasPrefix(id.Name, kubePrefix) {
				g.left[id] = true
			}
			return
		}
		g.turn(id)
		if !g.left[id] {
			return
		}
		_, r, exact := parseText(line, v6)
		if !id.builtin() || strings.HasPrefix(r.Target.Chain, kubePrefix) {
			g.f.Rules = append(g.f.Rules, r)
			g.f.Exact = g.f.Exact && exact
		}
	})
	if err != nil {
		return err
	}
	g.turn(ChainID{})
	for id := range g.left {
		each(id, found{Exact: true})
	}
	return nil
}

// chainGiver gathers the rules of one chain after the other, as iptables-save prints them.
type chainGiver struct {
	left map[ChainID]bool // chains not given yet
	at   ChainID
	f    found
	each func(ChainID, found)
}

// turn gives what was gathered when another chain begins.
func (g *chainGiver) turn(id ChainID) {
	if id == g.at {
		return
	}
	if g.left[g.at] {
		g.each(g.at, g.f)
		delete(g.left, g.at)
	}
	g.at, g.f = id, found{Rules: g.f.Rules[:0], Exact: true}
}

// save runs iptables-save over the tables that are loaded: each gets every chain, with an empty line, and every rule.
func save(ctx context.Context, v6 bool, each func(id ChainID, line string)) error {
	cmd := kernel.Command{Name: program(v6, "save")}
	cmd.Stdout = func(r io.Reader) error { return parseSave(r, v6, each) }
	return cmd.Run(ctx)
}

// parseSave reads the output of iptables-save.
func parseSave(r io.Reader, v6 bool, each func(id ChainID, line string)) error {
	scan := bufio.NewScanner(r)
	scan.Buffer(make([]byte, 0, 64<<10), 1<<20)
	id, known := ChainID{V6: v6}, false
	for scan.Scan() {
		line := scan.Text()
		switch {
		case strings.HasPrefix(line, "*"):
			id.Table, known = tableNamed(line[1:])
		case !known:
		case strings.HasPrefix(line, ":"):
			id.Name, _, _ = strings.Cut(line[1:], " ")
			each(id, "")
		case strings.HasPrefix(line, "-A "):
			id.Name, _, _ = strings.Cut(line[len("-A "):], " ")
			each(id, line)
		}
	}
	return scan.Err()
}
