package cli

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
)

// calls is a gate that remembers what it was asked for, each thing once in a row.
type calls struct {
	mu    sync.Mutex
	asked []string
	err   error
}

func (c *calls) note(what string) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.asked) == 0 || c.asked[len(c.asked)-1] != what {
		c.asked = append(c.asked, what)
	}
	return nil, c.err
}

func (c *calls) Keep(context.Context, int) ([]string, error) { return c.note("keep") }
func (c *calls) Remove(context.Context) ([]string, error)    { return c.note("remove") }
func (c *calls) Close() error                                { return nil }

func (c *calls) list() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.asked)
}

// The gate is kept in nftables mode and goes with it, not before; a dry run touches nothing; a failure stops nothing and is said once.
func TestForward(t *testing.T) {
	modes := pretend(t, "nftables", "userspace")
	asked := &calls{}
	newGate = func() gate { return asked }
	n := startNode(t, "mode: memory")
	if got := asked.list(); got != nil {
		t.Errorf("in a dry run: %v", got)
	}
	n.configure("mode: nftables")
	n.serves(modes, "nftables")
	if got := asked.list(); !slices.Equal(got, []string{"keep"}) {
		t.Errorf("in nftables mode: %v", got)
	}
	n.configure("mode: userspace")
	n.serves(modes, "userspace")
	n.until("the gate goes", func() bool { return slices.Equal(asked.list(), []string{"keep", "remove"}) })

	asked.mu.Lock()
	asked.err = errors.New("no way")
	asked.mu.Unlock()
	n.configure("mode: nftables")
	n.serves(modes, "nftables")
	n.logged("no way")
}
