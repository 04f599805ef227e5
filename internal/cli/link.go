package cli

import (
	"context"
	"fmt"
	"time"

	"fairlead/internal/events"
	"fairlead/internal/health"
	"fairlead/internal/model"
	"fairlead/internal/source/kube"
	"fairlead/internal/source/kube/link"
)

// What an agent says of its view of the API: how the API is reached, how old is what it said, and what people should be told
// of that.

// tolerated is how long trouble with the API may last before the node does not count as ready. A request that fails is asked
// again in a second, another API server is taken as soon, one that was restarted is back in some seconds: all nodes of a
// cluster should not be unready at once because of that. It is also the period of a kubelet's probe, unless that is changed.
const tolerated = 10 * time.Second

// view is what an agent knows of the API at a moment.
type view struct {
	link      link.Status
	resources []kube.Status
	started   time.Time     // when it was first asked
	stale     time.Duration // how old what is known may become
}

func (a *agent) view() view {
	return view{a.api.Link(), a.api.Status(), a.started, a.now().c.Own.StaleAfter.Duration}
}

// age is for how long a resource has given no sign of life; of one that never did, since the start.
func (v view) age(r kube.Status, now time.Time) time.Duration {
	if r.LastEvent.IsZero() {
		return now.Sub(v.started)
	}
	return now.Sub(r.LastEvent)
}

// problem is why what is known of a resource can't be relied on now, and whether that is bad enough for the node not to be
// ready. It is known at once, and tolerated for a moment.
func (v view) problem(r kube.Status, now time.Time) (why string, failing bool) {
	l, old := v.link, v.age(r, now) > v.stale
	since, last := l.Since, l.LastError // of what began first
	if r.LastError != nil && (l.Connected || r.Since.Before(since)) {
		since, last = r.Since, r.LastError
	}
	switch {
	case r.LastError == nil && !l.Connected && last == nil:
		return "the API server has not answered yet", old || now.Sub(since) > tolerated
	case r.LastError != nil || !l.Connected:
		return fmt.Sprintf("can't be asked since %s: %v", clock(since), last), old || now.Sub(since) > tolerated
	case old && r.LastEvent.IsZero():
		return "was never heard of", true
	case old:
		return "was last heard of at " + clock(r.LastEvent), true
	case r.Doubt != "":
		return r.Doubt, now.Sub(r.DoubtSince) > tolerated
	case l.NotReady != "": // its watches may go on and say nothing, as on a server that is cut off from its etcd
		return fmt.Sprintf("the API server says since %s that it is not ready: %s", clock(l.NotReadySince), l.NotReady), now.Sub(l.NotReadySince) > v.stale
	}
	return "", false
}

// sources are the resources of the API, as sources of truth. taken tells whether the engine has taken all they said at first.
func (v view) sources(taken bool, now time.Time) []health.Source {
	var out []health.Source
	for _, r := range v.resources {
		s := health.Source{Name: r.Resource, Synced: r.Synced && taken, Heard: r.LastEvent, Remote: true, InDoubt: r.Doubt != ""}
		s.Problem, s.Failing = v.problem(r, now)
		out = append(out, s)
	}
	return out
}

// api is how the API is reached, for those who ask.
func (v view) api(now time.Time) *health.API {
	l := v.link
	out := &health.API{Server: l.Server, Servers: l.Servers, Connected: l.Connected, Since: l.Since, Heard: l.Heard, NotReady: l.NotReady,
		LastErrorAt: l.LastErrorAt, Errors: map[string]uint64{}, Failovers: l.Failovers, Reloads: map[string]health.Reload{}, Waiting: l.Waiting,
		ClientNotAfter: l.ClientNotAfter, ServerNotAfter: l.ServerNotAfter, TokenNotAfter: l.TokenNotAfter}
	if l.LastError != nil {
		out.LastError = l.LastError.Error()
	}
	for _, t := range link.Troubles {
		out.Errors[string(t)] = l.Errors[t]
	}
	for _, t := range link.Things {
		out.Reloads[string(t)] = health.Reload{}
	}
	for _, r := range l.Reloads {
		out.Reloads[string(r.Thing)] = health.Reload{Used: r.Used, Refused: r.Refused, Last: r.Last}
	}
	if at := v.asOf(); !at.IsZero() {
		age := now.Sub(at).Seconds()
		out.View = &age
	}
	return out
}

// asOf is when all of what is known was true: when the resource that has been silent for longest gave its last sign of life.
// Zero is that one never did.
func (v view) asOf() time.Time {
	var first time.Time
	for _, r := range v.resources {
		if r.LastEvent.IsZero() {
			return time.Time{}
		}
		if first.IsZero() || r.LastEvent.Before(first) {
			first = r.LastEvent
		}
	}
	return first
}

// apiNow is nil where no API is asked.
func (a *agent) apiNow() *health.API {
	if a.api == nil {
		return nil
	}
	return a.view().api(time.Now())
}

const (
	lookEach = 5 * time.Second    // at the view, for what people should be told
	soon     = 7 * 24 * time.Hour // a certificate that expires so soon should be renewed by now
	warnEach = 24 * time.Hour     // of one certificate, at most
)

// watchView tells people of what should worry them, until ctx ends. What it tells during an outage they see in the log at once,
// and as Events when the API is back.
func (a *agent) watchView(ctx context.Context) {
	w := newWorries()
	look := time.NewTicker(lookEach)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-look.C:
			wrong, over := w.look(a.view(), now)
			a.notice(wrong...)
			a.metrics.Notices(over...)
			for _, n := range over {
				a.teller.Over(n)
			}
		}
	}
}

// worries is what people were told, so that each thing is told once: when it begins, and when it is over. A certificate that
// expires is told of again each day.
type worries struct {
	stale        time.Time // since when the view is old, as was told; zero is not
	refused      bool      // that our credentials are was told
	unauthorized uint64    // refusals until the API was last reached
	warned       map[string]time.Time
}

func newWorries() *worries { return &worries{warned: map[string]time.Time{}} }

// look gives what is news.
func (w *worries) look(v view, now time.Time) (wrong, over []model.Notice) {
	say := func(to *[]model.Notice, reason, format string, args ...any) {
		*to = append(*to, model.Notice{Reason: reason, Message: fmt.Sprintf(format, args...)})
	}
	since, why := v.trouble(now)
	switch {
	case why != "" && w.stale.IsZero() && now.Sub(since) > v.stale:
		w.stale = since
		say(&wrong, events.ViewStale, "what is known of the cluster is what it was at %s, and goes on being served: %s", clock(since), why)
	case why == "" && !w.stale.IsZero():
		say(&over, events.ViewFresh, "what is known of the cluster is up to date again, after %v", now.Sub(w.stale).Round(time.Second))
		w.stale = time.Time{}
	}
	n := v.link.Errors[link.Unauthorized]
	switch {
	case v.link.Connected:
		w.unauthorized, w.refused = n, false
	case !w.refused && n > w.unauthorized && now.Sub(v.link.Since) > tolerated:
		w.refused = true
		say(&wrong, events.CredentialsRefused, "the API server does not take our credentials since %s: %v%s", clock(v.link.Since), v.link.LastError, waiting(v.link))
	}
	expires := func(what string, until time.Time) {
		if w.mayWarn(what, until, now) {
			say(&wrong, events.CertificateExpires, "%s %s: it must be renewed", what, expiry(until, now))
		}
	}
	expires("the client certificate for the API server", v.link.ClientNotAfter)
	expires("the certificate of the API server", v.link.ServerNotAfter)
	return wrong, over
}

// trouble is since when, and why, the view may be old; no reason is that it is not. Silence is one when it lasts for longer
// than what is known may be old. Of several reasons, the one that explains the others is given.
func (v view) trouble(now time.Time) (since time.Time, why string) {
	note := func(at time.Time, format string, args ...any) {
		if why == "" {
			since, why = at, fmt.Sprintf(format, args...)
		}
		if at.Before(since) {
			since = at
		}
	}
	if l := v.link; !l.Connected {
		said := "it has not answered yet"
		if l.LastError != nil {
			said = l.LastError.Error()
		}
		note(l.Since, "the API server can't be asked (%s)%s", said, waiting(l))
	}
	if l := v.link; l.Connected && l.NotReady != "" {
		note(l.NotReadySince, "the API server says that it is not ready (%s)", l.NotReady)
	}
	for _, r := range v.resources {
		if r.LastError != nil {
			note(r.Since, "%s can't be asked (%v)", r.Resource, r.LastError)
		}
	}
	for _, r := range v.resources {
		if age := v.age(r, now); age > v.stale {
			note(now.Add(-age), "nothing was heard of %s", r.Resource)
		}
	}
	return since, why
}

// waiting adds what may be the reason for trouble: what the files say is not in use.
func waiting(l link.Status) string {
	if l.Waiting == "" {
		return ""
	}
	return "; " + l.Waiting
}

// mayWarn tells whether a certificate expires soon, or has, and it was not told lately. That it has is news.
func (w *worries) mayWarn(what string, until, now time.Time) bool {
	if until.IsZero() || until.Sub(now) > soon {
		return false
	}
	if !until.After(now) {
		what += ", expired"
	}
	if at, said := w.warned[what]; said && now.Sub(at) < warnEach {
		return false
	}
	w.warned[what] = now
	return true
}

// expiry says until when something is valid.
func expiry(until, now time.Time) string {
	left := until.Sub(now)
	switch {
	case left <= 0:
		return "expired at " + clock(until)
	case left < 2*time.Hour:
		return fmt.Sprintf("expires at %s, in %v", clock(until), left.Round(time.Second))
	case left < 48*time.Hour:
		return fmt.Sprintf("expires at %s, in %d hours", clock(until), int(left.Hours()))
	}
	return fmt.Sprintf("expires at %s, in %d days", clock(until), int(left.Hours()/24))
}

// clock writes a time as logs and Events have it.
func clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }
