package dir

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

var reportLine = regexp.MustCompile(`^f\.(yaml|json):([1-9][0-9]*): .+$`)

// Whatever is in a file: nothing panics, each report is one line that says where, no line is beyond the end of the file,
// what is taken has proper names and ports, and a second reading says the same.
func FuzzParse(f *testing.F) {
	stories, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range stories {
		story, err := txtar.ParseFile(path)
		if err != nil {
			f.Fatal(err)
		}
		for _, m := range story.Files {
			f.Add(m.Data, strings.HasSuffix(m.Name, ".json"))
		}
	}
	for _, text := range []string{
		"a: &x [*x]", "? {a: b}\n: c", "kind: &k Service\napiVersion: v1\nspec: {<<: *k}", "--- a\n--- |\n x", "\xef\xbb\xbfkind: List", "!!binary x", "%YAML 1.1\n---\n",
		"apiVersion: v1\nkind: List\nitems: [[], {}, null, {apiVersion: v1, kind: List}]", "{\"kind\": \"\\ud800\"}", "...\n---\n...", "apiVersion: v1\nkind: Service\nmetadata: []\nspec: 1",
		"apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIPs: [None, None]}", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: '::1', ports: [{port: 1, targetPort: null}], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}}",
	} {
		f.Add([]byte(text), false)
		f.Add([]byte(text), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, json bool) {
		name := map[bool]string{false: "f.yaml", true: "f.json"}[json]
		objects, said := Parse(map[string][]byte{name: data})
		for _, line := range said {
			if !reportLine.MatchString(line) || strings.ContainsAny(line, "\n\r\x00\x1b") || strings.Contains(line, panicked) {
				t.Errorf("report %q", line)
			}
		}
		for key, s := range objects.Services {
			if validation.IsDNS1123Label(key.Name) != nil || validation.IsDNS1123Label(key.Namespace) != nil {
				t.Errorf("name %s", key)
			}
			if s.Spec.InternalTrafficPolicy == nil || len(s.Spec.ClusterIPs) == 0 || s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && *s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds < 1 {
				t.Errorf("%s is not filled in: %+v", key, s.Spec)
			}
			for _, p := range s.Spec.Ports {
				if p.Port < 1 || p.Port > 65535 || p.Protocol == "" || strings.ContainsAny(p.Name, " \n\"") {
					t.Errorf("%s: port %+v", key, p)
				}
			}
		}
		if again, saidAgain := Parse(map[string][]byte{name: data}); tale(objects, said) != tale(again, saidAgain) {
			t.Errorf("once %s\nand then %s", tale(objects, said), tale(again, saidAgain))
		}
	})
}

// A broken version of a file changes nothing of what an earlier one said, but for what stands in good documents.
func TestBrokenVersionKeeps(t *testing.T) {
	service := func(name, ip string) string {
		return "---\napiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {clusterIP: " + ip + ", ports: [{port: 80}]}\n"
	}
	f := new(file)
	for _, step := range []struct{ text, want string }{
		{service("a", "10.0.0.1") + service("b", "10.0.0.2"), "a=10.0.0.1 b=10.0.0.2"},
		{service("a", "10.0.0.9") + service("b", "10.0.0.300"), "a=10.0.0.9 b=10.0.0.2"},
		{service("c", "10.0.0.3") + "---\n}", "a=10.0.0.9 b=10.0.0.2 c=10.0.0.3"},
		{"\x00", "a=10.0.0.9 b=10.0.0.2 c=10.0.0.3"},
		{service("c", "10.0.0.3"), "c=10.0.0.3"},
		{"", ""},
	} {
		problems := f.read("f.yaml", []byte(step.text))
		objects, _ := merge(map[string]*file{"f.yaml": f})
		var got []string
		for _, name := range []string{"a", "b", "c"} {
			for key, s := range objects.Services {
				if key.Name == name {
					got = append(got, name+"="+s.Spec.ClusterIP)
				}
			}
		}
		if strings.Join(got, " ") != step.want {
			t.Errorf("after %q: %q, want %q; problems %v", step.text, got, step.want, problems)
		}
	}
}

// An object that moves from a broken file to a good one counts where it is now.
func TestMoved(t *testing.T) {
	text := "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80}]}\n"
	a, b := new(file), new(file)
	a.read("a.yaml", []byte(text))
	a.read("a.yaml", []byte("}"))
	b.read("b.yaml", []byte(strings.Replace(text, "10.0.0.1", "10.0.0.2", 1)))
	objects, odd := merge(map[string]*file{"a.yaml": a, "b.yaml": b})
	for _, s := range objects.Services {
		if s.Spec.ClusterIP != "10.0.0.2" {
			t.Errorf("ClusterIP %s", s.Spec.ClusterIP)
		}
	}
	if len(objects.Services) != 1 || len(odd) > 0 {
		t.Errorf("%d Services, reports %q", len(objects.Services), odd)
	}
}
