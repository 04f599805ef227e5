package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"fairlead/internal/config"
	"fairlead/internal/kernel"
)

func newCleanup() *cobra.Command {
	o := config.NewOptions()
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove every rule of fairlead and of kube-proxy from this node",
		Long:  "cleanup removes what fairlead and kube-proxy, in any of their modes, have put into the kernel of this node. It needs no API server. Sysctls stay.",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := o.Config()
			if err != nil {
				return err
			}
			return cleanup(cmd.Context(), c)
		},
	}
	offlineFlags(cmd, o)
	return cmd
}

// cleanup goes on after a failure: what can be removed is removed.
func cleanup(ctx context.Context, c *config.Config) error {
	return errors.Join(remove(ctx, c), leftovers())
}

// leftovers removes what kube-proxy's other modes leave: the tables of nftables mode, the sets and the interface of ipvs
// mode. The rules that name the sets are gone by now.
func leftovers() error {
	const link, sets = "kube-ipvs0", "KUBE-"
	_, err := kernel.DestroyIPSets(sets)
	return errors.Join(err, removeTables(), kernel.DeleteLink(link, "dummy"))
}

// removeTables removes the tables of kube-proxy's nftables mode.
func removeTables() error {
	const table = "kube-proxy"
	return errors.Join(kernel.DeleteNFTable(unix.NFPROTO_IPV4, table), kernel.DeleteNFTable(unix.NFPROTO_IPV6, table))
}
