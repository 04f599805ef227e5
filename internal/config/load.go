package config

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	sigsyaml "sigs.k8s.io/yaml"
)

// Group, version and kind of kube-proxy's document.
const (
	ProxyAPIVersion = "kubeproxy.config.k8s.io/v1alpha1"
	ProxyKind       = "KubeProxyConfiguration"
)

// file is what a configuration file holds, before defaults.
type file struct {
	name     string
	proxy    *proxyv1alpha1.KubeProxyConfiguration // nil: the file has no such document
	own      *Fairlead
	where    map[string]string // "file: line N", by the path of the field; those of our own document begin with "fairlead."
	warnings []string
}

// load reads a file. It finds all problems before it gives up; each is one line of the error.
func load(name string) (*file, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	return parse(name, data)
}

func parse(name string, data []byte) (*file, error) {
	f := &file{name: name, where: map[string]string{}}
	var errs []error
	found := false
	for _, doc := range documents(string(data)) {
		some, err := f.document(doc)
		found = found || some
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if !found {
		return nil, fmt.Errorf("%s: holds no configuration: want kind %s (%s) or %s (%s)",
			name, ProxyKind, ProxyAPIVersion, OwnKind, OwnAPIVersion)
	}
	return f, nil
}

// document is one YAML document of a file.
type document struct {
	text string
	line int // how many lines of the file stand before it
}

// documents cuts a stream at its --- lines, as Kubernetes does: a broken document can't hide the next.
func documents(data string) []document {
	var out []document
	cur := document{}
	line := 0
	for l := range strings.Lines(data) {
		if mark := strings.TrimRight(l, " \t\r\n"); mark == "---" || strings.HasPrefix(l, "--- ") {
			out = append(out, cur)
			cur = document{line: line}
		}
		cur.text += l
		line++
	}
	return append(out, cur)
}

// document reads one document, and tells whether there was anything in it.
func (f *file) document(doc document) (bool, error) {
	root, err := tree(doc.text)
	if err != nil {
		return true, f.syntax(doc, err)
	}
	if root == nil {
		return false, nil
	}
	var meta metav1.TypeMeta
	if root.Kind != yaml.MappingNode {
		return true, fmt.Errorf("%s: line %d: want fields (apiVersion: …, kind: …), got %s", f.name, doc.line+root.Line, what(root))
	}
	for i := 0; i+1 < len(root.Content); i += 2 {
		switch root.Content[i].Value {
		case "apiVersion":
			meta.APIVersion = root.Content[i+1].Value
		case "kind":
			meta.Kind = root.Content[i+1].Value
		}
	}
	switch {
	case meta.APIVersion == ProxyAPIVersion && meta.Kind == ProxyKind:
		if f.proxy != nil {
			return true, fmt.Errorf("%s: line %d: a second %s: a file may hold one", f.name, doc.line+root.Line, ProxyKind)
		}
		f.proxy = &proxyv1alpha1.KubeProxyConfiguration{}
		err := f.decode(doc, root, f.proxy, "", true)
		for section, period := range map[string]metav1.Duration{
			"iptables": f.proxy.IPTables.SyncPeriod, "nftables": f.proxy.NFTables.SyncPeriod, "ipvs": f.proxy.IPVS.SyncPeriod,
		} {
			if period.Duration == 0 { // kubeadm writes it so: nobody has chosen a period
				delete(f.where, section+".syncPeriod")
			}
		}
		return true, err
	case meta.APIVersion == OwnAPIVersion && meta.Kind == OwnKind:
		if f.own != nil {
			return true, fmt.Errorf("%s: line %d: a second %s: a file may hold one", f.name, doc.line+root.Line, OwnKind)
		}
		f.own = &Fairlead{}
		return true, f.decode(doc, root, f.own, ownPath, false)
	}
	return true, fmt.Errorf("%s: line %d: unexpected kind %s of apiVersion %s: want %s (%s) or %s (%s)", f.name, doc.line+root.Line,
		clip(meta.Kind), clip(meta.APIVersion), ProxyKind, ProxyAPIVersion, OwnKind, OwnAPIVersion)
}

// ownPath begins the path of each field of our own document.
const ownPath = "fairlead."

// decode fills out. With lenient set, fields that kube-proxy would go on without are warnings.
func (f *file) decode(doc document, root *yaml.Node, out any, prefix string, lenient bool) error {
	d := &decoder{lines: map[string]int{}}
	d.value(root, reflect.ValueOf(out).Elem(), "", 0)
	for path, line := range d.lines {
		f.where[prefix+path] = fmt.Sprintf("%s: line %d", f.name, doc.line+line)
	}
	var errs []error
	for _, p := range d.problems {
		text := fmt.Sprintf("%s: line %d: %s", f.name, doc.line+p.line, p.text)
		if p.strict && lenient {
			f.warnings = append(f.warnings, text+" (ignored, as kube-proxy does)")
			continue
		}
		errs = append(errs, errors.New(text))
	}
	return errors.Join(errs...)
}

// tree parses one document; nil is an empty one. Both parsers must take it: the one that knows lines, and the one that
// Kubernetes uses.
func tree(text string) (root *yaml.Node, err error) {
	defer func() {
		if r := recover(); r != nil { // the YAML libraries have panicked on broken input before
			root, err = nil, fmt.Errorf("yaml: %v", r)
		}
	}()
	var node yaml.Node
	if err := yaml.Unmarshal([]byte(text), &node); err != nil {
		return nil, err
	}
	if node.Kind == 0 || len(node.Content) == 0 || node.Content[0].ShortTag() == "!!null" {
		return nil, nil
	}
	if _, err := sigsyaml.YAMLToJSON([]byte(text)); err != nil {
		return nil, err
	}
	return node.Content[0], nil
}

// syntax turns "yaml: line 3: did not find …" into "file: line 12: bad YAML: did not find …".
func (f *file) syntax(doc document, err error) error {
	text := strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	text = strings.TrimPrefix(text, "yaml: ")
	line := 0
	if n, scanErr := fmt.Sscanf(text, "line %d:", &line); n == 1 && scanErr == nil {
		_, text, _ = strings.Cut(text, ": ")
		if strings.HasPrefix(text, "did not find expected") {
			line++ // the library counts from 0 in the errors of its parser, from 1 in those of its scanner
		}
	}
	text = strings.Join(strings.Fields(text), " ")
	return fmt.Errorf("%s: line %d: bad YAML: %s", f.name, doc.line+max(line, 1), text)
}
