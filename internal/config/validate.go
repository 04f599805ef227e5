package config

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	logsapi "k8s.io/component-base/logs/api/v1"
	netutils "k8s.io/utils/net"

	"fairlead/internal/source/kube/link"
)

// checker collects everything that is wrong. Its messages have the words and the paths of kube-proxy, and before them the
// line or the flag that is to blame, where that is known.
type checker struct {
	where map[string]string
	errs  []error
}

var (
	proxyPath = field.NewPath("KubeProxyConfiguration")
	ownRoot   = field.NewPath(OwnKind)
)

// add takes errors about the field of a file at path.
func (k *checker) add(path string, errs ...*field.Error) {
	for _, e := range errs {
		at, ok := k.where[path]
		if !ok {
			at = k.where[strings.TrimRight(path, "[]0123456789")] // an item of a list that came from a flag
		}
		if at != "" {
			at += ": "
		}
		k.errs = append(k.errs, fmt.Errorf("%s%w", at, e))
	}
}

// that reports unless ok.
func (k *checker) that(ok bool, path string, at *field.Path, value any, msg string) {
	if !ok {
		k.add(path, field.Invalid(at, value, msg))
	}
}

const (
	notNegative = "must be greater than or equal to 0"
	positive    = "must be greater than 0"
)

// validate checks all of it, in the order in which kube-proxy does.
func validate(c *Config, where map[string]string) []error {
	k := &checker{where: where}
	p := &c.Proxy
	for _, bad := range c.Gates.check() {
		name, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(bad, "unrecognized feature gate: "), "cannot set feature gate "), " ")
		at := "featureGates." + name
		if where[at] == "" {
			at = "featureGates"
		}
		k.add(at, field.Invalid(proxyPath.Child("featureGates"), name, bad))
	}
	k.masqueradeBit(p.IPTables.MasqueradeBit, "iptables", "KubeProxyIPTablesConfiguration")
	switch c.Mode {
	case "ipvs":
		k.ipvs(c)
	case "nftables":
		k.masqueradeBit(p.NFTables.MasqueradeBit, "nftables", "KubeProxyNFTablesConfiguration")
	}
	k.conntrack(c)
	k.mode(c)
	k.that(p.ClientConnection.Burst >= 0, "clientConnection.burst", proxyPath.Child("ClientConnection", "Burst"),
		p.ClientConnection.Burst, "must be non-negative")
	k.periods(c)
	k.addresses(c)
	k.nodePortAddresses(p.NodePortAddresses)
	k.hiddenMetrics(p.ShowHiddenMetricsForVersion)
	k.detectLocal(c)
	for _, e := range logsapi.Validate(&p.Logging, c.Gates.logging(), proxyPath.Child("logging")) {
		k.add(strings.TrimPrefix(e.Field, "KubeProxyConfiguration."), e)
	}
	k.own(c)
	return k.errs
}

func (k *checker) masqueradeBit(bit *int32, section, name string) {
	k.that(*bit >= 0 && *bit <= 31, section+".masqueradeBit", proxyPath.Child(name, "MasqueradeBit"), *bit,
		"must be within the range [0, 31]")
}

func (k *checker) ipvs(c *Config) {
	p, at := c.Proxy.IPVS, proxyPath.Child("KubeProxyIPVSConfiguration")
	k.that(p.TCPTimeout.Duration >= 0, "ipvs.tcpTimeout", at.Child("TCPTimeout"), p.TCPTimeout, notNegative)
	k.that(p.TCPFinTimeout.Duration >= 0, "ipvs.tcpFinTimeout", at.Child("TCPFinTimeout"), p.TCPFinTimeout, notNegative)
	k.that(p.UDPTimeout.Duration >= 0, "ipvs.udpTimeout", at.Child("UDPTimeout"), p.UDPTimeout, notNegative)
	for i, cidr := range p.ExcludeCIDRs {
		_, ok := prefix(cidr)
		k.that(ok, index("ipvs.excludeCIDRs", i), at.Child("ExcludeCidrs").Index(i), cidr, "must be a valid CIDR")
	}
}

func (k *checker) conntrack(c *Config) {
	at := proxyPath.Child("KubeProxyLinuxConfiguration")
	p, ct := c.Proxy.Conntrack, at.Child("KubeProxyConntrackConfiguration")
	k.that(*p.MaxPerCore >= 0, "conntrack.maxPerCore", ct.Child("MaxPerCore"), *p.MaxPerCore, notNegative)
	k.that(*p.Min >= 0, "conntrack.min", ct.Child("Min"), *p.Min, notNegative)
	for _, d := range []struct {
		path, name string
		value      metav1.Duration
	}{
		{"tcpEstablishedTimeout", "TCPEstablishedTimeout", *p.TCPEstablishedTimeout},
		{"tcpCloseWaitTimeout", "TCPCloseWaitTimeout", *p.TCPCloseWaitTimeout},
		{"udpTimeout", "UDPTimeout", p.UDPTimeout},
		{"udpStreamTimeout", "UDPStreamTimeout", p.UDPStreamTimeout},
	} {
		k.that(d.value.Duration >= 0, "conntrack."+d.path, ct.Child(d.name), d.value, notNegative)
	}
	oom := *c.Proxy.OOMScoreAdj
	k.that(oom >= -1000 && oom <= 1000, "oomScoreAdj", at.Child("OOMScoreAdj"), oom, "must be within the range [-1000, 1000]")
}

func (k *checker) mode(c *Config) {
	valid := slices.Clone(Modes)
	slices.Sort(valid)
	if !c.Gates.Enabled(KubeProxyIPVS) {
		valid = slices.DeleteFunc(valid, func(m string) bool { return m == "ipvs" })
	}
	msg := fmt.Sprintf("must be %s or blank (blank means the best-available proxy [currently iptables])", strings.Join(valid, ", "))
	if c.Mode == "kernelspace" {
		msg = "is for Windows: " + msg
	}
	k.that(slices.Contains(append(valid, Memory), c.Mode), "mode", proxyPath.Child("Mode", "ProxyMode"), c.Mode, msg)
}

func (k *checker) periods(c *Config) {
	every, section := c.Proxy.ConfigSyncPeriod, c.section()
	k.that(every.Duration > 0, "configSyncPeriod", proxyPath.Child("ConfigSyncPeriod"), every, positive)
	sync, least := metav1.Duration{Duration: c.SyncPeriod}, metav1.Duration{Duration: c.MinSyncPeriod}
	k.that(c.SyncPeriod > 0, section+".syncPeriod", proxyPath.Child("SyncPeriod"), sync, positive)
	k.that(c.MinSyncPeriod >= 0, section+".minSyncPeriod", proxyPath.Child("MinSyncPeriod"), least, notNegative)
	k.that(c.MinSyncPeriod <= c.SyncPeriod, section+".minSyncPeriod", proxyPath.Child("SyncPeriod"), sync,
		fmt.Sprintf("must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod (%s)", c.MinSyncPeriod))
}

func (k *checker) addresses(c *Config) {
	p := &c.Proxy
	k.that(netutils.ParseIPSloppy(p.BindAddress) != nil, "bindAddress", proxyPath.Child("BindAddress"), p.BindAddress,
		"not a valid textual representation of an IP address")
	if !c.Own.DisableHealthz {
		k.hostPort("healthzBindAddress", proxyPath.Child("HealthzBindAddress"), p.HealthzBindAddress)
	}
	if !c.Own.DisableMetrics {
		k.hostPort("metricsBindAddress", proxyPath.Child("MetricsBindAddress"), p.MetricsBindAddress)
	}
}

func (k *checker) hostPort(path string, at *field.Path, value string) {
	host, port, err := net.SplitHostPort(value)
	if err != nil {
		k.add(path, field.Invalid(at, value, "must be IP:port"))
		return
	}
	k.that(netutils.ParseIPSloppy(host) != nil, path, at, host, "must be a valid IP")
	k.that(goodPort(port), path, at, port, "must be a valid port")
}

func (k *checker) nodePortAddresses(list []string) {
	at := proxyPath.Child("NodePortAddresses")
	seen := map[string]bool{}
	for i, s := range list {
		if s == NodePortPrimary || s == NodePortLocalhost || s == NodePortAll {
			if seen[s] {
				k.add(index("nodePortAddresses", i), field.Duplicate(at.Index(i), s))
			}
			seen[s] = true
			continue
		}
		_, ok := prefix(s)
		k.that(ok, index("nodePortAddresses", i), at.Index(i), s, "must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'")
	}
}

// hiddenFor is the only version that kube-proxy 1.37 accepts: the minor before its own.
const hiddenFor = "1.36"

func (k *checker) hiddenMetrics(version string) {
	k.that(version == "" || version == hiddenFor, "showHiddenMetricsForVersion", proxyPath.Child("ShowHiddenMetricsForVersion"), version,
		fmt.Sprintf("must be omitted or have the value '%s'; only the previous minor version is allowed", hiddenFor))
}

func (k *checker) detectLocal(c *Config) {
	mode, at := string(c.Proxy.DetectLocalMode), proxyPath.Child("DetectLocalConfiguration")
	valid := []string{DetectClusterCIDR, DetectNodeCIDR, DetectBridge, DetectPrefix, ""}
	if !slices.Contains(valid, mode) {
		k.add("detectLocalMode", field.NotSupported(proxyPath.Child("DetectLocalMode"), mode, valid))
		return
	}
	switch mode {
	case DetectBridge:
		k.iface("detectLocal.bridgeInterface", at.Child("InterfaceName"), c.Proxy.DetectLocal.BridgeInterface)
	case DetectPrefix:
		k.iface("detectLocal.interfaceNamePrefix", at.Child("InterfacePrefix"), c.Proxy.DetectLocal.InterfaceNamePrefix)
	case DetectClusterCIDR, "":
		k.clusterCIDRs(cidrs(c.Proxy.ClusterCIDR), at.Child("ClusterCIDRs"))
	}
}

// iface checks the name of an interface, or its beginning, with the kernel's rules (dev_valid_name in net/core/dev.c): it
// ends up in rules.
func (k *checker) iface(path string, at *field.Path, name string) {
	const most = 15 // IFNAMSIZ - 1
	odd := strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == '/' || r == ':' || r >= 0x7f })
	switch {
	case name == "":
		k.add(path, field.Invalid(at, name, "must not be empty"))
	case len(name) > most || odd || name == "." || name == "..":
		k.add(path, field.Invalid(at, name, "must be a valid interface name (at most 15 characters, no space, slash or colon)"))
	}
}

func (k *checker) clusterCIDRs(list []string, at *field.Path) {
	const pair = "must be a either a single CIDR or dual-stack pair of CIDRs (e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]"
	if len(list) > 2 {
		k.add("clusterCIDR", field.Invalid(at, list, pair))
		return
	}
	bad := false
	for i, s := range list {
		if _, ok := prefix(s); !ok {
			bad = true
			k.add("clusterCIDR", field.Invalid(at.Index(i), s, "must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)"))
		}
	}
	if ps := prefixes(list); !bad && len(ps) == 2 && ps[0].Addr().Is6() == ps[1].Addr().Is6() {
		k.add("clusterCIDR", field.Invalid(at, list, pair))
	}
}

// own checks our own document.
func (k *checker) own(c *Config) {
	o := &c.Own
	k.that(o.ResyncPeriod.Duration >= 0, ownPath+"resyncPeriod", ownRoot.Child("resyncPeriod"), o.ResyncPeriod, notNegative)
	if o.WatchNodes != "" && o.WatchNodes != WatchAll && o.WatchNodes != WatchOwn {
		k.add(ownPath+"watchNodes", field.NotSupported(ownRoot.Child("watchNodes"), o.WatchNodes, []string{WatchAll, WatchOwn}))
	}
	const most = 107 // sun_path of sockaddr_un, unix(7), less the final 0
	path := o.ControlSocket
	good := path == "" || path == SocketOff || filepath.IsAbs(path) && len(path) <= most
	k.that(good, ownPath+"controlSocket", ownRoot.Child("controlSocket"), path,
		fmt.Sprintf("must be an absolute path of at most %d bytes, or %q", most, SocketOff))
	stale := o.StaleAfter.Duration
	k.that(stale == 0 || stale >= leastStale, ownPath+"staleAfter", ownRoot.Child("staleAfter"), o.StaleAfter,
		fmt.Sprintf("must be at least %v: an API server that is well may be silent for a minute", leastStale))
	k.apiServers(o.APIServers)
	k.that(o.StateDir == "" || filepath.IsAbs(o.StateDir), ownPath+"stateDir", ownRoot.Child("stateDir"), o.StateDir, "must be an absolute path")
	age, written := o.StateMaxAge.Duration, k.where[ownPath+"stateMaxAge"] != ""
	k.that(age > 0 || age == 0 && !written, ownPath+"stateMaxAge", ownRoot.Child("stateMaxAge"), o.StateMaxAge, positive)
}

func (k *checker) apiServers(list []string) {
	seen := map[string]bool{}
	for i, s := range list {
		path, at := index(ownPath+"apiServers", i), ownRoot.Child("apiServers").Index(i)
		if _, err := link.ParseServer(s); err != nil {
			k.add(path, field.Invalid(at, s, strings.TrimPrefix(err.Error(), strconv.Quote(s)+": ")))
		} else if seen[s] {
			k.add(path, field.Duplicate(at, s))
		}
		seen[s] = true
	}
}

func goodPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 1 && n <= 65535
}

func index(path string, i int) string { return fmt.Sprintf("%s[%d]", path, i) }
