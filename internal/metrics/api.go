package metrics

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"fairlead/internal/health"
)

// apiDescs describe what is told of the way to the API.
type apiDescs struct {
	connected, ready, server, heard, errors, lastError, failovers, reloads, lastReload, waiting, certificate, token *prometheus.Desc
}

func newAPIDescs(d func(name, help string, labels ...string) *prometheus.Desc) apiDescs {
	return apiDescs{
		connected:   d("fairlead_api_connected", "1 when what was asked last was answered, and our credentials were taken."),
		ready:       d("fairlead_api_ready", "1 unless the API server in use says itself that it is not ready: cut off from its etcd, say."),
		server:      d("fairlead_api_server_info", "1, with the API server in use in the label.", "server"),
		heard:       d("fairlead_api_last_heard_timestamp_seconds", "When an API server last answered anything; 0 is never."),
		errors:      d("fairlead_api_errors_total", "Requests that were not answered as they should be, by what was wrong.", "reason"),
		lastError:   d("fairlead_api_last_error_timestamp_seconds", "When one was last not answered so; 0 is never."),
		failovers:   d("fairlead_api_failovers_total", "How often another API server was taken."),
		reloads:     d("fairlead_api_reloads_total", "New credentials and settings that were read, by what became of them.", "thing", "outcome"),
		lastReload:  d("fairlead_api_last_reload_timestamp_seconds", "When new ones were last used; at first the start. 0 is not there.", "thing"),
		waiting:     d("fairlead_api_credentials_waiting", "1 while what the files say now is not in use, since it can't be."),
		certificate: d("fairlead_api_certificate_not_after_timestamp_seconds", "When the certificate in use expires; of the server's chain, the first to do so.", "certificate"),
		token:       d("fairlead_api_token_not_after_timestamp_seconds", "When the token in use expires, if it says so."),
	}
}

// collect tells all kinds of trouble and all that can be read anew, also what never was: an alert on a rate needs the 0
// before the 1. A certificate or a token that is not there has no time.
func (d apiDescs) collect(ch chan<- prometheus.Metric, a *health.API) {
	gauge(ch, d.connected, bit(a.Connected))
	gauge(ch, d.ready, bit(a.NotReady == ""))
	gauge(ch, d.server, 1, strings.ToValidUTF8(a.Server, "?"))
	gauge(ch, d.heard, unix(a.Heard))
	for reason, n := range a.Errors {
		counter(ch, d.errors, n, reason)
	}
	gauge(ch, d.lastError, unix(a.LastErrorAt))
	counter(ch, d.failovers, a.Failovers)
	for thing, r := range a.Reloads {
		counter(ch, d.reloads, r.Used, thing, "used")
		counter(ch, d.reloads, r.Refused, thing, "refused")
		gauge(ch, d.lastReload, unix(r.Last), thing)
	}
	gauge(ch, d.waiting, bit(a.Waiting != ""))
	until := func(desc *prometheus.Desc, t time.Time, labels ...string) {
		if !t.IsZero() {
			gauge(ch, desc, unix(t), labels...)
		}
	}
	until(d.certificate, a.ClientNotAfter, "client")
	until(d.certificate, a.ServerNotAfter, "server")
	until(d.token, a.TokenNotAfter)
}
