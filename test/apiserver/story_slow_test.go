package apiserver

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"rsc.io/script"
)

// slowFront stands before the API, on another port, and holds back lists and watches that begin with one. It speaks TLS
// on both sides, so that only tokens get through it.
type slowFront struct {
	server *http.Server
	hold   atomic.Int64 // a time.Duration
	held   atomic.Int64 // how many requests were
}

func (p *play) slowCommand(args ...string) (string, error) {
	switch {
	case len(args) == 4 && args[0] == "start":
		return "", p.startSlow(args[1], args[2], args[3])
	case len(args) == 2 && args[0] == "hold" && p.slow != nil:
		return "", p.slow.setHold(args[1])
	case len(args) == 2 && args[0] == "held" && p.slow != nil:
		least, err := strconv.ParseInt(args[1], 10, 64)
		held := p.slow.held.Load()
		return "", firstError(err, wantf(held >= least, "%d requests were held back, want %d", held, least))
	}
	return "", script.ErrUsage
}

func (s *slowFront) setHold(text string) error {
	d, err := time.ParseDuration(text)
	s.hold.Store(int64(d))
	return err
}

func (p *play) startSlow(port, serving, hold string) error {
	cert, err := tls.LoadX509KeyPair(p.state.Path(serving+".crt"), p.state.Path(serving+".key"))
	if err != nil {
		return err
	}
	p.slow = &slowFront{}
	if err := p.slow.setHold(hold); err != nil {
		return err
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(p.api.port))})
	proxy.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	proxy.FlushInterval = -1 // each event of a watch at once
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { panic(http.ErrAbortHandler) }
	p.slow.server = &http.Server{
		Handler:   p.slow.before(proxy),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}},
	}
	listener, err := net.Listen("tcp", net.JoinHostPort("0.0.0.0", port))
	if err != nil {
		return fmt.Errorf("slow front: %w", err)
	}
	go p.slow.server.ServeTLS(listener, "", "")
	return nil
}

func (s *slowFront) before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		list := r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, "/api") && q.Get("watch") == ""
		if d := time.Duration(s.hold.Load()); d > 0 && (list || q.Get("sendInitialEvents") == "true") {
			s.held.Add(1)
			patient, cancel := context.WithTimeout(r.Context(), d)
			<-patient.Done()
			cancel()
		}
		next.ServeHTTP(w, r)
	})
}
