// Package config turns what a person wrote (kube-proxy's flags, kube-proxy's configuration file and our own document in the
// same file) into one [Config], or says in one line each, with file and line, what is wrong with it.
//
// The file may hold two YAML documents: a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1), as kube-proxy reads it,
// and a FairleadConfiguration (fairlead.io/v1alpha1) with the settings that only fairlead has. kube-proxy reads the first
// document only, so one file can serve both.
//
// Differences to kube-proxy, all of them where it has a trap:
//   - minSyncPeriod is 0 by default: a change is cheap here, so there is no need to wait. A flood of changes is slowed down
//     by what its rounds cost.
//   - an empty --healthz-bind-address or --metrics-bind-address (or port flag 0) disables that listener; in a file, where
//     kubeadm writes every field with its empty value, disableHealthz and disableMetrics of our own document do.
//   - beside --config, a flag counts where the file says nothing; each is answered with a line in the log.
package config
