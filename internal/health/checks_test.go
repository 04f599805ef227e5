package health

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"fairlead/internal/model"
)

func (l *lab) checks(healthy func() bool, failing func(int)) *Checks {
	cs := NewChecks(ChecksConfig{V4: true, V6: true, Healthy: healthy, Notice: l.notice, Failing: failing, Listen: l.listen})
	l.Cleanup(cs.Close)
	return cs
}

func TestChecks(t *testing.T) {
	l := newLab(t)
	var healthy atomic.Bool
	healthy.Store(true)
	cs := l.checks(healthy.Load, nil)
	const v4, v6 = "http://127.0.0.1:30100/", "http://[::1]:30100/any"

	cs.Applied(model.Delta{Full: true, Checks: []model.Check{{Service: "ns/a", Port: 30100}}}, 0)
	l.wantCode(v4, 503)
	l.wantCode(v6, 503)
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 18}}}, 0)
	l.wantCode(v4, 200)
	l.wantCode(v6, 503) // each family counts its own
	_, header, body := l.get(v4)
	if header.Get("X-Load-Balancing-Endpoint-Weight") != "18" || header.Get("Content-Type") != "application/json" ||
		header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("header %v", header)
	}
	if want := "{\n\t\"service\": {\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"a\"\n\t},\n\t\"localEndpoints\": 18,\n\t\"serviceProxyHealthy\": true\n}"; body != want {
		t.Errorf("body %s", body)
	}
	healthy.Store(false)
	l.wantCode(v4, 503)
	if _, header, _ := l.get(v4); header.Get("X-Load-Balancing-Endpoint-Weight") != "18" {
		t.Errorf("header while unhealthy %v", header)
	}
	healthy.Store(true)
	l.wantCode(v4, 200)

	// Another number, and a second Service that takes the old one.
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/b", Port: 30100, Ready6: 1}, {Service: "ns/a", Port: 30101, Ready4: 2}}}, 0)
	l.wantCode("http://127.0.0.1:30101/", 200)
	l.wantCode(v4, 503)
	l.wantCode(v6, 200)
	// They swap.
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 2}, {Service: "ns/b", Port: 30101, Ready6: 1}}}, 0)
	l.wantCode(v4, 200)
	l.wantCode("http://[::1]:30101/", 200)
	// Full means that what is not listed goes.
	cs.Applied(model.Delta{Full: true, Checks: []model.Check{{Service: "ns/b", Port: 30101, Ready6: 1}}}, 0)
	l.wantCode(v4, 0)
	l.wantCode("http://[::1]:30101/", 200)
	if got := l.told(); len(got) != 0 {
		t.Errorf("notices %v", got)
	}
}

// A Service that is removed takes the open connections of its port along.
func TestChecksCloseConnections(t *testing.T) {
	l := newLab(t)
	cs := l.checks(nil, nil)
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 1}}}, 0)
	l.wantCode("http://127.0.0.1:30100/", 200)
	c, err := l.dial(context.Background(), "tcp", "127.0.0.1:30100")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	r := bufio.NewReader(c)
	if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 200 {
		t.Fatal(resp, err)
	}
	cs.Applied(model.Delta{GoneChecks: []string{"ns/a"}}, 0)
	l.wantCode("http://127.0.0.1:30100/", 0)
	for {
		if _, err := r.ReadByte(); err != nil {
			break // the connection ended; the test would hang here if it did not
		}
	}
}

// A port that somebody else has: one notice, all others are served, and it opens when it is free.
func TestChecksPortTaken(t *testing.T) {
	l := newLab(t)
	other, err := l.listen("tcp4", "0.0.0.0:30100")
	if err != nil {
		t.Fatal(err)
	}
	var failing atomic.Int32
	cs := l.checks(nil, func(n int) { failing.Store(int32(n)) })
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 1, Ready6: 1}, {Service: "ns/b", Port: 30101, Ready4: 1}}}, 0)
	l.wantCode("http://127.0.0.1:30101/", 200)
	l.wantCode("http://[::1]:30100/", 200) // the other family is not disturbed
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 2, Ready6: 2}}}, 0)
	l.wantCode("http://[::1]:30100/", 200)
	if n := failing.Load(); n != 1 {
		t.Errorf("%d Services fail, want 1", n)
	}
	other.Close()
	l.wantCode("http://127.0.0.1:30100/", 200)
	if got := l.told(); len(got) != 1 || got[0].Service != "ns/a" || got[0].Reason != PortFailed {
		t.Errorf("notices %v", got)
	}
	l.wantCode("http://127.0.0.1:30100/", 200)
	for failing.Load() != 0 {
		time.Sleep(time.Millisecond)
	}
}

// nodePortAddresses, which follow the addresses of the node.
func TestChecksAddresses(t *testing.T) {
	l := newLab(t)
	cs := l.checks(nil, nil)
	node := func(addrs ...string) *model.Node {
		n := &model.Node{NodePorts: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/30"), netip.MustParsePrefix("fd00::/8")}, LocalhostPort: true}
		for _, a := range addrs {
			n.Addrs = append(n.Addrs, netip.MustParseAddr(a))
		}
		return n
	}
	cs.Applied(model.Delta{Full: true, Node: node("127.0.0.1", "127.0.0.9"), Checks: []model.Check{{Service: "ns/a", Port: 30100, Ready4: 1}}}, 0)
	l.wantCode("http://127.0.0.1:30100/", 200)
	if code, _, _ := l.get("http://127.0.0.9:30100/"); code != 0 {
		t.Errorf("an address that takes no NodePort answers %d", code)
	}
	cs.Applied(model.Delta{Node: node("127.0.0.2")}, 0)
	l.wantCode("http://127.0.0.2:30100/", 200)
	l.wantCode("http://127.0.0.1:30100/", 0)
	all := node("127.0.0.2")
	all.NodePorts = nil
	cs.Applied(model.Delta{Node: all}, 0)
	l.wantCode("http://127.0.0.9:30100/", 200)
	l.wantCode("http://[::1]:30100/", 503)
	if got := l.told(); len(got) != 0 {
		t.Errorf("notices %v", got)
	}
}

// Churn leaves no port and no goroutine behind; goleak looks at the end.
func TestChecksChurn(t *testing.T) {
	l := newLab(t)
	cs := l.checks(nil, nil)
	for range 5 {
		var born []model.Check
		var dead []string
		for i := range 50 {
			born = append(born, model.Check{Service: fmt.Sprint("ns/s", i), Port: uint16(31000 + i)})
			dead = append(dead, fmt.Sprint("ns/s", i))
		}
		cs.Applied(model.Delta{Checks: born}, 0)
		l.wantCode("http://127.0.0.1:31049/", 503)
		cs.Applied(model.Delta{GoneChecks: dead}, 0)
		l.wantCode("http://127.0.0.1:31049/", 0)
	}
	cs.Applied(model.Delta{Checks: []model.Check{{Service: "ns/last", Port: 31000, Ready4: 1}}}, 0)
	l.wantCode("http://127.0.0.1:31000/", 200)
	cs.Close()
	if len(cs.ports) != 1 {
		t.Errorf("%d ports", len(cs.ports))
	}
	if got := l.told(); len(got) != 0 {
		t.Errorf("notices %v", got)
	}
}
