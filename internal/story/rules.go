package story

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"rsc.io/script"
)

// rules remembers the rules of a node, everybody's, or says whether they are the same ones still.
func (st *stage) rules(ctx context.Context, args []string) (string, error) {
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	now, err := st.listRules(ctx, args[1])
	if err != nil {
		return "", err
	}
	switch before, ok := st.rulesSaved[args[2]]; {
	case args[0] == "save":
		if len(now) < 10 {
			return "", fmt.Errorf("%s has but %d rules", args[1], len(now))
		}
		st.rulesSaved[args[2]] = now
	case args[0] != "same":
		return "", script.ErrUsage
	case !ok:
		return "", fmt.Errorf("no rules were saved as %q", args[2])
	default:
		return "", differ(before, now)
	}
	return "", nil
}

// passing is what changes in a list of rules though no rule does: counters, times, the numbers by which the maps of nftables mode refer to
// routes; and the places of elements in a line.
var passing = regexp.MustCompile(`\[\d+:\d+\]|packets \d+ bytes \d+| expires \w+|elements = |[{}]|: 0x[0-9a-f]{8}|0x[0-9a-f]{8} comment`)

// listRules gives the words of all rules, sorted: the order of chains, and of elements, is the kernel's.
func (st *stage) listRules(ctx context.Context, node string) (all []string, err error) {
	a, err := st.actor(node)
	if err != nil {
		return nil, err
	}
	for _, tool := range st.listings() {
		out, err := a.Exec(ctx, nil, tool[0], tool[1:]...)
		if err != nil {
			return nil, fmt.Errorf("%w: %s", err, tail(out, 3))
		}
		for line := range strings.Lines(passing.ReplaceAllString(out, "")) {
			if strings.HasPrefix(line, "#") { // with a date
				continue
			}
			for word := range strings.SplitSeq(line, ",") {
				if word = strings.TrimSpace(word); word != "" {
					all = append(all, word)
				}
			}
		}
	}
	slices.Sort(all)
	return all, nil
}

func differ(before, now []string) error {
	var errs []error
	for _, side := range []struct {
		what     string
		of, from []string
	}{{"missing", before, now}, {"new", now, before}} {
		count := map[string]int{}
		for _, w := range side.from {
			count[w]++
		}
		for _, w := range side.of {
			if count[w]--; count[w] < 0 {
				errs = append(errs, fmt.Errorf("%s: %s", side.what, w))
			}
		}
	}
	if len(errs) > 12 {
		errs = append(errs[:12], fmt.Errorf("and %d more", len(errs)-12))
	}
	return errors.Join(errs...)
}

var handle = regexp.MustCompile(`# handle (\d+)`)

// pluck deletes the first rule of a chain of nf_tables, as somebody with nft would.
func (st *stage) pluck(ctx context.Context, args []string) (string, error) {
	if len(args) != 4 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	chain := args[1:]
	out, err := a.Exec(ctx, nil, "nft", append([]string{"-a", "list", "chain"}, chain...)...)
	if err != nil {
		return out, err
	}
	for line := range strings.Lines(out) {
		head := strings.Contains(line, "table ") || strings.Contains(line, "chain "+args[3]+" {")
		if h := handle.FindStringSubmatch(line); h != nil && !head {
			return a.Exec(ctx, nil, "nft", append(append([]string{"delete", "rule"}, chain...), "handle", h[1])...)
		}
	}
	return out, fmt.Errorf("chain %s of %s %s has no rule", args[3], args[1], args[2])
}
