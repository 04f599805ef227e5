// Package memory is the reference dataplane: its kernel is a map. Tests, dry runs and benchmarks use it, and it shows in
// one page how a dataplane is built: rows of an owner into a shadow table, the table into the kernel, the kernel back into
// nouns.
package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"

	"fairlead/internal/engine"
	"fairlead/internal/model"
	"fairlead/internal/shadow"
)

// Kernel outlives the dataplanes that write into it, as a real one does. Its zero value is empty and never fails.
type Kernel struct {
	mu      sync.Mutex
	rows    map[any]any // by model.Key, model.PoolID, check or node
	version int
	faults  func() Fault
}

type (
	check string // the Service of a model.Check
	node  struct{}
)

// Fault is how a write fails.
type Fault uint8

// The faults.
const (
	None   Fault = iota
	Before       // nothing was done
	After        // it was done, and failed all the same
)

// ErrFault is the cause of each error made on purpose.
var ErrFault = errors.New("failed on purpose")

// Fail makes the kernel ask faults about each row that is written; nil makes it reliable.
func (k *Kernel) Fail(faults func() Fault) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.faults = faults
}

// Version counts the rows that were written, deleted and lost: it tells whether anything changed.
func (k *Kernel) Version() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.version
}

// State is what the kernel holds, as nouns.
func (k *Kernel) State() *model.State {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := model.NewState()
	for _, v := range k.rows {
		switch v := v.(type) {
		case model.Frontend:
			s.Frontends[v.Key] = v
		case model.Pool:
			s.Pools[v.ID] = v
		case model.Check:
			s.Checks[v.Service] = v
		case model.Node:
			s.Node = v
		}
	}
	return s
}

// String lists the rows, sorted.
func (k *Kernel) String() string {
	s := k.State().Full()
	var b strings.Builder
	for _, f := range s.Frontends {
		fmt.Fprintf(&b, "%v\n", f)
	}
	for _, p := range s.Pools {
		fmt.Fprintf(&b, "%v\n", p)
	}
	for _, c := range s.Checks {
		fmt.Fprintf(&b, "%v\n", c)
	}
	return b.String()
}

// Lose deletes the rows that which picks, as a stranger would.
func (k *Kernel) Lose(which func(row any) bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	before := len(k.rows)
	maps.DeleteFunc(k.rows, func(_, v any) bool { return which(v) })
	k.version += before - len(k.rows)
}

// write does one row; a nil row deletes.
func (k *Kernel) write(key, row any) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	fault := None
	if k.faults != nil {
		fault = k.faults()
	}
	if fault == Before {
		return ErrFault
	}
	if k.rows == nil {
		k.rows = map[any]any{}
	}
	k.version++
	if k.rows[key] = row; row == nil {
		delete(k.rows, key)
	}
	if fault == After {
		return ErrFault
	}
	return nil
}

// Dataplane writes into a Kernel.
type Dataplane struct {
	kernel *Kernel
	table  *shadow.Table[any, any, any]
}

var _ engine.Dataplane = (*Dataplane)(nil)

// New returns a dataplane over kernel.
func New(kernel *Kernel) *Dataplane {
	return &Dataplane{kernel: kernel, table: shadow.New[any, any](func(a, b any) bool { return reflect.DeepEqual(a, b) }, nil)}
}

// Apply makes it so; see engine.Dataplane.
func (d *Dataplane) Apply(_ context.Context, delta model.Delta) error {
	if delta.Full {
		d.load()
		if n := d.kernel.State().Node; delta.Node == nil {
			delta.Node = &n
		}
	}
	for _, k := range delta.GoneFrontends {
		d.table.Set(k, nil)
	}
	for _, k := range delta.GonePools {
		d.table.Set(k, nil)
	}
	for _, k := range delta.GoneChecks {
		d.table.Set(check(k), nil)
	}
	for _, f := range delta.Frontends {
		d.set(f.Key, f)
	}
	for _, p := range delta.Pools {
		d.set(p.ID, p)
	}
	for _, c := range delta.Checks {
		d.set(check(c.Service), c)
	}
	if delta.Node != nil {
		d.set(node{}, *delta.Node)
	}
	return d.flush()
}

// set says that a noun is wanted: it is the one row of its owner.
func (d *Dataplane) set(key, row any) {
	d.table.Set(key, func(yield func(any, any) bool) { yield(key, row) })
}

// load takes note of what the kernel holds.
func (d *Dataplane) load() {
	d.kernel.mu.Lock()
	defer d.kernel.mu.Unlock()
	d.table.Loaded(maps.All(d.kernel.rows))
}

// flush writes row by row and goes on after an error: one bad row never stops the good ones.
func (d *Dataplane) flush() error {
	var errs []error
	write := func(key, row any) {
		if err := d.kernel.write(key, row); err != nil {
			errs = append(errs, fmt.Errorf("write %v: %w", key, err))
			return
		}
		d.table.Settled(key)
	}
	puts, deletes := d.table.Changes()
	for _, p := range puts {
		write(p.Key, p.Val)
	}
	for _, p := range deletes {
		write(p.Key, nil)
	}
	return errors.Join(errs...)
}

// Dump gives what the kernel holds; see engine.Dataplane.
func (d *Dataplane) Dump(context.Context) (*model.State, error) { return d.kernel.State(), nil }

// Remove empties the kernel; see engine.Dataplane.
func (d *Dataplane) Remove(context.Context) error {
	d.load()
	return d.flush()
}

// Close does nothing.
func (d *Dataplane) Close() error { return nil }
