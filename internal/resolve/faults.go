package resolve

import (
	"fmt"

	"fairlead/internal/model"
)

// faults are what was found wrong in an object when it was read. They are kept, since whether one matters, and so is told,
// depends on the configuration and on other objects.
type faults [manyWheres]struct {
	list []flaw
	more int // beyond maxFaults
}

type flaw struct{ reason, message string }

// maxFaults bounds what is kept of an object with a thousand faults. It is more than is ever told of one.
const maxFaults = maxNotices + 1

// where in an object a fault is: it matters when that is looked at.
type where uint8

const (
	always where = iota
	inClusterIP4
	inClusterIP6
	inExternalIPs
	inRanges
	inPorts     // of a slice
	inEndpoints // of a slice
	manyWheres
)

func inClusterIP(v6 bool) where { return inClusterIP4 + where(fam(v6)) }

func (f *faults) add(in where, reason, format string, args ...any) {
	at := &f[in]
	if len(at.list) >= maxFaults {
		at.more++
		return
	}
	at.list = append(at.list, flaw{reason, fmt.Sprintf(format, args...)})
}

// orNil is nil if there are none, as of nearly every object.
func (f *faults) orNil() *faults {
	for i := range f {
		if len(f[i].list) > 0 {
			found := *f
			return &found
		}
	}
	return nil
}

// tell adds the faults that are in one place of an object.
func (n *notes) tell(f *faults, in where) {
	if n == nil || f == nil {
		return
	}
	for _, one := range f[in].list {
		n.list = append(n.list, model.Notice{Service: n.service, Reason: one.reason, Message: one.message})
	}
	n.more += f[in].more
}
