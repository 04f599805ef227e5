package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// TestRefused: each bad input has its exact answer, one line for each mistake.
func TestRefused(t *testing.T) {
	const (
		p  = "KubeProxyConfiguration."
		ct = p + "KubeProxyLinuxConfiguration.KubeProxyConntrackConfiguration."
	)
	for _, tc := range []struct{ name, file, flags, want string }{
		// what can't be read
		{"empty", "\n", "", "F: holds no configuration: want kind KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) or FairleadConfiguration (fairlead.io/v1alpha1)"},
		{"no kind", "mode: ipvs", "", `F: line 1: unexpected kind "" of apiVersion "": want KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) or FairleadConfiguration (fairlead.io/v1alpha1)`},
		{"wrong kind", "apiVersion: v1\nkind: Pod", "", `F: line 1: unexpected kind "Pod" of apiVersion "v1": want KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) or FairleadConfiguration (fairlead.io/v1alpha1)`},
		{"a word", "hello", "", `F: line 1: want fields (apiVersion: …, kind: …), got "hello"`},
		{"a list", "- 1", "", `F: line 1: want fields (apiVersion: …, kind: …), got a list`},
		{"bad YAML", proxyHead + "mode: [ipvs", "", "F: line 3: bad YAML: did not find expected ',' or ']'"},
		{"bad YAML in the second document", proxyHead + "---\n" + ownHead + "a: b: c", "", "F: line 6: bad YAML: mapping values are not allowed in this context"},
		{"a tab", proxyHead + "iptables:\n\tmasqueradeBit: 3", "", "F: line 4: bad YAML: found character that cannot start any token"},
		{"twice the kind", proxyHead + "---\n" + proxyHead, "", "F: line 4: a second KubeProxyConfiguration: a file may hold one"},
		{"twice our kind", ownHead + "---\n" + ownHead, "", "F: line 4: a second FairleadConfiguration: a file may hold one"},
		{"colons", proxyHead + "bindAddress: ::", "", "F: line 3: bad YAML: mapping values are not allowed in this context"},
		// types
		{"text for a number", proxyHead + "iptables:\n  masqueradeBit: many", "", `F: line 4: field iptables.masqueradeBit: want a whole number, got "many"`},
		{"fraction", proxyHead + "oomScoreAdj: 1.5", "", `F: line 3: field oomScoreAdj: want a whole number, got "1.5"`},
		{"too large", proxyHead + "oomScoreAdj: 99999999999", "", `F: line 3: field oomScoreAdj: want a whole number, got "99999999999"`},
		{"number for a text", proxyHead + "hostnameOverride: 123", "", `F: line 3: field hostnameOverride: want a text, got "123" (put it in quotes)`},
		{"text for a flag", proxyHead + "enableProfiling: often", "", `F: line 3: field enableProfiling: want true or false, got "often"`},
		{"number for a duration", proxyHead + "configSyncPeriod: 5", "", `F: line 3: field configSyncPeriod: want a duration such as "30s", got "5"`},
		{"bad duration", proxyHead + "configSyncPeriod: 5 fortnights", "", `F: line 3: field configSyncPeriod: want a duration such as "30s", got "5 fortnights"`},
		{"text for fields", proxyHead + "iptables: yes", "", `F: line 3: field iptables: want fields (name: value), got "yes"`},
		{"text for a list", proxyHead + "nodePortAddresses: all", "", `F: line 3: field nodePortAddresses: want a list, got "all"`},
		{"list for a text", proxyHead + "mode: [ipvs]", "", `F: line 3: field mode: want a text, got a list`},
		{"gate", proxyHead + "featureGates: {AllAlpha: 7}", "", `F: line 3: field featureGates.AllAlpha: want true or false, got "7"`},
		{"negative verbosity", proxyHead + "logging: {verbosity: -1}", "", `F: line 3: field logging.verbosity: want a whole number that is not negative, got "-1"`},
		{"all at once", proxyHead + "mode: 1\noomScoreAdj: x", "", `F: line 3: field mode: want a text, got "1" (put it in quotes)` + "\n" + `F: line 4: field oomScoreAdj: want a whole number, got "x"`},
		// ours is strict
		{"unknown field of ours", ownHead + "resync: 5m", "", "F: line 3: field resync: unknown field"},
		{"repeated field of ours", ownHead + "watchNodes: own\nwatchNodes: all", "", "F: line 4: field watchNodes: set twice, the last one counts"},
		{"watchNodes", ownHead + "watchNodes: some", "", `F: line 3: FairleadConfiguration.watchNodes: Unsupported value: "some": supported values: "all", "own"`},
		{"resyncPeriod", ownHead + "resyncPeriod: -1s", "", `F: line 3: FairleadConfiguration.resyncPeriod: Invalid value: "-1s": must be greater than or equal to 0`},
		{"controlSocket", ownHead + "controlSocket: here", "", `F: line 3: FairleadConfiguration.controlSocket: Invalid value: "here": must be an absolute path of at most 107 bytes, or "off"`},
		{"stateDir", ownHead + "stateDir: state", "", `F: line 3: FairleadConfiguration.stateDir: Invalid value: "state": must be an absolute path`},
		{"stateMaxAge", ownHead + "stateMaxAge: -1h", "", `F: line 3: FairleadConfiguration.stateMaxAge: Invalid value: "-1h0m0s": must be greater than 0`},
		{"stateMaxAge 0", ownHead + "stateMaxAge: 0s", "", `F: line 3: FairleadConfiguration.stateMaxAge: Invalid value: "0s": must be greater than 0`},
		{"staleAfter", ownHead + "staleAfter: 1m", "", `F: line 3: FairleadConfiguration.staleAfter: Invalid value: "1m0s": must be at least 1m15s: an API server that is well may be silent for a minute`},
		{"apiServers", ownHead + "apiServers:\n- 192.0.2.1\n- ftp://192.0.2.1\n- a:0\n- https://u:p@a\n- a b\n- ''\n- 'a:'\n- 192.0.2.1\n- https://a?x", "",
			`F: line 5: FairleadConfiguration.apiServers[1]: Invalid value: "ftp://192.0.2.1": "ftp" is neither https nor http` + "\n" +
				`F: line 6: FairleadConfiguration.apiServers[2]: Invalid value: "a:0": the port must be a number from 1 to 65535` + "\n" +
				`F: line 7: FairleadConfiguration.apiServers[3]: Invalid value: "https://u:p@a": only a host, a port and a path can be given` + "\n" +
				`F: line 8: FairleadConfiguration.apiServers[4]: Invalid value: "a b": "a b" is no name or address of a host` + "\n" +
				`F: line 9: FairleadConfiguration.apiServers[5]: Invalid value: "": "" is no name or address of a host` + "\n" +
				`F: line 10: FairleadConfiguration.apiServers[6]: Invalid value: "a:": the port must be a number from 1 to 65535` + "\n" +
				`F: line 11: FairleadConfiguration.apiServers[7]: Duplicate value: "192.0.2.1"` + "\n" +
				`F: line 12: FairleadConfiguration.apiServers[8]: Invalid value: "https://a?x": only a host, a port and a path can be given`},
		// values, as kube-proxy refuses them
		{"bind address", "", "--bind-address=10.0.0", "--bind-address: " + p + `BindAddress: Invalid value: "10.0.0": not a valid textual representation of an IP address`},
		{"healthz", "", "--healthz-bind-address=256.1.1.1:1", "--healthz-bind-address: " + p + `HealthzBindAddress: Invalid value: "256.1.1.1": must be a valid IP`},
		{"healthz without port", proxyHead + "healthzBindAddress: localhost", "", "F: line 3: " + p + `HealthzBindAddress: Invalid value: "localhost": must be IP:port`},
		{"metrics port", "", "--metrics-bind-address=0.0.0.0:0", "--metrics-bind-address: " + p + `MetricsBindAddress: Invalid value: "0": must be a valid port`},
		{"metrics named port", "", "--metrics-bind-address=0.0.0.0:http", "--metrics-bind-address: " + p + `MetricsBindAddress: Invalid value: "http": must be a valid port`},
		{"mode", "", "--proxy-mode=bogus", "--proxy-mode: " + p + `Mode.ProxyMode: Invalid value: "bogus": must be ebpf, iptables, ipvs, nftables, userspace or blank (blank means the best-available proxy [currently iptables])`},
		{"windows mode", proxyHead + "mode: kernelspace", "", "F: line 3: " + p + `Mode.ProxyMode: Invalid value: "kernelspace": is for Windows: must be ebpf, iptables, ipvs, nftables, userspace or blank (blank means the best-available proxy [currently iptables])`},
		{"ipvs off by its gate", "", "--proxy-mode=ipvs --feature-gates=KubeProxyIPVS=false", "--proxy-mode: " + p + `Mode.ProxyMode: Invalid value: "ipvs": must be ebpf, iptables, nftables, userspace or blank (blank means the best-available proxy [currently iptables])`},
		{"masquerade bit", "", "--iptables-masquerade-bit=32", "--iptables-masquerade-bit: " + p + "KubeProxyIPTablesConfiguration.MasqueradeBit: Invalid value: 32: must be within the range [0, 31]"},
		{"nftables bit", proxyHead + "mode: nftables\nnftables: {masqueradeBit: -1}", "", "F: line 4: " + p + "KubeProxyNFTablesConfiguration.MasqueradeBit: Invalid value: -1: must be within the range [0, 31]"},
		{"oom", "", "--oom-score-adj=1001", "--oom-score-adj: " + p + "KubeProxyLinuxConfiguration.OOMScoreAdj: Invalid value: 1001: must be within the range [-1000, 1000]"},
		{"conntrack", "", "--conntrack-max-per-core=-1 --conntrack-min=-2", "--conntrack-max-per-core: " + ct + "MaxPerCore: Invalid value: -1: must be greater than or equal to 0\n" +
			"--conntrack-min: " + ct + "Min: Invalid value: -2: must be greater than or equal to 0"},
		{"conntrack timeout", proxyHead + "conntrack:\n  udpTimeout: -5s", "", "F: line 4: " + ct + `UDPTimeout: Invalid value: "-5s": must be greater than or equal to 0`},
		{"burst", "", "--kube-api-burst=-1", "--kube-api-burst: " + p + "ClientConnection.Burst: Invalid value: -1: must be non-negative"},
		{"configSyncPeriod", "", "--config-sync-period=-1s", "--config-sync-period: " + p + `ConfigSyncPeriod: Invalid value: "-1s": must be greater than 0`},
		{"syncPeriod", "", "--iptables-sync-period=-1s --iptables-min-sync-period=0", "--iptables-sync-period: " + p + `SyncPeriod: Invalid value: "-1s": must be greater than 0` + "\n" +
			"--iptables-min-sync-period: " + p + `SyncPeriod: Invalid value: "-1s": must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod (0s)`},
		{"minSyncPeriod", "", "--iptables-min-sync-period=-1s", "--iptables-min-sync-period: " + p + `MinSyncPeriod: Invalid value: "-1s": must be greater than or equal to 0`},
		{"min above sync", proxyHead + "iptables:\n  syncPeriod: 5s\n  minSyncPeriod: 6s", "", "F: line 5: " + p + `SyncPeriod: Invalid value: "5s": must be greater than or equal to KubeProxyConfiguration.MinSyncPeriod (6s)`},
		{"ipvs timeouts", "", "--proxy-mode=ipvs --ipvs-tcp-timeout=-1s", "--ipvs-tcp-timeout: " + p + `KubeProxyIPVSConfiguration.TCPTimeout: Invalid value: "-1s": must be greater than or equal to 0`},
		{"ipvs excludes", proxyHead + "mode: ipvs\nipvs:\n  excludeCIDRs:\n  - 10.0.0.0/8\n  - 10.0.0.1", "", "F: line 7: " + p + `KubeProxyIPVSConfiguration.ExcludeCidrs[1]: Invalid value: "10.0.0.1": must be a valid CIDR`},
		{"nodePortAddresses", "", "--nodeport-addresses=primary,10.0.0.1,primary,Primary", "--nodeport-addresses: " + p + `NodePortAddresses[1]: Invalid value: "10.0.0.1": must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'` + "\n" +
			"--nodeport-addresses: " + p + `NodePortAddresses[2]: Duplicate value: "primary"` + "\n" +
			"--nodeport-addresses: " + p + `NodePortAddresses[3]: Invalid value: "Primary": must be a valid CIDR or one of the keywords 'primary', 'localhost', 'all'`},
		{"hidden metrics", "", "--show-hidden-metrics-for-version=1.2", "--show-hidden-metrics-for-version: " + p + `ShowHiddenMetricsForVersion: Invalid value: "1.2": must be omitted or have the value '1.36'; only the previous minor version is allowed`},
		{"detectLocalMode", "", "--detect-local-mode=Guess", "--detect-local-mode: " + p + `DetectLocalMode: Unsupported value: "Guess": supported values: "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix", ""`},
		{"bridge", "", "--detect-local-mode=BridgeInterface", p + `DetectLocalConfiguration.InterfaceName: Invalid value: "": must not be empty`},
		{"prefix", "", "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=a/b", "--pod-interface-name-prefix: " + p + `DetectLocalConfiguration.InterfacePrefix: Invalid value: "a/b": must be a valid interface name (at most 15 characters, no space, slash or colon)`},
		{"clusterCIDR", "", "--cluster-cidr=10.0.0.0", "--cluster-cidr: " + p + `DetectLocalConfiguration.ClusterCIDRs[0]: Invalid value: "10.0.0.0": must be a valid CIDR block (e.g. 10.100.0.0/16 or fde4:8dba:82e1::/48)`},
		{"two of one family", "", "--cluster-cidr=10.0.0.0/8,11.0.0.0/8", "--cluster-cidr: " + p + `DetectLocalConfiguration.ClusterCIDRs: Invalid value: ["10.0.0.0/8","11.0.0.0/8"]: must be a either a single CIDR or dual-stack pair of CIDRs (e.g. [10.100.0.0/16, fde4:8dba:82e1::/48]`},
		{"unknown gates", "", "--feature-gates=Nonsense=true,More=false", "--feature-gates: " + p + `featureGates: Invalid value: "More": unrecognized feature gate: More` + "\n" +
			"--feature-gates: " + p + `featureGates: Invalid value: "Nonsense": unrecognized feature gate: Nonsense`},
		{"locked gate", proxyHead + "featureGates:\n  NFTablesProxyMode: false", "", "F: line 4: " + p + `featureGates: Invalid value: "NFTablesProxyMode": cannot set feature gate NFTablesProxyMode to false, feature is locked to true`},
		{"log format", "", "--logging-format=xml", p + `logging.format: Invalid value: "xml": Unsupported log format`},
		{"alpha of the log", proxyHead + "logging: {options: {text: {splitStream: true}}}", "", "F: line 3: " + p + "logging.options.text.splitStream: Forbidden: Feature LoggingAlphaOptions is disabled"},
		{"host", "", "--hostname-override=\u2003", "--hostname-override: empty hostname-override is invalid"},
		// what the flags themselves refuse
		{"flag type", "", "--iptables-masquerade-bit=x", `invalid argument "x" for "--iptables-masquerade-bit" flag: must be an integer`},
		{"unknown flag", "", "--proxy-modes=x", "unknown flag: --proxy-modes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := from(t, tc.file, strings.FieldsFunc(tc.flags, func(r rune) bool { return r == ' ' })...)
			if err == nil {
				t.Fatalf("taken; want\n%s", tc.want)
			}
			if diff := cmp.Diff(strings.Split(tc.want, "\n"), strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestMissingFile(t *testing.T) {
	o := NewOptions()
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.AddFlags(fs)
	path := filepath.Join(t.TempDir(), "none")
	if err := fs.Parse([]string{"--config=" + path}); err != nil {
		t.Fatal(err)
	}
	_, err := o.Config()
	if want := "read config: open " + path + ": no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestFlagParity: the command line of kube-proxy 1.37 is complete, each flag either sets a field or is known to do something
// else, and no flag has lost its help.
func TestFlagParity(t *testing.T) {
	o := NewOptions()
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.AddFlags(fs)
	list, err := os.ReadFile("testdata/kube-proxy-flags.txt")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{"manifests": true, "control-socket": true}
	for line := range strings.Lines(string(list)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		known[f[0]] = true
		got := fs.Lookup(f[0])
		switch {
		case f[0] == "version" || f[0] == "help": // the command's own, see package cli
		case got == nil:
			t.Errorf("--%s is missing", f[0])
		case strings.HasSuffix(f[0], "-min-sync-period") && got.DefValue == "0s": // on purpose: see defaults.go
		case len(f) > 1 && got.DefValue != f[1]:
			t.Errorf("--%s is %q by default, kube-proxy has %q", f[0], got.DefValue, f[1])
		}
	}
	action := []string{"config", "write-config-to", "cleanup", "init-only", "manifests", "control-socket", "master"}
	fs.VisitAll(func(f *pflag.Flag) {
		_, sets := fieldOf[f.Name]
		isLog := strings.HasPrefix(f.Name, "log") || f.Name == "v" || f.Name == "vmodule"
		switch {
		case !known[f.Name]:
			t.Errorf("--%s is not in the list", f.Name)
		case !sets && !isLog && !slices.Contains(action, f.Name) && !slices.Contains(elsewhere, f.Name):
			t.Errorf("--%s sets no field and is no action", f.Name)
		case f.Usage == "":
			t.Errorf("--%s has no help", f.Name)
		}
	})
}

// TestGates: the list is whole and readable.
func TestGates(t *testing.T) {
	if n := len(knownGates()); n < 200 {
		t.Errorf("%d gates, want those of Kubernetes 1.37", n)
	}
	for name, g := range knownGates() {
		if !slices.Contains([]string{"GA", "BETA", "ALPHA", "DEPRECATED"}, g.stage) {
			t.Errorf("%s: stage %q", name, g.stage)
		}
	}
	for _, name := range honoured {
		if _, ok := knownGates()[name]; !ok {
			t.Errorf("%s is obeyed and not in the list", name)
		}
	}
}

// FuzzParse: no file makes it panic, and every refusal is made of lines that name the file.
func FuzzParse(f *testing.F) {
	for _, s := range []string{proxyHead, ownHead, proxyHead + "iptables: {minSyncPeriod: 0s}\n---\n" + ownHead + "resyncPeriod: 5m",
		proxyHead + "a: &a [*a]", proxyHead + "x: {<<: [*b]}", proxyHead + "logging: {vmodule: [{filePattern: x}]}", "{", "\x00", "--- ---",
		proxyHead + "iptables: &x\n  <<: *x\n", proxyHead + "? [a]\n: b", proxyHead + "logging: {options: {json: {infoBufferSize: 1Ki}}}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := parse("F", data)
		if err == nil && got.proxy == nil && got.own == nil {
			t.Error("nothing found, and no error")
		}
		if err == nil {
			o := NewOptions()
			o.AddFlags(pflag.NewFlagSet("run", pflag.ContinueOnError))
			o.hostname = "n1"
			if c, err := o.with(got); err == nil {
				if _, err := c.YAML(); err != nil {
					t.Error(err)
				}
			}
			return
		}
		for line := range strings.SplitSeq(err.Error(), "\n") {
			if !strings.HasPrefix(line, "F: ") {
				t.Errorf("a line without the file: %q", line)
			}
		}
	})
}
