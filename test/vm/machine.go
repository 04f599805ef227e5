package vm

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// qemu is the program that plays the machine, of the Debian package qemu-system-x86.
const qemu = "qemu-system-x86_64"

// cmdline ends the guest when its kernel is in trouble: after an oops, a panic, or half a minute in which a task waits for a lock
// that does not come. The console shows warnings and what is worse. Mitigations cost time, and there is nobody to be guarded against.
const cmdline = "console=ttyS0 quiet loglevel=5 panic=-1 oops=panic hung_task_panic=1 sysctl.kernel.hung_task_timeout_secs=30 mitigations=off rdinit=/init"

// machine is one QEMU.
type machine struct {
	kernel, initrd string
	console        string    // file for what the kernel writes
	out            io.Writer // for what the command writes
	memory         int       // MiB
}

// args pins TCG: what KVM does in a machine that is virtual itself differs from place to place, down to guests that hang.
//
// With -icount the guest's clock counts its instructions, one a nanosecond, and jumps ahead when it has nothing to do. So a second of the guest
// is the same amount of work however busy this machine is, and a test that waits for an answer waits long enough; what only waits is
// over at once. It follows that a guest has one processor, and that its times say nothing about those of a real machine.
func (m machine) args() []string {
	return []string{"-M", "pc", "-accel", "tcg", "-icount", "shift=0,sleep=off", "-rtc", "clock=vm", "-m", strconv.Itoa(m.memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", m.kernel, "-initrd", m.initrd, "-append", cmdline,
		"-chardev", "file,id=console,path=" + m.console, "-serial", "chardev:console",
		"-device", "virtio-serial-pci", "-chardev", "file,id=out,path=/dev/stdout", "-device", "virtserialport,chardev=out,name=out"}
}

// run plays the machine until it is switched off, or until ctx ends. QEMU goes with this process, however that ends.
func (m machine) run(ctx context.Context) error {
	path, err := exec.LookPath(qemu)
	if err != nil {
		return fmt.Errorf("no QEMU (apt-get install qemu-system-x86): %w", err)
	}
	runtime.LockOSThread() // Pdeathsig is about the thread that starts a program
	defer runtime.UnlockOSThread()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, path, m.args()...)
	cmd.Stdout, cmd.Stderr = m.out, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", qemu, err, tail(stderr.String()))
	}
	return nil
}
