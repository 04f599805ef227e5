package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

// tables are what get can print.
var tables = []string{"frontends", "pools", "services", "endpoints", "checks", "node", "status", "all"}

type getter struct {
	options *config.Options
	output  string
	kernel  bool
	out     io.Writer
}

func newGet() *cobra.Command {
	g := &getter{options: config.NewOptions()}
	cmd := &cobra.Command{
		Use:   "get {" + strings.Join(tables, "|") + "} [NAMESPACE/]SERVICE",
		Short: "Print what the agent of this node serves",
		Long: "get prints the tables of the running agent: the frontends (addresses that are served), the pools (backends behind them), a line for each\n" +
			"Service, the endpoints of one Service with the reason for each, health-check node ports, what is known of the node, and how the agent is\n" +
			"doing. With --kernel it reads the kernel back and needs no agent; with --manifests it resolves files and touches nothing.",
		Args: g.args,
		RunE: func(cmd *cobra.Command, args []string) error {
			g.out = cmd.OutOrStdout()
			return g.run(cmd.Context(), args)
		},
	}
	cmd.Flags().StringVarP(&g.output, "output", "o", "", "table, wide (everything in full) or json (default table)")
	cmd.Flags().BoolVar(&g.kernel, "kernel", false, "read the kernel back, by the dataplane of --proxy-mode; needs no agent")
	offlineFlags(cmd, g.options)
	return cmd
}

func (g *getter) args(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return usage(cmd, errors.New("what should be printed? One of "+strings.Join(tables, ", ")))
	case len(args) > 2:
		return usage(cmd, fmt.Errorf("want a table and at most one Service, got %q", args))
	case !slices.Contains(tables, args[0]):
		return usage(cmd, fmt.Errorf("unknown table %q: want one of %s", args[0], strings.Join(tables, ", ")))
	case !slices.Contains([]string{"", "table", "wide", "json"}, g.output):
		return usage(cmd, fmt.Errorf("unknown output %q: want table, wide or json", g.output))
	case args[0] == "endpoints" && len(args) == 1:
		return usage(cmd, errors.New("endpoints of which Service? Give NAMESPACE/SERVICE"))
	case (args[0] == "node" || args[0] == "status") && len(args) == 2:
		return usage(cmd, fmt.Errorf("%s is not about a Service, got %q", args[0], args[1]))
	case g.kernel && (args[0] == "endpoints" || args[0] == "status"):
		return usage(cmd, fmt.Errorf("the kernel knows nothing of %s", args[0]))
	}
	return nil
}

func (g *getter) run(ctx context.Context, args []string) error {
	table, service := args[0], ""
	if len(args) == 2 {
		service = args[1]
	}
	from, err := g.from(ctx)
	if err != nil {
		return err
	}
	switch table {
	case "status":
		s, err := from.Status(ctx)
		if err != nil {
			return err
		}
		return g.print(viewOfStatus(s), statusLines(s))
	case "endpoints":
		return g.endpoints(ctx, from, service)
	}
	s, err := from.State(ctx, service)
	if err != nil {
		return err
	}
	if service != "" && len(s.Frontends)+len(s.Pools)+len(s.Checks) == 0 {
		return fmt.Errorf("no Service %s is served here", service)
	}
	return g.state(table, s)
}

// asked is who answers: an agent, the kernel, or files.
type asked interface {
	State(ctx context.Context, service string) (*model.State, error)
	Why(ctx context.Context, service string) (control.Choices, error)
	Status(ctx context.Context) (control.Status, error)
}

func (g *getter) from(ctx context.Context) (asked, error) {
	c, err := g.options.Config()
	switch {
	case err != nil:
		return nil, err
	case g.kernel:
		return fromKernel(ctx, c)
	case c.Own.Manifests != "":
		return fromManifests(ctx, c)
	}
	return control.NewClient(control.Path(c.Own.ControlSocket)), nil
}

func (g *getter) endpoints(ctx context.Context, from asked, service string) error {
	why, err := from.Why(ctx, service)
	if err != nil {
		return err
	}
	var rows [][]string
	for _, c := range why {
		rows = append(rows, c.Row())
	}
	text := model.Grid(resolve.ChoiceColumns, rows)
	if len(rows) == 0 {
		text = fmt.Sprintf("no endpoint of %s is known\n", service)
	}
	return g.print(choiceViews(why), text)
}

func (g *getter) state(table string, s *model.State) error {
	switch table {
	case "frontends":
		return g.print(frontendViews(s), or(frontendText(s, g.output == "wide"), "no frontends\n"))
	case "pools":
		return g.print(poolViews(s), or(poolText(s, g.output == "wide"), "no pools\n"))
	case "services":
		return g.print(serviceViews(s), or(serviceText(s), "no Services\n"))
	case "checks":
		return g.print(checkViews(s), or(model.CheckTable(s.SortedChecks()), "no health-check node ports\n"))
	case "node":
		return g.print(viewOfNode(s.Node), strings.Join(s.Node.Lines(), "\n")+"\n")
	}
	return g.print(stateView{frontendViews(s), poolViews(s), checkViews(s), viewOfNode(s.Node)}, s.Table())
}

func (g *getter) print(view any, text string) error {
	if g.output != "json" {
		_, err := io.WriteString(g.out, text)
		return err
	}
	e := json.NewEncoder(g.out)
	e.SetIndent("", "  ")
	return e.Encode(view)
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
