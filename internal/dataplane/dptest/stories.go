package dptest

import (
	"net/netip"
	"time"

	"fairlead/internal/model"
)

// story is a sequence of moments; at each, every packet of interest is sent.
type story struct {
	name, says string
	steps      func(f family) []step
}

var stories = []story{
	{"cluster-ip", "a ClusterIP spreads over its endpoints, follows their changes, refuses while there are none, and its other ports", func(f family) []step {
		web := f.service("web").clusterIP(1)
		return []step{now(web), now(web.local(10)), now(web.local(10, 11).remote(10, 11, 12)), now(web.remote(12)), now(web), now()}
	}},
	{"protocols", "TCP, UDP and SCTP on one number go their own ways", func(f family) []step {
		tcp := f.service("tcp").everywhere(1).local(10)
		udp := f.service("udp").everywhere(1).over(model.UDP).local(11)
		sctp := f.service("sctp").everywhere(1).over(model.SCTP).remote(12)
		return []step{now(tcp, udp, sctp), now(tcp, sctp), now(sctp, udp.remote(13)), now(udp)}
	}},
	{"ports", "ports of one Service have their own endpoints, and go one by one", func(f family) []step {
		http := f.service("web").clusterIP(1).local(10, 11)
		https := f.service("web").at(front{model.ClusterIP, f.clusterIP(1), 443, nil}).remote(10)
		https.port = "tls"
		nameless := f.service("web").at(front{model.ClusterIP, f.clusterIP(1), 8080, nil}).local(12)
		nameless.port = ""
		return []step{now(http, https, nameless), now(https), now(http)}
	}},
	{"all-kinds", "each kind of frontend, policy Cluster: outside addresses hide the client", func(f family) []step {
		s := f.service("web").everywhere(1)
		return []step{now(s.local(10).remote(10, 11)), now(s), now(s.remote(11))}
	}},
	{"external-local", "externalTrafficPolicy Local: outside clients keep their address and meet this node's endpoints; pods and the node take the short way", func(f family) []step {
		s := f.service("web").everywhere(1).externally(true)
		return []step{now(s.local(10).remote(10)), now(s.remote(10)), now(s.local(10)), now(s), now(s.local(10, 11).draining(12))}
	}},
	{"internal-local", "internalTrafficPolicy Local: this node's endpoints, or silence", func(f family) []step {
		s := f.service("web").everywhere(1).internally(true)
		return []step{now(s.local(10).remote(10)), now(s.remote(10)), now(s.local(10, 11)), now(s)}
	}},
	{"policy-changes", "policies change under traffic", func(f family) []step {
		s := f.service("web").everywhere(1).local(10).remote(11)
		return []step{now(s), now(s.externally(true)), now(s.internally(true)), now(s.externally(true).internally(true)), now(s)}
	}},
	{"no-detector", "nothing tells a pod from others", func(f family) []step {
		n := Node()
		s := f.service("web").everywhere(1).local(10).remote(10)
		return []step{on(n, s), on(n, s.externally(true)), on(n, s.internally(true)), on(n, s.externally(true).internally(true).local()),
			on(n, s.local().remote()), on(podRanges(n), s)}
	}},
	{"pod-interfaces", "pods are known by the interface they come in by", func(f family) []step {
		n := podInterfaces(Node())
		s := f.service("web").everywhere(1).local(10).remote(10)
		return []step{on(n, s), on(n, s.externally(true)), on(n, s.internally(true)), on(podRanges(Node()), s)}
	}},
	{"masquerade-all", "everybody is hidden, pods too", func(f family) []step {
		s := f.service("web").everywhere(1).local(10).remote(10)
		all := func(n model.Node, s service) step {
			st := on(n, s)
			st.masqueradeAll = true
			return st
		}
		return []step{all(podRanges(Node()), s), all(podRanges(Node()), s.internally(true).externally(true)), all(podRanges(Node()), s.internally(true).local()),
			all(Node(), s), now(s)}
	}},
	{"node-port-addresses", "NodePorts answer on the node's addresses, or on some of them, and nowhere else", func(f family) []step {
		s := f.service("web").nodePort(30001).local(10).remote(10)
		udp := f.service("dns").over(model.UDP).nodePort(30053).local(11)
		n := podRanges(Node())
		return []step{on(n, s, udp), on(oneNodePortAddress(n), s, udp), on(oneNodePortAddress(n), s, udp.local()), on(n, udp.local())}
	}},
	{"localhost", "NodePorts answer the node on 127.0.0.0/8 when that is asked for, and nobody else there", func(f family) []step {
		s := f.service("web").nodePort(30001).local(10).remote(10)
		udp, sctp := f.service("dns").over(model.UDP).nodePort(30053).local(11), f.service("sctp").over(model.SCTP).nodePort(30001).remote(12)
		n := podRanges(Node())
		return []step{on(n, s), on(localhostPorts(n), s, udp), on(localhostPorts(n), s.externally(true), udp.local(), sctp),
			on(localhostPorts(n), s.local().remote(), sctp), on(localhostPorts(n), s.sticky(time.Hour)), on(n, s)}
	}},
	{"node-changes", "the node gets and loses addresses", func(f family) []step {
		s := f.service("web").everywhere(1).local(10).remote(10)
		few := podRanges(Node())
		few.Addrs = []netip.Addr{families[0].loopback(), families[0].node(1), families[1].loopback(), families[1].node(1)}
		return []step{on(few, s), now(s), on(few, s.externally(true))}
	}},
	{"source-ranges", "who is not allowed meets silence, pods and the node too; ranges change, to nobody and back to everybody", func(f family) []step {
		s := f.service("web").clusterIP(1).nodePort(30001).local(10).remote(10)
		inside := []netip.Prefix{f.pods(), f.nodes()}
		nobody := s.at(front{model.LoadBalancer, f.vip(1), 80, []netip.Prefix{}})
		return []step{now(s.balancer(1, f.clients()).balancer(2, f.clients())), now(s.balancer(1, inside...).balancer(2, f.nodes())),
			now(s.balancer(1, f.clients()).balancer(2)), now(nobody), now(s.balancer(1, f.clients()).externally(true)),
			now(s.balancer(1, f.clients()).local().remote()), now(s.balancer(1, inside...).local().remote()), now(s.balancer(1))}
	}},
	{"address-before-node-port", "a frontend at an address of the node comes before a NodePort of the same number", func(f family) []step {
		np := f.service("node-port").nodePort(30001).local(10)
		ext := f.service("external").externalIP(f.node(1), 30001).remote(11)
		return []step{now(np, ext), now(np), now(ext), now(np, ext.remote())}
	}},
	{"moves", "an address and port goes from one Service to another, and back", func(f family) []step {
		a := f.service("a").clusterIP(1).nodePort(30001).local(10)
		b := f.service("b").clusterIP(1).nodePort(30001).remote(11)
		return []step{now(a), now(b), now(a), now(b.externally(true)), now(a, b), now(b, a)}
	}},
	{"hairpin", "a pod that reaches itself through its Service is hidden, one that reaches another is not", func(f family) []step {
		s := f.service("web").everywhere(1)
		return []step{now(s.local(10)), now(s.local(10, 11)), now(s.local(10, 11).externally(true)), now(s.local(10).internally(true))}
	}},
	{"draining", "an endpoint that terminates gets no new flows while others are ready", func(f family) []step {
		s := f.service("web").everywhere(1)
		return []step{now(s.local(10, 11)), now(s.local(10).draining(11)), now(s.remote(12).draining(10, 11)), now(s.draining(10)), now(s.remote(12))}
	}},
	{"sticky", "a client stays with its endpoint, through changes of others; when it goes, the client moves", func(f family) []step {
		s := f.service("web").everywhere(1).sticky(3 * time.Hour)
		return []step{now(s.local(10, 11).remote(10)), now(s.local(10, 11, 12).remote(10, 11)), now(s.local(10, 11).remote(10), f.service("other").clusterIP(2).local(11)),
			now(s.local(12)), now(s.local(10, 11, 12)), now(s.local(10, 11, 12).sticky(0)), now(s.local(10, 11, 12).sticky(time.Hour).externally(true)),
			now(f.service("web").clusterIP(1).internally(true).sticky(time.Hour).local(10, 11).remote(10)),
			now(f.service("web").clusterIP(1).internally(true).sticky(time.Hour).local(10, 11, 12))}
	}},
	{"unassigned", "an address kept for ClusterIPs that no Service has leads nowhere; those of Services and of the node do as ever", func(f family) []step {
		n := podRanges(Node())
		s := f.service("web").everywhere(1).local(10).remote(10)
		inside := f.service("inside").externalIP(f.clusterIP(9), 80).remote(10)
		return []step{on(n, s), on(serviceCIDRs(n), s, inside), on(serviceCIDRs(n)), on(serviceCIDRs(n), s.local().remote(), inside.remote()),
			on(serviceCIDRs(Node()), s.externally(true).internally(true)), on(serviceCIDRs(n), many(f, 90)...), on(n, s)}
	}},
	{"health-port", "health-check node ports come, change and go", func(f family) []step {
		s := f.service("web").balancer(1).externally(true).local(10)
		return []step{now(s.healthPort(31000)), now(s.healthPort(31001)), now(s), now(s.healthPort(31000)), now()}
	}},
	{"both-families", "one Service in two families: each has its own endpoints, and goes alone", func(f family) []step {
		other := family{!f.v6}
		a, b := f.service("web").everywhere(1).local(10), other.service("web").everywhere(1).local(11).remote(11)
		return []step{now(a, b), now(a, b.local().remote()), now(a), now(b), now(b, a.externally(true))}
	}},
	{"many", "enough Services that any structure for many is used, and shrinks again", func(f family) []step {
		return []step{now(many(f, 3)...), now(many(f, 90)...), now(many(f, 91)...), now(many(f, 5)...), now()}
	}},
}

func many(f family, n int) []service {
	var out []service
	for i := range n {
		s := f.service("many-" + string(rune('a'+i%26)) + string(rune('a'+i/26))).clusterIP(10 + i).nodePort(uint16(31000 + i))
		if i%7 != 0 {
			s = s.local(10 + i%3)
		}
		out = append(out, s)
	}
	return out
}

// play plays a story once with a steady instance, and once more with a restart between all steps, and nothing but the last
// step told in full.
func play(s Subject, steps []step, seed uint64) error {
	for _, restarts := range []bool{false, true} {
		h, err := begin(s, seed)
		if err != nil {
			return err
		}
		for i, st := range steps {
			if err := h.step(st, restarts && i > 0); err != nil {
				return stepError(i, restarts, err)
			}
		}
		if err := h.end(); err != nil {
			return err
		}
	}
	return nil
}
