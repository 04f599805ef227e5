package resolve

import (
	"cmp"
	"fmt"
	"slices"

	"fairlead/internal/model"
)

// The reasons of notices. Each is a label of a metric too, so there are few of them.
const (
	UnsafeAddress    = "UnsafeAddress"    // loopback, link-local, multicast, broadcast, unspecified
	ClusterIPAddress = "ClusterIPAddress" // the ClusterIP of another Service
	NodeAddress      = "NodeAddress"      // an address of a node
	OtherFamily      = "OtherFamily"      // an address of a family that the Service, or fairlead, does not serve
	AddressConflict  = "AddressConflict"  // another Service has this address and port
	NodePortConflict = "NodePortConflict" // another Service has this node port, or the health-check node port of this one
	Malformed        = "Malformed"        // a value that can't be read
)

// Reasons lists them all.
var Reasons = []string{UnsafeAddress, ClusterIPAddress, NodeAddress, OtherFamily, AddressConflict, NodePortConflict, Malformed}

// notes collects what should be said about one Service. A nil *notes is deaf: it costs nothing to tell it things.
type notes struct {
	service string
	list    []model.Notice
	more    int // that are not in the list
}

func (n *notes) add(reason, format string, args ...any) {
	if n == nil {
		return
	}
	n.list = append(n.list, model.Notice{Service: n.service, Reason: reason, Message: fmt.Sprintf(format, args...)})
}

// maxNotices is how many things are said of one Service; who reads these has enough to do, and a Service of a thousand
// errors must not drown those of others.
const maxNotices = 50

// sorted gives the notices in order, each once.
func (n *notes) sorted() []model.Notice {
	slices.SortFunc(n.list, compareNotices)
	list := slices.Compact(n.list)
	if more := len(list) - maxNotices; more > 0 {
		more += n.more
		list[maxNotices] = model.Notice{Service: n.service, Reason: Malformed, Message: fmt.Sprintf("and %d more faults of this Service", more)}
		list = slices.Clone(list[:maxNotices+1])
		slices.SortFunc(list, compareNotices)
	}
	return list
}

func compareNotices(a, b model.Notice) int {
	return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Message, b.Message))
}

// board remembers which notices hold, and which of them were told.
type board struct {
	held  map[string][]heldNotice // by Service; only those that have any
	fresh map[string]bool         // Services with a notice that was not told yet
	count map[string]int          // by reason
}

type heldNotice struct {
	model.Notice
	told bool
}

func newBoard() *board {
	b := &board{held: map[string][]heldNotice{}, fresh: map[string]bool{}, count: map[string]int{}}
	for _, reason := range Reasons {
		b.count[reason] = 0
	}
	return b
}

// settle says what holds of one Service now. What held before and was told is not told again.
func (b *board) settle(service string, now []model.Notice) {
	old := b.held[service]
	if len(old) == 0 && len(now) == 0 {
		return
	}
	delete(b.fresh, service)
	held := make([]heldNotice, len(now))
	for i, n := range now {
		told := slices.Contains(old, heldNotice{n, true})
		held[i] = heldNotice{n, told}
		b.count[n.Reason]++
		if !told {
			b.fresh[service] = true
		}
	}
	for _, n := range old {
		b.count[n.Reason]--
	}
	if b.held[service] = held; len(held) == 0 {
		delete(b.held, service)
	}
}

// news gives the notices that were not told yet, sorted, and counts them as told.
func (b *board) news() []model.Notice {
	var out []model.Notice
	for service := range b.fresh {
		for i, n := range b.held[service] {
			if !n.told {
				out = append(out, n.Notice)
				b.held[service][i].told = true
			}
		}
	}
	if len(b.fresh) > 0 {
		b.fresh = map[string]bool{} // to clear a map costs as much as it was large once
	}
	slices.SortFunc(out, compareNotices)
	return out
}

// all gives the notices that hold, sorted.
func (b *board) all() []model.Notice {
	var out []model.Notice
	for _, held := range b.held {
		for _, n := range held {
			out = append(out, n.Notice)
		}
	}
	slices.SortFunc(out, compareNotices)
	return out
}
