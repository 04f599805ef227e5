package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/explain"
)

type explainer struct {
	options             *config.Options
	from, to, proto, in string
	kernel              bool
}

func newExplain() *cobra.Command {
	e := &explainer{options: config.NewOptions()}
	cmd := &cobra.Command{
		Use:   "explain PACKET",
		Short: "Tell what will happen to a packet, and why",
		Long: "explain tells the story of a packet that opens a connection: who sends it, which Service it is for, which endpoints may get it, and the reason\n" +
			"for each one that may not. It asks the running agent; with --manifests it reads files, with --kernel the rules themselves.\n\n" +
			"A packet is " + explain.Usage + ". Without a source this node sends it.",
		Example: "  fairlead explain '10.244.1.5 -> 10.96.0.10:53/udp'\n" +
			"  fairlead explain 10.96.0.1:443\n" +
			"  fairlead explain --from 198.51.100.7 --to 192.0.2.11:30080 --in eth0\n" +
			"  fairlead explain --manifests examples --hostname-override n1 10.96.0.1:443",
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := e.question(args)
			if err != nil {
				return usage(cmd, err)
			}
			return e.run(cmd.Context(), q, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&e.from, "from", "", "source address, with or without a port")
	cmd.Flags().StringVar(&e.to, "to", "", "destination address and port")
	cmd.Flags().StringVar(&e.proto, "proto", "", "tcp, udp or sctp (default tcp)")
	cmd.Flags().StringVar(&e.in, "in", "", "interface that the packet comes in by")
	cmd.Flags().BoolVar(&e.kernel, "kernel", false, "ask the rules in the kernel, by the dataplane of --proxy-mode; needs no agent")
	offlineFlags(cmd, e.options)
	return cmd
}

// question puts together what the arguments and the flags say.
func (e *explainer) question(args []string) (explain.Question, error) {
	if len(args) == 0 && e.to != "" {
		args = []string{e.to}
	} else if e.to != "" {
		return explain.Question{}, errors.New("the packet and --to both say a destination: give one")
	}
	q, err := explain.Parse(args...)
	if err != nil {
		return q, err
	}
	if e.from != "" {
		if q.From.IsValid() {
			return q, errors.New("the packet and --from both say a source: give one")
		}
		if err := q.SetFrom(e.from); err != nil {
			return q, err
		}
	}
	if e.proto != "" {
		if err := q.SetProto(e.proto); err != nil {
			return q, err
		}
	}
	q.In = e.in
	return q, q.Check()
}

func (e *explainer) run(ctx context.Context, q explain.Question, out io.Writer) error {
	c, err := e.options.Config()
	if err != nil {
		return err
	}
	story, err := tell(ctx, c, q, e.kernel)
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(out, story)
	return err
}

func tell(ctx context.Context, c *config.Config, q explain.Question, fromRules bool) (string, error) {
	switch {
	case fromRules:
		k, err := fromKernel(ctx, c)
		if err != nil {
			return "", err
		}
		return explain.Story(k.state, nil, q), nil
	case c.Own.Manifests != "":
		m, err := fromManifests(ctx, c)
		if err != nil {
			return "", err
		}
		return explain.Story(m.state, m.resolver, q), nil
	}
	return control.NewClient(control.Path(c.Own.ControlSocket)).Explain(ctx, q)
}
