package health

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lab is a network namespace of its own, so that any port is free.
type lab struct {
	*testing.T
	ns *kernel.NS

	mu      sync.Mutex
	notices []model.Notice
}

func newLab(t *testing.T) *lab {
	t.Helper()
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return &lab{T: t, ns: ns}
}

func (l *lab) listen(network, addr string) (ln net.Listener, err error) {
	err = l.ns.Do(func() error { ln, err = net.Listen(network, addr); return err })
	return ln, err
}

func (l *lab) dial(_ context.Context, network, addr string) (c net.Conn, err error) {
	err = l.ns.Do(func() error { c, err = net.DialTimeout(network, addr, 5*time.Second); return err })
	return c, err
}

func (l *lab) notice(n model.Notice) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notices = append(l.notices, n)
}

func (l *lab) told() []model.Notice {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]model.Notice(nil), l.notices...)
}

// get asks once, on a connection of its own. Code 0 is no answer.
func (l *lab) get(url string) (code int, header http.Header, body string) {
	l.Helper()
	tr := &http.Transport{DialContext: l.dial, DisableKeepAlives: true}
	defer tr.CloseIdleConnections()
	r, err := (&http.Client{Transport: tr}).Get(url)
	if err != nil {
		return 0, nil, err.Error()
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		l.Error(err)
	}
	return r.StatusCode, r.Header, string(b)
}

// wantCode waits until a URL answers with a code.
func (l *lab) wantCode(url string, want int) {
	l.Helper()
	var got int
	var body string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if got, _, body = l.get(url); got == want {
			return
		}
	}
	l.Fatalf("%s: %d %s, want %d", url, got, body, want)
}
