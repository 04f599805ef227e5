package story

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"fairlead/internal/lab"

	"rsc.io/script"
)

// defaultPatience is how long a change of the manifests may take to reach the kernel before a story fails. It takes far
// less; a machine may be busy.
const defaultPatience = 15 * time.Second

// command is one of ours: it may leave text for the builtin stdout to match.
type command struct {
	args, summary string
	run           func(ctx context.Context, args []string) (string, error)
}

// commands are what a story can say beside the builtins of script (stdout, cp, sleep, env, …).
func (st *stage) commands() map[string]script.Cmd {
	cmds := script.DefaultCmds()
	for _, name := range []string{"exec", "cd", "symlink"} {
		delete(cmds, name) // programs run in somebody's namespace, or not at all
	}
	for name, c := range st.own() {
		cmds[name] = script.Command(script.CmdUsage{Summary: c.summary, Args: c.args}, func(s *script.State, args ...string) (script.WaitFunc, error) {
			out, err := c.run(s.Context(), args)
			return func(*script.State) (string, string, error) { return out, "", err }, nil
		})
	}
	return cmds
}

// Commands lists our commands with their arguments and a sentence each, as rows of a Markdown table.
func Commands() string {
	own := newStage(Options{}, os.TempDir()).own()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(own)) {
		args := strings.ReplaceAll(own[name].args, "|", "\\|")
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, code(args), strings.ReplaceAll(own[name].summary, "|", "\\|"))
	}
	return b.String()
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

func (st *stage) own() map[string]command {
	return map[string]command{
		// The cluster.
		"apply":     {"FILE...", "put manifests where the agents read, and wait until they are in force", st.apply},
		"delete":    {"FILE...", "take manifests away, and wait until that is in force", st.delete},
		"endpoints": {"SERVICE [POD[:PORT][,unready|,terminating|,terminated|,zone=Z|,node=N]...]", "say which endpoints a Service has", st.endpoints},
		"services":  {"COUNT PREFIX [POD...]", "make many Services PREFIX0, PREFIX1, … on port 80", st.manyServices},
		"churn":     {"COUNT SERVICE POD...", "change the endpoints of a Service many times: none, these, none, …", st.churn},
		"waves":     {"TIMES COUNT PREFIX [POD...]", "make and remove many Services, several times", st.waves},
		"settle":    {"", "wait until the agents have taken in all manifests", st.settle},

		// The world.
		"world":  {"[bridge]", "choose another world; the first command, if any", st.chooseWorld},
		"pod":    {"NAME NODE", "make one more pod", st.addPod},
		"serve":  {"ACTOR tcp|udp ADDR:PORT...", "open servers", st.serve},
		"die":    {"ACTOR", "close all servers of an actor", st.die},
		"addr":   {"ACTOR add|del PREFIX [LINK]", "change the addresses of an actor", st.addr},
		"route":  {"ACTOR PREFIX via ADDR", "add a route", st.route},
		"sysctl": {"ACTOR KEY VALUE", "set a parameter of an actor's namespace", st.sysctl},
		"in":     {"[-stdin FILE] ACTOR PROGRAM [ARG...]", "run a program in an actor's namespace", st.in},

		// Packets.
		"send":   {"[-4|-6] [-src A] [-sport P] [-wait D] FROM[,FROM] -> TO[,TO] OUTCOME", "send, and say what must become of it: reaches A,B [as client|NAME] [in D] | refused | reset | unreachable | silence", st.send},
		"spread": {"[-n 1000] FROM -> TO over A,B [within PERCENT]", "connections are spread evenly", st.spread},
		"sticky": {"[-n 20] [-pause D] FROM -> TO [on A]", "all connections meet one backend", st.sticky},
		"wander": {"[-n 30] -pause D FROM -> TO", "with a pause between them, connections meet more than one backend", st.wander},
		"flow":   {"open NAME [-count N] FROM -> TO [A,B] | check NAME [A,B] | dead NAME | close NAME", "connections that stay open", st.flow},
		"load":   {"start NAME [-rate 200] FROM -> TO [OUTCOME] | stop NAME [AT-LEAST] [gap D]", "many connections, none of which may fail; or only for so long at a time", st.load},
		"stream": {"start NAME [-every 100ms] [-sport P] FROM -> TO | check NAME OUTCOME | stop NAME", "datagrams from one socket, all the time", st.stream},
		"idle":   {"ACTOR D", "the actor's servers get nothing for a while", st.idle},

		// The agent.
		"start":     {"[NODE] [-- ARG...]", "start the agent, with arguments of its own", st.start},
		"kill":      {"[NODE]", "kill -9 the agent", st.kill},
		"freeze":    {"[NODE]", "make the agent stand still", st.whole((*lab.Agent).Freeze)},
		"thaw":      {"[NODE]", "let the agent go on after freeze", st.whole((*lab.Agent).Thaw)},
		"term":      {"[NODE] [PATIENCE]", "ask the agent to end (SIGTERM)", st.term},
		"switch":    {"[NODE] MODE", "ask the running agent to serve in another mode", st.ask("switch")},
		"configmap": {"FILE", "put a configuration file where $CONFIG is, as the kubelet does with a ConfigMap", st.configmap},
		"fault":     {"RATE | once [NODE] [before|after]", "from the next start on, that share of the agent's writes into the kernel fails; or its next one", st.fault},
		"noise":     {"start|stop NODE", "another program writes to the node's firewall all the time", st.noise},
		"fairlead":  {"NODE COMMAND [ARG...]", "run another command of the agent's program on a node", st.fairlead},
		"get":       {"[NODE] TABLE [ARG...]", "ask the running agent for a table", st.ask("get")},
		"explain":   {"[NODE] PACKET", "ask the running agent what will happen to a packet, and why", st.ask("explain")},
		"http":      {"FROM -> TO PATH STATUS", "ask a web server", st.http},
		"metrics":   {"[NODE]", "print the agent's metrics", st.metrics},
		"metric":    {"[NODE] NAME[{LABELS}] ==|>=|<= VALUE", "compare one metric, summed over the labels not named", st.metric},
		"health":    {"NODE PATH STATUS", "ask the agent how it is", st.health},
		"log":       {"NODE [REGEXP]", "print the agent's log; fail if it does not match", st.log},
		"census":    {"save|same NODE NAME", "count the agent's descriptors and the node's rules; compare them with an earlier count", st.census},

		"rules":     {"save|same NODE NAME", "whether the rules of a node, everybody's, are still the same ones", st.rules},
		"pluck":     {"NODE ip|ip6 TABLE CHAIN", "delete the first rule of a chain of nf_tables", st.pluck},
		"foreign":   {"make|same NODE", "an nf_tables table of somebody else, in which nobody finds his way", st.foreign},
		"tracked":   {"save|same NAME NODE TEXT...", "whether the flows that a node tracks are still the same ones", st.tracked},
		"conntrack": {"NODE [TEXT...]", "print the flows the node tracks that contain all the texts", st.conntrack},
		"within":    {"DURATION COMMAND...", "repeat a command until it holds", st.within},
	}
}

// within repeats one of our commands until it succeeds or the time is over.
func (st *stage) within(ctx context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	limit, err := time.ParseDuration(args[0])
	if err != nil {
		return "", err
	}
	not := args[1] == "!"
	if not {
		args = args[1:]
	}
	c, ok := st.own()[args[1]]
	if !ok {
		return "", fmt.Errorf("within: unknown command %q", args[1])
	}
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		out, err := c.run(ctx, args[2:])
		if (err == nil) != not {
			return out, nil
		}
		if time.Now().After(end) {
			if not {
				err = fmt.Errorf("it still succeeds")
			}
			return out, fmt.Errorf("not within %s: %w", limit, err)
		}
	}
}

// settle waits for the agents that run.
func (st *stage) settle(ctx context.Context, _ []string) (string, error) {
	agents := st.running()
	if len(agents) == 0 {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, st.options.Patience)
	defer cancel()
	return "", st.world.Settle(ctx, st.manifests, agents...)
}

func (st *stage) apply(ctx context.Context, files []string) (string, error) {
	if len(files) == 0 {
		return "", script.ErrUsage
	}
	if _, err := st.lab(); err != nil {
		return "", err
	}
	for _, f := range files {
		if err := st.put(f); err != nil {
			return "", err
		}
	}
	return st.settle(ctx, nil)
}

// goneFor is how long a file must be gone until every agent believes it: some editors take it away for a moment.
const goneFor = 100 * time.Millisecond

func (st *stage) delete(ctx context.Context, files []string) (string, error) {
	for _, f := range files {
		if err := st.take(f); err != nil {
			return "", err
		}
	}
	if _, err := st.settle(ctx, nil); err != nil {
		return "", err
	}
	time.Sleep(goneFor)
	return st.settle(ctx, nil)
}

func (st *stage) endpoints(ctx context.Context, args []string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	if _, err := st.lab(); err != nil {
		return "", err
	}
	s, ok := st.services[args[0]]
	if !ok {
		return "", fmt.Errorf("the story has no Service %q yet", args[0])
	}
	var list []endpoint
	for _, word := range args[1:] {
		e, err := st.parseEndpoint(word)
		if err != nil {
			return "", err
		}
		list = append(list, e)
	}
	if err := st.writeSlices(s, list); err != nil {
		return "", err
	}
	return st.settle(ctx, nil)
}

func (st *stage) chooseWorld(_ context.Context, args []string) (string, error) {
	if st.world != nil {
		return "", fmt.Errorf("the world is there already")
	}
	for _, a := range args {
		switch a {
		case "bridge":
			st.config.Bridge = true
		default:
			return "", script.ErrUsage
		}
	}
	return "", nil
}

func (st *stage) addPod(_ context.Context, args []string) (string, error) {
	if len(args) != 2 {
		return "", script.ErrUsage
	}
	w, err := st.lab()
	if err != nil {
		return "", err
	}
	a, err := w.AddPod(args[0], args[1])
	if err != nil {
		return "", err
	}
	return "", servePod(a)
}

// actor finds one for a command, making the world if it is not there.
func (st *stage) actor(name string) (*lab.Actor, error) {
	w, err := st.lab()
	if err != nil {
		return nil, err
	}
	return w.Actor(name)
}

func (st *stage) serve(_ context.Context, args []string) (string, error) {
	if len(args) < 3 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	for _, at := range args[2:] {
		ap, err := netip.ParseAddrPort(at)
		if err != nil {
			return "", err
		}
		if _, err := a.Serve(args[1], ap); err != nil {
			return "", err
		}
	}
	return "", nil
}

func (st *stage) die(_ context.Context, args []string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err == nil {
		a.StopServing()
	}
	return "", err
}

func (st *stage) addr(_ context.Context, args []string) (string, error) {
	if len(args) < 3 || len(args) > 4 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	p, err := netip.ParsePrefix(args[2])
	if err != nil {
		return "", err
	}
	link := "eth0"
	if len(args) == 4 {
		link = args[3]
	}
	switch args[1] {
	case "add":
		return "", a.AddAddr(link, p)
	case "del":
		return "", a.DelAddr(link, p)
	}
	return "", script.ErrUsage
}

func (st *stage) route(_ context.Context, args []string) (string, error) {
	if len(args) != 4 || args[2] != "via" {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	dst, err := netip.ParsePrefix(args[1])
	if err != nil {
		return "", err
	}
	via, err := netip.ParseAddr(args[3])
	if err != nil {
		return "", err
	}
	return "", a.AddRoute(dst, via, "eth0")
}

func (st *stage) sysctl(_ context.Context, args []string) (string, error) {
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	return "", a.Sysctl(args[1], args[2])
}

func (st *stage) in(ctx context.Context, args []string) (string, error) {
	var stdin *os.File
	if len(args) > 2 && args[0] == "-stdin" {
		f, err := os.Open(filepath.Join(st.dir, args[1]))
		if err != nil {
			return "", err
		}
		defer f.Close()
		stdin, args = f, args[2:]
	}
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	if stdin == nil {
		return a.Exec(ctx, nil, args[1], args[2:]...)
	}
	return a.Exec(ctx, stdin, args[1], args[2:]...)
}

func (st *stage) conntrack(_ context.Context, args []string) (string, error) {
	if len(args) == 0 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	entries, err := a.Conntrack()
	if err != nil {
		return "", err
	}
	var out strings.Builder
next:
	for _, e := range entries {
		for _, text := range args[1:] {
			if !strings.Contains(e.String(), text) {
				continue next
			}
		}
		fmt.Fprintln(&out, e)
	}
	if out.Len() == 0 {
		return "", fmt.Errorf("%s tracks no such flow", args[0])
	}
	return out.String(), nil
}

func (st *stage) log(_ context.Context, args []string) (string, error) {
	if len(args) < 1 || len(args) > 2 {
		return "", script.ErrUsage
	}
	a, ok := st.agents[args[0]]
	if !ok {
		return "", fmt.Errorf("no agent was started on %s", args[0])
	}
	text := a.Log.String()
	if len(args) == 2 {
		re, err := regexp.Compile("(?m)" + args[1])
		if err != nil {
			return "", err
		}
		if !re.MatchString(text) {
			return tail(text, 20), fmt.Errorf("the log of the agent on %s does not match %#q", args[0], args[1])
		}
	}
	return text, nil
}
