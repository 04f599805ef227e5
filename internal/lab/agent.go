package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"golang.org/x/sys/unix"
)

// AgentConfig says how to run the program that the lab is there to try.
type AgentConfig struct {
	Binary    string // fairlead
	Mode      string // --proxy-mode
	Manifests string // a directory of Kubernetes YAML; agents of one world share it
	Args      []string
	Env       []string // beside the lab's own
}

// Agent is fairlead on a node. It can be started again after it ended.
type Agent struct {
	Node   *Actor
	Config AgentConfig
	Log    *Log
	proc   *Process
}

// NewAgent prepares an agent on a node; Start starts it.
func (w *World) NewAgent(node string, c AgentConfig) (*Agent, error) {
	n, err := w.Actor(node)
	if err != nil {
		return nil, err
	}
	return &Agent{Node: n, Config: c, Log: new(Log)}, nil
}

// Health is where an agent tells how it is, and Metrics where it shows its numbers (kube-proxy's defaults).
const (
	Health  = "http://127.0.0.1:10256"
	Metrics = "http://127.0.0.1:10249"
)

// startPatience is how long an agent may take until it is ready. It takes far less; a machine may be busy.
const startPatience = 20 * time.Second

// Args is the command line of the agent: what a node would be given, its own arguments last, so that they win.
func (a *Agent) args() []string {
	var cidrs []string
	for _, p := range ClusterCIDRs {
		cidrs = append(cidrs, p.String())
	}
	return append([]string{"run", "--manifests", a.Config.Manifests, "--hostname-override", a.Node.Name,
		"--proxy-mode", a.Config.Mode, "--control-socket", a.socket(), "--cluster-cidr", strings.Join(cidrs, ","),
		"--iptables-min-sync-period", "0s", "--ipvs-min-sync-period", "0s"}, a.Config.Args...)
}

// Start runs the agent and waits until it is ready.
func (a *Agent) Start(ctx context.Context) error {
	if err := a.Spawn(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		status, _, err := a.Node.Get(ctx, Health+"/readyz")
		if err == nil && status == http.StatusOK {
			return nil
		}
		select {
		case <-a.proc.Done():
			return fmt.Errorf("agent on %s ended: %v\n%s", a.Node.Name, a.proc.Err(), a.Log)
		case <-ctx.Done():
			a.Kill()
			return fmt.Errorf("agent on %s did not get ready: last answer %d, %v\n%s", a.Node.Name, status, err, a.Log)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Spawn runs the agent and does not wait.
func (a *Agent) Spawn() (err error) {
	if a.Running() {
		return fmt.Errorf("the agent on %s is running", a.Node.Name)
	}
	cmd := exec.Command(a.Config.Binary, a.args()...)
	cmd.Stdout, cmd.Stderr = a.Log, a.Log
	cmd.Env = append(a.Node.agentEnviron(a.Config.Mode), kernel.FaultFile+"="+a.FaultFile())
	cmd.Env = append(cmd.Env, a.Config.Env...)
	a.proc, err = a.Node.Start(cmd)
	return err
}

// Running tells whether the agent runs.
func (a *Agent) Running() bool {
	if a.proc == nil {
		return false
	}
	select {
	case <-a.proc.Done():
		return false
	default:
		return true
	}
}

// Pid is the process number of the agent, once it was started.
func (a *Agent) Pid() int { return a.proc.Pid() }

// Kill is kill -9.
func (a *Agent) Kill() {
	if a.proc != nil {
		a.proc.Kill()
	}
}

// Freeze makes the agent stand still (SIGSTOP), and Thaw lets it go on.
func (a *Agent) Freeze() error { return a.signal(unix.SIGSTOP) }

// Thaw ends Freeze.
func (a *Agent) Thaw() error { return a.signal(unix.SIGCONT) }

func (a *Agent) signal(s unix.Signal) error {
	if !a.Running() {
		return fmt.Errorf("the agent on %s is not running", a.Node.Name)
	}
	return unix.Kill(a.Pid(), s)
}

// Stop is SIGTERM; it returns how long the agent took to end.
func (a *Agent) Stop(patience time.Duration) (time.Duration, error) {
	if a.proc == nil {
		return 0, fmt.Errorf("no agent was started on %s", a.Node.Name)
	}
	return a.proc.Stop(patience)
}

// socket is where the agent answers get and explain: all nodes share one file system, so each has its own.
func (a *Agent) socket() string { return filepath.Join(a.Node.world.dir, a.Node.Name+".sock") }

// Ask runs a command that asks the running agent, such as "get frontends".
func (a *Agent) Ask(ctx context.Context, args ...string) (string, error) {
	return a.Run(ctx, append(args, "--control-socket", a.socket())...)
}

// FaultFile is the switch that makes the agent's next write into the kernel fail: see [kernel.TryFault].
func (a *Agent) FaultFile() string { return filepath.Join(a.Node.world.dir, a.Node.Name+".fault") }

// failPeriod is the time in which the switch of FailOften is turned on and off once.
const failPeriod = 100 * time.Millisecond

// FailOften has the switch on for that share of the time, until the end of the world. Half of the writes fail when they have taken effect.
func (a *Agent) FailOften(share float64) {
	ctx := a.Node.world.ctx
	on := time.Duration(share * float64(failPeriod))
	a.Node.running.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			_ = os.WriteFile(a.FaultFile(), []byte([]string{"before", "after"}[i%2]), 0o600) // the directory goes at the end of the world
			sleep(ctx, on)
			_ = os.Remove(a.FaultFile())
			sleep(ctx, failPeriod-on)
		}
	})
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Run runs another command of the agent's program on its node.
func (a *Agent) Run(ctx context.Context, args ...string) (string, error) {
	return a.Node.Fairlead(ctx, a.Config.Mode, a.Config.Binary, args...)
}

// Fairlead runs a command of the program in the actor's namespace, in the environment in which an agent of that mode runs.
func (a *Actor) Fairlead(ctx context.Context, mode, binary string, args ...string) (string, error) {
	return a.exec(ctx, nil, a.agentEnviron(mode), binary, args...)
}

// agentEnviron is the environment of agents of a mode. That of nftables speaks to the kernel by itself: it finds no program in its
// PATH, neither nft nor iptables, always.
func (a *Actor) agentEnviron(mode string) []string {
	env := a.environ()
	if mode == "nftables" {
		env = append(env, "PATH="+filepath.Join(a.world.dir, "no-programs")) // which is not there
	}
	return env
}

// Get asks an HTTP server from inside the actor's namespace.
func (a *Actor) Get(ctx context.Context, url string) (status int, body string, err error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
		dst, err := netip.ParseAddrPort(addr)
		if err != nil {
			return nil, err
		}
		conn, answer := Call{From: a, Proto: model.TCP, Dst: dst}.open(time.Now())
		if conn == nil {
			return nil, errors.New(answer.String())
		}
		return conn, nil
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// The barrier: a Service that exists to be seen. Its port changes each time, its backend is the client outside.
var barrierVIPs = [2]netip.Addr{netip.MustParseAddr("10.96.255.254"), netip.MustParseAddr("fd00:96::fffe")}

const barrierPort = 9 // of the server that is its backend (RFC 863's, which nobody uses)

const barrierManifest = `# Written by the lab: when these addresses answer, everything written before is in force.
apiVersion: v1
kind: Service
metadata: {name: barrier, namespace: fairlead-lab}
spec:
  clusterIP: %[1]s
  clusterIPs: [%[1]s, "%[2]s"]
  ipFamilies: [IPv4, IPv6]
  ports: [{port: %[3]d, targetPort: %[4]d}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: barrier-v4, namespace: fairlead-lab, labels: {kubernetes.io/service-name: barrier}}
addressType: IPv4
endpoints: [{addresses: [%[5]s], conditions: {ready: true}}]
ports: [{name: "", port: %[4]d, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: barrier-v6, namespace: fairlead-lab, labels: {kubernetes.io/service-name: barrier}}
addressType: IPv6
endpoints: [{addresses: ["%[6]s"], conditions: {ready: true}}]
ports: [{name: "", port: %[4]d, protocol: TCP}]
`

// Settle waits until the agents have taken in everything that was written to the directory of manifests before. It does
// so as a client would: with a Service of its own, and packets. It does it twice: a reader that had already listed the
// directory may open the first barrier after all, beside files that it takes for unchanged. It can't be so with the second
// one, which is written when that reader has done.
func (w *World) Settle(ctx context.Context, manifests string, agents ...*Agent) error {
	for range 2 {
		if err := w.barrier(ctx, manifests, agents); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) barrier(ctx context.Context, manifests string, agents []*Agent) error {
	port, err := w.nextBarrier()
	if err != nil {
		return fmt.Errorf("barrier: %w", err)
	}
	ext := w.Must("ext")
	text := fmt.Sprintf(barrierManifest, barrierVIPs[0], barrierVIPs[1], port, barrierPort, ext.v4, ext.v6)
	// The name sorts first: who reads the directory from its beginning and finds the barrier finds all that was written
	// before it, too.
	if err := WriteManifest(manifests, "00-barrier.yaml", []byte(text)); err != nil {
		return fmt.Errorf("barrier: %w", err)
	}
	for _, a := range agents {
		for _, vip := range barrierVIPs {
			if ok, err := a.Node.Owns(a.Node.Addr(vip.Is6())); err != nil || !ok {
				continue // a node without IPv6
			}
			if err := a.waitFor(ctx, netip.AddrPortFrom(vip, port)); err != nil {
				return err
			}
		}
	}
	return nil
}

// nextBarrier is a port that no barrier had before. The first one opens the server behind them.
func (w *World) nextBarrier() (uint16, error) {
	w.mu.Lock()
	w.seq++
	seq := w.seq
	w.mu.Unlock()
	if seq == 1 {
		ext := w.Must("ext")
		for _, v6 := range []bool{false, true} {
			if _, err := ext.Serve("tcp", netip.AddrPortFrom(ext.Addr(v6), barrierPort)); err != nil {
				return 0, err
			}
		}
	}
	return uint16(1000 + seq%60000), nil
}

func (a *Agent) waitFor(ctx context.Context, barrier netip.AddrPort) error {
	for {
		answer := Call{From: a.Node, Proto: model.TCP, Dst: barrier, Wait: 100 * time.Millisecond}.Do()
		if answer.Outcome == Answered {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent on %s has not taken in the manifests: the barrier %s: %s\n%s", a.Node.Name, barrier, answer, a.Log)
		case <-a.proc.Done():
			return fmt.Errorf("the agent on %s ended: %v\n%s", a.Node.Name, a.proc.Err(), a.Log)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// WriteManifest puts a file into the directory in one step, as careful tools do: no reader sees half of it.
func WriteManifest(dir, name string, data []byte) error {
	tmp := filepath.Join(dir, "."+name+".tmp")
	if err := os.WriteFile(tmp, data, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(dir, name))
}
