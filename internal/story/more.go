package story

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"strings"

	"rsc.io/script"
)

// churn changes the endpoints of a Service COUNT times, to nothing and back, and waits for each change.
func (st *stage) churn(ctx context.Context, args []string) (string, error) {
	if len(args) < 3 {
		return "", script.ErrUsage
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	for i := range n {
		with := args[1:]
		if i%2 == 1 {
			with = args[1:2]
		}
		if _, err := st.endpoints(ctx, with); err != nil {
			return "", fmt.Errorf("change %d: %w", i+1, err)
		}
	}
	return "", nil
}

// waves makes and removes many Services, COUNT times.
func (st *stage) waves(ctx context.Context, args []string) (string, error) {
	if len(args) < 3 {
		return "", script.ErrUsage
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	for i := range n {
		for _, wave := range [][]string{args[1:], {"0", args[2]}} {
			if _, err := st.manyServices(ctx, wave); err != nil {
				return "", fmt.Errorf("wave %d: %w", i+1, err)
			}
		}
	}
	return "", nil
}

// tracked remembers the flows that a node tracks and that contain all the texts, or says whether they are the same ones
// still: a flow that was forgotten and met again has another id.
func (st *stage) tracked(ctx context.Context, args []string) (string, error) {
	if len(args) < 3 {
		return "", script.ErrUsage
	}
	now, err := st.conntrack(ctx, args[2:])
	if err != nil {
		return "", err
	}
	switch before, ok := st.flowsSaved[args[1]]; {
	case args[0] == "save":
		st.flowsSaved[args[1]] = now
	case args[0] != "same":
		return "", script.ErrUsage
	case !ok:
		return "", fmt.Errorf("no flows were saved as %q", args[1])
	case now != before:
		return "", fmt.Errorf("the flows have changed:\n%sbefore:\n%s", now, before)
	}
	return now, nil
}

// foreign makes a table of somebody else on a node, or says whether it is as it was.
func (st *stage) foreign(_ context.Context, args []string) (string, error) {
	if len(args) != 2 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[1])
	if err != nil {
		return "", err
	}
	if args[0] == "make" {
		if err := a.AddForeignTable(); err != nil {
			return "", err
		}
	}
	now, err := a.ForeignTable()
	if err != nil {
		return "", err
	}
	switch args[0] {
	case "make":
		st.foreignTable = now
	case "same":
		if !bytes.Equal(now, st.foreignTable) {
			return "", fmt.Errorf("the foreign table is\n% x\nand was\n% x", now, st.foreignTable)
		}
	default:
		return "", script.ErrUsage
	}
	return fmt.Sprintf("%s\n", strings.ToUpper(fmt.Sprintf("% x", now))), nil
}

// noise starts and stops another program that writes to a node's firewall.
func (st *stage) noise(_ context.Context, args []string) (string, error) {
	if len(args) != 2 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[1])
	if err != nil {
		return "", err
	}
	switch n, ok := st.noises[args[1]]; {
	case args[0] == "start" && !ok:
		st.noises[args[1]] = a.StartNoise()
		return "", nil
	case args[0] == "stop" && ok:
		delete(st.noises, args[1])
		writes, err := n.Stop()
		if err == nil && writes < 10 {
			err = fmt.Errorf("the noise was but %d writes", writes)
		}
		return fmt.Sprintf("%d writes\n", writes), err
	}
	return "", script.ErrUsage
}
