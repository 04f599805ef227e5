package metrics

import "sync/atomic"

// mode is the name of the dataplane that serves.
type mode struct{ name atomic.Pointer[string] }

func newMode(name string) *mode {
	m := new(mode)
	m.name.Store(&name)
	return m
}

func (m *mode) String() string { return *m.name.Load() }

func (m *mode) is(name string) bool { return m.String() == name }

// SetMode follows a switch: kube-proxy's metrics of one mode are there in that mode only.
func (m *Metrics) SetMode(name string) {
	m.mode.name.Store(&name)
	m.restoreFailed.Reset()
	m.partialFailed.Reset()
	m.nftablesFailed.Reset()
	for _, f := range m.families { // a counter that never counted is 0, not absent
		switch name {
		case "nftables":
			m.nftablesFailed.WithLabelValues(f)
			m.relayListening.WithLabelValues(f)
			m.relayFailed.WithLabelValues(f)
		case "iptables":
			m.restoreFailed.WithLabelValues(f)
			m.partialFailed.WithLabelValues(f)
		}
	}
}
