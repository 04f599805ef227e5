package link

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

const readyz = "/readyz"

// Run keeps the link alive until ctx ends.
//
// The pulse is a question that the API server answers whatever it knows: GET /readyz, which every user may ask by default
// (ClusterRole system:public-info-viewer; if not, a refusal is an answer as well). It notices what a ping can't: a server that hangs behind
// a proxy, credentials that are not taken any more while old watches live on, a server that is cut off from its etcd and so has no
// news. When the API is away, the pulse knocks in short steps, and wakes the watches when it is answered. At 5,000 nodes this is 170
// requests a second over all API servers.
func (l *Link) Run(ctx context.Context) {
	defer func() { l.wire().cut(errEnded) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		watchFiles(ctx, l.files, l.times.files, l.look)
	}()
	defer func() { <-done }()
	for pace := l.times.knock; ; {
		calm, most := l.pulse(ctx)
		wait := l.times.pulse + rand.N(l.times.pulseMore)
		if calm {
			pace = l.times.knock
		} else {
			wait = pace*3/4 + rand.N(pace/2)
			pace = min(pace*3/2, most)
		}
		if !l.sleep(ctx, wait) {
			return
		}
	}
}

// sleep waits, or until somebody pokes. It tells whether to go on.
func (l *Link) sleep(ctx context.Context, wait time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(l.times.poke):
	}
	select {
	case <-ctx.Done():
		return false
	case <-l.poked:
	case <-time.After(wait - l.times.poke):
	}
	return true
}

// Poke has the link look at once how the API is.
func (l *Link) Poke() {
	select {
	case l.poked <- struct{}{}:
	default:
	}
}

// files are those that the link depends on.
func (l *Link) files() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := slices.Concat(l.connection.paths(), l.use.settings.files, l.flawed)
	if l.next != nil {
		all = append(all, l.next.settings.files...)
	}
	return all
}

// pulse looks how the API is, and whether what waits can be used. It tells whether all is well, and else how long at most to
// wait for the next look.
func (l *Link) pulse(ctx context.Context) (calm bool, most time.Duration) {
	l.tryNext(ctx)
	w := l.wire()
	place := w.place()
	code, said, err := l.question(ctx, w, readyz)
	if (err != nil && credentials(nil, err) || code == http.StatusUnauthorized) && l.renewed(ctx, w) {
		w = l.wire()
		place = w.place()
		code, said, err = l.question(ctx, w, readyz)
	}
	switch {
	case ctx.Err() != nil:
		return true, 0
	case err != nil:
		l.lost(w, place, err)
		return false, l.times.knockMost
	case code == http.StatusUnauthorized:
		l.answered(w, l.request(readyz), code)
		l.elsewhere(ctx, w, place)
		return false, l.times.badMost
	}
	l.answered(w, l.request(readyz), code)
	if !l.ready(w, place, code, said) {
		return false, l.times.badMost
	}
	l.introduce(ctx, w)
	l.unblock(w)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next == nil && l.status.Connected, l.times.tryMost
}

// introduce asks once which cluster this is.
func (l *Link) introduce(ctx context.Context, w *wire) {
	l.mu.Lock()
	done := l.introduced
	l.mu.Unlock()
	if done {
		return
	}
	if code, said, err := l.question(ctx, w, kubernetes); err == nil && code == http.StatusOK {
		l.recognize(identity(said))
		l.mu.Lock()
		l.introduced = true
		l.mu.Unlock()
	}
}

// elsewhere asks another server, after one did not take our credentials. Watches that it still serves move when the other does.
func (l *Link) elsewhere(ctx context.Context, w *wire, place int) {
	if !l.leave(w, place, errors.New("401 Unauthorized")) {
		return
	}
	if code, _, err := l.question(ctx, w, readyz); err == nil && code != http.StatusUnauthorized {
		l.answered(w, l.request(readyz), code)
		w.endWatches()
	}
}

// lost notes that the pulse was not answered. What hangs is cut, so that all else does not wait for it.
func (l *Link) lost(w *wire, place int, err error) {
	kind := troubleOf(err)
	l.trouble(w, kind, err)
	l.leave(w, place, err)
	if kind == TimedOut {
		w.cut(err)
		l.mu.Lock()
		l.hung = true
		l.mu.Unlock()
	}
}

var errHung = errors.New("the API server hung, and answers again")

// unblock ends what was asked while the server hung: behind a proxy, that may never be answered though the server is well again.
func (l *Link) unblock(w *wire) {
	l.mu.Lock()
	hung := l.hung
	l.hung = false
	l.mu.Unlock()
	if hung {
		w.cut(errHung)
		l.callBack()
	}
}

// ready notes whether the server says that it is ready. One that does not, twice in a row, is left for another.
func (l *Link) ready(w *wire, place, code int, said string) bool {
	bad := code >= 500
	said = unready(said)
	l.mu.Lock()
	was := l.status.NotReady
	l.status.NotReady = ""
	if bad {
		l.status.NotReady = said
	}
	if bad && was == "" {
		l.status.NotReadySince = time.Now()
	}
	l.mu.Unlock()
	switch {
	case bad && was != "" && l.leave(w, place, fmt.Errorf("it is not ready: %s", said)):
		w.endWatches()
	case bad && was == "":
		klog.InfoS("The API server says that it is not ready", "server", w.server().Redacted(), "says", said)
	case !bad && was != "":
		klog.InfoS("The API server is ready", "server", w.server().Redacted())
		l.callBack()
	}
	return !bad
}

// tryNext puts what waits into use when it works: when it lets us have what we ask for all the time.
func (l *Link) tryNext(ctx context.Context) {
	l.mu.Lock()
	next := l.next
	early := next != nil && time.Now().Before(next.tryAt)
	l.mu.Unlock()
	if next == nil || early {
		return
	}
	code, said, err := l.question(ctx, next, kubernetes)
	switch {
	case ctx.Err() != nil:
		return
	case err == nil && code == http.StatusOK:
		l.recognize(identity(said))
		l.swap(next)
		return
	case err == nil:
		l.mu.Lock()
		next.pause = min(max(2*next.pause, l.times.knock), l.times.badMost)
		next.tryAt = time.Now().Add(next.pause)
		l.mu.Unlock()
		err = fmt.Errorf("%d %s", code, http.StatusText(code))
	}
	l.refused(waits{fmt.Errorf("what the files say now does not work yet: %w", OneLine(err))})
}

// kubernetes asks for the Service of the API itself, in the words of a list: that is what we may, and do all the time.
const kubernetes = "/api/v1/namespaces/default/services?fieldSelector=metadata.name%3Dkubernetes"

// identity is what a cluster is known by: the UID of that Service, which lives as long as the cluster, also through a restored
// backup. Empty is not known.
func identity(services string) string {
	var list struct {
		Items []struct {
			Metadata struct {
				UID string `json:"uid"`
			} `json:"metadata"`
		} `json:"items"`
	}
	if json.Unmarshal([]byte(services), &list) != nil || len(list.Items) != 1 {
		return ""
	}
	return list.Items[0].Metadata.UID
}

// recognize compares a cluster with the one that was known.
func (l *Link) recognize(cluster string) {
	l.mu.Lock()
	was := l.cluster
	if cluster != "" {
		l.cluster = cluster
	}
	l.mu.Unlock()
	if was != "" && cluster != "" && was != cluster {
		klog.InfoS("This is another cluster than before; everything is listed anew", "was", was, "is", cluster)
		call(&l.moved)
	}
}

// waits is why well-formed settings are not in use. It is no refusal of one of their parts.
type waits struct{ error }

// request is a question of our own.
func (l *Link) request(path string) *http.Request {
	req, err := http.NewRequest(http.MethodGet, strings.TrimSuffix(l.base.String(), "/")+path, nil)
	if err != nil {
		panic(err) // both parts are our own
	}
	return req
}

// question asks over a wire, and gives the answer, or its beginning.
func (l *Link) question(ctx context.Context, w *wire, path string) (code int, said string, err error) {
	limit := l.times.knockFor
	l.mu.Lock()
	if w == l.use && l.status.Connected {
		limit = l.times.pulseFor
	}
	l.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %s: %w", limit, context.DeadlineExceeded))
	defer cancel()
	resp, err := w.roundTrip(l.request(path).WithContext(ctx))
	if err != nil {
		if ctx.Err() == context.DeadlineExceeded {
			err = context.Cause(ctx)
		}
		return 0, "", err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return resp.StatusCode, string(body), nil
}

// unready are the checks that failed, of what a /readyz says.
func unready(body string) string {
	var bad []string
	for line := range strings.Lines(body) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "[-]"); ok {
			bad = append(bad, name)
		}
	}
	if bad == nil {
		bad = strings.Fields(body)
		return strings.Join(bad[:min(len(bad), 20)], " ")
	}
	return strings.Join(bad, ", ")
}
