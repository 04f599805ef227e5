package kube

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Connection says where the API is and how to speak with it: kube-proxy's clientConnection, and its --master.
type Connection struct {
	Kubeconfig         string  // path; empty, with Master empty too, is the service account of the pod
	Master             string  // URL; overrides the server of the kubeconfig
	ContentType        string  // empty is protobuf
	AcceptContentTypes string  // empty is ContentType, then JSON
	QPS                float32 // requests a second; 0 is client-go's default, negative is no limit
	Burst              int     // 0 is client-go's default
}

// RestConfig reads what the connection needs. The error is one line.
func (c Connection) RestConfig() (*rest.Config, error) {
	cfg, err := c.load()
	if err != nil {
		return nil, oneLine(err)
	}
	cfg.ContentType, cfg.AcceptContentTypes = c.ContentType, c.AcceptContentTypes
	if cfg.ContentType == "" {
		cfg.ContentType = runtime.ContentTypeProtobuf
	}
	if cfg.AcceptContentTypes == "" && cfg.ContentType != runtime.ContentTypeJSON {
		cfg.AcceptContentTypes = cfg.ContentType + "," + runtime.ContentTypeJSON
	}
	cfg.QPS, cfg.Burst = c.QPS, c.Burst
	cfg.DisableCompression = true // of each change's way to the kernel, unpacking was a tenth; and the API server packs for each node anew
	if _, _, err := rest.DefaultServerUrlFor(cfg); err != nil {
		return nil, oneLine(fmt.Errorf("address of the Kubernetes API %q: %w", cfg.Host, err))
	}
	return cfg, nil
}

func (c Connection) load() (*rest.Config, error) {
	switch {
	case c.Kubeconfig != "":
		return fromFile(c.Kubeconfig, c.Master)
	case c.Master != "":
		return &rest.Config{Host: c.Master}, nil
	}
	cfg, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("where is the Kubernetes API? This is no pod (KUBERNETES_SERVICE_HOST and _PORT are not set): give --kubeconfig, --master or --manifests")
	}
	if err != nil {
		return nil, fmt.Errorf("read the service account of this pod: %w", err)
	}
	return cfg, nil
}

// fromFile reads this file and nothing else: neither $KUBECONFIG nor, when the file says nothing, the pod's own account.
func fromFile(path, master string) (*rest.Config, error) {
	raw, err := clientcmd.LoadFromFile(path)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", withPath(path, err))
	}
	if err := clientcmd.ResolveLocalPaths(raw); err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	if err := dangling(raw); err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	over := &clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: master}}
	cfg, err := clientcmd.NewDefaultClientConfig(*raw, over).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, fmt.Errorf("read kubeconfig %s: it names no cluster: set clusters, contexts and current-context", path)
	}
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig %s: %w", path, err)
	}
	return cfg, nil
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
	if _, ok := raw.AuthInfos[c.AuthInfo]; !ok && c.AuthInfo != "" {
		return fmt.Errorf("user %q of context %q is not among its users", c.AuthInfo, raw.CurrentContext)
	}
	if _, ok := raw.Clusters[c.Cluster]; !ok {
		return fmt.Errorf("cluster %q of context %q is not among its clusters", c.Cluster, raw.CurrentContext)
	}
	return nil
}

// withPath says the path, unless the error says it already.
func withPath(path string, err error) error {
	if strings.Contains(err.Error(), path) {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}

// oneLine keeps the cause, and puts what it prints on one line. Of a failed request it prints why it failed, without the
// URL of half a line.
func oneLine(err error) error {
	if err == nil {
		return nil
	}
	said := err
	var request *url.Error
	if errors.As(err, &request) {
		said = request.Err
	}
	return flat{err, strings.Join(strings.Fields(said.Error()), " ")}
}

type flat struct {
	cause error
	line  string
}

func (f flat) Error() string { return f.line }
func (f flat) Unwrap() error { return f.cause }
