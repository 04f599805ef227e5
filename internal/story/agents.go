package story

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"fairlead/internal/lab"

	"rsc.io/script"
	"sigs.k8s.io/yaml"
)

// node takes the name of a node from the front of the arguments; without one it is n1.
func (st *stage) node(args []string) (string, []string) {
	if len(args) > 0 {
		for _, n := range st.config.Nodes {
			if args[0] == n {
				return n, args[1:]
			}
		}
	}
	return st.config.Nodes[0], args
}

func (st *stage) agent(node string) (*lab.Agent, error) {
	if a, ok := st.agents[node]; ok {
		return a, nil
	}
	return nil, fmt.Errorf("no agent was started on %s", node)
}

// start runs the agent and waits until all manifests are in force. Started again, it gets the same arguments.
func (st *stage) start(ctx context.Context, args []string) (string, error) {
	node, args := st.node(args)
	w, err := st.lab()
	if err != nil {
		return "", err
	}
	a, ok := st.agents[node]
	if !ok {
		a, err = w.NewAgent(node, lab.AgentConfig{Binary: st.options.Binary, Mode: st.options.Mode, Manifests: st.manifests})
		if err != nil {
			return "", err
		}
		st.agents[node] = a
	}
	a.Config.Env = st.faultEnv()
	if len(args) > 0 {
		if args[0] != "--" {
			return "", script.ErrUsage
		}
		a.Config.Args = args[1:]
	}
	if err := a.Start(ctx); err != nil {
		return "", err
	}
	st.failOften(a)
	return st.settle(ctx, nil)
}

func (st *stage) kill(_ context.Context, args []string) (string, error) {
	node, _ := st.node(args)
	a, err := st.agent(node)
	if err != nil {
		return "", err
	}
	if !a.Running() {
		return "", fmt.Errorf("the agent on %s is not running\n%s", node, tail(a.Log.String(), 40))
	}
	a.Kill()
	return "", nil
}

// whole makes a command that does something to an agent as a whole.
func (st *stage) whole(do func(*lab.Agent) error) func(context.Context, []string) (string, error) {
	return func(_ context.Context, args []string) (string, error) {
		node, args := st.node(args)
		if len(args) > 0 {
			return "", script.ErrUsage
		}
		a, err := st.agent(node)
		if err != nil {
			return "", err
		}
		return "", do(a)
	}
}

func (st *stage) term(_ context.Context, args []string) (string, error) {
	node, args := st.node(args)
	patience := 10 * time.Second
	if len(args) == 1 {
		d, err := time.ParseDuration(args[0])
		if err != nil {
			return "", err
		}
		patience = d
	}
	a, err := st.agent(node)
	if err != nil {
		return "", err
	}
	took, err := a.Stop(patience)
	return fmt.Sprintf("ended after %s\n", took.Round(time.Millisecond)), err
}

func (st *stage) fairlead(ctx context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	node, args := st.node(args)
	a, err := st.actor(node)
	if err != nil {
		return "", err
	}
	return a.Fairlead(ctx, st.options.Mode, st.options.Binary, args...)
}

// ask makes a command that asks a running agent.
func (st *stage) ask(command string) func(context.Context, []string) (string, error) {
	return func(ctx context.Context, args []string) (string, error) {
		node, args := st.node(args)
		a, err := st.agent(node)
		if err != nil {
			return "", err
		}
		return a.Ask(ctx, append([]string{command}, args...)...)
	}
}

// http asks a web server at each address of the target.
func (st *stage) http(ctx context.Context, args []string) (string, error) {
	if len(args) != 5 {
		return "", script.ErrUsage
	}
	l, err := st.parseLine(args[:3])
	if err != nil {
		return "", err
	}
	status, err := strconv.Atoi(args[4])
	if err != nil {
		return "", err
	}
	var out strings.Builder
	var errs []error
	for _, r := range l.routes {
		got, body, err := r.from.Get(ctx, "http://"+r.call.Dst.String()+args[3])
		fmt.Fprintf(&out, "%s: %d\n%s\n", r.name, got, body)
		if err == nil && got != status {
			err = fmt.Errorf("%s: status %d, want %d: %s", r.name, got, status, body)
		}
		errs = append(errs, err)
	}
	return out.String(), errors.Join(errs...)
}

func (st *stage) health(ctx context.Context, args []string) (string, error) {
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	a, err := st.actor(args[0])
	if err != nil {
		return "", err
	}
	got, body, err := a.Get(ctx, lab.Health+args[1])
	if err == nil && strconv.Itoa(got) != args[2] {
		err = fmt.Errorf("%s%s: status %d, want %s", args[0], args[1], got, args[2])
	}
	return body, err
}

func (st *stage) metrics(ctx context.Context, args []string) (string, error) {
	node, _ := st.node(args)
	a, err := st.actor(node)
	if err != nil {
		return "", err
	}
	status, body, err := a.Get(ctx, lab.Metrics+"/metrics")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("metrics of %s: status %d", node, status)
	}
	return body, err
}

// metric compares the sum of all samples that have the name and every label given.
func (st *stage) metric(ctx context.Context, args []string) (string, error) {
	node, args := st.node(args)
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	text, err := st.metrics(ctx, []string{node})
	if err != nil {
		return "", err
	}
	value, err := strconv.ParseFloat(args[2], 64)
	if err != nil {
		return "", err
	}
	sum, found := sumSamples(text, args[0])
	if found == 0 {
		return "", fmt.Errorf("no sample of %s", args[0])
	}
	ok := map[string]bool{"==": sum == value, ">=": sum >= value, "<=": sum <= value}[args[1]]
	if !ok {
		return "", fmt.Errorf("%s is %g, want it %s %s", args[0], sum, args[1], args[2])
	}
	return fmt.Sprintln(sum), nil
}

func sumSamples(text, selector string) (sum float64, found int) {
	name, labels, _ := strings.Cut(strings.TrimSuffix(selector, "}"), "{")
next:
	for _, l := range strings.Split(text, "\n") {
		sample, value, ok := cutLast(l, " ")
		if !ok || strings.HasPrefix(l, "#") {
			continue
		}
		n, have, _ := strings.Cut(strings.TrimSuffix(sample, "}"), "{")
		if n != name {
			continue
		}
		for _, want := range strings.Split(labels, ",") {
			if !strings.Contains(have, want) {
				continue next
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		sum, found = sum+v, found+1
	}
	return sum, found
}

func cutLast(s, sep string) (string, string, bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// census is what must not grow with churn.
type census struct{ files, rules int }

func (st *stage) census(ctx context.Context, args []string) (string, error) {
	if len(args) != 3 {
		return "", script.ErrUsage
	}
	now, err := st.count(ctx, args[1])
	if err != nil {
		return "", err
	}
	out := fmt.Sprintf("%+v\n", now)
	switch args[0] {
	case "save":
		st.counts[args[2]] = now
		return out, nil
	case "same":
		before, ok := st.counts[args[2]]
		if !ok {
			return out, fmt.Errorf("no census %q was saved", args[2])
		}
		// A descriptor or two may be a connection that ends just now.
		if now.rules != before.rules || now.files > before.files+2 {
			return out, fmt.Errorf("%+v, before %+v", now, before)
		}
		return out, nil
	}
	return out, script.ErrUsage
}

func (st *stage) count(ctx context.Context, node string) (c census, err error) {
	a, err := st.agent(node)
	if err != nil {
		return c, err
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.Pid()))
	if err != nil {
		return c, err
	}
	c.files = len(fds)
	// The barrier's own rules carry its port, never a different number of them.
	rules, err := st.listRules(ctx, node)
	c.rules = len(rules)
	return c, err
}

// manyServices writes COUNT Services in one file, with ClusterIPs of both families in 10.96.128.0/17.
func (st *stage) manyServices(ctx context.Context, args []string) (string, error) {
	if len(args) < 2 {
		return "", script.ErrUsage
	}
	if _, err := st.lab(); err != nil {
		return "", err
	}
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return "", err
	}
	var list []endpoint
	for _, word := range args[2:] {
		e, err := st.parseEndpoint(word)
		if err != nil {
			return "", err
		}
		list = append(list, e)
	}
	out := *bytes.NewBufferString("# Services of the story.\n") // an empty file might be one that is just being written
	for i := range n {
		if err := st.oneOfMany(&out, fmt.Sprintf("%s%d", args[1], i), i, list); err != nil {
			return "", err
		}
	}
	if err := lab.WriteManifest(st.manifests, "many-"+args[1]+".yaml", out.Bytes()); err != nil {
		return "", err
	}
	return st.settle(ctx, nil)
}

func (st *stage) oneOfMany(out *bytes.Buffer, name string, i int, list []endpoint) error {
	v4 := netip.AddrFrom4([4]byte{10, 96, byte(128 + i>>8), byte(i)})
	v6 := fmt.Sprintf("fd00:96::8%03x", i)
	var s service
	s.Kind, s.Metadata.Name, s.Metadata.Namespace = "Service", name, "default"
	s.Spec.ClusterIPs = []string{v4.String(), v6}
	s.Spec.Ports = []port{{Port: 80, TargetPort: 8080.0}}
	st.services[name] = s
	doc, err := yaml.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]string{"name": name, "namespace": "default"},
		"spec": map[string]any{"clusterIP": v4.String(), "clusterIPs": s.Spec.ClusterIPs, "ipFamilies": []string{"IPv4", "IPv6"},
			"ports": []map[string]any{{"port": 80, "targetPort": 8080, "protocol": "TCP"}}},
	})
	if err != nil {
		return err
	}
	out.WriteString("---\n")
	out.Write(doc)
	for _, family := range []bool{false, true} {
		doc, err := slice(s, 0, list, family)
		if err != nil {
			return err
		}
		out.WriteString("---\n")
		out.Write(doc)
	}
	return nil
}
