// Package resolve holds all meaning of Kubernetes: from Services, EndpointSlices, Nodes and the machine's own addresses it
// makes the tables of package model. It is pure: no clock, no goroutine, no logger, no network. The same objects give the
// same tables, in whatever order they were told.
//
// The table of policies, with something configured that tells a pod from others ([Config].Detect):
//
//	frontend                                  from a pod      from the node    from outside
//	ClusterIP, internal policy Cluster        cluster         cluster+snat     cluster+snat
//	ClusterIP, internal policy Local          local/drop      local+snat/drop  local+snat/drop
//	NodePort, external, LB; external Cluster  cluster+snat    cluster+snat     cluster+snat
//	NodePort, external, LB; external Local    cluster         cluster+snat     local/drop
//
// Without a detector nobody is hidden at a ClusterIP, and pods are treated as outside. MasqueradeAll hides everybody at
// ClusterIPs. "/drop" holds while the Service has an endpoint that could be used somewhere; with none, all is refused.
//
// # Which endpoints
//
// The cluster pool takes the ready endpoints that topology hints leave (same node, then same zone, each only if every ready
// endpoint has such hints and one fits), the local pool the ready endpoints of this node. Each falls back, on its own, to
// endpoints that terminate but still serve. Serving endpoints that are not chosen are draining.
//
// The annotation fairlead.io/topology-keys on a Service takes the place of hints: an ordered list of
// kubernetes.io/hostname, topology.kubernetes.io/zone and *; the first key that a ready endpoint fits wins. If none fits and
// the list has no *, the pool is empty and clients are refused. The list rules the fall-back to terminating endpoints too.
// A list without one known key is as good as none. Local policies ignore it.
//
// # Who gets an address
//
// An address and port that several Services ask for goes to a ClusterIP before all others, then to the older Service, then
// by name. External and load-balancer addresses are refused when they are loopback, link-local, multicast, broadcast or
// unspecified, when they are the ClusterIP of another Service, and (unless AllowNodeAddresses) when a Node object has them: an
// address that only an interface has may be a virtual one, which keepalived or kube-vip put there for the Service. The
// loser takes over as soon as the winner is gone. Each refusal is a [model.Notice].
//
// # What is read
//
// Objects are read when they are told, and not kept. They may be trimmed to what is read here. Of all: name, namespace.
// Service: uid, creationTimestamp, the label
// service.kubernetes.io/service-proxy-name, the annotation fairlead.io/topology-keys, spec, status.loadBalancer.
// EndpointSlice: creationTimestamp, resourceVersion, the label kubernetes.io/service-name, the annotation
// endpoints.kubernetes.io/last-change-trigger-time, addressType, ports, and of endpoints addresses, conditions, targetRef,
// nodeName, zone, hints. Node: the label topology.kubernetes.io/zone, spec.podCIDRs, status.addresses.
// ServiceCIDR: spec.cidrs.
package resolve
