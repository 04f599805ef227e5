package config

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"time"

	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	netutils "k8s.io/utils/net"
)

// Modes are the dataplanes that a person may choose.
var Modes = []string{"iptables", "nftables", "ipvs", "ebpf", "userspace"}

// Memory is the dataplane that keeps everything in memory and touches no kernel: a dry run.
const Memory = "memory"

// Keywords of nodePortAddresses.
const (
	NodePortPrimary   = "primary"   // the Node object's own addresses
	NodePortLocalhost = "localhost" // 127.0.0.0/8 and ::1
	NodePortAll       = "all"       // every address
)

// How pods are told from others (detectLocalMode).
const (
	DetectClusterCIDR = "ClusterCIDR"
	DetectNodeCIDR    = "NodeCIDR"
	DetectBridge      = "BridgeInterface"
	DetectPrefix      = "InterfaceNamePrefix"
)

// Config is what the program runs on: both documents with every default filled in, and what follows from them.
type Config struct {
	Proxy proxyv1alpha1.KubeProxyConfiguration
	Own   Fairlead
	Gates Gates

	Mode     string // never empty
	Node     string // name of this machine's Node object
	Master   string // overrides the server of the kubeconfig
	Healthz  string // IP:port; empty is no listener
	Metrics  string // IP:port; empty is no listener
	Detect   Detect
	NodePort NodePorts

	SyncPeriod    time.Duration // kube-proxy's: health is lost when a change waits for twice as long
	MinSyncPeriod time.Duration // least time between two writes; may be 0
	ResyncPeriod  time.Duration // how often everything is compared with the kernel

	MasqueradeBit int
	MasqueradeAll bool
	LocalhostPort bool // NodePorts answer on 127.0.0.1, in modes whose rules can do that
	NoRelay       bool // NodePorts are not relayed from 127.0.0.1 and ::1, in modes whose rules can't

	// Notes are one line each, for the log: what was ignored, what has no effect, what should be known. A log that is not
	// set up yet can't take them, so that they are handed on.
	Notes []string
}

// Detect says how pods are told from others.
type Detect struct {
	Mode   string
	CIDRs  []netip.Prefix // with ClusterCIDR
	Bridge string         // with BridgeInterface
	Prefix string         // with InterfaceNamePrefix
}

// NodePorts says which addresses of the node take NodePort traffic. The zero value is every address.
type NodePorts struct {
	Prefixes []netip.Prefix
	Primary  bool // the addresses of the Node object too
}

// All tells whether every address does.
func (n NodePorts) All() bool { return len(n.Prefixes) == 0 && !n.Primary }

// Config reads the file that --config names, lays it over the flags as kube-proxy does, and checks all of it.
func (o *Options) Config() (*Config, error) { return o.For("") }

// For is Config with another mode than the one that is written. The file is read each time.
func (o *Options) For(mode string) (*Config, error) {
	fresh := *o // what follows from the flags is written beside them
	if mode != "" {
		fresh.mode, fresh.proxy.Mode = mode, proxyv1alpha1.ProxyMode(mode)
	}
	if o.ConfigFile == "" {
		return fresh.with(nil)
	}
	f, err := load(o.ConfigFile)
	if err != nil {
		return nil, err
	}
	return fresh.with(f)
}

func (o *Options) with(f *file) (*Config, error) {
	o.spread()
	c := &Config{Proxy: o.proxy, Own: o.own, Master: o.master, Notes: o.strangers()}
	where := o.where()
	if f != nil {
		if f.proxy != nil {
			clear(where)
		}
		maps.Copy(where, f.where)
		if err := o.overlay(c, f); err != nil {
			return nil, err
		}
	}
	if err := o.name(c); err != nil {
		return nil, err
	}
	c.Gates = Gates(c.Proxy.FeatureGates)
	c.setMode()
	c.setPeriods(where)
	if errs := validate(c, where); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	c.fold()
	c.Notes = append(c.Notes, c.Gates.notes()...)
	c.Notes = append(c.Notes, remarks(c, where)...)
	return c, nil
}

// overlay lays the documents of a file over the flags. Of kube-proxy's document, what the file says wins (see fill); of ours,
// a flag.
func (o *Options) overlay(c *Config, f *file) error {
	c.Notes = append(c.Notes, f.warnings...)
	ours := c.Own
	if f.own != nil {
		c.Own = *f.own
	}
	if ours.Manifests != "" {
		c.Own.Manifests = ours.Manifests
	}
	if ours.ControlSocket != "" {
		c.Own.ControlSocket = ours.ControlSocket
	}
	if f.proxy == nil {
		c.Own.DisableHealthz = c.Own.DisableHealthz || ours.DisableHealthz
		c.Own.DisableMetrics = c.Own.DisableMetrics || ours.DisableMetrics
		return nil
	}
	flags := c.Proxy
	c.Proxy = *f.proxy
	if o.mode != "" {
		c.Proxy.Mode = proxyv1alpha1.ProxyMode(o.mode)
	}
	notes, err := o.fill(&c.Proxy, &flags, f.where)
	if err != nil {
		return fmt.Errorf("flags beside the file: %w", err)
	}
	c.Own.DisableHealthz = c.Own.DisableHealthz || ours.DisableHealthz && flags.HealthzBindAddress == c.Proxy.HealthzBindAddress
	c.Own.DisableMetrics = c.Own.DisableMetrics || ours.DisableMetrics && flags.MetricsBindAddress == c.Proxy.MetricsBindAddress
	setDefaults(&c.Proxy)
	setListeners(&c.Proxy, healthzPort, metricsPort)
	o.logging(&c.Proxy.Logging)
	c.Notes = append(c.Notes, notes...)
	return nil
}

// name settles the name of the node.
func (o *Options) name(c *Config) error {
	if o.hostname != "" {
		c.Proxy.HostnameOverride = o.hostname
		if strings.TrimSpace(o.hostname) == "" {
			return errors.New("--hostname-override: empty hostname-override is invalid")
		}
	}
	name := c.Proxy.HostnameOverride
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("read the host's name: %w (give --hostname-override)", err)
		}
		name = host
	}
	c.Node = strings.ToLower(strings.TrimSpace(name))
	if c.Node == "" {
		return errors.New("empty hostname is invalid (give --hostname-override)")
	}
	if c.Proxy.HostnameOverride != "" {
		c.Proxy.HostnameOverride = c.Node
	}
	return nil
}

func (c *Config) setMode() {
	if c.Mode = string(c.Proxy.Mode); c.Mode == "" {
		c.Mode = "iptables"
	}
}

// section is where the periods of the active mode stand. kube-proxy reads those of iptables for every mode it has no
// section for.
func (c *Config) section() string {
	if c.Mode == "nftables" || c.Mode == "ipvs" {
		return c.Mode
	}
	return "iptables"
}

// setPeriods takes the periods from the section of the active mode, as kube-proxy does.
func (c *Config) setPeriods(where map[string]string) {
	sync, least := c.Proxy.IPTables.SyncPeriod, c.Proxy.IPTables.MinSyncPeriod
	switch c.Mode {
	case "nftables":
		sync, least = c.Proxy.NFTables.SyncPeriod, c.Proxy.NFTables.MinSyncPeriod
	case "ipvs":
		sync, least = c.Proxy.IPVS.SyncPeriod, c.Proxy.IPVS.MinSyncPeriod
	}
	c.SyncPeriod, c.MinSyncPeriod = sync.Duration, least.Duration
	_, chosen := where[c.section()+".syncPeriod"]
	switch {
	case c.Own.ResyncPeriod.Duration != 0:
		c.ResyncPeriod = c.Own.ResyncPeriod.Duration
	case chosen:
		c.ResyncPeriod = c.SyncPeriod
	default:
		c.ResyncPeriod = DefaultResync
	}
}

// fold works out what follows from settings that are known to be good.
func (c *Config) fold() {
	p := &c.Proxy
	c.Healthz, c.Metrics = p.HealthzBindAddress, p.MetricsBindAddress
	if c.Own.DisableHealthz {
		c.Healthz, p.HealthzBindAddress = "", ""
	}
	if c.Own.DisableMetrics {
		c.Metrics, p.MetricsBindAddress = "", ""
	}
	set(&c.Own.WatchNodes, WatchAll)
	set(&c.Own.StaleAfter.Duration, DefaultStale)
	set(&c.Own.StateMaxAge.Duration, DefaultStateMaxAge)
	c.Own.ResyncPeriod.Duration = c.ResyncPeriod
	c.MasqueradeBit, c.MasqueradeAll = int(*p.IPTables.MasqueradeBit), p.IPTables.MasqueradeAll
	if c.Mode == "nftables" {
		c.MasqueradeBit, c.MasqueradeAll = int(*p.NFTables.MasqueradeBit), p.NFTables.MasqueradeAll
	}
	c.LocalhostPort = *p.IPTables.LocalhostNodePorts
	c.NoRelay = c.Gates.refused(LocalhostNodePorts)
	c.Detect = Detect{Mode: string(p.DetectLocalMode)}
	set(&c.Detect.Mode, DetectClusterCIDR)
	switch c.Detect.Mode {
	case DetectClusterCIDR:
		c.Detect.CIDRs = prefixes(cidrs(p.ClusterCIDR))
	case DetectBridge:
		c.Detect.Bridge = p.DetectLocal.BridgeInterface
	case DetectPrefix:
		c.Detect.Prefix = p.DetectLocal.InterfaceNamePrefix
	}
	c.NodePort = nodePorts(p.NodePortAddresses)
}

func nodePorts(list []string) NodePorts {
	var out NodePorts
	for _, s := range list {
		switch s {
		case NodePortAll:
			return NodePorts{}
		case NodePortPrimary:
			out.Primary = true
		case NodePortLocalhost:
			out.Prefixes = append(out.Prefixes, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
		default:
			out.Prefixes = append(out.Prefixes, prefixes([]string{s})...)
		}
	}
	return out
}

// cidrs splits clusterCIDR.
func cidrs(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// prefixes parses what the validation has let pass, in the way that Kubernetes reads CIDRs: leading zeros are decimal.
func prefixes(list []string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		if p, ok := prefix(s); ok {
			out = append(out, p)
		}
	}
	return out
}

func prefix(s string) (netip.Prefix, bool) {
	_, n, err := netutils.ParseCIDRSloppy(s)
	if err != nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits != addr.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(addr, ones), true
}
