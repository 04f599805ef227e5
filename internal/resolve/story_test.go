package resolve

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"fairlead/internal/model"
)

var update = flag.Bool("update", false, "write what the stories print into their files; read the diff before it is kept")

// TestMain lets random histories be longer than rapid's default, unless somebody chose.
func TestMain(m *testing.M) {
	chosen := false
	flag.Parse()
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "rapid.checks" })
	if !chosen {
		if err := flag.Set("rapid.checks", "400"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// A story is a txtar file: a sentence that says what is shown, then sections in the order of events. What happens:
//
//	config   settings (see settings), YAML
//	apply    Kubernetes manifests
//	delete   lines like "Service ns/name", "EndpointSlice ns/name", "Node name", "ServiceCIDR name"
//
// What is seen after it, rewritten by -update: frontends, pools, checks, node, why, notices (new ones), delta (since the
// last section that shows it), and packets: lines like "10.0.0.5 -> 10.96.0.1:80/tcp", completed with what the packet meets.
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(bytes.TrimSpace(a.Comment)) == 0 {
				t.Error("the story does not say what it shows")
			}
			tellStory(t, a, false, *update)
			if *update {
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			tellStory(t, a, true, false) // the order of objects makes no difference
		})
	}
}

// settings are what the config section holds.
type settings struct {
	Node      string   `json:"node"`
	Families  []string `json:"families"` // default: v4
	Addresses []string `json:"addresses"`
	Bind      string   `json:"bind"`
	Detect    struct {
		Mode      string   `json:"mode"`
		CIDRs     []string `json:"cidrs"`
		Interface string   `json:"interface"`
	} `json:"detect"`
	MasqueradeAll      bool     `json:"masqueradeAll"`
	NodePortAddresses  []string `json:"nodePortAddresses"`
	LocalhostNodePorts bool     `json:"localhostNodePorts"`
	LocalhostRelay     bool     `json:"localhostRelay"`
	Standalone         bool     `json:"standalone"`
	NoExternalIPs      bool     `json:"noExternalIPs"`
	AllowNodeAddresses bool     `json:"allowNodeAddresses"`
}

// narrator tells a story to a resolver and looks at what comes of it.
type narrator struct {
	t       *testing.T
	r       *Resolver
	config  Config
	in      Input
	state   *model.State
	delta   model.Delta
	reverse bool
}

func tellStory(t *testing.T, a *txtar.Archive, reverse, rewrite bool) {
	t.Helper()
	n := &narrator{t: t, state: model.NewState(), reverse: reverse}
	n.in = Input{map[types.NamespacedName]*corev1.Service{}, map[types.NamespacedName]*discoveryv1.EndpointSlice{}, map[string]*corev1.Node{}, nil, map[string]*networkingv1.ServiceCIDR{}}
	n.r = New(Config{})
	n.delta = n.r.Delta() // full and empty: stories begin after the start
	n.state.Apply(n.delta)
	n.delta = model.Delta{}
	for i, f := range a.Files {
		if n.happens(f) {
			n.look()
			continue
		}
		got := n.show(f)
		if rewrite {
			a.Files[i].Data = []byte(got)
		} else if diff := cmp.Diff(strings.Split(string(f.Data), "\n"), strings.Split(got, "\n")); diff != "" {
			t.Errorf("section %d, %s (-want +got):\n%s", i+1, f.Name, diff)
		}
	}
}

func (n *narrator) happens(f txtar.File) bool {
	switch f.Name {
	case "config":
		n.configure(f.Data)
	case "apply":
		n.apply(f.Data)
	case "delete":
		for _, line := range lines(f.Data) {
			n.remove(line)
		}
	default:
		return false
	}
	return true
}

// look takes a delta and holds the state against the twin.
func (n *narrator) look() {
	d := n.r.Delta()
	n.state.Apply(d)
	n.delta = n.delta.Then(d)
	if want := All(n.config, n.in); !reflect.DeepEqual(n.state, want) {
		n.t.Fatalf("incremental:\n%s\nfrom scratch:\n%s", n.state.Table(), want.Table())
	}
}

func (n *narrator) configure(data []byte) {
	var s settings
	if err := yaml.UnmarshalStrict(data, &s); err != nil {
		n.t.Fatal(err)
	}
	c := Config{NodeName: s.Node, MasqueradeAll: s.MasqueradeAll, NodePortAddresses: s.NodePortAddresses, LocalhostNodePorts: s.LocalhostNodePorts,
		LocalhostRelay: s.LocalhostRelay, Standalone: s.Standalone,
		AllowExternalIPs: !s.NoExternalIPs, AllowNodeAddresses: s.AllowNodeAddresses}
	c.IPv4 = len(s.Families) == 0 || slices.Contains(s.Families, "v4")
	c.IPv6 = slices.Contains(s.Families, "v6")
	c.Detect = Detect{Mode: DetectMode(s.Detect.Mode), Interface: s.Detect.Interface}
	for _, text := range s.Detect.CIDRs {
		c.Detect.CIDRs = append(c.Detect.CIDRs, netip.MustParsePrefix(text))
	}
	if s.Bind != "" {
		c.BindAddr = netip.MustParseAddr(s.Bind)
	}
	n.in.Addrs = nil
	for _, text := range s.Addresses {
		n.in.Addrs = append(n.in.Addrs, netip.MustParseAddr(text))
	}
	n.config = c
	n.r.SetConfig(c)
	n.r.Addrs(n.in.Addrs)
}

func (n *narrator) apply(data []byte) {
	docs := strings.Split("\n"+string(data), "\n---")
	if n.reverse {
		slices.Reverse(docs)
	}
	for _, doc := range docs {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(doc), &meta); err != nil {
			n.t.Fatalf("%v in:\n%s", err, doc)
		}
		var err error
		switch meta.Kind {
		case "":
		case "Service":
			var s corev1.Service
			err = yaml.UnmarshalStrict([]byte(doc), &s)
			nn := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
			n.in.Services[nn] = &s
			n.r.Service(nn, &s)
		case "EndpointSlice":
			var s discoveryv1.EndpointSlice
			err = yaml.UnmarshalStrict([]byte(doc), &s)
			nn := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
			n.in.Slices[nn] = &s
			n.r.Slice(nn, &s)
		case "Node":
			var node corev1.Node
			err = yaml.UnmarshalStrict([]byte(doc), &node)
			n.in.Nodes[node.Name] = &node
			n.r.Node(node.Name, &node)
		case "ServiceCIDR":
			var c networkingv1.ServiceCIDR
			err = yaml.UnmarshalStrict([]byte(doc), &c)
			n.in.CIDRs[c.Name] = &c
			n.r.ServiceCIDR(c.Name, &c)
		default:
			err = fmt.Errorf("unknown kind %q", meta.Kind)
		}
		if err != nil {
			n.t.Fatalf("%v in:\n%s", err, doc)
		}
	}
}

func (n *narrator) remove(line string) {
	kind, name, _ := strings.Cut(line, " ")
	ns, short, _ := strings.Cut(name, "/")
	nn := types.NamespacedName{Namespace: ns, Name: short}
	switch kind {
	case "Service":
		delete(n.in.Services, nn)
		n.r.Service(nn, nil)
	case "EndpointSlice":
		delete(n.in.Slices, nn)
		n.r.Slice(nn, nil)
	case "Node":
		if name != n.config.NodeName {
			delete(n.in.Nodes, name)
		}
		n.r.Node(name, nil)
	case "ServiceCIDR":
		delete(n.in.CIDRs, name)
		n.r.ServiceCIDR(name, nil)
	default:
		n.t.Fatalf("delete: %q", line)
	}
}

func (n *narrator) show(f txtar.File) string {
	switch f.Name {
	case "frontends":
		return orNone(model.FrontendTable(n.state.SortedFrontends()))
	case "pools":
		return orNone(model.PoolTable(n.state.SortedPools()))
	case "checks":
		return orNone(model.CheckTable(n.state.SortedChecks()))
	case "node":
		return strings.Join(n.state.Node.Lines(), "\n") + "\n"
	case "why":
		return orNone(n.why())
	case "notices":
		var out strings.Builder
		for _, note := range n.r.Notices() {
			fmt.Fprintf(&out, "%s %s: %s\n", first(note.Service, "node"), note.Reason, note.Message)
		}
		return orNone(out.String())
	case "delta":
		d := n.delta
		n.delta = model.Delta{}
		return orNone(strings.Join(append(d.Lines(), ""), "\n"))
	case "packets":
		return n.packets(f.Data)
	}
	n.t.Fatalf("unknown section %q", f.Name)
	return ""
}

func (n *narrator) why() string {
	var names []types.NamespacedName
	for nn := range n.in.Services {
		names = append(names, nn)
	}
	slices.SortFunc(names, func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) })
	var rows [][]string
	for _, nn := range names {
		for _, c := range n.r.Why(nn) {
			rows = append(rows, append([]string{nn.String()}, c.Row()...))
		}
	}
	if rows == nil {
		return ""
	}
	return model.Grid(append([]string{"SERVICE"}, ChoiceColumns...), rows)
}

func (n *narrator) packets(data []byte) string {
	var out strings.Builder
	width := 0
	for line := range strings.Lines(string(data)) {
		width = max(width, len(question(line)))
	}
	for line := range strings.Lines(string(data)) {
		q := question(line)
		if q == "" || strings.HasPrefix(q, "#") {
			fmt.Fprintln(&out, strings.TrimRight(line, " \n"))
			continue
		}
		fmt.Fprintf(&out, "%-*s = %s\n", width, q, n.answer(q))
	}
	return out.String()
}

func question(line string) string {
	if strings.HasPrefix(line, "#") {
		return ""
	}
	q, _, _ := strings.Cut(line, " = ")
	return strings.TrimSpace(q)
}

// answer decides a packet such as "10.0.0.5 -> 10.96.0.1:80/tcp", which may end in "via INTERFACE". Without it, what has a
// source on the node leaves the node, and what has not comes in by eth0.
func (n *narrator) answer(q string) string {
	var p model.Packet
	q, via, _ := strings.Cut(q, " via ")
	src, dst, _ := strings.Cut(q, " -> ")
	to, proto, _ := strings.Cut(dst, "/")
	addr, err := netip.ParseAddr(src)
	if err != nil {
		n.t.Fatal(err)
	}
	p.Src = netip.AddrPortFrom(addr, 40000)
	if p.Dst, err = netip.ParseAddrPort(to); err != nil {
		n.t.Fatal(err)
	}
	number, ok := protocol(corev1.Protocol(strings.ToUpper(proto)))
	if !ok {
		n.t.Fatalf("packet %q: protocol %q", q, proto)
	}
	p.Proto, p.Interface = number, via
	if via == "" && !slices.Contains(n.state.Node.Addrs, addr) && !addr.IsLoopback() {
		p.Interface = "eth0"
	}
	d := n.state.Decide(p)
	out := []string{d.Origin.String(), d.Verdict.String()}
	if d.SNAT {
		out = append(out, "snat")
	}
	for _, b := range d.Backends {
		out = append(out, b.String())
	}
	return strings.Join(out, " ")
}

func first(a, b string) string {
	if a == "" {
		return b
	}
	return a
}

func orNone(s string) string {
	if s == "" {
		return "none\n"
	}
	return s
}

func lines(data []byte) []string {
	return strings.FieldsFunc(string(data), func(r rune) bool { return r == '\n' })
}
