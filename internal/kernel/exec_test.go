package kernel

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
)

func TestCommand(t *testing.T) {
	var got string
	read := func(r io.Reader) error { b, err := io.ReadAll(r); got = string(b); return err }
	write := func(w io.Writer) error { _, err := io.WriteString(w, "in\n"); return err }
	if err := (Command{Name: "cat", Stdin: write, Stdout: read}).Run(t.Context()); err != nil || got != "in\n" {
		t.Errorf("cat: %q, %v", got, err)
	}

	// What a program complains about, and its status, matter more than the input that it did not read.
	much := func(w io.Writer) error { _, err := w.Write(bytes.Repeat([]byte("x\n"), 1<<20)); return err }
	err := (Command{Name: "sh", Args: []string{"-c", "echo one >&2; echo two >&2; exit 4"}, Stdin: much}).Run(t.Context())
	var exit *ExitError
	if !errors.As(err, &exit) || exit.Code != 4 || exit.Stderr != "one two" {
		t.Errorf("exit 4: %v", err)
	}

	// Output that nobody wants does not keep the program.
	first := func(r io.Reader) error { _, err := io.ReadFull(r, make([]byte, 1)); return err }
	if err := (Command{Name: "seq", Args: []string{"1000000"}, Stdout: first}).Run(t.Context()); err != nil {
		t.Errorf("seq: %v", err)
	}

	boom := errors.New("boom")
	fail := func(io.Reader) error { return boom }
	if err := (Command{Name: "sleep", Args: []string{"60"}, Stdout: fail}).Run(t.Context()); !errors.Is(err, boom) {
		t.Errorf("reader that fails: %v", err)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := (Command{Name: "sleep", Args: []string{"60"}, Stdin: much}).Run(ctx); !errors.As(err, &exit) || exit.Code != -1 {
		t.Errorf("ended by its context: %v", err)
	}

	err = (Command{Name: "no-such-program-anywhere"}).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "no-such-program-anywhere") || Installed("no-such-program-anywhere") {
		t.Errorf("no program: %v", err)
	}
}
