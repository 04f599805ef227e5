package apiserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"rsc.io/script"
)

// agent is the program under test in a story.
type agent struct {
	flags   []string
	log     string
	command *exec.Cmd // nil while none should run
	ended   chan struct{}
}

func (p *play) agentCommand(args ...string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	if args[0] == "start" && p.agent == nil {
		p.agent = &agent{log: "/run/agent.log"}
	}
	if p.agent == nil {
		return "", errors.New("no agent was started")
	}
	switch args[0] {
	case "start":
		p.agent.flags = args[1:]
		return "", p.agent.start(p.state)
	case "again":
		return "", p.agent.start(p.state)
	case "restart":
		if err := p.agent.stop(); err != nil {
			return "", err
		}
		return "", p.agent.start(p.state)
	case "kill":
		return "", p.agent.kill()
	case "stop":
		return "", p.agent.stop()
	case "log":
		text, err := os.ReadFile(p.agent.log)
		if err == nil && matchAll(string(text), args[1:]) != nil {
			err = fmt.Errorf("the log of the agent does not match %q", args[1:])
		}
		return "", err
	}
	return "", script.ErrUsage
}

// start runs the agent with the story's environment, in its folder.
func (a *agent) start(state *script.State) error {
	if a.running() {
		return errors.New("the agent runs already")
	}
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	a.command = exec.Command(program, append([]string{"run",
		"--proxy-mode=" + storyMode,
		"--hostname-override=" + nodeName,
		"--cluster-cidr=" + podNet,
		"--conntrack-max-per-core=0", // as in startProgram
	}, a.flags...)...)
	a.command.Stdout, a.command.Stderr = log, log
	a.command.Dir, a.command.Env = state.Getwd(), state.Environ()
	if err := a.command.Start(); err != nil {
		return fmt.Errorf("start the agent (`make build` makes it, FAIRLEAD names another): %w", err)
	}
	a.ended = make(chan struct{})
	go func(c *exec.Cmd, ended chan struct{}) {
		c.Wait()
		close(ended)
	}(a.command, a.ended)
	return nil
}

func (a *agent) running() bool { return a != nil && a.command != nil }

// unexpected is an error when the agent has ended by itself.
func (a *agent) unexpected() error {
	if !a.running() {
		return nil
	}
	select {
	case <-a.ended:
		return fmt.Errorf("the agent has ended by itself: %v", a.command.ProcessState)
	default:
		return nil
	}
}

func (a *agent) stop() error {
	if !a.running() {
		return nil
	}
	if err := a.unexpected(); err != nil {
		return err
	}
	a.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-a.ended:
		a.command = nil
		return nil
	case <-time.After(toEnd):
		return errors.New("the agent ignores SIGTERM")
	}
}

func (a *agent) kill() error {
	if err := a.unexpected(); err != nil {
		return err
	}
	a.command.Process.Kill()
	<-a.ended
	a.command = nil
	return nil
}

// reboot leaves of the agent only what is on disk.
func (p *play) reboot(...string) (string, error) {
	if p.agent.running() {
		if err := p.agent.kill(); err != nil {
			return "", err
		}
	}
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		return "", fmt.Errorf("nft: %w: %s", err, out)
	}
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		return "", fmt.Errorf("forget flows: %w", err)
	}
	return "", firstError(os.RemoveAll("/run/fairlead"), runNft(turnAway))
}

// page asks for a page of the agent's health server.
func (p *play) page(path string) func(args ...string) (string, error) {
	return func(args ...string) (string, error) {
		if len(args) == 0 {
			return "", script.ErrUsage
		}
		code, err := strconv.Atoi(args[0])
		if err != nil {
			return "", fmt.Errorf("code: %w", err)
		}
		got, body, err := get(healthz + path)
		if err != nil {
			return "", err
		}
		if got != code {
			return "", fmt.Errorf("%s: want %d, got %d: %s", path, code, got, body)
		}
		return body + "\n", matchAll(body, args[1:])
	}
}

func (p *play) status(args ...string) (string, error) {
	out, err := exec.Command(program, "get", "status").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("fairlead get status: %w: %s", err, out)
	}
	return string(out), matchAll(string(out), args)
}

func (p *play) metric(args ...string) (string, error) {
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	want, err := value(args[2])
	if err != nil {
		return "", err
	}
	code, body, err := get(metrics + "/metrics")
	if err != nil || code != 200 {
		return "", fmt.Errorf("metrics: %d, %w", code, err)
	}
	got, err := sum(body, args[0])
	if err != nil {
		return "", err
	}
	holds, known := map[string]bool{"==": got == want, ">=": got >= want, "<=": got <= want, ">": got > want, "<": got < want}[args[1]]
	if !known {
		return "", script.ErrUsage
	}
	return fmt.Sprintf("%s is %g\n", args[0], got), wantf(holds, "%s is %g", args[0], got)
}

// value is a number, or a time as a number: now, now+72h, now-5s.
func value(text string) (float64, error) {
	offset, isTime := strings.CutPrefix(text, "now")
	if !isTime {
		return strconv.ParseFloat(text, 64)
	}
	var d time.Duration
	if offset != "" {
		var err error
		if d, err = time.ParseDuration(offset); err != nil {
			return 0, err
		}
	}
	return float64(time.Now().Add(d).Unix()), nil
}

var sample = regexp.MustCompile(`^([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)$`)

// sum adds up the samples of a metric that have all the labels named; it is an error when there are none.
func sum(page, wanted string) (total float64, err error) {
	name, labels, _ := strings.Cut(strings.TrimSuffix(wanted, "}"), "{")
	found := 0
next:
	for line := range strings.Lines(page) {
		m := sample.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil || m[1] != name {
			continue
		}
		for label := range strings.SplitSeq(labels, ",") {
			if label != "" && !strings.Contains(","+m[2]+",", ","+label+",") {
				continue next
			}
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", line, err)
		}
		total += v
		found++
	}
	return total, wantf(found > 0, "there is no %s", wanted)
}

// dark drops packets of addresses in both directions, in silence: half-open connections, and no new ones.
func (p *play) dark(args ...string) (string, error) {
	for _, address := range args {
		if err := runNft(fmt.Sprintf(`table ip dark-%[1]s {
			chain in {
				type filter hook input priority -400
				ip daddr %[2]s drop
				ip saddr %[2]s drop
			}
		}`, strings.ReplaceAll(address, ".", "-"), address)); err != nil {
			return "", err
		}
	}
	return "", wantf(len(args) > 0, "which address?")
}

func (p *play) light(args ...string) (string, error) {
	for _, address := range args {
		if err := runNft("delete table ip dark-" + strings.ReplaceAll(address, ".", "-")); err != nil {
			return "", err
		}
	}
	return "", wantf(len(args) > 0, "which address?")
}

// addAddresses gives the node those of the API that can go dark.
func addAddresses() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, a := range []string{"192.0.2.11/32", "192.0.2.12/32"} {
		address, err := netlink.ParseAddr(a)
		if err == nil {
			address.Scope = unix.RT_SCOPE_HOST // never a source of anything else
			err = netlink.AddrAdd(lo, address)
		}
		if err != nil {
			return fmt.Errorf("add %s: %w", a, err)
		}
	}
	return nil
}
