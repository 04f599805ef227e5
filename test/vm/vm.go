// Package vm runs programs under a kernel of one's choice: Debian's, in QEMU, with a small initramfs that has what our tests
// need. It is for what the kernel of this machine can't do (IPVS, SCTP), and for the question whether something holds on another kernel.
//
//	kernel package ─► modules ┐
//	programs of this machine ─┴─► base.cpio (kept) ─┐
//	the caller's files, the command ────────────────┴─► initramfs ─► QEMU ─► output, exit status
//
// Nothing of the machine is seen or changed by the guest. It has no network card. QEMU translates the guest's instructions (TCG), which
// works everywhere, also in containers. The guest has a clock of its own, that of its work: see [machine.args].
package vm

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Config says what is run in the guest, and on which kernel.
type Config struct {
	Kernel string            // a Debian package; empty is [DefaultKernel]
	Files  map[string]string // path in the guest: file or folder of this machine
	Env    []string          // beside PATH, HOME and TMPDIR
	Dir    string            // where the command begins; empty is /
	Args   []string          // the command: a path in the guest, and arguments without line ends
	Memory int               // MiB; 0 is 1536. The files are in it, too

	// Timeout ends a guest that hangs, by the clock of this machine; 0 is three minutes. A busy machine takes longer for the same.
	Timeout time.Duration

	Log io.Writer // is shown what the command writes, as it comes; may be nil
}

// Result is what a command that ended leaves behind.
type Result struct {
	Exit    int    // its status
	Output  string // what it wrote, to both streams
	Console string // what the kernel wrote
	Took    time.Duration
}

// Boot starts a guest, runs the command and returns when the guest is gone. The error says that the command did not come to its
// end, or that the kernel complained; a status other than 0 is no error of Boot. It has the end of what guest and kernel wrote.
func Boot(c Config) (Result, error) {
	k, err := findKernel(cmp.Or(c.Kernel, DefaultKernel))
	if err != nil {
		return Result{}, fmt.Errorf("guest kernel: %w", err)
	}
	base, err := k.base()
	if err != nil {
		return Result{}, fmt.Errorf("guest initramfs: %w", err)
	}
	dir, err := os.MkdirTemp("", "fairlead-vm-")
	if err != nil {
		return Result{}, err
	}
	defer os.RemoveAll(dir)
	m := machine{kernel: k.image, initrd: filepath.Join(dir, "initrd"), console: filepath.Join(dir, "console"), memory: cmp.Or(c.Memory, 1536)}
	if err := c.pack(m.initrd, base); err != nil {
		return Result{}, fmt.Errorf("guest initramfs: %w", err)
	}
	var out bytes.Buffer
	m.out = &out
	if c.Log != nil {
		m.out = io.MultiWriter(&out, c.Log)
	}
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(c.Timeout, 3*time.Minute))
	defer cancel()
	begin := time.Now()
	err = m.run(ctx)
	console, _ := os.ReadFile(m.console) // not there if QEMU did not get as far
	return verdict(out.String(), string(console), time.Since(begin), err)
}

// pack writes the initramfs: the kernel unpacks one archive after the other.
func (c Config) pack(path, base string) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	b, err := os.Open(base)
	if err != nil {
		return err
	}
	defer b.Close()
	if _, err := io.Copy(f, b); err != nil {
		return err
	}
	a := newArchive(f)
	for guest, host := range c.Files {
		a.tree(guest, host)
	}
	for _, word := range append(c.Args, c.Env...) {
		if strings.Contains(word, "\n") {
			return fmt.Errorf("%q has a line end, which can't be handed to the guest", word)
		}
	}
	a.text("/command/args", lines(c.Args))
	a.text("/command/env", lines(c.Env))
	a.text("/command/dir", lines([]string{cmp.Or(c.Dir, "/")}))
	return a.close()
}

func lines(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return strings.Join(words, "\n") + "\n"
}

var (
	// lastLine is what init.sh says when the command has ended.
	lastLine = regexp.MustCompile(`(?m)^VM-EXIT:(\d+)\r?\n\z`)

	// complaint is a kernel in trouble, which it may survive. A panic ends the guest, and there is no last line.
	complaint = regexp.MustCompile(`(?m)^.*(BUG: |WARNING: CPU: |Oops: |general protection fault|Kernel panic|blocked for more than|soft lockup|detected stalls).*$`)
)

// verdict makes a result of what came out. QEMU's own status says nothing: after a panic it is 0.
func verdict(out, console string, took time.Duration, err error) (Result, error) {
	r := Result{Output: out, Console: console, Took: took}
	end := lastLine.FindStringSubmatchIndex(out)
	trouble := complaint.FindString(console)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("the guest hung, or was too slow: it was ended after %s", took.Round(time.Second))
	case err != nil:
	case trouble != "":
		err = fmt.Errorf("the guest's kernel complained: %s", strings.TrimSpace(trouble))
	case end == nil:
		err = errors.New("the guest ended, its command did not")
	}
	if err != nil {
		return r, fmt.Errorf("%w\n--- end of what the guest wrote ---\n%s\n--- end of what its kernel wrote ---\n%s", err, tail(out), tail(console))
	}
	r.Exit, err = strconv.Atoi(out[end[2]:end[3]])
	r.Output = out[:end[0]]
	return r, err
}

// tail is the part of a log that is shown with an error.
func tail(s string) string {
	const most = 60
	all := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(all[max(0, len(all)-most):], "\n")
}
