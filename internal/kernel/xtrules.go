package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"
)

// XTRule is a rule of a table of the old iptables, as far as it takes to notice that somebody changed it.
type XTRule struct {
	Chain []byte // that it is in
	Jump  []byte // the chain of the table that it leads to; nil is none
	Drop  bool   // its target is DROP; so is the policy's of a built-in chain, which is its last rule
	Sum   uint64 // tells rules apart within this process: all of the rule, but not its counters and not where it stands
}

// Rules reads a table, and gives a sum that differs when anything in it does but counters. If each is not nil it is given each rule in
// order; of a chain with a name of its own also its end, which is a rule, so that each such chain comes up. What a rule holds is
// valid during the call only. A table that is not loaded has no rules, and the sum 0. It needs CAP_NET_ADMIN.
//
// Nothing less tells that one rule was replaced by another of its size. Of 25,000 chains and 75,000 rules (38 MiB) the sum
// takes some 90 ms, most of it the kernel's for the copy, and the rules three times as long.
func (x *XTables) Rules(table string, each func(XTRule)) (sum uint64, err error) {
	for range 20 {
		blob, hooks, err := x.entries(table)
		if errors.Is(err, unix.EAGAIN) { // it has another size by now
			continue
		}
		if err != nil || blob == nil {
			return 0, err
		}
		b, l := blob[entriesHeader:], x.layout()
		sum, err = l.sum(b)
		if err == nil && each != nil {
			err = l.walk(b, hooks, each)
		}
		return sum, errors.Join(err, unix.Munmap(blob))
	}
	return 0, fmt.Errorf("legacy iptables: table %s changes faster than it can be read", table)
}

// entriesHeader is the length of struct ipt_get_entries without its entries: name[32], size, and room up to the next multiple of 8.
const entriesHeader = 40

// entries copies a table into memory of its own, which is given back at once after use: a table may have tens of megabytes.
func (x *XTables) entries(table string) (blob []byte, hooks [5]int, err error) {
	info, err := x.info(table)
	if err != nil || info == nil {
		return nil, hooks, err
	}
	valid := binary.NativeEndian.Uint32(info[32:])
	for h := range hooks {
		if hooks[h] = -1; valid&(1<<h) != 0 {
			hooks[h] = int(binary.NativeEndian.Uint32(info[36+4*h:]))
		}
	}
	size := binary.NativeEndian.Uint32(info[80:])
	blob, err = unix.Mmap(-1, 0, entriesHeader+int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, hooks, fmt.Errorf("legacy iptables: memory for table %s: %w", table, err)
	}
	_ = unix.Madvise(blob, unix.MADV_HUGEPAGE) // a fresh page costs more than what is copied into it
	copy(blob[:tableName-1], table)
	binary.NativeEndian.PutUint32(blob[tableName:], size)
	if err := x.getsockopt(soGetEntries, blob); err != nil {
		return nil, hooks, errors.Join(fmt.Errorf("legacy iptables: read table %s: %w", table, err), unix.Munmap(blob))
	}
	return blob, hooks, nil
}

// xtLayout is where an entry holds what. An entry is a struct ipt_entry or ip6t_entry, matches, and a target (struct xt_entry_target: size,
// name[29], revision; then its data).
type xtLayout struct {
	targetAt, nextAt   int // offsets of target_offset and next_offset
	comefrom, counters int // what changes by itself, or with others' rules
	header             int // length
}

func (x *XTables) layout() xtLayout {
	if x.v6 {
		return xtLayout{targetAt: 140, nextAt: 142, comefrom: 144, counters: 152, header: 168}
	}
	return xtLayout{targetAt: 88, nextAt: 90, comefrom: 92, counters: 96, header: 112}
}

const (
	xtTarget    = 32            // header of a target
	xtErrorSize = xtTarget + 32 // an ERROR target: the name of the chain that begins here
	xtStandard  = xtTarget + 4  // a target without a name: a verdict, or where to go on
	xtNameAt    = 2             // in the header of a target
	xtNameMost  = xtTarget - 3  // XT_EXTENSION_MAXNAMELEN
	xtError     = "ERROR"       // XT_ERROR_TARGET
)

var xtHooks = [5]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"} // linux/netfilter.h enum nf_inet_hooks

var xtSeed = maphash.MakeSeed()

// next cuts the entry off that begins at b[at], and says where its target begins.
func (l xtLayout) next(b []byte, at int) (e []byte, target int, err error) {
	if len(b)-at < l.header {
		return nil, 0, errors.New("legacy iptables: entry cut off")
	}
	target, end := int(binary.NativeEndian.Uint16(b[at+l.targetAt:])), int(binary.NativeEndian.Uint16(b[at+l.nextAt:]))
	if target < l.header || end < target+xtTarget || end > len(b)-at {
		return nil, 0, errors.New("legacy iptables: entry with impossible offsets")
	}
	return b[at : at+end], target, nil
}

// sum takes everything together, and clears what may change by itself.
func (l xtLayout) sum(b []byte) (sum uint64, err error) {
	for at := 0; at < len(b); {
		e, _, err := l.next(b, at)
		if err != nil {
			return 0, err
		}
		clear(e[l.comefrom:l.header])
		sum = bits.RotateLeft64(sum, 9)*0x9e3779b97f4a7c15 + maphash.Bytes(xtSeed, e)
		at += len(e)
	}
	return sum, nil
}

// walk gives the rules one after the other. It changes in b what the sum of a rule must not see: where the rule leads to is a
// number that moves with what stands before.
func (l xtLayout) walk(b []byte, hooks [5]int, each func(XTRule)) error {
	var chain []byte
	for at := 0; at < len(b); {
		e, target, err := l.next(b, at)
		if err != nil {
			return err
		}
		if h := slices.Index(hooks[:], at); h >= 0 {
			chain = []byte(xtHooks[h])
		}
		if name, ok := headName(e, target); ok {
			chain = name
		} else {
			r := XTRule{Chain: chain, Drop: drops(e, target)}
			if r.Jump = l.jump(b, at, target, len(e)); r.Jump != nil {
				r.Sum = maphash.Bytes(xtSeed, r.Jump)
			}
			r.Sum ^= maphash.Bytes(xtSeed, e)
			each(r)
		}
		at += len(e)
	}
	return nil
}

// headName is the name of the chain that begins with this entry, if one does.
func headName(e []byte, target int) ([]byte, bool) {
	if len(e) < target+xtErrorSize || string(untilNul(e[target+xtNameAt:][:xtNameMost])) != xtError {
		return nil, false
	}
	return untilNul(e[target+xtTarget:]), true
}

// xtDrop is -NF_DROP - 1, as verdicts are written in tables (linux/netfilter/x_tables.h).
const xtDrop = -1

func drops(e []byte, target int) bool {
	return len(e) >= target+xtStandard && e[target+xtNameAt] == 0 && int32(binary.NativeEndian.Uint32(e[target+xtTarget:])) == xtDrop
}

// jump finds the chain that an entry leads to, and clears the number that says so. Where to go on is an offset: of what follows,
// when the rule has no target, or of what follows the head of a chain.
func (l xtLayout) jump(b []byte, at, target, length int) []byte {
	e := b[at : at+length]
	if length < target+xtStandard || e[target+xtNameAt] != 0 {
		return nil
	}
	verdict := e[target+xtTarget:]
	to := int(int32(binary.NativeEndian.Uint32(verdict)))
	head := to - l.header - xtErrorSize
	if to == at+length {
		clear(verdict[:4])
	}
	if to == at+length || head < 0 || to > len(b) {
		return nil
	}
	name, ok := headName(b[head:to], l.header)
	if ok {
		clear(verdict[:4])
	}
	return name
}

func untilNul(b []byte) []byte {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		return b[:i]
	}
	return b
}
