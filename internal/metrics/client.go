package metrics

import (
	"context"
	"net/url"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	client "k8s.io/client-go/tools/metrics"
)

// clientBuckets in seconds, as k8s.io/component-base/metrics/prometheus/restclient has them.
var clientBuckets = []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}

// WatchClient counts the requests to the Kubernetes API, under the names that every Kubernetes component uses. client-go
// tells one listener in a process: the first Metrics that asks.
func (m *Metrics) WatchClient() {
	client.Register(client.RegisterOpts{
		RequestLatency:     clientLatency{m.histogram("rest_client_request_duration_seconds", "Duration of requests to the API.", clientBuckets, "verb", "host")},
		RateLimiterLatency: clientLatency{m.histogram("rest_client_rate_limiter_duration_seconds", "What requests waited for the client's own rate limit.", clientBuckets, "verb", "host")},
		RequestResult:      clientResult{m.counter("rest_client_requests_total", "Requests to the API.", "code", "method", "host")},
	})
}

type clientLatency struct{ *prometheus.HistogramVec }

func (l clientLatency) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	l.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}

type clientResult struct{ *prometheus.CounterVec }

func (r clientResult) Increment(_ context.Context, code, method, host string) {
	r.WithLabelValues(code, method, host).Inc()
}
