package cli

import (
	"testing"

	"fairlead/internal/config"
)

// TestRelays: where NodePorts on localhost are by rules, by a relay, or not there; and who may do without a Node object.
func TestRelays(t *testing.T) {
	for _, tc := range []struct {
		mode                     string
		noRules, gateOff, files  bool
		rules, relay, standalone bool
	}{
		{mode: "iptables", rules: true},
		{mode: "iptables", noRules: true},
		{mode: "iptables", gateOff: true, rules: true},
		{mode: "nftables", relay: true},
		{mode: "nftables", noRules: true, relay: true},
		{mode: "nftables", gateOff: true},
		{mode: "nftables", files: true, relay: true, standalone: true},
		{mode: "ipvs"},
	} {
		c := &config.Config{Mode: tc.mode, LocalhostPort: !tc.noRules, NoRelay: tc.gateOff}
		if tc.files {
			c.Own.Manifests = "/m"
		}
		got := resolverConfig(c, families{v4: true, v6: true})
		if got.LocalhostNodePorts != tc.rules || got.LocalhostRelay != tc.relay || got.Standalone != tc.standalone {
			t.Errorf("%+v: %+v", tc, got)
		}
	}
}
