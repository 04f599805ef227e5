package fairlead_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"fairlead/examples"
	"fairlead/internal/config"
	"fairlead/internal/events"
	"fairlead/internal/health"
	"fairlead/internal/kernel"
	"fairlead/internal/metrics"
	"fairlead/internal/relay"
	"fairlead/internal/resolve"
)

func documents(t *testing.T) (paths []string) {
	for _, path := range files(t) {
		if strings.HasSuffix(path, ".md") {
			paths = append(paths, path)
		}
	}
	return paths
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	fence   = regexp.MustCompile("(?ms)^```.*?^```$")
)

// TestLinks: a link inside the repository leads to a file, and to a heading of it.
func TestLinks(t *testing.T) {
	for _, path := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(read(t, path), ""), -1) {
			to, anchor, _ := strings.Cut(m[1], "#")
			if strings.Contains(to, "://") {
				continue
			}
			target := path
			if to != "" {
				target = filepath.Join(filepath.Dir(path), to)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which is not there", path, m[1])
			} else if anchor != "" && !slices.Contains(anchors(read(t, target)), anchor) {
				t.Errorf("%s links to %s: no heading gives that anchor", path, m[1])
			}
		}
	}
}

// anchors are what GitHub makes of headings.
func anchors(text string) (out []string) {
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		a := strings.ReplaceAll(strings.ToLower(m[1]), " ", "-")
		out = append(out, regexp.MustCompile(`[^\p{L}\p{N}_-]`).ReplaceAllString(a, ""))
	}
	return out
}

// TestConfigurationIsComplete: docs/configuration.md names each field of both documents, each flag, and the annotation.
func TestConfigurationIsComplete(t *testing.T) {
	told := map[string]bool{}
	for _, w := range ticked(fence.ReplaceAllString(read(t, "docs/configuration.md"), "")) {
		told[w] = true
	}
	want := append(fields(reflect.TypeFor[proxyv1alpha1.KubeProxyConfiguration](), ""), fields(reflect.TypeFor[config.Fairlead](), "")...)
	fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
	config.NewOptions().AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) { want = append(want, "--"+f.Name) })
	for _, w := range append(want, resolve.AnnotationTopologyKeys) {
		if !told[w] {
			t.Errorf("docs/configuration.md does not tell of `%s`", w)
		}
	}
}

// TestLiveFieldsAreTold: what a running agent takes up stands under "A change of the file", and nothing else does.
func TestLiveFieldsAreTold(t *testing.T) {
	_, text, _ := strings.Cut(read(t, "docs/configuration.md"), "## A change of the file\n")
	text, _, _ = strings.Cut(text, "\n## ")
	told := ticked(text)
	for _, f := range config.Live() {
		if !slices.Contains(told, f) {
			t.Errorf("docs/configuration.md does not tell that `%s` is taken up while running", f)
		}
	}
	for _, f := range fields(reflect.TypeFor[proxyv1alpha1.KubeProxyConfiguration](), "") {
		if slices.Contains(told, f) && f != "logging" && !slices.Contains(config.Live(), f) {
			t.Errorf("docs/configuration.md tells that `%s` is taken up while running", f)
		}
	}
}

// fields lists the fields of a document by their paths, the way a person writes them.
func fields(of reflect.Type, prefix string) (paths []string) {
	for i := range of.NumField() {
		f := of.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		inner := f.Type
		switch {
		case f.Type == reflect.TypeFor[metav1.TypeMeta]():
		case name == "":
			paths = append(paths, fields(inner, prefix)...)
		case inner.Kind() == reflect.Struct && strings.HasPrefix(inner.PkgPath(), "k8s.io/") && inner.NumField() > 1 && name != "logging":
			paths = append(paths, fields(inner, prefix+name+".")...)
		default:
			paths = append(paths, prefix+name)
		}
	}
	return paths
}

// TestEventsAreExplained: who is woken by an Event finds its reason in docs/troubleshooting.md.
func TestEventsAreExplained(t *testing.T) {
	told := ticked(fence.ReplaceAllString(read(t, "docs/troubleshooting.md"), ""))
	for _, reason := range append(slices.Clone(resolve.Reasons), events.Starting, events.ApplyFails, events.ApplyWorks, events.DriftRepair, events.Switched, events.ConfigFailed,
		events.ViewStale, events.ViewFresh, events.CertificateExpires, events.CredentialsRefused,
		health.ListenFailed, health.PortFailed, metrics.ListenFailed, relay.ListenFailed) {
		if !slices.Contains(told, reason) {
			t.Errorf("docs/troubleshooting.md does not tell what to do about an Event with reason `%s`", reason)
		}
	}
}

// TestDeploy: the manifests are what the API takes, without a field that it would not know.
func TestDeploy(t *testing.T) {
	kinds := map[string]func() any{
		"DaemonSet": func() any { return new(appsv1.DaemonSet) }, "ConfigMap": func() any { return new(corev1.ConfigMap) },
		"ServiceAccount": func() any { return new(corev1.ServiceAccount) }, "ClusterRole": func() any { return new(rbacv1.ClusterRole) },
		"ClusterRoleBinding": func() any { return new(rbacv1.ClusterRoleBinding) },
	}
	paths, _ := filepath.Glob("deploy/*.yaml")
	if len(paths) == 0 {
		t.Fatal("deploy/ holds no manifests")
	}
	for _, path := range paths {
		for i, doc := range strings.Split(read(t, path), "\n---\n") {
			var meta metav1.TypeMeta
			if err := yaml.Unmarshal([]byte(doc), &meta); err != nil || kinds[meta.Kind] == nil {
				t.Errorf("%s: document %d is of kind %q: %v", path, i+1, meta.Kind, err)
				continue
			}
			obj := kinds[meta.Kind]()
			if err := yaml.UnmarshalStrict([]byte(doc), obj); err != nil {
				t.Errorf("%s: document %d: %v", path, i+1, err)
			}
			if cm, ok := obj.(*corev1.ConfigMap); ok {
				acceptConfig(t, path, cm.Data["config.conf"])
			}
		}
	}
}

// acceptConfig tries a configuration as run would read it.
func acceptConfig(t *testing.T, path, text string) {
	name := filepath.Join(t.TempDir(), "config.conf")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o := config.NewOptions()
	o.AddFlags(pflag.NewFlagSet("run", pflag.ContinueOnError))
	o.ConfigFile = name
	c, err := o.Config()
	if err != nil {
		t.Errorf("%s: config.conf: %v", path, err)
		return
	}
	if len(c.Notes) > 0 {
		t.Errorf("%s: config.conf: an example should set nothing that has no effect: %s", path, strings.Join(c.Notes, "; "))
	}
}

// TestCommands runs what the documents show in blocks marked console: each line "$ fairlead …", in a network namespace where
// an agent serves the examples. Each line of output that a document shows must come, in order; what a document leaves out,
// with a line "…" or none, is not looked at. A command that shows no complaint ("fairlead: …") must succeed.
func TestCommands(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("FAIRLEAD_NO_ROOT") == "1" {
			t.Skip("FAIRLEAD_NO_ROOT=1: no namespace, so no command is run")
		}
		t.Fatal("the documents' commands need root for a network namespace; set FAIRLEAD_NO_ROOT=1 to do without them")
	}
	r := newReader(t)
	n := 0
	for _, path := range documents(t) {
		for _, block := range regexp.MustCompile("(?ms)^```console\n(.*?)^```$").FindAllStringSubmatch(read(t, path), -1) {
			for _, part := range strings.Split("\n"+block[1], "\n$ ")[1:] {
				line, want, _ := strings.Cut(part, "\n")
				n++
				r.try(t, path, line, strings.Split(want, "\n"))
			}
		}
	}
	if n < 10 {
		t.Errorf("the documents show %d commands that are run; there were more", n)
	}
}

// reader is somebody who types what the documents say.
type reader struct {
	binary, dir string
	ns          *kernel.NS
}

func newReader(t *testing.T) *reader {
	r := &reader{dir: t.TempDir()}
	var err error
	if r.binary, err = filepath.Abs(cmp.Or(os.Getenv("FAIRLEAD"), "bin/fairlead")); err == nil {
		_, err = os.Stat(r.binary)
	}
	if err != nil {
		t.Fatalf("no fairlead to try (make build, or FAIRLEAD=path): %v", err)
	}
	if err := os.CopyFS(filepath.Join(r.dir, "examples"), examples.Files); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(r.dir, "deploy"), os.DirFS("deploy")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if r.ns, err = kernel.NewNS(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.ns.Close() })
	r.serve(t)
	return r
}

// serve starts an agent and waits until it is ready. The settings of the machine stay as they are.
func (r *reader) serve(t *testing.T) {
	agent := exec.Command(r.binary, "run", "--manifests", "examples", "--hostname-override", "n1", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48",
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--oom-score-adj=0")
	agent.Dir = r.dir
	var log strings.Builder
	agent.Stdout, agent.Stderr = &log, &log
	if err := r.ns.Do(agent.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(agent.Process.Signal(os.Interrupt), agent.Wait()); err != nil {
			t.Errorf("the agent ended with %v\n%s", err, log.String())
		}
	})
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = r.ns.Do(func() error { c, err = new(net.Dialer).DialContext(ctx, network, addr); return err })
		return c, err
	}}}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		resp, err := client.Get("http://127.0.0.1:10256/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
			err = fmt.Errorf("readyz answers %s", resp.Status)
		}
		if time.Now().After(deadline) {
			t.Fatalf("the agent did not get ready: %v\n%s", err, log.String())
		}
	}
}

func (r *reader) try(t *testing.T, path, line string, want []string) {
	args, ok := split(line)
	if !ok || args[0] != "fairlead" {
		t.Errorf("%s: $ %s: only fairlead, with plain or 'quoted' arguments, is run from a block marked console", path, line)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.binary, args[1:]...)
	cmd.Dir = r.dir
	var out []byte
	err := r.ns.Do(func() (err error) { out, err = cmd.CombinedOutput(); return err })
	complains := slices.ContainsFunc(want, func(l string) bool { return strings.HasPrefix(l, "fairlead: ") })
	if (err != nil) != complains {
		t.Errorf("%s: $ %s: %v\n%s", path, line, err, out)
		return
	}
	rest := strings.Split(string(out), "\n")
	for _, l := range want {
		if l = strings.TrimRight(l, " "); l == "" || l == "…" {
			continue
		}
		i := slices.IndexFunc(rest, func(got string) bool { return strings.TrimRight(got, " ") == l })
		if i < 0 {
			t.Errorf("%s: $ %s\nshould print the line\n%s\nand prints\n%s", path, line, l, out)
			return
		}
		rest = rest[i+1:]
	}
}

// split cuts a command line into words; a word may stand in single quotes.
func split(line string) (words []string, ok bool) {
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimLeft(line, " ") {
		word := ""
		if quoted, isQuoted := strings.CutPrefix(line, "'"); isQuoted {
			if word, line, ok = strings.Cut(quoted, "'"); !ok {
				return nil, false
			}
		} else {
			word, line, _ = strings.Cut(line, " ")
			if strings.ContainsAny(word, "|&;<>$`\"'\\*") {
				return nil, false
			}
		}
		words = append(words, word)
	}
	return words, len(words) > 0
}
