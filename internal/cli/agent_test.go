package cli

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"fairlead/internal/source/sourcetest"
)

// TestEligible: load balancers are told to leave a node that is about to go, and to wait for one that nobody knows.
func TestEligible(t *testing.T) {
	node := func(name string, change func(*corev1.Node)) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		change(n)
		return n
	}
	now := metav1.Now()
	for _, tc := range []struct {
		name          string
		node          *corev1.Node
		api, manifest bool
	}{
		{"another node", node("n2", func(*corev1.Node) {}), false, true},
		{"plain", node("n1", func(*corev1.Node) {}), true, true},
		{"cordoned", node("n1", func(n *corev1.Node) { n.Spec.Unschedulable = true }), true, true},
		{"deleted", node("n1", func(n *corev1.Node) { n.DeletionTimestamp = &now }), false, false},
		{"autoscaler", node("n1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: toBeDeleted, Effect: "NoSchedule"}} }), false, false},
		{"another taint", node("n1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "x"}} }), true, true},
	} {
		for _, api := range []bool{true, false} {
			w := &nodeWatch{name: "n1", unknown: api}
			var sink sourcetest.Sink
			if !w.eligible() {
				t.Errorf("api %v: before anything is known it is not", api)
			}
			w.in(&sink).Synced()
			if w.eligible() == api {
				t.Errorf("api %v: before the node is known: %v", api, w.eligible())
			}
			w.in(&sink).Node(tc.node.Name, tc.node)
			want := tc.manifest
			if api {
				want = tc.api
			}
			if got := w.eligible(); got != want {
				t.Errorf("%s, api %v: %v", tc.name, api, got)
			}
			w.in(&sink).Node("n1", nil)
			if w.eligible() == api {
				t.Errorf("%s, api %v: after it is gone: %v", tc.name, api, w.eligible())
			}
		}
	}
}

// TestWatchConfig notices an edit in place, a file that is renamed over it, and the link that a ConfigMap's update replaces.
func TestWatchConfig(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("..v1", "one")
	if err := os.Symlink("..v1", path); err != nil {
		t.Fatal(err)
	}
	before := sum(path)
	write("..v1", "changed while nobody watched")
	changed, ended := make(chan struct{}, 10), make(chan struct{})
	go func() {
		defer close(ended)
		watchConfig(t.Context(), path, before, func() { changed <- struct{}{} })
	}()
	t.Cleanup(func() { <-ended })
	wait := func(what string) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(patience):
			t.Errorf("%s was not noticed", what)
		}
	}
	wait("a change before the watch")
	write("..v2", "two")
	if err := os.Symlink("..v2", filepath.Join(dir, "..link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "..link"), path); err != nil {
		t.Fatal(err)
	}
	wait("a new link")
	write("..v2", "three")
	wait("an edit")
	write("..v3", "four")
	if err := os.Rename(filepath.Join(dir, "..v3"), path); err != nil {
		t.Fatal(err)
	}
	wait("a file that was renamed over it")
	write("other", "noise")
	write("config", "four")
	select {
	case <-changed:
		t.Error("something else, or the same content, was taken for a change")
	case <-time.After(3 * calm):
	}
}
