package link

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

var discard = log.New(io.Discard, "", 0)

// quick times make the tests short. Files are found by their signs.
var quick = times{
	dial: 2 * time.Second, handshake: time.Second, pingAfter: 300 * time.Millisecond, ping: 300 * time.Millisecond, header: 10 * time.Second,
	retire: 100 * time.Millisecond, silent: time.Minute, pulse: 50 * time.Millisecond, pulseMore: 20 * time.Millisecond,
	pulseFor: time.Second, knock: 20 * time.Millisecond, knockMost: 60 * time.Millisecond, knockFor: time.Second, badMost: 60 * time.Millisecond, tryMost: 100 * time.Millisecond,
	poke: 5 * time.Millisecond, files: time.Minute,
}

// box is a node's folder of credentials, and an API server that takes them.
type box struct {
	t          *testing.T
	dir        string
	ca, people *authority // of the server, of the clients
	api        *apiServer
}

func newBox(t *testing.T) *box {
	b := &box{t: t, dir: t.TempDir(), ca: newAuthority(t), people: newAuthority(t)}
	b.api = newServer(t, b.ca)
	b.api.set(func() { b.api.clients, b.api.tokens = b.people.pool(), []string{"first"} })
	b.write("ca.crt", b.ca.pem)
	b.write("token", []byte("first\n"))
	b.pair(b.people, "tls")
	return b
}

func (b *box) path(name string) string { return filepath.Join(b.dir, name) }

// write replaces a file, as careful programs do.
func (b *box) write(name string, data []byte) {
	b.t.Helper()
	if err := os.WriteFile(b.path(name+".new"), data, 0o600); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Rename(b.path(name+".new"), b.path(name)); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) pair(by *authority, name string) {
	cert, key := by.client(b.t, "system:kube-proxy")
	b.write(name+".crt", cert)
	b.write(name+".key", key)
}

// kubeconfig writes one that speaks with a server as a user (lines of YAML).
func (b *box) kubeconfig(url, user string) {
	b.write("kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: here
clusters: [{name: here, cluster: {server: %q, certificate-authority: ca.crt}}]
users: [{name: me, user: {%s}}]
contexts: [{name: here, context: {cluster: here, user: me}}]
`, url, user))
}

const (
	byPair  = "client-certificate: tls.crt, client-key: tls.key"
	byToken = "tokenFile: token"
)

func (b *box) link(user string, more ...string) *Link {
	b.t.Helper()
	b.kubeconfig(b.api.URL, user)
	return b.start(quick, more...)
}

func (b *box) start(t times, more ...string) *Link {
	b.t.Helper()
	l, err := newLink(Connection{Kubeconfig: b.path("kubeconfig"), Servers: more}, t)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); l.Run(ctx) }()
	b.t.Cleanup(func() { cancel(); <-done })
	waitFor(b.t, "a connection", func() bool { return l.Status().Connected })
	return l
}

func (l *Link) used(thing Thing) uint64 {
	for _, r := range l.Status().Reloads {
		if r.Thing == thing {
			return r.Used
		}
	}
	return 0
}

// Each thing that can rotate does, under a program that asks all the time: no request fails, the watch goes on over the
// new settings, and what was good before is not taken any more.
func TestRotate(t *testing.T) {
	for _, c := range []struct {
		name, user string
		thing      Thing
		turn       func(*box)
		old        func(*box) // the server stops taking what was there
	}{
		{"client certificate", byPair, ClientCertificate,
			func(b *box) {
				next := newAuthority(b.t)
				both := b.people.pool()
				both.AddCert(next.cert)
				b.api.set(func() { b.api.clients = both })
				b.people = next
				b.pair(next, "tls")
			},
			func(b *box) { b.api.set(func() { b.api.clients = b.people.pool() }) }},
		{"token", byToken, Token,
			func(b *box) {
				b.api.set(func() { b.api.tokens = []string{"first", "second"} })
				b.write("token", []byte("second"))
			},
			func(b *box) { b.api.set(func() { b.api.tokens = []string{"second"} }) }},
		{"token, the old one refused before the file changes", byToken, Token,
			func(b *box) {
				b.write("token", []byte("second"))
				b.api.set(func() { b.api.tokens = []string{"second"} })
			}, func(*box) {}},
		{"authority", byToken, CA,
			func(b *box) {
				old := b.ca
				b.ca = newAuthority(b.t)
				b.write("ca.crt", append(append([]byte(nil), old.pem...), b.ca.pem...))
			},
			func(b *box) { b.api.serve(b.t, b.ca); b.write("ca.crt", b.ca.pem) }},
		{"server", byToken, Kubeconfig,
			func(b *box) {
				other := newServer(b.t, b.ca)
				other.set(func() { other.tokens = []string{"first"} })
				b.kubeconfig(other.URL, byToken)
				b.api = other
			}, func(*box) {}},
		{"inline data, other context", byPair, Kubeconfig,
			func(b *box) { b.kubeconfig(b.api.URL, byToken) },
			func(b *box) { b.api.set(func() { b.api.clients = nil }) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t)
			l := b.link(c.user)
			u := startUsers(t, l)
			u.hears(t, b.api, "before")
			c.turn(b)
			waitFor(t, "the new settings", func() bool { return l.used(c.thing) == 1 })
			u.more(t, 20)
			u.fine(t)
			c.old(b)
			u.more(t, 20)
			u.hears(t, b.api, "after")
			u.fine(t)
			if s := l.Status(); !s.Connected || s.Waiting != "" || s.ServerNotAfter.IsZero() {
				t.Errorf("status: %+v", s)
			}
		})
	}
}

// What is half-written, empty, expired or of no use replaces nothing. It is said, and gone when the file is good again.
func TestHalfWritten(t *testing.T) {
	b := newBox(t)
	l := b.link(byPair)
	u := startUsers(t, l)
	u.hears(t, b.api, "before")
	good := map[string][]byte{}
	for _, name := range []string{"tls.crt", "tls.key", "ca.crt", "kubeconfig"} {
		data, err := os.ReadFile(b.path(name))
		if err != nil {
			t.Fatal(err)
		}
		good[name] = data
	}
	otherCert, otherKey := b.people.client(t, "other")
	stranger, strangerKey := newAuthority(t).client(t, "stranger")
	old, oldKey := b.people.expired(t, "old")
	for name, files := range map[string]map[string][]byte{
		"new certificate, old key": {"tls.crt": otherCert},
		"old certificate, new key": {"tls.key": otherKey},
		"half a certificate":       {"tls.crt": otherCert[:len(otherCert)/2]},
		"empty certificate":        {"tls.crt": nil},
		"expired certificate":      {"tls.crt": old, "tls.key": oldKey},
		"refused certificate":      {"tls.crt": stranger, "tls.key": strangerKey},
		"empty authority":          {"ca.crt": nil},
		"half an authority":        {"ca.crt": b.ca.pem[:len(b.ca.pem)-20]},
		"empty kubeconfig":         {"kubeconfig": nil},
		"half a kubeconfig":        {"kubeconfig": good["kubeconfig"][:len(good["kubeconfig"])-90]},
		"nobody listens there":     {"kubeconfig": []byte(strings.ReplaceAll(string(good["kubeconfig"]), b.api.URL, "https://127.0.0.1:1"))},
	} {
		for file, data := range files {
			b.write(file, data)
		}
		waitFor(t, name+" to be noticed", func() bool { return l.Status().Waiting != "" })
		t.Logf("%s: %s", name, l.Status().Waiting)
		u.more(t, 10)
		u.hears(t, b.api, name)
		if s := l.Status(); !s.Connected {
			t.Errorf("%s: not connected: %v", name, s.LastError)
		}
		u.fine(t)
		for file := range files {
			b.write(file, good[file])
		}
		waitFor(t, "what was there before "+name, func() bool { return l.Status().Waiting == "" })
	}
	for _, r := range l.Status().Reloads {
		if r.Used != 0 {
			t.Errorf("%s was taken up %d times", r.Thing, r.Used)
		}
	}
}

// An authority that was taken out of the file is not trusted by new connections, even when nothing works without it.
func TestTrustEnds(t *testing.T) {
	b := newBox(t)
	l := b.link(byToken)
	u := startUsers(t, l)
	u.more(t, 10)
	b.write("ca.crt", newAuthority(t).pem)
	waitFor(t, "the doubt about the new authority", func() bool { return l.Status().Waiting != "" })
	u.fine(t) // over the connection that there is
	l.wire().conns.CloseAll()
	waitFor(t, "the refusal", func() bool { s := l.Status(); return !s.Connected && s.Errors[Untrusted] > 0 })
	b.write("ca.crt", b.ca.pem)
	waitFor(t, "the API", func() bool { return l.Status().Connected })
}

// When a server does not answer, whatever that looks like, another is asked.
func TestFailover(t *testing.T) {
	for name, harm := range map[string]func(*apiServer, *between){
		"gone":          func(_ *apiServer, b *between) { b.Close(); b.cut() },
		"dark":          func(_ *apiServer, b *between) { b.darken(true) },
		"not ready":     func(s *apiServer, _ *between) { s.set(func() { s.readyz = 500 }) },
		"other clients": func(s *apiServer, _ *between) { s.set(func() { s.tokens = nil }) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			way := newBetween(t, b.api.Listener.Addr().String())
			second := newServer(t, b.ca)
			second.set(func() { second.tokens = []string{"first"} })
			b.kubeconfig("https://"+way.Addr().String(), byToken)
			l := b.start(quick, second.URL)
			u := startUsers(t, l)
			u.hears(t, b.api, "before")
			harm(b.api, way)
			u.hears(t, second, "after")
			if s := l.Status(); s.Server != second.URL || s.Failovers == 0 || !s.Connected || len(s.Servers) != 2 {
				t.Errorf("status: %+v", s)
			}
		})
	}
}

// A server that comes back, after whatever it was, is asked again at once, and those who wait are woken.
func TestComesBack(t *testing.T) {
	for name, harm := range map[string]func(*apiServer, *between, bool){
		"dark": func(_ *apiServer, b *between, on bool) { b.darken(on) },
		"refuses": func(s *apiServer, _ *between, on bool) {
			s.set(func() { s.tokens = map[bool][]string{false: {"first"}}[on] })
		},
		"unready": func(s *apiServer, _ *between, on bool) { s.set(func() { s.readyz = map[bool]int{true: 500}[on] }) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			way := newBetween(t, b.api.Listener.Addr().String())
			b.kubeconfig("https://"+way.Addr().String(), byToken)
			l := b.start(quick)
			woken := make(chan struct{}, 100)
			l.OnBack(func() { woken <- struct{}{} })
			u := startUsers(t, l)
			u.hears(t, b.api, "before")
			harm(b.api, way, true)
			waitFor(t, "the trouble", func() bool { s := l.Status(); return !s.Connected || s.NotReady != "" })
			t.Logf("%+v", l.Status())
			harm(b.api, way, false)
			waitFor(t, "the end of it", func() bool { s := l.Status(); return s.Connected && s.NotReady == "" })
			<-woken
			u.hears(t, b.api, "after")
		})
	}
}

// A watch that says nothing for long is opened again, though nothing else is wrong.
func TestSilentWatch(t *testing.T) {
	b := newBox(t)
	b.kubeconfig(b.api.URL, byToken)
	t2 := quick
	t2.silent = 200 * time.Millisecond
	l := b.start(t2)
	u := startUsers(t, l)
	waitFor(t, "several watches", func() bool { var n int; u.set(func() { n = u.opened }); return n >= 4 })
	u.fine(t)
	if s := l.Status(); s.Errors[Silent] < 2 || !s.Connected {
		t.Errorf("status: %+v", s)
	}
}

// A server that closes its connections gracefully (GOAWAY) breaks nothing.
func TestGoAway(t *testing.T) {
	b := newBox(t)
	l := b.link(byToken)
	u := startUsers(t, l)
	u.hears(t, b.api, "before")
	b.api.set(func() { b.api.goAway = true })
	u.more(t, 50)
	u.hears(t, b.api, "after")
	u.fine(t)
}

// The Service of the API does not work, and only the API could say why: its endpoints are asked directly, the ones that
// were known last, by the certificate of the Service.
func TestOwnService(t *testing.T) {
	b := newBox(t)
	pair := b.ca.server(t, "127.0.0.9")
	b.api.set(func() { b.api.cert = pair })
	b.kubeconfig("https://127.0.0.9:443", byToken) // nobody listens
	l, err := newLink(Connection{Kubeconfig: b.path("kubeconfig")}, quick)
	if err != nil {
		t.Fatal(err)
	}
	ask := func() error {
		resp, err := (&http.Client{Transport: l}).Get(l.Config().Host + "/api/v1/services")
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if ask() == nil {
		t.Fatal("answered by nobody")
	}
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	l.Learn([]string{"127.0.0.9:443"}, []string{b.api.Listener.Addr().String()})
	l.Learn(nil, []string{dead.Addr().String()})
	l.Learn(nil, nil)
	if err := ask(); err != nil {
		t.Error(err)
	}
	l.wire().cut(errEnded)
}

// A plugin of the kubeconfig gives the token, and is asked again when it is refused.
func TestExecPlugin(t *testing.T) {
	b := newBox(t)
	credential := func(token string) {
		b.write("credential.json", fmt.Appendf(nil, `{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": %q}}`, token))
	}
	credential("first")
	user := fmt.Sprintf("exec: {apiVersion: client.authentication.k8s.io/v1, command: cat, args: [%s], interactiveMode: Never}", b.path("credential.json"))
	l := b.link(user)
	u := startUsers(t, l)
	u.hears(t, b.api, "before")
	u.fine(t)
	credential("second")
	b.api.set(func() { b.api.tokens = []string{"second"} })
	waitFor(t, "the refusal", func() bool { return l.Status().Errors[Unauthorized] > 0 })
	waitFor(t, "the API", func() bool { return l.Status().Connected })
	u.hears(t, b.api, "after")
}

// The kubeconfig is told to go through a proxy, and the proxy is used.
func TestProxy(t *testing.T) {
	b := newBox(t)
	l := b.link(byToken)
	u := startUsers(t, l)
	u.hears(t, b.api, "before")
	var through atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		through.Add(1)
		out, err := net.Dial("tcp", r.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		in, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		go func() { io.Copy(out, in); out.Close() }()
		io.Copy(in, out)
		in.Close()
	}))
	t.Cleanup(proxy.Close)
	text, err := os.ReadFile(b.path("kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	b.write("kubeconfig", []byte(strings.Replace(string(text), "cluster: {", "cluster: {proxy-url: "+proxy.URL+", ", 1)))
	waitFor(t, "the proxy to be used", func() bool { return l.used(Kubeconfig) == 1 })
	u.hears(t, b.api, "after")
	u.fine(t)
	if through.Load() == 0 {
		t.Error("nothing went through the proxy")
	}
	l.wire().cut(errEnded)
}

// While the API is away, it is asked at the pace that is set: a failure is no reason to ask sooner.
func TestKnocksCalmly(t *testing.T) {
	b := newBox(t)
	b.kubeconfig(b.api.URL, byToken)
	calm := quick
	calm.knock, calm.knockMost = 500*time.Millisecond, 500*time.Millisecond
	l := b.start(calm)
	b.api.Listener.Close()
	b.api.CloseClientConnections()
	waitFor(t, "the trouble", func() bool { return !l.Status().Connected })
	before := l.Status().Errors[Refused]
	time.Sleep(1500 * time.Millisecond)
	if n := l.Status().Errors[Refused] - before; n < 1 || n > 5 {
		t.Errorf("asked %d times", n)
	}
}

// A server that is overloaded is not asked how it is for each refusal.
func TestOverloaded(t *testing.T) {
	b := newBox(t)
	b.kubeconfig(b.api.URL, byToken)
	calm := quick
	calm.pulse = time.Minute
	l := b.start(calm)
	b.api.set(func() { b.api.code = http.StatusTooManyRequests })
	before := b.api.count(readyz)
	for range 50 {
		resp, err := (&http.Client{Transport: l}).Get(l.Config().Host + "/api/v1/services?watch=1")
		if err != nil || resp.StatusCode != http.StatusTooManyRequests {
			t.Fatal(resp, err)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	if n := b.api.count(readyz) - before; n > 1 {
		t.Errorf("asked how it is %d times", n)
	}
	if n := l.Status().Errors[Overloaded]; n != 50 {
		t.Errorf("%d refusals were counted", n)
	}
}

// A file that is written slowly is tried again and again; what was tried before is let go of.
func TestSlowWriter(t *testing.T) {
	b := newBox(t)
	l := b.link(byToken)
	u := startUsers(t, l)
	f, err := os.OpenFile(b.path("token"), os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, c := range "second-that-is-long" {
		f.WriteString(string(c))
		time.Sleep(100 * time.Millisecond)
	}
	b.api.set(func() { b.api.tokens = []string{"first", "second-that-is-long"} })
	waitFor(t, "the new token", func() bool { return l.used(Token) == 1 })
	u.fine(t)
	waitFor(t, "the others to go", func() bool {
		var n int
		b.api.set(func() { n = len(b.api.open) })
		return n <= 2
	})
}

// A kubeconfig that leads to another cluster is taken up, and what was heard of the first is no base to go on from. One that
// leads to another server of the same is.
func TestMoved(t *testing.T) {
	b := newBox(t)
	b.api.set(func() { b.api.cluster = "one" })
	l := b.link(byToken)
	moved := make(chan struct{}, 10)
	l.OnMoved(func() { moved <- struct{}{} })
	waitFor(t, "an introduction", func() bool { return b.api.count("/api/v1/namespaces/default/services") > 0 })
	for i, cluster := range []string{"one", "two"} {
		other := newServer(t, b.ca)
		other.set(func() { other.tokens, other.cluster = []string{"first"}, cluster })
		b.kubeconfig(other.URL, byToken)
		waitFor(t, "the other server", func() bool { return l.used(Kubeconfig) == uint64(i+1) })
		if n := len(moved); n != i {
			t.Errorf("cluster %s: %d calls", cluster, n)
		}
	}
}

// Who logs in with a URL is not printed, whatever is wrong with it.
func TestNoPasswords(t *testing.T) {
	b := newBox(t)
	for _, url := range []string{"https://joe:SECRET@127.0.0.1:bad", "https://joe:SECRET@127.0.0.1/%zz", "https://joe:SEC/SECRET@127.0.0.1:bad", "ftp://joe:SECRET@127.0.0.1"} {
		b.kubeconfig(url, byToken)
		_, err := New(Connection{Kubeconfig: b.path("kubeconfig")})
		if err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("%s: %v", url, err)
		}
		b.write("kubeconfig", fmt.Appendf(nil, "{current-context: c, clusters: [{name: c, cluster: {server: 'https://127.0.0.1', proxy-url: '%s'}}], contexts: [{name: c, context: {cluster: c}}]}", url))
		if _, err := New(Connection{Kubeconfig: b.path("kubeconfig")}); err != nil && strings.Contains(err.Error(), "SECRET") {
			t.Errorf("proxy %s: %v", url, err)
		}
	}
}

// However a watch ends, it ends like one that the server closes, and not so soon that the reflector takes it for an error:
// both would cost a list.
func TestWatchEnds(t *testing.T) {
	for name, end := range map[string]func(*Link, *between){
		"settings replaced": func(l *Link, _ *between) { l.wire().retire() },
		"connection lost":   func(_ *Link, b *between) { b.cut() },
		"no packets":        func(_ *Link, b *between) { b.darken(true) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			way := newBetween(t, b.api.Listener.Addr().String())
			b.kubeconfig("https://"+way.Addr().String(), byToken)
			patient := quick
			patient.short = usual.short
			l := b.start(patient)
			resp, err := (&http.Client{Transport: l}).Get(l.Config().Host + "/api/v1/services?watch=1")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			opened := time.Now()
			end(l, way)
			if said, err := io.ReadAll(resp.Body); err != nil { // ReadAll takes io.EOF for no error
				t.Errorf("%q, %v", said, err)
			}
			if lived := time.Since(opened); lived < time.Second {
				t.Errorf("it ended after %s", lived)
			}
			way.darken(false)
		})
	}
}

// A server that had not to be verified, and must be now, is asked over no new connection when it can't be.
func TestVerificationBegins(t *testing.T) {
	b := newBox(t)
	config := func(tls string) {
		b.write("kubeconfig", fmt.Appendf(nil, "{current-context: c, clusters: [{name: c, cluster: {server: %q, %s}}], users: [{name: u, user: {tokenFile: token}}], contexts: [{name: c, context: {cluster: c, user: u}}]}", b.api.URL, tls))
	}
	config("insecure-skip-tls-verify: true")
	l := b.start(quick)
	b.write("other.crt", newAuthority(t).pem)
	config("certificate-authority: other.crt")
	waitFor(t, "the doubt", func() bool { return l.Status().Waiting != "" })
	l.wire().conns.CloseAll()
	waitFor(t, "the refusal", func() bool { s := l.Status(); return !s.Connected && s.Errors[Untrusted] > 0 })
	config("certificate-authority: ca.crt")
	waitFor(t, "the API", func() bool { return l.Status().Connected })
}

// Credentials that are refused, old and new, are not tried all the time.
func TestRefusedCalmly(t *testing.T) {
	b := newBox(t)
	b.kubeconfig(b.api.URL, byToken)
	calm := quick
	calm.knock, calm.knockMost, calm.badMost = 500*time.Millisecond, 500*time.Millisecond, 500*time.Millisecond
	l := b.start(calm)
	u := startUsers(t, l) // asks hundreds of times a second
	b.api.set(func() { b.api.tokens = nil })
	b.write("token", []byte("also-refused"))
	waitFor(t, "the refusal", func() bool { return l.Status().Waiting != "" })
	before := b.api.count("/api/v1/namespaces/default/services")
	u.more(t, 100)
	time.Sleep(time.Second)
	if n := b.api.count("/api/v1/namespaces/default/services") - before; n < 1 || n > 8 {
		t.Errorf("the new ones were tried %d times", n)
	}
}
