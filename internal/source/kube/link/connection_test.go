package link

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const goodKubeconfig = `apiVersion: v1
kind: Config
current-context: c
clusters: [{name: k, cluster: {server: "https://192.0.2.1:6443", certificate-authority: ca.crt}}]
users: [{name: u, user: {tokenFile: token}}]
contexts: [{name: c, context: {cluster: k, user: u}}]
`

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.crt", "token"} {
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func TestRestConfig(t *testing.T) {
	path := write(t, goodKubeconfig)
	c, err := Connection{Kubeconfig: path, Burst: 7, QPS: 3}.RestConfig()
	if err != nil {
		t.Fatal(err)
	}
	if c.Host != "https://192.0.2.1:6443" || c.CAFile != filepath.Join(filepath.Dir(path), "ca.crt") || c.BearerTokenFile != filepath.Join(filepath.Dir(path), "token") {
		t.Errorf("host %q, CA %q, token %q", c.Host, c.CAFile, c.BearerTokenFile)
	}
	if c.ContentType != "application/vnd.kubernetes.protobuf" || c.AcceptContentTypes != "application/vnd.kubernetes.protobuf,application/json" || c.QPS != 3 || c.Burst != 7 {
		t.Errorf("content type %q, accept %q, qps %v, burst %d", c.ContentType, c.AcceptContentTypes, c.QPS, c.Burst)
	}
	c, err = Connection{Kubeconfig: path, Master: "https://192.0.2.9", ContentType: "application/json", AcceptContentTypes: "a/b"}.RestConfig()
	if err != nil || c.Host != "https://192.0.2.9" || c.ContentType != "application/json" || c.AcceptContentTypes != "a/b" {
		t.Errorf("with overrides: %v, %v", c, err)
	}
}

// Each mistake gets one line that says where it is.
func TestRestConfigMistakes(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBECONFIG", write(t, goodKubeconfig)) // never looked at
	for name, tc := range map[string]struct {
		c    Connection
		want []string
	}{
		"nothing":         {Connection{}, []string{"--kubeconfig", "--manifests"}},
		"missing":         {Connection{Kubeconfig: "/no/such/file"}, []string{"read kubeconfig", "/no/such/file", "no such file"}},
		"directory":       {Connection{Kubeconfig: t.TempDir()}, []string{"read kubeconfig", "is a directory"}},
		"not YAML":        {Connection{Kubeconfig: write(t, "a: b: c")}, []string{"read kubeconfig", "kubeconfig:", "mapping values"}},
		"two mistakes":    {Connection{Kubeconfig: write(t, "clusters: 1\nusers: 2\n")}, []string{"read kubeconfig", "kubeconfig:"}},
		"empty":           {Connection{Kubeconfig: write(t, "")}, []string{"read kubeconfig", "kubeconfig: it names no cluster"}},
		"no such user":    {Connection{Kubeconfig: write(t, strings.Replace(goodKubeconfig, "user: u", "user: other", 1))}, []string{"read kubeconfig", `"other"`}},
		"no such file":    {Connection{Kubeconfig: write(t, strings.Replace(goodKubeconfig, "ca.crt", "other.crt", 1))}, []string{"read kubeconfig", "other.crt", "no such file"}},
		"no such cluster": {Connection{Kubeconfig: write(t, strings.Replace(goodKubeconfig, "cluster: k,", "cluster: l,", 1))}, []string{"read kubeconfig", `"l"`}},
		"no context":      {Connection{Kubeconfig: write(t, strings.Replace(goodKubeconfig, "current-context: c", "current-context: d", 1))}, []string{"read kubeconfig", `"d"`}},
		"bad master":      {Connection{Master: "https://[::1"}, []string{"https://[::1"}},
		"no such socket":  {Connection{Master: "unix:///var/run/x"}, []string{"unix:"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tc.c.RestConfig()
			if err == nil {
				t.Fatal("no error")
			}
			t.Log(err)
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("more than a line: %q", err)
			}
		})
	}
}

func TestParseServer(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.1":                    "https://192.0.2.1:6443",
		"192.0.2.1:443":                "https://192.0.2.1:443",
		"api.example.":                 "https://api.example.:6443",
		"api_1.example:8443":           "https://api_1.example:8443",
		"2001:db8::1":                  "https://[2001:db8::1]:6443",
		"fe80::1%eth0":                 "https://[fe80::1%25eth0]:6443",
		"[2001:db8::1]":                "https://[2001:db8::1]:6443",
		"[2001:db8::1]:7443":           "https://[2001:db8::1]:7443",
		"https://api.example":          "https://api.example",
		"https://api.example:6443":     "https://api.example:6443",
		"https://[2001:db8::1]":        "https://[2001:db8::1]",
		"https://api.example/k8s/c/a/": "https://api.example/k8s/c/a/",
		"http://127.0.0.1:8080":        "http://127.0.0.1:8080",
	} {
		if u, err := ParseServer(text); err != nil || u.String() != want {
			t.Errorf("%q: %v, %v, want %s", text, u, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                    "no name or address",
		" ":                   "no name or address",
		"a b":                 "no name or address",
		"a/b":                 "no name or address",
		"a\nb":                "no name or address",
		"192.0.2.1:":          "port",
		"a:0":                 "port",
		"a:65536":             "port",
		"a:b":                 "no name or address",
		"a:1:2":               "no name or address",
		"[a]:1":               "no name or address",
		"[192.0.2.1]:1":       "no name or address",
		"[::%#]:1":            "no name or address",
		"::%#":                "no name or address",
		"[::1":                "no name or address",
		"https://":            "no name or address",
		"https://:6443":       "no name or address",
		"https://a:6443x":     "port",
		"https://[::1":        "missing ']'",
		"https://a\x00":       "invalid control character",
		"ftp://a":             "neither https nor http",
		"unix:///run/api":     "neither https nor http",
		"https://u:p@a":       "only a host, a port and a path",
		"https://a?x=1":       "only a host, a port and a path",
		"https://a?":          "only a host, a port and a path",
		"https://a#b":         "only a host, a port and a path",
		"u@a":                 "no name or address",
		"https://a%2fb/":      "invalid URL escape",
		"https://2001:db8::1": "invalid port",
	} {
		u, err := ParseServer(text)
		if err == nil {
			t.Errorf("%q is taken for %s", text, u)
		} else if line := err.Error(); !strings.Contains(line, want) || !strings.HasPrefix(line, strconv.Quote(text)+": ") || strings.ContainsAny(line, "\r\n") {
			t.Errorf("%q: %q, want %q", text, line, want)
		}
	}
}

func FuzzParseServer(f *testing.F) {
	for _, s := range []string{"a", "a:1", "[::1]:2", "https://a/b", "https://u@a?b#c", "::1", "fe80::1%eth0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		u, err := ParseServer(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("more than a line: %q", err)
			}
			return
		}
		again, err := ParseServer(u.String())
		if err != nil || plain(again) != plain(u) {
			t.Errorf("%q is %s, which is %v, %v", text, u, again, err)
		}
	})
}

func TestServers(t *testing.T) {
	for _, tc := range []struct {
		name, master string
		more, want   []string
		bad          string
	}{
		{"none", "https://a:6443", nil, []string{"https://a:6443"}, ""},
		{"more", "https://a:6443", []string{"b", "https://c/x"}, []string{"https://a:6443", "https://b:6443", "https://c/x"}, ""},
		{"repeats", "https://a", []string{"https://A:443/", "a", "b", "https://b:6443", "a:6443"}, []string{"https://a", "https://a:6443", "https://b:6443"}, ""},
		{"prefix", "https://a/k8s", []string{"https://a"}, []string{"https://a/k8s", "https://a"}, ""},
		{"in the clear", "http://a:8080", []string{"http://b:8080", "c"}, []string{"http://a:8080", "http://b:8080", "https://c:6443"}, ""},
		{"clear text after TLS", "https://a", []string{"http://b"}, nil, "must not go over http"},
		{"bad", "https://a", []string{"b:x"}, nil, `apiServers: "b:x"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := Connection{Master: tc.master, Servers: tc.more}.read()
			if tc.bad != "" {
				if err == nil || !strings.Contains(err.Error(), tc.bad) {
					t.Fatalf("%v, want %q", err, tc.bad)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, u := range s.servers {
				got = append(got, u.String())
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
