package nftables

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// layout is the number of what the sets and their keys mean. A table of another one is replaced as a whole.
const layout = 1

// held is what the kernel holds of ours in one family.
type held struct {
	v6       bool
	name     string // of the table
	table    bool
	stale    bool // of another layout: its content means nothing
	sets     [setsCount]bool
	counters map[string]bool
	chains   map[chainID]sum
	shapes   map[shapeID]shape
	rows     map[model.Key]row
	about    map[model.Key]string // comments of rows
	facts    map[fact]struct{}
	strays   []stray         // elements that make no sense, and must go before others come
	anything [setsCount]bool // the set has an element that stands for all keys ("*"), which is never ours
}

// fact is an address in one of the plain sets.
type fact struct {
	set setID // setClusterIPs, setHairpin, setNodeIPs, setNodePortIPs
	at  netip.Addr
}

type stray struct {
	set      setID
	key, end []byte
}

// read reads a family. It asks for nothing of other tables but, on the way, the names of their chains.
func read(ctx context.Context, c conn, table string, v6 bool) (*held, error) {
	var h *held
	for range 20 { // whenever somebody changes nf_tables while we read, the lists may be torn
		h = &held{v6: v6, name: table, counters: map[string]bool{}, chains: map[chainID]sum{}, shapes: map[shapeID]shape{}, rows: map[model.Key]row{},
			about: map[model.Key]string{}, facts: map[fact]struct{}{}}
		err := h.read(c)
		if !errors.Is(err, kernel.ErrDumpInterrupted) {
			return h, err
		}
		if err := ctx.Err(); err != nil {
			return h, err
		}
	}
	return h, fmt.Errorf("read table %s: others keep changing nf_tables: %w", table, kernel.ErrDumpInterrupted)
}

func (h *held) read(c conn) error {
	m, err := c.Get(nftType(unix.NFT_MSG_GETTABLE), family(h.v6), kernel.AppendAttrString(nil, unix.NFTA_TABLE_NAME, h.name))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for table %s: %w", h.name, err)
	}
	h.table, h.stale = true, true
	asleep := false
	for typ, v := range kernel.Attrs(m.Attrs) {
		switch typ {
		case attrTableUserdata:
			n := cutUdata(v, udataOurs)
			h.stale = len(n) != 4 || binary.BigEndian.Uint32(n) != layout
		case unix.NFTA_TABLE_FLAGS:
			asleep = kernel.AttrU32(v) != 0 // NFT_TABLE_F_DORMANT: no packet meets its chains
		}
	}
	h.stale = h.stale || asleep
	steps := []func(conn) error{h.readSets, h.readCounters, h.readChains, h.readRules, h.readRoutes, h.readFacts, h.readRows}
	for _, step := range steps {
		if h.stale {
			return nil
		}
		if err := step(c); err != nil {
			return fmt.Errorf("read table %s: %w", h.name, err)
		}
	}
	return nil
}

func nftType(kind uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | kind }

func (h *held) readSets(c conn) error {
	ask := kernel.AppendAttrString(nil, unix.NFTA_SET_TABLE, h.name)
	return c.Dump(nftType(unix.NFT_MSG_GETSET), family(h.v6), ask, func(m kernel.NFMessage) error {
		var table, name []byte
		var flags, keyLen, valueLen uint32
		for typ, v := range kernel.Attrs(m.Attrs) {
			switch typ {
			case unix.NFTA_SET_TABLE:
				table = kernel.AttrBytes(v)
			case unix.NFTA_SET_NAME:
				name = kernel.AttrBytes(v)
			case unix.NFTA_SET_FLAGS:
				flags = kernel.AttrU32(v)
			case unix.NFTA_SET_KEY_LEN:
				keyLen = kernel.AttrU32(v)
			case unix.NFTA_SET_DATA_LEN:
				valueLen = kernel.AttrU32(v)
			}
		}
		id, ok := setNamed(name)
		if string(table) != h.name || !ok {
			return nil
		}
		s := specs[id]
		h.sets[id] = true
		h.stale = h.stale || flags != s.allFlags() || int(keyLen) != sizeOf(s.key, h.v6) ||
			s.value != nil && !id.verdicts() && int(valueLen) != sizeOf(s.value, h.v6)
		return nil
	})
}

func (h *held) readCounters(c conn) error {
	ask := kernel.AppendAttrString(nil, unix.NFTA_OBJ_TABLE, h.name)
	return c.Dump(nftType(unix.NFT_MSG_GETOBJ), family(h.v6), ask, func(m kernel.NFMessage) error {
		if table, name := cutNames(m.Attrs, unix.NFTA_OBJ_TABLE, unix.NFTA_OBJ_NAME); string(table) == h.name {
			h.counters[string(name)] = true
		}
		return nil
	})
}

// cutNames finds the names of a table and of what is in it, by the types of their attributes.
func cutNames(attrs []byte, tableType, nameType uint16) (table, name []byte) {
	for typ, v := range kernel.Attrs(attrs) {
		switch typ {
		case tableType:
			table = kernel.AttrBytes(v)
		case nameType:
			name = kernel.AttrBytes(v)
		}
	}
	return table, name
}

func (h *held) readChains(c conn) error {
	return c.Dump(nftType(unix.NFT_MSG_GETCHAIN), family(h.v6), nil, func(m kernel.NFMessage) error {
		var table, name, typ, hooks []byte
		policy := uint32(verdictAccept)
		for t, v := range kernel.Attrs(m.Attrs) {
			switch t {
			case unix.NFTA_CHAIN_TABLE:
				table = kernel.AttrBytes(v)
			case unix.NFTA_CHAIN_NAME:
				name = kernel.AttrBytes(v)
			case unix.NFTA_CHAIN_TYPE:
				typ = kernel.AttrBytes(v)
			case unix.NFTA_CHAIN_HOOK:
				hooks = v
			case unix.NFTA_CHAIN_POLICY:
				policy = kernel.AttrU32(v)
			}
		}
		if string(table) != h.name {
			return nil
		}
		at := cutHook(hooks, string(typ))
		h.stale = h.stale || isOtherKind(string(name), at)
		s := hookSum(at)
		if policy != verdictAccept {
			s = s.and(0)
		}
		h.chains[chainID{h.v6, string(name)}] = s
		return nil
	})
}

// isOtherKind tells a chain that has the name of one of ours and can't become it: the kernel changes no chain's hook.
func isOtherKind(name string, at *hook) bool {
	want, based := baseChains[name]
	if based {
		return at == nil || *at != *want
	}
	return at != nil && isOurs(name)
}

func cutHook(b []byte, typ string) *hook {
	if b == nil {
		return nil
	}
	h := &hook{typ: typ}
	for t, v := range kernel.Attrs(b) {
		switch t {
		case unix.NFTA_HOOK_HOOKNUM:
			h.num = kernel.AttrU32(v)
		case unix.NFTA_HOOK_PRIORITY:
			h.priority = int32(kernel.AttrU32(v))
		}
	}
	return h
}

// readRules adds the rules' tags to the sums of their chains. A rule without a tag is not ours.
func (h *held) readRules(c conn) error {
	ask := kernel.AppendAttrString(nil, unix.NFTA_RULE_TABLE, h.name)
	return c.Dump(nftType(unix.NFT_MSG_GETRULE), family(h.v6), ask, func(m kernel.NFMessage) error {
		var table, name, user []byte
		for typ, v := range kernel.Attrs(m.Attrs) {
			switch typ {
			case unix.NFTA_RULE_TABLE:
				table = kernel.AttrBytes(v)
			case unix.NFTA_RULE_CHAIN:
				name = kernel.AttrBytes(v)
			case attrRuleUserdata:
				user = v
			}
		}
		if string(table) != h.name {
			return nil
		}
		tag := uint64(0)
		if v := cutUdata(user, udataOurs); len(v) == 8 {
			tag = binary.BigEndian.Uint64(v)
		}
		id := chainID{h.v6, string(name)}
		h.chains[id] = h.chains[id].and(tag)
		return nil
	})
}

// elements gives each element of a set; what it is made of is valid during the call.
func (h *held) elements(c conn, s setID, each func(e element)) error {
	if !h.sets[s] {
		return nil
	}
	ask := kernel.AppendAttrString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, h.name)
	ask = kernel.AppendAttrString(ask, unix.NFTA_SET_ELEM_LIST_SET, s.String())
	err := c.Dump(nftType(unix.NFT_MSG_GETSETELEM), family(h.v6), ask, func(m kernel.NFMessage) (err error) {
		cutElements(m.Attrs, func(e element) {
			switch {
			case e.anything:
				h.anything[s] = true
			case !e.fits(s, h.v6): // somebody has put another set in the place of the one that was read
				err = kernel.ErrDumpInterrupted
			default:
				each(e)
			}
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("elements of %s: %w", s, err)
	}
	return nil
}

// cutElements reads a message about elements.
func cutElements(attrs []byte, each func(e element)) {
	for typ, list := range kernel.Attrs(attrs) {
		if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		for _, elem := range kernel.Attrs(list) {
			if e := cutElement(elem); e.key != nil || e.anything {
				each(e)
			}
		}
	}
}

// fits tells whether key and value have the lengths of the set's.
func (e element) fits(s setID, v6 bool) bool {
	n := sizeOf(specs[s].key, v6)
	return len(e.key) == n && (e.end == nil || len(e.end) == n) &&
		(!s.isMap() || s.verdicts() || len(e.value) == sizeOf(specs[s].value, v6))
}

func cutElement(attrs []byte) (e element) {
	for typ, v := range kernel.Attrs(attrs) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.key = cutValue(v)
		case attrElemKeyEnd:
			e.end = cutValue(v)
		case unix.NFTA_SET_ELEM_DATA:
			e.value, e.verdict = cutValue(v), cutVerdict(v)
		case unix.NFTA_SET_ELEM_FLAGS:
			e.anything = kernel.AttrU32(v)&elemCatchall != 0
		case attrElemUserdata:
			e.comment = string(kernel.AttrBytes(cutUdata(v, udataComment)))
		}
	}
	return e
}

func cutValue(b []byte) []byte {
	for typ, v := range kernel.Attrs(b) {
		if typ == unix.NFTA_DATA_VALUE {
			return v
		}
	}
	return nil
}

func cutVerdict(b []byte) *verdict {
	for typ, v := range kernel.Attrs(b) {
		if typ != unix.NFTA_DATA_VERDICT {
			continue
		}
		out := &verdict{}
		for t, v := range kernel.Attrs(v) {
			switch t {
			case unix.NFTA_VERDICT_CODE:
				out.code = int32(kernel.AttrU32(v))
			case unix.NFTA_VERDICT_CHAIN:
				out.chain = string(kernel.AttrBytes(v))
			}
		}
		return out
	}
	return nil
}

// readRoutes reads the shapes. One that is not in all three maps, or leads elsewhere, is none: its elements are strays.
func (h *held) readRoutes(c conn) error {
	found := map[uint32]int{}
	targets := map[uint32]shape{}
	for _, o := range model.Origins {
		err := h.elements(c, routesOf(o), func(e element) {
			n := binary.NativeEndian.Uint32(e.key)
			t, ok := targetOf(e.verdict)
			if !ok {
				return
			}
			s := targets[n]
			s[o] = t
			targets[n] = s
			found[n]++
		})
		if err != nil {
			return err
		}
	}
	for n, s := range targets {
		if found[n] == len(model.Origins) {
			h.shapes[shapeID{h.v6, n}] = s
		}
	}
	for _, o := range model.Origins {
		err := h.elements(c, routesOf(o), func(e element) {
			if _, ok := h.shapes[shapeID{h.v6, binary.NativeEndian.Uint32(e.key)}]; !ok {
				h.strays = append(h.strays, stray{routesOf(o), bytes.Clone(e.key), nil})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// verdictOf is what an origin's map says of a target; targetOf is the way back.
func verdictOf(t target) *verdict {
	if t.verdict == model.Drop && !t.ranges {
		return &verdict{code: verdictDrop}
	}
	return &verdict{code: unix.NFT_GOTO, chain: t.chain()}
}

func targetOf(v *verdict) (target, bool) {
	switch {
	case v == nil:
		return target{}, false
	case v.code == verdictDrop:
		return target{verdict: model.Drop}, true
	case v.code == unix.NFT_GOTO:
		t, ok := targetNamed(v.chain)
		return t, ok && t.chain() == v.chain // "cluster-02" is none of ours
	}
	return target{}, false
}

func (h *held) readFacts(c conn) error {
	for _, s := range [...]setID{setClusterIPs, setHairpin, setNodeIPs, setNodePortIPs} {
		err := h.elements(c, s, func(e element) {
			n := addrLen(h.v6)
			if s == setHairpin && !bytes.Equal(e.key[:n], e.key[n:]) {
				h.strays = append(h.strays, stray{s, bytes.Clone(e.key), nil})
				return
			}
			h.facts[fact{s, cutAddr(e.key[:n])}] = struct{}{}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// draft is a row while it is put together.
type draft struct {
	row
	more    more
	known   bool // the services map has it
	comment string
	slots   [2]numbered
	numbers [2]numbered
	members [2][]string // own numbers and their endpoints
	ranges  []string
}

// numbered are packed endpoints by their number.
type numbered struct {
	b     []byte
	count int
}

// numberMost is above any number that we give.
const numberMost = 1 << 20

func (x *numbered) put(n uint32, packed []byte) bool {
	size := len(packed)
	if n >= numberMost {
		return false
	}
	if need := (int(n) + 1) * size; len(x.b) < need {
		x.b = append(x.b, make([]byte, need-len(x.b))...)
	}
	copy(x.b[int(n)*size:], packed)
	x.count++
	return true
}

// readRows puts together what is held of each frontend. Where that is not what a whole frontend has, all elements of it are
// strays.
func (h *held) readRows(c conn) error {
	drafts := map[model.Key]*draft{}
	at := func(key []byte) *draft {
		k := cutKey(key, h.v6)
		d := drafts[k]
		if d == nil {
			d = &draft{}
			drafts[k] = d
		}
		return d
	}
	broken := map[*draft]bool{}
	for _, s := range rowSets {
		err := h.elements(c, s, func(e element) {
			d := at(e.key)
			if !d.take(s, e, keyLen(h.v6)) {
				broken[d] = true
			}
		})
		if err != nil {
			return err
		}
	}
	bad := map[model.Key]bool{}
	for k, d := range drafts {
		if broken[d] || !d.finish(h) {
			bad[k] = true
			continue
		}
		h.rows[k] = d.row
		h.about[k] = d.comment
	}
	return h.readStrays(c, bad)
}

// rowSets are the sets that rows are made of.
var rowSets = [...]setID{setServices, setEndpoints, setLocalEndpoints, setStickyNumbers, setLocalStickyNumbers, setSticky, setLocalSticky, setAllowed}

func (d *draft) take(s setID, e element, keyLen int) bool {
	rest := e.key[keyLen:]
	switch s {
	case setServices:
		d.known, d.shape = true, binary.NativeEndian.Uint32(e.value)
		d.comment, d.about = e.comment, checksum([]byte(e.comment))
	case setEndpoints, setLocalEndpoints:
		return d.slots[s-setEndpoints].put(binary.NativeEndian.Uint32(rest), e.value)
	case setStickyNumbers, setLocalStickyNumbers:
		return d.numbers[s-setStickyNumbers].put(binary.NativeEndian.Uint32(rest), e.value)
	case setSticky, setLocalSticky:
		d.members[s-setSticky] = append(d.members[s-setSticky], string(rest)+string(e.value))
	case setAllowed:
		if e.end == nil {
			e.end = e.key
		}
		d.ranges = append(d.ranges, string(rest)+string(e.end[keyLen:]))
		return bytes.Equal(e.key[:keyLen], e.end[:keyLen])
	}
	return true
}

// finish tells whether the parts make a whole.
func (d *draft) finish(h *held) bool {
	s, ok := h.shapes[shapeID{h.v6, d.shape}]
	if !ok || !d.known {
		return false
	}
	slices.Sort(d.ranges)
	d.more.allowed = strings.Join(d.ranges, "")
	for scope := range d.slots {
		if !d.whole(s, scope, backendLen(h.v6)) {
			return false
		}
	}
	d.setMore(d.more)
	return s[0].ranges || len(d.ranges) == 0
}

// whole tells whether the endpoints of one scope are as many as the shape says, each once, with the same ones for sticky
// clients.
func (d *draft) whole(s shape, scope, size int) bool {
	have, numbers, members := d.slots[scope], d.numbers[scope], d.members[scope]
	n, sticky := s.uses(scope)
	if have.count != n || len(have.b) != n*size {
		return false
	}
	in := scoped{endpoints: string(have.b)}
	if scope == int(model.Local) {
		d.more.local = in.endpoints
	} else {
		d.endpoints = in.endpoints
	}
	if !sticky {
		return numbers.count == 0 && len(members) == 0
	}
	if numbers.count != n || len(numbers.b) != n*numberLen || len(members) != n {
		return false
	}
	in.numbers = string(numbers.b)
	d.more.numbers[scope] = in.numbers
	for want := in.members(size); want != ""; want = want[numberLen+size:] {
		if !slices.Contains(members, want[:numberLen+size]) {
			return false
		}
	}
	return true
}

// readStrays lists all elements of some keys.
func (h *held) readStrays(c conn, bad map[model.Key]bool) error {
	if len(bad) == 0 {
		return nil
	}
	for _, s := range rowSets {
		err := h.elements(c, s, func(e element) {
			if bad[cutKey(e.key, h.v6)] {
				h.strays = append(h.strays, stray{s, bytes.Clone(e.key), bytes.Clone(e.end)})
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// numbers are those of the shapes, the lowest of each; next is above all of them.
func (h *held) numbers() (of map[shape]uint32, next uint32) {
	of = map[shape]uint32{}
	for id, s := range h.shapes {
		next = max(next, id.n+1)
		if have, ok := of[s]; !ok || id.n < have {
			of[s] = id.n
		}
	}
	return of, max(next, 1)
}
