package link

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/klog/v2"
)

// wire is a way to the API by one set of settings. It is never changed, only replaced.
type wire struct {
	link      *Link
	settings  *settings
	transport *http.Transport
	via       http.RoundTripper // transport, with our credentials put on
	conns     *connrotation.ConnectionTracker
	at        atomic.Int32 // the server in use, by its place in settings.servers

	chain atomic.Pointer[time.Time] // until when the chain is valid that a server showed last; nil is not known
	why   atomic.Pointer[error]     // of the last cut: what is under way fails by it, and should say so

	tryAt time.Time     // not before, after it was refused; of link.mu
	pause time.Duration // the last; of link.mu

	mu      sync.Mutex
	watches map[*watched]bool // open
}

func newWire(l *Link, s *settings) (*wire, error) {
	w := &wire{link: l, settings: s, conns: connrotation.NewConnectionTracker(), watches: map[*watched]bool{}}
	cfg := rest.CopyConfig(s.rest)
	cfg.Dial = connrotation.NewDialerWithTracker(w.dial, w.conns).DialContext
	tc, err := cfg.TransportConfig() // an exec plugin puts its own dialer around ours
	if err != nil {
		return nil, fmt.Errorf("credentials: %w", OneLine(err))
	}
	secure, err := transport.TLSConfigFor(tc)
	if err != nil {
		return nil, fmt.Errorf("TLS: %w", OneLine(err))
	}
	if secure == nil {
		secure = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	secure.VerifyConnection = w.verify
	w.transport = &http.Transport{Proxy: tc.Proxy, DialContext: tc.DialHolder.Dial, TLSClientConfig: secure, TLSHandshakeTimeout: l.times.handshake,
		ResponseHeaderTimeout: l.times.header, DisableCompression: tc.DisableCompression, IdleConnTimeout: 90 * time.Second, MaxIdleConnsPerHost: 8,
		ForceAttemptHTTP2: true, HTTP2: &http.HTTP2Config{SendPingTimeout: l.times.pingAfter, PingTimeout: l.times.ping}}
	if tc.Proxy == nil {
		w.transport.Proxy = utilnet.NewProxierWithNoProxyCIDR(http.ProxyFromEnvironment)
	}
	if w.via, err = transport.HTTPWrappersForConfig(tc, w.transport); err != nil {
		return nil, fmt.Errorf("credentials: %w", OneLine(err))
	}
	return w, nil
}

// verify is called at the end of each handshake, when the chain was found good by the authorities of this wire. It must be
// good by those that the files name now, too: an authority that was taken out is not trusted any more, nor a server that must be
// verified now and had not to be before, even while the wire that came with the change does not work yet.
func (w *wire) verify(cs tls.ConnectionState) error {
	w.saw(cs.PeerCertificates)
	now := w.link.trust.Load()
	if now == nil || now == w.settings || now.rest.Insecure || len(cs.PeerCertificates) == 0 {
		return nil
	}
	name := cs.ServerName
	if w.settings.rest.Insecure { // nobody has looked until here
		name = cmp.Or(now.rest.ServerName, w.server().Hostname())
	}
	between := x509.NewCertPool()
	for _, c := range cs.PeerCertificates[1:] {
		between.AddCert(c)
	}
	_, err := cs.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: now.roots, Intermediates: between, DNSName: name})
	return err
}

// saw notes when the first certificate of a chain expires.
func (w *wire) saw(chain []*x509.Certificate) {
	var first time.Time
	for _, c := range chain {
		if first.IsZero() || c.NotAfter.Before(first) {
			first = c.NotAfter
		}
	}
	w.chain.Store(&first)
}

// server is the one in use.
func (w *wire) server() *url.URL { return w.settings.servers[w.place()] }

func (w *wire) place() int { return int(w.at.Load()) % len(w.settings.servers) }

// leave takes the next server in place of the one at that place, unless somebody did so already or there is no other.
func (w *wire) leave(place int) bool {
	next := int32((place + 1) % len(w.settings.servers))
	return int(next) != place && w.at.CompareAndSwap(int32(place), next)
}

// roundTrip asks the server in use. A request that never reached it, goes to the next, until all were tried.
func (w *wire) roundTrip(req *http.Request) (*http.Response, error) {
	for tried := 1; ; tried++ {
		place := w.place()
		ask, sent, err := w.aim(req, w.settings.servers[place])
		if err != nil {
			return nil, err
		}
		resp, err := w.via.RoundTrip(ask)
		if err = w.cause(err); err != nil && len(w.settings.servers) > 1 {
			err = fmt.Errorf("%s: %w", w.settings.servers[place].Host, OneLine(err))
		}
		if err == nil || sent.Load() || req.Context().Err() != nil || tried >= len(w.settings.servers) || !repeatable(req) {
			return resp, err
		}
		w.link.leave(w, place, err)
	}
}

// aim turns a request, which the REST client made for the first server there was, towards another. sent becomes true when
// some of it was written to a connection.
func (w *wire) aim(req *http.Request, to *url.URL) (aimed *http.Request, sent *atomic.Bool, err error) {
	sent = new(atomic.Bool)
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	aimed = req.Clone(ctx)
	aimed.URL.Scheme, aimed.URL.Host, aimed.Host = to.Scheme, to.Host, ""
	path := strings.TrimSuffix(to.Path, "/") + strings.TrimPrefix(req.URL.Path, w.link.prefix)
	aimed.URL.Path, aimed.URL.RawPath = path, ""
	if req.GetBody != nil {
		if aimed.Body, err = req.GetBody(); err != nil {
			return nil, nil, fmt.Errorf("repeat a request: %w", err)
		}
	}
	return aimed, sent, nil
}

// repeatable tells whether a request can be sent again.
func repeatable(req *http.Request) bool {
	return req.Body == nil || req.Body == http.NoBody || req.GetBody != nil
}

// endWatches ends all watches, as a server does that closes them: they go on where they were, over the wire in use then.
func (w *wire) endWatches() {
	w.mu.Lock()
	open := w.watches
	w.watches = map[*watched]bool{}
	w.mu.Unlock()
	for b := range open {
		b.end()
	}
}

// retire lets go of a wire that was replaced.
func (w *wire) retire() {
	w.endWatches()
	w.transport.CloseIdleConnections()
	time.AfterFunc(w.link.times.retire, func() { w.cut(errRetired) })
}

var (
	errRetired = errors.New("the settings of the connection were replaced")
	errEnded   = errors.New("the program ends")
)

// cut ends all that is under way.
func (w *wire) cut(why error) {
	w.why.Store(&why)
	w.endWatches()
	w.conns.CloseAll()
	w.transport.CloseIdleConnections()
}

// forceClosed is net/http's word for a request over an HTTP/2 connection that we closed.
const forceClosed = "client connection force closed"

// cause is the reason of an error that comes from a cut.
func (w *wire) cause(err error) error {
	if why := w.why.Load(); why != nil && err != nil && (errors.Is(err, net.ErrClosed) || strings.Contains(err.Error(), forceClosed)) {
		return *why
	}
	return err
}

// watched is the body of a watch. However it ends (it is silent for too long, its wire goes, the connection is lost), it ends as if
// the server had closed it, so that the reflector goes on where it was: after an error it would list anew.
type watched struct {
	io.ReadCloser
	wire   *wire
	cancel context.CancelFunc
	opened time.Time
	timer  *time.Timer
	ended  atomic.Bool // by us
	closed chan struct{}
	close  sync.Once
}

func (w *wire) watch(resp *http.Response, cancel context.CancelFunc) {
	b := &watched{ReadCloser: resp.Body, wire: w, cancel: cancel, opened: time.Now(), closed: make(chan struct{})}
	limit := w.link.times.silent
	b.timer = time.AfterFunc(limit, func() {
		if !b.ended.Load() {
			w.link.trouble(w, Silent, fmt.Errorf("a watch said nothing for %s; opening it again", limit))
			b.end()
		}
	})
	w.mu.Lock()
	w.watches[b] = true
	w.mu.Unlock()
	resp.Body = b
	if w.link.wire() != w { // replaced meanwhile
		b.end()
	}
}

func (b *watched) end() {
	b.ended.Store(true)
	b.timer.Stop()
	b.cancel()
}

// Read implements [io.Reader].
func (b *watched) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == nil {
		b.timer.Reset(b.wire.link.times.silent)
		b.wire.link.heard()
		return n, nil
	}
	if !b.ended.Load() {
		b.wire.link.interrupted(b.wire, b.wire.cause(err))
	}
	select {
	case <-time.After(time.Until(b.opened.Add(b.wire.link.times.short))):
	case <-b.closed:
	}
	return n, io.EOF
}

// Close implements [io.Closer].
func (b *watched) Close() error {
	b.wire.mu.Lock()
	delete(b.wire.watches, b)
	b.wire.mu.Unlock()
	err := b.ReadCloser.Close()
	b.end()
	b.close.Do(func() { close(b.closed) })
	return err
}

// dial connects. The API server may be reached through the Service that this agent itself makes work: when that does not,
// the endpoints it had when it did are tried, so that losing them all is no dead end. Who has a choice waits less for each.
func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l, direct := w.link, w.link.endpointsOf(addr)
	d := net.Dialer{Timeout: max(l.times.dial/time.Duration(len(w.settings.servers)+len(direct)), l.times.dial/5),
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 4}}
	conn, first := d.DialContext(ctx, network, addr)
	if first == nil {
		return conn, nil
	}
	for _, e := range direct {
		if conn, err := d.DialContext(ctx, network, e); err == nil {
			klog.InfoS("The Service kubernetes does not answer; its endpoint is asked directly", "service", addr, "endpoint", e, "err", first)
			return conn, nil
		}
	}
	return nil, first
}

// Learn takes note of the ClusterIPs, or the endpoints, of the Service default/kubernetes, as host:port. None leaves those
// that were known: they may be the last way in.
func (l *Link) Learn(vips, endpoints []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(vips) > 0 {
		l.vips = slices.Clone(vips)
	}
	if len(endpoints) > 0 {
		known := slices.DeleteFunc(l.endpoints, func(e string) bool { return slices.Contains(endpoints, e) })
		l.endpoints = append(slices.Clone(endpoints), known...) // the latest first
		l.endpoints = l.endpoints[:min(len(l.endpoints), learnMost)]
	}
}

// learnMost bounds the endpoints that are remembered, those of former times too.
const learnMost = 16

func (l *Link) endpointsOf(addr string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	host, _, _ := net.SplitHostPort(addr)
	if slices.Contains(l.vips, addr) || host == "kubernetes" || strings.HasPrefix(host, "kubernetes.default") {
		return slices.Clone(l.endpoints)
	}
	return nil
}
