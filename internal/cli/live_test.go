package cli

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/dataplane/memory"
	"fairlead/internal/engine"
)

// scribe is a log that is written and read at the same time.
type scribe struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *scribe) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(b)
}

func (s *scribe) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.String()
}

// mode is a dataplane for tests under the name of a real one.
type mode struct {
	kernel  memory.Kernel
	built   int
	removed int
	broken  error // of building it
}

type modePlane struct {
	engine.Dataplane
	m *mode
}

func (p modePlane) Remove(ctx context.Context) error {
	p.m.removed++
	return p.Dataplane.Remove(ctx)
}

// noGate stands for a node where nobody uses iptables.
type noGate struct{}

func (noGate) Keep(context.Context, int) ([]string, error) { return nil, nil }
func (noGate) Remove(context.Context) ([]string, error)    { return nil, nil }
func (noGate) Close() error                                { return nil }

// pretend puts modes of tests in the place of real ones.
func pretend(t *testing.T, names ...string) map[string]*mode {
	out := map[string]*mode{}
	realPlanes, realRemovers, realGate := dataplanes, removers, newGate
	newGate = func() gate { return noGate{} }
	dataplanes, removers = map[string]build{config.Memory: buildMemory}, map[string]func(context.Context, *config.Config) (engine.Dataplane, families, error){}
	t.Cleanup(func() { dataplanes, removers, newGate = realPlanes, realRemovers, realGate })
	for _, name := range names {
		m := &mode{}
		out[name] = m
		dataplanes[name] = func(context.Context, *config.Config) (engine.Dataplane, families, error) {
			m.built++
			return modePlane{memory.New(&m.kernel), m}, families{v4: true, v6: true}, m.broken
		}
		removers[name] = dataplanes[name]
	}
	return out
}

// node is an agent whose configuration comes as a ConfigMap does.
type node struct {
	t      *testing.T
	dir    string
	seq    int
	agent  *agent
	client *control.Client
	log    *scribe
}

const service = `apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: 10.96.0.10, ports: [{port: 80}]}
`

// configure replaces the ConfigMap as the kubelet does: a new directory, and a link that is moved to it.
func (n *node) configure(proxy string) {
	n.t.Helper()
	n.seq++
	version := fmt.Sprintf("..v%d", n.seq)
	text := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
oomScoreAdj: 0
%s
---
apiVersion: fairlead.io/v1alpha1
kind: FairleadConfiguration
manifests: %s
controlSocket: %s
disableHealthz: true
disableMetrics: true
`, proxy, filepath.Join(n.dir, "manifests"), filepath.Join(n.dir, "sock"))
	check := func(err error) {
		if err != nil {
			n.t.Fatal(err)
		}
	}
	at := filepath.Join(n.dir, "config")
	check(os.MkdirAll(filepath.Join(at, version), 0o755))
	check(os.WriteFile(filepath.Join(at, version, "config.conf"), []byte(text), 0o600))
	check(os.Symlink(version, filepath.Join(at, "..tmp")))
	check(os.Rename(filepath.Join(at, "..tmp"), filepath.Join(at, "..data")))
	if n.seq == 1 {
		check(os.Symlink("..data/config.conf", filepath.Join(at, "config.conf")))
	}
}

func startNode(t *testing.T, proxy string, args ...string) *node {
	t.Helper()
	n := &node{t: t, dir: t.TempDir(), log: new(scribe)}
	quiet := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(quiet)
	if err := quiet.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"}); err != nil {
		t.Fatal(err)
	}
	klog.SetOutput(n.log)
	t.Cleanup(func() { klog.SetOutput(io.Discard) })
	if err := os.MkdirAll(filepath.Join(n.dir, "manifests"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.dir, "manifests", "web.yaml"), []byte(service), 0o600); err != nil {
		t.Fatal(err)
	}
	n.configure(proxy)
	o, fs := config.NewOptions(), pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(append(args, "--config", filepath.Join(n.dir, "config", "config.conf"), "--hostname-override=n1")); err != nil {
		t.Fatal(err)
	}
	c, err := o.Config()
	if err != nil {
		t.Fatal(err)
	}
	n.agent = newAgent(c, o.ConfigFile)
	n.agent.options = o
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.agent.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the agent ended: %v", err)
		}
	})
	n.client = control.NewClient(filepath.Join(n.dir, "sock"))
	n.until("it serves", func() bool { s, err := n.client.Status(t.Context()); return err == nil && s.Engine.Generation > 0 })
	return n
}

func (n *node) until(what string, holds func() bool) {
	n.t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("%s: not yet\n%s", what, n.log)
		}
	}
}

func (n *node) logged(text string) {
	n.t.Helper()
	n.until("the log says "+text, func() bool { return strings.Contains(n.log.String(), text) })
}

func (n *node) mode() string {
	n.t.Helper()
	s, err := n.client.Status(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	return s.About.Mode
}

func (n *node) serves(modes map[string]*mode, name string) {
	n.t.Helper()
	n.until("mode "+name, func() bool { return n.mode() == name })
	for other, m := range modes {
		want := 0
		if other == name {
			want = 1
		}
		if held := len(m.kernel.State().Frontends); held != want {
			n.t.Errorf("in mode %s, %s holds %d frontends, want %d", name, other, held, want)
		}
	}
}

// TestConfigurationFollowsTheFile: a ConfigMap that is replaced moves the agent to another mode, and to other settings; what
// can't be changed is named, what is wrong changes nothing.
func TestConfigurationFollowsTheFile(t *testing.T) {
	modes := pretend(t, "nftables", "userspace")
	n := startNode(t, "mode: memory")
	n.configure("mode: nftables")
	n.serves(modes, "nftables")
	n.logged("fairlead serves in nftables mode now (was memory)")

	n.configure("mode: nftables\nnftables: {masqueradeBit: 3, minSyncPeriod: 3s}\nnodePortAddresses: [192.0.2.0/24]")
	n.until("a dataplane with the other bit", func() bool { return modes["nftables"].built == 2 && n.agent.now().c.MasqueradeBit == 3 })
	n.serves(modes, "nftables")
	n.until("other node ports", func() bool {
		s, err := n.client.State(t.Context(), "")
		return err == nil && slices.Contains(s.Node.NodePorts, netip.MustParsePrefix("192.0.2.0/24"))
	})
	if modes["nftables"].removed > 0 {
		t.Error("the rules of the same dataplane were removed")
	}

	n.configure("mode: [nftables]")
	n.logged("the changed configuration is not used, and nothing changes: ")
	n.configure("mode: ipvs")
	n.logged("proxy mode ipvs is not built yet (this build has nftables, userspace)")
	n.serves(modes, "nftables")

	n.configure("mode: nftables\nenableProfiling: true\nfeatureGates: {AllAlpha: true}\nlogging: {verbosity: 2}")
	n.logged(`need a restart; until then they stay as they were" fields="featureGates, enableProfiling"`)
	n.until("a wordier log", func() bool { return klog.V(2).Enabled() && !klog.V(3).Enabled() })
	if c := n.agent.now().c; c.Node != "n1" || c.Proxy.EnableProfiling || len(c.Gates) > 0 || c.MasqueradeBit != 14 {
		t.Errorf("in effect: %+v", c)
	}
	b, err := n.agent.configz()
	if err != nil || !bytes.Contains(b, []byte(`"mode":"nftables"`)) || !bytes.Contains(b, []byte(`"enableProfiling":false`)) {
		t.Errorf("%v\n%s", err, b)
	}
}

// TestSwitch: the command's way, through the control socket; and how long it holds.
func TestSwitch(t *testing.T) {
	modes := pretend(t, "nftables", "userspace", "ebpf")
	n := startNode(t, "mode: memory")
	modes["ebpf"].broken = errors.New("this kernel has none")
	for _, step := range []struct{ to, says, serves string }{
		{"nftables", "fairlead serves in nftables mode now (was memory), ", "nftables"},
		{"nftables", "fairlead serves in nftables mode already", "nftables"},
		{"userspace", "fairlead serves in userspace mode now (was nftables), ", "userspace"},
		{"ebpf", "ask the agent: mode userspace stays: this kernel has none", "userspace"},
		{"memory", "ask the agent: mode memory is a dry run", "userspace"},
		{"carrier-pigeon", `ask the agent: there is no mode "carrier-pigeon" (this build has ebpf, nftables, userspace)`, "userspace"},
		{"ipvs", "ask the agent: proxy mode ipvs is not built yet", "userspace"},
	} {
		s, err := n.client.Switch(t.Context(), step.to)
		got := s.String()
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, step.says) {
			t.Errorf("switch %s: %s, want %s…", step.to, got, step.says)
		}
		n.serves(modes, step.serves)
	}
	if s, err := n.client.Status(t.Context()); err != nil || s.About.Written != "memory" || !strings.Contains(statusLines(s), "switched   until a restart") {
		t.Errorf("status %+v, %v", s.About, err)
	}
	n.configure("mode: memory\nnodePortAddresses: [192.0.2.0/24]") // another change of the file
	n.logged(`changed while running" fields="nodePortAddresses"`)
	n.serves(modes, "userspace")
	n.configure("mode: nftables")
	n.serves(modes, "nftables")
	n.configure("mode: userspace")
	n.serves(modes, "userspace")
	if s, err := n.client.Status(t.Context()); err != nil || s.About.Written != "userspace" {
		t.Errorf("status %+v, %v", s.About, err)
	}
	if _, err := n.client.Switch(t.Context(), "userspace"); err != nil {
		t.Error(err)
	}
	n.configure("mode: nftables")
	n.serves(modes, "nftables")
}

// TestHeir: what other modes have left goes, not what serves, whenever the mode has changed in between.
func TestHeir(t *testing.T) {
	modes := pretend(t, "nftables", "userspace", "ebpf")
	n := startNode(t, "mode: memory") // in which the heir rests: the test is the heir
	if _, err := n.client.Switch(t.Context(), "nftables"); err != nil {
		t.Fatal(err)
	}
	_, now, err := plane(t.Context(), n.agent.now().c)
	if err != nil {
		t.Fatal(err)
	}
	modes["ebpf"].broken = errors.New("this kernel has none")
	owed, err := n.agent.inherit(t.Context(), []string{"ebpf", "nftables", "userspace"})
	if err != nil || len(owed) > 0 || modes["nftables"].removed != 0 || modes["userspace"].removed == 0 || modes["ebpf"].removed != 0 {
		t.Errorf("%v, %v", owed, err)
	}
	modes["userspace"].kernel.Fail(func() memory.Fault { return memory.Before })
	if _, err := n.client.Switch(t.Context(), "userspace"); err == nil {
		t.Error("a kernel that fails took a switch")
	}
	n.serves(modes, "nftables")
	for _, c := range []struct {
		now     current
		remover string
		needs   bool
	}{
		{*now, "nftables", true}, {*now, "userspace", false}, {*now, "iptables (nf_tables)", false}, {*now, "iptables (legacy)", false},
		{current{c: &config.Config{Mode: "iptables"}, backend: "nf_tables"}, "iptables (nf_tables)", true},
		{current{c: &config.Config{Mode: "iptables"}, backend: "nf_tables"}, "iptables (legacy)", false},
		{current{c: &config.Config{Mode: "iptables"}, backend: "legacy"}, "iptables (legacy)", true},
		{current{c: &config.Config{Mode: "iptables"}, backend: "legacy"}, "iptables (nf_tables)", true},
		{current{c: &config.Config{Mode: "iptables"}, backend: "legacy"}, "nftables", false},
	} {
		if got := c.now.needs(c.remover); got != c.needs {
			t.Errorf("%s: needs %s: %v", c.now.place(), c.remover, got)
		}
	}
	if !slices.Contains([]string{"nftables"}, n.mode()) {
		t.Errorf("mode %s", n.mode())
	}
}
