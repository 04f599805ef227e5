package config

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

//go:embed gates.txt
var gateList string

// The gates of kube-proxy that change what fairlead itself does.
const (
	AllowServiceExternalIPs = "AllowServiceExternalIPs"
	KubeProxyIPVS           = "KubeProxyIPVS"
	LocalhostNodePorts      = "KubeProxyNFTablesLocalhostNodePorts" // KEP-6032, alpha in 1.37; here on unless it is set to false
)

// honoured lists the gates that are obeyed: our own three, those of the log, and those of client-go (see [Gates.Client]).
// All others of gates.txt are known, so that one cluster-wide list can be given to every component, and have no effect.
var honoured = []string{
	AllowServiceExternalIPs, KubeProxyIPVS, LocalhostNodePorts, "AllAlpha", "AllBeta",
	"LoggingAlphaOptions", "LoggingBetaOptions", "ContextualLogging",
	"ClientsAllowCARotation", "ClientsAllowCBOR", "ClientsAllowTLSCacheGC", "ClientsPreferCBOR", "WatchListClient",
	"InOrderInformers", "InOrderInformersBatchProcess", "AtomicFIFO",
}

type gate struct {
	on, locked bool
	stage      string
}

// knownGates reads gates.txt.
var knownGates = sync.OnceValue(func() map[string]gate {
	known := map[string]gate{"AllAlpha": {stage: "ALPHA"}, "AllBeta": {stage: "BETA"}}
	for line := range strings.Lines(gateList) {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(f) < 3 {
			continue
		}
		known[f[0]] = gate{on: f[1] == "true", stage: f[2], locked: len(f) > 3}
	}
	return known
})

// Gates are the feature gates that were set.
type Gates map[string]bool

// Enabled tells whether a gate is on. One that kube-proxy does not know is off.
func (g Gates) Enabled(name string) bool {
	if on, ok := g[name]; ok {
		return on
	}
	k := knownGates()[name]
	switch {
	case k.stage == "ALPHA" && !k.locked && g["AllAlpha"]:
		return true
	case k.stage == "BETA" && !k.locked:
		if on, ok := g["AllBeta"]; ok {
			return on
		}
	}
	return k.on
}

// refused tells whether somebody has switched the gate off by its name.
func (g Gates) refused(name string) bool {
	on, ok := g[name]
	return ok && !on
}

// check finds gates that nobody knows, and locked ones that should change.
func (g Gates) check() []string {
	var bad []string
	for _, name := range slices.Sorted(maps.Keys(g)) {
		k, ok := knownGates()[name]
		switch {
		case !ok:
			bad = append(bad, "unrecognized feature gate: "+name)
		case k.locked && k.on != g[name]:
			bad = append(bad, fmt.Sprintf("cannot set feature gate %s to %v, feature is locked to %v", name, g[name], k.on))
		}
	}
	return bad
}

// notes has a line for each gate that was set and has no effect.
func (g Gates) notes() []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(g)) {
		if !slices.Contains(honoured, name) {
			out = append(out, fmt.Sprintf("feature gate %s is known, and has no effect in fairlead", name))
		}
	}
	return out
}

// logging is what the logging library asks.
func (g Gates) logging() featuregate.FeatureGate {
	fg := featuregate.NewFeatureGate()
	if err := logsapi.AddFeatureGates(fg); err != nil {
		panic(fmt.Sprintf("logging feature gates: %v", err)) // a fresh gate takes them: not an input
	}
	set := map[string]bool{}
	for name := range fg.GetAll() {
		if on, ok := g[string(name)]; ok {
			set[string(name)] = on
		}
	}
	if err := fg.SetFromMap(set); err != nil {
		panic(fmt.Sprintf("logging feature gates: %v", err)) // all of them are known and none is locked
	}
	return fg
}
