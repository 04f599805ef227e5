package metrics

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	client "k8s.io/client-go/tools/metrics"

	"fairlead/internal/conntrack"
	"fairlead/internal/engine"
	"fairlead/internal/health"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

type fakeResolver struct{ engine.Resolver }

func (fakeResolver) Stats() resolve.Stats {
	return resolve.Stats{ServiceChanges: 7, EndpointChanges: 9, ServicesPending: 1, SlicesPending: 2,
		NoLocal: resolve.NoLocal{Internal: [2]int32{1, 2}, External: [2]int32{3, 4}}}
}
func (fakeResolver) Refusals() map[string]int { return map[string]int{"NodeAddress": 5} }

type fakeDataplane struct{ engine.Dataplane }

func (fakeDataplane) RuleCounts() (total, last map[string][2]int) {
	return map[string][2]int{"nat": {40, 60}}, map[string][2]int{"nat": {4, 6}}
}
func (fakeDataplane) Packets(name string) (uint64, bool) {
	return uint64(len(name)), true
}

func delta() model.Delta {
	pool := func(v6 bool, addrs ...string) model.Pool {
		p := model.Pool{ID: model.PoolID{Service: "ns/a", Proto: model.TCP, V6: v6}}
		for _, a := range addrs {
			p.Backends = append(p.Backends, model.Backend{Addr: netip.MustParseAddrPort(a)})
		}
		return p
	}
	return model.Delta{Full: true, Since: []time.Time{time.Now().Add(-3 * time.Second)},
		Frontends: []model.Frontend{{Key: model.Key{IP: netip.MustParseAddr("10.96.0.1"), Port: 80, Proto: model.TCP}}},
		Pools:     []model.Pool{pool(false, "10.244.1.1:80", "10.244.1.2:80")}}
}

// full is a Metrics to which everything has happened once.
func full() *Metrics {
	state := model.NewState()
	state.Apply(delta())
	m := New(Config{Mode: "iptables", V4: true, V6: true, Version: "v1", Revision: "abc", Live: Live{
		Look: func(_ context.Context, f func(engine.View)) error {
			f(engine.View{State: state, Resolver: fakeResolver{}, Dataplane: fakeDataplane{}})
			return nil
		},
		Status: func() engine.Status { return engine.Status{LastQueued: time.Unix(100, 0), Presumed: true} },
		Sources: func() []health.Source {
			return []health.Source{{Name: "services", Synced: true, Heard: time.Unix(90, 0), Remote: true, InDoubt: true}, {Name: "host"}}
		},
		API: func() *health.API {
			return &health.API{Server: "https://a", Connected: true, Heard: time.Unix(91, 0), LastErrorAt: time.Unix(80, 0), Failovers: 2,
				Errors: map[string]uint64{"refused": 3, "timeout": 0}, Reloads: map[string]health.Reload{"token": {Used: 4, Refused: 5, Last: time.Unix(70, 0)}, "ca": {}},
				Waiting: "half a pair", ClientNotAfter: time.Unix(200, 0), ServerNotAfter: time.Unix(300, 0), TokenNotAfter: time.Unix(400, 0)}
		},
		Saved:  func() *health.Saved { return &health.Saved{Objects: 6, Bytes: 600, Problem: "full"} },
		Events: func() map[string]uint64 { return map[string]uint64{"posted": 3} },
	}})
	m.WatchClient()
	u := url.URL{Host: "api"}
	client.RequestLatency.Observe(context.Background(), "GET", u, time.Second)
	client.RateLimiterLatency.Observe(context.Background(), "GET", u, time.Second)
	client.RequestResult.Increment(context.Background(), "200", "GET", "api")
	m.Applied(delta(), 20*time.Millisecond)
	partial := delta()
	partial.Full = false
	m.Applied(partial, 10*time.Millisecond)
	m.Failed(errors.New("busy"), partial)
	m.Drifted("a chain was flushed")
	m.Notices(model.Notice{Reason: "NodeAddress"}, model.Notice{Reason: "NodeAddress"})
	m.Conntrack(conntrack.Round{V6: true, Proto: model.UDP, Took: time.Millisecond, Deleted: 4})
	m.Conntrack(conntrack.Round{Proto: model.UDP, Err: errors.New("busy")})
	for path, code := range map[string]int{"/healthz": 200, "/livez": 503, "/readyz": 503} {
		m.HealthAnswer(path, code)
	}
	m.CheckPortFailures(2)
	m.RelayListening(false, 3)
	m.RelayListening(false, 2)
	m.RelayFailed(true)
	m.nftablesFailed.WithLabelValues("IPv4") // of the other mode
	return m
}

// shared is made once: client-go tells the first listener only.
var shared = full()

func families(t *testing.T, m *Metrics) map[string]*dto.MetricFamily {
	t.Helper()
	all, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range all {
		if !strings.HasPrefix(f.GetName(), "go_") && !strings.HasPrefix(f.GetName(), "process_") {
			out[f.GetName()] = f
		}
	}
	return out
}

// docs/metrics.md has each metric with its type and labels, and no other.
func TestDocs(t *testing.T) {
	text, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| (\\w+) \\| ([^|]*?) ?\\| [^|]+ \\| (kube-proxy's|ours|every Kubernetes component's) \\|$")
	documented := map[string][]string{}
	for _, r := range row.FindAllStringSubmatch(string(text), -1) {
		if documented[r[1]] != nil {
			t.Errorf("%s stands twice in docs/metrics.md", r[1])
		}
		documented[r[1]] = r[2:]
	}
	if rows := strings.Count(string(text), "\n| `"); rows != len(documented) {
		t.Errorf("%d rows of %d can be read", len(documented), rows)
	}
	there := families(t, shared)
	for name, f := range there {
		doc := documented[name]
		if doc == nil {
			t.Errorf("%s is not in docs/metrics.md", name)
			continue
		}
		if want := strings.ToLower(f.GetType().String()); doc[0] != want {
			t.Errorf("%s is a %s, not a %s", name, want, doc[0])
		}
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		if got := strings.Fields(doc[1]); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(labels))) {
			t.Errorf("%s has labels %v, not %v", name, labels, got)
		}
		if ours := strings.HasPrefix(name, "fairlead_"); ours != (doc[2] == "ours") {
			t.Errorf("%s is not %s", name, doc[2])
		}
	}
	for name := range documented {
		if there[name] == nil {
			t.Errorf("docs/metrics.md has %s, which does not exist", name)
		}
	}
}

func TestValues(t *testing.T) {
	want := `
# HELP fairlead_api_certificate_not_after_timestamp_seconds When the certificate in use expires; of the server's chain, the first to do so.
# TYPE fairlead_api_certificate_not_after_timestamp_seconds gauge
fairlead_api_certificate_not_after_timestamp_seconds{certificate="client"} 200
fairlead_api_certificate_not_after_timestamp_seconds{certificate="server"} 300
# HELP fairlead_api_connected 1 when what was asked last was answered, and our credentials were taken.
# TYPE fairlead_api_connected gauge
fairlead_api_connected 1
# HELP fairlead_api_credentials_waiting 1 while what the files say now is not in use, since it can't be.
# TYPE fairlead_api_credentials_waiting gauge
fairlead_api_credentials_waiting 1
# HELP fairlead_api_errors_total Requests that were not answered as they should be, by what was wrong.
# TYPE fairlead_api_errors_total counter
fairlead_api_errors_total{reason="refused"} 3
fairlead_api_errors_total{reason="timeout"} 0
# HELP fairlead_api_failovers_total How often another API server was taken.
# TYPE fairlead_api_failovers_total counter
fairlead_api_failovers_total 2
# HELP fairlead_api_last_error_timestamp_seconds When one was last not answered so; 0 is never.
# TYPE fairlead_api_last_error_timestamp_seconds gauge
fairlead_api_last_error_timestamp_seconds 80
# HELP fairlead_api_last_heard_timestamp_seconds When an API server last answered anything; 0 is never.
# TYPE fairlead_api_last_heard_timestamp_seconds gauge
fairlead_api_last_heard_timestamp_seconds 91
# HELP fairlead_api_last_reload_timestamp_seconds When new ones were last used; at first the start. 0 is not there.
# TYPE fairlead_api_last_reload_timestamp_seconds gauge
fairlead_api_last_reload_timestamp_seconds{thing="ca"} 0
fairlead_api_last_reload_timestamp_seconds{thing="token"} 70
# HELP fairlead_api_reloads_total New credentials and settings that were read, by what became of them.
# TYPE fairlead_api_reloads_total counter
fairlead_api_reloads_total{outcome="refused",thing="ca"} 0
fairlead_api_reloads_total{outcome="refused",thing="token"} 5
fairlead_api_reloads_total{outcome="used",thing="ca"} 0
fairlead_api_reloads_total{outcome="used",thing="token"} 4
# HELP fairlead_api_server_info 1, with the API server in use in the label.
# TYPE fairlead_api_server_info gauge
fairlead_api_server_info{server="https://a"} 1
# HELP fairlead_api_token_not_after_timestamp_seconds When the token in use expires, if it says so.
# TYPE fairlead_api_token_not_after_timestamp_seconds gauge
fairlead_api_token_not_after_timestamp_seconds 400
# HELP fairlead_backends Backends, counted once in each of their pools.
# TYPE fairlead_backends gauge
fairlead_backends{ip_family="IPv4"} 2
fairlead_backends{ip_family="IPv6"} 0
# HELP fairlead_conntrack_deleted_entries_total Stale conntrack entries deleted.
# TYPE fairlead_conntrack_deleted_entries_total counter
fairlead_conntrack_deleted_entries_total{ip_family="IPv4",protocol="udp"} 0
fairlead_conntrack_deleted_entries_total{ip_family="IPv6",protocol="udp"} 4
# HELP fairlead_conntrack_rounds_total Looks for stale conntrack entries; failed ones are owed and done again.
# TYPE fairlead_conntrack_rounds_total counter
fairlead_conntrack_rounds_total{result="failed"} 1
fairlead_conntrack_rounds_total{result="ok"} 1
# HELP fairlead_frontends Addresses and ports that are served.
# TYPE fairlead_frontends gauge
fairlead_frontends{ip_family="IPv4"} 1
fairlead_frontends{ip_family="IPv6"} 0
# HELP fairlead_invalid_dropped_packets_total Packets dropped since conntrack found them invalid.
# TYPE fairlead_invalid_dropped_packets_total counter
fairlead_invalid_dropped_packets_total 15
# HELP fairlead_notices_total What people were told of a Service or the node, by reason.
# TYPE fairlead_notices_total counter
fairlead_notices_total{reason="NodeAddress"} 2
# HELP fairlead_presumed 1 while what is served is what was known before, since the sources have not told all yet.
# TYPE fairlead_presumed gauge
fairlead_presumed 1
# HELP fairlead_refusals What is refused to Services now, by reason.
# TYPE fairlead_refusals gauge
fairlead_refusals{reason="NodeAddress"} 5
# HELP fairlead_rounds_total Writes to the kernel, by their result.
# TYPE fairlead_rounds_total counter
fairlead_rounds_total{result="failed"} 1
fairlead_rounds_total{result="ok"} 2
# HELP fairlead_saved_bytes Size of the file that they are kept in.
# TYPE fairlead_saved_bytes gauge
fairlead_saved_bytes 600
# HELP fairlead_saved_failing 1 when nothing is kept, though it should be.
# TYPE fairlead_saved_failing gauge
fairlead_saved_failing 1
# HELP fairlead_saved_objects Objects of the API that are kept on disk for a start without it.
# TYPE fairlead_saved_objects gauge
fairlead_saved_objects 6
# HELP fairlead_source_in_doubt 1 while what the source says contradicts what it said before, and is not believed yet.
# TYPE fairlead_source_in_doubt gauge
fairlead_source_in_doubt{source="services"} 1
# HELP fairlead_source_synced 1 when the source has told all that existed at the start.
# TYPE fairlead_source_synced gauge
fairlead_source_synced{source="host"} 0
fairlead_source_synced{source="services"} 1
# HELP kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total Listeners for that, that could not be opened.
# TYPE kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total counter
kubeproxy_nftables_localhost_nodeport_listener_creation_failures_total{ip_family="IPv6"} 1
# HELP kubeproxy_nftables_localhost_nodeport_listeners NodePorts that are relayed from the family's loopback address now.
# TYPE kubeproxy_nftables_localhost_nodeport_listeners gauge
kubeproxy_nftables_localhost_nodeport_listeners{ip_family="IPv4"} 2
# HELP kubeproxy_nftables_localhost_nodeport_rejected_packets_total Packets to NodePorts on loopback addresses, of protocols that are not relayed.
# TYPE kubeproxy_nftables_localhost_nodeport_rejected_packets_total counter
kubeproxy_nftables_localhost_nodeport_rejected_packets_total{protocol="sctp"} 22
kubeproxy_nftables_localhost_nodeport_rejected_packets_total{protocol="udp"} 21
# HELP kubeproxy_sync_proxy_rules_iptables_last iptables rules written in the last round.
# TYPE kubeproxy_sync_proxy_rules_iptables_last gauge
kubeproxy_sync_proxy_rules_iptables_last{ip_family="IPv4",table="nat"} 4
kubeproxy_sync_proxy_rules_iptables_last{ip_family="IPv6",table="nat"} 6
# HELP kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total Failed writes of changes.
# TYPE kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total counter
kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family="IPv4"} 1
kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total{ip_family="IPv6"} 1
# HELP kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds When a source last told something.
# TYPE kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds gauge
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 100
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv6"} 100
# HELP kubeproxy_sync_proxy_rules_no_local_endpoints_total Service ports with policy Local, and endpoints, but none here.
# TYPE kubeproxy_sync_proxy_rules_no_local_endpoints_total gauge
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="external"} 3
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv4",traffic_policy="internal"} 1
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="external"} 4
kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family="IPv6",traffic_policy="internal"} 2
`
	var names []string
	for _, l := range strings.Split(want, "\n") {
		if name, ok := strings.CutPrefix(l, "# TYPE "); ok {
			names = append(names, strings.Fields(name)[0])
		}
	}
	if err := testutil.GatherAndCompare(shared.registry, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
	all := families(t, shared)
	for name, counts := range map[string]map[string]uint64{
		"kubeproxy_sync_proxy_rules_duration_seconds":         {IPv4: 2, IPv6: 2},
		"kubeproxy_sync_full_proxy_rules_duration_seconds":    {IPv4: 1, IPv6: 1},
		"kubeproxy_sync_partial_proxy_rules_duration_seconds": {IPv4: 1, IPv6: 1},
		"kubeproxy_network_programming_duration_seconds":      {IPv4: 2}, // the delta changes no IPv6 pool
	} {
		got := map[string]uint64{}
		for _, m := range all[name].GetMetric() {
			got[m.GetLabel()[0].GetValue()] = m.GetHistogram().GetSampleCount()
		}
		if len(got) != len(counts) || got[IPv4] != counts[IPv4] || got[IPv6] != counts[IPv6] {
			t.Errorf("%s: %v, want %v", name, got, counts)
		}
	}
	if n := len(all["kubeproxy_network_programming_duration_seconds"].GetMetric()[0].GetHistogram().GetBucket()); n != 80 {
		t.Errorf("%d buckets, want kube-proxy's 80", n)
	}
}

// One family, another mode, and nothing to ask: what makes no sense is not there.
func TestLess(t *testing.T) {
	m := New(Config{Mode: "nftables", V4: true})
	m.Applied(delta(), time.Millisecond)
	m.Failed(errors.New("busy"), delta())
	if families(t, m)["kubeproxy_nftables_localhost_nodeport_listeners"] == nil {
		t.Error("in nftables mode a relay without listeners has 0 of them")
	}
	for name, f := range families(t, m) {
		if strings.Contains(name, "iptables") {
			t.Errorf("%s in nftables mode", name)
		}
		for _, x := range f.GetMetric() {
			for _, l := range x.GetLabel() {
				if l.GetValue() == IPv6 {
					t.Errorf("%s has IPv6", name)
				}
			}
		}
	}
}

// The age of a source is that of its last sign of life; one that never gave any counts from the start, so that an alert sees
// it. What is no connection, has none.
func TestSourceAge(t *testing.T) {
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	m := New(Config{Mode: "iptables", V4: true, Live: Live{
		Status: func() engine.Status { return engine.Status{Started: ago(time.Hour)} },
		API:    func() *health.API { return nil },
		Saved:  func() *health.Saved { return nil },
		Sources: func() []health.Source {
			return []health.Source{{Name: "services", Remote: true, Heard: ago(time.Minute)}, {Name: "nodes", Remote: true}, {Name: "manifests", Heard: ago(time.Minute)}}
		},
	}})
	all, got := families(t, m), map[string]time.Duration{}
	for _, x := range all["fairlead_source_age_seconds"].GetMetric() {
		got[x.GetLabel()[0].GetValue()] = time.Duration(x.GetGauge().GetValue() * float64(time.Second)).Truncate(time.Minute)
	}
	if len(got) != 2 || got["services"] != time.Minute || got["nodes"] != time.Hour {
		t.Errorf("ages %v", got)
	}
	for name := range all {
		if strings.HasPrefix(name, "fairlead_api_") || strings.HasPrefix(name, "fairlead_saved_") {
			t.Errorf("%s, and no API is asked", name)
		}
	}
}

// An engine that is busy costs a scrape a moment, and gives what was seen before.
func TestBusyEngine(t *testing.T) {
	state := model.NewState()
	state.Apply(delta())
	busy, looks := false, 0
	l := newLive(Config{Mode: "iptables", Live: Live{Look: func(ctx context.Context, f func(engine.View)) error {
		looks++
		if busy {
			<-ctx.Done()
			return ctx.Err()
		}
		f(engine.View{State: state})
		return nil
	}}}, []string{IPv4})
	r := prometheus.NewRegistry()
	r.MustRegister(l)
	for range 3 { // a burst of scrapes is one question
		if n, err := testutil.GatherAndCount(r, "fairlead_frontends"); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if looks != 1 {
		t.Errorf("asked %d times, want once", looks)
	}
	busy, l.at = true, time.Time{}
	if n, err := testutil.GatherAndCount(r, "fairlead_frontends"); n != 1 || err != nil || looks != 2 {
		t.Error(n, err, looks)
	}
}

func TestServer(t *testing.T) {
	get := func(h http.Handler, path string) (int, string, string) {
		r := httptest.NewRecorder()
		h.ServeHTTP(r, httptest.NewRequest(http.MethodGet, path, nil))
		b, _ := io.ReadAll(r.Body)
		return r.Code, r.Header().Get("Content-Type"), string(b)
	}
	h := shared.handler(ServerConfig{Configz: func() ([]byte, error) { return json.Marshal(map[string]int{"a": 1}) }})
	for path, want := range map[string]string{"/healthz": "ok", "/proxyMode": "iptables", "/configz": `{"a":1}`} {
		if code, _, body := get(h, path); code != 200 || body != want {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, kind, body := get(h, "/metrics"); code != 200 || !strings.HasPrefix(kind, "text/plain") || !strings.Contains(body, "fairlead_build_info{") ||
		!strings.Contains(body, "process_open_fds") || !strings.Contains(body, "go_goroutines") {
		t.Errorf("/metrics: %d %s", code, kind)
	}
	for _, path := range []string{"/debug/pprof/", "/", "/readyz"} {
		if code, _, _ := get(h, path); code != 404 {
			t.Errorf("%s: %d, want 404", path, code)
		}
	}
	h = shared.handler(ServerConfig{Profiling: true})
	if code, _, _ := get(h, "/debug/pprof/cmdline"); code != 200 {
		t.Errorf("profiling: %d", code)
	}
	if code, _, _ := get(h, "/configz"); code != 404 {
		t.Errorf("/configz without a configuration: %d", code)
	}
	if err := shared.Serve(context.Background(), ServerConfig{}); err != nil {
		t.Errorf("no address: %v", err)
	}
}

func TestDriftObject(t *testing.T) {
	for what, want := range map[string]string{
		"chain KUBE-SERVICES of ip nat was deleted by nft (process 7)": "chain",
		"a rule was deleted from chain KUBE-SVC-X of ip nat":           "rule",
		"a jump to KUBE-SERVICES was deleted":                          "jump",
		"table ip fairlead was deleted, and 125 more changes":          "table",
		"element 10.96.0.10:80/tcp was deleted from services":          "element",
		"set services of ip fairlead was deleted":                      "set",
		"events were lost": "other",
	} {
		if got := driftObject(what); got != want {
			t.Errorf("%q is a change of %q, want %q", what, got, want)
		}
	}
}
