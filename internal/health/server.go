package health

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"sync/atomic"
	"time"
)

// ListenFailed is the reason of the notice when the port of a [Server] can't be opened; kube-proxy's word.
const ListenFailed = "FailedToStartProxierHealthcheck"

// ServerConfig says what a Server answers and where.
type ServerConfig struct {
	Port       Port                        // healthzBindAddress; its Name and Reason are set
	SyncPeriod time.Duration               // a change that waits for twice as long is late
	V4, V6     bool                        // families that are served
	Status     func() Status               // called at each question, from any goroutine
	Eligible   func() bool                 // whether the node should get traffic from load balancers; nil is always
	Asked      func(path string, code int) // told of each answer; may be nil
}

// Server answers /healthz, /livez and /readyz.
type Server struct {
	c       ServerConfig
	started time.Time
	period  atomic.Int64 // SyncPeriod, as it is now
}

// NewServer makes a server. Run opens its port.
func NewServer(c ServerConfig) *Server {
	c.Port.Name, c.Port.Reason = "health", ListenFailed
	if c.Asked == nil {
		c.Asked = func(string, int) {}
	}
	s := &Server{c: c, started: time.Now()}
	s.SetSyncPeriod(c.SyncPeriod)
	return s
}

// SetSyncPeriod changes how long a change may wait.
func (s *Server) SetSyncPeriod(d time.Duration) { s.period.Store(int64(d)) }

// Run serves until ctx ends. It returns an error only when the port can't be opened and HardFail is set.
func (s *Server) Run(ctx context.Context) error { return s.c.Port.Serve(ctx, s.handler()) }

// Healthy tells whether no change waits for too long.
func (s *Server) Healthy() bool { return s.c.Status().healthy(time.Now(), s.limit()) }

func (s *Server) limit() time.Duration { return 2 * time.Duration(s.period.Load()) }

func (s *Server) handler() http.Handler {
	families := families(s.c.V4, s.c.V6)
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		eligible := s.c.Eligible == nil || s.c.Eligible()
		h := s.c.Status().proxyHealth(time.Now(), s.started, s.limit(), families, &eligible)
		s.answer(w, r, h.code(), h)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, r *http.Request) {
		h := s.c.Status().proxyHealth(time.Now(), s.started, s.limit(), families, nil)
		s.answer(w, r, h.code(), h)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		h := s.c.Status().readiness(time.Now(), s.limit())
		s.answer(w, r, code(h.Ready), h)
	})
	return mux
}

func families(v4, v6 bool) (names []string) {
	if v4 {
		names = append(names, "IPv4")
	}
	if v6 {
		names = append(names, "IPv6")
	}
	return names
}

func (s *Server) answer(w http.ResponseWriter, r *http.Request, code int, body any) {
	s.c.Asked(r.URL.Path, code)
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false) // people read "1.2.3.4:5->6.7.8.9:443"; no browser takes it for HTML
	if err := e.Encode(body); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, code, text.Bytes())
}

func writeJSON(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	w.Write(body)
}
