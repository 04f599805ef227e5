package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/health"
	"fairlead/internal/model"
	"fairlead/internal/source/kube"
	"fairlead/internal/source/kube/link"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

// well is a view in which nothing is wrong.
func well() view {
	return view{started: noon.Add(-time.Hour), stale: 3 * time.Minute,
		link:      link.Status{Server: "https://a", Servers: []string{"https://a", "https://b"}, Connected: true, Since: noon.Add(-time.Hour), Errors: map[link.Trouble]uint64{}},
		resources: []kube.Status{{Resource: "services", Synced: true, LastEvent: noon.Add(-time.Minute)}, {Resource: "nodes", Synced: true, LastEvent: noon}}}
}

// TestProblem: what is wrong with a resource is said at once, and tolerated for a moment.
func TestProblem(t *testing.T) {
	refused := errors.New("refused")
	lost := func(since time.Duration) func(*view) {
		return func(v *view) { v.link.Connected, v.link.Since, v.link.LastError = false, noon.Add(-since), refused }
	}
	for _, tc := range []struct {
		name    string
		change  func(*view)
		why     string
		failing bool
	}{
		{"well", func(*view) {}, "", false},
		{"quiet for as long as allowed", func(v *view) { v.resources[0].LastEvent = noon.Add(-3 * time.Minute) }, "", false},
		{"quiet for longer", func(v *view) { v.resources[0].LastEvent = noon.Add(-3*time.Minute - 1) }, "was last heard of at 2026-01-02T11:56:59Z", true},
		{"asking fails", func(v *view) { v.resources[0].LastError, v.resources[0].Since = refused, noon.Add(-tolerated) },
			"can't be asked since 2026-01-02T11:59:50Z: refused", false},
		{"asking goes on failing", func(v *view) { v.resources[0].LastError, v.resources[0].Since = refused, noon.Add(-tolerated-1) },
			"can't be asked since 2026-01-02T11:59:49Z: refused", true},
		{"asking fails, and it is old", func(v *view) {
			v.resources[0].LastError, v.resources[0].Since, v.resources[0].LastEvent = refused, noon, noon.Add(-time.Hour)
		}, "can't be asked since 2026-01-02T12:00:00Z: refused", true},
		{"cut off", lost(time.Second), "can't be asked since 2026-01-02T11:59:59Z: refused", false},
		{"cut off for longer", lost(time.Minute), "can't be asked since 2026-01-02T11:59:00Z: refused", true},
		{"in doubt", func(v *view) { v.resources[0].Doubt, v.resources[0].DoubtSince = "went back in time", noon }, "went back in time", false},
		{"in doubt for longer", func(v *view) {
			v.resources[0].Doubt, v.resources[0].DoubtSince = "went back in time", noon.Add(-time.Minute)
		}, "went back in time", true},
		{"start", func(v *view) { v.link = link.Status{Since: noon} }, "the API server has not answered yet", false},
		{"an API server that is not ready", func(v *view) { v.link.NotReady, v.link.NotReadySince = "etcd failed", noon.Add(-time.Minute) },
			"the API server says since 2026-01-02T11:59:00Z that it is not ready: etcd failed", false},
		{"one that is not ready for long", func(v *view) { v.link.NotReady, v.link.NotReadySince = "etcd failed", noon.Add(-time.Hour) },
			"the API server says since 2026-01-02T11:00:00Z that it is not ready: etcd failed", true},
		{"connected, and no list comes", func(v *view) { v.resources[0].LastEvent = time.Time{} }, "was never heard of", true},
		{"connected, and no list has come yet", func(v *view) { v.resources[0].LastEvent, v.started = time.Time{}, noon.Add(-time.Minute) }, "", false},
	} {
		v := well()
		tc.change(&v)
		s := v.sources(true, noon)[0]
		if s.Problem != tc.why || s.Failing != tc.failing || s.Name != "services" || !s.Remote || s.InDoubt != (v.resources[0].Doubt != "") || !s.Heard.Equal(v.resources[0].LastEvent) {
			t.Errorf("%s: %+v, want %q, %v", tc.name, s, tc.why, tc.failing)
		}
	}
	if s := well().sources(false, noon)[0]; s.Synced {
		t.Error("synced before the engine has taken it")
	}
}

// TestAPI: every kind of trouble and everything that can be read anew is there, the age is that of the oldest part.
func TestAPI(t *testing.T) {
	v := well()
	v.link.LastError, v.link.Errors[link.Refused] = errors.New("refused"), 2
	v.link.Reloads = []link.Reload{{Thing: link.Token, Used: 3, Refused: 1, Last: noon}}
	a := v.api(noon)
	if len(a.Errors) != len(link.Troubles) || a.Errors["refused"] != 2 || len(a.Reloads) != len(link.Things) || a.Reloads["token"] != (health.Reload{Used: 3, Refused: 1, Last: noon}) ||
		a.View == nil || *a.View != 60 || a.LastError != "refused" {
		t.Errorf("%+v", a)
	}
	v.resources[1].LastEvent = time.Time{}
	if a := v.api(noon); a.View != nil {
		t.Errorf("a part was never heard of, and the view is %v s old", *a.View)
	}
}

// told is a diary of what people were told.
type told struct {
	worries *worries
	lines   []string
}

func (d *told) look(v view, now time.Time) {
	wrong, over := d.worries.look(v, now)
	for kind, list := range map[string][]model.Notice{"wrong": wrong, "over": over} {
		for _, n := range list {
			d.lines = append(d.lines, fmt.Sprintf("%s %s %s: %s", now.Format("15:04:05"), kind, n.Reason, n.Message))
		}
	}
}

func (d *told) want(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, d.lines); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	d.lines = nil
}

// TestViewStale: an outage is told once when it has lasted, and once when all of it is over; a short one is not.
func TestViewStale(t *testing.T) {
	d, now := &told{worries: newWorries()}, noon
	pass := func(change func(*view), lasts time.Duration) {
		for end := now.Add(lasts); now.Before(end); now = now.Add(lookEach) {
			v := well()
			for i := range v.resources {
				v.resources[i].LastEvent = now
			}
			change(&v)
			d.look(v, now)
		}
	}
	pass(func(*view) {}, time.Minute)
	lost := func(at time.Time) func(*view) {
		return func(v *view) {
			v.link.Connected, v.link.Since, v.link.LastError, v.link.Waiting = false, at, errors.New("refused"), "k.crt: half of a pair"
			for i := range v.resources {
				v.resources[i].LastEvent = at
			}
		}
	}
	pass(lost(now), 3*time.Minute)
	d.want(t)
	pass(func(*view) {}, time.Minute)
	d.want(t)
	since := now
	pass(lost(since), time.Hour)
	d.want(t, "12:08:05 wrong ViewStale: what is known of the cluster is what it was at 2026-01-02T12:05:00Z, and goes on being served: the API server can't be asked (refused); k.crt: half of a pair")
	pass(func(v *view) { v.resources[1].LastError, v.resources[1].Since = errors.New("no"), since }, time.Minute)
	d.want(t)
	pass(func(*view) {}, time.Minute)
	d.want(t, "13:06:00 over ViewFresh: what is known of the cluster is up to date again, after 1h1m0s")
	since = now
	pass(func(v *view) { v.resources[0].LastEvent = since }, 4*time.Minute)
	d.want(t, "13:10:05 wrong ViewStale: what is known of the cluster is what it was at 2026-01-02T13:07:00Z, and goes on being served: nothing was heard of services")
	pass(func(*view) {}, lookEach)
	d.want(t, "13:11:00 over ViewFresh: what is known of the cluster is up to date again, after 4m0s")
	quiet := now
	pass(func(v *view) { // silent first, and found to be cut off later
		lost(quiet.Add(time.Minute))(v)
		v.resources[0].LastEvent = quiet
	}, 4*time.Minute)
	d.want(t, "13:14:10 wrong ViewStale: what is known of the cluster is what it was at 2026-01-02T13:11:05Z, and goes on being served: the API server can't be asked (refused); k.crt: half of a pair")
}

// TestCredentialsRefused: a 401 or two are answered with new credentials; when they go on, somebody must know.
func TestCredentialsRefused(t *testing.T) {
	d, v := &told{worries: newWorries()}, well()
	v.link.Errors[link.Unauthorized] = 5 // of former times
	d.look(v, noon)
	v.link.Connected, v.link.Since, v.link.LastError = false, noon, errors.New("refused")
	d.look(v, noon.Add(time.Minute))
	d.want(t)
	v.link.Errors[link.Unauthorized], v.link.LastError = 6, errors.New("401 Unauthorized")
	d.look(v, noon.Add(tolerated))
	d.want(t)
	for i := range 10 {
		d.look(v, noon.Add(tolerated+time.Duration(i+1)*time.Second))
	}
	d.want(t, "12:00:11 wrong CredentialsRefused: the API server does not take our credentials since 2026-01-02T12:00:00Z: 401 Unauthorized")
	v.link.Connected = true
	d.look(v, noon.Add(time.Minute))
	d.want(t)
}

// TestCertificateExpires: from a week before on, once a day; that it has expired is news, and then once a day too.
func TestCertificateExpires(t *testing.T) {
	d, v := &told{worries: newWorries()}, well()
	v.link.ClientNotAfter, v.link.ServerNotAfter = noon.Add(9*24*time.Hour+90*time.Minute), noon.Add(365*24*time.Hour)
	days := map[string]int{}
	for now := noon; now.Before(noon.Add(12 * 24 * time.Hour)); now = now.Add(time.Minute) {
		v.link.Since, v.resources = now, nil
		d.look(v, now)
	}
	for _, l := range d.lines {
		_, text, _ := strings.Cut(l, "CertificateExpires: the client certificate for the API server ")
		days[text]++
	}
	want := []string{"expires at 2026-01-11T13:30:00Z, in 7 days: it must be renewed", "expires at 2026-01-11T13:30:00Z, in 6 days: it must be renewed",
		"expires at 2026-01-11T13:30:00Z, in 24 hours: it must be renewed", "expired at 2026-01-11T13:30:00Z: it must be renewed"}
	for _, w := range want {
		if days[w] == 0 {
			t.Errorf("was not told %q, but\n%s", w, strings.Join(d.lines, "\n"))
		}
	}
	if n := len(d.lines); n != 7+3 {
		t.Errorf("told %d times:\n%s", n, strings.Join(d.lines, "\n"))
	}
	v.link.ClientNotAfter, v.link.ServerNotAfter, d.lines = time.Time{}, time.Time{}, nil
	d.look(v, noon)
	d.want(t)
}

// TestAPILines: what get status prints of the API.
func TestAPILines(t *testing.T) {
	if lines := apiLines(nil, noon); lines != nil {
		t.Errorf("no API is asked: %q", lines)
	}
	back := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	v := well()
	v.link.Since, v.link.LastError, v.link.LastErrorAt, v.link.Failovers = back(time.Hour), errors.New("timeout"), back(time.Minute), 2
	v.link.ClientNotAfter, v.link.ServerNotAfter, v.link.TokenNotAfter = noon.Add(5*24*time.Hour), noon.Add(100*24*time.Hour), noon.Add(50*time.Minute)
	v.link.Reloads = []link.Reload{{Thing: link.Token, Used: 3, Last: back(time.Minute)}, {Thing: link.ClientCertificate, Refused: 2, Last: noon}, {Thing: link.CA, Last: noon}}
	v.link.Waiting, v.link.NotReady = "c.crt: half of a pair", "etcd"
	want := []string{"https://a, connected for 1h0m0s", "else https://b; 2 fail-overs", "it says itself that it is not ready: etcd", "the view of it is 1m0s old",
		"last trouble 1m0s ago, over: timeout", "client certificate expires at 2026-01-07T12:00:00Z, in 5 days: renew it",
		"server certificate expires at 2026-04-12T12:00:00Z, in 100 days", "token expires at 2026-01-02T12:50:00Z, in 50m0s",
		"read anew: client-certificate refused 2 times; token used 3 times, last 1m0s ago", "not in use: c.crt: half of a pair"}
	if diff := cmp.Diff(want, apiLines(v.api(noon), noon)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	v.link.Connected, v.link.TokenNotAfter = false, noon
	lines := apiLines(v.api(noon), noon)
	for _, want := range []string{"https://a, can't be asked for 1h0m0s: timeout", "token expired at 2026-01-02T12:00:00Z: renew it"} {
		if !slices.Contains(lines, want) {
			t.Errorf("%q does not say %q", lines, want)
		}
	}
	text := statusLines(control.Status{About: control.About{API: v.api(noon), Presumed: "serving what was known before",
		Saved: &health.Saved{Dir: "/d", Objects: 7, Bytes: 2049, Ignored: "too old"}}})
	for _, want := range []string{"\nsaved      7 objects in /d, 3 KiB\n", "\nsaved      what was kept before is not used: too old\n", "\napi        https://a, can't be asked", "\npresumed   serving what was known before\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("status does not say %q:\n%s", want, text)
		}
	}
}

func TestSavedLines(t *testing.T) {
	for want, s := range map[string]*health.Saved{
		"": nil, "7 objects in /d, 3 KiB": {Dir: "/d", Objects: 7, Bytes: 2049}, "nothing is kept in /d: disk full": {Dir: "/d", Problem: "disk full"},
		"nothing new is kept in /d yet: the API has not told all\nwhat was kept before is not used: too old": {Dir: "/d", Ignored: "too old"},
	} {
		if got := strings.Join(savedLines(s), "\n"); got != want {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}

// TestAgentTellsOfItsAPI: from the start, and nothing where no API is asked.
func TestAgentTellsOfItsAPI(t *testing.T) {
	for _, tc := range []struct {
		args []string
		api  bool
	}{{[]string{"--master=https://127.0.0.1:1"}, true}, {[]string{"--manifests=" + t.TempDir()}, false}} {
		o, fs := config.NewOptions(), pflag.NewFlagSet("run", pflag.ContinueOnError)
		o.AddFlags(fs)
		if err := fs.Parse(append(tc.args, "--hostname-override=n1")); err != nil {
			t.Fatal(err)
		}
		c, err := o.Config()
		if err != nil {
			t.Fatal(err)
		}
		a := newAgent(c, "")
		if err := a.connect(); err != nil {
			t.Fatal(err)
		}
		h, about := a.health().API, a.about().API
		if (h != nil) != tc.api || (about != nil) != tc.api {
			t.Errorf("%v: %+v, %+v", tc.args, h, about)
		}
		if tc.api && (h.Server != "https://127.0.0.1:1" || h.Connected || h.View != nil) {
			t.Errorf("%+v", h)
		}
	}
}
