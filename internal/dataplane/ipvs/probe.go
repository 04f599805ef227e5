package ipvs

import (
	"errors"
	"fmt"

	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/engine"
	"fairlead/internal/kernel"
	"fairlead/internal/model"
	"fairlead/internal/shadow"

	"golang.org/x/sys/unix"
)

var _ interface {
	engine.Dataplane
	engine.Watcher
	engine.Mender
} = (*Dataplane)(nil)

// sysctls are those of IPVS that we need, with the reason. All are of the network namespace. Linux 5.13 and newer is what the rules need, so
// no older kernel's quirks are met: before 5.9, conn_reuse_mode=1 cost a second at each reused port, and expire_nodest_conn left flows to a
// destination that has gone.
var sysctls = []struct{ name, value string }{
	{"net/ipv4/vs/conntrack", "1"},                 // masquerade, and telling whose a flow is, need conntrack to see it as it is
	{"net/ipv4/vs/expire_nodest_conn", "1"},        // a flow to an endpoint that has gone ends at once; a port that is used again is not sent to one that drains
	{"net/ipv4/vs/expire_quiescent_template", "1"}, // a client that sticks to an endpoint that drains is sent to another
	{"net/ipv4/vs/conn_reuse_mode", "1"},           // a port that is used again is a new connection (the kernel's own default)
}

// The routing table and rules by which packets come to IPVS. The table's number is that of our marks.
const (
	routeTable   = 0xfa1
	rulePriority = 110
)

func diversion(cfg Config, v6 bool) kernel.Diversion {
	return kernel.Diversion{V6: v6, Bit: cfg.front().Bit(), Table: routeTable, Priority: rulePriority}
}

// Able tells whether this kernel can do all that the dataplane needs, for one family, and in words what it can't.
func Able(v6 bool) error {
	_ = kernel.LoadModule("ip_vs") // it may be built in; the next step knows
	c, err := kernel.OpenIPVS()
	if err != nil {
		return fmt.Errorf("IPVS can't be used here: %w", err)
	}
	defer c.Close()
	return nftables.AbleAhead(Config{MasqueradeBit: 14}.front(), v6)
}

// New opens the kernel's IPVS and nf_tables. The families of cfg are those that [Able] found. A scheduler that the kernel has not is told to
// cfg.Log, and rr serves.
func New(cfg Config) (*Dataplane, error) {
	if cfg.Scheduler == "" {
		cfg.Scheduler = DefaultScheduler
	}
	if cfg.Log == nil {
		cfg.Log = func(error) {}
	}
	loadModules(cfg)
	c, err := kernel.OpenIPVS()
	if err != nil {
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	for _, s := range sysctls {
		if err := kernel.SetSysctl(s.name, s.value); err != nil {
			c.Close()
			return nil, fmt.Errorf("ipvs: %w", err)
		}
	}
	if err := c.SetTimeouts(seconds(cfg.TCPTimeout), seconds(cfg.TCPFinTimeout), seconds(cfg.UDPTimeout)); err != nil {
		cfg.Log(err)
	}
	if cfg.Scheduler, err = schedulerFor(cfg, c); err != nil {
		c.Close()
		return nil, fmt.Errorf("ipvs: %w", err)
	}
	return open(cfg, c)
}

// loadModules loads a scheduler's module before the kernel would do it itself: it holds a lock then, and can stand still for ever when a
// network namespace goes at the same time.
func loadModules(cfg Config) {
	for _, name := range []string{"ip_vs", "ip_vs_" + cfg.Scheduler, "ip_vs_" + DefaultScheduler, "ip_vs_mh"} {
		_ = kernel.LoadModule(name) // it may be built in
	}
}

// schedulerFor is the one asked for, or rr.
func schedulerFor(cfg Config, c conn) (string, error) {
	var err error
	for _, name := range []string{cfg.Scheduler, DefaultScheduler} {
		if err = tryScheduler(c, name); err == nil {
			return name, nil
		}
		if !errors.Is(err, unix.ENOENT) {
			return "", err
		}
		err = fmt.Errorf("this kernel has no scheduler %q (module ip_vs_%s)", name, name)
		cfg.Log(err)
	}
	return "", err
}

// tryScheduler makes a virtual server that no packet meets.
func tryScheduler(c conn, name string) error {
	s := markOf(trial, false)
	var b kernel.IPVSBatch
	b.Unserve(s)
	b.Serve(s, kernel.VirtualServerSettings{Scheduler: name}, false)
	b.Unserve(s)
	var failed error
	err := c.Do(&b, func(_ int, err error) { failed = errors.Join(failed, err) })
	return errors.Join(err, failed)
}

func open(cfg Config, c conn) (*Dataplane, error) {
	d := &Dataplane{cfg: cfg, conn: c, services: map[model.PoolID]*service{}, owners: map[model.Key]*service{}, live: map[kernel.VirtualServer]*live{},
		numbers: [2]pools{newPools(), newPools()},
		servers: shadow.New[kernel.VirtualServer, kernel.VirtualServer](shadow.Same[kernel.VirtualServerSettings], nil),
		dests:   shadow.New[destination, destination](shadow.Same[weight], nil)}
	front := cfg.front()
	front.Ahead.Number = d.numberAt
	var err error
	if d.front, err = nftables.New(front); err != nil {
		c.Close()
		return nil, err
	}
	return d, nil
}

// Close lets go of the kernel and leaves what is there.
func (d *Dataplane) Close() error { return errors.Join(d.front.Close(), d.conn.Close()) }
