package nftables

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"fairlead/internal/dataplane/memory"
	"fairlead/internal/kernel"
)

// fakeKernel keeps nf_tables as Linux does: it reads the bytes of transactions, refuses what the kernel refuses with the
// kernel's errno, and answers in the kernel's bytes. What it does not model it refuses, so that nothing is accepted unseen.
// Where kernels differ it is as strict as the strictest since 5.13. TestFakeIsFaithful compares it with the kernel itself.
type fakeKernel struct {
	tables    map[tableKey]*fakeTable
	gen       uint32
	handles   uint64 // of tables
	fail      func() memory.Fault
	committed func()                 // is told of each transaction that was done
	numgen    map[*numgenExpr]uint32 // counters of numgen inc
}

// errFake is what a write that was made to fail says.
var errFake = errors.New("injected failure")

type tableKey struct {
	family uint8
	name   string
}

type fakeTable struct {
	tableKey
	handle   uint64
	handles  *uint64 // of all that is in it; a transaction that fails has used them up
	flags    uint32
	userdata []byte
	chains   map[string]*fakeChain
	sets     map[string]*fakeSet
	objs     map[string]*fakeObj
}

type fakeChain struct {
	name     string
	handle   uint64
	userdata []byte
	base     *fakeHook
	rules    []*fakeRule
	refs     int // jumps here, of rules and elements
}

type fakeHook struct {
	num, policy uint32
	priority    int32
	typ         string
}

type fakeRule struct {
	handle   uint64
	userdata []byte
	exprs    []fakeExpr
}

type fakeSet struct {
	name              string
	handle            uint64
	flags             uint32
	keyType, keyLen   uint32
	dataType, dataLen uint32
	policy, size, gc  uint32
	timeout           uint64 // ms
	concat            []uint32
	userdata          []byte
	elems             map[string]*fakeElem
	jumps             map[string]int // chains that elements' verdicts lead to
	refs              int            // of rules
	owned             bool           // elems and jumps are not shared with what a transaction would go back to
}

type fakeElem struct {
	key, keyEnd, data []byte
	verdict           *fakeVerdict
	flags             uint32
	timeout           uint64 // ms; 0 is for ever
	explicit          bool   // the timeout is its own
	userdata          []byte
	dynamic           bool // made by a packet
	single            bool // key_end was not given
}

type fakeVerdict struct {
	code  int32
	chain string
}

type fakeObj struct {
	name           string
	handle         uint64
	typ            uint32
	bytes, packets uint64
	userdata       []byte
	refs           int
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{tables: map[tableKey]*fakeTable{}, gen: 1, numgen: map[*numgenExpr]uint32{}}
}

// The numbers of linux/netfilter/nf_tables.h that x/sys lacks.
const (
	tableHandle      = 4
	tableUserdata    = 6
	chainFlags       = 10
	chainUserdata    = 12
	setHandle        = 16
	setDescConcat    = 2
	elemKeyEnd       = 10
	objHandle        = 6
	objUserdata      = 8
	flagConcat       = 0x80
	chainBase        = 1
	objectCounter    = 1
	userdataMost     = 256   // NFT_USERDATA_MAXLEN
	flagNonRecursive = 0x100 // linux/netlink.h NLM_F_NONREC
)

// attrs are the attributes of a message by type.
type attrs map[uint16][]byte

// parse reads attributes; one that is not known is refused, though the kernel may let it pass.
func parseAttrs(b []byte, known ...uint16) (attrs, error) {
	out := attrs{}
	for t, v := range kernel.Attrs(b) {
		if !slices.Contains(known, t) {
			return nil, fmt.Errorf("attribute %d: the fake does not know it: %w", t, unix.EINVAL)
		}
		out[t] = v
	}
	return out, nil
}

func (a attrs) has(t uint16) bool   { _, ok := a[t]; return ok }
func (a attrs) u32(t uint16) uint32 { return kernel.AttrU32(a[t]) }
func (a attrs) u64(t uint16) uint64 { return kernel.AttrU64(a[t]) }
func (a attrs) str(t uint16) string { return string(kernel.AttrBytes(a[t])) }
func (a attrs) raw(t uint16) []byte { return bytes.Clone(a[t]) }
func (a attrs) all(ts ...uint16) bool {
	for _, t := range ts {
		if !a.has(t) {
			return false
		}
	}
	return true
}

func (k *fakeKernel) Close() error { return nil }

// Commit does all of a transaction or nothing.
func (k *fakeKernel) Commit(t *kernel.NFBatch) error {
	fault := memory.None
	if k.fail != nil {
		fault = k.fail()
	}
	if fault == memory.Before {
		return errFake
	}
	if t.Len() == 0 {
		return nil
	}
	tables, err := k.try(t, false)
	if err != nil {
		return err
	}
	k.tables = tables
	k.gen++
	if k.committed != nil {
		k.committed()
	}
	if fault == memory.After {
		return errFake
	}
	return nil
}

// try does a transaction on a copy. What only the whole can tell, the kernel looks at in the end; when that fails, it does all
// once more and looks after each message, to name the one (NFT_VALIDATE_DO).
func (k *fakeKernel) try(t *kernel.NFBatch, closely bool) (map[tableKey]*fakeTable, error) {
	x := &transaction{k: k, tables: cloneTables(k.tables)}
	i, bad := 0, (*kernel.BatchError)(nil)
	t.Messages(func(kind uint8, flags uint16, family uint8, attrs []byte) {
		err := x.message(kind, flags, family, attrs)
		if err == nil && closely && bad == nil {
			err = x.validate()
		}
		if err != nil && bad == nil { // the kernel goes on, too
			bad = &kernel.BatchError{Index: i, Err: err}
		}
		i++
	})
	if bad != nil {
		return nil, bad
	}
	if x.validate() != nil {
		return k.try(t, true)
	}
	return x.tables, nil
}

func cloneTables(in map[tableKey]*fakeTable) map[tableKey]*fakeTable {
	out := make(map[tableKey]*fakeTable, len(in))
	for key, t := range in {
		c := *t
		c.chains, c.sets, c.objs = copyAll(t.chains), copyAll(t.sets), copyAll(t.objs)
		for _, ch := range c.chains {
			ch.rules = slices.Clone(ch.rules)
		}
		for _, s := range c.sets {
			s.owned = false
		}
		out[key] = &c
	}
	return out
}

func copyAll[V any](in map[string]*V) map[string]*V {
	out := make(map[string]*V, len(in))
	for k, v := range in {
		c := *v
		out[k] = &c
	}
	return out
}

// own makes a set's elements safe to change.
func (s *fakeSet) own() {
	if !s.owned {
		s.elems, s.jumps, s.owned = maps.Clone(s.elems), maps.Clone(s.jumps), true
	}
}

// transaction is a batch at work.
type transaction struct {
	k      *fakeKernel
	tables map[tableKey]*fakeTable
	family uint8
	flags  uint16
}

func (x *transaction) message(kind uint8, flags uint16, family uint8, b []byte) error {
	if family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		return unix.EAFNOSUPPORT
	}
	x.family, x.flags = family, flags
	do, ok := map[uint8]func([]byte) error{
		unix.NFT_MSG_NEWTABLE: x.newTable, unix.NFT_MSG_DELTABLE: x.delTable,
		unix.NFT_MSG_NEWCHAIN: x.newChain, unix.NFT_MSG_DELCHAIN: x.delChain,
		unix.NFT_MSG_NEWRULE: x.newRule, unix.NFT_MSG_DELRULE: x.delRule,
		unix.NFT_MSG_NEWSET: x.newSet, unix.NFT_MSG_DELSET: x.delSet,
		unix.NFT_MSG_NEWSETELEM: x.newElems, unix.NFT_MSG_DELSETELEM: x.delElems,
		unix.NFT_MSG_NEWOBJ: x.newObj, unix.NFT_MSG_DELOBJ: x.delObj,
	}[kind]
	if !ok { // NFT_MSG_DESTROY* among them: they are not in 5.13
		return fmt.Errorf("message %d: %w", kind, unix.EINVAL)
	}
	return do(b)
}

func (t *fakeTable) next() uint64 { *t.handles++; return *t.handles }

func (x *transaction) table(name string) (*fakeTable, error) {
	t, ok := x.tables[tableKey{x.family, name}]
	if !ok {
		return nil, fmt.Errorf("table %s: %w", name, unix.ENOENT)
	}
	return t, nil
}

// exists is what the kernel says to a NEW message for something that is there.
func (x *transaction) exists() error {
	switch {
	case x.flags&unix.NLM_F_EXCL != 0:
		return unix.EEXIST
	case x.flags&unix.NLM_F_REPLACE != 0:
		return unix.EOPNOTSUPP
	}
	return nil
}

func nameOK(name string) error {
	switch {
	case name == "":
		return unix.EINVAL
	case len(name) >= 256: // NFT_NAME_MAXLEN
		return unix.ERANGE
	}
	return nil
}

func (x *transaction) newTable(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_TABLE_NAME, unix.NFTA_TABLE_FLAGS, tableUserdata)
	if err != nil {
		return err
	}
	name := a.str(unix.NFTA_TABLE_NAME)
	if err := nameOK(name); err != nil {
		return err
	}
	if len(a[tableUserdata]) > userdataMost {
		return unix.ERANGE
	}
	if a.u32(unix.NFTA_TABLE_FLAGS) != 0 {
		return unix.EOPNOTSUPP // dormant and owned tables are not modelled
	}
	key := tableKey{x.family, name}
	if x.tables[key] != nil {
		return x.exists()
	}
	x.k.handles++
	x.tables[key] = &fakeTable{tableKey: key, handle: x.k.handles, handles: new(uint64), userdata: a.raw(tableUserdata), chains: map[string]*fakeChain{},
		sets: map[string]*fakeSet{}, objs: map[string]*fakeObj{}}
	return nil
}

// delTable takes one table, or without a name all of the family, as the kernel does.
func (x *transaction) delTable(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_TABLE_NAME)
	if err != nil {
		return err
	}
	if !a.has(unix.NFTA_TABLE_NAME) {
		return fmt.Errorf("all tables of a family: %w", unix.EOPNOTSUPP)
	}
	t, err := x.table(a.str(unix.NFTA_TABLE_NAME))
	if err != nil {
		return err
	}
	if x.flags&flagNonRecursive != 0 && len(t.chains)+len(t.sets)+len(t.objs) > 0 {
		return unix.EBUSY
	}
	delete(x.tables, t.tableKey)
	return nil
}

func (x *transaction) newChain(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, unix.NFTA_CHAIN_HOOK, unix.NFTA_CHAIN_POLICY, unix.NFTA_CHAIN_TYPE,
		chainFlags, chainUserdata)
	if err != nil {
		return err
	}
	t, err := x.table(a.str(unix.NFTA_CHAIN_TABLE))
	if err != nil {
		return err
	}
	name := a.str(unix.NFTA_CHAIN_NAME)
	if err := nameOK(name); err != nil {
		return err
	}
	c := &fakeChain{name: name, userdata: a.raw(chainUserdata)}
	old := t.chains[name]
	if f := a.u32(chainFlags); f&^chainBase != 0 || f != 0 && !a.has(unix.NFTA_CHAIN_HOOK) {
		return unix.EOPNOTSUPP
	}
	if a.has(unix.NFTA_CHAIN_HOOK) {
		if c.base, err = parseHook(a); err != nil {
			return err
		}
	}
	if a.has(unix.NFTA_CHAIN_POLICY) && c.base == nil && (old == nil || old.base == nil) {
		return unix.EOPNOTSUPP
	}
	if old != nil {
		return x.sameChain(old, c, a)
	}
	c.handle = t.next()
	t.chains[name] = c
	return nil
}

func (x *transaction) sameChain(old, c *fakeChain, a attrs) error {
	if err := x.exists(); err != nil {
		return err
	}
	switch {
	case c.base == nil && !a.has(unix.NFTA_CHAIN_POLICY):
		return nil
	case c.base != nil && (old.base == nil || old.base.typ != c.base.typ):
		return unix.EEXIST
	case c.base != nil && (old.base.num != c.base.num || old.base.priority != c.base.priority):
		return unix.EOPNOTSUPP
	}
	if a.has(unix.NFTA_CHAIN_POLICY) {
		h := *old.base
		h.policy = a.u32(unix.NFTA_CHAIN_POLICY)
		old.base = &h
	}
	return nil
}

// parseHook reads a base chain's place (net/netfilter/nf_tables_api.c nft_chain_parse_hook).
func parseHook(a attrs) (*fakeHook, error) {
	h, err := parseAttrs(a[unix.NFTA_CHAIN_HOOK], unix.NFTA_HOOK_HOOKNUM, unix.NFTA_HOOK_PRIORITY)
	if err != nil {
		return nil, err
	}
	if !h.all(unix.NFTA_HOOK_HOOKNUM, unix.NFTA_HOOK_PRIORITY) {
		return nil, unix.EINVAL
	}
	out := &fakeHook{num: h.u32(unix.NFTA_HOOK_HOOKNUM), priority: int32(h.u32(unix.NFTA_HOOK_PRIORITY)), policy: verdictAcceptCode, typ: "filter"}
	if a.has(unix.NFTA_CHAIN_TYPE) {
		out.typ = a.str(unix.NFTA_CHAIN_TYPE)
	}
	if a.has(unix.NFTA_CHAIN_POLICY) {
		if out.policy = a.u32(unix.NFTA_CHAIN_POLICY); out.policy > 1 {
			return nil, unix.EINVAL
		}
	}
	hooks, ok := map[string][]uint32{"filter": {0, 1, 2, 3, 4}, "nat": {inPrerouting, inInput, inOutput, inPostrouting}, "route": {inOutput}}[out.typ]
	switch {
	case !ok:
		return nil, unix.ENOENT
	case !slices.Contains(hooks, out.num), out.typ == "nat" && out.priority <= -200: // NF_IP_PRI_CONNTRACK
		return nil, unix.EOPNOTSUPP
	}
	return out, nil
}

// The hooks of linux/netfilter.h enum nf_inet_hooks, and verdicts.
const (
	inPrerouting = iota
	inInput
	inForward
	inOutput
	inPostrouting
)

const (
	verdictDropCode   = 0
	verdictAcceptCode = 1
)

func (x *transaction) delChain(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME)
	if err != nil {
		return err
	}
	t, err := x.table(a.str(unix.NFTA_CHAIN_TABLE))
	if err != nil {
		return err
	}
	c := t.chains[a.str(unix.NFTA_CHAIN_NAME)]
	switch {
	case c == nil:
		return unix.ENOENT
	case x.flags&flagNonRecursive != 0 && len(c.rules)+c.refs > 0:
		return unix.EBUSY
	}
	for _, r := range c.rules {
		t.refer(r, -1)
	}
	c.rules = nil
	if c.refs > 0 {
		return unix.EBUSY
	}
	delete(t.chains, c.name)
	return nil
}

// refer counts what a rule refers to, in or out.
func (t *fakeTable) refer(r *fakeRule, n int) {
	for _, e := range r.exprs {
		switch e := e.(type) {
		case *immediateExpr:
			t.jump(e.verdict, n)
		case *lookupExpr:
			t.sets[e.set].refs += n
		case *dynsetExpr:
			t.sets[e.set].refs += n
		case *objrefExpr:
			t.objs[e.object].refs += n
		}
	}
}

func (t *fakeTable) jump(v *fakeVerdict, n int) {
	if v != nil && v.chain != "" {
		t.chains[v.chain].refs += n
	}
}

func (x *transaction) newRule(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_EXPRESSIONS, unix.NFTA_RULE_USERDATA, unix.NFTA_RULE_ID)
	if err != nil {
		return err
	}
	t, err := x.table(a.str(unix.NFTA_RULE_TABLE))
	if err != nil {
		return err
	}
	c := t.chains[a.str(unix.NFTA_RULE_CHAIN)]
	switch {
	case c == nil:
		return unix.ENOENT
	case len(a[unix.NFTA_RULE_USERDATA]) > userdataMost:
		return unix.ERANGE
	case x.flags&unix.NLM_F_CREATE == 0 || x.flags&unix.NLM_F_REPLACE != 0:
		return unix.EINVAL
	}
	r := &fakeRule{userdata: a.raw(unix.NFTA_RULE_USERDATA)}
	if r.exprs, err = parseExprs(t, a[unix.NFTA_RULE_EXPRESSIONS]); err != nil {
		return err
	}
	r.handle = t.next()
	t.refer(r, 1)
	if x.flags&unix.NLM_F_APPEND != 0 {
		c.rules = append(c.rules, r)
	} else {
		c.rules = slices.Insert(c.rules, 0, r)
	}
	return nil
}

func (x *transaction) delRule(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, unix.NFTA_RULE_HANDLE)
	if err != nil {
		return err
	}
	t, err := x.table(a.str(unix.NFTA_RULE_TABLE))
	if err != nil {
		return err
	}
	of := slices.Collect(maps.Values(t.chains))
	if a.has(unix.NFTA_RULE_CHAIN) {
		c := t.chains[a.str(unix.NFTA_RULE_CHAIN)]
		if c == nil {
			return unix.ENOENT
		}
		of = []*fakeChain{c}
	}
	gone := 0
	for _, c := range of {
		c.rules = slices.DeleteFunc(c.rules, func(r *fakeRule) bool {
			hit := !a.has(unix.NFTA_RULE_HANDLE) || r.handle == a.u64(unix.NFTA_RULE_HANDLE)
			if hit {
				t.refer(r, -1)
				gone++
			}
			return hit
		})
	}
	if a.has(unix.NFTA_RULE_HANDLE) && (gone == 0 || !a.has(unix.NFTA_RULE_CHAIN)) {
		return unix.ENOENT
	}
	return nil
}

func (x *transaction) newSet(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, unix.NFTA_SET_FLAGS, unix.NFTA_SET_KEY_TYPE, unix.NFTA_SET_KEY_LEN,
		unix.NFTA_SET_DATA_TYPE, unix.NFTA_SET_DATA_LEN, unix.NFTA_SET_POLICY, unix.NFTA_SET_DESC, unix.NFTA_SET_ID, unix.NFTA_SET_TIMEOUT,
		unix.NFTA_SET_GC_INTERVAL, unix.NFTA_SET_USERDATA)
	if err != nil {
		return err
	}
	if !a.all(unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME, unix.NFTA_SET_KEY_LEN, unix.NFTA_SET_ID) {
		return unix.EINVAL
	}
	s, err := parseSet(a)
	if err != nil {
		return err
	}
	t, err := x.table(a.str(unix.NFTA_SET_TABLE))
	if err != nil {
		return err
	}
	if old := t.sets[s.name]; old != nil {
		if err := x.exists(); err != nil {
			return err
		}
		if !old.same(s) {
			return unix.EEXIST
		}
		return nil
	}
	if x.flags&unix.NLM_F_CREATE == 0 {
		return unix.ENOENT
	}
	if err := cmp.Or(nameOK(s.name), s.backendOK()); err != nil {
		return err
	}
	s.handle = t.next()
	t.sets[s.name] = s
	return nil
}

// parseSet reads what a set is (nf_tables_api.c nf_tables_newset).
func parseSet(a attrs) (*fakeSet, error) {
	s := &fakeSet{name: a.str(unix.NFTA_SET_NAME), flags: a.u32(unix.NFTA_SET_FLAGS), keyType: a.u32(unix.NFTA_SET_KEY_TYPE),
		keyLen: a.u32(unix.NFTA_SET_KEY_LEN), dataType: a.u32(unix.NFTA_SET_DATA_TYPE), dataLen: a.u32(unix.NFTA_SET_DATA_LEN),
		policy: a.u32(unix.NFTA_SET_POLICY), gc: a.u32(unix.NFTA_SET_GC_INTERVAL), timeout: a.u64(unix.NFTA_SET_TIMEOUT),
		userdata: a.raw(unix.NFTA_SET_USERDATA), elems: map[string]*fakeElem{}, jumps: map[string]int{}, owned: true}
	const known = unix.NFT_SET_INTERVAL | unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_CONSTANT | flagConcat
	isMap := s.flags&unix.NFT_SET_MAP != 0
	switch {
	case s.flags&^known != 0:
		return nil, unix.EOPNOTSUPP // anonymous sets and sets of objects are not modelled
	case s.flags&(unix.NFT_SET_CONSTANT|unix.NFT_SET_TIMEOUT) == unix.NFT_SET_CONSTANT|unix.NFT_SET_TIMEOUT:
		return nil, unix.EOPNOTSUPP
	case len(s.userdata) > userdataMost:
		return nil, unix.ERANGE
	case s.keyLen == 0 || s.keyLen > 64:
		return nil, unix.EINVAL
	case isMap != a.has(unix.NFTA_SET_DATA_TYPE):
		return nil, unix.EINVAL
	case isMap && s.dataType == unix.NFT_DATA_VERDICT:
		s.dataLen = 0
	case isMap && (s.dataType&0xffffff00 == 0xffffff00 || s.dataLen == 0 || s.dataLen > 64):
		return nil, unix.EINVAL
	case a.has(unix.NFTA_SET_TIMEOUT) && s.flags&unix.NFT_SET_TIMEOUT == 0, a.has(unix.NFTA_SET_GC_INTERVAL) && s.flags&unix.NFT_SET_TIMEOUT == 0:
		return nil, unix.EINVAL
	}
	return s, s.parseDesc(a)
}

func (s *fakeSet) parseDesc(a attrs) error {
	d, err := parseAttrs(a[unix.NFTA_SET_DESC], unix.NFTA_SET_DESC_SIZE, setDescConcat)
	if err != nil {
		return err
	}
	s.size = d.u32(unix.NFTA_SET_DESC_SIZE)
	words := uint32(0)
	for t, v := range kernel.Attrs(d[setDescConcat]) {
		f, err := parseAttrs(v, 1) // NFTA_SET_FIELD_LEN
		if n := f.u32(1); t != unix.NFTA_LIST_ELEM || err != nil || n == 0 || n > 255 {
			return unix.EINVAL
		}
		s.concat = append(s.concat, f.u32(1))
		words += (f.u32(1) + 3) / 4
	}
	if len(s.concat) > 0 && words != (s.keyLen+3)/4 {
		return unix.EINVAL
	}
	if (len(s.concat) > 1) != (s.flags&flagConcat != 0) {
		return unix.EINVAL
	}
	return nil
}

// same is what the kernel compares when a set is created once more (nft_set_is_same).
func (s *fakeSet) same(o *fakeSet) bool {
	return s.flags == o.flags && s.keyType == o.keyType && s.keyLen == o.keyLen && s.dataType == o.dataType && s.dataLen == o.dataLen &&
		s.policy == o.policy && s.size == o.size && s.timeout == o.timeout && s.gc == o.gc && slices.Equal(s.concat, o.concat)
}

func (s *fakeSet) interval() bool { return s.flags&unix.NFT_SET_INTERVAL != 0 }
func (s *fakeSet) isMap() bool    { return s.flags&unix.NFT_SET_MAP != 0 }
func (s *fakeSet) timed() bool    { return s.flags&unix.NFT_SET_TIMEOUT != 0 }
func (s *fakeSet) verdicts() bool { return s.isMap() && s.dataType == unix.NFT_DATA_VERDICT }

// ranges tells whether elements have a key_end: concatenations in net/netfilter/nft_set_pipapo.c.
func (s *fakeSet) ranges() bool { return s.interval() && s.flags&flagConcat != 0 }

// updates tells whether packets may change the set: that is nft_set_hash.c's rhash alone.
func (s *fakeSet) updates() bool {
	return !s.interval() && (s.flags&(unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL) != 0 || s.size == 0 && s.keyLen > 2)
}

// backendOK tells whether some kind of set can do what is asked.
func (s *fakeSet) backendOK() error {
	if s.interval() && s.flags&unix.NFT_SET_EVAL != 0 {
		return unix.EOPNOTSUPP
	}
	return nil
}

func (x *transaction) delSet(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME)
	if err != nil {
		return err
	}
	t, s, err := x.set(a.str(unix.NFTA_SET_TABLE), a.str(unix.NFTA_SET_NAME))
	if err != nil {
		return err
	}
	if s.refs > 0 || x.flags&flagNonRecursive != 0 && len(s.elems) > 0 {
		return unix.EBUSY
	}
	t.flush(s)
	delete(t.sets, s.name)
	return nil
}

func (x *transaction) set(table, name string) (*fakeTable, *fakeSet, error) {
	t, err := x.table(table)
	if err != nil {
		return nil, nil, err
	}
	s := t.sets[name]
	if s == nil {
		return nil, nil, fmt.Errorf("set %s: %w", name, unix.ENOENT)
	}
	return t, s, nil
}

// flush takes all elements out.
func (t *fakeTable) flush(s *fakeSet) {
	for _, e := range s.elems {
		t.jump(e.verdict, -1)
	}
	s.elems, s.jumps, s.owned = map[string]*fakeElem{}, map[string]int{}, true
}

// elements yields the elements that a message lists.
func (x *transaction) elements(b []byte, each func(*fakeTable, *fakeSet, attrs) error) (listed bool, t *fakeTable, s *fakeSet, err error) {
	a, err := parseAttrs(b, unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET, unix.NFTA_SET_ELEM_LIST_ELEMENTS, unix.NFTA_SET_ELEM_LIST_SET_ID)
	if err != nil {
		return false, nil, nil, err
	}
	if t, s, err = x.set(a.str(unix.NFTA_SET_ELEM_LIST_TABLE), a.str(unix.NFTA_SET_ELEM_LIST_SET)); err != nil {
		return false, nil, nil, err
	}
	s.own()
	for typ, v := range kernel.Attrs(a[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) {
		e, err := parseAttrs(v, unix.NFTA_SET_ELEM_KEY, unix.NFTA_SET_ELEM_DATA, unix.NFTA_SET_ELEM_FLAGS, unix.NFTA_SET_ELEM_TIMEOUT,
			unix.NFTA_SET_ELEM_EXPIRATION, unix.NFTA_SET_ELEM_USERDATA, elemKeyEnd)
		if err == nil && typ != unix.NFTA_LIST_ELEM {
			err = unix.EINVAL
		}
		if err == nil {
			err = each(t, s, e)
		}
		if err != nil {
			return true, t, s, err
		}
	}
	return a.has(unix.NFTA_SET_ELEM_LIST_ELEMENTS), t, s, nil
}

func (x *transaction) newElems(b []byte) error {
	listed, _, _, err := x.elements(b, x.newElem)
	if err == nil && !listed {
		return unix.EINVAL
	}
	return err
}

func (x *transaction) delElems(b []byte) error {
	listed, t, s, err := x.elements(b, func(t *fakeTable, s *fakeSet, a attrs) error {
		e, err := s.parseKey(a)
		if err != nil {
			return err
		}
		return t.drop(s, e.at(s))
	})
	if err == nil && !listed {
		t.flush(s)
	}
	return err
}

// drop takes one element out.
func (t *fakeTable) drop(s *fakeSet, at string) error {
	e := s.elems[at]
	if e == nil {
		return fmt.Errorf("element %x of %s: %w", at, s.name, unix.ENOENT)
	}
	delete(s.elems, at)
	if e.verdict != nil && e.verdict.chain != "" {
		t.jump(e.verdict, -1)
		if s.jumps[e.verdict.chain]--; s.jumps[e.verdict.chain] == 0 {
			delete(s.jumps, e.verdict.chain)
		}
	}
	return nil
}

// at is the place of an element in its set's map.
func (e *fakeElem) at(s *fakeSet) string {
	switch {
	case e.flags&elemCatchall != 0:
		return "catchall"
	case s.ranges():
		return string(e.key) + string(e.keyEnd)
	case s.interval():
		return string(e.key) + string(rune('0'+e.flags&unix.NFT_SET_ELEM_INTERVAL_END))
	}
	return string(e.key)
}

// parseKey reads key, key_end and flags (nf_tables_api.c nft_setelem_parse_key, nft_setelem_valid_key_end).
func (s *fakeSet) parseKey(a attrs) (*fakeElem, error) {
	e := &fakeElem{flags: a.u32(unix.NFTA_SET_ELEM_FLAGS)}
	if e.flags&^(unix.NFT_SET_ELEM_INTERVAL_END|elemCatchall) != 0 {
		return nil, unix.EINVAL
	}
	if e.flags&elemCatchall != 0 {
		if a.has(unix.NFTA_SET_ELEM_KEY) || a.has(elemKeyEnd) {
			return nil, unix.EINVAL
		}
		return e, nil
	}
	var err error
	if e.key, err = parseValue(a[unix.NFTA_SET_ELEM_KEY], s.keyLen); err != nil {
		return nil, err
	}
	switch {
	case a.has(elemKeyEnd) && !s.ranges(), s.ranges() && e.flags != 0, e.flags != 0 && !s.interval():
		return nil, unix.EINVAL
	case a.has(elemKeyEnd):
		e.keyEnd, err = parseValue(a[elemKeyEnd], s.keyLen)
	case s.ranges():
		e.keyEnd, e.single = e.key, true
	}
	return e, err
}

// parseValue reads NFTA_DATA_VALUE; want is its length, 0 is any.
func parseValue(b []byte, want uint32) ([]byte, error) {
	a, err := parseAttrs(b, unix.NFTA_DATA_VALUE)
	if err != nil {
		return nil, err
	}
	v := a.raw(unix.NFTA_DATA_VALUE)
	if len(v) == 0 || len(v) > 64 || want != 0 && uint32(len(v)) != want {
		return nil, fmt.Errorf("a value of %d bytes: %w", len(v), unix.EINVAL)
	}
	return v, nil
}

// verdict reads NFTA_DATA_VERDICT.
func (t *fakeTable) verdict(b []byte) (*fakeVerdict, error) {
	a, err := parseAttrs(b, unix.NFTA_DATA_VERDICT)
	if err != nil {
		return nil, err
	}
	v, err := parseAttrs(a[unix.NFTA_DATA_VERDICT], unix.NFTA_VERDICT_CODE, unix.NFTA_VERDICT_CHAIN)
	if err != nil {
		return nil, err
	}
	out := &fakeVerdict{code: int32(v.u32(unix.NFTA_VERDICT_CODE))}
	switch out.code {
	case verdictAcceptCode, verdictDropCode, unix.NFT_CONTINUE, unix.NFT_BREAK, unix.NFT_RETURN:
		return out, nil
	case unix.NFT_JUMP, unix.NFT_GOTO:
	default:
		return nil, unix.EINVAL
	}
	if !v.has(unix.NFTA_VERDICT_CHAIN) {
		return nil, unix.EINVAL
	}
	out.chain = v.str(unix.NFTA_VERDICT_CHAIN)
	switch c := t.chains[out.chain]; {
	case c == nil:
		return nil, fmt.Errorf("chain %s: %w", out.chain, unix.ENOENT)
	case c.base != nil:
		return nil, unix.EOPNOTSUPP
	}
	return out, nil
}

// newElem adds one element (nf_tables_api.c nft_add_set_elem).
func (x *transaction) newElem(t *fakeTable, s *fakeSet, a attrs) error {
	end := a.u32(unix.NFTA_SET_ELEM_FLAGS)&unix.NFT_SET_ELEM_INTERVAL_END != 0
	switch {
	case s.flags&unix.NFT_SET_CONSTANT != 0 && s.refs > 0:
		return unix.EBUSY
	case !s.isMap() && a.has(unix.NFTA_SET_ELEM_DATA), s.isMap() && a.has(unix.NFTA_SET_ELEM_DATA) == end:
		return unix.EINVAL
	case !s.timed() && (a.has(unix.NFTA_SET_ELEM_TIMEOUT) || a.has(unix.NFTA_SET_ELEM_EXPIRATION)):
		return unix.EINVAL
	case len(a[unix.NFTA_SET_ELEM_USERDATA]) > userdataMost:
		return unix.ERANGE
	}
	e, err := s.parseKey(a)
	if err != nil {
		return err
	}
	e.userdata, e.timeout = a.raw(unix.NFTA_SET_ELEM_USERDATA), s.timeout
	if a.has(unix.NFTA_SET_ELEM_TIMEOUT) {
		e.timeout = a.u64(unix.NFTA_SET_ELEM_TIMEOUT)
		e.explicit = e.timeout != s.timeout
	}
	if a.has(unix.NFTA_SET_ELEM_DATA) {
		if s.verdicts() {
			e.verdict, err = t.verdict(a[unix.NFTA_SET_ELEM_DATA])
		} else {
			e.data, err = parseValue(a[unix.NFTA_SET_ELEM_DATA], s.dataLen)
		}
		if err != nil {
			return err
		}
	}
	return t.insert(s, e, x.flags&unix.NLM_F_EXCL != 0)
}

func (t *fakeTable) insert(s *fakeSet, e *fakeElem, exclusive bool) error {
	if old := s.elems[e.at(s)]; old != nil {
		switch {
		case !bytes.Equal(old.data, e.data), !sameVerdict(old.verdict, e.verdict):
			return fmt.Errorf("element %x of %s has other data: %w", e.key, s.name, unix.EEXIST)
		case exclusive:
			return unix.EEXIST
		}
		return nil
	}
	if err := s.overlaps(e); err != nil {
		return err
	}
	if s.size > 0 && len(s.elems) >= int(s.size) {
		return unix.ENFILE
	}
	s.elems[e.at(s)] = e
	if e.verdict != nil && e.verdict.chain != "" {
		t.jump(e.verdict, 1)
		s.jumps[e.verdict.chain]++
	}
	return nil
}

func sameVerdict(a, b *fakeVerdict) bool {
	return (a == nil) == (b == nil) && (a == nil || *a == *b)
}

// overlaps is what nft_pipapo_insert and nft_rbtree_insert find: a range of which an end lies in another one. What they call
// ENOTEMPTY becomes EEXIST on its way out.
func (s *fakeSet) overlaps(e *fakeElem) error {
	if e.flags&elemCatchall != 0 || !s.interval() {
		return nil
	}
	if !s.ranges() {
		if e.flags == 0 && s.find(e.key) != nil {
			return unix.EEXIST
		}
		return nil
	}
	for _, f := range s.fields() {
		if bytes.Compare(e.key[f[0]:f[1]], e.keyEnd[f[0]:f[1]]) > 0 {
			return unix.EINVAL
		}
	}
	if s.find(e.key) != nil || s.find(e.keyEnd) != nil {
		return fmt.Errorf("range %x-%x of %s overlaps: %w", e.key, e.keyEnd, s.name, unix.EEXIST)
	}
	return nil
}

// fields are the bounds of a concatenation's fields in its key; each is padded to four bytes.
func (s *fakeSet) fields() (out [][2]uint32) {
	at := uint32(0)
	for _, n := range s.concat {
		out = append(out, [2]uint32{at, at + n})
		at += (n + 3) / 4 * 4
	}
	if out == nil {
		out = [][2]uint32{{0, s.keyLen}}
	}
	return out
}

// find is the element that a packet's key meets, but for the one that catches all.
func (s *fakeSet) find(key []byte) *fakeElem {
	if !s.interval() {
		return s.elems[string(key)]
	}
	if !s.ranges() {
		return s.findBelow(key)
	}
	fields := s.fields()
	for _, e := range s.elems {
		in := e.flags&elemCatchall == 0
		for _, f := range fields {
			in = in && bytes.Compare(e.key[f[0]:f[1]], key[f[0]:f[1]]) <= 0 && bytes.Compare(key[f[0]:f[1]], e.keyEnd[f[0]:f[1]]) <= 0
		}
		if in {
			return e
		}
	}
	return nil
}

// findBelow looks in a set of interval starts and ends, of which an end is the first key that is not in it.
func (s *fakeSet) findBelow(key []byte) *fakeElem {
	var best *fakeElem
	for _, e := range s.elems {
		if e.flags&elemCatchall != 0 || bytes.Compare(e.key, key) > 0 {
			continue
		}
		if best == nil {
			best = e
		} else if c := bytes.Compare(e.key, best.key); c > 0 || c == 0 && e.flags == 0 {
			best = e
		}
	}
	if best == nil || best.flags&unix.NFT_SET_ELEM_INTERVAL_END != 0 {
		return nil
	}
	return best
}

func (x *transaction) newObj(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_OBJ_TABLE, unix.NFTA_OBJ_NAME, unix.NFTA_OBJ_TYPE, unix.NFTA_OBJ_DATA, objUserdata)
	if err != nil {
		return err
	}
	if !a.all(unix.NFTA_OBJ_TYPE, unix.NFTA_OBJ_NAME, unix.NFTA_OBJ_DATA) {
		return unix.EINVAL
	}
	t, err := x.table(a.str(unix.NFTA_OBJ_TABLE))
	if err != nil {
		return err
	}
	o := &fakeObj{name: a.str(unix.NFTA_OBJ_NAME), typ: a.u32(unix.NFTA_OBJ_TYPE), userdata: a.raw(objUserdata)}
	if err := nameOK(o.name); err != nil {
		return err
	}
	if o.typ != objectCounter {
		return unix.EOPNOTSUPP
	}
	d, err := parseAttrs(a[unix.NFTA_OBJ_DATA], unix.NFTA_COUNTER_BYTES, unix.NFTA_COUNTER_PACKETS)
	if err != nil {
		return err
	}
	if t.objs[o.name] != nil {
		return x.exists()
	}
	o.bytes, o.packets, o.handle = d.u64(unix.NFTA_COUNTER_BYTES), d.u64(unix.NFTA_COUNTER_PACKETS), t.next()
	t.objs[o.name] = o
	return nil
}

func (x *transaction) delObj(b []byte) error {
	a, err := parseAttrs(b, unix.NFTA_OBJ_TABLE, unix.NFTA_OBJ_NAME, unix.NFTA_OBJ_TYPE)
	if err != nil {
		return err
	}
	if !a.all(unix.NFTA_OBJ_TYPE, unix.NFTA_OBJ_NAME) {
		return unix.EINVAL
	}
	t, err := x.table(a.str(unix.NFTA_OBJ_TABLE))
	if err != nil {
		return err
	}
	o := t.objs[a.str(unix.NFTA_OBJ_NAME)]
	switch {
	case o == nil || o.typ != a.u32(unix.NFTA_OBJ_TYPE):
		return unix.ENOENT
	case o.refs > 0:
		return unix.EBUSY
	}
	delete(t.objs, o.name)
	return nil
}

// maxJumps is NFT_JUMP_STACK_SIZE.
const maxJumps = 16

// validate walks from each base chain, as nft_table_validate does at the end of a transaction: no deeper than the stack, and
// expressions only where they work. A loop is too deep.
func (x *transaction) validate() error {
	for _, t := range x.tables {
		for _, c := range t.chains {
			if c.base != nil {
				if err := t.validate(c.base, c, 0, map[string]int{}); err != nil {
					return fmt.Errorf("chain %s: %w", c.name, err)
				}
			}
		}
	}
	return nil
}

func (t *fakeTable) validate(from *fakeHook, c *fakeChain, depth int, deepest map[string]int) error {
	if depth >= maxJumps {
		return unix.EMLINK
	}
	if d, ok := deepest[c.name]; ok && d >= depth {
		return nil
	}
	deepest[c.name] = depth
	for _, r := range c.rules {
		for _, e := range r.exprs {
			var to []string
			switch e := e.(type) {
			case *immediateExpr:
				if e.verdict != nil && e.verdict.chain != "" {
					to = []string{e.verdict.chain}
				}
			case *lookupExpr:
				to = slices.Collect(maps.Keys(t.sets[e.set].jumps))
			case interface{ validate(*fakeHook) error }:
				if err := e.validate(from); err != nil {
					return err
				}
			}
			for _, name := range to {
				if err := t.validate(from, t.chains[name], depth+1, deepest); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Get answers for one object.
func (k *fakeKernel) Get(typ uint16, family uint8, b []byte) (kernel.NFMessage, error) {
	kind := uint8(typ)
	if kind == unix.NFT_MSG_GETGEN {
		return fakeMessage(unix.NFT_MSG_NEWGEN, 0, kernel.AppendAttrU32(nil, unix.NFTA_GEN_ID, k.gen)), nil
	}
	name, ok := map[uint8]uint16{unix.NFT_MSG_GETTABLE: unix.NFTA_TABLE_NAME, unix.NFT_MSG_GETCHAIN: unix.NFTA_CHAIN_NAME,
		unix.NFT_MSG_GETSET: unix.NFTA_SET_NAME, unix.NFT_MSG_GETOBJ: unix.NFTA_OBJ_NAME}[kind]
	if !ok {
		return kernel.NFMessage{}, fmt.Errorf("get %d: %w", kind, unix.EOPNOTSUPP)
	}
	want := allAttrs(b)
	if _, ok := k.tables[tableKey{family, want.str(1)}]; !ok { // the table is attribute 1 of all kinds
		return kernel.NFMessage{}, unix.ENOENT
	}
	found, err := kernel.NFMessage{}, error(unix.ENOENT)
	_ = k.Dump(typ, family, kernel.AppendAttrString(nil, 1, want.str(1)), func(m kernel.NFMessage) error {
		if got := allAttrs(m.Attrs); got.str(1) == want.str(1) && got.str(name) == want.str(name) {
			found, err = m, nil
		}
		return nil
	})
	return found, err
}

func allAttrs(b []byte) attrs {
	out := attrs{}
	for t, v := range kernel.Attrs(b) {
		out[t] = v
	}
	return out
}

func fakeMessage(kind, family uint8, b []byte) kernel.NFMessage {
	return kernel.NFMessage{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(kind), Port: 1, Family: family, Attrs: b}
}

// Dump lists objects. Like the kernel it filters tables and chains by family alone.
func (k *fakeKernel) Dump(typ uint16, family uint8, b []byte, each func(kernel.NFMessage) error) error {
	if typ>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return unix.EINVAL
	}
	want := allAttrs(b)
	kind := uint8(typ)
	if kind == unix.NFT_MSG_GETSETELEM {
		return k.dumpElems(family, want, each)
	}
	named := k.tables[tableKey{family, want.str(1)}]
	if kind == unix.NFT_MSG_GETSET && want.has(1) && named == nil {
		return unix.ENOENT
	}
	for _, t := range k.sortedTables() {
		if family != unix.AF_UNSPEC && t.family != family {
			continue
		}
		var out []kernel.NFMessage
		switch kind {
		case unix.NFT_MSG_GETTABLE:
			out = append(out, fakeMessage(unix.NFT_MSG_NEWTABLE, t.family, t.fill()))
		case unix.NFT_MSG_GETCHAIN:
			for _, c := range sorted(t.chains) {
				out = append(out, fakeMessage(unix.NFT_MSG_NEWCHAIN, t.family, c.fill(t)))
			}
		case unix.NFT_MSG_GETRULE, unix.NFT_MSG_GETSET, unix.NFT_MSG_GETOBJ:
			if want.has(1) && t.name != want.str(1) {
				continue
			}
			out = t.list(kind, want)
		default:
			return fmt.Errorf("dump %d: %w", kind, unix.EOPNOTSUPP)
		}
		for _, m := range out {
			if err := each(m); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *fakeTable) list(kind uint8, want attrs) (out []kernel.NFMessage) {
	switch kind {
	case unix.NFT_MSG_GETRULE:
		for _, c := range sorted(t.chains) {
			for i, r := range c.rules {
				if !want.has(unix.NFTA_RULE_CHAIN) || c.name == want.str(unix.NFTA_RULE_CHAIN) {
					out = append(out, fakeMessage(unix.NFT_MSG_NEWRULE, t.family, r.fill(t, c, i)))
				}
			}
		}
	case unix.NFT_MSG_GETSET:
		for _, s := range sorted(t.sets) {
			out = append(out, fakeMessage(unix.NFT_MSG_NEWSET, t.family, s.fill(t)))
		}
	case unix.NFT_MSG_GETOBJ:
		for _, o := range sorted(t.objs) {
			out = append(out, fakeMessage(unix.NFT_MSG_NEWOBJ, t.family, o.fill(t)))
		}
	}
	return out
}

// perMessage is how many elements a message of a dump carries: fewer than the kernel's, so that tests see several.
const perMessage = 20

func (k *fakeKernel) dumpElems(family uint8, want attrs, each func(kernel.NFMessage) error) error {
	t := k.tables[tableKey{family, want.str(unix.NFTA_SET_ELEM_LIST_TABLE)}]
	if t == nil || t.sets[want.str(unix.NFTA_SET_ELEM_LIST_SET)] == nil {
		return unix.ENOENT
	}
	s := t.sets[want.str(unix.NFTA_SET_ELEM_LIST_SET)]
	keys := slices.Sorted(maps.Keys(s.elems))
	for part := range slices.Chunk(keys, perMessage) {
		b := kernel.AppendAttrString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, t.name)
		b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_SET, s.name)
		b = fillNest(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(b []byte) []byte {
			for _, at := range part {
				b = fillNest(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte { return s.elems[at].fill(b, s) })
			}
			return b
		})
		if err := each(fakeMessage(unix.NFT_MSG_NEWSETELEM, family, b)); err != nil {
			return err
		}
	}
	return nil
}

func sorted[V any](m map[string]*V) []*V {
	var out []*V
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[k])
	}
	return out
}

func (k *fakeKernel) sortedTables() []*fakeTable {
	return slices.SortedFunc(maps.Values(k.tables), func(a, b *fakeTable) int {
		return cmp.Or(cmp.Compare(a.family, b.family), cmp.Compare(a.name, b.name))
	})
}

// nest appends attributes in an attribute; nf_tables sets no flag that says so.
func fillNest(b []byte, typ uint16, f func([]byte) []byte) []byte {
	b, at := kernel.BeginNest(b, typ)
	binary.NativeEndian.PutUint16(b[at+2:], typ)
	return kernel.EndNest(f(b), at)
}

func fillData(b []byte, typ uint16, v []byte) []byte {
	return fillNest(b, typ, func(b []byte) []byte { return kernel.AppendAttr(b, unix.NFTA_DATA_VALUE, v) })
}

func (v *fakeVerdict) fill(b []byte, typ uint16) []byte {
	return fillNest(b, typ, func(b []byte) []byte {
		return fillNest(b, unix.NFTA_DATA_VERDICT, func(b []byte) []byte {
			b = kernel.AppendAttrU32(b, unix.NFTA_VERDICT_CODE, uint32(v.code))
			if v.chain != "" {
				b = kernel.AppendAttrString(b, unix.NFTA_VERDICT_CHAIN, v.chain)
			}
			return b
		})
	})
}

func fillOptional(b []byte, typ uint16, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return kernel.AppendAttr(b, typ, v)
}

func (t *fakeTable) fill() []byte {
	b := kernel.AppendAttrString(nil, unix.NFTA_TABLE_NAME, t.name)
	b = kernel.AppendAttrU32(b, unix.NFTA_TABLE_USE, uint32(len(t.chains)+len(t.sets)+len(t.objs)))
	b = kernel.AppendAttrU64(b, tableHandle, t.handle)
	b = kernel.AppendAttrU32(b, unix.NFTA_TABLE_FLAGS, t.flags)
	return fillOptional(b, tableUserdata, t.userdata)
}

func (c *fakeChain) fill(t *fakeTable) []byte {
	b := kernel.AppendAttrString(nil, unix.NFTA_CHAIN_TABLE, t.name)
	b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_NAME, c.name)
	b = kernel.AppendAttrU64(b, unix.NFTA_CHAIN_HANDLE, c.handle)
	if h := c.base; h != nil {
		b = fillNest(b, unix.NFTA_CHAIN_HOOK, func(b []byte) []byte {
			b = kernel.AppendAttrU32(b, unix.NFTA_HOOK_HOOKNUM, h.num)
			return kernel.AppendAttrU32(b, unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		})
		b = kernel.AppendAttrU32(b, unix.NFTA_CHAIN_POLICY, h.policy)
		b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_TYPE, h.typ)
		b = kernel.AppendAttrU32(b, chainFlags, chainBase)
	}
	b = kernel.AppendAttrU32(b, unix.NFTA_CHAIN_USE, uint32(len(c.rules)+c.refs))
	return fillOptional(b, chainUserdata, c.userdata)
}

func (r *fakeRule) fill(t *fakeTable, c *fakeChain, i int) []byte {
	b := kernel.AppendAttrString(nil, unix.NFTA_RULE_TABLE, t.name)
	b = kernel.AppendAttrString(b, unix.NFTA_RULE_CHAIN, c.name)
	b = kernel.AppendAttrU64(b, unix.NFTA_RULE_HANDLE, r.handle)
	if i > 0 {
		b = kernel.AppendAttrU64(b, unix.NFTA_RULE_POSITION, c.rules[i-1].handle)
	}
	b = fillNest(b, unix.NFTA_RULE_EXPRESSIONS, func(b []byte) []byte {
		for _, e := range r.exprs {
			b = fillNest(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte {
				b = kernel.AppendAttrString(b, unix.NFTA_EXPR_NAME, e.name())
				return fillNest(b, unix.NFTA_EXPR_DATA, e.fill)
			})
		}
		return b
	})
	return fillOptional(b, unix.NFTA_RULE_USERDATA, r.userdata)
}

func (s *fakeSet) fill(t *fakeTable) []byte {
	b := kernel.AppendAttrString(nil, unix.NFTA_SET_TABLE, t.name)
	b = kernel.AppendAttrString(b, unix.NFTA_SET_NAME, s.name)
	b = kernel.AppendAttrU64(b, setHandle, s.handle)
	if s.flags != 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_FLAGS, s.flags)
	}
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_TYPE, s.keyType)
	b = kernel.AppendAttrU32(b, unix.NFTA_SET_KEY_LEN, s.keyLen)
	if s.isMap() {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_DATA_TYPE, s.dataType)
		n := s.dataLen
		if s.verdicts() {
			n = 16 // sizeof(struct nft_verdict)
		}
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_DATA_LEN, n)
	}
	if s.timeout != 0 {
		b = kernel.AppendAttrU64(b, unix.NFTA_SET_TIMEOUT, s.timeout)
	}
	if s.gc != 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_GC_INTERVAL, s.gc)
	}
	if s.policy != 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_POLICY, s.policy)
	}
	b = fillOptional(b, unix.NFTA_SET_USERDATA, s.userdata)
	return fillNest(b, unix.NFTA_SET_DESC, func(b []byte) []byte {
		if s.size != 0 {
			b = kernel.AppendAttrU32(b, unix.NFTA_SET_DESC_SIZE, s.size)
		}
		if len(s.concat) > 1 {
			b = fillNest(b, setDescConcat, func(b []byte) []byte {
				for _, n := range s.concat {
					b = fillNest(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte { return kernel.AppendAttrU32(b, 1, n) })
				}
				return b
			})
		}
		return b
	})
}

func (e *fakeElem) fill(b []byte, s *fakeSet) []byte {
	if e.flags&elemCatchall == 0 {
		b = fillData(b, unix.NFTA_SET_ELEM_KEY, e.key)
	}
	if s.ranges() && !e.single {
		b = fillData(b, elemKeyEnd, e.keyEnd)
	}
	switch {
	case e.verdict != nil:
		b = e.verdict.fill(b, unix.NFTA_SET_ELEM_DATA)
	case e.data != nil:
		b = fillData(b, unix.NFTA_SET_ELEM_DATA, e.data)
	}
	if e.flags != 0 {
		b = kernel.AppendAttrU32(b, unix.NFTA_SET_ELEM_FLAGS, e.flags)
	}
	if e.explicit {
		b = kernel.AppendAttrU64(b, unix.NFTA_SET_ELEM_TIMEOUT, e.timeout)
	}
	if e.timeout != 0 {
		b = kernel.AppendAttrU64(b, unix.NFTA_SET_ELEM_EXPIRATION, e.timeout)
	}
	return fillOptional(b, unix.NFTA_SET_ELEM_USERDATA, e.userdata)
}

func (o *fakeObj) fill(t *fakeTable) []byte {
	b := kernel.AppendAttrString(nil, unix.NFTA_OBJ_TABLE, t.name)
	b = kernel.AppendAttrString(b, unix.NFTA_OBJ_NAME, o.name)
	b = kernel.AppendAttrU32(b, unix.NFTA_OBJ_TYPE, o.typ)
	b = kernel.AppendAttrU64(b, objHandle, o.handle)
	b = kernel.AppendAttrU32(b, unix.NFTA_OBJ_USE, uint32(o.refs))
	b = fillNest(b, unix.NFTA_OBJ_DATA, func(b []byte) []byte {
		b = kernel.AppendAttrU64(b, unix.NFTA_COUNTER_BYTES, o.bytes)
		return kernel.AppendAttrU64(b, unix.NFTA_COUNTER_PACKETS, o.packets)
	})
	return fillOptional(b, objUserdata, o.userdata)
}

// String is all that the kernel holds, but counters, handles, and what packets left.
func (k *fakeKernel) String() string {
	var w strings.Builder
	for _, t := range k.sortedTables() {
		fmt.Fprintf(&w, "table %d %s %q\n", t.family, t.name, t.userdata)
		for _, o := range sorted(t.objs) {
			fmt.Fprintf(&w, "  object %s %d %q\n", o.name, o.typ, o.userdata)
		}
		for _, s := range sorted(t.sets) {
			fmt.Fprintf(&w, "  set %s flags %x key %x/%d %v data %x/%d size %d timeout %d %q\n", s.name, s.flags, s.keyType, s.keyLen, s.concat, s.dataType, s.dataLen, s.size, s.timeout, s.userdata)
			for _, e := range sorted(s.elems) {
				if !e.dynamic {
					fmt.Fprintf(&w, "    %x %x : %x %v flags %d %q\n", e.key, e.keyEnd, e.data, e.verdict, e.flags, e.userdata)
				}
			}
		}
		for _, c := range sorted(t.chains) {
			fmt.Fprintf(&w, "  chain %s %+v %q\n", c.name, c.base, c.userdata)
			for _, r := range c.rules {
				w.WriteString("   ")
				for _, e := range r.exprs {
					w.WriteString(" " + describe(e))
				}
				fmt.Fprintf(&w, " %q\n", r.userdata)
			}
		}
	}
	return w.String()
}

func (v *fakeVerdict) String() string {
	if v == nil {
		return ""
	}
	name, ok := map[int32]string{0: "drop", 1: "accept", unix.NFT_CONTINUE: "continue", unix.NFT_BREAK: "break", unix.NFT_RETURN: "return",
		unix.NFT_JUMP: "jump ", unix.NFT_GOTO: "goto "}[v.code]
	if !ok {
		return fmt.Sprint("verdict ", v.code)
	}
	return name + v.chain
}
