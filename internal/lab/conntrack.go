package lab

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"fairlead/internal/model"

	"github.com/ti-mo/conntrack"
)

// Entry is one flow as the kernel tracks it.
type Entry struct {
	ID    uint32
	Proto model.Proto
	// Where the first packet came from and was sent to, and where the answers come from and are sent to.
	Src, Dst, ReplySrc, ReplyDst netip.AddrPort
}

func (e Entry) String() string {
	return fmt.Sprintf("%s %s -> %s, answers %s -> %s, id %d", e.Proto, e.Src, e.Dst, e.ReplySrc, e.ReplyDst, e.ID)
}

// Conntrack lists the flows that the actor's kernel tracks, sorted.
func (a *Actor) Conntrack() (entries []Entry, err error) {
	err = a.Do(func() error {
		c, err := conntrack.Dial(nil)
		if err != nil {
			return fmt.Errorf("open conntrack: %w", err)
		}
		defer c.Close()
		flows, err := c.Dump(nil)
		if err != nil {
			return fmt.Errorf("list conntrack: %w", err)
		}
		for _, f := range flows {
			entries = append(entries, entry(f))
		}
		return nil
	})
	slices.SortFunc(entries, func(x, y Entry) int { return strings.Compare(x.String(), y.String()) })
	return entries, err
}

func entry(f conntrack.Flow) Entry {
	o, r := f.TupleOrig, f.TupleReply
	return Entry{
		ID: f.ID, Proto: model.Proto(o.Proto.Protocol),
		Src: netip.AddrPortFrom(o.IP.SourceAddress, o.Proto.SourcePort), Dst: netip.AddrPortFrom(o.IP.DestinationAddress, o.Proto.DestinationPort),
		ReplySrc: netip.AddrPortFrom(r.IP.SourceAddress, r.Proto.SourcePort), ReplyDst: netip.AddrPortFrom(r.IP.DestinationAddress, r.Proto.DestinationPort),
	}
}
