package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/engine"
	"fairlead/internal/events"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

// current is what an agent serves by now. It is replaced as a whole.
type current struct {
	c       *config.Config
	served  families
	backend string // of the dataplane, if it has several
	written string // the mode that a restart would bring
}

// place names what the dataplane writes to. It is the name of a remover too.
func (c *current) place() string {
	if c.backend == "" {
		return c.c.Mode
	}
	return c.c.Mode + " (" + c.backend + ")"
}

// live is what can change while an agent runs.
type live struct {
	options  *config.Options // nil: nothing can
	resolver *resolve.Resolver
	current  atomic.Pointer[current]

	turn    sync.Mutex // one change, or one removal, at a time
	written string     // the mode that the flags and the file say
	chosen  string     // the mode that somebody switched to, whatever is written; empty is none
	forward forward    // in its turn
}

// now is what the agent serves by.
func (l *live) now() *current { return l.current.Load() }

// plane builds the dataplane of a configuration, and what is to be known of it.
func plane(ctx context.Context, c *config.Config) (engine.Dataplane, *current, error) {
	d, served, err := newDataplane(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	now := &current{c: c, served: served}
	if b, ok := d.(interface{ Backend() string }); ok {
		now.backend = b.Backend()
	}
	return d, now, nil
}

// reload takes up what the configuration file says now. A file that is wrong changes nothing.
func (a *agent) reload(ctx context.Context) {
	a.turn.Lock()
	defer a.turn.Unlock()
	next, err := a.read()
	if err == nil {
		err = a.take(ctx, next)
	}
	if err != nil && ctx.Err() == nil {
		why := strings.Join(strings.Split(err.Error(), "\n"), "; ")
		a.notice1(model.Notice{Reason: events.ConfigFailed, Message: "the changed configuration is not used, and nothing changes: " + why})
	}
}

// read gives the configuration as it is written now, with the mode that somebody switched to, as long as the mode that is
// written stays the same.
func (a *agent) read() (*config.Config, error) {
	next, err := a.options.Config()
	if err != nil {
		return nil, err
	}
	if next.Mode != a.written {
		a.written, a.chosen = next.Mode, ""
	}
	if a.chosen == "" {
		return next, nil
	}
	return a.options.For(a.chosen)
}

// take makes the agent go by another configuration, as far as it can.
func (a *agent) take(ctx context.Context, next *config.Config) error {
	old := a.now()
	u := old.c.Update(next)
	for _, note := range next.Notes {
		if !slices.Contains(old.c.Notes, note) {
			klog.InfoS("Configuration: " + note)
		}
	}
	if len(u.Restart) > 0 {
		klog.InfoS("Configuration: some fields have changed and need a restart; until then they stay as they were", "fields", strings.Join(u.Restart, ", "))
	}
	if len(u.Changed) == 0 && !u.Dataplane {
		now := *old
		now.written = a.written
		a.current.Store(&now)
		return nil
	}
	start := time.Now()
	now, err := a.change(ctx, old, u)
	if err != nil {
		return err
	}
	a.follow(old, now)
	if old.c.Mode != now.c.Mode {
		a.teller.Switched(fmt.Sprintf("fairlead serves in %s mode now (was %s), %v", now.c.Mode, old.c.Mode, since(start)))
	}
	klog.InfoS("Configuration: changed while running", "fields", strings.Join(u.Changed, ", "), "took", since(start))
	return nil
}

// since is how long it took, for people.
func since(start time.Time) time.Duration { return time.Since(start).Round(time.Millisecond) }

// change hands over to another dataplane, other settings of the resolver, another pace.
func (a *agent) change(ctx context.Context, old *current, u config.Update) (*current, error) {
	now := &current{c: u.Config, served: old.served, backend: old.backend}
	ch := engine.Change{Pace: &engine.Pace{MinSync: u.Config.MinSyncPeriod, Resync: u.Config.ResyncPeriod}}
	if u.Dataplane {
		if u.Config.Mode == config.Memory && old.c.Mode != config.Memory {
			return nil, errors.New("mode memory is a dry run, in which no packet is touched: it needs a restart")
		}
		d, next, err := plane(ctx, u.Config)
		if err != nil {
			return nil, err
		}
		now, ch.Dataplane, ch.Place = next, d, next.place()
	}
	from, to := resolverConfig(old.c, old.served), resolverConfig(now.c, now.served)
	if !reflect.DeepEqual(from, to) {
		ch.Configure, ch.Restore = func() { a.resolver.SetConfig(to) }, func() { a.resolver.SetConfig(from) }
	}
	if now.c.Mode != old.c.Mode && needsGate(now.c) {
		a.forward.tend(ctx, now.c) // before the old dataplane takes KUBE-FORWARD away
	}
	if err := a.engine.Load().Switch(ctx, ch); err != nil {
		return nil, err
	}
	now.written = a.written
	a.current.Store(now)
	a.forward.tend(ctx, now.c)
	return now, nil
}

// follow makes all others go by the new configuration.
func (a *agent) follow(old, now *current) {
	a.metrics.SetMode(now.c.Mode)
	a.server.SetSyncPeriod(now.c.SyncPeriod)
	if was, is := &old.c.Proxy, &now.c.Proxy; !reflect.DeepEqual(was.Conntrack, is.Conntrack) || !reflect.DeepEqual(was.OOMScoreAdj, is.OOMScoreAdj) {
		tune(is)
	}
	if old.c.Proxy.Logging.Verbosity != now.c.Proxy.Logging.Verbosity {
		if err := now.c.SetVerbosity(); err != nil {
			klog.ErrorS(err, "Configuration")
		}
	}
	if old.served != now.served {
		klog.InfoS("The new dataplane serves other address families; metrics and health keep those of the start", "ipv4", now.served.v4, "ipv6", now.served.v6)
	}
}

// switchTo moves to another mode, until the agent restarts or the mode that is written changes.
func (a *agent) switchTo(ctx context.Context, mode string) (control.Switched, error) {
	if err := switchable(mode); err != nil {
		return control.Switched{}, err
	}
	a.turn.Lock()
	defer a.turn.Unlock()
	out := control.Switched{From: a.now().c.Mode, To: mode}
	if a.options == nil {
		return out, errors.New("this agent was started without a configuration")
	}
	start := time.Now()
	if out.From != mode {
		next, err := a.options.For(mode)
		if err != nil {
			return out, err
		}
		if err := a.take(ctx, next); err != nil {
			return out, fmt.Errorf("mode %s stays: %w", out.From, err)
		}
	}
	if a.chosen = mode; mode == a.written {
		a.chosen = ""
	}
	out.Took = time.Since(start)
	return out, nil
}

// switchable tells whether a running agent can be moved to a mode.
func switchable(mode string) error {
	if mode == config.Memory {
		return errors.New("mode memory is a dry run, in which no packet is touched: start an agent in it")
	}
	if !slices.Contains(config.Modes, mode) {
		have := slices.DeleteFunc(slices.Sorted(maps.Keys(dataplanes)), func(s string) bool { return s == config.Memory })
		return fmt.Errorf("there is no mode %q (this build has %s)", mode, strings.Join(have, ", "))
	}
	return built(mode)
}
