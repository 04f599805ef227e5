package config

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// Defaults of kube-proxy 1.37 (KubeProxyConfiguration v1alpha1).
const (
	healthzPort              = 10256
	metricsPort              = 10249
	oomScoreAdj              = -999
	masqueradeBit            = 14
	syncPeriod               = 30 * time.Second
	minSyncPeriod            = 0 // kube-proxy: 1s. The engine rests by what its rounds cost, so a lone change is served at once
	conntrackPerCore         = 32 * 1024
	conntrackMin             = 128 * 1024
	tcpEstablished           = 24 * time.Hour
	tcpCloseWait             = time.Hour
	configSyncPeriod         = 15 * time.Minute
	apiContentType           = "application/vnd.kubernetes.protobuf"
	apiQPS           float32 = 5
	apiBurst         int32   = 10
)

// DefaultResync is how often everything is compared with the kernel. kube-proxy's 30 s are the price of not noticing
// drift; here it is noticed when it happens, and the period is only the second line.
const DefaultResync = 5 * time.Minute

// DefaultStale is how old the view of the API may become, by default. An API server that is well says something about each
// resource in a minute (see leastStale); three are no accident.
const DefaultStale = 3 * time.Minute

// leastStale is the least that may be asked for. Of a quiet cluster the API server sends a bookmark about each minute
// (k8s.io/apiserver/pkg/storage/cacher, defaultBookmarkFrequency), and a watch that is silent for 65 s is opened again, which is
// an answer: below that every quiet minute would be an alarm.
const leastStale = 75 * time.Second

// DefaultStateMaxAge is how old what was kept may be, by default: an outage of the API that nobody has ended within a day
// has changed the cluster by more than its Services.
const DefaultStateMaxAge = 24 * time.Hour

// setDefaults fills what is not set.
func setDefaults(c *proxyv1alpha1.KubeProxyConfiguration) {
	c.APIVersion, c.Kind = ProxyAPIVersion, ProxyKind
	set(&c.BindAddress, "0.0.0.0")
	pointer(&c.OOMScoreAdj, oomScoreAdj)
	pointer(&c.IPTables.MasqueradeBit, masqueradeBit)
	pointer(&c.NFTables.MasqueradeBit, masqueradeBit)
	pointer(&c.IPTables.LocalhostNodePorts, true)
	set(&c.IPTables.SyncPeriod.Duration, syncPeriod)
	set(&c.NFTables.SyncPeriod.Duration, syncPeriod)
	set(&c.IPVS.SyncPeriod.Duration, syncPeriod)
	pointer(&c.Conntrack.MaxPerCore, conntrackPerCore)
	pointer(&c.Conntrack.Min, conntrackMin)
	pointer(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: tcpEstablished})
	pointer(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: tcpCloseWait})
	set(&c.ConfigSyncPeriod.Duration, configSyncPeriod)
	set(&c.ClientConnection.ContentType, apiContentType)
	set(&c.ClientConnection.QPS, apiQPS)
	set(&c.ClientConnection.Burst, apiBurst)
	if c.FeatureGates == nil {
		c.FeatureGates = map[string]bool{}
	}
	if c.Mode == "nftables" && len(c.NodePortAddresses) == 0 {
		c.NodePortAddresses = []string{NodePortPrimary}
	}
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// setListeners fills the two addresses that depend on the family of the bind address.
func setListeners(c *proxyv1alpha1.KubeProxyConfiguration, healthz, metrics int32) {
	all, loop := "0.0.0.0", "127.0.0.1"
	if ip, err := netip.ParseAddr(c.BindAddress); err == nil && ip.Is6() && !ip.Is4In6() {
		all, loop = "::", "::1"
	}
	set(&c.HealthzBindAddress, all)
	set(&c.MetricsBindAddress, loop)
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthz)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metrics)
}

// withPort adds the port to an address that has none. What is no address is left for the validation to name.
func withPort(addr string, port int32) string {
	if ip, err := netip.ParseAddr(addr); err == nil {
		return net.JoinHostPort(ip.String(), strconv.Itoa(int(port)))
	}
	return addr
}

func set[T comparable](field *T, to T) {
	var zero T
	if *field == zero {
		*field = to
	}
}

func pointer[T any](field **T, to T) {
	if *field == nil {
		*field = &to
	}
}
