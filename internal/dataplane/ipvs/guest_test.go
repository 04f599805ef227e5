//go:build vmguest

package ipvs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// TestConformance runs the suite of all dataplanes on this machine's kernel.
func TestConformance(t *testing.T) {
	dptest.Run(t, func(t *testing.T) dptest.Subject { return newSubject(t).subject() })
}

// subject is the dataplane on a wire, and a relay for localhost.
type subject struct {
	t     *testing.T
	w     *wire
	state *model.State
	relay dptest.Relay

	applies int
	spent   time.Duration
}

func newSubject(t *testing.T) *subject {
	w, err := newWire()
	if err != nil {
		t.Fatal(err)
	}
	s := &subject{t: t, w: w, state: model.NewState(), relay: dptest.Relay{Rand: rand.New(rand.NewPCG(1, 2))}}
	begin := time.Now()
	t.Cleanup(func() {
		t.Logf("%d packets, %d applies in %v, all in %v", w.sent, s.applies, s.spent, time.Since(begin))
		w.close()
	})
	return s
}

func (s *subject) subject() dptest.Subject {
	return dptest.Subject{Open: s.open, Send: s.send, Meddle: s.meddle, Kernel: s.w.text, Localhost: dptest.Relayed,
		Fail: func(faults func() memory.Fault) {
			if faults == nil {
				kernel.AskFault(nil)
				return
			}
			kernel.AskFault(func() string {
				return map[memory.Fault]string{memory.Before: "before", memory.After: "after"}[faults()]
			})
		}}
}

func (s *subject) open() (engine.Dataplane, error) {
	var d *Dataplane
	err := s.w.node.Do(func() (err error) {
		d, err = New(Config{V4: true, V6: true, MasqueradeBit: 14, Log: func(err error) { s.t.Log(err) }})
		return err
	})
	return inside{d, s}, err
}

// inside is the dataplane in the node's namespace.
type inside struct {
	*Dataplane
	s *subject
}

func (i inside) Apply(ctx context.Context, d model.Delta) error {
	begin := time.Now()
	err := i.s.w.node.Do(func() error { return i.Dataplane.Apply(ctx, d) })
	i.s.applies, i.s.spent = i.s.applies+1, i.s.spent+time.Since(begin)
	if err == nil {
		i.s.state.Apply(d)
	}
	return err
}

func (i inside) Remove(ctx context.Context) error {
	i.s.state = model.NewState()
	return i.s.w.node.Do(func() error { return i.Dataplane.Remove(ctx) })
}

func (s *subject) send(n model.Node, p model.Packet) (dptest.Outcome, error) {
	got, err := s.w.send(p)
	if err == nil && got.Verdict == model.Pass && p.Interface == "" && p.Proto == model.TCP && slices.Contains(n.LocalhostRelay, p.Dst.Addr()) {
		return s.relay.Answer(s.state, p), nil
	}
	return got, err
}

// meddle damages what is ours, as a stranger could.
func (s *subject) meddle(luck uint64) error {
	return s.w.node.Do(func() error {
		rnd := rand.New(rand.NewPCG(luck, 7))
		c, err := kernel.OpenIPVS()
		if err != nil {
			return err
		}
		defer c.Close()
		found, err := look(c)
		if err != nil {
			return err
		}
		var b kernel.IPVSBatch
		for k, h := range found {
			for _, to := range h.dests {
				if rnd.IntN(4) == 0 {
					b.Unsend(k, to)
				} else if rnd.IntN(4) == 0 {
					to.Weight = 1 - to.Weight
					b.Send(k, to, true)
				}
			}
			if rnd.IntN(4) == 0 {
				b.Unserve(k)
			}
		}
		switch rnd.IntN(4) {
		case 0:
			_ = exec.Command("nft", "delete", "table", "ip", tableName).Run()
		case 1:
			_ = exec.Command("ip", "rule", "del", "priority", fmt.Sprint(rulePriority+1)).Run()
		case 2:
			_ = exec.Command("ip", "-6", "route", "flush", "table", fmt.Sprint(routeTable)).Run()
		}
		return c.Do(&b, func(int, error) {})
	})
}

// TestShow shows what the kernel holds of the golden cluster.
func TestShow(t *testing.T) {
	s := newSubject(t)
	d, err := s.open()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	for _, v6 := range []bool{false, true} {
		if err := d.Apply(context.Background(), dptest.Golden(v6)); err != nil {
			t.Fatal(err)
		}
		text, err := s.w.text()
		if err != nil {
			t.Fatal(err)
		}
		if os.Getenv("SHOW") != "" {
			fmt.Println(text)
		}
	}
}
