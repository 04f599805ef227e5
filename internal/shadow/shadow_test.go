package shadow

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// TestMain runs 2,000 histories for each property unless the command line says otherwise.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("2000")
	}
	os.Exit(m.Run())
}

var errWrite = errors.New("write failed")

// kernel is a map whose writes fail when told: before they take effect, after, or half way.
type kernel struct {
	rows   map[string]string
	writes int // rows written or deleted
	fail   func() int
}

const (
	works = iota
	failsBefore
	failsAfter
	failsHalf
)

func (k *kernel) Write(puts []Row[string, value], deletes []string) error {
	how := k.fail()
	if how == failsBefore {
		return errWrite
	}
	n := len(puts) + len(deletes)
	if how == failsHalf {
		n /= 2
	}
	k.apply(puts[:min(n, len(puts))], deletes[:max(0, n-len(puts))])
	if how != works {
		return errWrite
	}
	return nil
}

func (k *kernel) apply(puts []Row[string, value], deletes []string) {
	k.writes += len(puts) + len(deletes)
	for _, p := range puts {
		if p.Val.text == "" {
			panic("a trimmed value was handed out for writing")
		}
		k.rows[p.Key] = p.Val.text
	}
	for _, d := range deletes {
		delete(k.rows, d)
	}
}

func (k *kernel) dump() map[string]value {
	m := map[string]value{}
	for key, text := range k.rows {
		m[key] = mk(text)
	}
	return m
}

// value carries a text that the table may forget once it is written.
type value struct {
	sum  int
	text string
}

func mk(text string) value {
	sum := 0
	for _, c := range text {
		sum = sum*31 + int(c)
	}
	return value{sum, text}
}

func same(a, b value) bool { return a.sum == b.sum }
func trim(v value) value   { return value{sum: v.sum} }

type table = Table[int, string, value]

func newTable() *table { return New[int, string](same, trim) }

// world is a table over a failing kernel, and what everybody wants.
type world struct {
	t       *rapid.T
	table   *table
	kernel  *kernel
	owners  map[int]map[string]string
	foreign bool
}

// set draws new rows for one owner. Keys 0-5 are the owner's alone; the shared ones have one value for all.
func (w *world) set() {
	owner := rapid.IntRange(0, 3).Draw(w.t, "owner")
	rows := map[string]string{}
	for _, i := range rapid.SliceOfN(rapid.IntRange(0, 9), 0, 5).Draw(w.t, "keys") {
		if i > 5 {
			rows[fmt.Sprintf("shared-%d", i)] = "same for all"
			continue
		}
		rows[fmt.Sprintf("%d-%d", owner, i)] = rapid.SampledFrom([]string{"a", "b", "c"}).Draw(w.t, "value")
	}
	w.owners[owner] = rows
	w.tell(owner)
}

func (w *world) tell(owner int) {
	w.table.Set(owner, func(yield func(string, value) bool) {
		for _, k := range slices.Sorted(maps.Keys(w.owners[owner])) {
			if !yield(k, mk(w.owners[owner][k])) {
				return
			}
		}
	})
}

// full reads the kernel again and sets everything, as a Full delta does; fresh is a restart.
func (w *world) full(fresh bool) {
	if fresh {
		w.table = newTable()
	}
	w.table.Loaded(maps.All(w.kernel.dump()))
	for owner := range w.owners {
		w.tell(owner)
	}
	w.foreign = false
}

// meddle lets somebody else change our rows; only a Full can see it.
func (w *world) meddle() {
	w.kernel.rows["stranger"] = "left"
	for k := range w.kernel.rows {
		if rapid.Bool().Draw(w.t, "lost") {
			delete(w.kernel.rows, k)
		}
	}
	w.foreign = true
}

func (w *world) flush() error {
	if rapid.Bool().Draw(w.t, "slim") {
		w.table.Slim()
	}
	if rapid.Bool().Draw(w.t, "whole") {
		return w.table.Flush(w.kernel)
	}
	return w.pieces()
}

var errChanged = errors.New("wishes changed meanwhile")

// pieces writes one row at a time and goes on after an error, as a dataplane without transactions does. Sometimes somebody
// changes his mind between the taking and the writing.
func (w *world) pieces() error {
	var errs error
	puts, gone := w.table.Changes()
	if err := w.sure(puts, gone); err != nil {
		return err
	}
	deletes := Keys(gone)
	if rapid.IntRange(0, 4).Draw(w.t, "changes mind") == 0 {
		w.set()
		errs = errChanged
	}
	for i, p := range puts {
		if err := w.kernel.Write(puts[i:i+1], nil); err != nil {
			errs = err
			continue
		}
		w.table.Settled(p.Key)
	}
	for i, d := range deletes {
		if err := w.kernel.Write(nil, deletes[i:i+1]); err != nil {
			errs = err
			continue
		}
		w.table.Settled(d)
	}
	return errs
}

// sure compares what is said of the kernel's rows with what it holds, unless a stranger was there.
func (w *world) sure(lists ...[]Row[string, value]) error {
	for _, r := range slices.Concat(lists...) {
		if held := w.kernel.rows[r.Key]; r.Sure && !w.foreign && !same(r.Was, mk(held)) {
			return fmt.Errorf("row %s: surely %v, but the kernel holds %v", r.Key, r.Was, held)
		}
	}
	return nil
}

func (w *world) wanted() map[string]string {
	m := map[string]string{}
	for _, rows := range w.owners {
		maps.Copy(m, rows)
	}
	return m
}

func (w *world) check() {
	if !w.foreign && !maps.Equal(w.kernel.rows, w.wanted()) {
		w.t.Fatalf("flushed, but the kernel holds %v, wanted %v", w.kernel.rows, w.wanted())
	}
}

func (w *world) checkForgets() {
	if len(w.table.rows) != len(w.wanted()) || w.table.queue != nil {
		w.t.Fatalf("the table remembers %d rows and %v to write, wanted are %d", len(w.table.rows), w.table.queue, len(w.wanted()))
	}
	for k, r := range w.table.rows {
		if r.want.text != "" || r.held.text != "" {
			w.t.Fatalf("row %s is settled, and its text is kept", k)
		}
	}
}

// TestHistories: 30 % of the writes fail, half of them after they took effect, a part of them half way; with restarts and
// strangers in between. Whenever a flush succeeds, the kernel holds what is wanted: no row lost, none leaked.
func TestHistories(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{t: rt, table: newTable(), owners: map[int]map[string]string{}}
		healed := false
		w.kernel = &kernel{rows: map[string]string{}, fail: func() int {
			n := rapid.IntRange(0, 99).Draw(rt, "luck")
			switch {
			case healed || n >= 30:
				return works
			case n < 15:
				return failsAfter
			case n < 20:
				return failsHalf
			}
			return failsBefore
		}}
		for range rapid.IntRange(1, 25).Draw(rt, "steps") {
			switch n := rapid.IntRange(0, 19).Draw(rt, "step"); {
			case n < 9:
				w.set()
			case n < 17:
				if w.flush() == nil {
					w.check()
				}
			case n < 18:
				w.full(false)
			case n < 19:
				w.full(true)
			default:
				w.meddle()
			}
		}
		if w.foreign {
			w.full(false)
		}
		healed = true
		if err := w.table.Flush(w.kernel); err != nil {
			rt.Fatal(err)
		}
		w.check()
		w.checkForgets()
	})
}

func FuzzHistories(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(rt *rapid.T) {
		w := &world{t: rt, table: newTable(), owners: map[int]map[string]string{}}
		w.kernel = &kernel{rows: map[string]string{}, fail: func() int { return rapid.IntRange(works, failsHalf).Draw(rt, "how") }}
		for range 20 {
			w.set()
			if w.flush() == nil {
				w.check()
			}
		}
	}))
}

func steady(rows map[string]string) (*table, *kernel) {
	k := &kernel{rows: map[string]string{}, fail: func() int { return works }}
	tab := newTable()
	for key, text := range rows {
		one := map[string]value{key: mk(text)}
		tab.Set(int(key[0]), maps.All(one))
	}
	return tab, k
}

func TestWritesOnlyWhatDiffers(t *testing.T) {
	tab, k := steady(map[string]string{"a": "1", "b": "2", "c": "3"})
	flush(t, tab, k, 3)
	flush(t, tab, k, 0)
	tab.Set('a', maps.All(map[string]value{"a": mk("1")}))
	flush(t, tab, k, 0)
	tab.Set('a', maps.All(map[string]value{"a": mk("9")}))
	tab.Set('a', maps.All(map[string]value{"a": mk("1")}))
	flush(t, tab, k, 0) // there and back again
	tab.Set('b', nil)
	flush(t, tab, k, 1)
	tab.Loaded(maps.All(k.dump()))
	tab.Set('a', maps.All(map[string]value{"a": mk("1")}))
	tab.Set('c', maps.All(map[string]value{"c": mk("4")}))
	flush(t, tab, k, 1)
	tab.Loaded(maps.All(k.dump())) // nobody wants anything: how Remove is done
	flush(t, tab, k, 2)
	if len(k.rows) != 0 {
		t.Fatalf("left: %v", k.rows)
	}
}

func flush(t *testing.T, tab *table, k *kernel, writes int) {
	t.Helper()
	before := k.writes
	if err := tab.Flush(k); err != nil {
		t.Fatal(err)
	}
	if got := k.writes - before; got != writes {
		t.Fatalf("wrote %d rows, want %d", got, writes)
	}
}

func TestOrder(t *testing.T) {
	tab := newTable()
	var want []string
	for i := range 50 {
		key := fmt.Sprint((i * 37) % 50)
		want = append(want, key)
		tab.Set(i, maps.All(map[string]value{key: mk("x")}))
	}
	puts, _ := tab.Changes()
	var got []string
	for _, p := range puts {
		got = append(got, p.Key)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("puts come as %v, were set as %v", got, want)
	}
}

func TestOwnerMoves(t *testing.T) {
	tab, k := steady(map[string]string{"a": "1"})
	flush(t, tab, k, 1)
	tab.Set('z', maps.All(map[string]value{"a": mk("2")})) // taken over before the old owner lets go
	tab.Set('a', nil)
	flush(t, tab, k, 1)
	if k.rows["a"] != "2" {
		t.Fatalf("the kernel holds %q", k.rows["a"])
	}
}

// TestRepeatedKey: an owner may say a row twice; the last word counts, and it goes with the owner.
func TestRepeatedKey(t *testing.T) {
	tab, k := steady(nil)
	tab.Set(1, func(yield func(string, value) bool) {
		_ = yield("a", mk("1")) && yield("a", mk("2"))
	})
	flush(t, tab, k, 1)
	tab.Set(1, nil)
	flush(t, tab, k, 1)
	if len(k.rows) != 0 {
		t.Fatalf("left: %v", k.rows)
	}
}

func TestFlushKeepsTheCause(t *testing.T) {
	tab, k := steady(map[string]string{"a": "1"})
	k.fail = func() int { return failsAfter }
	if err := tab.Flush(k); !errors.Is(err, errWrite) {
		t.Fatalf("got %v", err)
	}
	tab.Set('a', nil) // it took effect all the same: the row must go
	k.fail = func() int { return works }
	flush(t, tab, k, 1)
}

// BenchmarkChange shows that a change of one row costs the same in a small and in a large table.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 300_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			tab := New[int, int](Same[int], nil)
			for i := range n {
				tab.Set(i, maps.All(map[int]int{i: 0}))
			}
			nop := WriterFunc[int, int](func([]Row[int, int], []int) error { return nil })
			_ = tab.Flush(nop)
			for i := 0; b.Loop(); i++ {
				tab.Set(i%n, func(yield func(int, int) bool) { yield(i%n, i+1) })
				_ = tab.Flush(nop)
			}
		})
	}
}

// BenchmarkMemory reports what a settled row costs: string keys, 8-byte sums, 10 rows an owner.
func BenchmarkMemory(b *testing.B) {
	const owners, each = 30_000, 10
	keys := make([]string, owners*each)
	for i := range keys {
		keys[i] = fmt.Sprintf("%s-%07d", strings.Repeat("k", 20), i)
	}
	for b.Loop() {
		before := heap()
		tab := New[int, string](Same[uint64], nil)
		for o := range owners {
			tab.Set(o, func(yield func(string, uint64) bool) {
				for _, k := range keys[o*each : (o+1)*each] {
					if !yield(k, 1) {
						return
					}
				}
			})
		}
		_ = tab.Flush(WriterFunc[string, uint64](func([]Row[string, uint64], []string) error { return nil }))
		b.ReportMetric(float64(heap()-before)/float64(len(keys)), "B/row")
		runtime.KeepAlive(tab)
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Rows that are wanted for their own sake, or counted, come and go as those of owners do: over random histories with failing
// writes the kernel ends with what is wanted.
func TestWantAndRef(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tab, k := newTable(), &kernel{rows: map[string]string{}}
		k.fail = func() int {
			return rapid.SampledFrom([]int{works, works, works, failsBefore, failsAfter, failsHalf}).Draw(t, "fate")
		}
		wanted, counts := map[string]string{}, map[string]int{}
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "row")
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0:
				wanted[name] = rapid.SampledFrom([]string{"1", "2"}).Draw(t, "value")
				tab.Want(name, mk(wanted[name]))
			case 1:
				delete(wanted, name)
				tab.Unwant(name)
			case 2:
				counts["n"+name]++
				tab.Ref("n"+name, mk("counted"))
			case 3:
				if counts["n"+name] > 0 {
					counts["n"+name]--
					tab.Unref("n" + name)
				}
			default:
				_ = tab.Flush(k)
			}
		}
		k.fail = func() int { return works }
		if err := tab.Flush(k); err != nil {
			t.Fatal(err)
		}
		want := maps.Clone(wanted)
		for name, n := range counts {
			if n > 0 {
				want[name] = "counted"
			}
		}
		if !maps.Equal(want, k.rows) {
			t.Fatalf("the kernel holds %v, wanted are %v", k.rows, want)
		}
	})
}
