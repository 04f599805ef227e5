package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// Command is a program to run, without a shell. It runs in the network namespace of the calling thread.
type Command struct {
	Name   string   // looked up in PATH
	Args   []string // passed as they are
	Stdin  func(io.Writer) error
	Stdout func(io.Reader) error // what it leaves unread is thrown away; its error ends the program
}

// ExitError says that a program ran and failed.
type ExitError struct {
	Name   string
	Code   int    // exit status, or -1 when a signal ended it
	Stderr string // its own words, at most a few lines
}

func (e *ExitError) Error() string {
	if e.Stderr == "" {
		return fmt.Sprintf("%s: exit status %d", e.Name, e.Code)
	}
	return fmt.Sprintf("%s: exit status %d: %s", e.Name, e.Code, e.Stderr)
}

// Run runs the program to its end. The error is an [ExitError], one of finding or starting it, or of Stdin or Stdout.
func (c Command) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.Name, c.Args...)
	cmd.WaitDelay = 5 * time.Second // for what the program started and left behind
	var words complaint
	cmd.Stderr = &words
	var in io.WriteCloser
	var out io.ReadCloser
	var err error
	if c.Stdin != nil {
		if in, err = cmd.StdinPipe(); err != nil {
			return fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	if c.Stdout != nil {
		if out, err = cmd.StdoutPipe(); err != nil {
			return fmt.Errorf("%s: %w", c.Name, err)
		}
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", c.Name, err)
	}
	fed := make(chan error, 1)
	go func() { fed <- feed(in, c.Stdin) }()
	var took error
	if out != nil {
		if took = c.Stdout(out); took != nil {
			cancel()
		} else {
			_, _ = io.Copy(io.Discard, out)
		}
	}
	fedErr := <-fed
	return c.outcome(cmd.Wait(), fedErr, took, words.String())
}

func feed(in io.WriteCloser, write func(io.Writer) error) error {
	if in == nil {
		return nil
	}
	return errors.Join(write(in), in.Close())
}

// outcome says what went wrong first: a program that failed has closed its input early, and one that we ended has failed.
func (c Command) outcome(exit, fed, took error, words string) error {
	var status *exec.ExitError
	switch {
	case took != nil:
		return fmt.Errorf("output of %s: %w", c.Name, took)
	case errors.As(exit, &status):
		return &ExitError{Name: c.Name, Code: status.ExitCode(), Stderr: words}
	case exit != nil:
		return fmt.Errorf("%s: %w", c.Name, exit)
	case fed != nil:
		return fmt.Errorf("input of %s: %w", c.Name, fed)
	}
	return nil
}

// complaint keeps the beginning of what a program complains, on one line.
type complaint struct{ buf bytes.Buffer }

const wordsMost = 1000

func (t *complaint) Write(p []byte) (int, error) {
	t.buf.Write(p[:min(len(p), wordsMost-min(wordsMost, t.buf.Len()))])
	return len(p), nil
}

func (t *complaint) String() string { return strings.Join(strings.Fields(t.buf.String()), " ") }

// Installed tells whether a program of this name is in PATH.
func Installed(name string) bool {
	_, err := exec.LookPath(name)
	return err == nil
}
