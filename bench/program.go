package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// program is one of the two that are compared, with one back end.
type program struct {
	name, path    string
	mode, backend string
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
	p := &program{name: "kube-proxy", path: path, mode: o.mode, backend: backend, profile: o.profile, manifests: o.manifests, ready: "/healthz"}
	if path == o.fairlead {
		p.name, p.ready = "fairlead", "/readyz"
	}
	return p
}

// start runs it as a node would, but for: no wait between two syncs, for both; nothing that belongs to the whole machine.
func (p *program) start() error {
	bin, err := backendPath(p.backend)
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
	p.cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) { cmd.Wait(); close(ended) }(p.cmd, p.ended)
	return nil
}

// backendPath is a folder in which iptables, and all that belongs to it, is of one back end.
func backendPath(backend string) (string, error) {
	if backend == "" {
		return "/nonexistent", nil
	}
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
		text, _ := os.ReadFile(p.log)
		return fmt.Errorf("%s has ended: %v: %s", p.name, p.cmd.ProcessState, text[max(0, len(text)-2000):])
	default:
		return nil
	}
}

// end sends a signal and waits; one that does not end in time is killed.
func (p *program) end(signal syscall.Signal) time.Duration {
	began := time.Now()
	p.cmd.Process.Signal(signal)
	select {
	case <-p.ended:
	case <-time.After(30 * time.Second):
		p.cmd.Process.Kill()
		<-p.ended
	}
	return time.Since(began)
}

// clean removes the rules with the program's own command, and then all that is left, so that the next one starts in a
// namespace like new.
func (p *program) clean(longest time.Duration) (took time.Duration, left int, err error) {
	bin, err := backendPath(p.backend)
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
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	began := time.Now()
	out, failed := cmd.CombinedOutput()
	took = time.Since(began)
	if failed != nil {
		say("%s: clean-up: %v: %.300s", p.name, failed, out)
	}
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		left += strings.Count(p.save(save), "KUBE-")
	}
	return took, left, flush()
}

// flush empties the node's rules and its connection table.
func flush() error {
	var failed []error
	failed = append(failed, run("nft", "flush ruleset", "-f", "-"), run("conntrack", "", "-F"))
	for _, restore := range []string{"iptables-legacy-restore", "ip6tables-legacy-restore"} {
		for _, table := range []string{"nat", "filter", "mangle"} {
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

// cpu is the processor time of the program and of everything it has started.
func (p *program) cpu() time.Duration {
	type process struct {
		parent int
		ticks  int64
	}
	all := map[int]process{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(fields) < 15 {
			continue
		}
		x := process{}
		x.parent, _ = strconv.Atoi(fields[1])
		for _, f := range fields[11:15] { // utime, stime, and of ended children cutime, cstime: proc_pid_stat(5)
			n, _ := strconv.ParseInt(f, 10, 64)
			x.ticks += n
		}
		all[pid] = x
	}
	var sum int64
	for pid := range all {
		for at := pid; at > 1; at = all[at].parent {
			if at == p.cmd.Process.Pid {
				sum += all[pid].ticks
				break
			}
		}
	}
	const tick = 10 * time.Millisecond // USER_HZ
	return time.Duration(sum) * tick
}

// memory is resident memory in MiB: all of it, the part that is not of files, and the most it ever was.
func (p *program) memory() (rss, anon, peak float64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, 0, 0
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		for name, to := range map[string]*float64{"VmRSS:": &rss, "RssAnon:": &anon, "VmHWM:": &peak} {
			if len(fields) > 1 && fields[0] == name {
				kib, _ := strconv.ParseFloat(fields[1], 64)
				*to = kib / 1024
			}
		}
	}
	return rss, anon, peak
}

// takeProfile stores what /debug/pprof has; of a CPU profile the first seconds, asked for as soon as somebody listens.
func (p *program) takeProfile(what, file string) {
	for range 100 {
		answer, err := http.Get(metricsPort + "/debug/pprof/" + what)
		if err != nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		if err == nil && answer.StatusCode == http.StatusOK {
			err = os.WriteFile(filepath.Join(p.profile, p.name+"-"+p.backend+"-"+file), text, 0o644)
		}
		if err != nil || answer.StatusCode != http.StatusOK {
			say("profile %s: %s, %v", what, answer.Status, err)
		}
		return
	}
}
