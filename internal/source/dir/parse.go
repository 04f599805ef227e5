package dir

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// A problem is one thing that a person should be told about a file.
type problem struct {
	line   int // 1 is the first
	text   string
	refuse bool // the object, or the document, is not taken
}

// An object is one manifest that was taken.
type object struct {
	metav1.Object
	ref  ref
	line int
}

// ref names an object.
type ref struct{ kind, namespace, name string }

func (r ref) String() string {
	if r.namespace == "" {
		return r.kind + " " + r.name
	}
	return r.kind + " " + r.namespace + "/" + r.name
}

// A document is what was read of one YAML document, or one JSON value. Lines are counted from its own first line.
type document struct {
	objects  []object
	problems []problem
}

func (d *document) broken() bool {
	for _, p := range d.problems {
		if p.refuse {
			return true
		}
	}
	return false
}

func (d *document) refuse(line int, format string, args ...any) {
	d.problems = append(d.problems, problem{line, fmt.Sprintf(format, args...), true})
}

// kind is one kind of object that means something to us.
type kind struct {
	group, version string
	make           func() metav1.Object
}

func (k kind) apiVersion() string {
	if k.group == "" {
		return k.version
	}
	return k.group + "/" + k.version
}

// kinds by their names. The workloads count only as those whose pods a Service may mean.
var kinds = map[string]kind{
	"Service":       {"", "v1", func() metav1.Object { return new(corev1.Service) }},
	"Node":          {"", "v1", func() metav1.Object { return new(corev1.Node) }},
	"Pod":           {"", "v1", func() metav1.Object { return new(corev1.Pod) }},
	"EndpointSlice": {"discovery.k8s.io", "v1", func() metav1.Object { return new(discoveryv1.EndpointSlice) }},
	"ServiceCIDR":   {"networking.k8s.io", "v1", func() metav1.Object { return new(networkingv1.ServiceCIDR) }},
	"Deployment":    {"apps", "v1", func() metav1.Object { return new(appsv1.Deployment) }},
	"ReplicaSet":    {"apps", "v1", func() metav1.Object { return new(appsv1.ReplicaSet) }},
	"StatefulSet":   {"apps", "v1", func() metav1.Object { return new(appsv1.StatefulSet) }},
	"DaemonSet":     {"apps", "v1", func() metav1.Object { return new(appsv1.DaemonSet) }},
}

// head is what tells the kind of a document.
type head struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Items      []json.RawMessage `json:"items"`
}

// chunk is the text of one document, and the line of the file that it begins at, from 0.
type chunk struct {
	line int
	text []byte
	sum  [sha256.Size]byte
}

// splitYAML splits at the markers of documents. A marker line stays with the document that it begins.
func splitYAML(data []byte) []chunk {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var out []chunk
	start, begin, line := 0, 0, 0
	cut := func(at, next int) {
		if text := data[start:at]; !blank(text) {
			out = append(out, chunk{line: begin, text: text})
		}
		start, begin = next, line
	}
	for at := 0; at < len(data); line++ {
		end := at + bytes.IndexByte(data[at:], '\n') + 1
		if end == at {
			end = len(data)
		}
		if marks(data[at:end], "---") {
			cut(at, at)
		} else if marks(data[at:end], "...") {
			cut(at, end)
			begin++
		}
		at = end
	}
	cut(len(data), len(data))
	return out
}

// marks tells whether a line is the marker, which content may follow.
func marks(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || strings.IndexByte(" \t\r\n", rest[0]) >= 0)
}

// blank tells whether there is nothing in a text but markers, comments and directives.
func blank(text []byte) bool {
	for line := range bytes.Lines(text) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' && line[0] != '%' && string(line) != "---" {
			return false
		}
	}
	return true
}

// splitJSON splits a stream of JSON values. What can't be read ends it.
func splitJSON(data []byte) (out []chunk, bad *problem) {
	d := json.NewDecoder(bytes.NewReader(data))
	for {
		var raw json.RawMessage
		err := d.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			at := int64(len(data))
			var syntax *json.SyntaxError
			if errors.As(err, &syntax) {
				at = min(max(syntax.Offset-1, 0), at)
			}
			return out, &problem{1 + bytes.Count(data[:at], []byte("\n")), "JSON: " + err.Error(), true}
		}
		begin := d.InputOffset() - int64(len(raw))
		out = append(out, chunk{line: bytes.Count(data[:begin], []byte("\n")), text: raw})
	}
}

// readYAML reads one YAML document, as kubectl does.
func readYAML(text []byte) *document {
	d := new(document)
	defer d.survive()
	raw, err := yaml.YAMLToJSONStrict(text)
	if err != nil {
		d.refuseYAML(err)
		return d
	}
	d.read(raw, newLines(text))
	return d
}

// readJSON reads one JSON value. JSON is YAML but for tabs, so lines are found in the same way.
func readJSON(raw []byte) *document {
	d := new(document)
	defer d.survive()
	d.read(raw, newLines(bytes.ReplaceAll(raw, []byte("\t"), []byte(" "))))
	return d
}

// survive makes a mistake of a text out of a panic: the readers of YAML are other people's, and have had such bugs. The
// fuzz test takes it for a failure.
func (d *document) survive() {
	if r := recover(); r != nil {
		d.refuse(1, "%s: %v", panicked, r)
	}
}

const panicked = "this can't be read"

var yamlLine = regexp.MustCompile(`^\s*(?:yaml: )?line (\d+): (.*)$`)

// refuseYAML reports each line of an error of the YAML reader.
func (d *document) refuseYAML(err error) {
	text := strings.TrimPrefix(err.Error(), "error converting YAML to JSON: ")
	text = strings.TrimPrefix(strings.TrimPrefix(text, "yaml: "), "unmarshal errors:\n")
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if m := yamlLine.FindStringSubmatch(line); m != nil {
			n, _ := strconv.Atoi(m[1])
			d.refuse(max(n, 1), "YAML: %s", m[2])
		} else if line != "" {
			d.refuse(1, "YAML: %s", line)
		}
	}
}

// read takes the object, or the list of objects, in raw.
func (d *document) read(raw []byte, at *lines) {
	h, ok := d.head(raw, at, "")
	if !ok {
		return
	}
	single, list := strings.CutSuffix(h.Kind, "List")
	if !list || !(h.Kind == "List" && h.APIVersion == "v1" || known(single, h.APIVersion)) {
		d.one(raw, at, "", h)
		return
	}
	for i, item := range h.Items {
		path := fmt.Sprintf("items[%d]", i)
		ih, ok := d.head(item, at, path)
		if single != "" && ih.Kind == "" { // those of a typed list need not say what they are
			ih.APIVersion, ih.Kind = h.APIVersion, single
		}
		if ok {
			d.one(item, at, path, ih)
		}
	}
}

// head reads what kind of object raw is. There is none in null.
func (d *document) head(raw []byte, at *lines, path string) (h head, ok bool) {
	raw = bytes.TrimSpace(raw)
	switch {
	case string(raw) == "null":
		return h, false
	case raw[0] != '{':
		d.refuse(at.of(path), "no Kubernetes object: there is no apiVersion and kind")
		return h, false
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &h); err != nil {
		d.blame(raw, at, path, func() any { return new(head) })
		return h, false
	}
	return h, true
}

func known(name, apiVersion string) bool {
	k, ok := kinds[name]
	return ok && k.apiVersion() == apiVersion
}

// one takes one object. Kinds that mean nothing to us are passed over in silence.
func (d *document) one(raw []byte, at *lines, path string, h head) {
	k, ok := kinds[h.Kind]
	group, _, grouped := strings.Cut(h.APIVersion, "/")
	if !grouped {
		group = ""
	}
	switch {
	case h.Kind == "" || h.APIVersion == "":
		d.refuse(at.of(path), "no Kubernetes object: there is no apiVersion and kind")
		return
	case !ok || group != k.group:
		return
	case h.APIVersion != k.apiVersion():
		d.refuse(at.of(join(path, "apiVersion")), "%s of version %q is not known, only %s", h.Kind, h.APIVersion, k.apiVersion())
		return
	}
	obj := k.make()
	strict, err := kjson.UnmarshalStrict(raw, obj)
	if err != nil {
		d.blame(raw, at, path, func() any { return k.make() })
	}
	for _, err := range strict {
		field := path
		var f kjson.FieldError
		if errors.As(err, &f) {
			field = join(path, f.FieldPath())
		}
		d.refuse(at.of(field), "%s", err)
	}
	if err != nil || len(strict) > 0 {
		return
	}
	c := check{at: at, path: path, kind: h.Kind}
	c.object(obj)
	d.problems = append(d.problems, c.problems...)
	if !c.refused {
		d.objects = append(d.objects, object{obj, ref{h.Kind, obj.GetNamespace(), obj.GetName()}, at.of(path)})
	}
}

func join(path, field string) string {
	if path == "" || field == "" {
		return path + field
	}
	return path + "." + field
}
