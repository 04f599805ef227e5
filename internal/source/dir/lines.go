package dir

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	kjson "sigs.k8s.io/json"
)

// lines finds the line of a field. It reads the text a second time, but only when somebody asks.
type lines struct {
	text []byte
	root *yaml.Node
	done bool
}

func newLines(text []byte) *lines { return &lines{text: text} }

// linesMost is the longest document in which fields are looked for: the tree of nodes is many times as big as the text.
// What is wrong in a longer one is reported with its first line.
const linesMost = 8 << 20

// of gives the line of a field such as "spec.ports[0].port", from 1; of the nearest field around it, when it is not there.
func (l *lines) of(path string) int {
	line := l.first()
	if path == "" {
		return line
	}
	if !l.done {
		l.done = true
		var doc yaml.Node
		if len(l.text) <= linesMost && yaml.Unmarshal(l.text, &doc) == nil && len(doc.Content) == 1 {
			l.root = doc.Content[0]
		}
	}
	for node := l.root; node != nil && path != ""; {
		var at *yaml.Node
		if at, node, path = into(node, path); at != nil {
			line = at.Line
		}
	}
	return line
}

// first is the first line that says something.
func (l *lines) first() int {
	n := 1
	for line := range bytes.Lines(l.text) {
		if !blank(line) {
			return n
		}
		n++
	}
	return 1
}

// into goes one step along the path: where the step is written, the node that it leads to, and the rest of the path.
func into(node *yaml.Node, path string) (at, next *yaml.Node, rest string) {
	if node.Kind == yaml.AliasNode && node.Alias != nil {
		node = node.Alias
	}
	switch node.Kind {
	case yaml.MappingNode: // a key may hold dots: the longest that fits
		for i := 0; i+1 < len(node.Content); i += 2 {
			key := node.Content[i]
			tail, ok := strings.CutPrefix(path, key.Value)
			if ok && key.Value != "" && (at == nil || len(key.Value) > len(at.Value)) && (tail == "" || tail[0] == '.' || tail[0] == '[') {
				at, next, rest = key, node.Content[i+1], strings.TrimPrefix(tail, ".")
			}
		}
	case yaml.SequenceNode:
		number, tail, ok := strings.Cut(strings.TrimPrefix(path, "["), "]")
		if i, err := strconv.Atoi(number); ok && err == nil && i >= 0 && i < len(node.Content) {
			return node.Content[i], node.Content[i], strings.TrimPrefix(tail, ".")
		}
	}
	return at, next, rest
}

// blame finds out which fields of raw can't be decoded into what to makes, and reports each. A decoder tells its first error
// only, and not where that is; so parts are taken out until it has nothing, or something else, to say.
func (d *document) blame(raw []byte, at *lines, path string, to func() any) {
	b := blamer{to: to}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if err := decoder.Decode(&b.tree); err != nil {
		d.refuse(at.of(path), "%s", err)
		return
	}
	for range blameMost {
		err := b.decode()
		if err == nil {
			return
		}
		field := b.find(err.Error())
		where := join(path, field.path)
		d.refuse(at.of(where), "%s", plain(where, err))
		if field.set == nil {
			return
		}
		field.set(nil)
	}
}

// blameMost bounds how many fields of one object are reported.
const blameMost = 20

type blamer struct {
	tree any
	to   func() any
}

func (b *blamer) decode() error {
	raw, err := json.Marshal(b.tree)
	if err != nil {
		return err
	}
	return kjson.UnmarshalCaseSensitivePreserveInts(raw, b.to())
}

// part is a value somewhere in a tree. Without set it is the whole.
type part struct {
	path  string
	value any
	set   func(any)
}

// find gives the smallest part without which the error is not met.
func (b *blamer) find(err string) part {
	p := part{value: b.tree}
	for {
		parts := p.parts()
		if !b.without(parts, err) {
			return p
		}
		for len(parts) > 1 {
			if half := parts[:len(parts)/2]; b.without(half, err) {
				parts = half
			} else {
				parts = parts[len(parts)/2:]
			}
		}
		p = parts[0]
	}
}

// without tells whether the error is not met when all parts are null, which every type takes.
func (b *blamer) without(parts []part, err string) bool {
	for _, p := range parts {
		p.set(nil)
		defer p.set(p.value)
	}
	now := b.decode()
	return now == nil || now.Error() != err
}

func (p part) parts() (out []part) {
	switch v := p.value.(type) {
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			out = append(out, part{join(p.path, k), v[k], func(x any) { v[k] = x }})
		}
	case []any:
		for i := range v {
			out = append(out, part{fmt.Sprintf("%s[%d]", p.path, i), v[i], func(x any) { v[i] = x }})
		}
	}
	return out
}

var mistyped = regexp.MustCompile(`cannot unmarshal (.+) into .* of type (.+)$`)

// plain says an error of the decoder without the names of Go structs.
func plain(path string, err error) string {
	text := err.Error()
	if m := mistyped.FindStringSubmatch(text); m != nil {
		text = fmt.Sprintf("found %s, want %s", m[1], wanted(m[2]))
	}
	if path == "" {
		return text
	}
	return path + ": " + text
}

// wanted says a Go type as JSON does.
func wanted(typ string) string {
	switch {
	case strings.HasPrefix(typ, "[]"):
		return "array"
	case strings.HasPrefix(typ, "map["), strings.Contains(typ, "."):
		return "object"
	}
	return typ
}
