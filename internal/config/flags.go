package config

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// Options is the command line of run: kube-proxy's flags, and ours.
type Options struct {
	ConfigFile    string
	WriteConfigTo string
	Cleanup       bool
	InitOnly      bool

	mode  string // if any, whatever is written
	fs    *pflag.FlagSet
	proxy proxyv1alpha1.KubeProxyConfiguration // what the flags write to; all else is its default
	own   Fairlead

	master, hostname, clusterCIDR                string
	healthzPort, metricsPort                     int32
	masqueradeAll                                bool
	iptablesSync, iptablesMin, ipvsSync, ipvsMin time.Duration
}

// fieldOf says which field of the configuration a flag sets.
var fieldOf = map[string]string{
	"feature-gates": "featureGates", "kubeconfig": "clientConnection.kubeconfig", "kube-api-content-type": "clientConnection.contentType",
	"kube-api-qps": "clientConnection.qps", "kube-api-burst": "clientConnection.burst", "hostname-override": "hostnameOverride",
	"bind-address": "bindAddress", "healthz-bind-address": "healthzBindAddress", "metrics-bind-address": "metricsBindAddress",
	"healthz-port": "healthzBindAddress", "metrics-port": "metricsBindAddress", "bind-address-hard-fail": "bindAddressHardFail",
	"profiling": "enableProfiling", "show-hidden-metrics-for-version": "showHiddenMetricsForVersion", "oom-score-adj": "oomScoreAdj",
	"config-sync-period": "configSyncPeriod", "proxy-mode": "mode", "iptables-masquerade-bit": "iptables.masqueradeBit",
	"masquerade-all": "iptables.masqueradeAll", "iptables-localhost-nodeports": "iptables.localhostNodePorts",
	"iptables-sync-period": "iptables.syncPeriod", "iptables-min-sync-period": "iptables.minSyncPeriod",
	"ipvs-sync-period": "ipvs.syncPeriod", "ipvs-min-sync-period": "ipvs.minSyncPeriod", "ipvs-scheduler": "ipvs.scheduler",
	"ipvs-exclude-cidrs": "ipvs.excludeCIDRs", "ipvs-strict-arp": "ipvs.strictARP", "ipvs-tcp-timeout": "ipvs.tcpTimeout",
	"ipvs-tcpfin-timeout": "ipvs.tcpFinTimeout", "ipvs-udp-timeout": "ipvs.udpTimeout", "detect-local-mode": "detectLocalMode",
	"pod-bridge-interface": "detectLocal.bridgeInterface", "pod-interface-name-prefix": "detectLocal.interfaceNamePrefix",
	"cluster-cidr": "clusterCIDR", "nodeport-addresses": "nodePortAddresses", "conntrack-max-per-core": "conntrack.maxPerCore",
	"conntrack-min": "conntrack.min", "conntrack-tcp-timeout-established": "conntrack.tcpEstablishedTimeout",
	"conntrack-tcp-timeout-close-wait": "conntrack.tcpCloseWaitTimeout", "conntrack-tcp-be-liberal": "conntrack.tcpBeLiberal",
	"conntrack-udp-timeout": "conntrack.udpTimeout", "conntrack-udp-timeout-stream": "conntrack.udpStreamTimeout",
	"windows-service": "windowsRunAsService", "source-vip": "winkernel.sourceVip", "network-name": "winkernel.networkName",
	"enable-dsr": "winkernel.enableDSR", "root-hnsendpoint-name": "winkernel.rootHnsEndpointName",
	"forward-healthcheck-vip": "winkernel.forwardHealthCheckVip",
}

// elsewhere are flags of kube-proxy on other systems, or that other libraries left in its command line: taken, so that an
// old command line works, and answered with a line.
var elsewhere = []string{"boot-id-file", "machine-id-file"}

// NewOptions returns the defaults.
func NewOptions() *Options {
	if err := registerJSON(); err != nil {
		panic(fmt.Sprintf("log format json: %v", err)) // once a process, before the log is set up: not an input
	}
	o := &Options{healthzPort: healthzPort, metricsPort: metricsPort}
	setDefaults(&o.proxy)
	return o
}

// AddFlags puts every flag on fs, which Config asks later what was given.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.fs = fs
	fs.SetNormalizeFunc(cliflag.WordSepNormalizeFunc) // --proxy_mode is --proxy-mode, as in kube-proxy
	o.addProcess(fs)
	o.addGeneral(fs)
	o.addModes(fs)
	o.addTraffic(fs)
	o.addConntrack(fs)
	o.addElsewhere(fs)
	logsapi.AddFlags(&o.proxy.Logging, fs)
}

func (o *Options) addProcess(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar(&o.ConfigFile, "config", "", "configuration file: a KubeProxyConfiguration, a FairleadConfiguration, or both")
	fs.StringVar(&o.WriteConfigTo, "write-config-to", "", "write the effective configuration to this file and exit")
	fs.BoolVar(&o.Cleanup, "cleanup", false, "remove every rule of fairlead and of kube-proxy, and exit")
	fs.BoolVar(&o.InitOnly, "init-only", false, "do what needs full root privileges and exit; run needs CAP_NET_ADMIN only afterwards")
	fs.StringVar(&o.own.Manifests, "manifests", "", "file or directory of Kubernetes YAML (Services, EndpointSlices, Pods, Nodes) to serve, instead of an API server")
	fs.StringVar(&o.own.ControlSocket, "control-socket", "", `unix socket for get, explain and switch, or "off" (default /run/fairlead/fairlead.sock)`)
	fs.StringVar(&c.ClientConnection.Kubeconfig, "kubeconfig", "", "kubeconfig file; without it the service account of the pod is used")
	fs.StringVar(&o.master, "master", "", "address of the Kubernetes API server, overrides the one of the kubeconfig")
	fs.StringVar(&c.ClientConnection.ContentType, "kube-api-content-type", c.ClientConnection.ContentType, "content type of requests to the API server")
	fs.Float32Var(&c.ClientConnection.QPS, "kube-api-qps", c.ClientConnection.QPS, "requests a second to the API server")
	fs.Int32Var(&c.ClientConnection.Burst, "kube-api-burst", c.ClientConnection.Burst, "requests to the API server above that rate, for a moment")
}

func (o *Options) addGeneral(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.Var(cliflag.NewMapStringBool(&c.FeatureGates), "feature-gates", "name=true|false, …: feature gates of kube-proxy; "+AllowServiceExternalIPs+" is obeyed")
	fs.StringVar(&o.hostname, "hostname-override", "", "name of this node, instead of the host's name")
	fs.StringVar(&c.BindAddress, "bind-address", c.BindAddress, "this node's primary IP, where it can't be learned from its Node object; nothing listens on it")
	fs.StringVar(&c.HealthzBindAddress, "healthz-bind-address", "", `address of the health listener, "" for none (default 0.0.0.0:10256)`)
	fs.StringVar(&c.MetricsBindAddress, "metrics-bind-address", "", `address of the metrics listener, "" for none (default 127.0.0.1:10249)`)
	fs.BoolVar(&c.BindAddressHardFail, "bind-address-hard-fail", false, "exit when one of them can't be bound")
	fs.BoolVar(&c.EnableProfiling, "profiling", false, "serve /debug/pprof beside the metrics")
	fs.StringVar(&c.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", "no effect: no metric is hidden")
	fs.Int32Var(c.OOMScoreAdj, "oom-score-adj", *c.OOMScoreAdj, "oom_score_adj of this process, -1000..1000")
	fs.DurationVar(&c.ConfigSyncPeriod.Duration, "config-sync-period", c.ConfigSyncPeriod.Duration, "no effect: everything is compared with the kernel each resyncPeriod")
	fs.Int32Var(&o.healthzPort, "healthz-port", o.healthzPort, "port of the health listener, 0 for none")
	fs.Int32Var(&o.metricsPort, "metrics-port", o.metricsPort, "port of the metrics listener, 0 for none")
	hide(fs, "healthz-port", "metrics-port")
}

func (o *Options) addModes(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar((*string)(&c.Mode), "proxy-mode", "", strings.Join(Modes, ", ")+" (default iptables)")
	fs.Int32Var(c.IPTables.MasqueradeBit, "iptables-masquerade-bit", *c.IPTables.MasqueradeBit, "bit of the packet mark that asks for masquerading, 0..31 (iptables, ipvs)")
	fs.BoolVar(&o.masqueradeAll, "masquerade-all", false, "hide every client of a ClusterIP")
	fs.BoolVar(c.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", true, "serve NodePorts on 127.0.0.1 (iptables, IPv4)")
	fs.DurationVar(&o.iptablesSync, "iptables-sync-period", syncPeriod, "health is lost when a change waits for twice as long; if given, also how often everything is compared with the kernel, else 5m (every mode but ipvs)")
	fs.DurationVar(&o.iptablesMin, "iptables-min-sync-period", minSyncPeriod, "least time between two writes, may be 0 (every mode but ipvs)")
	fs.DurationVar(&o.ipvsSync, "ipvs-sync-period", syncPeriod, "health is lost when a change waits for twice as long; if given, also how often everything is compared with the kernel, else 5m (ipvs)")
	fs.DurationVar(&o.ipvsMin, "ipvs-min-sync-period", minSyncPeriod, "least time between two writes, may be 0 (ipvs)")
	fs.StringVar(&c.IPVS.Scheduler, "ipvs-scheduler", "", "scheduler of the virtual servers (default rr)")
	fs.StringSliceVar(&c.IPVS.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, "virtual servers in these ranges are not touched")
	fs.BoolVar(&c.IPVS.StrictARP, "ipvs-strict-arp", false, "set arp_ignore to 1 and arp_announce to 2")
	fs.DurationVar(&c.IPVS.TCPTimeout.Duration, "ipvs-tcp-timeout", 0, "timeout of idle TCP connections, 0 leaves it")
	fs.DurationVar(&c.IPVS.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", 0, "timeout of TCP connections after a FIN, 0 leaves it")
	fs.DurationVar(&c.IPVS.UDPTimeout.Duration, "ipvs-udp-timeout", 0, "timeout of UDP flows, 0 leaves it")
}

func (o *Options) addTraffic(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.StringVar((*string)(&c.DetectLocalMode), "detect-local-mode", "", "how pods are told from others: ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix (default ClusterCIDR)")
	fs.StringVar(&c.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "with BridgeInterface: the bridge that pods come from")
	fs.StringVar(&c.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "", "with InterfaceNamePrefix: the beginning of the names of the interfaces that pods come from")
	fs.StringVar(&o.clusterCIDR, "cluster-cidr", "", "with ClusterCIDR: the range of the pods; one a family, with a comma between")
	fs.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", nil, "addresses of the node that take NodePort traffic: CIDRs, primary, localhost, all")
}

func (o *Options) addConntrack(fs *pflag.FlagSet) {
	c := &o.proxy.Conntrack
	fs.Int32Var(c.MaxPerCore, "conntrack-max-per-core", *c.MaxPerCore, "nf_conntrack_max for each CPU, 0 leaves it")
	fs.Int32Var(c.Min, "conntrack-min", *c.Min, "least nf_conntrack_max, whatever the number of CPUs")
	fs.DurationVar(&c.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", tcpEstablished, "timeout of idle TCP connections, 0 leaves it")
	fs.DurationVar(&c.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", tcpCloseWait, "timeout of TCP connections in CLOSE_WAIT, 0 leaves it")
	fs.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "set nf_conntrack_tcp_be_liberal to 1")
	fs.DurationVar(&c.UDPTimeout.Duration, "conntrack-udp-timeout", 0, "timeout of UDP flows without a reply, 0 leaves it")
	fs.DurationVar(&c.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", 0, "timeout of UDP flows with replies, 0 leaves it")
}

func (o *Options) addElsewhere(fs *pflag.FlagSet) {
	c := &o.proxy
	fs.BoolVar(&c.WindowsRunAsService, "windows-service", false, "Windows only")
	fs.StringVar(&c.Winkernel.SourceVip, "source-vip", "", "Windows only")
	fs.StringVar(&c.Winkernel.NetworkName, "network-name", "", "Windows only")
	fs.BoolVar(&c.Winkernel.EnableDSR, "enable-dsr", false, "Windows only")
	fs.StringVar(&c.Winkernel.RootHnsEndpointName, "root-hnsendpoint-name", "", "Windows only")
	fs.BoolVar(&c.Winkernel.ForwardHealthCheckVip, "forward-healthcheck-vip", false, "Windows only")
	hide(fs, "windows-service", "source-vip", "network-name", "enable-dsr", "root-hnsendpoint-name", "forward-healthcheck-vip")
	for _, name := range elsewhere {
		fs.String(name, "", "no effect")
	}
	hide(fs, elsewhere...)
}

// hide keeps flags out of the help.
func hide(fs *pflag.FlagSet, names ...string) {
	for _, name := range names {
		fs.Lookup(name).Hidden = true
	}
}

// spread writes the flags that have no field of their own, or more than one.
func (o *Options) spread() {
	c := &o.proxy
	o.own.DisableHealthz = o.healthzPort == 0 || c.HealthzBindAddress == "" && o.fs.Changed("healthz-bind-address")
	o.own.DisableMetrics = o.metricsPort == 0 || c.MetricsBindAddress == "" && o.fs.Changed("metrics-bind-address")
	c.ClusterCIDR = o.clusterCIDR
	c.IPTables.MasqueradeAll, c.NFTables.MasqueradeAll = o.masqueradeAll, o.masqueradeAll
	if c.Mode == "ipvs" {
		c.IPVS.SyncPeriod.Duration, c.IPVS.MinSyncPeriod.Duration = o.ipvsSync, o.ipvsMin
	} else {
		c.IPTables.SyncPeriod.Duration, c.IPTables.MinSyncPeriod.Duration = o.iptablesSync, o.iptablesMin
		c.NFTables.SyncPeriod.Duration, c.NFTables.MinSyncPeriod.Duration = o.iptablesSync, o.iptablesMin
	}
	if c.Mode == "nftables" && !o.fs.Changed("nodeport-addresses") {
		c.NodePortAddresses = []string{NodePortPrimary}
	}
	setListeners(c, o.healthzPort, o.metricsPort)
}

// where says which flag set a field.
func (o *Options) where() map[string]string {
	out := map[string]string{}
	o.fs.Visit(func(f *pflag.Flag) {
		if path, ok := fieldOf[f.Name]; ok {
			out[path] = "--" + f.Name
			if section, name, ok := strings.Cut(path, "."); ok && section == "iptables" {
				out["nftables."+name] = "--" + f.Name
			}
		}
	})
	return out
}

// strangers has a line for each flag that is taken and means nothing here.
func (o *Options) strangers() []string {
	var out []string
	o.fs.Visit(func(f *pflag.Flag) {
		if slices.Contains(elsewhere, f.Name) {
			out = append(out, fmt.Sprintf("--%s has no effect", f.Name))
		}
	})
	return out
}
