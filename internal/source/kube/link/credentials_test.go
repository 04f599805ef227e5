package link

import (
	"bytes"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// papers is a folder with good credentials, and the kubeconfigs that name them.
type papers struct {
	dir       string
	ca        *authority
	cert, key []byte
	token     string
}

const papersUser = "client-certificate: tls.crt, client-key: tls.key, tokenFile: token"

func newPapers(t testing.TB) *papers {
	p := &papers{dir: t.TempDir(), ca: newAuthority(t), token: jwt(fmt.Sprintf(`{"exp":%d}`, time.Now().Add(time.Hour).Unix()))}
	p.cert, p.key = p.ca.client(t, "me")
	p.put(t, "ca.crt", p.ca.pem)
	p.put(t, "tls.crt", p.cert)
	p.put(t, "tls.key", p.key)
	p.put(t, "token", []byte(p.token+"\n"))
	p.config(t, "server: 'https://192.0.2.1:6443', certificate-authority: ca.crt", papersUser)
	return p
}

func (p *papers) path(name string) string { return filepath.Join(p.dir, name) }

func (p *papers) put(t testing.TB, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(p.path(name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (p *papers) config(t testing.TB, cluster, user string) {
	t.Helper()
	p.put(t, "kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: c
clusters: [{name: k, cluster: {%s}}]
users: [{name: u, user: {%s}}]
contexts: [{name: c, context: {cluster: k, user: u}}]
`, cluster, user))
}

func (p *papers) connection() Connection { return Connection{Kubeconfig: p.path("kubeconfig")} }

func (p *papers) read(t testing.TB) *settings {
	t.Helper()
	s, err := p.connection().read()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// inline has all in the kubeconfig itself.
func (p *papers) inline(t testing.TB) {
	enc := base64.StdEncoding.EncodeToString
	p.config(t, "server: 'https://192.0.2.1:6443', certificate-authority-data: "+enc(p.ca.pem),
		"client-certificate-data: "+enc(p.cert)+", client-key-data: "+enc(p.key)+", token: "+p.token)
}

func TestReadFiles(t *testing.T) {
	p := newPapers(t)
	s := p.read(t)
	c := s.rest
	if c.CAFile+c.CertFile+c.KeyFile+c.BearerTokenFile != "" {
		t.Errorf("files are named: %q %q %q %q", c.CAFile, c.CertFile, c.KeyFile, c.BearerTokenFile)
	}
	if !bytes.Equal(c.CAData, p.ca.pem) || !bytes.Equal(c.CertData, p.cert) || !bytes.Equal(c.KeyData, p.key) || c.BearerToken != p.token {
		t.Errorf("not what the files say: %+v", c)
	}
	want := []string{p.path("kubeconfig"), p.path("ca.crt"), p.path("tls.crt"), p.path("tls.key"), p.path("token")}
	if !slices.Equal(s.files, want) {
		t.Errorf("files %q, want %q", s.files, want)
	}
	for _, thing := range Things {
		if s.sum(thing) == none {
			t.Errorf("no sum of %s", thing)
		}
	}
	if !s.clientNotAfter.Equal(s.client.Leaf.NotAfter) || time.Until(s.clientNotAfter) > time.Hour || time.Until(s.tokenNotAfter) > time.Hour || time.Until(s.tokenNotAfter) < 50*time.Minute {
		t.Errorf("valid until %v and %v", s.clientNotAfter, s.tokenNotAfter)
	}
	if err := s.invalidNow(time.Now()); err != nil {
		t.Error(err)
	}
	if !s.roots.Equal(p.ca.pool()) || s.inCluster || s.insecure || s.anonymous {
		t.Errorf("%+v", s)
	}
	if c.ContentType != "application/vnd.kubernetes.protobuf" || !c.DisableCompression {
		t.Errorf("not dressed: %+v", c)
	}
}

// Inline, it is the same but for the file that said it.
func TestReadInline(t *testing.T) {
	p := newPapers(t)
	files := p.read(t)
	p.inline(t)
	s := p.read(t)
	for _, thing := range []Thing{ClientCertificate, Token, CA} {
		if s.sum(thing) != files.sum(thing) {
			t.Errorf("%s is another", thing)
		}
	}
	if s.sum(Kubeconfig) == files.sum(Kubeconfig) || s.same(files) || !s.same(p.read(t)) {
		t.Error("the sums don't tell what differs")
	}
	if want := []string{p.path("kubeconfig")}; !slices.Equal(s.files, want) {
		t.Errorf("files %q, want %q", s.files, want)
	}
}

// A change is told of the thing that it is of.
func TestSums(t *testing.T) {
	p := newPapers(t)
	for _, tc := range []struct {
		thing  Thing
		change func()
	}{
		{ClientCertificate, func() {
			p.cert, p.key = p.ca.client(t, "me")
			p.put(t, "tls.crt", p.cert)
			p.put(t, "tls.key", p.key)
		}},
		{Token, func() { p.put(t, "token", []byte("other")) }},
		{CA, func() { p.put(t, "ca.crt", append(p.ca.pem, newAuthority(t).pem...)) }},
		{Kubeconfig, func() {
			p.config(t, "server: 'https://192.0.2.2', certificate-authority: ca.crt", papersUser)
		}},
	} {
		before := p.read(t)
		tc.change()
		after := p.read(t)
		for _, thing := range Things {
			if changed := before.sum(thing) != after.sum(thing); changed != (thing == tc.thing) {
				t.Errorf("%s changed: %s says %v", tc.thing, thing, changed)
			}
		}
	}
}

// What is in the kubeconfig beside files stays as client-go reads it.
func TestReadKept(t *testing.T) {
	p := newPapers(t)
	p.config(t, "server: 'https://192.0.2.1/prefix', tls-server-name: api, insecure-skip-tls-verify: true, proxy-url: 'socks5://192.0.2.7:1080'",
		"username: me, password: w, as: other, as-groups: [g], as-uid: '7'")
	s := p.read(t)
	c := s.rest
	if c.ServerName != "api" || !c.Insecure || !s.insecure || c.Username != "me" || c.Password != "w" || s.anonymous {
		t.Errorf("%+v", c)
	}
	if c.Impersonate.UserName != "other" || c.Impersonate.UID != "7" || !slices.Equal(c.Impersonate.Groups, []string{"g"}) {
		t.Errorf("%+v", c.Impersonate)
	}
	if u, err := c.Proxy(new(http.Request)); err != nil || u.String() != "socks5://192.0.2.7:1080" {
		t.Errorf("proxy %v, %v", u, err)
	}
	if s.servers[0].Path != "/prefix" || s.client != nil || s.roots != nil || s.sum(Token) != none || s.sum(CA) != none || s.sum(ClientCertificate) != none {
		t.Errorf("%+v", s)
	}
	p.config(t, "server: 'https://192.0.2.1'", "exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin, interactiveMode: Never}")
	s = p.read(t)
	if s.rest.ExecProvider == nil || s.rest.ExecProvider.Command != p.path("plugin") || s.anonymous {
		t.Errorf("%+v", s.rest)
	}
	p.config(t, "server: 'https://192.0.2.1'", "")
	if s = p.read(t); !s.anonymous {
		t.Errorf("not anonymous: %+v", s.rest)
	}
}

// Of two tokens, the file's is taken.
func TestTokenFileWins(t *testing.T) {
	p := newPapers(t)
	p.config(t, "server: 'https://192.0.2.1'", "token: inline, tokenFile: token")
	p.put(t, "token", []byte(" the.file \n"))
	if s := p.read(t); s.rest.BearerToken != "the.file" || s.rest.BearerTokenFile != "" {
		t.Errorf("token %q", s.rest.BearerToken)
	}
}

// A key alone is for nothing, as in client-go; and so is all of it where nothing is encrypted.
func TestReadUnused(t *testing.T) {
	p := newPapers(t)
	p.config(t, "server: 'https://192.0.2.1'", "client-key: tls.key")
	if s := p.read(t); s.client != nil || s.rest.KeyFile != "" || s.rest.KeyData != nil {
		t.Errorf("%+v", s.rest)
	}
	p.config(t, "server: 'http://192.0.2.1'", papersUser)
	if s := p.read(t); s.client != nil || s.rest.BearerToken != "" {
		t.Errorf("%+v", s.rest)
	}
}

// One file may hold certificate and key, as the kubelet's own does, after any words.
func TestOneFile(t *testing.T) {
	p := newPapers(t)
	p.put(t, "both.pem", slices.Concat([]byte("Certificate:\n    Data:\n"), p.cert, p.key))
	p.config(t, "server: 'https://192.0.2.1'", "client-certificate: both.pem, client-key: both.pem")
	if s := p.read(t); s.client == nil {
		t.Errorf("%+v", s.rest)
	}
}

// Each malformed kind is an error of one line, which names the file, and the thing.
func TestMalformed(t *testing.T) {
	noCert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("no certificate")})
	half := func(b []byte) []byte { return b[:len(b)/2] }
	lines := func(b []byte, n int) []byte {
		return bytes.Join(slices.Collect(bytes.Lines(b))[:n], nil)
	}
	put := func(name string, data func(*papers) []byte) func(*testing.T, *papers) {
		return func(t *testing.T, p *papers) { p.put(t, name, data(p)) }
	}
	text := func(s string) func(*papers) []byte { return func(*papers) []byte { return []byte(s) } }
	gone := func(name string) func(*testing.T, *papers) {
		return func(t *testing.T, p *papers) { os.Remove(p.path(name)) }
	}
	cluster := "server: 'https://192.0.2.1', certificate-authority: ca.crt"
	for name, tc := range map[string]struct {
		file  string
		thing Thing
		want  string
		do    func(*testing.T, *papers)
	}{
		"certificate missing":       {"tls.crt", ClientCertificate, "no such file", gone("tls.crt")},
		"certificate empty":         {"tls.crt", ClientCertificate, "empty", put("tls.crt", text(""))},
		"certificate blank":         {"tls.crt", ClientCertificate, "empty", put("tls.crt", text("\n \n"))},
		"certificate is no PEM":     {"tls.crt", ClientCertificate, "no PEM block", put("tls.crt", text("hello"))},
		"certificate half":          {"tls.crt", ClientCertificate, "cut off", put("tls.crt", func(p *papers) []byte { return half(p.cert) })},
		"certificate without end":   {"tls.crt", ClientCertificate, "cut off", put("tls.crt", func(p *papers) []byte { return p.cert[:len(p.cert)-2] })},
		"second certificate half":   {"tls.crt", ClientCertificate, "1 of its 2", put("tls.crt", func(p *papers) []byte { return slices.Concat(p.cert, half(p.ca.pem)) })},
		"second certificate begun":  {"tls.crt", ClientCertificate, "1 of its 2", put("tls.crt", func(p *papers) []byte { return slices.Concat(p.cert, []byte("-----BEG")) })},
		"half before a whole":       {"tls.crt", ClientCertificate, "1 of its 2", put("tls.crt", func(p *papers) []byte { return slices.Concat(lines(p.ca.pem, 3), p.cert) })},
		"certificate is none":       {"tls.crt", ClientCertificate, "", put("tls.crt", func(*papers) []byte { return noCert })},
		"certificate is the key":    {"tls.crt", ClientCertificate, "", put("tls.crt", func(p *papers) []byte { return p.key })},
		"certificate of other key":  {"tls.crt", ClientCertificate, "does not match", func(t *testing.T, p *papers) { c, _ := p.ca.client(t, "me"); p.put(t, "tls.crt", c) }},
		"certificate is a folder":   {"tls.crt", ClientCertificate, "is a directory", func(t *testing.T, p *papers) { os.Remove(p.path("tls.crt")); os.Mkdir(p.path("tls.crt"), 0o700) }},
		"certificate is a pipe":     {"tls.crt", ClientCertificate, "no regular file", func(t *testing.T, p *papers) { os.Remove(p.path("tls.crt")); syscall.Mkfifo(p.path("tls.crt"), 0o600) }},
		"certificate links to none": {"tls.crt", ClientCertificate, "no such file", func(t *testing.T, p *papers) { os.Remove(p.path("tls.crt")); os.Symlink("none", p.path("tls.crt")) }},
		"certificate links in ring": {"tls.crt", ClientCertificate, "too many", func(t *testing.T, p *papers) { os.Remove(p.path("tls.crt")); os.Symlink("tls.crt", p.path("tls.crt")) }},
		"key missing":               {"tls.key", ClientCertificate, "no such file", gone("tls.key")},
		"key empty":                 {"tls.key", ClientCertificate, "empty", put("tls.key", text(""))},
		"key half":                  {"tls.key", ClientCertificate, "cut off", put("tls.key", func(p *papers) []byte { return half(p.key) })},
		"key is none":               {"tls.key", ClientCertificate, "", put("tls.key", func(p *papers) []byte { return p.cert })},
		"token missing":             {"token", Token, "no such file", gone("token")},
		"token empty":               {"token", Token, "empty", put("token", text(""))},
		"token blank":               {"token", Token, "empty", put("token", text(" \n"))},
		"token of two lines":        {"token", Token, "character 4", put("token", text("abc\nabc"))},
		"CA missing":                {"ca.crt", CA, "no such file", gone("ca.crt")},
		"CA empty":                  {"ca.crt", CA, "empty", put("ca.crt", text(""))},
		"CA half":                   {"ca.crt", CA, "cut off", put("ca.crt", func(p *papers) []byte { return half(p.ca.pem) })},
		"CA bundle half":            {"ca.crt", CA, "1 of its 2", put("ca.crt", func(p *papers) []byte { return slices.Concat(p.ca.pem, half(p.cert)) })},
		"CA without a certificate":  {"ca.crt", CA, "no certificate", put("ca.crt", func(p *papers) []byte { return p.key })},
		"CA is none":                {"ca.crt", CA, "no certificate", put("ca.crt", func(*papers) []byte { return noCert })},
		"CA too large": {"ca.crt", CA, "larger than", func(t *testing.T, p *papers) {
			if err := os.Truncate(p.path("ca.crt"), 1<<40); err != nil {
				t.Fatal(err)
			}
		}},
		"CA and insecure": {"kubeconfig", CA, "contradict", func(t *testing.T, p *papers) {
			p.config(t, cluster+", insecure-skip-tls-verify: true", papersUser)
		}},
		"kubeconfig missing":  {"kubeconfig", Kubeconfig, "no such file", gone("kubeconfig")},
		"kubeconfig empty":    {"kubeconfig", Kubeconfig, "names no cluster", put("kubeconfig", text(""))},
		"kubeconfig is none":  {"kubeconfig", Kubeconfig, "", put("kubeconfig", text("hello"))},
		"kubeconfig of other": {"kubeconfig", Kubeconfig, "", put("kubeconfig", text("apiVersion: v1\nkind: Pod\n"))},
		"no certificate's key": {"kubeconfig", Kubeconfig, "client-key", func(t *testing.T, p *papers) {
			p.config(t, cluster, "client-certificate: tls.crt")
		}},
		"both CAs": {"kubeconfig", Kubeconfig, "both specified", func(t *testing.T, p *papers) {
			p.config(t, cluster+", certificate-authority-data: eA==", papersUser)
		}},
		"bad base64": {"kubeconfig", Kubeconfig, "base64", func(t *testing.T, p *papers) {
			p.config(t, "server: 'https://192.0.2.1', certificate-authority-data: '***'", papersUser)
		}},
		"bad server": {"kubeconfig", Kubeconfig, "address of the Kubernetes API", func(t *testing.T, p *papers) {
			p.config(t, "server: 'https://192.0.2.1:x'", papersUser)
		}},
		"bad proxy": {"kubeconfig", Kubeconfig, "proxy-url", func(t *testing.T, p *papers) {
			p.config(t, cluster+", proxy-url: 'gopher://a'", papersUser)
		}},
		"inline CA": {"kubeconfig", CA, "no PEM block", func(t *testing.T, p *papers) {
			p.config(t, "server: 'https://192.0.2.1', certificate-authority-data: eA==", papersUser)
		}},
		"inline certificate": {"kubeconfig", ClientCertificate, "client-certificate-data", func(t *testing.T, p *papers) {
			p.config(t, cluster, "client-certificate-data: eA==, client-key: tls.key")
		}},
		"inline token": {"kubeconfig", Token, "character 2", func(t *testing.T, p *papers) {
			p.config(t, cluster, `token: "a\nb"`)
		}},
		"user is null": {"kubeconfig", Kubeconfig, `"u"`, put("kubeconfig", text("current-context: c\nclusters: [{name: k, cluster: {server: 'https://192.0.2.1'}}]\ncontexts: [{name: c, context: {cluster: k, user: u}}]\nusers:\n"))},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPapers(t)
			tc.do(t, p)
			s, err := p.connection().read()
			if err == nil {
				t.Fatalf("no error: %+v", s.rest)
			}
			t.Log(err)
			if line := err.Error(); !strings.Contains(line, p.path(tc.file)) || !strings.Contains(line, tc.want) || strings.ContainsAny(line, "\r\n") {
				t.Errorf("%q does not say %q and %q in a line", line, p.path(tc.file), tc.want)
			}
			if got := thingOf(err); got != tc.thing {
				t.Errorf("it is said of %q, want %q", got, tc.thing)
			}
			if files := filesOf(err); !slices.Contains(files, p.path(tc.file)) {
				t.Errorf("%s is not watched for a remedy, only %q", tc.file, files)
			}
		})
	}
}

// A kubeconfig that is written in steps, is at no step taken for one that says less.
func TestKubeconfigCutAnywhere(t *testing.T) {
	p := newPapers(t)
	enc := base64.StdEncoding.EncodeToString
	whole := fmt.Appendf(nil, `apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: %s
    server: https://192.0.2.1:6443
  name: k
contexts:
- context:
    cluster: k
    user: u
  name: c
current-context: c
kind: Config
users:
- name: u
  user:
    client-certificate-data: %s
    client-key-data: %s
`, enc(p.ca.pem), enc(p.cert), enc(p.key))
	for _, master := range []string{"", "https://192.0.2.1:6443"} {
		for n := range bytes.TrimSpace(whole) {
			p.put(t, "kubeconfig", whole[:n])
			c := p.connection()
			c.Master = master
			if s, err := c.read(); err == nil && s.invalidNow(time.Now()) == nil && !bytes.Equal(bytes.TrimSpace(s.rest.KeyData), bytes.TrimSpace(p.key)) {
				t.Fatalf("the first %d of %d bytes are taken: %+v", n, len(whole), s.rest)
			}
		}
	}
}

func TestMasterNeedsWholeKubeconfig(t *testing.T) {
	p := newPapers(t)
	p.put(t, "kubeconfig", nil)
	_, err := Connection{Kubeconfig: p.path("kubeconfig"), Master: "https://192.0.2.1"}.read()
	if err == nil || !strings.Contains(err.Error(), p.path("kubeconfig")) || thingOf(err) != Kubeconfig {
		t.Errorf("with an empty kubeconfig: %v", err)
	}
	s, err := Connection{Master: "https://192.0.2.1"}.read()
	if err != nil || !s.anonymous || s.sum(Kubeconfig) != none || len(s.files) != 0 {
		t.Errorf("without: %+v, %v", s, err)
	}
}

func TestInvalidNow(t *testing.T) {
	p := newPapers(t)
	now := time.Now()
	old := newAuthorityUntil(t, now.Add(-time.Hour))
	for name, tc := range map[string]struct {
		file  string
		thing Thing // empty is valid
		want  string
		do    func()
	}{
		"good": {do: func() {}},
		"certificate expired": {"tls.crt", ClientCertificate, "expired since ", func() {
			c, k := p.ca.expired(t, "me")
			p.put(t, "tls.crt", c)
			p.put(t, "tls.key", k)
		}},
		"certificate of tomorrow": {"tls.crt", ClientCertificate, "not valid until ", func() {
			c, k := p.ca.issue(t, "me", now.Add(time.Hour), now.Add(2*time.Hour))
			p.put(t, "tls.crt", c)
			p.put(t, "tls.key", k)
		}},
		"token expired":        {"token", Token, "expired since 2001-09-09T01:46:40Z", func() { p.put(t, "token", []byte(jwt(`{"exp":1000000000}`))) }},
		"CA expired":           {"ca.crt", CA, "expired since ", func() { p.put(t, "ca.crt", old.pem) }},
		"nobody":               {"kubeconfig", Kubeconfig, "no credentials", func() { p.config(t, "server: 'https://192.0.2.1'", "") }},
		"nobody by http":       {do: func() { p.config(t, "server: 'http://192.0.2.1'", papersUser) }},
		"one of two CAs":       {do: func() { p.put(t, "ca.crt", slices.Concat(old.pem, p.ca.pem)) }},
		"inline CA expired":    {"kubeconfig", CA, "expired since ", func() { p.ca = old; p.inline(t) }},
		"token says no expiry": {do: func() { p.put(t, "token", []byte(jwt(`{}`))) }},
	} {
		t.Run(name, func(t *testing.T) {
			p = newPapers(t)
			tc.do()
			err := p.read(t).invalidNow(now)
			if tc.thing == "" {
				if err != nil {
					t.Errorf("it is valid, and said not to be: %v", err)
				}
				return
			}
			if err == nil || thingOf(err) != tc.thing || !strings.Contains(err.Error(), p.path(tc.file)) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, of %q; want %q and %q, of %q", err, thingOf(err), p.path(tc.file), tc.want, tc.thing)
			}
		})
	}
}

func TestExpiry(t *testing.T) {
	at := time.Unix(1700000000, 0)
	for token, want := range map[string]time.Time{
		jwt(`{"exp":1700000000}`):          at,
		jwt(`{"exp":1700000000.9}`):        at,
		jwt(`{"exp":1.7e9,"aud":["api"]}`): at,
		jwt(`{"exp":0}`):                   time.Unix(0, 0),
		jwt(`{"exp":-1}`):                  {},
		jwt(`{"exp":1e300}`):               {},
		jwt(`{"exp":"1700000000"}`):        {},
		jwt(`{"exp":null}`):                {},
		jwt(`{}`):                          {},
		jwt(`[]`):                          {},
		jwt(`{"exp":1700000000`):           {},
		"a.***.c":                          {},
		"a.b":                              {},
		"..":                               {},
		"":                                 {},
		"opaque":                           {},
		jwt(`{"exp":1700000000}`) + ".d":   {},
		strings.Replace(jwt(`{"exp":1700000000}`), ".", ".=", 1): {},
	} {
		if got := expiry(token); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", token, got, want)
		}
	}
}

// pod makes a service account, and moves there until the test ends.
func pod(t testing.TB) *papers {
	p := newPapers(t)
	was := serviceAccount
	serviceAccount = p.dir
	t.Cleanup(func() { serviceAccount = was })
	if t, ok := t.(*testing.T); ok {
		t.Setenv("KUBERNETES_SERVICE_HOST", "2001:db8::1")
		t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	}
	return p
}

func TestInCluster(t *testing.T) {
	p := pod(t)
	s, err := Connection{Servers: []string{"192.0.2.8"}}.read()
	if err != nil {
		t.Fatal(err)
	}
	if !s.inCluster || s.servers[0].String() != "https://[2001:db8::1]:443" || s.servers[1].String() != "https://192.0.2.8:6443" ||
		s.rest.BearerToken != p.token || !s.roots.Equal(p.ca.pool()) || s.sum(Kubeconfig) != none || s.sum(Token) == none || s.sum(CA) == none {
		t.Errorf("%+v", s)
	}
	if want := []string{p.path("token"), p.path("ca.crt")}; !slices.Equal(s.files, want) || !slices.Equal(Connection{}.paths(), want) {
		t.Errorf("files %q, want %q", s.files, want)
	}
	os.Remove(p.path("ca.crt"))
	if s, err = (Connection{}).read(); err != nil || s.roots != nil || s.sum(CA) != none || !slices.Contains(s.files, p.path("ca.crt")) {
		t.Errorf("without ca.crt: %+v, %v", s, err)
	}
	p.put(t, "ca.crt", []byte("x"))
	if _, err = (Connection{}).read(); err == nil || thingOf(err) != CA {
		t.Errorf("with a bad ca.crt: %v", err)
	}
	os.Remove(p.path("token"))
	if _, err = (Connection{}).read(); err == nil || thingOf(err) != Token || !errors.Is(err, fs.ErrNotExist) || !slices.Contains(filesOf(err), p.path("token")) {
		t.Errorf("without a token: %v", err)
	}
}

func TestInClusterRestConfig(t *testing.T) {
	p := pod(t)
	c, err := Connection{}.RestConfig()
	if err != nil || c.BearerTokenFile != p.path("token") || c.CAFile != p.path("ca.crt") || c.Host != "https://[2001:db8::1]:443" {
		t.Errorf("%+v, %v", c, err)
	}
}

// A pair that is swapped while it is read, by the kubelet, is read as a pair.
func TestReadWhileSwapped(t *testing.T) {
	p := newPapers(t)
	for _, gen := range []string{"a", "b"} {
		cert, key := p.ca.client(t, gen)
		if err := os.Mkdir(p.path(gen), 0o700); err != nil {
			t.Fatal(err)
		}
		p.put(t, gen+"/tls.crt", cert)
		p.put(t, gen+"/tls.key", key)
	}
	for _, name := range []string{"tls.crt", "tls.key"} {
		os.Remove(p.path(name))
		if err := os.Symlink("..data/"+name, p.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	swap(t, p.path("..data"), "a")
	for i, after := range []string{"tls.crt", "tls.key", "kubeconfig"} {
		swapped := false
		s, err := p.connection().readBy(func(path string) ([]byte, error) {
			data, err := readFile(path)
			if path == p.path(after) && !swapped {
				swapped = true
				swap(t, p.path("..data"), []string{"b", "a"}[i%2])
			}
			return data, err
		})
		if err != nil || !swapped {
			t.Errorf("swapped (%v) after %s: %v", swapped, after, err)
			continue
		}
		if now, _ := readFile(p.path("tls.crt")); !bytes.Equal(s.rest.CertData, now) {
			t.Errorf("swapped after %s: not the latest pair", after)
		}
	}
}

// A read that finds other files when it looks again, starts over.
func TestStale(t *testing.T) {
	p := newPapers(t)
	l := newLook(readFile)
	for _, name := range []string{"token", "none"} {
		l.file(p.path(name))
	}
	if l.stale() {
		t.Error("stale although nothing changed")
	}
	p.put(t, "none", nil)
	if !l.stale() {
		t.Error("a file that came is not noticed")
	}
	os.Remove(p.path("none"))
	p.put(t, "token", []byte("other"))
	if !l.stale() {
		t.Error("other content is not noticed")
	}
}

// swap points a link elsewhere as the kubelet does.
func swap(t testing.TB, link, to string) {
	tmp := link + "_tmp"
	if err := os.Symlink(to, tmp); err != nil {
		t.Error(err)
	}
	if err := os.Rename(tmp, link); err != nil {
		t.Error(err)
	}
}

// Whatever is in the files: no panic, an error is one line, and what is taken makes a client.
func FuzzRead(f *testing.F) {
	p := newPapers(f)
	kubeconfig, err := os.ReadFile(p.path("kubeconfig"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(kubeconfig, p.cert, p.key, p.ca.pem, []byte(p.token))
	f.Add([]byte("users: [{}]\nclusters: [{}]\ncontexts: [{}]\ncurrent-context: ''"), []byte("-----BEGIN "), []byte("-----"), p.key, []byte("..\n"))
	f.Add([]byte("{current-context: c, contexts: [{name: c, context: null}]}"), p.key, p.cert, p.cert, []byte{0})
	f.Fuzz(func(t *testing.T, kubeconfig, cert, key, ca, token []byte) {
		for _, named := range []string{"/dev", "/proc", "..", "exec"} { // only our own files are read, and nothing is run
			if bytes.Contains(kubeconfig, []byte(named)) {
				t.Skip("not objects that may be read")
			}
		}
		p := &papers{dir: t.TempDir()}
		for name, data := range map[string][]byte{"kubeconfig": kubeconfig, "tls.crt": cert, "tls.key": key, "ca.crt": ca, "token": token} {
			p.put(t, name, data)
		}
		s, err := p.connection().read()
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		_ = s.invalidNow(time.Now())
		if len(s.servers) == 0 || !s.same(s) {
			t.Errorf("%+v", s)
		}
		if _, err := rest.TLSConfigFor(s.rest); err != nil {
			t.Errorf("taken, and of no use: %v", err)
		}
	})
}
