package link

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// apiServer answers as far as the link asks, and can be turned in every way.
type apiServer struct {
	*httptest.Server
	mu      sync.Mutex
	cert    tls.Certificate
	clients *x509.CertPool // who signs for clients; nil: nobody
	tokens  []string
	code    int           // of everything that is asked with good credentials; 0 is 200
	readyz  int           // of /readyz
	bell    chan struct{} // closed at each say
	said    string
	cluster string // its UID
	asked   []string
	open    map[net.Conn]bool
	goAway  bool // close each connection after what is under way on it
}

func newServer(t *testing.T, ca *authority) *apiServer {
	s := &apiServer{bell: make(chan struct{})}
	s.serve(t, ca)
	s.Server = httptest.NewUnstartedServer(s)
	s.EnableHTTP2 = true
	s.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return &tls.Config{Certificates: []tls.Certificate{s.cert}, ClientAuth: tls.RequestClientCert, NextProtos: []string{"h2"}}, nil
	}}
	s.Config.ErrorLog, s.open = discard, map[net.Conn]bool{}
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		s.set(func() {
			if s.open[c] = true; state == http.StateClosed || state == http.StateHijacked {
				delete(s.open, c)
			}
		})
	}
	s.StartTLS()
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s
}

// serve has the server show a new certificate, signed by ca.
func (s *apiServer) serve(t *testing.T, ca *authority) {
	pair := ca.server(t, "127.0.0.1")
	s.set(func() { s.cert = pair })
}

func (s *apiServer) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// say writes a line into all watches.
func (s *apiServer) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = line
	close(s.bell)
	s.bell = make(chan struct{})
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	code, bell := s.answer(r), s.bell
	s.asked = append(s.asked, r.Method+" "+r.URL.Path)
	if s.goAway {
		w.Header().Set("Connection", "close")
	}
	s.mu.Unlock()
	w.WriteHeader(code)
	if code == http.StatusOK && strings.HasPrefix(kubernetes, r.URL.Path+"?") {
		fmt.Fprintf(w, `{"items": [{"metadata": {"uid": %q}}]}`, s.uid())
		return
	}
	if code != http.StatusOK || r.URL.Query().Get("watch") == "" {
		fmt.Fprintf(w, "[-]etcd failed: reason withheld\n")
		return
	}
	for {
		fmt.Fprintf(w, "%s\n", s.line())
		w.(http.Flusher).Flush()
		select {
		case <-bell:
			s.mu.Lock()
			bell = s.bell
			s.mu.Unlock()
		case <-r.Context().Done():
			return
		}
	}
}

func (s *apiServer) uid() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

// count is how often a path was asked for.
func (s *apiServer) count(path string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.asked {
		if strings.HasSuffix(a, " "+path) {
			n++
		}
	}
	return n
}

func (s *apiServer) line() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return "said " + s.said
}

// answer is called with s locked.
func (s *apiServer) answer(r *http.Request) int {
	ok := false
	if token, is := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); is {
		ok = slices.Contains(s.tokens, token)
	} else if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 && s.clients != nil {
		_, err := r.TLS.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: s.clients, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		ok = err == nil
	}
	switch {
	case !ok:
		return http.StatusUnauthorized
	case r.URL.Path == readyz && s.readyz != 0:
		return s.readyz
	case s.code != 0:
		return s.code
	}
	return http.StatusOK
}

// between is a way to a server that can lose packets: what is dark takes connections, and nothing comes through.
type between struct {
	net.Listener
	mu    sync.Mutex
	dark  bool
	conns []net.Conn
}

func newBetween(t *testing.T, to string) *between {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &between{Listener: l}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			b.mu.Lock()
			b.conns = append(b.conns, in, out)
			b.mu.Unlock()
			running.Go(func() { b.copy(out, in) })
			running.Go(func() { b.copy(in, out) })
		}
	})
	t.Cleanup(func() { l.Close(); b.cut(); running.Wait() })
	return b
}

func (b *between) copy(to, from net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		for b.isDark() && err == nil {
			n, err = from.Read(buf) // swallowed
		}
		if err != nil {
			to.Close()
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

func (b *between) isDark() bool { b.mu.Lock(); defer b.mu.Unlock(); return b.dark }

func (b *between) darken(dark bool) { b.mu.Lock(); defer b.mu.Unlock(); b.dark = dark }

func (b *between) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.conns {
		c.Close()
	}
}

// users asks all the time, as much as the program does: one request after another, and a watch that is opened whenever it ends.
type users struct {
	mu     sync.Mutex
	failed []string
	asked  int
	opened int    // watches
	line   string // the last
}

func startUsers(t *testing.T, l *Link) *users {
	u := new(users)
	client := &http.Client{Transport: l}
	base := l.Config().Host
	var running sync.WaitGroup
	end := make(chan struct{})
	loop := func(f func()) {
		running.Go(func() {
			for {
				select {
				case <-end:
					return
				case <-time.After(2 * time.Millisecond):
					f()
				}
			}
		})
	}
	loop(func() {
		resp, err := client.Get(base + "/api/v1/services")
		u.mu.Lock()
		defer u.mu.Unlock()
		u.asked++
		switch {
		case err != nil:
			u.failed = append(u.failed, err.Error())
		case resp.StatusCode != 200:
			u.failed = append(u.failed, resp.Status)
		}
		if err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	})
	loop(func() { u.watch(client, base, end) })
	t.Cleanup(func() { close(end); l.wire().cut(errEnded); running.Wait() })
	return u
}

func (u *users) watch(client *http.Client, base string, end chan struct{}) {
	resp, err := client.Get(base + "/api/v1/services?watch=1")
	if err != nil || resp.StatusCode != 200 {
		return // the other loop reports it
	}
	defer resp.Body.Close()
	u.set(func() { u.opened++ })
	buf := make([]byte, 1024)
	for {
		n, err := resp.Body.Read(buf)
		u.set(func() { u.line = strings.TrimSpace(string(buf[:n])) })
		if err != nil {
			return
		}
		select {
		case <-end:
			return
		default:
		}
	}
}

func (u *users) set(f func()) { u.mu.Lock(); defer u.mu.Unlock(); f() }

// more waits until so many more requests were answered.
func (u *users) more(t *testing.T, n int) {
	t.Helper()
	var until int
	u.set(func() { until = u.asked + n })
	waitFor(t, "requests", func() bool { var ok bool; u.set(func() { ok = u.asked >= until }); return ok })
}

// fine fails the test for each request that failed.
func (u *users) fine(t *testing.T) {
	t.Helper()
	u.set(func() {
		if len(u.failed) > 0 {
			t.Errorf("%d of %d requests failed; the first: %s", len(u.failed), u.asked, u.failed[0])
		}
		u.failed = nil
	})
}

// hears waits until the watch brings a line that the server says.
func (u *users) hears(t *testing.T, s *apiServer, line string) {
	t.Helper()
	waitFor(t, "the watch to bring "+line, func() bool {
		s.say(line)
		var ok bool
		u.set(func() { ok = strings.HasSuffix(u.line, "said "+line) })
		return ok
	})
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 3000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("waited in vain for %s", what)
}
