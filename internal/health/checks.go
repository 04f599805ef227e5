package health

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// PortFailed is the reason of the notice when a health-check node port can't be opened; kube-proxy's word.
const PortFailed = "FailedToStartServiceHealthcheck"

// ChecksConfig says how health-check node ports are served.
type ChecksConfig struct {
	V4, V6  bool                                             // families that are served
	Healthy func() bool                                      // whether fairlead itself is (Server.Healthy); nil is always
	Notice  func(model.Notice)                               // told when a port can't be opened, once for each spell; may be nil
	Failing func(services int)                               // told how many Services have such a port, when it changes; may be nil
	Listen  func(network, addr string) (net.Listener, error) // nil is net.Listen
}

// Checks serves the health-check node port of each Service that has one: 200 when this node has a ready endpoint of the
// Service and fairlead is healthy, else 503, with the number of endpoints in the body and in
// X-Load-Balancing-Endpoint-Weight. There is a listener for each family, on every address or on those that take
// NodePorts, and it counts the endpoints of its family.
//
// A port that can't be opened is tried again each five seconds, and disturbs nothing else. Checks is an engine.Observer.
type Checks struct {
	c ChecksConfig

	mu      sync.Mutex
	pending model.Delta // told, not yet served

	wake       chan struct{}
	stop, done chan struct{}
	closing    sync.Once
	serving    sync.WaitGroup

	// Of the goroutine alone:
	node    model.Node
	addrs   []netip.Addr // where to listen
	ports   map[string]*port
	failing int
}

// port is the health-check node port of one Service.
type port struct {
	service   string
	number    uint16
	ready     [2]atomic.Int64 // by family, IPv4 first
	listeners map[netip.Addr]listener
	failure   string // of the last try, empty when all are open
}

type listener struct {
	net.Listener
	server *http.Server
}

// end closes the port now, also when the server has not begun to serve, and every connection.
func (l listener) end() {
	l.Close()
	l.server.Close()
}

// NewChecks starts to serve, no port as yet.
func NewChecks(c ChecksConfig) *Checks {
	if c.Healthy == nil {
		c.Healthy = func() bool { return true }
	}
	if c.Notice == nil {
		c.Notice = func(model.Notice) {}
	}
	if c.Failing == nil {
		c.Failing = func(int) {}
	}
	if c.Listen == nil {
		c.Listen = net.Listen
	}
	cs := &Checks{c: c, ports: map[string]*port{},
		wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	cs.addrs = cs.listenAddrs()
	go cs.run()
	return cs
}

// Applied takes what became true. It returns before ports are opened or closed.
func (cs *Checks) Applied(d model.Delta, _ time.Duration) {
	d = model.Delta{Full: d.Full, Checks: d.Checks, GoneChecks: d.GoneChecks, Node: d.Node}
	if d.Empty() {
		return
	}
	cs.mu.Lock()
	cs.pending = cs.pending.Then(d)
	cs.mu.Unlock()
	select {
	case cs.wake <- struct{}{}:
	default:
	}
}

// Close closes every port and ends the connections.
func (cs *Checks) Close() {
	cs.closing.Do(func() { close(cs.stop) })
	<-cs.done
}

func (cs *Checks) run() {
	defer close(cs.done)
	retry := time.NewTimer(listenAgain)
	retry.Stop()
	defer retry.Stop()
	retrying := false
	for {
		select {
		case <-cs.stop:
			for _, p := range cs.ports {
				p.close()
			}
			cs.serving.Wait()
			return
		case <-cs.wake:
			cs.take()
		case <-retry.C:
			for _, p := range cs.ports {
				if p.failure != "" {
					cs.open(p)
				}
			}
			retrying = false
		}
		cs.count()
		if cs.failing > 0 && !retrying {
			retrying = true
			retry.Reset(listenAgain)
		}
	}
}

// take brings the ports in line with what was told. It costs the size of that, and that of all ports when the addresses
// to listen on changed.
func (cs *Checks) take() {
	cs.mu.Lock()
	d := cs.pending
	cs.pending = model.Delta{}
	cs.mu.Unlock()

	gone := slices.Clone(d.GoneChecks)
	if d.Full {
		stay := map[string]bool{}
		for _, c := range d.Checks {
			stay[c.Service] = true
		}
		for service := range cs.ports {
			if !stay[service] {
				gone = append(gone, service)
			}
		}
	}
	for _, service := range gone {
		if p := cs.ports[service]; p != nil {
			p.close()
			delete(cs.ports, service)
		}
	}
	if d.Node != nil {
		cs.node = *d.Node
		cs.move(cs.listenAddrs())
	}
	cs.release(d.Checks)
	for _, c := range d.Checks {
		cs.set(c)
	}
}

// release closes the ports of Services that got another number, before any is opened: two Services may swap theirs.
func (cs *Checks) release(checks []model.Check) {
	for _, c := range checks {
		if p := cs.ports[c.Service]; p != nil && p.number != c.Port {
			p.close()
			delete(cs.ports, c.Service)
		}
	}
}

func (cs *Checks) set(c model.Check) {
	p := cs.ports[c.Service]
	if p == nil {
		p = &port{service: c.Service, number: c.Port, listeners: map[netip.Addr]listener{}}
		cs.ports[c.Service] = p
	}
	p.ready[0].Store(int64(c.Ready4))
	p.ready[1].Store(int64(c.Ready6))
	cs.open(p)
}

// move listens on other addresses from now on.
func (cs *Checks) move(addrs []netip.Addr) {
	if setEqual(addrs, cs.addrs) {
		return
	}
	cs.addrs = addrs
	want := map[netip.Addr]bool{}
	for _, a := range addrs {
		want[a] = true
	}
	for _, p := range cs.ports {
		for a, l := range p.listeners {
			if !want[a] {
				l.end()
				delete(p.listeners, a)
			}
		}
		cs.open(p)
	}
}

// listenAddrs are the addresses that take NodePorts, or the one that stands for all of them.
func (cs *Checks) listenAddrs() (addrs []netip.Addr) {
	for _, v6 := range []bool{false, true} {
		switch {
		case v6 && !cs.c.V6 || !v6 && !cs.c.V4:
		case takesAll(cs.node, v6):
			addrs = append(addrs, model.Unspecified(v6))
		default:
			for _, a := range cs.node.Addrs {
				linkLocal := v6 && a.IsLinkLocalUnicast() // means nothing without an interface
				if a.Is6() == v6 && !linkLocal && cs.node.TakesNodePort(a) {
					addrs = append(addrs, a)
				}
			}
		}
	}
	return addrs
}

func takesAll(n model.Node, v6 bool) bool {
	for _, p := range n.NodePorts {
		if p.Bits() == 0 && p.Addr().Is6() == v6 {
			return true
		}
	}
	return n.NodePorts == nil
}

// open opens what is not open yet of a port. One notice tells of a spell of failures.
func (cs *Checks) open(p *port) {
	before := p.failure
	p.failure = ""
	for _, a := range cs.addrs {
		if _, ok := p.listeners[a]; ok {
			continue
		}
		network := "tcp4"
		if a.Is6() {
			network = "tcp6"
		}
		l, err := cs.c.Listen(network, netip.AddrPortFrom(a, p.number).String())
		if err != nil {
			p.failure = err.Error()
			continue
		}
		server := newHTTP(cs.handler(p, a.Is6()))
		p.listeners[a] = listener{l, server}
		cs.serving.Go(func() { server.Serve(l) })
	}
	switch {
	case p.failure != "" && before == "":
		msg := fmt.Sprintf("health-check node port %d can't be opened (tried again each %v): %s", p.number, listenAgain, p.failure)
		klog.InfoS("Health-check node port can't be opened", "service", p.service, "port", p.number, "err", p.failure)
		cs.c.Notice(model.Notice{Service: p.service, Reason: PortFailed, Message: msg})
	case p.failure == "" && before != "":
		klog.InfoS("Health-check node port is open", "service", p.service, "port", p.number)
	}
}

// close ends the listeners and every connection; one that is being answered gets 503.
func (p *port) close() {
	p.ready[0].Store(0)
	p.ready[1].Store(0)
	for _, l := range p.listeners {
		l.end()
	}
}

func (cs *Checks) count() {
	n := 0
	for _, p := range cs.ports {
		if p.failure != "" {
			n++
		}
	}
	if n != cs.failing {
		cs.failing = n
		cs.c.Failing(n)
	}
}

// checkBody is kube-proxy's answer, field by field.
type checkBody struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int64 `json:"localEndpoints"`
	ServiceProxyHealthy bool  `json:"serviceProxyHealthy"`
}

// handler answers any path and method, as kube-proxy does.
func (cs *Checks) handler(p *port, v6 bool) http.Handler {
	family := 0
	if v6 {
		family = 1
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body := checkBody{LocalEndpoints: p.ready[family].Load(), ServiceProxyHealthy: cs.c.Healthy()}
		body.Service.Namespace, body.Service.Name, _ = strings.Cut(p.service, "/")
		b, err := json.MarshalIndent(body, "", "\t")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(body.LocalEndpoints, 10))
		writeJSON(w, code(body.LocalEndpoints > 0 && body.ServiceProxyHealthy), b)
	})
}

func setEqual(a, b []netip.Addr) bool {
	set := func(s []netip.Addr) map[netip.Addr]bool {
		m := make(map[netip.Addr]bool, len(s))
		for _, x := range s {
			m[x] = true
		}
		return m
	}
	return maps.Equal(set(a), set(b))
}
