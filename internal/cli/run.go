package cli

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	client "k8s.io/client-go/features"
	"k8s.io/klog/v2"

	"fairlead/internal/config"
	"fairlead/internal/dataplane/iptables"
	"fairlead/internal/kernel"
)

func newRun() *cobra.Command {
	o := config.NewOptions()
	v := new(versionFlag)
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Serve the Services of a cluster on this node",
		Long: "run is the agent of a node. It takes the flags and the configuration file of kube-proxy; called by the name kube-proxy, the program is run.\n" +
			"With --config, a flag counts where the file leaves its field open (--hostname-override, --master and those of the log count always).",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return run(cmd.Context(), o, v, cmd.OutOrStdout()) },
	}
	o.AddFlags(cmd.Flags())
	cmd.Flags().Var(v, "version", "true or raw: print the version and exit; vX.Y.Z: the version to report")
	cmd.Flags().Lookup("version").NoOptDefVal = "true"
	return cmd
}

func run(ctx context.Context, o *config.Options, v *versionFlag, out io.Writer) error {
	if v.asked {
		line := versionLine()
		if v.raw {
			line = rawVersion()
		}
		_, err := fmt.Fprintln(out, line)
		return err
	}
	c, err := o.Config()
	if err != nil {
		return err
	}
	if o.WriteConfigTo != "" {
		return c.WriteTo(o.WriteConfigTo)
	}
	if err := built(c.Mode); err != nil && !o.Cleanup {
		return err
	}
	if err := c.SetUpLogging(); err != nil {
		return fmt.Errorf("set up the log: %w", err)
	}
	defer klog.Flush()
	for _, note := range c.Notes {
		klog.InfoS("Configuration: " + note)
	}
	client.ReplaceFeatureGates(clientGates{client.FeatureGates(), c.Gates})
	sparing(gcPercent)
	switch {
	case o.Cleanup:
		return cleanup(ctx, c)
	case o.InitOnly:
		return initOnly(ctx, c)
	}
	a := newAgent(c, o.ConfigFile)
	a.options = o
	return a.run(ctx)
}

// initOnly does what needs full root privileges, so that an agent with CAP_NET_ADMIN alone may run afterwards.
func initOnly(ctx context.Context, c *config.Config) error {
	tune(&c.Proxy)
	d, served, err := newDataplane(ctx, c)
	if err != nil {
		return err
	}
	if c.LocalhostPort && served.v4 && c.Mode == "iptables" {
		err = kernel.SetSysctl(iptables.RouteLocalnet, "1")
	}
	return errors.Join(err, d.Close())
}

// clientGates answers client-go with the feature gates that were configured, and else as it would itself, which is from
// the environment (KUBE_FEATURE_*).
type clientGates struct {
	client.Gates
	set config.Gates
}

func (g clientGates) Enabled(f client.Feature) bool {
	if on, ok := g.set[string(f)]; ok {
		return on
	}
	return g.Gates.Enabled(f)
}
