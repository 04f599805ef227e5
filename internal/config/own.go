package config

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Group, version and kind of our own document.
const (
	OwnAPIVersion = "fairlead.io/v1alpha1"
	OwnKind       = "FairleadConfiguration"
)

// Fairlead is a FairleadConfiguration: the settings that kube-proxy does not have. Every field may be left out.
type Fairlead struct {
	metav1.TypeMeta `json:",inline"`

	// ResyncPeriod is how often everything is compared with the kernel, changed or not (default 5m; kube-proxy's syncPeriod
	// where that is set). Drift is noticed without it, so that long periods are fine.
	ResyncPeriod metav1.Duration `json:"resyncPeriod,omitempty"`
	// AllowNodeAddresses lets Services claim addresses of nodes as external or load balancer IPs. Off by default, since a
	// tenant could take over a node's own ports with it (CVE-2020-8554).
	AllowNodeAddresses bool `json:"allowNodeAddresses,omitempty"`
	// WatchNodes is which Node objects are watched: "all" (the default), so that no Service can claim a peer's address, or
	// "own", which saves memory and API traffic in clusters of thousands of nodes.
	WatchNodes string `json:"watchNodes,omitempty"`
	// ControlSocket is the unix socket where get, explain and switch reach a running agent. "off" opens none. By default it is
	// /run/fairlead/fairlead.sock (see control.Path).
	ControlSocket string `json:"controlSocket,omitempty"`
	// Manifests is a file or directory of Kubernetes YAML that takes the place of the API server.
	Manifests string `json:"manifests,omitempty"`
	// APIServers are more addresses of the same API, tried when the one of the kubeconfig does not answer (see link.ParseServer).
	APIServers []string `json:"apiServers,omitempty"`
	// StaleAfter is how old the view of the API may become before the node stops to count as ready, and people are told
	// (default 3m; see leastStale).
	StaleAfter metav1.Duration `json:"staleAfter,omitempty"`
	// StateDir is a directory where what the API said is kept, so that a node that boots while there is no API server serves what
	// was known (see package saved). Empty keeps nothing.
	StateDir string `json:"stateDir,omitempty"`
	// StateMaxAge is how long ago the API may have been heard last for what was kept to be used (default 24h).
	StateMaxAge metav1.Duration `json:"stateMaxAge,omitempty"`
	// DisableHealthz and DisableMetrics close the listener, which an empty address in kube-proxy's part of the file cannot
	// say: there it means the default.
	DisableHealthz bool `json:"disableHealthz,omitempty"`
	DisableMetrics bool `json:"disableMetrics,omitempty"`
}

// The values of [Fairlead.WatchNodes].
const (
	WatchAll = "all"
	WatchOwn = "own"
)

// SocketOff as [Fairlead.ControlSocket] opens no socket.
const SocketOff = "off"
