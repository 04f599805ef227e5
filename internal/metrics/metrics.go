// Package metrics counts what fairlead does, for Prometheus: kube-proxy's metrics under kube-proxy's names, so that
// dashboards and alerts go on working, and fairlead's own. docs/metrics.md lists all of them.
//
// Where kube-proxy has a number for each address family, and fairlead one, since it writes both families in one round, the
// same number stands under both.
package metrics

import (
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"fairlead/internal/conntrack"
	"fairlead/internal/model"
)

// Config says what there is to count.
type Config struct {
	Mode              string // "iptables" and so on, at the start; see SetMode
	V4, V6            bool   // families that are served
	Version, Revision string
	Live              Live
}

// Metrics is an engine.Observer, also of failures and of drift. Its methods may be called from any goroutine.
type Metrics struct {
	registry *prometheus.Registry
	mode     *mode
	families []string

	sync, syncFull, syncPartial *prometheus.HistogramVec
	lastSync                    *prometheus.GaugeVec
	programming                 *prometheus.HistogramVec
	healthz, livez, readyz      *prometheus.CounterVec
	flowRound                   *prometheus.HistogramVec
	flowsDeleted                *prometheus.CounterVec
	restoreFailed               *prometheus.CounterVec
	partialFailed               *prometheus.CounterVec
	nftablesFailed              *prometheus.CounterVec
	relayListening              *prometheus.GaugeVec
	relayFailed                 *prometheus.CounterVec

	rounds     *prometheus.CounterVec
	apply      *prometheus.HistogramVec
	notices    *prometheus.CounterVec
	drift      *prometheus.CounterVec
	flowRounds *prometheus.CounterVec
	flows      *prometheus.CounterVec
	checkPorts prometheus.Gauge
}

const ipFamily = "ip_family"

// IPv4 and IPv6 are the values of the label ip_family.
const (
	IPv4 = "IPv4"
	IPv6 = "IPv6"
)

func family(v6 bool) string {
	if v6 {
		return IPv6
	}
	return IPv4
}

// Buckets in seconds, as k8s.io/kubernetes/pkg/proxy/metrics has them.
var (
	syncBuckets        = prometheus.ExponentialBuckets(0.001, 2, 15)
	programmingBuckets = append(append(append([]float64{0.25, 0.5}, prometheus.LinearBuckets(1, 1, 59)...),
		prometheus.LinearBuckets(60, 5, 12)...), prometheus.LinearBuckets(120, 30, 7)...)
)

// New makes a registry of its own, with everything in it.
func New(c Config) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry(), mode: newMode(c.Mode)}
	for _, v6 := range []bool{false, true} {
		if v6 && c.V6 || !v6 && c.V4 {
			m.families = append(m.families, family(v6))
		}
	}
	m.kubeProxy()
	m.own(c)
	l := newLive(c, m.families)
	l.mode = m.mode
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), l)
	m.SetMode(c.Mode)
	return m
}

// kubeProxy makes the metrics that kube-proxy has.
func (m *Metrics) kubeProxy() {
	m.sync = m.histogram("kubeproxy_sync_proxy_rules_duration_seconds", "Duration of a successful write.", syncBuckets, ipFamily)
	m.syncFull = m.histogram("kubeproxy_sync_full_proxy_rules_duration_seconds", "Duration of a successful write of everything.", syncBuckets, ipFamily)
	m.syncPartial = m.histogram("kubeproxy_sync_partial_proxy_rules_duration_seconds", "Duration of a successful write of changes.", syncBuckets, ipFamily)
	m.lastSync = m.gauge("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "When the last write succeeded.", ipFamily)
	m.programming = m.histogram("kubeproxy_network_programming_duration_seconds",
		"From a change of a pod or Service, as its EndpointSlice tells, to the kernel.", programmingBuckets, ipFamily)
	m.healthz = m.counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", "code")
	m.livez = m.counter("kubeproxy_proxy_livez_total", "Answers of /livez.", "code")
	m.flowRound = m.histogram("kubeproxy_conntrack_reconciler_sync_duration_seconds", "Duration of a look for stale conntrack entries.", syncBuckets, ipFamily)
	m.flowsDeleted = m.counter("kubeproxy_conntrack_reconciler_deleted_entries_total", "Stale conntrack entries deleted.", ipFamily)
	m.restoreFailed = m.counter("kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "Failed writes of everything.", ipFamily)
	m.partialFailed = m.counter("kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total", "Failed writes of changes.", ipFamily)
	m.nftablesFailed = m.counter("kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "Failed writes.", ipFamily)
	m.relayListening = m.gauge("kubeproxy_nftables_localhost_nodeport_listeners", "NodePorts that are relayed from the family's loopback address now.", ipFamily)
	m.relayFailed = m.counter("kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total", "Listeners for that, that could not be opened.", ipFamily)
	for _, f := range m.families { // a counter that never counted is 0, not absent
		m.flowsDeleted.WithLabelValues(f)
	}
	for _, code := range []string{"200", "503"} {
		m.healthz.WithLabelValues(code)
		m.livez.WithLabelValues(code)
	}
}

// own makes the metrics that only fairlead has.
func (m *Metrics) own(c Config) {
	m.gauge("fairlead_build_info", "1, with the version in the labels.", "version", "revision", "goversion").
		WithLabelValues(c.Version, c.Revision, runtime.Version()).Set(1)
	m.rounds = m.counter("fairlead_rounds_total", "Writes to the kernel, by their result.", "result")
	m.apply = m.histogram("fairlead_apply_seconds", "Duration of a successful write, of changes or of everything.", syncBuckets, "full")
	m.notices = m.counter("fairlead_notices_total", "What people were told of a Service or the node, by reason.", "reason")
	m.drift = m.counter("fairlead_drift_repairs_total", "How often somebody else had changed what is fairlead's, and it was put right, by what was changed first.", "object")
	m.flowRounds = m.counter("fairlead_conntrack_rounds_total", "Looks for stale conntrack entries; failed ones are owed and done again.", "result")
	m.flows = m.counter("fairlead_conntrack_deleted_entries_total", "Stale conntrack entries deleted.", ipFamily, "protocol")
	m.checkPorts = prometheus.NewGauge(prometheus.GaugeOpts{Name: "fairlead_health_check_port_failures",
		Help: "Services whose health-check node port can't be opened now."})
	m.readyz = m.counter("fairlead_readyz_total", "Answers of /readyz.", "code")
	m.registry.MustRegister(m.checkPorts)
	for _, object := range driftObjects {
		m.drift.WithLabelValues(object)
	}
	for _, result := range []string{ok, failed} {
		m.rounds.WithLabelValues(result)
		m.flowRounds.WithLabelValues(result)
	}
}

// The values of the label result.
const (
	ok     = "ok"
	failed = "failed"
)

func result(err error) string {
	if err != nil {
		return failed
	}
	return ok
}

// Applied counts a write that succeeded.
func (m *Metrics) Applied(d model.Delta, took time.Duration) {
	now, secs := time.Now(), took.Seconds()
	m.rounds.WithLabelValues(ok).Inc()
	m.apply.WithLabelValues(strconv.FormatBool(d.Full)).Observe(secs)
	for _, f := range m.families {
		m.sync.WithLabelValues(f).Observe(secs)
		if d.Full {
			m.syncFull.WithLabelValues(f).Observe(secs)
		} else {
			m.syncPartial.WithLabelValues(f).Observe(secs)
		}
		m.lastSync.WithLabelValues(f).Set(float64(now.UnixNano()) / 1e9)
		if !concerns(d, f) {
			continue
		}
		for _, since := range d.Since {
			m.programming.WithLabelValues(f).Observe(max(0, now.Sub(since).Seconds()))
		}
	}
}

// concerns tells whether d changes pools of a family.
func concerns(d model.Delta, fam string) bool {
	for _, p := range d.Pools {
		if family(p.ID.V6) == fam {
			return true
		}
	}
	for _, id := range d.GonePools {
		if family(id.V6) == fam {
			return true
		}
	}
	return false
}

// Failed counts a write that failed.
func (m *Metrics) Failed(_ error, d model.Delta) {
	m.rounds.WithLabelValues(failed).Inc()
	failures := map[string]*prometheus.CounterVec{"nftables": m.nftablesFailed, "iptables": m.partialFailed}[m.mode.String()]
	if failures == m.partialFailed && d.Full {
		failures = m.restoreFailed
	}
	for _, f := range m.families {
		if failures != nil {
			failures.WithLabelValues(f).Inc()
		}
	}
}

// Drifted counts a change that somebody else made.
func (m *Metrics) Drifted(what string) { m.drift.WithLabelValues(driftObject(what)).Inc() }

// driftObjects is what a stranger can have changed.
var driftObjects = []string{"table", "chain", "jump", "rule", "set", "element", "counter", "other"}

// driftObject is the object that a watcher's words begin with: "chain KUBE-SERVICES of ip nat was deleted", "a rule was …".
func driftObject(what string) string {
	what = strings.TrimPrefix(what, "a ")
	for _, o := range driftObjects {
		if strings.HasPrefix(what, o+" ") {
			return o
		}
	}
	return "other"
}

// Notices counts what people were told.
func (m *Metrics) Notices(ns ...model.Notice) {
	for _, n := range ns {
		m.notices.WithLabelValues(n.Reason).Inc()
	}
}

// Conntrack counts a look at the conntrack table.
func (m *Metrics) Conntrack(r conntrack.Round) {
	f := family(r.V6)
	m.flowRounds.WithLabelValues(result(r.Err)).Inc()
	m.flowRound.WithLabelValues(f).Observe(r.Took.Seconds())
	m.flowsDeleted.WithLabelValues(f).Add(float64(r.Deleted))
	m.flows.WithLabelValues(f, r.Proto.String()).Add(float64(r.Deleted))
}

// HealthAnswer counts an answer of the health port.
func (m *Metrics) HealthAnswer(path string, code int) {
	byCode := map[string]*prometheus.CounterVec{"/healthz": m.healthz, "/livez": m.livez, "/readyz": m.readyz}[path]
	if byCode != nil {
		byCode.WithLabelValues(strconv.Itoa(code)).Inc()
	}
}

// RelayListening says how many NodePorts are relayed from the loopback address of a family.
func (m *Metrics) RelayListening(v6 bool, number int) {
	m.relayListening.WithLabelValues(family(v6)).Set(float64(number))
}

// RelayFailed counts a listener of the relay that could not be opened.
func (m *Metrics) RelayFailed(v6 bool) { m.relayFailed.WithLabelValues(family(v6)).Inc() }

// CheckPortFailures says how many Services have a health-check node port that can't be opened.
func (m *Metrics) CheckPortFailures(services int) { m.checkPorts.Set(float64(services)) }

func (m *Metrics) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.registry.MustRegister(v)
	return v
}
