package iptables

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/model"
)

// A tree finds the rules for a packet's destination in a few steps, however many Services there are. iptables has no
// look-up by address other than trying one rule after the other, so the tree is made of chains: each looks at the next
// hexadecimal digit of the address (then of protocol and port) in which its entries differ, and the last ones hold the
// rules themselves.
//
// Nothing of its shape is stored: it follows from the sorted entries, so after a restart the same Services give the same
// chains. One change touches the chains between the root and one leaf.
type tree struct {
	root    string // name of the chain at the root
	prefix  string // of the names of the other chains
	table   Table
	v6      bool
	ports   bool              // entries are protocol and port, without an address
	rules   func(path) []Rule // the rules of one entry
	tail    func() []Rule     // rules after all others, in the root
	entries []path            // sorted by byPath
	dirty   map[path]bool     // parts whose chain may have changed
}

const (
	// flatMost is how many entries stand in one list, as in kube-proxy, before the root splits. A rule that does not match
	// costs the packet that opens a connection about 10 ns (bench/README.md): the longest list costs it about as much as the
	// way through the tree, and a small cluster looks as its operator knows it.
	flatMost = 48
	// leafMost is the same below the root.
	leafMost = 16
)

// path is the place of an entry: the hexadecimal digits of the address, one for the protocol, four for the port. Port
// trees have no address; the entry for a whole address has no protocol and port.
type path string

const hexDigits = "0123456789abcdef"

var protoDigits = map[model.Proto]byte{model.TCP: '1', model.UDP: '2', model.SCTP: '3'}

func addrPath(a netip.Addr) path {
	b := make([]byte, 0, 40)
	for _, x := range a.AsSlice() {
		b = append(b, hexDigits[x>>4], hexDigits[x&15])
	}
	return path(b)
}

func keyPath(k model.Key) path {
	port := fmt.Sprintf("%c%04x", protoDigits[k.Proto], k.Port)
	if k.NodePort() {
		return path(port)
	}
	return addrPath(k.IP) + path(port)
}

// part is one chain of the tree: all entries below at, which share split. It is a list of rules when they are few,
// otherwise a branch with a part for each digit that follows split.
type part struct {
	at      path // what the chain's name says
	split   path
	entries []path
	list    bool
	top     bool
}

func (t *tree) top() part { return newPart("", t.entries, flatMost, true) }

func newPart(slot path, entries []path, most int, top bool) part {
	p := part{at: slot, entries: entries, list: len(entries) <= most, top: top}
	if !p.list {
		if p.split = common(entries[0], entries[len(entries)-1]); !top {
			p.at = p.split
		}
	}
	return p
}

// parts yields what a branch is made of, in order. An entry that ends at the branch itself comes last, as a list of its own.
func (p part) parts() iter.Seq[part] {
	return func(yield func(part) bool) {
		for rest := p.entries; len(rest) > 0; {
			end := len(rest)
			slot := p.split
			if len(rest[0]) > len(p.split) {
				slot = rest[0][:len(p.split)+1]
				end, _ = slices.BinarySearchFunc(rest, slot, func(e, slot path) int {
					if len(e) > len(p.split) && e[:len(slot)] <= slot {
						return -1
					}
					return 1
				})
			}
			if !yield(newPart(slot, rest[:end], leafMost, false)) {
				return
			}
			rest = rest[end:]
		}
	}
}

// inline tells whether the part is so small that it has no chain: its rules stand in the part above.
func (p part) inline() bool { return !p.top && len(p.entries) == 1 }

// toward is the part below p in which q lies.
func (p part) toward(q path) (part, bool) {
	if p.list {
		return part{}, false
	}
	for k := range p.parts() {
		if strings.HasPrefix(string(q), string(k.at)) {
			return k, true
		}
	}
	return part{}, false
}

// put adds an entry, or says that its rules may have changed. Its cost is that of the depth of the tree, and of moving a
// slice's tail.
func (t *tree) put(p path) {
	if i, found := slices.BinarySearchFunc(t.entries, p, byPath); !found {
		t.mark(p)
		t.entries = slices.Insert(t.entries, i, p)
	}
	t.mark(p)
}

// putAll adds many entries at the cost of one sort.
func (t *tree) putAll(ps []path) {
	if len(ps) < 64 {
		for _, p := range ps {
			t.put(p)
		}
		return
	}
	t.markBelow(t.top())
	t.entries = append(t.entries, ps...)
	slices.SortFunc(t.entries, byPath)
	t.entries = slices.Compact(t.entries)
	t.markBelow(t.top())
}

// remove takes an entry out, if it is there.
func (t *tree) remove(p path) {
	if i, found := slices.BinarySearchFunc(t.entries, p, byPath); found {
		t.mark(p)
		t.entries = slices.Delete(t.entries, i, i+1)
		t.mark(p)
	}
}

// mark notes the chains that one entry's coming or going may change: those on its way from the root, all below a part
// that is about to become a list or has just ceased to be one, and the parts of the root, which may take their place.
func (t *tree) mark(p path) {
	for q, ok := t.top(), true; ok; q, ok = q.toward(p) {
		t.dirty[q.at] = true
		if q.top && !q.list {
			for k := range q.parts() {
				t.dirty[k.at] = true
			}
		}
		most := leafMost
		if q.top {
			most = flatMost
		}
		if n := len(q.entries); !q.list && n == most+1 {
			t.markBelow(q)
		}
	}
}

func (t *tree) markBelow(p part) {
	t.dirty[p.at] = true
	if p.list {
		return
	}
	for q := range p.parts() {
		t.markBelow(q)
	}
}

// chain is the rules of the chain called at; ok is false if there is none (any more).
func (t *tree) chain(at path) (rules []Rule, ok bool) {
	for p, found := t.top(), true; found; p, found = p.toward(at) {
		if p.at == at && !p.inline() {
			return t.render(p), true
		}
		if len(p.at) >= len(at) && !p.top {
			break
		}
	}
	return nil, false
}

func (t *tree) render(p part) []Rule {
	var rules []Rule
	if p.list {
		for _, e := range p.entries {
			rules = append(rules, t.rules(e)...)
		}
	} else {
		for q := range p.parts() {
			if q.inline() {
				rules = append(rules, t.rules(q.entries[0])...)
				continue
			}
			r := t.match(q.at)
			r.Target = Target{Action: Jump, Chain: t.name(q.at)}
			rules = append(rules, r)
		}
	}
	if p.top && t.tail != nil {
		rules = append(rules, t.tail()...)
	}
	return rules
}

// match is the condition for being below at.
func (t *tree) match(at path) (r Rule) {
	digits, rest := splitPath(at, t.ports, t.v6)
	if digits != "" {
		r.Dst = digitsPrefix(digits, t.v6)
	}
	if len(rest) > 0 {
		for proto, d := range protoDigits {
			if d == rest[0] {
				r.Proto = proto
			}
		}
	}
	if len(rest) > 1 {
		r.Port, r.PortEnd = portRange(rest[1:])
	}
	return r
}

// name is the name of the chain at a place: the readable range where it fits into the 28 characters of a chain name.
func (t *tree) name(at path) string {
	if at == "" {
		return t.root
	}
	m := t.match(at)
	var s string
	if m.Dst.IsValid() {
		s = m.Dst.String()
	}
	if m.Proto != 0 {
		s = strings.TrimPrefix(s+"-"+m.Proto.String(), "-")
	}
	if m.Port != 0 || m.PortEnd != 0 {
		s += fmt.Sprintf("-%d:%d", m.Port, m.PortEnd)
	}
	if len(t.prefix)+len(s) > 28 {
		s = "IP-" + hash(s)[:12]
	}
	return t.prefix + s
}

func (t *tree) id(at path) ChainID { return ChainID{V6: t.v6, Table: t.table, Name: t.name(at)} }

// splitPath parts the digits of the address from those of protocol and port.
func splitPath(p path, ports, v6 bool) (addr, rest path) {
	n := 8
	if v6 {
		n = 32
	}
	if ports {
		n = 0
	}
	n = min(n, len(p))
	return p[:n], p[n:]
}

// pathKey is the inverse of keyPath and addrPath; whole says that the entry is for all of an address.
func pathKey(p path, ports, v6 bool) (k model.Key, whole bool) {
	addr, rest := splitPath(p, ports, v6)
	k.IP = model.Unspecified(v6)
	if addr != "" {
		k.IP = digitsPrefix(addr, v6).Addr()
	}
	if rest == "" {
		return k, true
	}
	for proto, d := range protoDigits {
		if d == rest[0] {
			k.Proto = proto
		}
	}
	k.Port, _ = portRange(rest[1:])
	return k, false
}

func digitsPrefix(digits path, v6 bool) netip.Prefix {
	var b [16]byte
	for i, d := range []byte(digits) {
		b[i/2] |= byte(strings.IndexByte(hexDigits, d)) << (4 - 4*(i%2))
	}
	if v6 {
		return netip.PrefixFrom(netip.AddrFrom16(b), 4*len(digits))
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(b[:4])), 4*len(digits))
}

func portRange(digits path) (first, last uint16) {
	for i := range 4 {
		first, last = first<<4, last<<4|15
		if i < len(digits) {
			d := uint16(strings.IndexByte(hexDigits, digits[i]))
			first, last = first|d, last&^15|d
		}
	}
	return first, last
}

// common is the beginning that two paths share.
func common(a, b path) path {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	return a[:i]
}

// byPath sorts entries; the entry of a whole address comes after those of its ports, whose rules are more particular.
func byPath(a, b path) int {
	switch short := common(a, b); {
	case a == b:
		return 0
	case short == a:
		return 1
	case short == b:
		return -1
	}
	return cmp.Compare(a, b)
}
