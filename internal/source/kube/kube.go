// Package kube is the source that asks the Kubernetes API: it lists and watches Services, EndpointSlices, Nodes and,
// where it has them and lets us, ServiceCIDRs.
//
// One reflector a resource streams into a [mirror], which trims each object to what a Service proxy reads, and tells the
// sink what is new, what is different in something that matters, and what is gone. The mirror itself keeps no objects: a name
// and a fingerprint each. So the memory of a big cluster is whatever the sink makes of it.
//
// Instead of client-go's clientset the package uses its REST client and a scheme of the groups it needs.
package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"

	"fairlead/internal/source"
	"fairlead/internal/source/kube/link"
)

// What is asked for, as kube-proxy asks for it (k8s.io/kubernetes/cmd/kube-proxy/app/server.go).
const (
	serviceLabels = "!" + labelProxyName           // served by another proxy
	serviceFields = "spec.clusterIP!=None"         // headless
	sliceLabels   = "!" + corev1.IsHeadlessService // of a headless Service

	labelProxyName = "service.kubernetes.io/service-proxy-name" // KEP-2447
)

// Config says what to ask, and where.
type Config struct {
	Rest     *rest.Config // of Link, if there is none; a fixed connection, without a link, is for tests
	Link     *link.Link   // how requests reach the API; Run runs it
	OnlyNode string       // watch this Node alone; empty watches all of them
	Expect   func() bool  // whether Services were served here before the start: then a first list without any is doubted; nil: nobody knows
}

// Source watches the Kubernetes API. It implements [source.Source].
type Source struct {
	config   Config
	http     *http.Client
	core     rest.Interface
	discover rest.Interface
	network  rest.Interface
	events   rest.Interface
	watched  []*tracker // one a resource, in the order of Status
}

// New prepares the connection, without using it. An error says that it can't ever work: a missing certificate, say.
func New(c Config) (*Source, error) {
	if c.Link != nil {
		c.Rest = c.Link.Config()
	}
	if c.Rest == nil {
		return nil, errors.New("connect to the Kubernetes API: no connection is configured")
	}
	cfg := rest.CopyConfig(c.Rest)
	if cfg.UserAgent == "" {
		cfg.UserAgent = rest.DefaultKubernetesUserAgent()
	}
	if cfg.RateLimiter == nil && cfg.QPS >= 0 { // one for all groups; a REST client would make its own
		cfg.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(qpsOf(cfg))
	}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to the Kubernetes API: %w", oneLine(err))
	}
	s := &Source{config: c, http: client}
	codecs := serializer.NewCodecFactory(newScheme()).WithoutConversion()
	for gv, to := range map[schema.GroupVersion]*rest.Interface{
		corev1.SchemeGroupVersion: &s.core, discoveryv1.SchemeGroupVersion: &s.discover,
		networkingv1.SchemeGroupVersion: &s.network, eventsv1.SchemeGroupVersion: &s.events,
	} {
		group := rest.CopyConfig(cfg)
		group.GroupVersion, group.NegotiatedSerializer, group.APIPath = &gv, codecs, "/apis"
		if gv.Group == "" {
			group.APIPath = "/api"
		}
		if *to, err = rest.RESTClientForConfigAndClient(group, client); err != nil {
			return nil, fmt.Errorf("connect to the Kubernetes API: %w", oneLine(err))
		}
	}
	s.watched = []*tracker{newTracker("services"), newTracker("endpointslices"), newTracker("nodes"), newTracker("servicecidrs")}
	return s, nil
}

// newScheme knows the groups that are asked for and no other: all of them would cost megabytes.
func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	utilruntime.Must(corev1.AddToScheme(s))
	utilruntime.Must(discoveryv1.AddToScheme(s))
	utilruntime.Must(networkingv1.AddToScheme(s))
	utilruntime.Must(eventsv1.AddToScheme(s))
	return s
}

func qpsOf(c *rest.Config) (float32, int) {
	qps, burst := c.QPS, c.Burst
	if qps == 0 {
		qps = rest.DefaultQPS
	}
	if burst == 0 {
		burst = rest.DefaultBurst
	}
	return qps, burst
}

// Run tells to what the API says, until ctx ends. While the API is away nothing is told, and it is tried again with a
// back-off, for ever. Synced is told once, after the first list of each resource
// that there is.
func (s *Source) Run(ctx context.Context, to source.Sink) error {
	defer utilnet.CloseIdleConnectionsFor(s.http.Transport)
	var missing atomic.Int32
	missing.Store(int32(len(s.watched)))
	listed := func() {
		if missing.Add(-1) == 0 {
			to.Synced()
		}
	}
	trim := newTrimmer()
	services := newMirror(s.watched[0], listed, trim.service, to.Service)
	slices := newMirror(s.watched[1], listed, trim.slice, to.Slice)
	nodes := newMirror(s.watched[2], listed, trim.node, func(key types.NamespacedName, n *corev1.Node) { to.Node(key.Name, n) })
	cidrs := newMirror(s.watched[3], listed, trim.serviceCIDR, func(key types.NamespacedName, c *networkingv1.ServiceCIDR) { to.ServiceCIDR(key.Name, c) })

	services.expect, slices.bare = s.config.Expect, bare
	services.behind, slices.behind, nodes.behind, cidrs.behind = s.behind, s.behind, s.behind, s.behind

	var nodeFields string
	if s.config.OnlyNode != "" {
		nodeFields = fields.OneTermEqualSelector("metadata.name", s.config.OnlyNode).String()
	}
	back := newSignal()
	var running sync.WaitGroup
	if l := s.config.Link; l != nil {
		l.OnBack(func() { s.wake(back) })
		l.OnMoved(s.moved)
		running.Go(func() { l.Run(ctx) })
	}
	for _, r := range []*resource{
		{client: s.core, name: "services", labels: serviceLabels, fields: serviceFields, example: &corev1.Service{}, store: services, track: s.watched[0]},
		{client: s.discover, name: "endpointslices", labels: sliceLabels, example: &discoveryv1.EndpointSlice{}, store: slices, track: s.watched[1]},
		{client: s.core, name: "nodes", fields: nodeFields, example: &corev1.Node{}, store: nodes, track: s.watched[2]},
	} {
		r.back, r.behind = back, s.behind
		running.Go(func() { r.reflect(ctx) })
	}
	optional := &resource{client: s.network, name: "servicecidrs", example: &networkingv1.ServiceCIDR{}, store: cidrs, track: s.watched[3], back: back, behind: s.behind}
	running.Go(func() { optional.reflectIfServed(ctx, cidrs.none) })
	running.Wait()
	return nil
}

// wake has those try at once who wait to try again, with a fresh back-off: the API answers.
func (s *Source) wake(back *signal) {
	for _, t := range s.watched {
		t.ahead.Add(int64(backoffReset + time.Second))
	}
	back.give()
}

// moved has everything listed anew.
func (s *Source) moved() {
	for _, t := range s.watched {
		t.doubtful()
	}
}

// behind has the link try another API server, if there is one: this one knows less than we do.
func (s *Source) behind(why error) {
	if s.config.Link != nil {
		s.config.Link.Behind(why)
	}
}

// Link tells how the way to the API is.
func (s *Source) Link() link.Status {
	if s.config.Link == nil {
		return link.Status{}
	}
	return s.config.Link.Status()
}

// Status tells, of each resource that there is, how well it is known.
func (s *Source) Status() []Status {
	out := make([]Status, 0, len(s.watched))
	for _, t := range s.watched {
		if now, served := t.status(); served {
			out = append(out, now)
		}
	}
	return out
}
