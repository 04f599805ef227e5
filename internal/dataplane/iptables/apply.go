package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"

	"fairlead/internal/model"
	"fairlead/internal/shadow"
)

// Config is what the rules depend on beside the model.
type Config struct {
	V4, V6        bool        // families to serve
	MasqueradeBit int         // bit of the packet mark that asks for masquerade (kube-proxy's iptables.masqueradeBit); 0..31
	KeepInvalid   bool        // do not drop packets that conntrack calls invalid (conntrack.tcpBeLiberal)
	Backend       string      // "nf_tables", "legacy", or empty for what the node uses
	Log           func(error) // told of what does not work, and keeps nothing else from working; may be nil
	counters      bool        // the kernel has nfacct counters
}

func (c Config) mark() uint32 { return 1 << c.MasqueradeBit }

func (c Config) invalidCounter() string {
	if c.counters {
		return acctInvalid
	}
	return ""
}

// Dataplane writes Services as iptables rules. Use New.
type Dataplane struct {
	cfg      Config
	be       backend
	state    *model.State              // as asked for last
	services map[serviceID][]model.Key // the frontends of each Service port, sorted
	owned    map[path]int              // how many frontends make an address a Service's alone
	trees    [2]forest                 // by family
	table    *shadow.Table[owner, ChainID, content]
	loaded   bool
	terse    bool      // no comments on the rules of single endpoints
	counters *accounts // nil where the kernel has none
	dumped   dumped
	told     bool // that localhost can't be served
	sysctl   func(name, value string) error
	sizes    map[owner][2]int // rules wanted, by table
	total    [2][3]int        // the sum of them, by family and table
	last     [2][3]int        // rules written in the last round
}

// owner is who wants a chain: a serviceID, a branch, or a fixedID.
type owner any

// branch is one chain of a tree.
type branch struct {
	tree *tree
	at   path
}

// content is what the shadow table remembers of a chain: a checksum, and until it is written, who can render it.
type content struct {
	sum uint64
	by  owner
}

// forest is the trees of one family.
type forest struct {
	services  *tree // nat: to the Services' chains
	nodePorts *tree // nat: the same by port
	refused   *tree // filter: addresses
	ranges    *tree // filter: sources not allowed
	denied    *tree // filter: NodePorts
}

func (f forest) all() []*tree { return []*tree{f.services, f.nodePorts, f.refused, f.ranges, f.denied} }

func newDataplane(cfg Config, be backend) *Dataplane {
	if cfg.Log == nil {
		cfg.Log = func(error) {}
	}
	d := &Dataplane{cfg: cfg, be: be}
	d.table = shadow.New[owner, ChainID](func(a, b content) bool { return a.sum == b.sum }, func(c content) content { return content{sum: c.sum} })
	d.reset()
	return d
}

// reset forgets all that is wanted, not what the kernel may hold.
func (d *Dataplane) reset() {
	d.state = model.NewState()
	d.services, d.owned = map[serviceID][]model.Key{}, map[path]int{}
	d.sizes, d.total = map[owner][2]int{}, [2][3]int{}
	for i := range d.trees {
		v6 := i == 1
		grow := func(root, prefix string, table Table, ports bool, rules func(*service, model.Frontend) []Rule) *tree {
			t := &tree{root: root, prefix: prefix, table: table, v6: v6, ports: ports, dirty: map[path]bool{"": true}}
			t.rules = func(p path) []Rule { return d.entryRules(t, p, rules) }
			return t
		}
		dispatch := func(s *service, f model.Frontend) []Rule { return []Rule{s.dispatch(f)} }
		byPort := func(s *service, f model.Frontend) []Rule {
			if rule := s.dispatch(f); !v6 && d.cfg.counters && d.state.Node.LocalhostPort {
				return []Rule{localhostOnly(rule), rule}
			}
			return dispatch(s, f)
		}
		f := forest{
			services:  grow(chainServices, prefixService, Nat, false, dispatch),
			nodePorts: grow(chainNodePorts, prefixService+"NP-", Nat, true, byPort),
			refused:   grow(chainServices, prefixRefusals, Filter, false, (*service).refusals),
			ranges:    grow(chainProxyFW, prefixRanges, Filter, false, (*service).refusals),
			denied:    grow(chainDenyPorts, prefixDenied, Filter, true, (*service).refusals),
		}
		f.services.tail = func() []Rule { return gates(&d.state.Node, v6, chainNodePorts) }
		f.refused.tail = func() []Rule { return unassigned(&d.state.Node, v6) }
		d.trees[i] = f
	}
}

// entryRules renders one entry of a tree: a frontend's, or that of a whole address whose other ports are refused.
func (d *Dataplane) entryRules(t *tree, p path, rules func(*service, model.Frontend) []Rule) []Rule {
	k, whole := pathKey(p, t.ports, t.v6)
	if whole {
		return []Rule{{Dst: host(k.IP), Target: Target{Action: Jump, Chain: chainRefuse}}}
	}
	f := d.state.Frontends[k]
	return rules(d.service(serviceOf(f.Routes[model.FromOutside].Pool)), f)
}

func (d *Dataplane) service(id serviceID) *service {
	s := &service{id: id, label: id.pool(model.Cluster).PortName(), node: &d.state.Node, terse: d.terse}
	for _, k := range d.services[id] {
		s.frontends = append(s.frontends, d.state.Frontends[k])
	}
	for scope := range s.pools {
		id := id.pool(model.Scope(scope))
		s.pools[scope] = d.state.Pools[id]
		s.pools[scope].ID = id
	}
	return s
}

// Apply makes it so; see engine.Dataplane. Its cost is that of what changed: a changed pool renders the chains of one
// Service port, a new Service also those between the root of a tree and its leaf. With the nf_tables back end a change is
// one transaction; the kernel checks all chains for loops then, which costs it about 50 ms for 25,000 chains.
func (d *Dataplane) Apply(ctx context.Context, delta model.Delta) error {
	if delta.Full || !d.loaded {
		if err := d.load(ctx); err != nil {
			return fmt.Errorf("read the rules: %w", err)
		}
	}
	if delta.Full {
		d.reset()
		d.terse = d.be.Name() == flavourLegacy && endpointCount(delta.Pools) > terseAbove
	}
	d.allowLocalhost(delta.Node)
	d.want(d.narrow(delta))
	return d.write(ctx)
}

// allowLocalhost lets packets to 127.0.0.0/8 be routed after their destination was translated, which NodePorts on
// localhost need; KUBE-FIREWALL keeps strangers out. Nothing turns it off again, since others may rely on it.
func (d *Dataplane) allowLocalhost(n *model.Node) {
	if n == nil || !n.LocalhostPort || !d.cfg.V4 || d.sysctl == nil {
		return
	}
	if err := d.sysctl(RouteLocalnet, "1"); err != nil && !d.told {
		d.told = true
		d.cfg.Log(fmt.Errorf("NodePorts on 127.0.0.1 will not work; everything else does: %w", err))
	}
}

// RouteLocalnet is the sysctl that NodePorts on 127.0.0.0/8 need to be 1.
const RouteLocalnet = "net/ipv4/conf/all/route_localnet"

// terseAbove is how many endpoints make the legacy back end leave out comments where there is a rule for each endpoint, as
// kube-proxy does (its large-cluster mode). There every change copies the whole table, and a comment adds 288 bytes to a
// rule; in nf_tables it costs next to nothing.
const terseAbove = 1000

func endpointCount(pools []model.Pool) (n int) {
	for _, p := range pools {
		n += len(p.Backends)
	}
	return n
}

// load takes note of what the kernel holds, in the chains that are ours. At the start Dump has read it just before.
func (d *Dataplane) load(ctx context.Context) error {
	d.loaded = false
	held := d.dumped.held
	if now, err := d.be.generation(); held == nil || err != nil || now != d.dumped.generation {
		held = map[ChainID]content{}
		for _, v6 := range d.families() {
			if err := d.be.scan(ctx, v6, func(id ChainID, f found) { hold(held, id, f) }); err != nil {
				return err
			}
		}
	}
	d.dumped = dumped{}
	d.table.Loaded(maps.All(held))
	d.loaded = true
	return nil
}

// dumped is what Dump found of our chains, and when.
type dumped struct {
	generation string
	held       map[ChainID]content
}

// hold notes a chain that the kernel holds, if it is ours.
func hold(held map[ChainID]content, id ChainID, f found) {
	switch {
	case id.builtin(): // one that we have no jump in is nothing to us
		if jumps, ok := expectedJumps[id]; ok {
			held[id] = content{sum: checksum(id, keepOnly(f.Rules, jumps))}
		}
	case ours(id) || id.Name == chainFirewall && !id.V6: // kube-proxy makes one for IPv6 too; it is the kubelet's then
		held[id] = content{sum: foundSum(id, f)}
	}
}

// expectedJumps is the rules that should be in the built-in chains.
var expectedJumps = func() map[ChainID][]Rule {
	out := map[ChainID][]Rule{}
	for _, c := range append(jumps(false), jumps(true)...) {
		out[c.ID] = c.Rules
	}
	return out
}()

// keepOnly is the rules of a built-in chain that are ours, once each.
func keepOnly(rules, expected []Rule) []Rule {
	var out []Rule
	for _, r := range rules {
		if slices.Contains(expected, r) && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

func foundSum(id ChainID, f found) uint64 {
	if !f.Exact {
		return 0
	}
	return checksum(id, f.Rules)
}

var seed = maphash.MakeSeed()

// checksum tells contents apart; 0 is no content at all.
func checksum(id ChainID, rules []Rule) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	maphash.WriteComparable(&h, id)
	for i := range rules {
		maphash.WriteComparable(&h, rules[i])
	}
	return h.Sum64() | 1
}

func (d *Dataplane) families() []bool {
	var out []bool
	if d.cfg.V4 {
		out = append(out, false)
	}
	if d.cfg.V6 {
		out = append(out, true)
	}
	return out
}

// narrow leaves out the families that are not served.
func (d *Dataplane) narrow(delta model.Delta) model.Delta {
	if d.cfg.V4 && d.cfg.V6 {
		return delta
	}
	other := d.cfg.V4 // v6 is the family that is left out
	drop := func(k model.Key) bool { return k.V6() == other }
	delta.Frontends = slices.DeleteFunc(slices.Clone(delta.Frontends), func(f model.Frontend) bool { return drop(f.Key) })
	delta.Pools = slices.DeleteFunc(slices.Clone(delta.Pools), func(p model.Pool) bool { return p.ID.V6 == other })
	delta.GoneFrontends = slices.DeleteFunc(slices.Clone(delta.GoneFrontends), drop)
	delta.GonePools = slices.DeleteFunc(slices.Clone(delta.GonePools), func(p model.PoolID) bool { return p.V6 == other })
	return delta
}

// want brings the delta into the state, the trees and the shadow table.
func (d *Dataplane) want(delta model.Delta) {
	dirty := map[serviceID]bool{} // true: more than the backends behind the same frontends changed
	for _, k := range delta.GoneFrontends {
		d.unlink(k, dirty)
	}
	for _, f := range delta.Frontends {
		d.unlink(f.Key, dirty)
	}
	for _, id := range delta.GonePools {
		dirty[serviceOf(id)] = dirty[serviceOf(id)] || len(d.state.Pools[id].Backends) > 0
	}
	for _, p := range delta.Pools {
		id := serviceOf(p.ID)
		dirty[id] = dirty[id] || (len(p.Backends) == 0) != (len(d.state.Pools[p.ID].Backends) == 0)
	}
	delta.Full = false // what is not listed was forgotten by reset
	d.state.Apply(delta)
	for _, f := range delta.Frontends {
		d.link(f, dirty)
	}
	d.grow(delta.Frontends, dirty)
	if delta.Node != nil {
		d.allDirty(dirty)
	}
	for id := range dirty {
		d.wantService(id)
	}
	d.wantTrees()
	if delta.Node != nil || len(delta.Checks)+len(delta.GoneChecks) > 0 {
		for _, v6 := range d.families() {
			d.set(fixedID{v6}, d.render(fixedID{v6}))
		}
	}
}

// unlink takes a frontend out of its Service and out of the trees.
func (d *Dataplane) unlink(k model.Key, dirty map[serviceID]bool) {
	f, ok := d.state.Frontends[k]
	if !ok {
		return
	}
	id := serviceOf(f.Routes[model.FromOutside].Pool)
	dirty[id] = true
	d.services[id] = slices.DeleteFunc(d.services[id], func(o model.Key) bool { return o == k })
	if f.Owned {
		d.own(k, -1)
	}
	delete(d.state.Frontends, k)
	if len(d.services[id]) == 0 {
		delete(d.services, id)
	}
	for _, t := range d.forest(k).all() {
		if t.ports == k.NodePort() {
			t.remove(keyPath(k))
		}
	}
}

func (d *Dataplane) link(f model.Frontend, dirty map[serviceID]bool) {
	id := serviceOf(f.Routes[model.FromOutside].Pool)
	dirty[id] = true
	keys := d.services[id]
	i, found := slices.BinarySearchFunc(keys, f.Key, model.Key.Compare)
	if !found {
		d.services[id] = slices.Insert(keys, i, f.Key)
	}
	if f.Owned {
		d.own(f.Key, 1)
	}
}

// own counts the frontends of an address whose other ports are refused.
func (d *Dataplane) own(k model.Key, n int) {
	p := addrPath(k.IP)
	if d.owned[p] += n; d.owned[p] == 0 {
		delete(d.owned, p)
		d.forest(k).refused.remove(p)
	}
}

func (d *Dataplane) forest(k model.Key) forest {
	if k.V6() {
		return d.trees[1]
	}
	return d.trees[0]
}

// grow puts the frontends of dirty Services where they belong in the trees.
func (d *Dataplane) grow(fresh []model.Frontend, dirty map[serviceID]bool) {
	puts := map[*tree][]path{}
	for _, f := range fresh {
		if f.Owned {
			puts[d.forest(f.Key).refused] = append(puts[d.forest(f.Key).refused], addrPath(f.Key.IP))
		}
	}
	for id, more := range dirty {
		if !more {
			continue
		}
		s := d.service(id)
		for _, f := range s.frontends {
			for _, t := range d.forest(f.Key).all() {
				if t.ports != f.Key.NodePort() {
					continue
				}
				if d.belongs(t, s, f) {
					puts[t] = append(puts[t], keyPath(f.Key))
				} else {
					t.remove(keyPath(f.Key))
				}
			}
		}
	}
	for t, ps := range puts {
		t.putAll(ps)
	}
}

// belongs tells whether f has an entry in t.
func (d *Dataplane) belongs(t *tree, s *service, f model.Frontend) bool {
	forest := d.forest(f.Key)
	switch t {
	case forest.services: // an address of the node may be a NodePort's too
		return s.served(f) || !f.Owned
	case forest.nodePorts:
		return s.served(f)
	case forest.refused:
		return f.Allow == nil && len(s.leftovers(f)) > 0
	case forest.ranges:
		return f.Allow != nil
	}
	return len(s.refusals(f)) > 0
}

// allDirty is for a changed node: the ways to know a pod, or the NodePort addresses.
func (d *Dataplane) allDirty(dirty map[serviceID]bool) {
	for id := range d.services {
		dirty[id] = true
	}
	for _, v6 := range d.families() {
		for _, t := range d.trees[b2i(v6)].all() {
			t.markBelow(t.top())
		}
	}
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (d *Dataplane) wantService(id serviceID) {
	d.set(id, d.render(id))
}

func (d *Dataplane) wantTrees() {
	for _, v6 := range d.families() {
		for _, t := range d.trees[b2i(v6)].all() {
			for at := range t.dirty {
				d.set(branch{t, at}, d.render(branch{t, at}))
			}
			clear(t.dirty)
		}
	}
}

// render makes the chains of an owner anew.
func (d *Dataplane) render(o owner) []chain {
	switch o := o.(type) {
	case serviceID:
		return d.service(o).chains()
	case fixedID:
		return fixed(o.v6, d.cfg, &d.state.Node, d.state.SortedChecks())
	case branch:
		if rules, ok := o.tree.chain(o.at); ok {
			return []chain{{o.tree.id(o.at), rules}}
		}
	}
	return nil
}

func (d *Dataplane) set(o owner, chains []chain) {
	d.size(o, chains)
	if len(chains) == 0 {
		d.table.Set(o, nil)
		return
	}
	d.table.Set(o, func(yield func(ChainID, content) bool) {
		for _, c := range chains {
			if !yield(c.ID, content{checksum(c.ID, c.Rules), o}) {
				return
			}
		}
	})
}

// size keeps the number of rules that are wanted.
func (d *Dataplane) size(o owner, chains []chain) {
	var n [2]int
	for _, c := range chains {
		n[c.ID.Table] += len(c.Rules)
	}
	v6 := b2i(ownerV6(o))
	for t := range n {
		d.total[v6][t] += n[t] - d.sizes[o][t]
	}
	if d.sizes[o] = n; n == [2]int{} {
		delete(d.sizes, o)
	}
}

func ownerV6(o owner) bool {
	switch o := o.(type) {
	case serviceID:
		return o.V6
	case branch:
		return o.tree.v6
	case fixedID:
		return o.v6
	}
	return false
}

// RuleCounts is how many rules are fairlead's, and how many of them the last round wrote, by table; IPv4 first
// (kubeproxy_sync_proxy_rules_iptables_total and _last).
func (d *Dataplane) RuleCounts() (total, last map[string][2]int) {
	total, last = map[string][2]int{}, map[string][2]int{}
	for _, t := range []Table{Nat, Filter} {
		total[t.String()] = [2]int{d.total[0][t], d.total[1][t]}
		last[t.String()] = [2]int{d.last[0][t], d.last[1][t]}
	}
	return total, last
}

// writeMost is how many chains go to the kernel at once in a large load, so that only their rules are in memory. The
// order is such that packets meet nothing new before the roots change, with the last.
const writeMost = 4096

// write brings what differs to the kernel: chains before those that refer to them, the built-in chains last, and after
// all of them what is gone.
func (d *Dataplane) write(ctx context.Context) error {
	puts, gone := d.table.Changes()
	deletes := shadow.Keys(gone)
	slices.SortStableFunc(puts, func(a, b shadow.Row[ChainID, content]) int {
		return cmp.Or(cmp.Compare(rank(a.Key), rank(b.Key)), cmp.Compare(depth(b.Val.by), depth(a.Val.by)))
	})
	slices.SortStableFunc(deletes, func(a, b ChainID) int { return cmp.Compare(rank(b), rank(a)) })
	d.last = [2][3]int{}
	most := writeMost
	if d.be.Name() == "legacy" {
		most = len(puts) // each call writes the whole table anew
	}
	for len(puts) > most {
		if err := d.writeSome(ctx, puts[:most], nil); err != nil {
			return err
		}
		puts = puts[most:]
	}
	err := d.writeSome(ctx, puts, deletes)
	if errors.Is(err, errInUse) {
		if err := d.writeSome(ctx, puts, nil); err != nil {
			return err
		}
		return d.emptied(ctx, deletes)
	}
	return err
}

// emptied is for chains one of which can't be deleted since somebody else's rule leads to it: those are left empty, until
// everything is read again. A stranger's rule must not keep Services from being served.
func (d *Dataplane) emptied(ctx context.Context, deletes []ChainID) error {
	_, err := deleteUnused(ctx, d.be, deletes)
	if err != nil {
		return fmt.Errorf("remove %d chains: %w", len(deletes), err)
	}
	for _, id := range deletes {
		d.table.Settled(id)
	}
	return nil
}

// deleteUnused empties the chains, and deletes all but those that rules of somebody else lead to, which it returns. Halving
// finds these without one write for each of thousands of chains.
func deleteUnused(ctx context.Context, be backend, ids []ChainID) (used []ChainID, err error) {
	changes := make([]change, len(ids))
	for i, id := range ids {
		changes[i].Chain = id
	}
	if err := be.Write(ctx, changes); err != nil {
		return nil, fmt.Errorf("empty them: %w", err)
	}
	for i := range changes {
		changes[i].Gone = true
	}
	var halve func([]change) error
	halve = func(cs []change) error {
		switch err := be.Write(ctx, cs); {
		case !errors.Is(err, errInUse):
			return err
		case len(cs) == 1:
			used = append(used, cs[0].Chain)
			return nil
		}
		half := len(cs) / 2
		return errors.Join(halve(cs[:half]), halve(cs[half:]))
	}
	return used, halve(changes)
}

func (d *Dataplane) writeSome(ctx context.Context, puts []shadow.Row[ChainID, content], deletes []ChainID) error {
	if len(puts)+len(deletes) == 0 {
		return nil
	}
	changes := make([]change, 0, len(puts)+len(deletes))
	var by owner
	var chains []chain
	for _, p := range puts {
		if p.Val.by != by {
			by, chains = p.Val.by, d.render(p.Val.by)
		}
		i := slices.IndexFunc(chains, func(c chain) bool { return c.ID == p.Key })
		if i < 0 {
			return fmt.Errorf("chain %s: nobody renders it any more", p.Key.Name)
		}
		changes = append(changes, change{Chain: p.Key, Rules: chains[i].Rules})
	}
	for _, id := range deletes {
		changes = append(changes, change{Chain: id, Gone: true})
	}
	if err := d.be.Write(ctx, changes); err != nil {
		return fmt.Errorf("write %d chains, remove %d: %w", len(puts), len(deletes), err)
	}
	for _, p := range puts {
		d.table.Settled(p.Key)
	}
	for _, id := range deletes {
		d.table.Settled(id)
	}
	for _, c := range changes {
		d.last[b2i(c.Chain.V6)][c.Chain.Table] += len(c.Rules)
	}
	return nil
}

// depth is how deep in its tree a chain is; chains there refer to deeper ones only.
func depth(o owner) int {
	if b, ok := o.(branch); ok {
		return len(b.at)
	}
	return 0
}

// rank orders chains so that what is referred to comes before what refers to it.
func rank(c ChainID) int {
	switch {
	case c.builtin():
		return 9
	case c.Name == chainMarkMasq, c.Name == chainRefuse:
		return 0
	case strings.HasPrefix(c.Name, prefixEndpoint), c.Name == chainNotPods:
		return 1
	case strings.HasPrefix(c.Name, prefixLocal), strings.HasPrefix(c.Name, prefixService) && !isBranch(c):
		return 2
	case strings.HasPrefix(c.Name, prefixExternal):
		return 3
	case strings.HasPrefix(c.Name, prefixFirewall):
		return 4
	case isBranch(c):
		return 5
	case c.Name == chainNodePorts, c.Name == chainDenyPorts:
		return 6
	case c.Name == chainServices && c.Table == Nat, c.Name == chainExternal:
		return 7
	}
	return 6
}

// isBranch tells a part of a tree from the chain of a Service port, whose name ends in 16 letters and digits.
func isBranch(c ChainID) bool {
	if c.Table == Filter {
		return strings.HasPrefix(c.Name, prefixRefusals) || strings.HasPrefix(c.Name, prefixRanges) || strings.HasPrefix(c.Name, prefixDenied)
	}
	rest, ok := strings.CutPrefix(c.Name, prefixService)
	return ok && strings.ContainsAny(rest, ".:-/")
}
