// Package source says how truth reaches fairlead: a [Source] (the Kubernetes API, a directory of manifests, the node's own
// interfaces) tells a [Sink] what exists.
package source

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Sink takes what a source knows. Its methods may be called from any goroutine, never block for long, and keep the objects:
// the caller must not change one after handing it over. A nil object says that it is gone.
type Sink interface {
	Service(types.NamespacedName, *corev1.Service)
	Slice(types.NamespacedName, *discoveryv1.EndpointSlice)
	Node(name string, node *corev1.Node) // any node: this one, or a peer whose addresses must not be taken over
	ServiceCIDR(name string, cidr *networkingv1.ServiceCIDR)
	Addrs([]netip.Addr) // all addresses of this machine's interfaces
	// Presumed says that everything told so far is what was true when it was last known; the truth is still to come, and ends
	// with Synced: serve by it, but take nothing away for it. Most sources never say this.
	Presumed()
	Synced() // everything that existed at the start has been told
}

// Source tells a sink what exists, until ctx ends. It returns an error only when it can't ever work (a missing directory,
// a broken kubeconfig); what may pass, it reports in its log and tries again.
type Source interface {
	Run(ctx context.Context, to Sink) error
}
