package dir

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"
)

// file is what is known of one file: its objects as last read without a mistake.
type file struct {
	objects   []placed
	documents map[[sha256.Size]byte]*document // by their text, so that only what changed is read again
	away      bool                            // it seems to be gone
}

// placed is an object of a file.
type placed struct {
	object
	line int  // in the file
	kept bool // from an earlier version: the present one has a mistake somewhere
}

// read takes a version of the file, and tells what is wrong with it. While any document is broken, objects of earlier
// versions stay if nothing in this one takes their place: the broken document may be theirs.
func (f *file) read(name string, data []byte) []problem {
	var problems []problem
	broken := false
	chunks, reader := splitYAML(data), readYAML
	if isJSON(name, data) {
		var bad *problem
		reader = readJSON
		if chunks, bad = splitJSON(data); bad != nil {
			problems, broken = append(problems, *bad), true
		}
	}
	var objects []placed
	documents := f.documentsOf(chunks, reader)
	for _, c := range chunks {
		d := documents[c.sum]
		for _, o := range d.objects {
			objects = append(objects, placed{object: o, line: c.line + o.line})
		}
		for _, p := range d.problems {
			p.line += c.line
			problems = append(problems, p)
		}
		broken = broken || d.broken()
	}
	if broken {
		objects = keep(f.objects, objects)
	}
	f.objects, f.documents = objects, documents
	return problems
}

// documentsOf reads the documents that the last version did not have, on all processors: a big cluster has many.
func (f *file) documentsOf(chunks []chunk, reader func([]byte) *document) map[[sha256.Size]byte]*document {
	out := make(map[[sha256.Size]byte]*document, len(chunks))
	var fresh []chunk
	for i := range chunks {
		c := &chunks[i]
		c.sum = sha256.Sum256(c.text)
		if _, twice := out[c.sum]; twice {
			continue
		}
		if out[c.sum] = f.documents[c.sum]; out[c.sum] == nil {
			fresh = append(fresh, *c)
		}
	}
	read := make([]*document, len(fresh))
	var next atomic.Int64
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(fresh)) {
		workers.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(fresh)); i = next.Add(1) - 1 {
				read[i] = reader(fresh[i].text)
			}
		})
	}
	workers.Wait()
	for i, c := range fresh {
		out[c.sum] = read[i]
	}
	return out
}

func isJSON(name string, data []byte) bool {
	return filepath.Ext(name) == ".json" || !isManifest(name) && bytes.HasPrefix(bytes.TrimSpace(data), []byte("{"))
}

// keep adds to the new objects those of the old that are not among them.
func keep(old, now []placed) []placed {
	there := make(map[ref]bool, len(now))
	for _, o := range now {
		there[o.ref] = true
	}
	for _, o := range old {
		if !there[o.ref] {
			o.kept = true
			now = append(now, o)
		}
	}
	return now
}

// Objects is what a source tells.
type Objects struct {
	Services map[types.NamespacedName]*corev1.Service
	Slices   map[types.NamespacedName]*discoveryv1.EndpointSlice
	Nodes    map[string]*corev1.Node
	CIDRs    map[string]*networkingv1.ServiceCIDR
}

func newObjects() Objects {
	return Objects{map[types.NamespacedName]*corev1.Service{}, map[types.NamespacedName]*discoveryv1.EndpointSlice{},
		map[string]*corev1.Node{}, map[string]*networkingv1.ServiceCIDR{}}
}

// merge puts the files together, in the order of their names: of two objects with one name the first counts. It returns
// what is wrong between files, as lines.
func merge(files map[string]*file) (Objects, []string) {
	out, c := newObjects(), newCluster()
	var odd []string
	first := map[ref]place{}
	for _, o := range inOrder(files) {
		if at, twice := first[o.ref]; twice {
			if !o.kept {
				odd = append(odd, fmt.Sprintf("%s: %s is in %s already; that one counts", o.place, o.ref, at))
			}
			continue
		}
		first[o.ref] = o.place
		c.add(o.object)
		key := types.NamespacedName{Namespace: o.ref.namespace, Name: o.ref.name}
		switch v := o.Object.(type) {
		case *corev1.Service:
			if served(v) {
				out.Services[key] = v
			}
		case *discoveryv1.EndpointSlice:
			if _, skip := v.Labels[corev1.IsHeadlessService]; !skip {
				out.Slices[key] = v
			}
		case *corev1.Node:
			out.Nodes[o.ref.name] = v
		case *networkingv1.ServiceCIDR:
			out.CIDRs[o.ref.name] = v
		}
	}
	return out, append(odd, out.derive(c, first)...)
}

// place is where an object is, as people read it.
type place struct {
	file string
	line int
}

func (p place) String() string { return fmt.Sprintf("%s:%d", p.file, p.line) }

type located struct {
	placed
	place
}

// inOrder lists the objects of all files. Those that are kept from earlier versions, or of files that seem to be gone, come
// last: an object that moved to another file counts where it is now.
func inOrder(files map[string]*file) []located {
	var now, kept []located
	for _, name := range slices.Sorted(maps.Keys(files)) {
		for _, o := range files[name].objects {
			l := located{o, place{name, o.line}}
			if l.kept = o.kept || files[name].away; l.kept {
				kept = append(kept, l)
			} else {
				now = append(now, l)
			}
		}
	}
	return append(now, kept...)
}

// served tells whether the API server would send us the Service, and it has an address.
func served(s *corev1.Service) bool {
	_, other := s.Labels["service.kubernetes.io/service-proxy-name"]
	return !other && !headless(s) && s.Spec.ClusterIP != "" && s.Spec.Type != corev1.ServiceTypeExternalName
}

// derive adds the slices of Services that have a selector and no slice.
func (o Objects) derive(c *cluster, at map[ref]place) (odd []string) {
	has := map[types.NamespacedName]bool{}
	for key, s := range o.Slices {
		has[types.NamespacedName{Namespace: key.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}] = true
	}
	for _, key := range slices.SortedFunc(maps.Keys(o.Services), compareNames) {
		s := o.Services[key]
		if len(s.Spec.Selector) == 0 || has[key] {
			continue
		}
		derived, strange := c.derive(s)
		for _, d := range derived {
			name := types.NamespacedName{Namespace: d.Namespace, Name: d.Name}
			for o.Slices[name] != nil { // somebody has a slice of that name, for another Service
				name.Name += "x"
			}
			d.Name = name.Name
			o.Slices[name] = d
		}
		for _, text := range strange {
			odd = append(odd, fmt.Sprintf("%s: Service %s: %s", at[ref{"Service", key.Namespace, key.Name}], key, text))
		}
	}
	return odd
}

func compareNames(a, b types.NamespacedName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

// Parse reads manifests that are given by the names of their files, as a source would. It returns what was taken, and what
// is wrong, a line each: "file:line: message".
func Parse(manifests map[string][]byte) (Objects, []string) {
	files := map[string]*file{}
	var wrong []string
	for _, name := range slices.Sorted(maps.Keys(manifests)) {
		files[name] = new(file)
		wrong = append(wrong, reports(name, files[name].read(name, manifests[name]))...)
	}
	out, odd := merge(files)
	return out, append(wrong, odd...)
}

// reportsMost bounds what is said about one version of one file.
const reportsMost = 50

// reports puts problems into lines.
func reports(name string, problems []problem) (out []string) {
	slices.SortStableFunc(problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	for i, p := range problems {
		if i == reportsMost {
			return append(out, oneLine(fmt.Sprintf("%s:%d: and %d more problems", name, p.line, len(problems)-i)))
		}
		out = append(out, oneLine(fmt.Sprintf("%s:%d: %s", name, p.line, p.text)))
	}
	return out
}

// oneLine makes a text fit for a log: what is no printable character becomes a question mark.
func oneLine(text string) string {
	const most = 1000
	text = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == '\u2028' || r == '\u2029' {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}
