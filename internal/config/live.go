package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/component-base/logs"
)

// live lists the fields that a running agent takes up when the file changes. A field that is neither here nor in idle
// needs a restart, and is named then, so that none can be forgotten.
var live = names(
	"mode", "clusterCIDR", "detectLocalMode", "detectLocal.bridgeInterface", "detectLocal.interfaceNamePrefix", "nodePortAddresses",
	"iptables.masqueradeBit", "iptables.masqueradeAll", "iptables.localhostNodePorts", "iptables.syncPeriod", "iptables.minSyncPeriod",
	"nftables.masqueradeBit", "nftables.masqueradeAll", "nftables.syncPeriod", "nftables.minSyncPeriod",
	"ipvs.syncPeriod", "ipvs.minSyncPeriod", "ipvs.scheduler", "ipvs.excludeCIDRs", "ipvs.strictARP", "ipvs.tcpTimeout",
	"ipvs.tcpFinTimeout", "ipvs.udpTimeout",
	"conntrack.maxPerCore", "conntrack.min", "conntrack.tcpEstablishedTimeout", "conntrack.tcpCloseWaitTimeout",
	"conntrack.tcpBeLiberal", "conntrack.udpTimeout", "conntrack.udpStreamTimeout", "oomScoreAdj", "logging.verbosity",
	ownPath+"resyncPeriod", ownPath+"allowNodeAddresses", ownPath+"staleAfter",
)

// idle lists the fields that have no effect.
var idle = names("showHiddenMetricsForVersion", "configSyncPeriod", "portRange", "windowsRunAsService", "winkernel.networkName",
	"winkernel.sourceVip", "winkernel.enableDSR", "winkernel.rootHnsEndpointName", "winkernel.forwardHealthCheckVip",
	ownPath+"kind", ownPath+"apiVersion")

// planes lists the fields that dataplanes are built from, beside the mode; those of a section, that of their mode.
var planes = names("iptables.masqueradeBit", "nftables.masqueradeBit", "conntrack.tcpBeLiberal",
	"ipvs.scheduler", "ipvs.excludeCIDRs", "ipvs.strictARP", "ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout")

// held are the fields of a Config that follow from what needs a restart; all others follow from what does not.
var held = names("Gates", "Node", "Master", "Healthz", "Metrics", "NoRelay")

func names(list ...string) map[string]bool {
	out := map[string]bool{}
	for _, n := range list {
		out[n] = true
	}
	return out
}

// Live gives the fields that a running agent takes up when the file changes, by their paths, sorted.
func Live() []string { return plain(slices.Sorted(maps.Keys(live))) }

// Update is what a running agent makes of a file that was read anew.
type Update struct {
	Config    *Config  // as far as it can be taken up
	Changed   []string // fields that are taken up, by their paths
	Restart   []string // fields that differ too, and need a restart
	Dataplane bool     // it must be built anew
}

// Update compares what an agent runs on with what was read anew.
func (c *Config) Update(next *Config) Update {
	now := *next
	u := Update{Config: &now, Dataplane: now.Mode != c.Mode}
	u.compare(reflect.ValueOf(c.Proxy), reflect.ValueOf(&now.Proxy).Elem(), "", "")
	u.compare(reflect.ValueOf(c.Own), reflect.ValueOf(&now.Own).Elem(), ownPath, "")
	from, to := reflect.ValueOf(c).Elem(), reflect.ValueOf(&now).Elem()
	for name := range held {
		to.FieldByName(name).Set(from.FieldByName(name))
	}
	u.Changed, u.Restart = plain(u.Changed), plain(u.Restart)
	return u
}

// compare goes through all fields; one that needs a restart keeps its old value.
func (u *Update) compare(old, now reflect.Value, document, path string) {
	if now.Kind() == reflect.Struct && !now.Addr().Type().Implements(marshaler) {
		for i := range now.NumField() {
			u.compare(old.Field(i), now.Field(i), document, fieldPath(path, now.Type().Field(i)))
		}
		return
	}
	name := document + path
	switch {
	case reflect.DeepEqual(old.Interface(), now.Interface()) || idle[name]:
	case live[name]:
		u.Changed = append(u.Changed, name)
		section, _, _ := strings.Cut(name, ".")
		u.Dataplane = u.Dataplane || planes[name] && (section == u.Config.section() || section == "conntrack")
	default:
		u.Restart = append(u.Restart, name)
		now.Set(old)
	}
}

var marshaler = reflect.TypeFor[json.Marshaler]()

// fieldPath adds a field's name, as the file has it; one that is inlined has none.
func fieldPath(path string, f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	switch {
	case name == "":
		return path
	case path == "":
		return name
	}
	return path + "." + name
}

// plain are paths as people write them.
func plain(paths []string) []string {
	for i, p := range paths {
		paths[i] = strings.TrimPrefix(p, ownPath)
	}
	return paths
}

// SetVerbosity makes the log of the whole program as wordy as the configuration says. All else of the log is settled when
// it is set up.
func (c *Config) SetVerbosity() error {
	if _, err := logs.GlogSetter(strconv.FormatUint(uint64(c.Proxy.Logging.Verbosity), 10)); err != nil {
		return fmt.Errorf("set the verbosity of the log: %w", err)
	}
	return nil
}
