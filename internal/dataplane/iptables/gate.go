package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// Gate lets hidden (marked) Service traffic and answers pass the FORWARD chain of iptables where another dataplane serves. Its rules
// are those of KUBE-FORWARD: no table can overrule the drop of another one, so they have to be where the drop is, which on each
// node with Docker is the policy of FORWARD. The chain has a name of its own, so that it stands while KUBE-FORWARD comes and goes.
//
// It is kept where, and only where, the filter table has a FORWARD chain that could drop: no table is made or loaded. The zero
// value is a Gate of the network namespace in which it is first used. It is not for use by several goroutines at the same time.
type Gate struct {
	nft    *nft
	legacy legacy
	seen   sight
}

// sight is what was looked at when nothing was missing.
type sight struct {
	bit, generation string
	sums            [2]uint64 // of the legacy filter tables, by family
}

// chainGate is the gate's chain in the filter table.
const chainGate = "FAIRLEAD-FORWARD"

func gateID(v6 bool) ChainID    { return ChainID{v6, Filter, chainGate} }
func forwardID(v6 bool) ChainID { return ChainID{v6, Filter, "FORWARD"} }

// gateJump leads to the gate.
var gateJump = Rule{Comment: "fairlead forwarding rules", Target: Target{Action: Jump, Chain: chainGate}}

// gateRules is the gate, for the mark with this bit. Invalid packets are dropped by whoever serves.
func gateRules(bit int) []Rule {
	return forward(Config{KeepInvalid: true}, Config{MasqueradeBit: bit}.mark())
}

// Keep makes the gate what it should be, also gone where FORWARD can't drop any more, and names the chains that were changed.
// While nothing changes it costs one question to each of nf_tables and the legacy tables that are loaded. On failure it goes on
// with the others.
func (g *Gate) Keep(ctx context.Context, bit int) (changed []string, err error) {
	return g.make(ctx, fmt.Sprint(bit), gateRules(bit))
}

// Remove takes the gate out.
func (g *Gate) Remove(ctx context.Context) (changed []string, err error) {
	return g.make(ctx, "none", nil)
}

// Close lets go of the kernel and leaves the rules.
func (g *Gate) Close() error {
	err := g.legacy.Close()
	if g.nft != nil {
		err = errors.Join(err, g.nft.Close())
	}
	*g = Gate{}
	return err
}

// make brings the gate in both kinds of tables to these rules, none for gone.
func (g *Gate) make(ctx context.Context, bit string, rules []Rule) (changed []string, err error) {
	was := g.seen
	if was.bit != bit {
		was = sight{}
	}
	g.seen.bit = bit
	for _, part := range []func(context.Context, sight, []Rule) ([]change, error){g.inNFT, g.inLegacy} {
		done, failed := part(ctx, was, rules)
		for _, c := range done {
			changed = append(changed, where(c.Chain))
		}
		err = errors.Join(err, failed)
	}
	return changed, err
}

// inNFT looks at nf_tables if anybody has changed it since.
func (g *Gate) inNFT(ctx context.Context, was sight, rules []Rule) (done []change, err error) {
	g.seen.generation = ""
	generation, err := g.generation()
	if generation == "" || err != nil {
		return nil, err
	}
	if generation != was.generation {
		for _, v6 := range [...]bool{false, true} {
			f, err := g.nft.firewall(v6)
			if err != nil {
				return nil, fmt.Errorf("nf_tables: look at %s: %w", where(forwardID(v6)), err)
			}
			done = append(done, f.needs(v6, rules)...)
		}
		if err := write(ctx, g.nft, done); err != nil {
			return nil, fmt.Errorf("nf_tables: %w", err)
		}
	}
	g.seen.generation = generation // before our own write: the next look sees whether it holds
	return done, nil
}

// generation is that of nf_tables; empty where the kernel has none.
func (g *Gate) generation() (generation string, err error) {
	if g.nft == nil {
		g.nft, err = newNFT()
	}
	if err == nil {
		generation, err = g.nft.generation()
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return "", nil
	}
	return generation, err
}

// write makes changes: what is added, then what goes.
func write(ctx context.Context, be backend, changes []change) error {
	var add, jumps, chains []change
	for _, c := range changes {
		switch {
		case !c.Gone:
			add = append(add, c)
		case c.Chain.builtin():
			jumps = append(jumps, c)
		default:
			chains = append(chains, c)
		}
	}
	var err error
	if len(add) > 0 {
		err = be.Write(ctx, add)
	}
	return errors.Join(err, remove(ctx, be, append(jumps, chains...)))
}

// firewall is a FORWARD chain of iptables, and the gate in it.
type firewall struct {
	drops  bool // it is there, and could drop
	jump   bool // it leads to the gate as it should
	gate   bool // the gate's chain is there
	inside found
}

// note takes in a rule of FORWARD. What leads to chains of kube-proxy, or of ours in iptables mode, comes and goes with them.
func (f *firewall) note(r Rule, exact, v6 bool) {
	switch to := r.Target.Chain; {
	case to == chainGate:
		f.jump = f.jump || exact && r == gateJump
	case to == "" || !ours(ChainID{v6, Filter, to}):
		f.drops = true
	}
}

// needs are the changes that bring the gate to these rules.
func (f *firewall) needs(v6 bool, rules []Rule) (out []change) {
	switch {
	case f.drops && len(rules) > 0:
		if !f.gate || !f.inside.Exact || !slices.Equal(f.inside.Rules, rules) {
			out = append(out, change{Chain: gateID(v6), Rules: rules})
		}
		if !f.jump {
			out = append(out, change{Chain: forwardID(v6), Rules: []Rule{gateJump}})
		}
	case f.gate:
		out = append(out, change{Chain: forwardID(v6), Rules: []Rule{gateJump}, Gone: true}, change{Chain: gateID(v6), Gone: true})
	}
	return out
}

// firewall reads the one of nf_tables: that of a table which iptables-nft made, or what looks the same.
func (n *nft) firewall(v6 bool) (f firewall, err error) {
	forward, err := n.chainAttrs(forwardID(v6))
	if err != nil {
		return f, err
	}
	hooked := false
	for typ, v := range kernel.Attrs(forward) {
		switch typ {
		case unix.NFTA_CHAIN_HOOK:
			hooked = true
		case unix.NFTA_CHAIN_POLICY:
			f.drops = kernel.AttrU32(v) == verdictDrop
		}
	}
	if hooked {
		held, err := n.held(forwardID(v6))
		if err != nil {
			return f, err
		}
		for _, h := range held {
			f.note(h.rule, h.exact, v6)
		}
	}
	gate, err := n.chainAttrs(gateID(v6))
	if f.gate = gate != nil; !f.gate || err != nil {
		return f, err
	}
	_, err = n.rules(gateID(v6), &f.inside)
	return f, err
}

// chainAttrs are what the kernel tells of a chain; nil when it is not there.
func (n *nft) chainAttrs(id ChainID) ([]byte, error) {
	m, err := n.conn.Get(nftType(unix.NFT_MSG_GETCHAIN), family(id.V6), appendChain(nil, id))
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return m.Attrs, err
}

// inLegacy looks at the legacy filter tables that are loaded, if anybody has changed them since.
func (g *Gate) inLegacy(ctx context.Context, was sight, rules []Rule) (done []change, err error) {
	if g.legacy.known == nil {
		g.legacy.known = map[tableID]prints{}
	}
	for i, v6 := range [...]bool{false, true} {
		if g.legacy.tables[i] == nil { // a kernel may get them later
			if g.legacy.tables[i], _ = kernel.OpenXTables(v6); g.legacy.tables[i] == nil {
				continue
			}
		}
		sum, failed := g.legacy.tables[i].Rules(Filter.String(), nil)
		if failed == nil && sum != was.sums[i] {
			var changes []change
			changes, failed = g.legacy.tend(ctx, v6, rules)
			done = append(done, changes...)
		}
		if g.seen.sums[i] = sum; failed != nil {
			g.seen.sums[i] = 0
			err = errors.Join(err, fmt.Errorf("legacy tables, %s: %w", familyName(v6), failed))
		}
	}
	return done, err
}

// firewall reads the one of a legacy table, but for what is in the gate and how it is led to: without a program, and without
// loading the table.
func (l *legacy) firewall(v6 bool) (f firewall, err error) {
	var rules []kernel.XTRule
	_, err = l.tables[b2i(v6)].Rules(Filter.String(), func(r kernel.XTRule) {
		switch string(r.Chain) {
		case chainGate:
			f.gate = true
		case "FORWARD":
			rules = append(rules, kernel.XTRule{Jump: slices.Clone(r.Jump), Drop: r.Drop})
		}
	})
	if len(rules) == 0 || err != nil {
		return f, err
	}
	policy := len(rules) - 1 // the last one
	f.drops = rules[policy].Drop
	for _, r := range rules[:policy] {
		f.note(Rule{Target: Target{Chain: string(r.Jump)}}, false, v6)
	}
	return f, nil
}

// tend brings the gate of a legacy table to these rules. It starts programs only where the gate is needed, or there.
func (l *legacy) tend(ctx context.Context, v6 bool, rules []Rule) ([]change, error) {
	f, err := l.firewall(v6)
	if err != nil || !f.gate && (!f.drops || len(rules) == 0) {
		return nil, err
	}
	if !toolOfLegacy(ctx, v6) {
		return nil, errNoTool
	}
	f.inside.Exact = true
	err = save(ctx, v6, func(id ChainID, line string) {
		if line == "" || id != gateID(v6) && id != forwardID(v6) {
			return
		}
		_, r, exact := parseText(line, v6)
		if id == gateID(v6) {
			f.inside.Rules = append(f.inside.Rules, r)
			f.inside.Exact = f.inside.Exact && exact
			return
		}
		f.note(r, exact, v6)
	})
	if err != nil {
		return nil, err
	}
	changes := f.needs(v6, rules)
	err = write(ctx, l, changes)
	clear(l.known) // nobody watches
	l.seen = kernel.Sightings{}
	return changes, err
}

var errNoTool = errors.New("iptables-legacy-restore is not installed, so what the FORWARD chain drops of Service traffic can't be let through")

// toolOfLegacy tells whether the programs that save and restore would use are of the old flavour.
func toolOfLegacy(ctx context.Context, v6 bool) bool {
	if strings.Contains(program(v6, "restore"), "-legacy-") {
		return true
	}
	flavour, err := installedFlavour(ctx)
	return err == nil && flavour == flavourLegacy
}
