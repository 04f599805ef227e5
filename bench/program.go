package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// program is one of the two that are compared, with one back end.
type program struct {
	name, path    string
	mode, backend string
	services      int
	profile       string // folder, or empty
	manifests     bool   // the objects are in a file
	ready         string // what its health port answers 200 to when it has caught up, as far as it knows

	cmd   *exec.Cmd
	ended chan struct{}
	log   string
}

const (
	healthPort  = "http://127.0.0.1:10256"
	metricsPort = "http://127.0.0.1:10249"
)

func newProgram(o options, path, backend string) *program {
	p := &program{name: "kube-proxy", path: path, mode: o.mode, backend: backend,
		services: o.services, profile: o.profile, manifests: o.manifests, ready: "/healthz"}
	if path == o.fairlead {
		p.name, p.ready = "fairlead", "/readyz"
	}
	return p
}

func (p *program) String() string { return strings.TrimSpace(p.name + " " + p.mode + " " + p.backend) }

// start runs it as a node would, but for: no wait between two syncs, for both; nothing that belongs to the whole machine.
func (p *program) start() error {
	path, err := p.searchPath(true)
	if err != nil {
		return err
	}
	var args []string
	if p.name == "fairlead" {
		args = append(args, "run")
	}
	from := "--kubeconfig=" + proxyConfig
	if p.manifests {
		from = "--manifests=" + manifestFile
	}
	args = append(args, from, "--proxy-mode="+p.mode, "--hostname-override="+nodeName,
		"--cluster-cidr="+clusterCIDR, "--conntrack-max-per-core=0", "--iptables-min-sync-period=0s")
	if p.profile != "" {
		args = append(args, "--profiling")
	}
	log, err := os.OpenFile("/run/"+p.name+".log", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	p.log = log.Name()
	p.cmd = exec.Command(p.path, args...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // for kill
	p.cmd.Env = append(os.Environ(), "PATH="+path)
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { cmd.Wait(); close(ended) }(p.cmd, p.ended)
	return nil
}

// searchPath is the PATH that it is started with, or cleaned up with. In nftables mode ours runs without any program; its
// clean-up looks for what legacy iptables has as well.
func (p *program) searchPath(runs bool) (string, error) {
	if p.mode == "iptables" {
		bin, err := backendPath(p.backend)
		return bin + ":" + os.Getenv("PATH"), err
	}
	if runs && p.name == "fairlead" {
		return "/nonexistent", nil
	}
	return os.Getenv("PATH"), nil
}

// backendPath is a folder in which iptables, and all that belongs to it, is of one back end.
func backendPath(backend string) (string, error) {
	multi := map[string]string{"nf_tables": "xtables-nft-multi", "legacy": "xtables-legacy-multi"}[backend]
	real, err := exec.LookPath(multi)
	if err != nil {
		return "", fmt.Errorf("back end %s: %w", backend, err)
	}
	dir := "/run/" + backend
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"", "-save", "-restore"} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return "", err
			}
			if err := os.Symlink(real, filepath.Join(dir, family+tool)); err != nil && !errors.Is(err, os.ErrExist) {
				return "", err
			}
		}
	}
	return dir, nil
}

// alive is nil while it runs, and else says its last words.
func (p *program) alive() error {
	select {
	case <-p.ended:
		return fmt.Errorf("%s has ended: %v: %s", p.name, p.cmd.ProcessState, p.lastWords())
	default:
		return nil
	}
}

// lastWords are the end of its log.
func (p *program) lastWords() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-2000):])
}

// end sends a signal and waits; one that does not end in time is killed.
func (p *program) end(signal syscall.Signal) time.Duration {
	began := time.Now()
	if signal == syscall.SIGKILL {
		p.kill()
	} else {
		p.cmd.Process.Signal(signal)
	}
	select {
	case <-p.ended:
	case <-time.After(30 * time.Second):
		p.kill()
		<-p.ended
	}
	return time.Since(began)
}

// kill ends it with all it has started: an nft that is left would write rules into the next one's turn.
func (p *program) kill() { syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) }

// clean removes the rules with the program's own command, and then all that is left, so that the next one starts in a
// namespace like new.
func (p *program) clean(longest time.Duration) (took time.Duration, left int, err error) {
	path, err := p.searchPath(false)
	if err != nil {
		return 0, 0, err
	}
	args := []string{"--cleanup"}
	if p.name == "fairlead" {
		args = []string{"cleanup"}
	}
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.path, args...)
	cmd.Env = append(os.Environ(), "PATH="+path)
	began := time.Now()
	out, failed := cmd.CombinedOutput()
	took = time.Since(began)
	if failed != nil {
		say("%s: clean-up: %v: %.300s", p.name, failed, out)
	}
	return took, p.left(), flush()
}

// left counts the mentions of chains of iptables mode, or the lines of tables of nftables mode.
func (p *program) left() (n int) {
	if p.mode == "iptables" {
		for _, save := range []string{"iptables-save", "ip6tables-save"} {
			n += strings.Count(p.save(save), "KUBE-")
		}
		return n
	}
	out, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil {
		say("read the rules: nft: %v", err)
	}
	return strings.Count(string(out), "\n")
}

// flush empties the node's rules and its connection table. Legacy tables that are not loaded stay so: a look into one would load
// it, and every packet pass through it from then on.
func flush() error {
	var failed []error
	failed = append(failed, run("nft", "flush ruleset", "-f", "-"), run("conntrack", "", "-F"))
	for restore, names := range map[string]string{"iptables-legacy-restore": "ip_tables_names", "ip6tables-legacy-restore": "ip6_tables_names"} {
		loaded, _ := os.ReadFile(filepath.Join("/proc/thread-self/net", names))
		for _, table := range strings.Fields(string(loaded)) {
			failed = append(failed, run(restore, "*"+table+"\nCOMMIT\n"))
		}
	}
	return errors.Join(failed...)
}

// save is what iptables-save, or ip6tables-save, of the back end prints; empty when it can't be had.
func (p *program) save(name string, args ...string) string {
	if p.backend == "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join("/run", p.backend, name), args...).Output()
	if err != nil {
		say("read the rules: %s: %v", name, err)
		return ""
	}
	return string(out)
}

// says tells whether its health port answers 200.
func (p *program) says(path string) bool {
	client := http.Client{Timeout: time.Second}
	answer, err := client.Get(healthPort + path)
	if err != nil {
		return false
	}
	answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}
