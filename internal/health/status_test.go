package health

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"fairlead/internal/engine"
)

var (
	started = time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	now     = started.Add(time.Hour)
	both    = []string{"IPv4", "IPv6"}
)

const limit = time.Minute

func ago(d time.Duration) time.Time { return now.Add(-d) }

// kube-proxy's sequence: idle is healthy, a change that waits for too long is not, and only /healthz asks about the node.
func TestProxyHealth(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		name     string
		s        Status
		eligible *bool
		code     int
		healthy  bool
		last     time.Time
	}{
		{"before anything", Status{}, &yes, 200, true, now},
		{"before the first sync, changes wait", Status{PendingSince: ago(limit)}, &yes, 503, false, started},
		{"idle for long", Status{LastApplied: ago(30 * limit)}, &yes, 200, true, now},
		{"change waits", Status{LastApplied: ago(30 * limit), PendingSince: ago(limit - 1)}, &yes, 200, true, now},
		{"change waits too long", Status{LastApplied: ago(30 * limit), PendingSince: ago(limit)}, &yes, 503, false, ago(30 * limit)},
		{"node goes", Status{LastApplied: ago(limit)}, &no, 503, true, ago(limit)},
		{"livez does not mind the node", Status{LastApplied: ago(limit)}, nil, 200, true, now},
		{"livez, change waits too long", Status{LastApplied: ago(limit), PendingSince: ago(limit)}, nil, 503, false, ago(limit)},
	} {
		h := c.s.proxyHealth(now, started, limit, both, c.eligible)
		if h.code() != c.code || h.Healthy != c.healthy || !h.LastUpdated.Equal(c.last) || h.Status["IPv6"].Healthy != c.healthy {
			t.Errorf("%s: %d %+v", c.name, h.code(), h)
		}
	}
}

func TestProxyHealthJSON(t *testing.T) {
	no := false
	s := Status{LastApplied: ago(time.Second)}
	for _, c := range []struct {
		eligible *bool
		want     string
	}{
		{&no, `{"lastUpdated":"2026-01-02T03:59:59Z","currentTime":"2026-01-02T04:00:00Z","nodeEligible":false,"healthy":true,"status":{"IPv4":{"lastUpdated":"2026-01-02T03:59:59Z","healthy":true},"IPv6":{"lastUpdated":"2026-01-02T03:59:59Z","healthy":true}}}`},
		{nil, `{"lastUpdated":"2026-01-02T04:00:00Z","currentTime":"2026-01-02T04:00:00Z","healthy":true,"status":{"IPv4":{"lastUpdated":"2026-01-02T03:59:59Z","healthy":true},"IPv6":{"lastUpdated":"2026-01-02T03:59:59Z","healthy":true}}}`},
	} {
		b, err := json.Marshal(s.proxyHealth(now, started, limit, both, c.eligible))
		if err != nil || string(b) != c.want {
			t.Errorf("%v\n%s\nwant\n%s", err, b, c.want)
		}
	}
}

func TestReadiness(t *testing.T) {
	synced := []Source{{Name: "services", Synced: true, Heard: ago(time.Second)}, {Name: "host", Synced: true}}
	for _, c := range []struct {
		name    string
		s       Status
		reasons []string
	}{
		{"before anything", Status{}, []string{"starting", "nothing was written yet"}},
		{"a source is late", Status{Sources: []Source{{Name: "services"}, {Name: "host", Synced: true}}},
			[]string{"source services: has not told all yet", "nothing was written yet"}},
		{"a source can't be asked", Status{Sources: []Source{{Name: "services", Problem: "x509: expired"}}},
			[]string{"source services: x509: expired", "nothing was written yet"}},
		{"synced, not written", Status{Sources: synced}, []string{"nothing was written yet"}},
		{"synced, first write fails", Status{Sources: synced, LastError: "no iptables", PendingSince: ago(1)},
			[]string{"nothing was written yet: no iptables"}},
		{"written", Status{Sources: synced, LastApplied: ago(time.Hour)}, nil},
		{"fails since a moment", Status{Sources: synced, LastApplied: ago(time.Hour), PendingSince: ago(limit - 1), LastError: "busy"}, nil},
		{"fails for long", Status{Sources: synced, LastApplied: ago(time.Hour), PendingSince: ago(limit), LastError: "busy"},
			[]string{"changes wait since 2026-01-02T03:59:00Z: busy"}},
		{"changes wait for long", Status{Sources: synced, LastApplied: ago(time.Hour), PendingSince: ago(limit)},
			[]string{"changes wait since 2026-01-02T03:59:00Z"}},
		{"a source is stale", Status{Sources: []Source{{Name: "services", Synced: true, Problem: "silent for 4m", Failing: true}}, LastApplied: ago(1)},
			[]string{"source services: silent for 4m"}},
		{"a source can't be asked since a moment", Status{Sources: []Source{{Name: "services", Synced: true, Problem: "refused"}}, LastApplied: ago(1)}, nil},
		{"what was known is served", Status{Sources: synced, LastApplied: ago(1), Presumed: "serving what was known"}, []string{"serving what was known"}},
	} {
		r := c.s.readiness(now, limit)
		if got, want := strings.Join(r.Reasons, "\n"), strings.Join(c.reasons, "\n"); got != want || r.Ready != (want == "") {
			t.Errorf("%s: ready %v, because %q; want %q", c.name, r.Ready, got, want)
		}
	}
	b, err := json.Marshal(Status{Sources: synced, LastApplied: now}.readiness(now, limit))
	want := `{"ready":true,"reasons":[],"currentTime":"2026-01-02T04:00:00Z","sources":[{"name":"services","synced":true,"ageSeconds":1},{"name":"host","synced":true}],"lastApplied":"2026-01-02T04:00:00Z"}`
	if err != nil || string(b) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b, want)
	}
}

// What is wrong stands in the body while the code is still 200, and the way to the API beside it.
func TestReadinessShowsTheAPI(t *testing.T) {
	age := 2.5
	s := Status{LastApplied: now, Sources: []Source{{Name: "services", Synced: true, Problem: "can't be asked"}}, API: &API{
		Server: "https://a", Servers: []string{"https://a", "https://b"}, Since: ago(time.Second), View: &age, LastError: "refused", LastErrorAt: now,
		Errors: map[string]uint64{"refused": 1}, Reloads: map[string]Reload{"token": {Used: 2, Last: now}}, Waiting: "half a pair", ClientNotAfter: now}}
	r := s.readiness(now, limit)
	b, err := json.Marshal(r)
	want := `{"ready":true,"reasons":[],"currentTime":"2026-01-02T04:00:00Z","sources":[{"name":"services","synced":true,"problem":"can't be asked"}],"lastApplied":"2026-01-02T04:00:00Z",` +
		`"api":{"server":"https://a","servers":["https://a","https://b"],"connected":false,"since":"2026-01-02T03:59:59Z","viewAgeSeconds":2.5,"lastError":"refused","lastErrorAt":"2026-01-02T04:00:00Z",` +
		`"errors":{"refused":1},"failovers":0,"reloads":{"token":{"used":2,"refused":0,"last":"2026-01-02T04:00:00Z"}},"waiting":"half a pair","clientCertificateNotAfter":"2026-01-02T04:00:00Z"}}`
	if err != nil || string(b) != want {
		t.Errorf("%v\n%s\nwant\n%s", err, b, want)
	}
	var back API
	if at := strings.Index(want, `"api":`) + 6; json.Unmarshal([]byte(want[at:len(want)-1]), &back) != nil || !reflect.DeepEqual(&back, s.API) {
		t.Errorf("read back: %+v", back)
	}
	for _, c := range []struct {
		s    Source
		want string
	}{
		{Source{Synced: true}, ""}, {Source{}, "has not told all yet"}, {Source{Problem: "x"}, "x"},
		{Source{Synced: true, Problem: "x"}, ""}, {Source{Synced: true, Problem: "x", Failing: true}, "x"},
	} {
		if got := c.s.reason(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.s, got, c.want)
		}
	}
}

// An API that is away is no reason to leave the node, nor to start the agent anew.
func TestOutageIsHealthy(t *testing.T) {
	yes := true
	s := Status{LastApplied: ago(time.Hour), Sources: []Source{{Name: "services", Synced: true, Heard: ago(time.Hour), Problem: "refused", Failing: true}},
		API: &API{LastError: "refused"}, Presumed: "serving what was known"}
	if r := s.readiness(now, limit); r.Ready {
		t.Error("ready")
	}
	for _, eligible := range []*bool{&yes, nil} {
		if h := s.proxyHealth(now, started, limit, both, eligible); h.code() != 200 {
			t.Errorf("%d %+v", h.code(), h)
		}
	}
}

func TestStatusOf(t *testing.T) {
	got := StatusOf(engine.Status{Sources: map[string]bool{"host": true, "api": false}, PendingSince: ago(1), LastSuccess: ago(2), LastError: errors.New("busy")})
	want := Status{Sources: []Source{{Name: "api"}, {Name: "host", Synced: true}}, PendingSince: ago(1), LastApplied: ago(2), LastError: "busy"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
