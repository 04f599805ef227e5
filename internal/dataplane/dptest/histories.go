package dptest

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"pgregory.net/rapid"

	"fairlead/internal/model"
)

func stepError(i int, restarts bool, err error) error {
	if restarts {
		return fmt.Errorf("step %d, with restarts: %w", i+1, err)
	}
	return fmt.Errorf("step %d: %w", i+1, err)
}

// step makes a moment true and looks at it; then it says the same again, which must change nothing.
func (h *harness) step(st step, restart bool) error {
	h.tell(st.state())
	if restart {
		if err := h.restart(); err != nil {
			return err
		}
	}
	again := h.pending
	if err := h.settle(); err != nil {
		return err
	}
	h.pending = again
	if err := h.settle(); err != nil {
		return fmt.Errorf("told the same again: %w", err)
	}
	if restart {
		return h.presume()
	}
	return nil
}

// presume is a new instance that is told nothing but what the kernel was found to hold, as the engine tells it while nobody knows
// the truth: packets must meet what they met.
func (h *harness) presume() error {
	if err := h.open(); err != nil {
		return err
	}
	found, err := h.plane.Dump(context.Background())
	if err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	found.Node = h.want.Node // the node itself is always known
	found.NamePools()
	for range 1000 {
		h.pending = found.Full()
		if done, err := h.try(); err != nil {
			return fmt.Errorf("what was found is told: %w", err)
		} else if done {
			break
		}
	}
	if err := h.looks(); err != nil {
		return fmt.Errorf("what was found is told: %w", err)
	}
	h.applied = h.want.Clone() // as far as packets can tell
	return nil
}

// history makes up a history: services come, change and go, writes fail, instances die, strangers meddle.
func history(t *rapid.T, s Subject) error {
	h, err := begin(s, uint64(rapid.IntRange(0, 1<<30).Draw(t, "luck")))
	if err != nil {
		return err
	}
	w := &world{t: t, step: now(), all: map[string]service{}}
	for range rapid.IntRange(1, 12).Draw(t, "moments") {
		w.change()
		h.tell(w.step.state())
		if err := h.happen(t); err != nil {
			return err
		}
	}
	if err := h.settle(); err != nil {
		return err
	}
	return h.end()
}

// happen lets one thing happen.
func (h *harness) happen(t *rapid.T) error {
	switch n := rapid.IntRange(0, 9).Draw(t, "what happens"); {
	case n < 3: // one try; what failed stays pending
		_, err := h.try()
		return err
	case n < 4: // dies at work
		if _, err := h.try(); err != nil {
			return err
		}
		return h.restart()
	case n < 5:
		if err := h.Meddle(rapid.Uint64().Draw(t, "damage")); err != nil {
			return fmt.Errorf("meddle: %w", err)
		}
		clear(h.stuck)
		h.pending = h.want.Full()
		return h.settle()
	}
	return h.settle()
}

// world is what a history draws from: eight names in two families, and fewer addresses than they ask for.
type world struct {
	t    *rapid.T
	step step
	all  map[string]service
}

func (w *world) change() {
	for range rapid.IntRange(1, 3).Draw(w.t, "changes") {
		f := families[rapid.IntRange(0, 1).Draw(w.t, "family")]
		name := fmt.Sprintf("s%d%v", rapid.IntRange(0, 3).Draw(w.t, "name"), f)
		if rapid.IntRange(0, 4).Draw(w.t, "gone") == 0 {
			delete(w.all, name)
			continue
		}
		w.all[name] = w.draw(f.service(name))
	}
	if rapid.IntRange(0, 9).Draw(w.t, "node") == 0 {
		w.step.node = w.drawNode()
	}
	w.step.masqueradeAll = rapid.IntRange(0, 9).Draw(w.t, "masqueradeAll") == 0
	w.step.services = nil
	for _, name := range sortedKeys(w.all) {
		w.step.services = append(w.step.services, w.all[name])
	}
}

func (w *world) flip(what string) bool { return rapid.Bool().Draw(w.t, what) }

func (w *world) draw(s service) service {
	n := rapid.IntRange(1, 3).Draw(w.t, "address")
	s = s.over(rapid.SampledFrom([]model.Proto{model.TCP, model.UDP, model.SCTP}).Draw(w.t, "proto"))
	if w.flip("clusterIP") {
		s = s.clusterIP(n)
	}
	if w.flip("nodePort") {
		s = s.nodePort(uint16(30000 + n))
	}
	if w.flip("externalIP") {
		s = s.externalIP(rapid.SampledFrom([]netip.Addr{s.vip(100), s.node(1)}).Draw(w.t, "external"), uint16(30000+n))
	}
	if w.flip("balancer") {
		s = s.at(front{model.LoadBalancer, s.vip(n), 80, rapid.SampledFrom([][]netip.Prefix{nil, nil, {}, {s.clients()}}).Draw(w.t, "allow")})
	}
	pods := rapid.SliceOfNDistinct(rapid.IntRange(10, 14), 0, 3, rapid.ID[int])
	s = s.local(pods.Draw(w.t, "local")...).remote(pods.Draw(w.t, "remote")...)
	s = s.internally(w.flip("internalLocal")).externally(w.flip("externalLocal"))
	if rapid.IntRange(0, 3).Draw(w.t, "sticky") == 0 {
		s = s.sticky(time.Hour)
	}
	return s
}

func (w *world) drawNode() model.Node {
	n := Node()
	for what, change := range []func(model.Node) model.Node{podRanges, podInterfaces, oneNodePortAddress, localhostPorts, serviceCIDRs} {
		if w.flip(fmt.Sprint("node ", what)) {
			n = change(n)
		}
	}
	return n
}
