package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"fairlead/internal/engine"
	"fairlead/internal/health"
	"fairlead/internal/resolve"
)

// Live is what is asked at each scrape. Any of it may be nil.
type Live struct {
	Look    func(context.Context, func(engine.View)) error // Engine.Do
	Status  func() engine.Status
	Sources func() []health.Source
	API     func() *health.API       // how the API is reached; nil, or gives nil, where none is asked
	Saved   func() *health.Saved     // what is kept for a start without the API; the same where nothing is to be
	Events  func() map[string]uint64 // Kubernetes Events by outcome: "posted", "repeated", "dropped"
}

// Counts is what a resolver counts.
type Counts interface {
	Stats() resolve.Stats
	Refusals() map[string]int // that hold now, by reason
}

// RuleCounter is a dataplane that counts its rules: of each table, those it has, and those it wrote in the last round;
// IPv4 first.
type RuleCounter interface {
	RuleCounts() (total, last map[string][2]int)
}

// PacketCounter is a dataplane whose kernel counts packets, of both families together. The names are those below; what a
// dataplane does not count is not ok.
type PacketCounter interface {
	Packets(name string) (packets uint64, ok bool)
}

const (
	lookPatience = time.Second // what a scrape waits for the engine; then it gets what the one before saw
	lookAgain    = time.Second // scrapes that come sooner get the same numbers
)

// live collects what is not counted but looked up.
type live struct {
	Live
	mode     *mode
	families []string

	mu   sync.Mutex
	at   time.Time
	seen *seen

	lastQueued, noLocal, iptTotal, iptLast                     *prometheus.Desc
	endpointsTotal, endpointsWait, servicesTotal, servicesWait *prometheus.Desc
	invalid, localhost, invalidOwn, refused                    *prometheus.Desc
	frontends, pools, backends, refusals                       *prometheus.Desc
	synced, heard, age, inDoubt, events, pendingSince          *prometheus.Desc
	presumed, savedObjects, savedBytes, savedFails             *prometheus.Desc
	api                                                        apiDescs
}

// seen is what one look found.
type seen struct {
	frontends, pools, backends [2]int // by family
	counted                    bool
	stats                      resolve.Stats
	refusals                   map[string]int
	total, last                map[string][2]int
	packets                    map[string]uint64
}

func newLive(c Config, families []string) *live {
	d := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &live{Live: c.Live, mode: newMode(c.Mode), families: families,
		lastQueued:     d("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "When a source last told something.", ipFamily),
		noLocal:        d("kubeproxy_sync_proxy_rules_no_local_endpoints_total", "Service ports with policy Local, and endpoints, but none here.", "traffic_policy", ipFamily),
		endpointsTotal: d("kubeproxy_sync_proxy_rules_endpoint_changes_total", "EndpointSlice changes told."),
		endpointsWait:  d("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Services with EndpointSlice changes that are not resolved yet."),
		servicesTotal:  d("kubeproxy_sync_proxy_rules_service_changes_total", "Service changes told."),
		servicesWait:   d("kubeproxy_sync_proxy_rules_service_changes_pending", "Services whose changes are not resolved yet."),
		iptTotal:       d("kubeproxy_sync_proxy_rules_iptables_total", "iptables rules owned.", "table", ipFamily),
		iptLast:        d("kubeproxy_sync_proxy_rules_iptables_last", "iptables rules written in the last round.", "table", ipFamily),
		invalid:        d("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets dropped since conntrack found them invalid."),
		localhost:      d("kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "Packets to NodePorts on 127.0.0.0/8."),
		invalidOwn:     d("fairlead_invalid_dropped_packets_total", "Packets dropped since conntrack found them invalid."),
		refused:        d("kubeproxy_nftables_localhost_nodeport_rejected_packets_total", "Packets to NodePorts on loopback addresses, of protocols that are not relayed.", "protocol"),
		frontends:      d("fairlead_frontends", "Addresses and ports that are served.", ipFamily),
		pools:          d("fairlead_pools", "Sets of backends.", ipFamily),
		backends:       d("fairlead_backends", "Backends, counted once in each of their pools.", ipFamily),
		refusals:       d("fairlead_refusals", "What is refused to Services now, by reason.", "reason"),
		synced:         d("fairlead_source_synced", "1 when the source has told all that existed at the start.", "source"),
		heard:          d("fairlead_source_heard_timestamp_seconds", "When the source last gave a sign of life.", "source"),
		age:            d("fairlead_source_age_seconds", "For how long the source has given no sign of life; of one that never did, since the start.", "source"),
		inDoubt:        d("fairlead_source_in_doubt", "1 while what the source says contradicts what it said before, and is not believed yet.", "source"),
		presumed:       d("fairlead_presumed", "1 while what is served is what was known before, since the sources have not told all yet."),
		savedObjects:   d("fairlead_saved_objects", "Objects of the API that are kept on disk for a start without it."),
		savedBytes:     d("fairlead_saved_bytes", "Size of the file that they are kept in."),
		savedFails:     d("fairlead_saved_failing", "1 when nothing is kept, though it should be."),
		pendingSince:   d("fairlead_pending_seconds", "For how long the oldest change waits to be written; 0 when none does."),
		events:         d("fairlead_events_total", "Kubernetes Events, by what became of them.", "outcome"),
		api:            newAPIDescs(d),
	}
}

// Describe tells nothing: which of them there are depends on what there is to ask.
func (l *live) Describe(chan<- *prometheus.Desc) {}

// Collect asks.
func (l *live) Collect(ch chan<- prometheus.Metric) {
	l.status(ch)
	s := l.look()
	if s == nil {
		return
	}
	for _, f := range l.families {
		i := index(f)
		gauge(ch, l.frontends, s.frontends[i], f)
		gauge(ch, l.pools, s.pools[i], f)
		gauge(ch, l.backends, s.backends[i], f)
		if s.counted {
			gauge(ch, l.noLocal, s.stats.NoLocal.Internal[i], "internal", f)
			gauge(ch, l.noLocal, s.stats.NoLocal.External[i], "external", f)
		}
		if l.mode.is("iptables") {
			for table, n := range s.total {
				gauge(ch, l.iptTotal, n[i], table, f)
			}
			for table, n := range s.last {
				gauge(ch, l.iptLast, n[i], table, f)
			}
		}
	}
	if s.counted {
		counter(ch, l.endpointsTotal, s.stats.EndpointChanges)
		gauge(ch, l.endpointsWait, s.stats.SlicesPending)
		counter(ch, l.servicesTotal, s.stats.ServiceChanges)
		gauge(ch, l.servicesWait, s.stats.ServicesPending)
		for reason, n := range s.refusals {
			gauge(ch, l.refusals, n, reason)
		}
	}
	l.packets(ch, s.packets)
}

// packets tells what the kernel counts, where the dataplane knows.
func (l *live) packets(ch chan<- prometheus.Metric, counted map[string]uint64) {
	for name, desc := range map[string]*prometheus.Desc{acctInvalid: l.invalid, acctLocalhost: l.localhost} {
		if n, ok := counted[name]; ok && l.mode.is("iptables") {
			counter(ch, desc, n)
		}
	}
	if n, ok := counted[invalidDropped]; ok {
		counter(ch, l.invalidOwn, n)
	}
	for _, protocol := range refusedProtocols {
		if n, ok := counted[refusedPrefix+protocol]; ok {
			counter(ch, l.refused, n, protocol)
		}
	}
}

// What dataplanes count: kube-proxy's nfacct objects in iptables mode (k8s.io/kubernetes/pkg/proxy/metrics), and counters of
// our own in nftables mode.
const (
	acctInvalid   = "ct_state_invalid_dropped_pkts"
	acctLocalhost = "localhost_nps_accepted_pkts"

	invalidDropped = "invalid-dropped"
	refusedPrefix  = "localhost-refused-" // and the protocol: packets to NodePorts on loopback addresses, where the relay has TCP alone
)

var (
	refusedProtocols = []string{"udp", "sctp"}
	packetNames      = []string{acctInvalid, acctLocalhost, invalidDropped, refusedPrefix + refusedProtocols[0], refusedPrefix + refusedProtocols[1]}
)

// status tells what can be asked without the engine's goroutine.
func (l *live) status(ch chan<- prometheus.Metric) {
	var e engine.Status
	if l.Status != nil {
		e = l.Status()
		for _, f := range l.families {
			gauge(ch, l.lastQueued, unix(e.LastQueued), f)
		}
		waits := 0.0
		if !e.PendingSince.IsZero() {
			waits = time.Since(e.PendingSince).Seconds()
		}
		gauge(ch, l.pendingSince, waits)
		gauge(ch, l.presumed, bit(e.Presumed))
	}
	if l.Sources != nil {
		for _, src := range l.Sources() {
			l.source(ch, src, e.Started)
		}
	}
	if l.API != nil {
		if a := l.API(); a != nil {
			l.api.collect(ch, a)
		}
	}
	if l.Saved != nil {
		if s := l.Saved(); s != nil {
			gauge(ch, l.savedObjects, s.Objects)
			gauge(ch, l.savedBytes, float64(s.Bytes))
			gauge(ch, l.savedFails, bit(s.Problem != ""))
		}
	}
	if l.Events != nil {
		for outcome, n := range l.Events() {
			counter(ch, l.events, n, outcome)
		}
	}
}

// source tells of one place that truth comes from. started is when it was first asked.
func (l *live) source(ch chan<- prometheus.Metric, src health.Source, started time.Time) {
	gauge(ch, l.synced, bit(src.Synced), src.Name)
	heard := src.Heard
	if !heard.IsZero() {
		gauge(ch, l.heard, unix(heard), src.Name)
	}
	if !src.Remote {
		return
	}
	gauge(ch, l.inDoubt, bit(src.InDoubt), src.Name)
	if heard.IsZero() {
		heard = started
	}
	if !heard.IsZero() {
		gauge(ch, l.age, time.Since(heard).Seconds(), src.Name)
	}
}

// look asks the engine, or gives what was seen before when it is busy or was asked a moment ago.
func (l *live) look() *seen {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Look == nil || l.seen != nil && time.Since(l.at) < lookAgain {
		return l.seen
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookPatience)
	defer cancel()
	if err := l.Look(ctx, func(v engine.View) { l.seen, l.at = see(v), time.Now() }); err != nil {
		klog.V(4).InfoS("Metrics are those of a former scrape", "age", time.Since(l.at), "err", err)
	}
	return l.seen
}

// see reads a view. It runs between the engine's rounds, and costs the number of frontends and pools.
func see(v engine.View) *seen {
	s := &seen{packets: map[string]uint64{}}
	for k := range v.State.Frontends {
		s.frontends[at(k.V6())]++
	}
	for id, p := range v.State.Pools {
		s.pools[at(id.V6)]++
		s.backends[at(id.V6)] += len(p.Backends)
	}
	if c, ok := v.Resolver.(Counts); ok {
		s.counted, s.stats, s.refusals = true, c.Stats(), c.Refusals()
	}
	if c, ok := v.Dataplane.(RuleCounter); ok {
		s.total, s.last = c.RuleCounts()
	}
	if c, ok := v.Dataplane.(PacketCounter); ok {
		for _, name := range packetNames {
			if n, ok := c.Packets(name); ok {
				s.packets[name] = n
			}
		}
	}
	return s
}

// at is the place of a family: IPv4 first.
func at(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

func index(family string) int { return at(family == IPv6) }

// unix gives seconds since 1970; 0 is never.
func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixNano()) / 1e9
}

func bit(yes bool) int {
	if yes {
		return 1
	}
	return 0
}

func gauge[N int | int32 | float64](ch chan<- prometheus.Metric, d *prometheus.Desc, n N, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, n uint64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
}

var _ engine.Observer = (*Metrics)(nil)
var _ engine.FailureObserver = (*Metrics)(nil)
var _ engine.DriftObserver = (*Metrics)(nil)
var _ Counts = (*resolve.Resolver)(nil)
