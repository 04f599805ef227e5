// Package examples holds a small shop as Kubernetes YAML: what the demo serves, and what to begin with by hand.
package examples

import "embed"

// Files are the manifests.
//
//go:embed *.yaml
var Files embed.FS
