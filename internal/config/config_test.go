package config

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

const (
	proxyHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	ownHead   = "apiVersion: fairlead.io/v1alpha1\nkind: FairleadConfiguration\n"
)

// from reads a command line; a file's content is put where "--config=F" says.
func from(t *testing.T, content string, args ...string) (*Config, error) {
	t.Helper()
	o := NewOptions()
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.AddFlags(fs)
	if content != "" {
		t.Chdir(t.TempDir())
		if err := os.WriteFile("F", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config=F"}, args...)
	}
	if !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--hostname-override") }) {
		args = append(args, "--hostname-override=n1")
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return o.Config()
}

func TestDefaults(t *testing.T) {
	for name, content := range map[string]string{"flags": "", "empty document": proxyHead, "our document only": ownHead} {
		t.Run(name, func(t *testing.T) {
			c, err := from(t, content)
			if err != nil {
				t.Fatal(err)
			}
			y, err := c.YAML()
			if err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(y)); diff != "" {
				t.Errorf("effective configuration (-want +got):\n%s", diff)
			}
			if c.Mode != "iptables" || c.Node != "n1" || !c.NodePort.All() || c.Detect.Mode != DetectClusterCIDR {
				t.Errorf("mode %q, node %q, nodePorts %v, detect %v", c.Mode, c.Node, c.NodePort, c.Detect)
			}
		})
	}
}

var golden = func() string {
	path, err := filepath.Abs("testdata/defaults.yaml")
	if err != nil {
		panic(err)
	}
	return path
}()

// TestWritten proves that what --write-config-to writes says all there is to say.
func TestWritten(t *testing.T) {
	first, err := from(t, "", "--proxy-mode=nftables", "--healthz-bind-address=", "--cluster-cidr=10.0.0.0/8", "--iptables-min-sync-period=0",
		"--manifests=/m", "--feature-gates=AllowServiceExternalIPs=false", "--vmodule=a=3", "--nodeport-addresses=localhost,10.0.0.0/8")
	if err != nil {
		t.Fatal(err)
	}
	y, err := first.YAML()
	if err != nil {
		t.Fatal(err)
	}
	second, err := from(t, string(y))
	if err != nil {
		t.Fatal(err)
	}
	first.Notes, second.Notes = nil, nil
	second.Own.TypeMeta = first.Own.TypeMeta
	if diff := cmp.Diff(first, second, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("read back (-first +second):\n%s", diff)
	}
}

func TestFold(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		args       []string
		get        func(*Config) any
		want       any
	}{
		{"mode", proxyHead + "mode: nftables", nil, func(c *Config) any { return c.Mode }, "nftables"},
		{"nftables takes primary", proxyHead + "mode: nftables", nil, func(c *Config) any { return c.NodePort.Primary }, true},
		{"nftables flag takes primary", "", []string{"--proxy-mode=nftables"}, func(c *Config) any { return c.NodePort.Primary }, true},
		{"a mode in a file takes primary over an empty flag", proxyHead + "mode: nftables\nnodePortAddresses: []", []string{"--nodeport-addresses="},
			func(c *Config) any { return c.Proxy.NodePortAddresses }, []string{"primary"}},
		{"a flag is written, in nftables mode too", proxyHead + "mode: nftables", []string{"--nodeport-addresses=localhost"},
			func(c *Config) any { return c.Proxy.NodePortAddresses }, []string{"localhost"}},
		{"all is written, in nftables mode too", proxyHead + "mode: nftables\nnodePortAddresses: [all]", nil,
			func(c *Config) any { return c.Proxy.NodePortAddresses }, []string{"all"}},
		{"no primary in iptables mode", proxyHead + "mode: iptables", nil, func(c *Config) any { return len(c.Proxy.NodePortAddresses) }, 0},
		{"relay by default", proxyHead + "mode: nftables", nil, func(c *Config) any { return c.NoRelay }, false},
		{"relay with the gate", proxyHead + "featureGates: {KubeProxyNFTablesLocalhostNodePorts: true}", nil,
			func(c *Config) any { return []any{c.NoRelay, len(c.Gates.notes())} }, []any{false, 0}},
		{"no relay without the gate", "", []string{"--feature-gates=KubeProxyNFTablesLocalhostNodePorts=false"}, func(c *Config) any { return c.NoRelay }, true},
		{"min 0s in a file", proxyHead + "iptables: {minSyncPeriod: 0s}", nil, func(c *Config) any { return c.MinSyncPeriod }, time.Duration(0)},
		{"min null in a file", proxyHead + "iptables: {minSyncPeriod: null}", nil, func(c *Config) any { return c.MinSyncPeriod }, time.Duration(0)},
		{"min 0 by flag", "", []string{"--iptables-min-sync-period=0"}, func(c *Config) any { return c.MinSyncPeriod }, time.Duration(0)},
		{"min of nftables by the iptables flag", "", []string{"--proxy-mode=nftables", "--iptables-min-sync-period=7s"}, func(c *Config) any { return c.MinSyncPeriod }, 7 * time.Second},
		{"min of ipvs from a file", proxyHead + "mode: ipvs", nil, func(c *Config) any { return c.MinSyncPeriod }, time.Duration(0)},
		{"min of ipvs by flag", "", []string{"--proxy-mode=ipvs"}, func(c *Config) any { return c.MinSyncPeriod }, time.Duration(0)},
		{"ipvs ignores iptables periods", "", []string{"--proxy-mode=ipvs", "--iptables-sync-period=7s"}, func(c *Config) any { return c.SyncPeriod }, 30 * time.Second},
		{"resync by default", proxyHead, nil, func(c *Config) any { return c.ResyncPeriod }, DefaultResync},
		{"resync from syncPeriod", proxyHead + "iptables: {syncPeriod: 40s}", nil, func(c *Config) any { return c.ResyncPeriod }, 40 * time.Second},
		{"resync from the flag", "", []string{"--iptables-sync-period=30s"}, func(c *Config) any { return c.ResyncPeriod }, 30 * time.Second},
		{"kubeadm's zero period", proxyHead + "iptables: {syncPeriod: 0s}", nil, func(c *Config) any { return c.ResyncPeriod }, DefaultResync},
		{"resync of our own", proxyHead + "iptables: {syncPeriod: 40s}\n---\n" + ownHead + "resyncPeriod: 1m", nil, func(c *Config) any { return c.ResyncPeriod }, time.Minute},
		{"stale by default", "", nil, func(c *Config) any { return c.Own.StaleAfter.Duration }, DefaultStale},
		{"the least that is stale", ownHead + "staleAfter: 75s", nil, func(c *Config) any { return c.Own.StaleAfter.Duration }, leastStale},
		{"state is old by default", "", nil, func(c *Config) any { return c.Own.StateMaxAge.Duration }, DefaultStateMaxAge},
		{"state", ownHead + "stateDir: /var/lib/fairlead\nstateMaxAge: 1h", nil, func(c *Config) any { return []any{c.Own.StateDir, c.Own.StateMaxAge.Duration} }, []any{"/var/lib/fairlead", time.Hour}},
		{"API servers", ownHead + "apiServers: [192.0.2.1, 'api.example.:6443', fd00::1, '[fd00::1]:6443', 'https://B.example:443/k8s']", nil,
			func(c *Config) any { return c.Own.APIServers }, []string{"192.0.2.1", "api.example.:6443", "fd00::1", "[fd00::1]:6443", "https://B.example:443/k8s"}},
		{"empty address in a file", proxyHead + `healthzBindAddress: ""`, nil, func(c *Config) any { return c.Healthz }, "0.0.0.0:10256"},
		{"healthz off in a file", ownHead + `disableHealthz: true`, nil, func(c *Config) any { return c.Healthz }, ""},
		{"healthz off by flag", "", []string{"--healthz-bind-address="}, func(c *Config) any { return c.Healthz }, ""},
		{"healthz off by port", "", []string{"--healthz-port=0"}, func(c *Config) any { return c.Healthz }, ""},
		{"metrics off by flag", "", []string{"--metrics-bind-address="}, func(c *Config) any { return c.Metrics }, ""},
		{"metrics off by port", "", []string{"--metrics-port=0"}, func(c *Config) any { return c.Metrics }, ""},
		{"metrics port", "", []string{"--metrics-port=99"}, func(c *Config) any { return c.Metrics }, "127.0.0.1:99"},
		{"metrics port kept", "", []string{"--metrics-bind-address=1.2.3.4:5", "--metrics-port=99"}, func(c *Config) any { return c.Metrics }, "1.2.3.4:5"},
		{"listeners of v6", proxyHead + `bindAddress: "::"`, nil, func(c *Config) any { return c.Healthz + " " + c.Metrics }, "[::]:10256 [::1]:10249"},
		{"port added", proxyHead + "healthzBindAddress: 1.2.3.4\nmetricsBindAddress: fd00::1", nil, func(c *Config) any { return c.Healthz + " " + c.Metrics }, "1.2.3.4:10256 [fd00::1]:10249"},
		{"host from a file", proxyHead + `hostnameOverride: " N7 "`, []string{"--hostname-override="}, func(c *Config) any { return c.Node }, "n7"},
		{"host flag wins", proxyHead + `hostnameOverride: n7`, []string{"--hostname-override= N8 "}, func(c *Config) any { return c.Node }, "n8"},
		{"master with a file", proxyHead, []string{"--master=https://a"}, func(c *Config) any { return c.Master }, "https://a"},
		{"a file overrules flags", proxyHead + "oomScoreAdj: 5", []string{"--oom-score-adj=6"}, func(c *Config) any { return []any{*c.Proxy.OOMScoreAdj, c.Notes[0]} },
			[]any{int32(5), "--oom-score-adj is not used: the file sets oomScoreAdj"}},
		{"flags fill what a file leaves open", proxyHead + "clusterCIDR: \"\"\nnodePortAddresses: null", []string{"--masquerade-all", "--cluster-cidr=10.9.0.0/16",
			"--nodeport-addresses=192.0.2.0/24", "--conntrack-max-per-core=0"}, func(c *Config) any {
			return []any{c.MasqueradeAll, c.Proxy.ClusterCIDR, c.Proxy.NodePortAddresses, *c.Proxy.Conntrack.MaxPerCore, c.Notes[0]}
		}, []any{true, "10.9.0.0/16", []string{"192.0.2.0/24"}, int32(0), "--cluster-cidr is used, since the file leaves clusterCIDR open"}},
		{"kubeconfig where the file has none", proxyHead, []string{"--kubeconfig=/k"}, func(c *Config) any { return c.Proxy.ClientConnection.Kubeconfig }, "/k"},
		{"kubeconfig of the file", proxyHead + "clientConnection: {kubeconfig: /f}", []string{"--kubeconfig=/k"}, func(c *Config) any { return c.Proxy.ClientConnection.Kubeconfig }, "/f"},
		{"flags beside our own document", ownHead, []string{"--proxy-mode=nftables"}, func(c *Config) any { return c.Mode }, "nftables"},
		{"verbosity flag wins", proxyHead + "logging: {verbosity: 1, format: json}", []string{"-v=4"}, func(c *Config) any {
			return []any{uint32(c.Proxy.Logging.Verbosity), c.Proxy.Logging.Format}
		}, []any{uint32(4), "json"}},
		{"vmodule joined", proxyHead + "logging: {vmodule: [{filePattern: b, verbosity: 2}]}", []string{"--vmodule=a=3"}, func(c *Config) any {
			return []any{c.Proxy.Logging.VModule[0].FilePattern, c.Proxy.Logging.VModule[1].FilePattern}
		}, []any{"a", "b"}},
		{"flag of ours over our document", ownHead + "manifests: /a", []string{"--manifests=/b"}, func(c *Config) any { return c.Own.Manifests }, "/b"},
		{"masquerade of all modes by one flag", "", []string{"--proxy-mode=nftables", "--masquerade-all", "--iptables-masquerade-bit=3"}, func(c *Config) any {
			return []any{c.MasqueradeAll, c.MasqueradeBit}
		}, []any{true, 14}},
		{"cluster CIDRs", proxyHead + `clusterCIDR: 10.1.2.3/16,fd00::/64`, nil, func(c *Config) any { return c.Detect.CIDRs[0].String() + " " + c.Detect.CIDRs[1].String() }, "10.1.0.0/16 fd00::/64"},
		{"underscores", "", []string{"--proxy_mode=nftables"}, func(c *Config) any { return c.Mode }, "nftables"},
		{"yes is true", proxyHead + "enableProfiling: yes", nil, func(c *Config) any { return c.Proxy.EnableProfiling }, true},
		{"merge key", proxyHead + "iptables: &x {masqueradeBit: 3, masqueradeAll: true}\nnftables:\n  <<: *x\n  masqueradeBit: 4", nil, func(c *Config) any {
			return []any{*c.Proxy.NFTables.MasqueradeBit, c.Proxy.NFTables.MasqueradeAll}
		}, []any{int32(4), true}},
		{"gate", "", []string{"--feature-gates=AllowServiceExternalIPs=false"}, func(c *Config) any { return c.Gates.Enabled(AllowServiceExternalIPs) }, false},
		{"gate by default", "", nil, func(c *Config) any { return c.Gates.Enabled(AllowServiceExternalIPs) }, true},
		{"all alpha", "", []string{"--feature-gates=AllAlpha=true"}, func(c *Config) any { return c.Gates.Enabled("LoggingAlphaOptions") }, true},
		{"json", `{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","mode":"ipvs"}`, nil, func(c *Config) any { return c.Mode }, "ipvs"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := from(t, tc.file, tc.args...)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, tc.get(c)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestNotes: what does not stop the program is still answered.
func TestNotes(t *testing.T) {
	for _, tc := range []struct{ name, file, flag, want string }{
		{"unknown field", proxyHead + "iptables:\n  masqueradeBits: 3\n", "", "F: line 4: field iptables.masqueradeBits: unknown field (ignored, as kube-proxy does)"},
		{"case", proxyHead + "iptables:\n  masqueradebit: 3\n", "", "F: line 4: field iptables.masqueradebit: unknown field, did you mean masqueradeBit? (ignored, as kube-proxy does)"},
		{"twice", proxyHead + "mode: ipvs\nmode: nftables", "", "F: line 4: field mode: set twice, the last one counts (ignored, as kube-proxy does)"},
		{"windows", proxyHead + "winkernel: {sourceVip: 1.2.3.4}", "", "F: line 3: winkernel.sourceVip is for Windows and has no effect"},
		{"windows flag", "", "--source-vip=1.2.3.4", "--source-vip: winkernel.sourceVip is for Windows and has no effect"},
		{"windows service", "", "--windows-service", "--windows-service: windowsRunAsService is for Windows and has no effect"},
		{"portRange", proxyHead + "portRange: 1-2", "", "F: line 3: portRange has no effect (it belonged to kube-proxy's userspace mode)"},
		{"gate", "", "--feature-gates=WinDSR=true", "feature gate WinDSR is known, and has no effect in fairlead"},
		{"configSyncPeriod", proxyHead + "configSyncPeriod: 1m", "", "F: line 3: configSyncPeriod has no effect: everything is compared with the kernel each resyncPeriod"},
		{"hidden metrics", "", "--show-hidden-metrics-for-version=1.36", "--show-hidden-metrics-for-version: showHiddenMetricsForVersion has no effect: no metric is hidden"},
		{"ipvs in another mode", proxyHead + "ipvs: {strictARP: true}", "", "ipvs.* has no effect in mode iptables"},
		{"apiServers beside manifests", ownHead + "apiServers: [a]\nmanifests: /m", "", "F: line 3: apiServers has no effect with manifests: no API server is asked"},
		{"stateDir beside manifests", ownHead + "stateDir: /s\nmanifests: /m", "", "F: line 3: stateDir has no effect with manifests: the files are there when the node boots"},
		{"leftover", "", "--boot-id-file=/x", "--boot-id-file has no effect"},
		{"cluster CIDR unused", proxyHead + "detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", "", "F: line 4: clusterCIDR has no effect with detectLocalMode NodeCIDR"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var args []string
			if tc.flag != "" {
				args = []string{tc.flag}
			}
			c, err := from(t, tc.file, args...)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(c.Notes, tc.want) {
				t.Errorf("want the note\n  %s\ngot\n  %s", tc.want, strings.Join(c.Notes, "\n  "))
			}
		})
	}
}

// TestNoNotes: kubeadm writes all fields out, and nothing need be said of those that are not set.
func TestNoNotes(t *testing.T) {
	c, err := from(t, proxyHead+`clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, tcpTimeout: 0s}
nodePortAddresses: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
`)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Notes) > 0 {
		t.Errorf("notes:\n  %s", strings.Join(c.Notes, "\n  "))
	}
}
