package cli

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/conntrack"
	"fairlead/internal/control"
	"fairlead/internal/engine"
	"fairlead/internal/events"
	"fairlead/internal/health"
	"fairlead/internal/kernel"
	"fairlead/internal/metrics"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
	"fairlead/internal/source"
	"fairlead/internal/source/dir"
	"fairlead/internal/source/host"
	"fairlead/internal/source/kube"
	"fairlead/internal/source/kube/link"
	"fairlead/internal/source/saved"
)

// endsIn is how long an agent that was told to end waits for its parts. They need a fraction of it; a kubelet, or a
// person, should not wait for one that hangs.
const endsIn = 1500 * time.Millisecond

// agent is all the rooms put together.
type agent struct {
	c          *config.Config // at the start; what has changed since is in live
	configFile string
	fileSum    []byte // its fingerprint, when c was read
	started    time.Time
	served     families // as far as is known

	api       *kube.Source  // nil with manifests
	saved     *saved.Source // around api; nil when nothing is kept
	manifests *dir.Source   // nil with an API server
	node      *nodeWatch    // what is known of our own Node object
	engine    atomic.Pointer[engine.Engine]
	server    *health.Server
	metrics   *metrics.Metrics
	teller    *events.Teller
	recorder  *kube.Recorder // nil without an API server

	live // what can change
}

func newAgent(c *config.Config, configFile string) *agent {
	a := &agent{c: c, configFile: configFile, started: time.Now(), served: families{v4: true, v6: kernel.IPv6Off() == ""}}
	a.written, a.fileSum = c.Mode, sum(configFile)
	a.current.Store(&current{c: c, served: a.served, written: c.Mode})
	return a
}

// run serves until ctx ends, and leaves the rules. It returns an error when it could not begin.
func (a *agent) run(ctx context.Context) error {
	number, _ := versions()
	klog.InfoS("Starting", "version", number, "mode", a.c.Mode, "node", a.c.Node)
	ctx, cancel := context.WithCancelCause(ctx)
	parts := &parts{fail: cancel}
	err := a.start(ctx, parts)
	if err != nil {
		cancel(err)
	}
	<-ctx.Done()
	klog.InfoS("Ending; the rules stay")
	parts.end(endsIn)
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// start begins with what others ask for (health), and goes on in the order in which things need each other.
func (a *agent) start(ctx context.Context, p *parts) error {
	if err := a.connect(); err != nil { // reads files, waits for nobody
		return err
	}
	a.observers(ctx, p)
	a.serveHealth(ctx, p)
	tune(&a.c.Proxy)
	d, now, err := plane(ctx, a.c)
	if err != nil {
		return err
	}
	served := now.served
	a.served, a.resolver = served, resolve.New(resolverConfig(a.c, served))
	now.written = a.written
	a.current.Store(now)
	cleaner := conntrack.New(conntrack.Config{Report: a.metrics.Conntrack})
	checks := health.NewChecks(health.ChecksConfig{V4: served.v4, V6: served.v6, Healthy: a.server.Healthy, Notice: a.notice1,
		Failing: a.metrics.CheckPortFailures})
	localhost := a.newRelay()
	tidy, heir := newTidy(), newHeir(func() bool { return a.status().Synced })
	e := engine.New(engine.Config{
		Resolver: a.resolver, Dataplane: d, Place: now.place(),
		Observers: []engine.Observer{a.metrics, a.teller, cleaner, checks, localhost, tidy, heir},
		Notices:   func(ns []model.Notice) { a.notice(ns...) },
		MinSync:   a.c.MinSyncPeriod, Resync: a.c.ResyncPeriod,
	})
	sources := a.sources(e) // all of them are registered before the engine runs
	a.engine.Store(e)
	p.run("tidy", func() error { return tidy.run(ctx, e.Slim) })
	p.run("heir", func() error { return heir.run(ctx, a) })
	p.run("forward", func() error { return a.keepForward(ctx, heir.served) })
	p.run("engine", func() error {
		defer localhost.Close()
		defer checks.Close()
		defer cleaner.Close()
		return errors.Join(e.Run(ctx), e.Close())
	})
	for name, s := range sources {
		p.run(name, func() error { return s.run(ctx) })
	}
	a.serveRest(ctx, p, e)
	a.teller.Starting("fairlead serves Services of this node in " + a.c.Mode + " mode")
	return nil
}

// connect prepares the source of the Services. An error can't be waited out: no kubeconfig, a broken one.
func (a *agent) connect() error {
	a.node = &nodeWatch{name: a.c.Node, unknown: a.c.Own.Manifests == ""} // with manifests, a node without an object is as good as any
	if a.c.Own.Manifests != "" {
		a.manifests = dir.New(a.c.Own.Manifests, nil)
		return nil
	}
	cc := a.c.Proxy.ClientConnection
	l, err := link.New(link.Connection{Kubeconfig: cc.Kubeconfig, Master: a.c.Master, Servers: a.c.Own.APIServers, ContentType: cc.ContentType,
		AcceptContentTypes: cc.AcceptContentTypes, QPS: cc.QPS, Burst: int(cc.Burst)})
	if err != nil {
		return err
	}
	only := ""
	if a.c.Own.WatchNodes == config.WatchOwn {
		only = a.c.Node
	}
	if a.api, err = kube.New(kube.Config{Link: l, OnlyNode: only, Expect: a.servedBefore}); err != nil {
		return err
	}
	if own := a.c.Own; own.StateDir != "" {
		a.saved = saved.New(saved.Config{Of: a.api, Dir: own.StateDir, Node: a.c.Node, MaxAge: own.StateMaxAge.Duration,
			Heard: func() time.Time { return a.view().asOf() }})
	}
	return nil
}

// servedBefore tells whether the kernel was found to hold Services of ours. An API that knows none then is not believed at once.
func (a *agent) servedBefore() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	served := false
	if e := a.engine.Load(); e != nil {
		err := e.Do(ctx, func(v engine.View) { served = len(v.State.Frontends) > 0 })
		if err != nil {
			klog.ErrorS(err, "Can't tell whether Services were served here before")
		}
	}
	return served
}

// running is a source and the sink that it was given.
type running struct {
	source source.Source
	sink   source.Sink
}

func (r running) run(ctx context.Context) error { return r.source.Run(ctx, r.sink) }

// The names of the sources.
const (
	fromAPI   = "kubernetes"
	fromFiles = "manifests"
	fromHost  = "host"
)

func (a *agent) sources(e *engine.Engine) map[string]running {
	out := map[string]running{fromHost: {host.New(), e.Sink(fromHost)}}
	switch {
	case a.manifests != nil:
		out[fromFiles] = running{a.manifests, a.node.in(e.Sink(fromFiles))}
	case a.saved != nil:
		out[fromAPI] = running{a.saved, a.api.Learning(a.node.in(e.Sink(fromAPI)))}
	default:
		out[fromAPI] = running{a.api, a.api.Learning(a.node.in(e.Sink(fromAPI)))}
	}
	return out
}

// resolverConfig is what an administrator decided, for the resolver.
func resolverConfig(c *config.Config, f families) resolve.Config {
	bind, _ := netip.ParseAddr(c.Proxy.BindAddress) // it was validated; one with leading zeros is as good as none
	detect := resolve.Detect{Mode: resolve.DetectMode(c.Detect.Mode), CIDRs: c.Detect.CIDRs,
		Interface: cmp.Or(c.Detect.Bridge, c.Detect.Prefix)}
	return resolve.Config{NodeName: c.Node, IPv4: f.v4, IPv6: f.v6, BindAddr: bind, MasqueradeAll: c.MasqueradeAll, Detect: detect,
		NodePortAddresses: c.Proxy.NodePortAddresses, LocalhostNodePorts: c.LocalhostPort && (c.Mode == "iptables" || c.Mode == config.Memory),
		LocalhostRelay: relays(c), Standalone: c.Own.Manifests != "",
		AllowExternalIPs: c.Gates.Enabled(config.AllowServiceExternalIPs), AllowNodeAddresses: c.Own.AllowNodeAddresses}
}

// observers makes those that everything else reports to.
func (a *agent) observers(ctx context.Context, p *parts) {
	number, revision := versions()
	a.metrics = metrics.New(metrics.Config{Mode: a.c.Mode, V4: a.served.v4, V6: a.served.v6, Version: number, Revision: revision,
		Live: metrics.Live{Status: a.status, Sources: a.sourceStates, API: a.apiNow, Saved: a.savedNow, Events: a.eventCounts,
			Look: a.look}})
	if a.api == nil {
		a.teller = events.New(events.Config{Node: a.c.Node})
		return
	}
	a.metrics.WatchClient()
	a.recorder = a.api.Recorder(a.c.Node)
	a.teller = events.New(events.Config{Node: a.c.Node, Recorder: a.recorder})
	p.run("events", func() error { return a.recorder.Run(ctx) })
	p.run("view", func() error { a.watchView(ctx); return nil })
}

// notice tells people, and counts.
func (a *agent) notice(ns ...model.Notice) {
	a.metrics.Notices(ns...)
	a.teller.Notices(ns...)
}

func (a *agent) notice1(n model.Notice) { a.notice(n) }

func (a *agent) serveHealth(ctx context.Context, p *parts) {
	a.server = health.NewServer(health.ServerConfig{Port: a.port(a.c.Healthz), SyncPeriod: a.c.SyncPeriod, V4: a.served.v4, V6: a.served.v6,
		Status: a.health, Eligible: a.node.eligible, Asked: a.metrics.HealthAnswer})
	if a.c.Healthz != "" {
		p.run("health", func() error { return a.server.Run(ctx) })
	}
}

func (a *agent) port(addr string) health.Port {
	return health.Port{Addr: addr, HardFail: a.c.Proxy.BindAddressHardFail, Notice: a.notice1}
}

// serveRest opens what is not needed to serve: metrics, the control socket, and the look-out for a new configuration.
func (a *agent) serveRest(ctx context.Context, p *parts, e *engine.Engine) {
	p.run("metrics", func() error {
		return a.metrics.Serve(ctx, metrics.ServerConfig{Port: a.port(a.c.Metrics), Configz: a.configz, Profiling: a.c.Proxy.EnableProfiling})
	})
	if path := control.Path(a.c.Own.ControlSocket); path != config.SocketOff {
		p.run("control", func() error { control.New(path, e, a.about).Switches(a.switchTo).Run(ctx); return nil })
	}
	if a.configFile != "" && a.options != nil {
		p.run("config", func() error { watchConfig(ctx, a.configFile, a.fileSum, func() { a.reload(ctx) }); return nil })
	}
}
