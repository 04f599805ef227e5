package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Exec runs a program inside the actor's namespace and returns what it wrote to either stream.
func (a *Actor) Exec(ctx context.Context, stdin io.Reader, name string, args ...string) (string, error) {
	return a.exec(ctx, stdin, a.environ(), name, args...)
}

func (a *Actor) exec(ctx context.Context, stdin io.Reader, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, a.lookPath(name), args...)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &out
	cmd.Env = env
	err := a.Do(cmd.Run)
	if err != nil {
		err = fmt.Errorf("%s in %s: %w", name, a.Name, err)
	}
	return out.String(), err
}

// environ gives each namespace its own xtables lock: the default one is a file that all of them would share.
func (a *Actor) environ() []string {
	env := append(os.Environ(), "XTABLES_LOCKFILE="+a.lockFile())
	if bin := a.world.config.Bin; bin != "" {
		env = append(env, "PATH="+bin+":"+os.Getenv("PATH"))
	}
	return env
}

// lookPath finds a program as the actor would.
func (a *Actor) lookPath(name string) string {
	if bin := a.world.config.Bin; bin != "" && !strings.Contains(name, "/") {
		if path := filepath.Join(bin, name); exists(path) {
			return path
		}
	}
	return name
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// Process is a program that runs inside an actor's namespace.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of the exit; read after done
}

// Start starts a program inside the actor's namespace. It dies with the world and, should that not be closed, with this
// program. cmd.Env and its streams are the caller's to set.
func (a *Actor) Start(cmd *exec.Cmd) (*Process, error) {
	p := &Process{cmd: cmd, done: make(chan struct{})}
	if cmd.Env == nil {
		cmd.Env = a.environ()
	}
	// The kernel sends Pdeathsig when the thread that forked ends: the goroutine stays on it until the process is gone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	a.running.Go(func() {
		defer close(p.done)
		err := a.Do(func() error {
			err := cmd.Start()
			started <- err
			if err == nil {
				p.err = cmd.Wait()
			}
			return nil
		})
		if err != nil {
			started <- err
		}
	})
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", cmd.Path, a.Name, err)
	}
	context.AfterFunc(a.world.ctx, p.Kill)
	return p, nil
}

// Pid is the number of the process.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Kill ends the process at once (SIGKILL) and waits until it is gone.
func (p *Process) Kill() {
	p.cmd.Process.Signal(unix.SIGKILL) // an error says that it has ended already
	<-p.done
}

// Stop asks the process to end (SIGTERM) and returns how long that took. After patience it is killed, and that is an error.
func (p *Process) Stop(patience time.Duration) (time.Duration, error) {
	begin := time.Now()
	p.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-p.done:
		return time.Since(begin), p.err
	case <-time.After(patience):
		p.Kill()
		return time.Since(begin), errors.New("did not end on SIGTERM; killed")
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err is how the process ended, once it has.
func (p *Process) Err() error {
	select {
	case <-p.done:
		return p.err
	default:
		return nil
	}
}

// Log keeps the end of what a process writes. It is safe to read while the process runs.
type Log struct {
	mu  sync.Mutex
	buf []byte
}

// logKeep is how much of a log is kept, in bytes.
const logKeep = 256 << 10

// Write appends, and forgets the oldest lines.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, b...)
	if n := len(l.buf) - logKeep; n > 0 {
		l.buf = append([]byte(nil), l.buf[n:]...)
	}
	return len(b), nil
}

// String is what is kept.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf)
}
