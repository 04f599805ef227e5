package apiserver

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"rsc.io/script"
)

// at is where a Service is reached: its ClusterIPs.
func (m *made) at() []netip.AddrPort {
	return []netip.AddrPort{front(m.Service, 0), front(m.Service, 1)}
}

// answers tries a pod and the node, both families. With a limit it tries again until the Service is that old.
func (p *play) answers(args ...string) (string, error) {
	if len(args) != 2 && (len(args) != 6 || args[2] != "within" || args[4] != "of" || args[5] != "creation") {
		return "", script.ErrUsage
	}
	s := p.services[args[0]]
	if s == nil {
		return "", fmt.Errorf("the story has created no Service %s", args[0])
	}
	if len(args) == 2 {
		return "", s.answeredBy(strings.Split(args[1], ","))
	}
	limit, err := time.ParseDuration(args[3])
	if err != nil {
		return "", err
	}
	for {
		err := s.answeredBy(strings.Split(args[1], ","))
		age := time.Since(s.born)
		switch {
		case err == nil && age <= limit:
			return fmt.Sprintf("answered %.2f s after its creation\n", age.Seconds()), nil
		case age > limit:
			return "", fmt.Errorf("%.1f s after its creation: %w", age.Seconds(), cmpErr(err))
		}
		if err := errors.Join(p.agent.unexpected(), p.state.Context().Err()); err != nil {
			return "", err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("answered, but too late")
	}
	return err
}

func (m *made) answeredBy(pods []string) error {
	for _, to := range m.at() {
		for _, from := range []*host{podC, node} {
			got, err := from.ask(to)
			if err != nil {
				return err
			}
			if !slices.Contains(pods, got.pod) {
				return fmt.Errorf("%s to %s: answered by pod %s", from.name, to, got.pod)
			}
		}
	}
	return nil
}

func (p *play) gone(args ...string) (string, error) {
	if len(args) != 1 || p.services[args[0]] == nil {
		return "", script.ErrUsage
	}
	for _, to := range p.services[args[0]].at() {
		if err := unreachable(podC, to)(); err != nil {
			return "", err
		}
	}
	return "", nil
}

func (p *play) load(args ...string) (string, error) {
	switch {
	case len(args) == 2 && args[0] == "start" && p.services[args[1]] != nil:
		return "", p.loadStart(p.services[args[1]])
	case len(args) >= 1 && args[0] == "check" && p.loads != nil:
		return p.loadCheck(append(args[1:], "50")[0])
	case len(args) == 1 && args[0] == "stop" && p.loads != nil:
		out, err := p.loadCheck("1")
		p.loadEnd()
		p.longFlow.Close()
		p.loads = nil
		return out, err
	}
	return "", script.ErrUsage
}

// pace is between two connections of one load. Four stories of five loads each share two processors.
const pace = 25 * time.Millisecond

func (p *play) loadStart(s *made) error {
	port := uint16(s.Spec.Ports[0].NodePort)
	p.loads = []*load{
		{from: podC, to: s.at()[0]}, {from: podC, to: s.at()[1]},
		{from: node, to: s.at()[0]},
		{from: outer, to: netip.AddrPortFrom(node.v4, port)}, {from: outer, to: netip.AddrPortFrom(node.v6, port)},
	}
	for _, l := range p.loads {
		if _, err := l.from.ask(l.to); err != nil {
			return fmt.Errorf("%s to %s, before the load begins: %w", l.from.name, l.to, err)
		}
	}
	long, err := podC.dial(s.at()[0])
	if err == nil {
		_, err = readAnswer(long)
	}
	if err != nil {
		return fmt.Errorf("open the long flow: %w", err)
	}
	p.longFlow = long
	end := make(chan struct{})
	var running sync.WaitGroup
	for _, l := range p.loads {
		running.Go(func() {
			for tick := time.Tick(pace); ; <-tick {
				select {
				case <-end:
					return
				default:
					l.once()
				}
			}
		})
	}
	p.loadEnd = func() { close(end); running.Wait() }
	return nil
}

// loadCheck waits for so many more connections of each kind. None may have failed since the start, and the long flow lives.
func (p *play) loadCheck(least string) (string, error) {
	n, err := strconv.Atoi(least)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, l := range p.loads {
		before, _ := l.so()
		err := retry(30*time.Second, func() error {
			done, failed := l.so()
			if len(failed) > 0 {
				return nil
			}
			return wantf(done >= before+n, "%s to %s: %d of %d more connections", l.from.name, l.to, done-before, n)
		})
		if err != nil {
			return "", err
		}
		done, failed := l.so()
		fmt.Fprintln(&out, l.report())
		if len(failed) > 0 {
			return out.String(), fmt.Errorf("%d of %d connections failed, the first: %w", len(failed), done, failed[0])
		}
	}
	if err := echo(p.longFlow); err != nil {
		return out.String(), fmt.Errorf("the long flow: %w", err)
	}
	return out.String(), nil
}

func (l *load) so() (done int, failed []error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.done, slices.Clone(l.failed)
}

func (l *load) report() string {
	done, failed := l.so()
	return fmt.Sprintf("%s to %s: %d connections, %d failed", l.from.name, l.to, done, len(failed))
}
