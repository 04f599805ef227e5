package kube

import (
	"net"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/source"
)

// ownService is the Service through which pods reach the API server, and maybe we too: the one that we must make work
// before we can ask for it.
var ownService = types.NamespacedName{Namespace: corev1.NamespaceDefault, Name: "kubernetes"}

// Learning gives a sink that tells the link what passes by about the Service of the API itself: its addresses and its
// endpoints. So the link finds its way in when the Service does not work, and can be made to work only by what it brings.
func (s *Source) Learning(to source.Sink) source.Sink {
	if s.config.Link == nil {
		return to
	}
	return learning{to, s.config.Link.Learn}
}

type learning struct {
	source.Sink
	learn func(vips, endpoints []string)
}

// Service implements [source.Sink].
func (l learning) Service(key types.NamespacedName, v *corev1.Service) {
	if v != nil && key == ownService {
		var vips []string
		for _, ip := range v.Spec.ClusterIPs {
			for _, p := range v.Spec.Ports {
				vips = append(vips, net.JoinHostPort(ip, strconv.Itoa(int(p.Port))))
			}
		}
		l.learn(vips, nil)
	}
	l.Sink.Service(key, v)
}

// Slice implements [source.Sink].
func (l learning) Slice(key types.NamespacedName, v *discoveryv1.EndpointSlice) {
	if v != nil && key.Namespace == ownService.Namespace && v.Labels[discoveryv1.LabelServiceName] == ownService.Name {
		var endpoints []string
		for _, e := range v.Endpoints {
			for _, p := range v.Ports {
				if p.Port == nil || e.Conditions.Ready != nil && !*e.Conditions.Ready {
					continue
				}
				for _, ip := range e.Addresses {
					endpoints = append(endpoints, net.JoinHostPort(ip, strconv.Itoa(int(*p.Port))))
				}
			}
		}
		l.learn(nil, endpoints)
	}
	l.Sink.Slice(key, v)
}
