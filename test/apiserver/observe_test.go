package apiserver

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// Two Services claim one address: the older has it, the younger is told so by an Event, and inherits.
func TestConflict(t *testing.T) {
	if standIn {
		t.Skip("kube-proxy reports no conflicts")
	}
	startProxy(t)
	shared := netip.AddrPortFrom(addr("198.51.100.10"), 80)
	claim := func(s *corev1.ServiceSpec) { s.ExternalIPs = []string{shared.Addr().String()} }

	older := createService(t, "z-older", claim) // age decides, not the name
	setEndpoints(t, older.Name, ipv4, podA)
	waitForNextSecond(t, older.CreationTimestamp)
	younger := createService(t, "a-younger", claim)
	setEndpoints(t, younger.Name, ipv4, podB)

	eventually(t, "both are known by their own address", answers(podC, front(older, 0), podA))
	eventually(t, "both are known by their own address", answers(podC, front(younger, 0), podB))
	always(t, "the older has the shared one", answers(outer, shared, podA))
	eventually(t, "the younger is told", func() error { return warned(younger.Name, shared.Addr().String()) })
	if warned(older.Name, shared.Addr().String()) == nil {
		t.Error("the older is warned too")
	}

	deleteService(t, older.Name)
	eventually(t, "the younger inherits", answers(outer, shared, podB))
}

// waitForNextSecond waits until an object made now is younger: the API counts in seconds.
func waitForNextSecond(t *testing.T, made metav1.Time) {
	t.Helper()
	time.Sleep(time.Until(made.Add(1100 * time.Millisecond)))
}

// warned is nil if a Warning about the Service says these words.
func warned(service, words string) error {
	list, err := api.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var said []string
	for _, e := range list.Items {
		about := e.InvolvedObject
		if e.Type == corev1.EventTypeWarning && about.Kind == "Service" && about.Name == service {
			if strings.Contains(e.Message, words) {
				return nil
			}
			said = append(said, e.Message)
		}
	}
	return fmt.Errorf("no Warning about Service %s says %s; there are %d: %q", service, words, len(said), said)
}

// get reads a page of the proxy.
func get(url string) (code int, body string, err error) {
	client := http.Client{Timeout: 2 * time.Second}
	answer, err := client.Get(url)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text), err
}

func page(url string, code int, words ...string) func() error {
	return func() error {
		got, body, err := get(url)
		if err != nil {
			return err
		}
		if got != code {
			return fmt.Errorf("%s: want %d, got %d: %s", url, code, got, body)
		}
		for _, w := range words {
			if !strings.Contains(body, w) {
				return fmt.Errorf("%s: no %s in %.2000s", url, w, body)
			}
		}
		return nil
	}
}

const (
	healthz = "http://127.0.0.1:10256"
	metrics = "http://127.0.0.1:10249"
)

func TestHealthAndMetrics(t *testing.T) {
	startProxy(t)
	vip := front(createService(t, "observed"), 0)
	setEndpoints(t, "observed", ipv4, podA)
	eventually(t, "the Service works", answers(podC, vip, podA))

	eventually(t, "healthz", page(healthz+"/healthz", 200, `"nodeEligible":true`, `"healthy":true`))
	eventually(t, "livez", page(healthz+"/livez", 200, `"healthy":true`))
	if !standIn {
		eventually(t, "readyz", page(healthz+"/readyz", 200, `"servicecidrs"`)) // kube-proxy's account may list them
	}
	eventually(t, "proxyMode", page(metrics+"/proxyMode", 200, mode))
	eventually(t, "metrics", page(metrics+"/metrics", 200,
		"kubeproxy_sync_proxy_rules_last_timestamp_seconds",
		`kubeproxy_proxy_healthz_total{code="200"}`,
		"rest_client_requests_total"))
}

// A node that is to be deleted is no longer eligible, but alive.
func TestNodeEligible(t *testing.T) {
	startProxy(t)
	eventually(t, "eligible", page(healthz+"/healthz", 200, `"nodeEligible":true`))
	taint := func(taints ...corev1.Taint) {
		nodes := api.CoreV1().Nodes()
		n, err := nodes.Get(ctx, nodeName, metav1.GetOptions{})
		if err == nil {
			n.Spec.Taints = taints
			_, err = nodes.Update(ctx, n, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatalf("taint Node: %v", err)
		}
	}
	t.Cleanup(func() { taint() })
	taint(corev1.Taint{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule})
	eventually(t, "not eligible", page(healthz+"/healthz", 503, `"nodeEligible":false`))
	always(t, "but alive", page(healthz+"/livez", 200))
	taint()
	eventually(t, "eligible again", page(healthz+"/healthz", 200, `"nodeEligible":true`))
}

// Without an API to learn from, the proxy answers at once, and does not say that it is ready.
func TestNotReadyWithoutAPI(t *testing.T) {
	if standIn {
		t.Skip("kube-proxy has no readyz and ends when the API does not answer")
	}
	config, err := clientcmd.LoadFromFile(proxyConfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server = "https://127.0.0.1:1"
	}
	path := t.TempDir() + "/nowhere.conf"
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	startProxy(t, "--kubeconfig="+path)
	eventually(t, "readyz is honest", page(healthz+"/readyz", 503))
	always(t, "and stays so", page(healthz+"/readyz", 503))
}
