package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead/internal/config"
	"fairlead/internal/control"
)

func newSwitch() *cobra.Command {
	o := config.NewOptions()
	cmd := &cobra.Command{
		Use:   "switch MODE",
		Short: "Move the running agent of this node to another mode",
		Long: "switch hands the Services of this node over to another dataplane, while they are used: the new one holds everything before the old one\n" +
			"lets go, and no connection is cut. It holds until the agent restarts, or until the mode in its configuration file changes: write it there\n" +
			"too, if it should stay (an agent follows its file).",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usage(cmd, errors.New("to which mode? One of "+strings.Join(config.Modes, ", ")))
			}
			if !slices.Contains(config.Modes, args[0]) {
				return usage(cmd, switchable(args[0]))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := o.Config()
			if err != nil {
				return err
			}
			s, err := control.NewClient(control.Path(c.Own.ControlSocket)).Switch(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), s)
			return err
		},
	}
	offlineFlags(cmd, o)
	return cmd
}
