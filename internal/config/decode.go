package config

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	sigsyaml "sigs.k8s.io/yaml"
)

// problem is one thing that is wrong at one place.
type problem struct {
	line   int
	text   string
	strict bool // an unknown or repeated field: kube-proxy goes on without it
}

// decoder fills a struct from a YAML tree and finds every problem in it, with its line. The stock decoders stop at the
// first one, or do not know lines once YAML has become JSON.
type decoder struct {
	problems []problem
	lines    map[string]int // by the path of the field, "iptables.minSyncPeriod": where it is set
}

// maxDepth bounds the nesting that is followed. Our own types need six levels.
const maxDepth = 20

func (d *decoder) fail(n *yaml.Node, format string, args ...any) {
	d.problems = append(d.problems, problem{line: n.Line, text: fmt.Sprintf(format, args...)})
}

func (d *decoder) value(n *yaml.Node, v reflect.Value, path string, depth int) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if depth > maxDepth {
		d.fail(n, "field %s: nested too deeply", path)
		return
	}
	if null(n) {
		return
	}
	if v.Kind() == reflect.Pointer {
		fresh := reflect.New(v.Type().Elem())
		d.value(n, fresh.Elem(), path, depth+1)
		v.Set(fresh)
		return
	}
	_, own := v.Addr().Interface().(json.Unmarshaler)
	switch {
	case own:
		d.scalar(n, v, path)
	case v.Kind() == reflect.Struct:
		d.object(n, v, path, depth)
	case v.Kind() == reflect.Map:
		d.mapping(n, v, path, depth)
	case v.Kind() == reflect.Slice:
		d.list(n, v, path, depth)
	default:
		d.scalar(n, v, path)
	}
}

func null(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

func (d *decoder) object(n *yaml.Node, v reflect.Value, path string, depth int) {
	if n.Kind != yaml.MappingNode {
		d.fail(n, "field %s: want fields (name: value), got %s", path, what(n))
		return
	}
	fields := map[string]reflect.Value{}
	addFields(v, fields)
	d.merged(n, v, path, depth)
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		name := join(path, key.Value)
		f, known := fields[key.Value]
		switch {
		case key.ShortTag() == "!!merge":
			continue
		case !known:
			d.problems = append(d.problems, problem{key.Line, unknown(name, key.Value, fields), true})
			continue
		case seen[key.Value]:
			d.problems = append(d.problems, problem{key.Line, fmt.Sprintf("field %s: set twice, the last one counts", name), true})
			f.SetZero()
		}
		seen[key.Value] = true
		if !null(val) { // a field set to nothing is as if it were not there
			d.lines[name] = key.Line
		}
		d.value(val, f, name, depth+1)
	}
}

// merged takes what YAML's merge key (<<) brings in, before the fields that stand there themselves.
func (d *decoder) merged(n *yaml.Node, v reflect.Value, path string, depth int) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].ShortTag() != "!!merge" {
			continue
		}
		from := []*yaml.Node{n.Content[i+1]}
		if from[0].Kind == yaml.SequenceNode {
			from = slices.Clone(from[0].Content)
			slices.Reverse(from) // the first one wins
		}
		for _, m := range from {
			d.value(m, v, path, depth+1)
		}
	}
}

func (d *decoder) mapping(n *yaml.Node, v reflect.Value, path string, depth int) {
	if n.Kind != yaml.MappingNode {
		d.fail(n, "field %s: want names and values (name: value), got %s", path, what(n))
		return
	}
	out := reflect.MakeMap(v.Type())
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, val := n.Content[i], n.Content[i+1]
		name := join(path, clean(key.Value))
		if out.MapIndex(reflect.ValueOf(key.Value)).IsValid() {
			d.problems = append(d.problems, problem{key.Line, fmt.Sprintf("field %s: set twice, the last one counts", name), true})
		}
		d.lines[name] = key.Line
		item := reflect.New(v.Type().Elem()).Elem()
		d.value(val, item, name, depth+1)
		out.SetMapIndex(reflect.ValueOf(key.Value), item)
	}
	v.Set(out)
}

func (d *decoder) list(n *yaml.Node, v reflect.Value, path string, depth int) {
	if n.Kind != yaml.SequenceNode {
		d.fail(n, "field %s: want a list, got %s", path, what(n))
		return
	}
	out := reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content))
	for i, item := range n.Content {
		name := fmt.Sprintf("%s[%d]", path, i)
		d.lines[name] = item.Line
		d.value(item, out.Index(i), name, depth+1)
	}
	v.Set(out)
}

// scalar takes one value, the way that Kubernetes reads YAML: as JSON, and plain words as YAML 1.1 has them (yes is true).
func (d *decoder) scalar(n *yaml.Node, v reflect.Value, path string) {
	if n.Kind != yaml.ScalarNode {
		d.fail(n, "field %s: want %s, got %s", path, wanted(v), what(n))
		return
	}
	raw, err := scalarJSON(n)
	if err == nil {
		err = json.Unmarshal(raw, v.Addr().Interface())
	}
	if err != nil {
		d.fail(n, "field %s: want %s, got %s%s", path, wanted(v), what(n), hint(n, v, err))
	}
}

func scalarJSON(n *yaml.Node) ([]byte, error) {
	if n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0 ||
		n.Style&yaml.TaggedStyle != 0 && n.ShortTag() == "!!str" {
		return json.Marshal(n.Value)
	}
	return sigsyaml.YAMLToJSON([]byte(n.Value))
}

// wanted says in words what a field takes.
func wanted(v reflect.Value) string {
	switch v.Addr().Interface().(type) {
	case *metav1.Duration, *logsapi.TimeOrMetaDuration:
		return `a duration such as "30s"`
	case encoding.TextUnmarshaler:
		return "a text"
	}
	switch k := v.Kind(); {
	case k == reflect.Bool:
		return "true or false"
	case k == reflect.String:
		return "a text"
	case k == reflect.Uint32 || k == reflect.Uint64:
		return "a whole number that is not negative"
	case k == reflect.Int32 || k == reflect.Int64 || k == reflect.Int:
		return "a whole number"
	case k == reflect.Float32 || k == reflect.Float64:
		return "a number"
	}
	return "a quantity"
}

// hint adds what the reader can't see in the value itself.
func hint(n *yaml.Node, v reflect.Value, err error) string {
	var typeErr *json.UnmarshalTypeError
	if v.Kind() == reflect.String && n.Style == 0 && errors.As(err, &typeErr) {
		return " (put it in quotes)"
	}
	return ""
}

// what names a node for people.
func what(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "fields"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if n.Value == "" {
			return "nothing"
		}
		return clip(n.Value)
	}
	return "something else"
}

// clip keeps a person's own words short and on one line.
func clip(s string) string {
	const most = 60
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return fmt.Sprintf("%q", s)
}

func unknown(path, name string, fields map[string]reflect.Value) string {
	for known := range fields {
		if strings.EqualFold(known, name) {
			return fmt.Sprintf("field %s: unknown field, did you mean %s?", clean(path), known)
		}
	}
	return fmt.Sprintf("field %s: unknown field", clean(path))
}

// addFields lists the fields of a struct by their JSON names, those of embedded structs too.
func addFields(v reflect.Value, to map[string]reflect.Value) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			addFields(v.Field(i), to)
		case name != "-" && name != "":
			to[name] = v.Field(i)
		}
	}
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// clean keeps a name from a file printable and on one line.
func clean(s string) string {
	q := clip(s)
	return q[1 : len(q)-1]
}
