package dir

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

var update = flag.Bool("update", false, "write what is told into the stories")

// Each story in testdata is a sentence, some manifests, and what is told of them: objects and reports.
func TestStories(t *testing.T) {
	stories, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(stories) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, path := range stories {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			story, err := txtar.ParseFile(path)
			if err != nil {
				t.Fatal(err)
			}
			manifests := map[string][]byte{}
			last := len(story.Files) - 1
			for _, f := range story.Files[:last] {
				manifests[f.Name] = f.Data
			}
			got := tale(Parse(manifests))
			want := &story.Files[last]
			if want.Name != "told" {
				t.Fatalf("the last file is %q, not told", want.Name)
			}
			if *update {
				want.Data = []byte(got)
				if err := os.WriteFile(path, txtar.Format(story), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if d := cmp.Diff(string(want.Data), got); d != "" {
				t.Errorf("(-want +got)\n%s", d)
			}
		})
	}
}

// tale prints what was told.
func tale(o Objects, reports []string) string {
	var b strings.Builder
	for _, key := range slices.SortedFunc(maps.Keys(o.Services), compareNames) {
		fmt.Fprintf(&b, "Service %s %s\n", key, service(o.Services[key]))
	}
	for _, key := range slices.SortedFunc(maps.Keys(o.Slices), compareNames) {
		slice(&b, o.Slices[key])
	}
	for _, name := range slices.Sorted(maps.Keys(o.Nodes)) {
		n := o.Nodes[name]
		fmt.Fprintf(&b, "Node %s %v %v\n", name, n.Spec.PodCIDRs, n.Status.Addresses)
	}
	for _, name := range slices.Sorted(maps.Keys(o.CIDRs)) {
		fmt.Fprintf(&b, "ServiceCIDR %s %v\n", name, o.CIDRs[name].Spec.CIDRs)
	}
	for _, r := range reports {
		fmt.Fprintln(&b, r)
	}
	return b.String()
}

func service(s *corev1.Service) string {
	out := []string{string(s.Spec.Type), fmt.Sprint(s.Spec.ClusterIPs), fmt.Sprint(s.Spec.IPFamilies), "internal=" + string(*s.Spec.InternalTrafficPolicy)}
	if s.Spec.ExternalTrafficPolicy != "" {
		out = append(out, "external="+string(s.Spec.ExternalTrafficPolicy))
	}
	if s.Spec.SessionAffinity != corev1.ServiceAffinityNone {
		out = append(out, fmt.Sprintf("affinity=%s/%d", s.Spec.SessionAffinity, *s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds))
	}
	for _, p := range s.Spec.Ports {
		out = append(out, fmt.Sprintf("%s:%d/%s>%s", p.Name, p.Port, p.Protocol, p.TargetPort.String()))
	}
	return strings.Join(out, " ")
}

func slice(b *strings.Builder, s *discoveryv1.EndpointSlice) {
	fmt.Fprintf(b, "EndpointSlice %s/%s of %s", s.Namespace, s.Name, s.Labels[discoveryv1.LabelServiceName])
	for _, p := range s.Ports {
		fmt.Fprintf(b, " %s:%d/%s", *p.Name, *p.Port, *p.Protocol)
	}
	fmt.Fprintln(b)
	for _, e := range s.Endpoints {
		fmt.Fprintf(b, "  %v", e.Addresses)
		if e.NodeName != nil {
			fmt.Fprintf(b, " node=%s", *e.NodeName)
		}
		if e.Zone != nil {
			fmt.Fprintf(b, " zone=%s", *e.Zone)
		}
		for _, c := range []struct {
			name string
			v    *bool
		}{{"ready", e.Conditions.Ready}, {"serving", e.Conditions.Serving}, {"terminating", e.Conditions.Terminating}} {
			if c.v != nil && *c.v {
				fmt.Fprintf(b, " %s", c.name)
			}
		}
		fmt.Fprintln(b)
	}
}
