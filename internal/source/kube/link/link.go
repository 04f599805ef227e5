package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Link carries requests to the API. Its methods may be called from any goroutine.
type Link struct {
	connection Connection
	times      times
	base       *url.URL // what the REST clients were made with: the first server there was
	prefix     string   // its path
	trust      atomic.Pointer[settings]
	poked      chan struct{} // one slot: look how the API is, now
	back       atomic.Pointer[func()]
	moved      atomic.Pointer[func()]

	reading sync.Mutex // one look at the files at a time

	mu        sync.Mutex
	use       *wire
	next      *wire    // well-formed, and not seen to work yet; nil when there is none
	flawed    []string // files that were read before what they say was refused
	vips      []string
	endpoints []string
	status    Status    // as far as it is not worked out when asked
	said      time.Time // when trouble was last logged
	behind    time.Time // when a server was last said to be behind

	lamented   string    // why what the files say can't be used, as it was last logged
	lamentedAt time.Time // when that was
	cluster    string    // see identity; empty is not known
	introduced bool      // it was asked for
	hung       bool      // a pulse was not answered in time, and none has been since
}

// New reads what the connection is made of, and asks nobody yet. An error says that it can't work as it is written. What is
// well-formed and has merely expired is no error: it may be replaced any moment.
func New(c Connection) (*Link, error) { return newLink(c, usual) }

func newLink(c Connection, t times) (*Link, error) {
	now := time.Now()
	s, err := c.read()
	if err != nil {
		return nil, err
	}
	l := &Link{connection: c, times: t, poked: make(chan struct{}, 1), base: s.servers[0], prefix: strings.TrimSuffix(s.servers[0].Path, "/")}
	l.status.Errors, l.status.Since = map[Trouble]uint64{}, now
	for _, t := range Things {
		r := Reload{Thing: t}
		if s.sum(t) != none {
			r.Last = now
		}
		l.status.Reloads = append(l.status.Reloads, r)
	}
	l.trust.Store(s)
	if l.use, err = newWire(l, s); err != nil {
		return nil, err
	}
	if err := s.invalidNow(now); err != nil {
		klog.InfoS("The credentials for the Kubernetes API are not valid now; trying all the same, and waiting for others", "err", err)
	}
	return l, nil
}

// Config is for REST clients: all that they ask goes through the link.
func (l *Link) Config() *rest.Config {
	cfg := l.connection.content()
	cfg.Host, cfg.Transport = l.base.String(), l
	return cfg
}

// OnBack sets what is called whenever the API answers again after it did not.
func (l *Link) OnBack(f func()) { l.back.Store(&f) }

// OnMoved sets what is called when what is reached turns out to be another cluster: versions mean nothing there.
func (l *Link) OnMoved(f func()) { l.moved.Store(&f) }

// wire is the one in use.
func (l *Link) wire() *wire {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.use
}

// CloseIdleConnections lets go of connections that nobody uses; [http.Client] looks for it.
func (l *Link) CloseIdleConnections() { l.wire().transport.CloseIdleConnections() }

// RoundTrip implements [http.RoundTripper]. What the server refuses for our credentials, or we for its certificate, is asked
// once more when there are new ones.
func (l *Link) RoundTrip(req *http.Request) (*http.Response, error) {
	watch := req.URL.Query().Get("watch")
	if watch != "true" && watch != "1" {
		_, resp, err := l.ask(req)
		return resp, err
	}
	ctx, cancel := context.WithCancel(req.Context())
	w, resp, err := l.ask(req.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body = refusal{resp.Body, cancel}
		return resp, nil
	}
	w.watch(resp, cancel)
	return resp, nil
}

// refusal is the body of an answer that is no watch.
type refusal struct {
	io.ReadCloser
	end func()
}

// Close implements [io.Closer].
func (r refusal) Close() error {
	defer r.end()
	return r.ReadCloser.Close()
}

func (l *Link) ask(req *http.Request) (*wire, *http.Response, error) {
	w := l.wire()
	resp, err := w.roundTrip(req)
	if credentials(resp, err) && repeatable(req) && l.renewed(req.Context(), w) {
		if err == nil {
			resp.Body.Close()
		}
		w = l.wire()
		resp, err = w.roundTrip(req)
	}
	switch {
	case err == nil:
		l.answered(w, req, resp.StatusCode)
	case req.Context().Err() == nil: // else it was given up, which says nothing about the API
		l.trouble(w, troubleOf(err), err)
	}
	return w, resp, err
}

// credentials tells whether others might help.
func credentials(resp *http.Response, err error) bool {
	if err == nil {
		return resp.StatusCode == http.StatusUnauthorized
	}
	kind := troubleOf(err)
	return kind == Untrusted || kind == Expired || kind == BadTLS
}

// renewed tells whether there is another wire than w, after a look at the files.
func (l *Link) renewed(ctx context.Context, w *wire) bool {
	if l.wire() == w {
		l.look()
		l.tryNext(ctx)
	}
	return l.wire() != w
}

// look reads what the files say now, and makes it the next wire when that is new and well-formed.
func (l *Link) look() {
	l.reading.Lock()
	defer l.reading.Unlock()
	now := time.Now()
	s, err := l.connection.read()
	w := l.wire()
	same := err == nil && s.same(w.settings)
	if err == nil && !same && w.settings.invalidNow(now) == nil {
		err = s.invalidNow(now)
	}
	if err == nil && same {
		l.trust.Store(w.settings)
	}
	if err != nil || same {
		l.wait(nil, err)
		return
	}
	l.mu.Lock()
	waits := l.next
	l.mu.Unlock()
	if waits != nil && s.same(waits.settings) {
		return
	}
	next, err := newWire(l, s)
	if err == nil {
		l.trust.Store(s)
	}
	l.wait(next, err)
}

// wait notes what is to be tried next, or why what the files say can't be.
func (l *Link) wait(next *wire, err error) {
	l.mu.Lock()
	old := l.next
	l.next = next
	if err == nil {
		l.flawed = nil
		if next == nil {
			l.status.Waiting = ""
		}
	}
	l.mu.Unlock()
	if old != nil {
		old.cut(errRetired)
	}
	if err != nil {
		l.refused(err)
	}
	if next != nil {
		l.Poke()
	}
}

// refused notes that what the files say can't be used.
func (l *Link) refused(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flawed = filesOf(err)
	line := err.Error()
	if line == l.status.Waiting {
		return
	}
	l.status.Waiting = line
	for i, r := range l.status.Reloads {
		if r.Thing == thingOf(err) {
			l.status.Reloads[i].Refused++
		}
	}
	if now := time.Now(); line != l.lamented || now.Sub(l.lamentedAt) >= sayAgain {
		l.lamented, l.lamentedAt = line, now
		klog.ErrorS(err, "New credentials for the Kubernetes API can't be used; going on with those that were good, and reading again")
	}
}

// swap puts another wire into use. Its watches go on, over the new one, where they were on the old.
func (l *Link) swap(next *wire) {
	l.mu.Lock()
	old := l.use
	if l.next != next || old == next {
		l.mu.Unlock()
		return
	}
	l.use, l.next, l.status.Waiting = next, nil, ""
	var things []Thing
	for i, r := range l.status.Reloads {
		if old.settings.sum(r.Thing) != next.settings.sum(r.Thing) {
			l.status.Reloads[i].Used++
			l.status.Reloads[i].Last = time.Now()
			things = append(things, r.Thing)
		}
	}
	l.mu.Unlock()
	klog.InfoS("Took up new settings for the Kubernetes API", "changed", things, "server", next.server().Redacted())
	old.retire()
}

// Status tells how the link is.
func (l *Link) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	s.Errors, s.Reloads = maps.Clone(s.Errors), slices.Clone(s.Reloads)
	s.Server = l.use.server().Redacted()
	for _, u := range l.use.settings.servers {
		s.Servers = append(s.Servers, u.Redacted())
	}
	if until := l.use.chain.Load(); until != nil {
		s.ServerNotAfter = *until
	}
	s.ClientNotAfter, s.TokenNotAfter = l.use.settings.clientNotAfter, l.use.settings.tokenNotAfter
	return s
}

// heard notes a sign of life.
func (l *Link) heard() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Heard = time.Now()
}

// answered notes an answer, which may be a refusal.
func (l *Link) answered(w *wire, req *http.Request, code int) {
	said := fmt.Errorf("%s %s: %d %s", req.Method, req.URL.Path, code, http.StatusText(code))
	switch {
	case code == http.StatusUnauthorized:
		l.trouble(w, Unauthorized, errors.New("401 Unauthorized: the API server does not take our credentials"))
		return
	case code == http.StatusTooManyRequests:
		l.count(Overloaded, said)
	case code >= 500:
		l.count(ServerError, said)
	}
	w.why.Store(nil)
	l.mu.Lock()
	l.status.Heard = time.Now()
	again := w == l.use && !l.status.Connected
	since := l.status.Since
	first := again && l.status.LastErrorAt.IsZero()
	if again {
		l.status.Connected, l.status.Since, l.said = true, time.Now(), time.Time{}
	}
	l.mu.Unlock()
	if !again {
		return
	}
	if !first {
		klog.InfoS("The Kubernetes API answers again", "server", w.server().Redacted(), "after", time.Since(since).Round(time.Millisecond))
	}
	l.callBack()
}

func (l *Link) callBack() { call(&l.back) }

func call(hook *atomic.Pointer[func()]) {
	if f := hook.Load(); f != nil {
		(*f)()
	}
}

// trouble notes that the API could not be asked over a wire, or did not take our credentials.
func (l *Link) trouble(w *wire, kind Trouble, err error) {
	err = l.count(kind, l.hint(w, kind, err))
	if kind == Silent || kind == Behind { // of a watch, or a server; the link is as it was
		return
	}
	l.mu.Lock()
	if w != l.use {
		l.mu.Unlock()
		return
	}
	now := time.Now()
	was := l.status.Connected
	if was {
		l.status.Connected, l.status.Since = false, now
	}
	tell := now.Sub(l.said) >= sayAgain
	if tell {
		l.said = now
	}
	since := l.status.Since
	l.mu.Unlock()
	if tell {
		klog.ErrorS(err, "The Kubernetes API can't be reached; the kernel keeps what it has", "server", w.server().Redacted(), "since", since.Format(time.RFC3339))
	}
	if was { // else the pulse knocks already
		l.Poke()
	}
}

// hint adds what a person can't see from the error of a pod that asks through the Service of the API, on a node where
// nobody makes Services work yet.
func (l *Link) hint(w *wire, kind Trouble, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !w.settings.inCluster || !l.status.Heard.IsZero() || len(l.endpoints) > 0 || kind != Refused && kind != Unreachable && kind != TimedOut {
		return err
	}
	return fmt.Errorf("%w (%s is a Service, which this agent itself has to make work first: give apiServers, or a kubeconfig)", OneLine(err), w.server().Host)
}

// interrupted notes that a watch ended in the middle, or as it should. What that means for the link, the next pulse finds out.
func (l *Link) interrupted(w *wire, err error) {
	switch kind := troubleOf(err); {
	case errors.Is(err, context.Canceled): // by the reflector
		return
	case kind == TimedOut: // the ping was not answered
		l.trouble(w, kind, err)
	case err != io.EOF:
		l.count(kind, err)
	}
	if l.connected() {
		l.Poke()
	}
}

func (l *Link) connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status.Connected
}

// sayAgain is how long the same trouble is not logged again.
const sayAgain = time.Minute

// count notes a trouble, and gives it in one line.
func (l *Link) count(kind Trouble, err error) error {
	err = OneLine(err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.Errors[kind]++
	l.status.LastError, l.status.LastErrorAt = err, time.Now()
	return err
}

// leave takes the next server in place of the one at that place of w, and notes it. It tells whether there was another.
func (l *Link) leave(w *wire, place int, why error) bool {
	if !w.leave(place) {
		return false
	}
	why = l.count(troubleOf(why), why)
	l.mu.Lock()
	l.status.Failovers++
	first := l.status.Connected // while all of them are away, each try goes around
	l.mu.Unlock()
	if first {
		klog.InfoS("Asking another API server", "from", w.settings.servers[place].Redacted(), "to", w.server().Redacted(), "err", why)
	}
	return true
}

// behindAgain is how long a server is not left again since one was behind.
const behindAgain = 10 * time.Second

// Behind says that the server in use knows less than is known already: it lags, or all of them were restored from a backup. Another one
// is asked, if there is one.
func (l *Link) Behind(err error) {
	w := l.wire()
	place := w.place()
	l.trouble(w, Behind, err)
	l.mu.Lock()
	again := time.Since(l.behind) < behindAgain // all who watch notice the same
	if !again {
		l.behind = time.Now()
	}
	l.mu.Unlock()
	if !again && l.leave(w, place, err) {
		w.endWatches()
	}
}
