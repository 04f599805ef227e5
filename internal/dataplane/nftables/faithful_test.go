package nftables

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/kernel"
)

// twin speaks to the fake and to the kernel, and complains when they do not say the same.
type twin struct {
	fake   *fakeKernel
	real   conn
	fail   func() memory.Fault
	differ []string
}

func (w *twin) complain(format string, args ...any) {
	if len(w.differ) < 3 { // the rest is likely to follow from these
		w.differ = append(w.differ, fmt.Sprintf(format, args...))
	}
}

func (w *twin) Close() error { return nil }

func (w *twin) Commit(b *kernel.NFBatch) error {
	fault := memory.None
	if w.fail != nil {
		fault = w.fail()
	}
	if fault == memory.Before {
		return errFake
	}
	said := say(b)
	fake, real := w.fake.Commit(b), w.real.Commit(b)
	if a, b := verdictOn(fake), verdictOn(real); a != b {
		w.complain("commit: the fake says %v; the kernel %v, to\n%s", fake, real, said)
	}
	if fault == memory.After && fake == nil {
		return errFake
	}
	return fake
}

// say tells what a transaction asks for.
func say(b *kernel.NFBatch) string {
	var w strings.Builder
	i := 0
	b.Messages(func(kind uint8, flags uint16, family uint8, attrs []byte) {
		fmt.Fprintf(&w, "  %d: kind %d flags %x family %d: %s\n", i, kind, flags, family, tree(attrs, 0))
		i++
	})
	return w.String()
}

// verdictOn is an answer's errno and message.
func verdictOn(err error) string {
	var refused *kernel.BatchError
	var errno unix.Errno
	switch {
	case err == nil:
		return "yes"
	case errors.As(err, &refused) && errors.As(err, &errno):
		return fmt.Sprintf("%d: %v", refused.Index, errno)
	}
	return err.Error()
}

func (w *twin) Dump(typ uint16, family uint8, attrs []byte, each func(kernel.NFMessage) error) error {
	var got [2][]string
	var errs [2]error
	for i, c := range []conn{w.fake, w.real} {
		errs[i] = c.Dump(typ, family, attrs, func(m kernel.NFMessage) error {
			if w.ours(m) {
				got[i] = append(got[i], normal(m)...)
			}
			return nil
		})
		slices.Sort(got[i])
	}
	if errno(errs[0]) != errno(errs[1]) {
		w.complain("dump %d: the fake says %v, the kernel %v", uint8(typ), errs[0], errs[1])
	}
	for i := range max(len(got[0]), len(got[1])) {
		var a, b string
		if i < len(got[0]) {
			a = got[0][i]
		}
		if i < len(got[1]) {
			b = got[1][i]
		}
		if a != b {
			w.complain("dump %d: the fake has\n  %s\nthe kernel\n  %s", uint8(typ), a, b)
			break
		}
	}
	return w.fake.Dump(typ, family, attrs, each)
}

// ours leaves out what packets wrote, since those meet the fake alone.
func (w *twin) ours(m kernel.NFMessage) bool {
	if uint8(m.Type) != unix.NFT_MSG_NEWSETELEM {
		return true
	}
	a := allAttrs(m.Attrs)
	t := w.fake.tables[tableKey{m.Family, a.str(1)}]
	return t == nil || t.sets[a.str(2)] == nil || t.sets[a.str(2)].flags&unix.NFT_SET_EVAL == 0
}

func errno(err error) unix.Errno {
	var n unix.Errno
	errors.As(err, &n)
	return n
}

func (w *twin) Get(typ uint16, family uint8, attrs []byte) (kernel.NFMessage, error) {
	fake, errFake := w.fake.Get(typ, family, attrs)
	real, errReal := w.real.Get(typ, family, attrs)
	if errno(errFake) != errno(errReal) {
		w.complain("get %d: the fake says %v, the kernel %v", uint8(typ), errFake, errReal)
	} else if a, b := normal(fake), normal(real); errFake == nil && uint8(typ) != unix.NFT_MSG_GETGEN && !slices.Equal(a, b) {
		w.complain("get %d: the fake has\n  %s\nthe kernel\n  %s", uint8(typ), a, b)
	}
	return fake, errFake
}

// normal is a message in words, without what newer kernels add (NFTA_SET_TYPE, NFTA_SET_COUNT), counters and clocks. Each
// element is one of its own, since a list may be split anywhere.
func normal(m kernel.NFMessage) (out []string) {
	head, w := fmt.Sprintf("%d %d:", uint8(m.Type), m.Family), sayings{}
	for t, v := range kernel.Attrs(m.Attrs) {
		switch kind := uint8(m.Type); {
		case kind == unix.NFT_MSG_NEWSETELEM && t == unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			for _, e := range kernel.Attrs(v) {
				out = append(out, head+w.String()+normalElem(e))
			}
			return out
		case kind == unix.NFT_MSG_NEWSET && t > 18, kind == unix.NFT_MSG_NEWOBJ && t == unix.NFTA_OBJ_DATA:
		default:
			w.add(t, tree(v, 0))
		}
	}
	return append(out, head+w.String())
}

func normalElem(b []byte) string {
	w := sayings{}
	for t, v := range kernel.Attrs(b) {
		if t != unix.NFTA_SET_ELEM_EXPIRATION {
			w.add(t, tree(v, 0))
		}
	}
	return w.String()
}

// sayings are attributes by type: each kernel has them in another order.
type sayings []string

func (s *sayings) add(typ uint16, v string) { *s = append(*s, fmt.Sprintf(" %03d=%s", typ, v)) }

func (s sayings) String() string {
	slices.SortStableFunc(s, func(a, b string) int { return strings.Compare(a[:4], b[:4]) })
	return strings.Join(s, "")
}

// tree prints bytes, as attributes when they look like some.
func tree(b []byte, depth int) string {
	w := sayings{}
	rest := len(b)
	for t, v := range kernel.Attrs(b) {
		rest -= (4 + len(v) + 3) / 4 * 4
		if t > 64 {
			rest = 1
			break
		}
		w.add(t, tree(v, depth+1))
	}
	if rest > 0 || rest < -3 || len(b) == 0 || depth > 9 {
		return fmt.Sprintf("%x", b)
	}
	return "{" + w.String()[1:] + "}"
}

// inKernel runs f with a connection in a network namespace of its own.
func inKernel(t *testing.T, f func(w *twin)) {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = ns.Do(func() error {
		c, err := kernel.OpenNFNetlink()
		if err != nil {
			return err
		}
		defer c.Close()
		f(&twin{fake: newFakeKernel(), real: c})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestFakeIsFaithful plays the suite on the fake and on the kernel at once: both must take and refuse the same transactions,
// and list the same.
func TestFakeIsFaithful(t *testing.T) {
	defer keep(&txMost)()
	inKernel(t, func(w *twin) {
		dptest.Run(t, func(t *testing.T) dptest.Subject {
			t.Cleanup(func() {
				for _, d := range w.differ {
					t.Error(d)
				}
				w.differ = nil
			})
			n := newSubject(w.fake)
			n.conn = w
			s := n.subject()
			s.Fail = func(faults func() memory.Fault) { w.fail = faults }
			return s
		})
	})
}

// Messages by hand.

type attr func([]byte) []byte

func str(typ uint16, s string) attr {
	return func(b []byte) []byte { return kernel.AppendAttrString(b, typ, s) }
}

func num(typ uint16, n uint32) attr {
	return func(b []byte) []byte { return kernel.AppendAttrU32(b, typ, n) }
}

func raw(typ uint16, v ...byte) attr {
	return func(b []byte) []byte { return kernel.AppendAttr(b, typ, v) }
}

func in(typ uint16, as ...attr) attr {
	return func(b []byte) []byte {
		return fillNest(b, typ, func(b []byte) []byte {
			for _, a := range as {
				b = a(b)
			}
			return b
		})
	}
}

func val(typ uint16, v ...byte) attr { return in(typ, raw(unix.NFTA_DATA_VALUE, v...)) }

func to(typ uint16, code int32, chain string) attr {
	as := []attr{num(unix.NFTA_VERDICT_CODE, uint32(code))}
	if chain != "" {
		as = append(as, str(unix.NFTA_VERDICT_CHAIN, chain))
	}
	return in(typ, in(unix.NFTA_DATA_VERDICT, as...))
}

type saying struct {
	kind  uint8
	flags uint16
	attrs []attr
}

// in table t
func newObject(kind uint8, as ...attr) saying {
	return saying{kind, unix.NLM_F_CREATE, append([]attr{str(1, "t")}, as...)}
}

func (s saying) with(flags uint16) saying { s.flags |= flags; return s }

func table() saying { return newObject(unix.NFT_MSG_NEWTABLE, raw(tableUserdata, 'a', 'b')) }

func aChain(name string) saying {
	return newObject(unix.NFT_MSG_NEWCHAIN, str(unix.NFTA_CHAIN_NAME, name))
}

func aBase(name, typ string, hook uint32) saying {
	s := aChain(name)
	s.attrs = append(s.attrs, in(unix.NFTA_CHAIN_HOOK, num(unix.NFTA_HOOK_HOOKNUM, hook), num(unix.NFTA_HOOK_PRIORITY, 5)), str(unix.NFTA_CHAIN_TYPE, typ))
	return s
}

func aRule(chain string, exprs ...attr) saying {
	return newObject(unix.NFT_MSG_NEWRULE, str(unix.NFTA_RULE_CHAIN, chain), in(unix.NFTA_RULE_EXPRESSIONS, exprs...)).with(unix.NLM_F_APPEND)
}

func expr(name string, as ...attr) attr {
	return in(unix.NFTA_LIST_ELEM, str(unix.NFTA_EXPR_NAME, name), in(unix.NFTA_EXPR_DATA, as...))
}

func jump(chain string) attr {
	return expr("immediate", num(unix.NFTA_IMMEDIATE_DREG, 0), to(unix.NFTA_IMMEDIATE_DATA, unix.NFT_JUMP, chain))
}

func put(reg uint32, v ...byte) attr {
	return expr("immediate", num(unix.NFTA_IMMEDIATE_DREG, reg), val(unix.NFTA_IMMEDIATE_DATA, v...))
}

func find(set string, sreg uint32, more ...attr) attr {
	return expr("lookup", append([]attr{str(unix.NFTA_LOOKUP_SET, set), num(unix.NFTA_LOOKUP_SREG, sreg)}, more...)...)
}

func aSet(name string, flags, keyLen uint32, more ...attr) saying {
	return newObject(unix.NFT_MSG_NEWSET, append([]attr{str(unix.NFTA_SET_NAME, name), num(unix.NFTA_SET_FLAGS, flags), num(unix.NFTA_SET_KEY_TYPE, 7),
		num(unix.NFTA_SET_KEY_LEN, keyLen), num(unix.NFTA_SET_ID, 1)}, more...)...)
}

func aMap(name string, flags, keyLen, dataLen uint32, more ...attr) saying {
	return aSet(name, flags|unix.NFT_SET_MAP, keyLen, append(more, num(unix.NFTA_SET_DATA_TYPE, 7), num(unix.NFTA_SET_DATA_LEN, dataLen))...)
}

func aVmap(name string) saying {
	return aSet(name, unix.NFT_SET_MAP, 4, num(unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT))
}

func twoFields() []attr {
	field := in(unix.NFTA_LIST_ELEM, num(1, 4))
	return []attr{in(unix.NFTA_SET_DESC, in(setDescConcat, field, field))}
}

func elems(kind uint8, set string, es ...attr) saying {
	return newObject(kind, str(unix.NFTA_SET_ELEM_LIST_SET, set), in(unix.NFTA_SET_ELEM_LIST_ELEMENTS, es...))
}

func add(set string, es ...attr) saying { return elems(unix.NFT_MSG_NEWSETELEM, set, es...) }
func del(set string, es ...attr) saying { return elems(unix.NFT_MSG_DELSETELEM, set, es...) }

func elem(as ...attr) attr    { return in(unix.NFTA_LIST_ELEM, as...) }
func key(v ...byte) attr      { return val(unix.NFTA_SET_ELEM_KEY, v...) }
func keyTo(v ...byte) attr    { return val(elemKeyEnd, v...) }
func value(v ...byte) attr    { return val(unix.NFTA_SET_ELEM_DATA, v...) }
func leads(chain string) attr { return to(unix.NFTA_SET_ELEM_DATA, unix.NFT_GOTO, chain) }
func counterObject(n string) saying {
	return newObject(unix.NFT_MSG_NEWOBJ, str(unix.NFTA_OBJ_NAME, n), num(unix.NFTA_OBJ_TYPE, 1), in(unix.NFTA_OBJ_DATA))
}

func gone(kind uint8, nameAttr uint16, name string, more ...attr) saying {
	s := newObject(kind, append([]attr{str(nameAttr, name)}, more...)...)
	s.flags = 0
	return s
}

func dynset(set string, op uint32, more ...attr) attr {
	return expr("dynset", append([]attr{str(unix.NFTA_DYNSET_SET_NAME, set), num(unix.NFTA_DYNSET_OP, op), num(unix.NFTA_DYNSET_SREG_KEY, 1)}, more...)...)
}

// batches are transactions, with what both must say to the last one.
var batches = map[string]struct {
	want string
	txs  [][]saying
}{
	"table twice":            {"yes", [][]saying{{table(), table()}}},
	"table twice, exclusive": {"1: file exists", [][]saying{{table(), table().with(unix.NLM_F_EXCL)}}},
	"chain of no table":      {"0: no such file or directory", [][]saying{{aChain("c")}}},
	"all or nothing":         {"2: no such file or directory", [][]saying{{table(), aChain("c"), aRule("d")}}},
	"base chain is another":  {"2: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aBase("b", "nat", 3)}}},
	"nat in forward":         {"1: operation not supported", [][]saying{{table(), aBase("b", "nat", 2)}}},
	"rule to no chain":       {"2: no such file or directory", [][]saying{{table(), aChain("c"), aRule("c", jump("d"))}}},
	"rule to a base chain":   {"3: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aChain("c"), aRule("c", jump("b"))}}},
	"chain in use":           {"0: device or resource busy", [][]saying{{table(), aChain("c"), aChain("d"), aRule("c", jump("d"))}, {gone(unix.NFT_MSG_DELCHAIN, 3, "d")}}},
	"chain with rules goes":  {"yes", [][]saying{{table(), aChain("c"), aRule("c", put(1, 1))}, {gone(unix.NFT_MSG_DELCHAIN, 3, "c")}}},
	"chain with rules stays": {"0: device or resource busy", [][]saying{{table(), aChain("c"), aRule("c", put(1, 1))}, {gone(unix.NFT_MSG_DELCHAIN, 3, "c").with(flagNonRecursive)}}},
	"chain of an element":    {"0: device or resource busy", [][]saying{{table(), aChain("c"), aVmap("m"), add("m", elem(key(1, 2, 3, 4), leads("c")))}, {gone(unix.NFT_MSG_DELCHAIN, 3, "c")}}},
	"element goes, chain too": {"yes", [][]saying{{table(), aChain("c"), aVmap("m"), add("m", elem(key(1, 2, 3, 4), leads("c")))},
		{del("m", elem(key(1, 2, 3, 4))), gone(unix.NFT_MSG_DELCHAIN, 3, "c")}}},
	"element to no chain": {"2: no such file or directory", [][]saying{{table(), aVmap("m"), add("m", elem(key(1, 2, 3, 4), leads("c")))}}},

	"set in use":            {"0: device or resource busy", [][]saying{{table(), aChain("c"), aSet("s", 0, 4), aRule("c", put(1, 1, 2, 3, 4), find("s", 1))}, {gone(unix.NFT_MSG_DELSET, 2, "s")}}},
	"set twice":             {"yes", [][]saying{{table(), aSet("s", 0, 4), aSet("s", 0, 4)}}},
	"set is another":        {"2: file exists", [][]saying{{table(), aSet("s", 0, 4), aSet("s", 0, 8)}}},
	"set too wide":          {"1: invalid argument", [][]saying{{table(), aSet("s", 0, 65)}}},
	"map of nothing":        {"1: invalid argument", [][]saying{{table(), aSet("s", unix.NFT_SET_MAP, 4)}}},
	"values in a set":       {"2: invalid argument", [][]saying{{table(), aSet("s", 0, 4), add("s", elem(key(1, 2, 3, 4), value(1)))}}},
	"map without values":    {"2: invalid argument", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4)))}}},
	"key too short":         {"2: invalid argument", [][]saying{{table(), aSet("s", 0, 4), add("s", elem(key(1, 2, 3)))}}},
	"value too long":        {"2: invalid argument", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4, 5)))}}},
	"same element again":    {"yes", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4)))}, {add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4)))}}},
	"same, exclusive":       {"0: file exists", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4)))}, {add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4))).with(unix.NLM_F_EXCL)}}},
	"other value":           {"0: file exists", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4)))}, {add("m", elem(key(1, 2, 3, 4), value(5, 2, 3, 4)))}}},
	"other value after all": {"yes", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(key(1, 2, 3, 4), value(1, 2, 3, 4)))}, {del("m", elem(key(1, 2, 3, 4))), add("m", elem(key(1, 2, 3, 4), value(5, 2, 3, 4)))}}},
	"element missing":       {"2: no such file or directory", [][]saying{{table(), aSet("s", 0, 4), del("s", elem(key(1, 2, 3, 4)))}}},
	"flush":                 {"yes", [][]saying{{table(), aSet("s", 0, 4), add("s", elem(key(1, 2, 3, 4)))}, {gone(unix.NFT_MSG_DELSETELEM, 2, "s")}}},
	"full":                  {"2: too many open files in system", [][]saying{{table(), aSet("s", 0, 4, in(unix.NFTA_SET_DESC, num(1, 1))), add("s", elem(key(1, 2, 3, 4)), elem(key(2, 2, 3, 4)))}}},

	"ranges": {"yes", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|flagConcat, 8, twoFields()...),
		add("s", elem(key(1, 0, 0, 0, 2, 0, 0, 0), keyTo(1, 0, 0, 0, 2, 9, 0, 0)), elem(key(2, 0, 0, 0, 2, 0, 0, 0), keyTo(2, 0, 0, 0, 2, 9, 0, 0)))}}},
	"range twice": {"yes", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|flagConcat, 8, twoFields()...),
		add("s", elem(key(1, 0, 0, 0, 2, 0, 0, 0), keyTo(1, 0, 0, 0, 2, 9, 0, 0)))}, {add("s", elem(key(1, 0, 0, 0, 2, 0, 0, 0), keyTo(1, 0, 0, 0, 2, 9, 0, 0)))}}},
	"range in a range": {"2: file exists", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|flagConcat, 8, twoFields()...),
		add("s", elem(key(1, 0, 0, 0, 2, 0, 0, 0), keyTo(1, 0, 0, 0, 2, 9, 0, 0)), elem(key(1, 0, 0, 0, 2, 1, 0, 0), keyTo(1, 0, 0, 0, 2, 2, 0, 0)))}}},
	"range backwards": {"2: invalid argument", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|flagConcat, 8, twoFields()...),
		add("s", elem(key(1, 0, 0, 0, 2, 9, 0, 0), keyTo(1, 0, 0, 0, 2, 0, 0, 0)))}}},
	"range without end": {"yes", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|flagConcat, 8, twoFields()...), add("s", elem(key(1, 0, 0, 0, 2, 9, 0, 0)))}}},
	"end without range": {"2: invalid argument", [][]saying{{table(), aSet("s", 0, 4), add("s", elem(key(1, 0, 0, 0), keyTo(2, 0, 0, 0)))}}},
	"concat, one field": {"1: invalid argument", [][]saying{{table(), aSet("s", flagConcat, 8)}}},
	"fields, no concat": {"1: invalid argument", [][]saying{{table(), aSet("s", 0, 8, twoFields()...)}}},
	"catch all":         {"yes", [][]saying{{table(), aMap("m", 0, 4, 4), add("m", elem(num(unix.NFTA_SET_ELEM_FLAGS, elemCatchall), value(1, 2, 3, 4)))}}},
	"starts and ends":   {"yes", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL, 4), add("s", elem(key(1, 0, 0, 0)), elem(key(2, 0, 0, 0), num(unix.NFTA_SET_ELEM_FLAGS, 1)))}}},

	"register that holds nothing":    {"3: no data available", [][]saying{{table(), aChain("c"), aSet("s", 0, 4), aRule("c", find("s", 1))}}},
	"register that holds too little": {"3: no data available", [][]saying{{table(), aChain("c"), aSet("s", 0, 8), aRule("c", put(1, 1, 2, 3, 4), find("s", 1))}}},
	"registers in a row":             {"yes", [][]saying{{table(), aChain("c"), aSet("s", 0, 8), aRule("c", put(8, 1, 2, 3, 4), put(9, 1, 2, 3, 4), find("s", 8))}}},
	"register beyond":                {"2: numerical result out of range", [][]saying{{table(), aChain("c"), aRule("c", put(23, 1, 2, 3, 4, 5))}}},
	"no such set":                    {"2: no such file or directory", [][]saying{{table(), aChain("c"), aRule("c", put(1, 1, 2, 3, 4), find("s", 1))}}},
	"map of a set":                   {"3: invalid argument", [][]saying{{table(), aChain("c"), aSet("s", 0, 4), aRule("c", put(1, 1, 2, 3, 4), find("s", 1, num(unix.NFTA_LOOKUP_DREG, 1)))}}},
	"map as a set":                   {"3: invalid argument", [][]saying{{table(), aChain("c"), aMap("s", 0, 4, 4), aRule("c", put(1, 1, 2, 3, 4), find("s", 1))}}},
	"verdict into a register":        {"3: invalid argument", [][]saying{{table(), aChain("c"), aVmap("s"), aRule("c", put(1, 1, 2, 3, 4), find("s", 1, num(unix.NFTA_LOOKUP_DREG, 1)))}}},

	"packets add":                {"yes", [][]saying{{table(), aChain("c"), aSet("s", unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, 4), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 0))}}},
	"packets update":             {"yes", [][]saying{{table(), aChain("c"), aMap("s", unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, 4, 4), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 1, num(unix.NFTA_DYNSET_SREG_DATA, 1)))}}},
	"packets delete":             {"yes", [][]saying{{table(), aChain("c"), aMap("s", unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, 4, 4), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 2, num(unix.NFTA_DYNSET_SREG_DATA, 1)))}}},
	"packets delete, no value":   {"3: invalid argument", [][]saying{{table(), aChain("c"), aMap("s", unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL, 4, 4), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 2))}}},
	"packets update, no clock":   {"3: operation not supported", [][]saying{{table(), aChain("c"), aSet("s", unix.NFT_SET_EVAL, 4), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 1))}}},
	"packets add to a fixed set": {"3: operation not supported", [][]saying{{table(), aChain("c"), aSet("s", 0, 4, in(unix.NFTA_SET_DESC, num(1, 100))), aRule("c", put(1, 1, 2, 3, 4), dynset("s", 0))}}},
	"intervals of packets":       {"1: operation not supported", [][]saying{{table(), aSet("s", unix.NFT_SET_INTERVAL|unix.NFT_SET_EVAL, 4)}}},

	"masquerade in postrouting":     {"yes", [][]saying{{table(), aBase("b", "nat", 4), aRule("b", expr("masq"))}}},
	"masquerade in prerouting":      {"2: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aRule("b", expr("masq"))}}},
	"masquerade led to":             {"4: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aChain("c"), aRule("c", expr("masq")), aRule("b", jump("c"))}}},
	"masquerade led to by elements": {"6: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aChain("c"), aRule("c", expr("masq")), aVmap("m"), aRule("b", put(1, 1, 2, 3, 4), find("m", 1, num(unix.NFTA_LOOKUP_DREG, 0))), add("m", elem(key(1, 2, 3, 4), leads("c")))}}},
	"a loop":                        {"6: too many links", [][]saying{{table(), aBase("b", "nat", 0), aChain("c"), aChain("d"), aRule("b", jump("c")), aRule("c", jump("d")), aRule("d", jump("c"))}}},
	"no loop":                       {"yes", [][]saying{{table(), aChain("c"), aRule("c", put(1, 1))}}},
	"icmpx":                         {"yes", [][]saying{{table(), aBase("b", "filter", 1), aRule("b", expr("reject", num(1, 2), raw(2, 1)))}}},
	"reject in postrouting":         {"2: operation not supported", [][]saying{{table(), aBase("b", "filter", 4), aRule("b", expr("reject", num(1, 0), raw(2, 3)))}}},
	"counter":                       {"yes", [][]saying{{table(), counterObject("n"), counterObject("n"), aChain("c"), aRule("c", expr("objref", num(1, 1), str(2, "n")))}}},
	"counter in use":                {"0: device or resource busy", [][]saying{{table(), counterObject("n"), aChain("c"), aRule("c", expr("objref", num(1, 1), str(2, "n")))}, {gone(unix.NFT_MSG_DELOBJ, 2, "n", num(3, 1))}}},
	"no counter":                    {"2: no such file or directory", [][]saying{{table(), aChain("c"), aRule("c", expr("objref", num(1, 1), str(2, "n")))}}},
	"rules go by chain":             {"yes", [][]saying{{table(), aChain("c"), aRule("c", put(1, 1)), aRule("c", put(1, 2))}, {gone(unix.NFT_MSG_DELRULE, 2, "c")}}},
	"rules of no chain":             {"1: no such file or directory", [][]saying{{table(), gone(unix.NFT_MSG_DELRULE, 2, "c")}}},
	"table of all":                  {"yes", [][]saying{{table(), aChain("c"), aVmap("m"), add("m", elem(key(1, 2, 3, 4), leads("c")))}, {gone(unix.NFT_MSG_DELTABLE, 1, "t")}}},
	"no table":                      {"0: no such file or directory", [][]saying{{gone(unix.NFT_MSG_DELTABLE, 1, "t")}}},

	"every expression": {"yes", [][]saying{{table(), aBase("b", "nat", 0), aRule("b",
		expr("payload", num(1, 8), num(2, 1), num(3, 12), num(4, 4)), expr("payload", num(1, 9), num(2, 2), num(3, 2), num(4, 2)),
		expr("meta", num(2, unix.NFT_META_MARK), num(1, 10)), expr("meta", num(2, unix.NFT_META_L4PROTO), num(1, 11)), expr("meta", num(2, unix.NFT_META_MARK), num(3, 10)),
		expr("meta", num(2, unix.NFT_META_IIFNAME), num(1, 3)), expr("meta", num(2, unix.NFT_META_PROTOCOL), num(1, 11)), expr("meta", num(2, unix.NFT_META_NFPROTO), num(1, 11)),
		expr("ct", num(1, 12), num(2, unix.NFT_CT_STATE)), expr("ct", num(1, 12), num(2, unix.NFT_CT_DIRECTION)), expr("ct", num(1, 12), num(2, unix.NFT_CT_STATUS)),
		expr("ct", num(1, 12), num(2, unix.NFT_CT_SRC), raw(3, 0)), expr("ct", num(1, 12), num(2, unix.NFT_CT_PROTO_DST), raw(3, 1)), expr("ct", num(1, 12), num(2, unix.NFT_CT_DST_IP), raw(3, 0)),
		expr("cmp", num(1, 8), num(2, 0), val(3, 1, 2, 3, 4)), expr("cmp", num(1, 8), num(2, 5), val(3, 1)), expr("cmp", num(1, 3), num(2, 1), val(3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
		expr("range", num(1, 8), num(2, 1), val(3, 1, 2, 3, 4), val(4, 1, 3, 3, 4)),
		expr("bitwise", num(1, 8), num(2, 12), num(3, 4), val(4, 255, 255, 0, 0), val(5, 0, 0, 1, 0)), expr("bitwise", num(1, 8), num(2, 12), num(3, 4), num(6, 1), val(7, 4, 0, 0, 0)),
		expr("bitwise", num(1, 3), num(2, 4), num(3, 16), val(4, 255, 255, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4), val(5, 255, 255, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4)),
		expr("byteorder", num(1, 8), num(2, 12), num(3, 1), num(4, 4), num(5, 4)),
		expr("numgen", num(1, 13), num(2, 7), num(3, 1), num(4, 2)), expr("numgen", num(1, 13), num(2, 7), num(3, 0)),
		expr("fib", num(1, 14), num(2, unix.NFT_FIB_RESULT_ADDRTYPE), num(3, unix.NFTA_FIB_F_DADDR)),
		expr("counter"),
		expr("nat", num(1, 1), num(2, 2), num(3, 8), num(5, 9)))}}},
	"every way out": {"yes", [][]saying{{table(), aBase("b", "nat", 4), aBase("f", "filter", 1), aRule("b", expr("masq", num(1, 16))), aRule("f", expr("reject", num(1, 1), raw(2, 0))),
		aRule("f", expr("reject", num(1, 0), raw(2, 3))), aRule("f", expr("immediate", num(1, 0), to(2, verdictDropCode, "")))}}},
	"dnat in postrouting":           {"2: operation not supported", [][]saying{{table(), aBase("b", "nat", 4), aRule("b", put(8, 1, 2, 3, 4), expr("nat", num(1, 1), num(2, 2), num(3, 8)))}}},
	"dnat of nothing":               {"2: no data available", [][]saying{{table(), aBase("b", "nat", 0), aRule("b", expr("nat", num(1, 1), num(2, 2), num(3, 8)))}}},
	"dnat of the wrong family":      {"2: operation not supported", [][]saying{{table(), aBase("b", "nat", 0), aRule("b", put(8, 1, 2, 3, 4), expr("nat", num(1, 1), num(2, 10), num(3, 8)))}}},
	"random of nothing":             {"2: numerical result out of range", [][]saying{{table(), aBase("b", "nat", 0), aRule("b", expr("numgen", num(1, 13), num(2, 0), num(3, 1)))}}},
	"set of a long name":            {"1: numerical result out of range", [][]saying{{table(), aSet(strings.Repeat("x", 256), 0, 4)}}},
	"element's comment is too long": {"2: numerical result out of range", [][]saying{{table(), aSet("s", 0, 4), add("s", elem(key(1, 2, 3, 4), raw(unix.NFTA_SET_ELEM_USERDATA, make([]byte, 257)...)))}}},
}

// stricter are what the fake refuses and newer kernels do not.
var stricter = []string{"map as a set", "packets update, no clock"}

// TestFakeRefuses asks the fake and the kernel for what must be refused, and what just must not be.
func TestFakeRefuses(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(batches)) {
		t.Run(name, func(t *testing.T) {
			inKernel(t, func(w *twin) {
				var last error
				for _, tx := range batches[name].txs {
					var b kernel.NFBatch
					b.Reset()
					for _, m := range tx {
						b.Add(m.kind, m.flags, unix.NFPROTO_IPV4, func(b []byte) []byte {
							for _, a := range m.attrs {
								b = a(b)
							}
							return b
						})
					}
					last = w.Commit(&b)
				}
				if got, want := verdictOn(last), batches[name].want; got != want {
					t.Errorf("%s, should be %s", got, want)
				}
				if slices.Contains(stricter, name) || !modelled() {
					return
				}
				w.all()
				for _, d := range w.differ {
					t.Error(d)
				}
			})
		})
	}
}

// modelled tells whether the kernel here is as new as the one that the fake refuses like: older ones take more, or refuse it with
// another number.
func modelled() bool {
	var major, minor int
	_, err := fmt.Sscanf(kernel.Release(), "%d.%d", &major, &minor)
	return err == nil && (major > 6 || major == 6 && minor >= 18)
}

// all lists everything there is.
func (w *twin) all() {
	each := func(kernel.NFMessage) error { return nil }
	for _, kind := range []uint16{unix.NFT_MSG_GETTABLE, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_GETRULE, unix.NFT_MSG_GETSET, unix.NFT_MSG_GETOBJ} {
		_ = w.Dump(nftType(kind), unix.NFPROTO_IPV4, nil, each)
		_ = w.Dump(nftType(kind), unix.NFPROTO_IPV4, kernel.AppendAttrString(nil, 1, "other"), each)
	}
	for _, t := range w.fake.tables {
		for _, s := range t.sets {
			ask := kernel.AppendAttrString(kernel.AppendAttrString(nil, 1, t.name), 2, s.name)
			_ = w.Dump(nftType(unix.NFT_MSG_GETSETELEM), t.family, ask, each)
			_, _ = w.Get(nftType(unix.NFT_MSG_GETSET), t.family, ask)
		}
	}
}
