// Package cli is the command line: one file a command. It is also where the rooms of the house are put together
// (agent.go), since nobody else knows all of them.
//
// Everything typed wrong is answered with one line on standard error and exit code 1.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Main runs a command line, the program's name first, and returns the exit code.
func Main(args []string, out, errOut io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the program at once

	name := "fairlead"
	if len(args) > 0 {
		name = filepath.Base(args[0])
		args = args[1:]
	}
	root := newRoot()
	if name == "kube-proxy" { // the DaemonSet's own command line
		args = append([]string{"run"}, args...)
	}
	root.SetArgs(arrows(args))
	root.SetOut(out)
	root.SetErr(errOut)
	if err := root.ExecuteContext(ctx); err != nil {
		for line := range strings.SplitSeq(err.Error(), "\n") {
			fmt.Fprintf(errOut, "%s: %s\n", name, line)
		}
		return 1
	}
	return 0
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "fairlead",
		Short: "The Kubernetes service proxy of a node",
		Long:  "fairlead brings the traffic of Kubernetes Services to the pods behind them. It takes the place of kube-proxy on a node.",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return usage(cmd, fmt.Errorf("unknown command %q%s", args[0], meant(cmd, args[0])))
		},
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return usage(cmd, err)
	})
	root.AddCommand(newRun(), newGet(), newExplain(), newSwitch(), newCleanup(), newVersion(), newDemo())
	return root
}

// usage adds where to read more to a mistake on the command line.
func usage(cmd *cobra.Command, err error) error {
	text := strings.Join(strings.Fields(err.Error()), " ")
	return fmt.Errorf("%s (see '%s --help')", text, cmd.CommandPath())
}

func meant(cmd *cobra.Command, word string) string {
	cmd.SuggestionsMinimumDistance = 2
	if s := cmd.SuggestionsFor(word); len(s) > 0 {
		return ", did you mean " + s[0] + "?"
	}
	return ""
}

// noArgs refuses arguments, as kube-proxy does: empty ones are let pass, since shells and manifests make them.
func noArgs(cmd *cobra.Command, args []string) error {
	for _, a := range args {
		if a != "" {
			return usage(cmd, fmt.Errorf("%s takes no arguments, got %q", cmd.Name(), args))
		}
	}
	return nil
}

// arrows lets the arrow of explain's packet stand alone: it looks like a flag.
func arrows(args []string) []string {
	out := make([]string, len(args))
	for i, a := range args {
		if out[i] = a; a == "->" && args[0] == "explain" {
			out[i] = "to"
		}
	}
	return out
}
