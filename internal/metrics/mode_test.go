package metrics

import (
	"errors"
	"testing"
	"time"
)

// TestSetMode: what belongs to one mode comes and goes with it.
func TestSetMode(t *testing.T) {
	const restore = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"
	m := New(Config{Mode: "iptables", V4: true})
	d := delta()
	d.Full = true
	m.Failed(errors.New("busy"), d)
	if families(t, m)[restore] == nil {
		t.Errorf("no %s in iptables mode", restore)
	}
	m.SetMode("nftables")
	m.Failed(errors.New("busy"), d)
	m.Applied(d, time.Millisecond)
	if families(t, m)[restore] != nil || m.mode.String() != "nftables" {
		t.Errorf("%s in mode %s", restore, m.mode)
	}
	if f := families(t, m)["kubeproxy_sync_proxy_rules_nftables_sync_failures_total"]; f == nil || f.Metric[0].Counter.GetValue() != 1 {
		t.Errorf("a failure in nftables mode: %v", f)
	}
	m.SetMode("iptables")
	if f := families(t, m)[restore]; f == nil || f.Metric[0].Counter.GetValue() != 0 {
		t.Errorf("back in iptables mode: %v", f)
	}
}
