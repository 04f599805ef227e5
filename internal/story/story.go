// Package story runs stories: txtar files in which a sentence says what is shown, manifests say what the cluster holds, and
// a script says which packets are sent and what must become of them. Each story has a lab of its own (package lab), with
// the real program running on its nodes.
//
// The script language is that of rsc.io/script; [Commands] lists what we add. A line looks like
//
//	send p1a,ext -> web:80 reaches p1a,p2a as n1
//
// Names stand for addresses of both families, and a line holds for each of them: web is the Service's ClusterIPs, web.lb
// and web.ext its load-balancer and external addresses, n1 the node's own. So one story proves IPv4 and IPv6.
package story

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"fairlead/internal/lab"

	"golang.org/x/tools/txtar"
	"rsc.io/script"
)

// Options say what the stories are told about.
type Options struct {
	Binary string // the fairlead to try
	Mode   string // --proxy-mode
	Legacy bool   // the iptables of the nodes is the legacy one

	// Patience is how long a change may take to reach the kernel before the story fails; 0 is a quarter of a minute.
	Patience time.Duration
}

// stage is where one story plays.
type stage struct {
	options   Options
	config    lab.Config
	world     *lab.World // made by the first command that needs it
	manifests string     // the directory that the agents read
	dir       string     // of the story's files
	agents    map[string]*lab.Agent
	services  map[string]service // what the manifests told so far, by name
	flows     map[string][]*lab.Flow
	loads     map[string][]*lab.Load
	streams   map[string][]*lab.Stream
	counts    map[string]census
	rate      string          // of faults
	failing   map[string]bool // nodes whose agents' writes by netlink fail at that rate
	cmds      map[string]script.Cmd

	flowsSaved   map[string]string
	rulesSaved   map[string][]string
	foreignTable []byte
	noises       map[string]*lab.Noise
}

// Run plays one story and writes what happens to log. It returns an error when the story does not hold.
func Run(ctx context.Context, path string, o Options, log io.Writer) (err error) {
	archive, err := txtar.ParseFile(path)
	if err != nil {
		return fmt.Errorf("read story: %w", err)
	}
	dir, err := os.MkdirTemp("", "fairlead-story-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	st := newStage(o, dir)
	if err := os.MkdirAll(st.manifests, 0o755); err != nil {
		return err
	}
	state, err := script.NewState(ctx, st.dir, append(os.Environ(), "MODE="+o.Mode, "WORK="+st.dir, "CONFIG="+st.configFile()))
	if err != nil {
		return err
	}
	if err := state.ExtractFiles(archive); err != nil {
		return fmt.Errorf("unpack story: %w", err)
	}
	defer func() {
		if err != nil {
			st.autopsy(log)
		}
		err = errors.Join(err, st.close(), state.CloseAndWait(log))
	}()
	engine := &script.Engine{Cmds: st.cmds, Conds: st.conditions()}
	return engine.Execute(state, path, bufio.NewReader(bytes.NewReader(archive.Comment)), log)
}

func newStage(o Options, dir string) *stage {
	if o.Patience == 0 {
		o.Patience = defaultPatience
	}
	st := &stage{
		options: o, config: lab.Common(), dir: filepath.Join(dir, "story"), manifests: filepath.Join(dir, "manifests"),
		agents: map[string]*lab.Agent{}, services: map[string]service{},
		flows: map[string][]*lab.Flow{}, loads: map[string][]*lab.Load{}, streams: map[string][]*lab.Stream{}, counts: map[string]census{}, flowsSaved: map[string]string{}, noises: map[string]*lab.Noise{}, failing: map[string]bool{}, rulesSaved: map[string][]string{},
	}
	os.MkdirAll(st.dir, 0o755) // an error shows at the first file that is unpacked
	st.cmds = st.commands()
	return st
}

// conditions add [mode:NAME] and [legacy] to what script knows.
func (st *stage) conditions() map[string]script.Cond {
	conds := script.DefaultConds()
	conds["mode"] = script.PrefixCondition("the dataplane is <suffix>", func(_ *script.State, suffix string) (bool, error) {
		return suffix == st.options.Mode, nil
	})
	conds["legacy"] = script.BoolCondition("the iptables of the nodes is the legacy one", st.options.Legacy)
	return conds
}

// lab is the story's world, with a server in each pod.
func (st *stage) lab() (*lab.World, error) {
	if st.world != nil {
		return st.world, nil
	}
	if st.options.Legacy {
		bin, err := legacyTools(st.dir)
		if err != nil {
			return nil, err
		}
		st.config.Bin = bin
	}
	w, err := lab.New(st.config)
	if err != nil {
		return nil, err
	}
	st.world = w
	for _, a := range w.Actors() {
		if err := servePod(a); err != nil {
			return nil, err
		}
	}
	return w, st.writeNodes()
}

// legacyTools makes a directory in which the legacy iptables has the plain names, as on a node that has no other.
func legacyTools(dir string) (string, error) {
	path, err := exec.LookPath("iptables-legacy")
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return "", fmt.Errorf("no legacy iptables on this machine: %w", err)
	}
	bin := filepath.Join(dir, "legacy-bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, tool := range []string{"", "-save", "-restore"} {
			if err := os.Symlink(path, filepath.Join(bin, family+tool)); err != nil {
				return "", err
			}
		}
	}
	return bin, nil
}

func (st *stage) close() error {
	if st.world == nil {
		return nil
	}
	return st.world.Close()
}

// running lists the agents that run, by the name of their node.
func (st *stage) running() (agents []*lab.Agent) {
	for _, a := range st.agents {
		if a.Running() {
			agents = append(agents, a)
		}
	}
	slices.SortFunc(agents, func(a, b *lab.Agent) int { return strings.Compare(a.Node.Name, b.Node.Name) })
	return agents
}

// autopsy writes what a person wants to see after a failure.
func (st *stage) autopsy(log io.Writer) {
	for name, a := range st.agents {
		fmt.Fprintf(log, "\n--- end of the log of the agent on %s ---\n%s\n", name, tail(a.Log.String(), 40))
	}
	if st.world == nil {
		return
	}
	for name := range st.agents {
		for _, tool := range st.listings() {
			out, err := st.world.Must(name).Exec(context.Background(), nil, tool[0], tool[1:]...)
			fmt.Fprintf(log, "\n--- %s on %s (%v) ---\n%s\n", strings.Join(tool, " "), name, err, tail(out, 150))
		}
	}
}

// listings print the rules of a node.
func (st *stage) listings() [][]string {
	if st.options.Mode == "nftables" {
		return [][]string{{"nft", "list", "ruleset"}}
	}
	return [][]string{{"iptables-save"}, {"ip6tables-save"}}
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	if len(all) > lines {
		all = append([]string{fmt.Sprintf("… %d lines before", len(all)-lines)}, all[len(all)-lines:]...)
	}
	return strings.Join(all, "\n")
}
