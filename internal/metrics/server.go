package metrics

import (
	"context"
	"fmt"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"fairlead/internal/health"
)

// ListenFailed is the reason of the notice when the metrics port can't be opened; kube-proxy's word.
const ListenFailed = "FailedToStartMetricServer"

// Limits of the metrics port.
const (
	scrapes = 4               // at once; more are answered 503
	longest = 2 * time.Minute // answer: a CPU profile takes as long as it is asked to
)

// ServerConfig says what the metrics port answers.
type ServerConfig struct {
	Port      health.Port            // metricsBindAddress; its Name and Reason are set. No Addr is no server
	Configz   func() ([]byte, error) // the configuration in use, as JSON
	Profiling bool                   // serve /debug/pprof
}

// Serve answers /metrics, /healthz, /proxyMode, /configz and, if wanted, /debug/pprof until ctx ends. It returns an error
// only when the port can't be opened and HardFail is set.
func (m *Metrics) Serve(ctx context.Context, c ServerConfig) error {
	if c.Port.Addr == "" {
		return nil
	}
	c.Port.Name, c.Port.Reason, c.Port.Long = "metrics", ListenFailed, longest
	return c.Port.Serve(ctx, m.handler(c))
}

func (m *Metrics) handler(c ServerConfig) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: scrapes}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { text(w, "ok") })
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { text(w, m.mode.String()) })
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) {
		if c.Configz == nil {
			http.Error(w, "no configuration is known", http.StatusNotFound)
			return
		}
		b, err := c.Configz()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Write(b)
	})
	if c.Profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

func text(w http.ResponseWriter, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	fmt.Fprint(w, s)
}
