package nftables

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/model"
)

// target is what a route leads to: a chain. There is one for each distinct number of endpoints and way of treating a
// packet, whatever Services there are.
type target struct {
	verdict  model.Verdict // Forward, Reject, Drop
	nodePort bool          // the key in the maps has no address
	ranges   bool          // sources are compared with the allowed ones first
	local    bool          // endpoints of this node only
	n        int           // endpoints
	snat     bool
	sticky   uint32 // seconds; 0 is none
}

// The names of chains, and of their parts.
const (
	chainRefuse = "refuse"
	chainDrop   = "drop"

	prefixNodePort = "nodeport-"
	prefixCluster  = "cluster-"
	prefixLocal    = "local-"
	suffixRanges   = "-ranges"
	suffixMasq     = "-masquerade"
	infixSticky    = "-sticky-"
)

// chain is the name of the target's chain: "cluster-4", "nodeport-local-2-sticky-10800-masquerade-ranges".
func (t target) chain() string {
	var b strings.Builder
	if t.nodePort {
		b.WriteString(prefixNodePort)
	}
	switch {
	case t.verdict == model.Reject:
		b.WriteString(chainRefuse)
	case t.verdict == model.Drop:
		b.WriteString(chainDrop)
	case t.local:
		b.WriteString(prefixLocal)
	default:
		b.WriteString(prefixCluster)
	}
	if t.verdict == model.Forward {
		b.WriteString(strconv.Itoa(t.n))
		if t.sticky > 0 {
			b.WriteString(infixSticky)
			b.WriteString(strconv.FormatUint(uint64(t.sticky), 10))
		}
		if t.snat {
			b.WriteString(suffixMasq)
		}
	}
	if t.ranges {
		b.WriteString(suffixRanges)
	}
	return b.String()
}

// targetNamed reads the name of a chain.
func targetNamed(name string) (target, bool) {
	var t target
	name, t.nodePort = strings.CutPrefix(name, prefixNodePort)
	name, t.ranges = strings.CutSuffix(name, suffixRanges)
	switch name {
	case chainRefuse:
		t.verdict = model.Reject
		return t, true
	case chainDrop:
		t.verdict = model.Drop
		return t, true
	}
	t.verdict = model.Forward
	name, t.snat = strings.CutSuffix(name, suffixMasq)
	name, sticky, isSticky := strings.Cut(name, infixSticky)
	if isSticky {
		n, err := strconv.ParseUint(sticky, 10, 32)
		if err != nil || n == 0 {
			return t, false
		}
		t.sticky = uint32(n)
	}
	rest, cluster := strings.CutPrefix(name, prefixCluster)
	if !cluster {
		rest, t.local = strings.CutPrefix(name, prefixLocal)
	}
	n, err := strconv.Atoi(rest)
	t.n = n
	return t, err == nil && n > 0 && (cluster || t.local)
}

// simple is what a target is when nothing of it needs the key: refusal and silence are the same for all.
func (t target) simple() target {
	if t.verdict != model.Forward && !t.ranges {
		return target{verdict: t.verdict}
	}
	return t
}

// unguarded is where a target leads once the source was found to be allowed.
func (t target) unguarded() target {
	t.ranges = false
	return t.simple()
}

// says is for the comment in the routes.
func (t target) says() string {
	var s string
	switch t.verdict {
	case model.Reject:
		s = "refused"
	case model.Drop:
		s = "dropped"
	default:
		scope := "endpoints"
		if t.local {
			scope = "endpoints on this node"
		}
		s = fmt.Sprintf("one of %d %s", t.n, scope)
	}
	if t.snat {
		s += " as the node"
	}
	if t.sticky > 0 {
		s += " for " + (time.Duration(t.sticky) * time.Second).String()
	}
	if t.ranges {
		s += " if allowed"
	}
	return s
}

// shape is what each origin meets at a frontend. Frontends alike share one, by its number.
type shape [3]target
