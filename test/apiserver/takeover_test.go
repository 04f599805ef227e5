//go:build peers

package apiserver

import (
	"net/netip"
	"testing"
)

func init() { binaries = append(binaries, "kube-proxy") }

// A node changes from kube-proxy to us and back, and nobody who connects meanwhile can tell.
func TestTakeOver(t *testing.T) {
	kubeProxy := binary("kube-proxy")
	p := startProgram(t, kubeProxy)
	s := createService(t, "taken", both, nodePort)
	setEndpoints(t, "taken", ipv4, podA, podB)
	setEndpoints(t, "taken", ipv6, podA, podB)
	marker := front(createService(t, "taken-marker"), 0)
	setEndpoints(t, "taken-marker", ipv4, podA)
	port := uint16(s.Spec.Ports[0].NodePort)
	loads := []*load{
		{from: podC, to: front(s, 0)},
		{from: podC, to: front(s, 1)},
		{from: outer, to: netip.AddrPortFrom(node.v4, port)},
		{from: outer, to: netip.AddrPortFrom(node.v6, port)},
	}
	for _, l := range loads {
		eventually(t, "the Service works", answers(l.from, l.to, podA, podB))
	}
	stop := startLoad(t, loads...)
	for _, next := range []struct {
		program string
		pod     *host
	}{{program, podB}, {kubeProxy, podA}} {
		p.stop(t)
		setEndpoints(t, "taken-marker", ipv4, next.pod)
		p = startProgram(t, next.program)
		eventually(t, "the next one has caught up", answers(podC, marker, next.pod))
		always(t, "and only it is heard", answers(podC, marker, next.pod))
		more(t, 50, loads...)
	}
	stop()
}
