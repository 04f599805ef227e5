package story

import (
	"flag"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/lab"
	"fairlead/internal/model"
)

// line is what all commands that send have in common: [flags] FROM -> TO, and the words after it.
type line struct {
	v4, v6 bool // only this family
	n      int
	src    string
	sport  uint
	wait   time.Duration
	pause  time.Duration
	rate   int
	every  time.Duration
	count  int

	routes []route
	rest   []string
}

// route is one sender and one address, of one family.
type route struct {
	from *lab.Actor
	call lab.Call
	name string // as the story wrote it
}

// parseLine reads a line of a story. What comes before "->" may name several senders, what comes after it several targets.
func (st *stage) parseLine(args []string) (*line, error) {
	l := &line{}
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.BoolVar(&l.v4, "4", false, "")
	fs.BoolVar(&l.v6, "6", false, "")
	fs.IntVar(&l.n, "n", 0, "")
	fs.IntVar(&l.count, "count", 1, "")
	fs.IntVar(&l.rate, "rate", 200, "")
	fs.StringVar(&l.src, "src", "", "")
	fs.UintVar(&l.sport, "sport", 0, "")
	fs.DurationVar(&l.wait, "wait", 0, "")
	fs.DurationVar(&l.pause, "pause", 0, "")
	fs.DurationVar(&l.every, "every", 100*time.Millisecond, "")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	args = fs.Args()
	if len(args) < 3 || args[1] != "->" {
		return nil, fmt.Errorf("want FROM -> TO, have %q", args)
	}
	l.rest = args[3:]
	for _, from := range strings.Split(args[0], ",") {
		for _, to := range strings.Split(args[2], ",") {
			if err := st.addRoutes(l, from, to); err != nil {
				return nil, err
			}
		}
	}
	if len(l.routes) == 0 {
		return nil, fmt.Errorf("%s has no address that fits", args[2])
	}
	return l, nil
}

func (st *stage) addRoutes(l *line, from, to string) error {
	w, err := st.lab()
	if err != nil {
		return err
	}
	actor, err := w.Actor(from)
	if err != nil {
		return err
	}
	targets, proto, err := st.resolve(to)
	if err != nil {
		return err
	}
	for _, dst := range targets {
		v6 := dst.Addr().Is6()
		if l.v4 && v6 || l.v6 && !v6 {
			continue
		}
		src, ok, err := l.source(v6)
		if err != nil {
			return err
		}
		if !ok {
			continue
		}
		call := lab.Call{From: actor, Proto: proto, Src: src, Dst: dst, Wait: l.wait}
		l.routes = append(l.routes, route{actor, call, fmt.Sprintf("%s -> %s (%s/%s)", from, to, dst, proto)})
	}
	return nil
}

// source is where to send from, and whether that fits the family. A -src names one address, or two of both families.
func (l *line) source(v6 bool) (netip.AddrPort, bool, error) {
	if l.src == "" {
		return netip.AddrPortFrom(netip.Addr{}, uint16(l.sport)), true, nil
	}
	for _, s := range strings.Split(l.src, ",") {
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return netip.AddrPort{}, false, err
		}
		if addr.Is6() == v6 {
			return netip.AddrPortFrom(addr, uint16(l.sport)), true, nil
		}
	}
	return netip.AddrPort{}, false, nil
}

// resolve finds the addresses that a target stands for: "web:80", "web.lb:80/udp", "n1:30080", "[fd00:96::1]:80".
func (st *stage) resolve(target string) ([]netip.AddrPort, model.Proto, error) {
	proto := model.TCP
	if t, ok := strings.CutSuffix(target, "/udp"); ok {
		target, proto = t, model.UDP
	} else if t, ok := strings.CutSuffix(target, "/tcp"); ok {
		target = t
	}
	if ap, err := netip.ParseAddrPort(target); err == nil {
		return []netip.AddrPort{ap}, proto, nil
	}
	i := strings.LastIndexByte(target, ':')
	if i < 0 {
		return nil, 0, fmt.Errorf("target %q has no port", target)
	}
	port, err := strconv.ParseUint(target[i+1:], 10, 16)
	if err != nil {
		return nil, 0, fmt.Errorf("target %q: %w", target, err)
	}
	addrs, err := st.addrs(target[:i])
	var aps []netip.AddrPort
	for _, a := range addrs {
		aps = append(aps, netip.AddrPortFrom(a, uint16(port)))
	}
	return aps, proto, err
}

// addrs finds the addresses of a name: an actor's, or a Service's.
func (st *stage) addrs(name string) ([]netip.Addr, error) {
	if a, err := st.world.Actor(name); err == nil {
		return []netip.Addr{a.Addr(false), a.Addr(true)}, nil
	}
	base, kind, _ := strings.Cut(name, ".")
	s, ok := st.services[base]
	if !ok {
		return nil, fmt.Errorf("%q is neither an actor nor a Service of the story", name)
	}
	switch kind {
	case "":
		return s.clusterIPs(), nil
	case "lb":
		return s.ingress(), nil
	case "ext":
		return s.externalIPs(), nil
	}
	return nil, fmt.Errorf("%q: a Service has .lb and .ext addresses", name)
}
