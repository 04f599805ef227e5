package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

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

func TestNewMistakes(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("no connection: no error")
	}
	c, err := Connection{Master: "https://192.0.2.1"}.RestConfig()
	if err != nil {
		t.Fatal(err)
	}
	c.CAData = []byte("no PEM")
	if _, err := New(Config{Rest: c}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a broken CA: %v", err)
	}
}
