package apiserver

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// proxy is a running `fairlead run`.
type proxy struct {
	command *exec.Cmd
	log     string
	ended   chan struct{}
}

// running is the one proxy of the node; nil while there is none.
var running *proxy

// startProxy runs the program under test until the test ends; extra flags come last and so win.
func startProxy(t *testing.T, extra ...string) *proxy { return startProgram(t, program, extra...) }

func startProgram(t *testing.T, path string, extra ...string) *proxy {
	t.Helper()
	args := []string{
		"--kubeconfig=" + proxyConfig,
		"--proxy-mode=" + mode,
		"--hostname-override=" + nodeName,
		"--cluster-cidr=" + podNet,
		"--conntrack-max-per-core=0", // not ours to set: it belongs to the machine, not to a network namespace
	}
	if filepath.Base(path) != "kube-proxy" {
		args = append([]string{"run"}, args...)
	}
	log, err := os.CreateTemp(t.ArtifactDir(), "proxy-*.log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p := &proxy{command: exec.Command(path, append(args, extra...)...), log: log.Name(), ended: make(chan struct{})}
	p.command.Stdout, p.command.Stderr = log, log
	if err := p.command.Start(); err != nil {
		t.Fatalf("start the proxy (`make build` makes it, FAIRLEAD names another): %v", err)
	}
	running = p
	go func() {
		p.command.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() { p.stop(t) })
	return p
}

// stop ends the proxy as a kubelet does. One that has ended by itself, or does not end, fails the test.
func (p *proxy) stop(t *testing.T) {
	t.Helper()
	if running != p {
		return
	}
	running = nil
	if p.hasEnded() {
		t.Errorf("the proxy ended by itself: %v", p.command.ProcessState)
	} else {
		p.command.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(10 * time.Second):
			t.Error("the proxy ignores SIGTERM")
			p.command.Process.Kill()
			<-p.ended
		}
	}
	if t.Failed() {
		t.Logf("the proxy's last words:\n%s", lastLines(p.log, 40))
	}
}

// kill ends the proxy with no chance to say good-bye.
func (p *proxy) kill() {
	running = nil
	p.command.Process.Kill()
	<-p.ended
}

func (p *proxy) hasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func lastLines(path string, n int) []byte {
	text, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	lines := bytes.SplitAfter(text, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], nil)
}

// eventually asks again until the answer is right, or the proxy has ended. It is where these tests sleep.
func eventually(t *testing.T, what string, right func() error) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := right()
		if err == nil {
			return
		}
		if running != nil && running.hasEnded() {
			t.Fatalf("%s: the proxy has ended: %v", what, err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: still not after 20 s: %v", what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// always asks several times; the answer must be right each time.
func always(t *testing.T, what string, right func() error) {
	t.Helper()
	for i := range 10 {
		if err := right(); err != nil {
			t.Fatalf("%s: not at try %d: %v", what, i+1, err)
		}
	}
}

// wantf is nil if ok, and else the error it describes.
func wantf(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}
