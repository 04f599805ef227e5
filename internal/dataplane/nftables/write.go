package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// writer makes transactions. Elements are gathered by set; within a transaction all that leave a set do so before others
// come.
type writer struct {
	conn  conn
	name  string // of the table
	tx    kernel.NFBatch
	what  []string // of each message of tx, for errors
	lists [2][setsCount]struct{ gone, come []byte }
	size  int // of the lists
}

// messageMost keeps a list of elements, which is one attribute, below its limit of 64 KiB.
const messageMost = 32 << 10

// txMost is the size at which a large load goes to the kernel in a transaction of its own, so that neither we nor the kernel
// hold all of it twice. Tests make it small.
var txMost = 160 << 10

func (d *Dataplane) writer() *writer { return newWriter(d.conn, d.cfg.table()) }

func newWriter(c conn, table string) *writer {
	w := &writer{conn: c, name: table}
	w.tx.Reset()
	return w
}

func (w *writer) add(what string, kind uint8, flags uint16, v6 bool, attrs func([]byte) []byte) {
	w.tx.Add(kind, flags, family(v6), attrs)
	w.what = append(w.what, what)
}

// element is one to come into a set, or to go.
type element struct {
	key, end []byte // end of an interval, inclusive
	value    []byte
	verdict  *verdict
	comment  string
	anything bool // there is no key: it stands for all that the set has no other element for
}

// verdict is what a verdict map holds.
type verdict struct {
	code  int32
	chain string
}

// put adds an element to a set; drop takes one out.
func (w *writer) put(s setID, v6 bool, e element) {
	l := &w.lists[b2i(v6)][s]
	before := len(l.come)
	l.come = appendElement(l.come, e)
	w.grown(s, v6, len(l.come)-before)
}

func (w *writer) drop(s setID, v6 bool, key, end []byte) {
	l := &w.lists[b2i(v6)][s]
	before := len(l.gone)
	l.gone = appendElement(l.gone, element{key: key, end: end})
	w.grown(s, v6, len(l.gone)-before)
}

// dropAnything takes out the element that stands for all keys.
func (w *writer) dropAnything(s setID, v6 bool) {
	l := &w.lists[b2i(v6)][s]
	before := len(l.gone)
	l.gone = appendElement(l.gone, element{anything: true})
	w.grown(s, v6, len(l.gone)-before)
}

func (w *writer) grown(s setID, v6 bool, by int) {
	w.size += by
	if l := &w.lists[b2i(v6)][s]; len(l.gone) > messageMost || len(l.come) > messageMost {
		w.list(s, v6)
	}
}

// list makes messages of a set's elements.
func (w *writer) list(s setID, v6 bool) {
	l := &w.lists[b2i(v6)][s]
	message := func(what string, kind uint8, flags uint16, elements []byte) {
		if len(elements) == 0 {
			return
		}
		w.add(what+" elements of "+s.String(), kind, flags, v6, func(b []byte) []byte {
			b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_TABLE, w.name)
			b = kernel.AppendAttrString(b, unix.NFTA_SET_ELEM_LIST_SET, s.String())
			b, at := kernel.BeginNest(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
			return kernel.EndNest(append(b, elements...), at)
		})
	}
	message("delete", unix.NFT_MSG_DELSETELEM, 0, l.gone)
	message("add", unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, l.come)
	w.size -= len(l.gone) + len(l.come)
	l.gone, l.come = l.gone[:0], l.come[:0]
}

func appendElement(b []byte, e element) []byte {
	b, at := kernel.BeginNest(b, unix.NFTA_LIST_ELEM)
	if e.anything {
		return kernel.EndNest(kernel.AppendAttrU32(b, unix.NFTA_SET_ELEM_FLAGS, elemCatchall), at)
	}
	b = appendValue(b, unix.NFTA_SET_ELEM_KEY, e.key)
	if e.end != nil {
		b = appendValue(b, attrElemKeyEnd, e.end)
	}
	switch {
	case e.verdict != nil:
		var data int
		b, data = kernel.BeginNest(b, unix.NFTA_SET_ELEM_DATA)
		b = kernel.EndNest(appendVerdict(b, e.verdict.code, e.verdict.chain), data)
	case e.value != nil:
		b = appendValue(b, unix.NFTA_SET_ELEM_DATA, e.value)
	}
	if e.comment != "" {
		b = kernel.AppendAttr(b, attrElemUserdata, appendUdata(nil, udataComment, append([]byte(e.comment), 0)))
	}
	return kernel.EndNest(b, at)
}

// lay makes messages of all elements that wait.
func (w *writer) lay() {
	for i := range w.lists {
		for s := range setsCount {
			w.list(s, i == 1)
		}
	}
}

// commit makes it all true.
func (w *writer) commit() error {
	w.lay()
	err := w.conn.Commit(&w.tx)
	var refused *kernel.BatchError
	if errors.As(err, &refused) && refused.Index >= 0 && refused.Index < len(w.what) {
		err = fmt.Errorf("%s: %w", w.what[refused.Index], err)
	}
	w.tx.Reset()
	w.what = w.what[:0]
	return err
}

// commitIfLarge commits a part of a large load when it is time to, and tells whether it was.
func (w *writer) commitIfLarge(ctx context.Context) (bool, error) {
	if w.tx.Size()+w.size <= txMost {
		return false, nil
	}
	if err := ctx.Err(); err != nil {
		return false, err
	}
	return true, w.commit()
}

// Tables, sets, chains.

func (w *writer) table(v6 bool) {
	w.add("make table "+w.name, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, v6, func(b []byte) []byte {
		b = kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, w.name)
		u := appendUdata(nil, udataComment, []byte("Services of Kubernetes, by fairlead\x00"))
		return kernel.AppendAttr(b, attrTableUserdata, appendUdata(u, udataOurs, binary.BigEndian.AppendUint32(nil, layout)))
	})
}

func (w *writer) deleteTable(v6 bool) {
	w.add("delete table "+w.name, unix.NFT_MSG_DELTABLE, 0, v6, func(b []byte) []byte {
		return kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, w.name)
	})
}

func (w *writer) set(s setID, v6 bool) {
	w.add("make set "+s.String(), unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, v6, func(b []byte) []byte { return appendSet(b, w.name, s, v6) })
}

func (w *writer) counter(name string, v6 bool) {
	w.add("make counter "+name, unix.NFT_MSG_NEWOBJ, unix.NLM_F_CREATE, v6, func(b []byte) []byte {
		b = appendObject(b, w.name, name)
		b, at := kernel.BeginNest(b, unix.NFTA_OBJ_DATA)
		return kernel.EndNest(b, at)
	})
}

func appendObject(b []byte, table, name string) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_OBJ_TABLE, table)
	b = kernel.AppendAttrString(b, unix.NFTA_OBJ_NAME, name)
	return kernel.AppendAttrU32(b, unix.NFTA_OBJ_TYPE, unix.NFT_OBJECT_COUNTER)
}

func (w *writer) chain(name string, h *hook, v6 bool) {
	w.add("make chain "+name, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, v6, func(b []byte) []byte {
		b = appendChain(b, w.name, name)
		if h == nil {
			return b
		}
		b, at := kernel.BeginNest(b, unix.NFTA_CHAIN_HOOK)
		b = kernel.AppendAttrU32(b, unix.NFTA_HOOK_HOOKNUM, h.num)
		b = kernel.AppendAttrU32(b, unix.NFTA_HOOK_PRIORITY, uint32(h.priority))
		b = kernel.EndNest(b, at)
		b = kernel.AppendAttrU32(b, unix.NFTA_CHAIN_POLICY, verdictAccept)
		return kernel.AppendAttrString(b, unix.NFTA_CHAIN_TYPE, h.typ)
	})
}

// fill replaces the rules of a chain.
func (w *writer) fill(c chain, v6 bool) {
	w.empty(c.name, v6)
	for _, r := range c.rules {
		w.add("add a rule to chain "+c.name, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, v6, func(b []byte) []byte {
			b = appendRuleChain(b, w.name, c.name)
			b, at := kernel.BeginNest(b, unix.NFTA_RULE_EXPRESSIONS)
			b = kernel.EndNest(append(b, r.b...), at)
			return kernel.AppendAttr(b, attrRuleUserdata, r.userdata())
		})
	}
}

func (w *writer) empty(name string, v6 bool) {
	w.add("empty chain "+name, unix.NFT_MSG_DELRULE, 0, v6, func(b []byte) []byte { return appendRuleChain(b, w.name, name) })
}

func (w *writer) deleteChain(name string, v6 bool) {
	w.add("delete chain "+name, unix.NFT_MSG_DELCHAIN, 0, v6, func(b []byte) []byte { return appendChain(b, w.name, name) })
}

func appendChain(b []byte, table, name string) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_CHAIN_TABLE, table)
	return kernel.AppendAttrString(b, unix.NFTA_CHAIN_NAME, name)
}

func appendRuleChain(b []byte, table, name string) []byte {
	b = kernel.AppendAttrString(b, unix.NFTA_RULE_TABLE, table)
	return kernel.AppendAttrString(b, unix.NFTA_RULE_CHAIN, name)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
