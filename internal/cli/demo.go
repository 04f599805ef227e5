package cli

import (
	"github.com/spf13/cobra"

	"fairlead/internal/demo"
)

func newDemo() *cobra.Command {
	mode := "iptables"
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show fairlead at work, in network namespaces of its own",
		Long:  "demo makes a node, three pods and a client outside in network namespaces, runs the agent on example manifests, and shows what it does. It touches nothing outside of them, and needs root.",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := built(mode); err != nil {
				return err
			}
			return demo.Run(cmd.Context(), demo.Options{Mode: mode, Out: cmd.OutOrStdout()})
		},
	}
	cmd.Flags().StringVar(&mode, "proxy-mode", mode, "dataplane to show")
	return cmd
}
