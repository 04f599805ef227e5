package health

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestServer(t *testing.T) {
	l := newLab(t)
	var status atomic.Pointer[Status]
	var eligible atomic.Bool
	status.Store(&Status{})
	eligible.Store(true)
	var mu sync.Mutex
	asked := map[string]int{}
	s := NewServer(ServerConfig{Port: Port{Addr: "127.0.0.1:10256", Listen: l.listen}, SyncPeriod: 30 * time.Second, V4: true, Status: func() Status { return *status.Load() },
		Eligible: eligible.Load, Asked: func(path string, code int) {
			mu.Lock()
			defer mu.Unlock()
			asked[path] += code
		}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()

	const base = "http://127.0.0.1:10256"
	l.wantCode(base+"/livez", 200) // open at once, before anything is known
	mu.Lock()
	clear(asked)
	mu.Unlock()
	want := func(healthz, livez, readyz int) {
		t.Helper()
		for path, want := range map[string]int{"/healthz": healthz, "/livez": livez, "/readyz": readyz, "/": 404, "/healthz/": 404} {
			code, header, body := l.get(base + path)
			if code != want {
				t.Errorf("%s: %d %s, want %d", path, code, body, want)
			}
			if want == 404 {
				continue
			}
			if header.Get("Content-Type") != "application/json" || header.Get("X-Content-Type-Options") != "nosniff" || !json.Valid([]byte(body)) {
				t.Errorf("%s: %v %s", path, header, body)
			}
		}
	}
	want(200, 200, 503)
	ok := Status{Sources: []Source{{Name: "dir", Synced: true}}, LastApplied: time.Now()}
	status.Store(&ok)
	want(200, 200, 200)
	eligible.Store(false)
	want(503, 200, 200)
	late := ok
	late.PendingSince = time.Now().Add(-61 * time.Second)
	status.Store(&late)
	want(503, 503, 503)
	if s.Healthy() {
		t.Error("healthy")
	}
	mu.Lock()
	defer mu.Unlock()
	if asked["/healthz"] != 200+200+503+503 || asked["/livez"] != 200+200+200+503 || asked["/readyz"] != 503+200+200+503 {
		t.Errorf("counted %v", asked)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if code, _, _ := l.get(base + "/livez"); code != 0 {
		t.Errorf("answers %d after its end", code)
	}
}

func TestServerPortTaken(t *testing.T) {
	l := newLab(t)
	other, err := l.listen("tcp", "127.0.0.1:10256")
	if err != nil {
		t.Fatal(err)
	}
	c := ServerConfig{Port: Port{Addr: "127.0.0.1:10256", HardFail: true, Notice: l.notice, Listen: l.listen}, SyncPeriod: time.Second, V4: true,
		Status: func() Status { return Status{} }}
	if err := NewServer(c).Run(context.Background()); err == nil {
		t.Error("bindAddressHardFail: no error")
	}
	c.Port.HardFail = false
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- NewServer(c).Run(ctx) }()
	for len(l.told()) < 2 {
		time.Sleep(time.Millisecond)
	}
	other.Close()
	l.wantCode("http://127.0.0.1:10256/livez", 200)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := l.told(); len(got) != 2 || got[1].Reason != ListenFailed {
		t.Errorf("notices %v", got)
	}
}
