package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// remarks has a line for each setting that is taken and changes nothing, so that nobody waits for it in vain. What is written
// out at its zero value, as kubeadm does with all fields, is none.
func remarks(c *Config, where map[string]string) []string {
	p := &c.Proxy
	var out []string
	for _, path := range slices.Sorted(maps.Keys(where)) {
		section, _, nested := strings.Cut(path, ".")
		switch {
		case section == "winkernel" && nested && p.Winkernel != (proxyv1alpha1.KubeProxyWinkernelConfiguration{}), path == "windowsRunAsService" && p.WindowsRunAsService:
			out = append(out, fmt.Sprintf("%s: %s is for Windows and has no effect", where[path], path))
		case path == "logging.options.json.infoBufferSize" && !p.Logging.Options.JSON.InfoBufferSize.IsZero():
			out = append(out, fmt.Sprintf("%s: %s has no effect: JSON is not buffered", where[path], path))
		case path == "portRange" && p.PortRange != "":
			out = append(out, fmt.Sprintf("%s: portRange has no effect (it belonged to kube-proxy's userspace mode)", where[path]))
		case path == "configSyncPeriod" && p.ConfigSyncPeriod.Duration != configSyncPeriod:
			out = append(out, fmt.Sprintf("%s: configSyncPeriod has no effect: everything is compared with the kernel each resyncPeriod", where[path]))
		case path == "showHiddenMetricsForVersion" && p.ShowHiddenMetricsForVersion != "":
			out = append(out, fmt.Sprintf("%s: showHiddenMetricsForVersion has no effect: no metric is hidden", where[path]))
		case path == "clusterCIDR" && p.ClusterCIDR != "" && c.Detect.Mode != DetectClusterCIDR:
			out = append(out, fmt.Sprintf("%s: clusterCIDR has no effect with detectLocalMode %s", where[path], c.Detect.Mode))
		}
	}
	if len(c.Own.APIServers) > 0 && c.Own.Manifests != "" {
		out = append(out, fmt.Sprintf("%s: apiServers has no effect with manifests: no API server is asked", where[ownPath+"apiServers"]))
	}
	if c.Own.StateDir != "" && c.Own.Manifests != "" {
		out = append(out, fmt.Sprintf("%s: stateDir has no effect with manifests: the files are there when the node boots", where[ownPath+"stateDir"]))
	}
	if v := p.IPVS; c.Mode != "ipvs" && (v.Scheduler != "" || len(v.ExcludeCIDRs) > 0 || v.StrictARP ||
		v.TCPTimeout.Duration+v.TCPFinTimeout.Duration+v.UDPTimeout.Duration+v.MinSyncPeriod.Duration != 0) {
		out = append(out, fmt.Sprintf("ipvs.* has no effect in mode %s", c.Mode))
	}
	if c.Detect.Mode == DetectClusterCIDR && len(c.Detect.CIDRs) == 0 {
		out = append(out, "clusterCIDR is not set: pods can't be told from other clients, so that ClusterIP traffic is never masqueraded and externalTrafficPolicy Local takes pods for outsiders")
	}
	return out
}
