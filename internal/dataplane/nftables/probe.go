package nftables

import (
	"errors"
	"fmt"

	"fairlead/internal/engine"
	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

var _ interface {
	engine.Dataplane
	engine.Watcher
	engine.Mender
} = (*Dataplane)(nil)

// New opens the kernel's nf_tables. The families of cfg are those that [Able] found.
func New(cfg Config) (*Dataplane, error) {
	if cfg.MasqueradeBit < 0 || cfg.MasqueradeBit > 31 {
		return nil, fmt.Errorf("masquerade bit %d: must be 0 to 31", cfg.MasqueradeBit)
	}
	c, err := kernel.OpenNFNetlink()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	d := newDataplane(cfg, c)
	d.port = c.Port()
	return d, nil
}

// Able tells whether this kernel can do all that the rules need, for one family, and in words what it can't. Nothing is left
// behind: the kernel is asked with a transaction whose last message can't succeed.
func Able(v6 bool) error { return able(Config{MasqueradeBit: 14}, v6) }

func able(cfg Config, v6 bool) error {
	c, err := kernel.OpenNFNetlink()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	defer c.Close()
	err = tryOut(c, cfg, v6)
	var refused *kernel.BatchError
	for i := 0; i < 2 && err != nil && !errors.As(err, &refused); i++ { // no answer of the kernel's about what it can do
		err = tryOut(c, cfg, v6)
	}
	if err != nil {
		return fmt.Errorf("nftables for %s can't be used here: %w", familyName(v6), err)
	}
	return nil
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

// tryOut writes one of everything, into a table of another name, in vain.
func tryOut(c conn, cfg Config, v6 bool) error {
	w := newWriter(c, cfg.table()+"-trial")
	w.table(v6)
	for s := range setsCount {
		w.set(s, v6)
	}
	for _, name := range counters {
		w.counter(name, v6)
	}
	x := builder{cfg, v6}
	node := &model.Node{LocalhostRelay: loopbacks, PodInterfaces: []string{"veth+"}}
	cs := []chain{
		x.target(target{verdict: model.Forward, n: 2, snat: true}),
		x.target(target{verdict: model.Forward, n: 2, snat: true, ranges: true}),
	}
	if cfg.Ahead == nil {
		cs = append(cs, x.target(target{verdict: model.Forward, n: 2, sticky: 1}))
	}
	for _, c := range append(cs, x.fixed(node)...) {
		w.chain(c.name, c.hook, v6)
	}
	for _, c := range append(cs, x.fixed(node)...) {
		w.fill(c, v6)
	}
	last := w.tx.Len()
	w.deleteChain("no such chain", v6)
	err := c.Commit(&w.tx)
	var refused *kernel.BatchError
	switch {
	case err == nil:
		return errors.New("the kernel did what it can't")
	case !errors.As(err, &refused) || refused.Index < 0 || refused.Index >= len(w.what):
		return fmt.Errorf("%w%s", err, hint(err))
	case refused.Index == last && errors.Is(err, unix.ENOENT):
		return nil
	}
	return fmt.Errorf("%s: %w%s", w.what[refused.Index], refused.Err, hint(refused.Err))
}

// hint says what may be missing.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return " (needs CAP_NET_ADMIN)"
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return fmt.Sprintf(" (needs Linux 5.13 or newer with nf_tables, its NAT, reject, numgen and ct modules; this is %s)", kernel.Release())
	}
	return ""
}

// Close lets go of the kernel and leaves the rules.
func (d *Dataplane) Close() error { return d.conn.Close() }

// Packets reads one of our counters, of both families together; ok is false where there is none.
func (d *Dataplane) Packets(name string) (n uint64, ok bool) {
	for _, v6 := range d.cfg.families() {
		m, err := d.conn.Get(nftType(unix.NFT_MSG_GETOBJ), family(v6), appendObject(nil, d.cfg.table(), name))
		if err != nil {
			continue
		}
		for typ, v := range kernel.Attrs(m.Attrs) {
			if typ != unix.NFTA_OBJ_DATA {
				continue
			}
			for typ, v := range kernel.Attrs(v) {
				if typ == unix.NFTA_COUNTER_PACKETS {
					n, ok = n+kernel.AttrU64(v), true
				}
			}
		}
	}
	return n, ok
}
