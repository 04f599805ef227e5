package link

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Connection says where the API is and how to speak with it: kube-proxy's clientConnection, its --master, and our apiServers.
type Connection struct {
	Kubeconfig         string   // path; empty, with Master empty too, is the service account of the pod
	Master             string   // URL; overrides the server of the kubeconfig
	Servers            []string // more addresses of the same API; see [ParseServer]
	ContentType        string   // empty is protobuf
	AcceptContentTypes string   // empty is ContentType, then JSON
	QPS                float32  // requests a second; 0 is client-go's default, negative is no limit
	Burst              int      // 0 is client-go's default
}

// serviceAccount is the folder in which the kubelet keeps the credentials of the pod. Tests move it.
var serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// RestConfig reads what the connection needs, for clients that go without a [Link]. It may name files, which client-go reads
// itself. The error is one line.
func (c Connection) RestConfig() (*rest.Config, error) {
	cfg, err := c.load(newLook(readFile))
	if err != nil {
		return nil, OneLine(err)
	}
	c.dress(cfg)
	if _, err := c.allServers(cfg); err != nil {
		return nil, OneLine(err)
	}
	return cfg, nil
}

// content is how to speak with the API, without where it is and who we are.
func (c Connection) content() *rest.Config {
	cfg := new(rest.Config)
	c.dress(cfg)
	return cfg
}

func (c Connection) dress(cfg *rest.Config) {
	cfg.ContentType, cfg.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	if cfg.ContentType == "" {
		cfg.ContentType = runtime.ContentTypeProtobuf
	}
	if cfg.AcceptContentTypes == "" && cfg.ContentType != runtime.ContentTypeJSON {
		cfg.AcceptContentTypes = cfg.ContentType + "," + runtime.ContentTypeJSON
	}
	cfg.QPS, cfg.Burst = c.QPS, c.Burst
	cfg.DisableCompression = true // of each change's way to the kernel, unpacking was a tenth; and the API server packs for each node anew
}

func (c Connection) inCluster() bool { return c.Kubeconfig == "" && c.Master == "" }

// paths are the files that the connection itself names. These may name others.
func (c Connection) paths() []string {
	switch {
	case c.Kubeconfig != "":
		return []string{c.Kubeconfig}
	case c.Master != "":
		return nil
	}
	return []string{filepath.Join(serviceAccount, "token"), filepath.Join(serviceAccount, "ca.crt")}
}

func (c Connection) load(l *look) (*rest.Config, error) {
	switch {
	case c.Kubeconfig != "":
		cfg, err := fromFile(l, c.Kubeconfig, c.Master)
		if err != nil && thingOf(err) == "" {
			err = bad(Kubeconfig, "%w", err)
		}
		return cfg, err
	case c.Master != "":
		return &rest.Config{Host: c.Master}, nil
	}
	return ofPod(l)
}

// ofPod is the service account of the pod, as in [rest.InClusterConfig].
func ofPod(l *look) (*rest.Config, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("where is the Kubernetes API? This is no pod (KUBERNETES_SERVICE_HOST and _PORT are not set): give --kubeconfig, --master or --manifests")
	}
	cfg := &rest.Config{Host: "https://" + net.JoinHostPort(host, port), BearerTokenFile: filepath.Join(serviceAccount, "token")}
	token, err := l.file(cfg.BearerTokenFile)
	if err != nil {
		return nil, bad(Token, "read the service account of this pod: %w", err)
	}
	cfg.BearerToken = string(token)
	cfg.CAFile = filepath.Join(serviceAccount, "ca.crt")
	if _, err := l.file(cfg.CAFile); errors.Is(err, os.ErrNotExist) {
		cfg.CAFile = "" // whom the system trusts, as in client-go
	}
	return cfg, nil
}

// fromFile reads this file and nothing else: neither $KUBECONFIG nor, when the file says nothing, the pod's own account.
func fromFile(l *look, path, master string) (*rest.Config, error) {
	raw, err := kubeconfig(l, path)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", withPath(path, err))
	}
	if err := clientcmd.ResolveLocalPaths(raw); err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	if err := dangling(raw); err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	if raw.CurrentContext == "" { // clientcmd would ask as nobody, with a server from --master, or that of a cluster without a name: of a file that is cut off
		return nil, fmt.Errorf("read kubeconfig %s: it names no cluster: set clusters, contexts and current-context", path)
	}
	if err := named(l, raw); err != nil {
		return nil, &flaw{thing: thingOf(err), cause: fmt.Errorf("read kubeconfig %s: %w", path, err)}
	}
	over := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: master}}
	cfg, err := clientcmd.NewDefaultClientConfig(*raw, over).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	return cfg, nil
}

// kubeconfig is [clientcmd.LoadFromFile] of a file that is read once.
func kubeconfig(l *look, path string) (*clientcmdapi.Config, error) {
	data, err := l.file(path)
	if err != nil {
		return nil, err
	}
	raw, err := clientcmd.Load(bytes.Clone(data))
	if err != nil {
		return nil, err
	}
	for _, u := range raw.AuthInfos {
		if u != nil {
			u.LocationOfOrigin = path
		}
	}
	for _, c := range raw.Clusters {
		if c != nil {
			c.LocationOfOrigin = path
		}
	}
	return raw, nil
}

// named reads the files that are named by the cluster and the user in use.
func named(l *look, raw *clientcmdapi.Config) error {
	c := raw.Contexts[raw.CurrentContext]
	if c == nil {
		return nil
	}
	var first error
	read := func(t Thing, what, path string) {
		if path == "" {
			return
		}
		if _, err := l.file(path); err != nil && first == nil { // the others are looked at all the same: all of them are watched
			first = bad(t, "%s: %w", what, err)
		}
	}
	if k := raw.Clusters[c.Cluster]; k != nil {
		read(CA, "certificate-authority", k.CertificateAuthority)
	}
	if u := raw.AuthInfos[c.AuthInfo]; u != nil {
		read(ClientCertificate, "client-certificate", u.ClientCertificate)
		read(ClientCertificate, "client-key", u.ClientKey)
		read(Token, "tokenFile", u.TokenFile)
	}
	return first
}

// dangling finds names that name nothing. clientcmd takes a user that is not there for nobody, and asks without credentials.
func dangling(raw *clientcmdapi.Config) error {
	if raw.CurrentContext == "" {
		return nil
	}
	c, ok := raw.Contexts[raw.CurrentContext]
	if !ok || c == nil {
		return fmt.Errorf("current-context %q is not among its contexts", raw.CurrentContext)
	}
	if u, ok := raw.AuthInfos[c.AuthInfo]; (!ok || u == nil) && c.AuthInfo != "" {
		return fmt.Errorf("user %q of context %q is not among its users", c.AuthInfo, raw.CurrentContext)
	}
	if k, ok := raw.Clusters[c.Cluster]; !ok || k == nil {
		return fmt.Errorf("cluster %q of context %q is not among its clusters", c.Cluster, raw.CurrentContext)
	}
	return nil
}

// allServers are the server that the kubeconfig names, --master or the environment of the pod, and apiServers.
func (c Connection) allServers(cfg *rest.Config) ([]*url.URL, error) {
	first, _, err := rest.DefaultServerUrlFor(cfg)
	if err == nil && first.Scheme != "https" && first.Scheme != "http" {
		err = errors.New("it must begin with https:// (or http://)")
	}
	if err != nil {
		err = fmt.Errorf("address of the Kubernetes API %q: %w", cfg.Host, err)
		if c.Kubeconfig != "" && c.Master == "" {
			err = fmt.Errorf("read kubeconfig %s: %w", c.Kubeconfig, err)
		}
		return nil, err
	}
	out, known := []*url.URL{first}, map[string]bool{plain(first): true}
	for _, text := range c.Servers {
		u, err := ParseServer(text)
		if err != nil {
			return nil, fmt.Errorf("apiServers: %w", err)
		}
		if u.Scheme != "https" && first.Scheme == "https" {
			return nil, fmt.Errorf("apiServers: %q: credentials that are meant for https must not go over http", text)
		}
		if !known[plain(u)] {
			known[plain(u)] = true
			out = append(out, u)
		}
	}
	return out, nil
}

// plain writes a URL in the one way in which it is equal to others.
func plain(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[u.Scheme]
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port) + strings.TrimSuffix(u.Path, "/")
}

// apiPort is where kube-apiserver listens by default (--secure-port).
const apiPort = "6443"

// ParseServer reads an address of the API: a URL, https://HOST or https://HOST:PORT, with a path if need be, as in a
// kubeconfig; or HOST or HOST:PORT, which is by https, and to port 6443 unless it says another. An IPv6 address may go without brackets when
// no port follows. The error is one line that quotes the text.
func ParseServer(text string) (*url.URL, error) {
	u := &url.URL{Scheme: "https", Host: text}
	if isHost(text, true) {
		u.Host = net.JoinHostPort(text, apiPort)
		return u, nil
	}
	if strings.Contains(text, "://") {
		var err error
		if u, err = url.Parse(text); err != nil {
			var why *url.Error
			if errors.As(err, &why) {
				err = why.Err
			}
			return nil, fmt.Errorf("%q: %w", text, err)
		}
	}
	switch {
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, fmt.Errorf("%q: %q is neither https nor http", text, u.Scheme)
	case u.User != nil || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || u.Opaque != "":
		return nil, fmt.Errorf("%q: only a host, a port and a path can be given", text)
	case !isHost(u.Hostname(), strings.HasPrefix(u.Host, "[")):
		return nil, fmt.Errorf("%q: %q is no name or address of a host", text, u.Hostname())
	}
	port := u.Port()
	if n, err := strconv.ParseUint(port, 10, 16); u.Host != u.Hostname() && u.Host != "["+u.Hostname()+"]" && (err != nil || n == 0) {
		return nil, fmt.Errorf("%q: the port must be a number from 1 to 65535", text)
	}
	if port == "" && !strings.Contains(text, "://") {
		u.Host = net.JoinHostPort(u.Hostname(), apiPort)
	}
	return u, nil
}

// isHost tells whether a text is an IP address or may be a name in DNS; in brackets, an IPv6 address and nothing else.
func isHost(text string, brackets bool) bool {
	odd := func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '.' || r == '_')
	}
	if ip, err := netip.ParseAddr(text); err == nil {
		return ip.Is6() == brackets && !strings.ContainsFunc(ip.Zone(), odd)
	}
	return text != "" && len(text) <= 253 && !brackets && !strings.ContainsFunc(text, odd)
}

// withPath says the path, unless the error says it already.
func withPath(path string, err error) error {
	if strings.Contains(err.Error(), path) {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}

// OneLine keeps the cause, and puts what it prints on one line. Of a failed request it prints why it failed, without the
// URL of half a line.
func OneLine(err error) error {
	if err == nil {
		return nil
	}
	said := err
	var request *url.Error
	if errors.As(err, &request) && request.Op != "parse" {
		said = request.Err
	}
	line := strings.Join(strings.Fields(said.Error()), " ")
	return flat{err, userinfo.ReplaceAllString(line, "://xxxxx@")}
}

// userinfo is who logs in, and how, in a URL: nothing to be printed. What is no proper URL may have it anywhere before an @.
var userinfo = regexp.MustCompile(`://[^\s"']*@`)

type flat struct {
	cause error
	line  string
}

func (f flat) Error() string { return f.line }
func (f flat) Unwrap() error { return f.cause }
