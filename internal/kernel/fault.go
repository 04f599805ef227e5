package kernel

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// FaultFile is the variable of the environment that names the switch by which people try what happens when a write into the
// kernel fails. It is read once, at the start; without it there is no switch.
const FaultFile = "FAIRLEAD_FAULT_FILE"

// ErrFault is a failure that somebody asked for.
var ErrFault = errors.New("a failure that was asked for (" + FaultFile + ")")

// faultSwitch makes the next write fail, once, when its file is there. The zero value does nothing.
type faultSwitch struct{ file string }

var fault = faultSwitch{os.Getenv(FaultFile)}

var askFault func() string

// AskFault is for tests on a real kernel: each write asks whether it shall fail, "before" it is done or "after"; "" is not at all. A nil
// ask ends it.
func AskFault(ask func() string) { askFault = ask }

// TryFault makes a write into the kernel. Every dataplane's writes come by here: one transaction of nf_tables, one call of
// iptables-restore. When the switch is on, the write fails before anything is done, or, if the switch's file says "after", when it
// has taken effect; the error is [ErrFault] then, and the switch is off.
func TryFault(write func() error) error {
	if fault.file == "" && askFault == nil {
		return write()
	}
	take := fault.take
	if askFault != nil {
		take = askFault
	}
	switch when := take(); when {
	case "":
		return write()
	case "after":
		if err := write(); err != nil {
			return err
		}
		return fmt.Errorf("%w, after the write", ErrFault)
	default:
		return fmt.Errorf("%w, before the write", ErrFault)
	}
}

// take turns the switch off, and tells when the write shall fail; "" is not at all. What can't be turned off does not count, or
// no write would ever succeed.
func (f faultSwitch) take() (when string) {
	words, err := os.ReadFile(f.file)
	if err != nil || os.Remove(f.file) != nil {
		return ""
	}
	if strings.TrimSpace(string(words)) == "after" {
		return "after"
	}
	return "before"
}
