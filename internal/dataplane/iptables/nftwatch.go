package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// quiet is how long nothing must happen before drift is told: one flush is thousands of events.
const quiet = 20 * time.Millisecond

// Watch calls drift when somebody else changed what is ours; see backend. It hears of each change from the kernel, which
// leaves out what this back end writes itself.
func (n *nft) Watch(ctx context.Context, drift func(what string)) error {
	l, err := kernel.ListenNFNetlink(unix.NFNLGRP_NFTABLES, n.conn.Port())
	if err != nil {
		return fmt.Errorf("watch nf_tables: %w", err)
	}
	defer l.Close()
	return watch(ctx, l, drift)
}

func watch(ctx context.Context, l *kernel.NFListener, drift func(what string)) error {
	var seen sightings
	for {
		wait := time.Duration(0)
		if seen.count > 0 {
			wait = quiet
		}
		err := l.Receive(ctx, wait, seen.note)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			drift(seen.String())
			seen = sightings{}
		case errors.Is(err, kernel.ErrEventsLost):
			seen.saw(err.Error())
		case err != nil:
			return fmt.Errorf("watch nf_tables: %w", err)
		}
	}
}

// sightings gathers what was seen since drift was told last.
type sightings struct {
	first string
	who   string
	count int
	since int // count at the last end of a transaction
}

func (s *sightings) saw(what string) {
	if s.count == 0 {
		s.first = what
	}
	s.count++
}

// String says what happened first, who did it, and how much more there was.
func (s *sightings) String() string {
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

// note reads one event. Each transaction ends with a message that names the process.
func (s *sightings) note(m kernel.NFMessage) {
	if m.Type == nftType(unix.NFT_MSG_NEWGEN) {
		if s.count > s.since && s.since == 0 {
			s.who = process(m.Attrs)
		}
		s.since = s.count
		return
	}
	if m.Family != unix.NFPROTO_IPV4 && m.Family != unix.NFPROTO_IPV6 {
		return
	}
	v6 := m.Family == unix.NFPROTO_IPV6
	switch m.Type {
	case nftType(unix.NFT_MSG_NEWCHAIN):
		s.chain(m.Attrs, v6, "made or changed")
	case nftType(unix.NFT_MSG_DELCHAIN):
		s.chain(m.Attrs, v6, "deleted")
	case nftType(unix.NFT_MSG_NEWRULE):
		s.rule(m.Attrs, v6, "added to")
	case nftType(unix.NFT_MSG_DELRULE):
		s.rule(m.Attrs, v6, "deleted from")
	}
}

// chain notes a change of one of our chains. One that goes with its table is told of like any other.
func (s *sightings) chain(attrs []byte, v6 bool, what string) {
	if id, ok := cutChain(attrs, v6); ok && watched(id) {
		s.saw(fmt.Sprintf("%s was %s", where(id), what))
	}
}

// rule notes a change in one of our chains, or of a jump to one.
func (s *sightings) rule(attrs []byte, v6 bool, what string) {
	raw := cutRule(attrs)
	table, ok := tableNamed(string(raw.table))
	if !ok {
		return
	}
	id := ChainID{V6: v6, Table: table, Name: string(raw.chain)}
	if id.builtin() {
		r, _ := raw.rule(v6)
		to := ChainID{V6: v6, Table: table, Name: r.Target.Chain}
		if watched(to) {
			s.saw(fmt.Sprintf("a jump to %s was %s %s", to.Name, what, where(id)))
		}
		return
	}
	if watched(id) {
		s.saw(fmt.Sprintf("a rule was %s %s", what, where(id)))
	}
}

// watched tells our chains from the kubelet's, which comes and goes, and from all others.
func watched(id ChainID) bool {
	return (id.Table == Nat || id.Table == Filter) && strings.HasPrefix(id.Name, kubePrefix) && id.Name != chainKubeletCanary
}

// chainKubeletCanary is the chain by which the kubelet, and iptables-wrapper, know the flavour of iptables in use.
const chainKubeletCanary = "KUBE-KUBELET-CANARY"

func process(attrs []byte) string {
	var name string
	var pid uint32
	for typ, v := range kernel.Attrs(attrs) {
		switch typ {
		case unix.NFTA_GEN_PROC_NAME:
			name = string(kernel.AttrBytes(v))
		case unix.NFTA_GEN_PROC_PID:
			pid = kernel.AttrU32(v)
		}
	}
	if name == "" {
		return ""
	}
	return fmt.Sprintf("%s (process %d)", name, pid)
}
