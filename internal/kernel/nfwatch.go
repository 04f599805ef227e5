package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Drift is told when nothing more happened for as long as quiet, since one flush is thousands of events; and at the latest
// after patience.
const (
	quiet    = 5 * time.Millisecond
	patience = 200 * time.Millisecond
)

// WatchNFTables calls drift with a few words when others changed nf_tables, until ctx ends: what was seen first, which process did
// it, and how much more there was. see is asked about each event, and says nothing of what does not concern it; it is
// asked about an empty message when events were lost. What the socket
// with the port except causes is left out by the kernel.
func WatchNFTables(ctx context.Context, except uint32, see func(NFMessage) string, drift func(what string)) error {
	l, err := ListenNFNetlink(unix.NFNLGRP_NFTABLES, except)
	if err != nil {
		return fmt.Errorf("watch nf_tables: %w", err)
	}
	defer l.Close()
	var seen Sightings
	for {
		err := l.Receive(ctx, seen.wait(), func(m NFMessage) { seen.note(m, see) })
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, ErrEventsLost) {
			see(NFMessage{})
			seen.Saw(err.Error())
		} else if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("watch nf_tables: %w", err)
		}
		if seen.count > 0 && (err != nil || time.Since(seen.start) > patience) {
			drift(seen.String())
			seen = Sightings{}
		}
	}
}

// Sightings gathers what was seen since drift was told last.
type Sightings struct {
	first string
	who   string
	start time.Time
	count int
	since int // count at the last end of a transaction
}

// wait is how long to wait for more; 0 is for ever.
func (s *Sightings) wait() time.Duration {
	if s.count > 0 {
		return quiet
	}
	return 0
}

// Saw adds one. A table that goes tells more than what went with it, which the kernel tells first.
func (s *Sightings) Saw(what string) {
	if s.count == 0 {
		s.start = time.Now()
	}
	if s.count == 0 || isTable(what) && !isTable(s.first) {
		s.first = what
	}
	s.count++
}

func isTable(what string) bool { return strings.HasPrefix(what, "table ") }

// note reads one event. Each transaction ends with a message that names the process.
func (s *Sightings) note(m NFMessage, see func(NFMessage) string) {
	if m.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN {
		if s.count > s.since && s.since == 0 {
			s.who = process(m.Attrs)
		}
		s.since = s.count
		return
	}
	if what := see(m); what != "" {
		s.Saw(what)
	}
}

// String says what was first, who did it, and how much more there was; nothing when nothing was seen.
func (s *Sightings) String() string {
	out := s.first
	if s.who != "" {
		out += " by " + s.who
	}
	switch {
	case s.count == 2:
		out += ", and one more change"
	case s.count > 2:
		out += fmt.Sprintf(", and %d more changes", s.count-1)
	}
	return out
}

// process names who made a transaction: "nft (process 4711)".
func process(attrs []byte) string {
	var name string
	var pid uint32
	for typ, v := range Attrs(attrs) {
		switch typ {
		case unix.NFTA_GEN_PROC_NAME:
			name = string(AttrBytes(v))
		case unix.NFTA_GEN_PROC_PID:
			pid = AttrU32(v)
		}
	}
	if name == "" {
		return ""
	}
	return fmt.Sprintf("%s (process %d)", name, pid)
}
