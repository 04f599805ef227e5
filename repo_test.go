// Package fairlead_test holds the rules of the house as tests, each with its reason. They read the source and the documents,
// build nothing, and take a second; docs_test.go runs what the documents tell the reader to type.
package fairlead_test

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// files lists every file of the repository, by its path from the root: without git's own, and without what git does not keep
// (see .gitignore).
func files(t *testing.T) (paths []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == ".git" || path == "bin" || strings.HasSuffix(path, "testdata/rapid")):
			return fs.SkipDir
		case d.Type().IsRegular() && !strings.HasSuffix(path, ".test") && !strings.HasSuffix(path, ".out"):
			paths = append(paths, filepath.ToSlash(path))
		}
		return nil
	})
	if err != nil || len(paths) == 0 {
		t.Fatalf("list the repository: %v", err)
	}
	return paths
}

// source is one parsed Go file.
type source struct {
	*ast.File
	path, dir string
	fset      *token.FileSet
}

func (s source) test() bool { return strings.HasSuffix(s.path, "_test.go") }

func (s source) line(p token.Pos) int { return s.fset.Position(p).Line }

// product tells whether the file is part of the program, and not of what proves it.
func (s source) product() bool {
	return !s.test() && !strings.HasPrefix(s.path, "test/") && !strings.HasPrefix(s.path, "bench/")
}

func (s source) imports() (paths []string) {
	for _, i := range s.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		paths = append(paths, p)
	}
	return paths
}

func sources(t *testing.T) (all []source) {
	t.Helper()
	for _, path := range files(t) {
		if !strings.HasSuffix(path, ".go") {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, source{File: f, path: path, dir: filepath.ToSlash(filepath.Dir(path)), fset: fset})
	}
	return all
}

// TestRooms holds every import against the table of rooms in ARCHITECTURE.md: what a room may import is written there, for
// people, and a drawing that nobody checks is wrong within a month.
func TestRooms(t *testing.T) {
	rooms := readRooms(t)
	seen := map[string]bool{}
	for _, s := range sources(t) {
		if !s.product() {
			continue
		}
		may, ok := rooms[s.dir]
		if seen[s.dir] = true; !ok {
			t.Errorf("%s: the table of rooms in ARCHITECTURE.md has no row for %s: say there in a sentence what it is for, and what it may import", s.path, s.dir)
			rooms[s.dir] = nil
			continue
		}
		for _, path := range s.imports() {
			if may != nil && !free(path) && !slices.ContainsFunc(may, func(m string) bool { return allows(m, path) }) {
				t.Errorf("%s imports %s, which ARCHITECTURE.md does not allow to %s: does the line belong in another room? (\"How a line knows its room\")", s.path, path, s.dir)
			}
		}
	}
	for dir := range rooms {
		if !seen[dir] {
			t.Errorf("the table of rooms in ARCHITECTURE.md has a row for %s, which holds no Go files", dir)
		}
	}
}

// free tells of an import that needs no permission: the standard library, but for the package that starts programs.
func free(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".") && first != "fairlead" && path != "os/exec"
}

// allows tells whether a cell of the table covers an import. A module covers its packages; a room of ours is just itself.
func allows(cell, path string) bool {
	return path == cell || !strings.HasPrefix(cell, "fairlead/") && strings.HasPrefix(path, cell+"/")
}

var roomName = regexp.MustCompile(`^(cmd|internal|examples)(/|$)`)

// readRooms reads the rows "| `internal/engine` | a sentence | `model` `k8s.io/api` |".
func readRooms(t *testing.T) map[string][]string {
	t.Helper()
	rooms := map[string][]string{}
	for line := range strings.Lines(read(t, "ARCHITECTURE.md")) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		name := ticked(cells[0])
		if len(cells) != 3 || len(name) != 1 || !roomName.MatchString(name[0]) {
			continue
		}
		may := []string{}
		for _, m := range ticked(cells[2]) {
			if _, err := os.Stat("internal/" + m); err == nil {
				m = "fairlead/internal/" + m
			} else if _, err := os.Stat(m); err == nil {
				m = "fairlead/" + m
			}
			may = append(may, m)
		}
		rooms[name[0]] = may
	}
	if len(rooms) < 10 {
		t.Fatalf("ARCHITECTURE.md: found %d rows of the table of rooms", len(rooms))
	}
	return rooms
}

var tickedWord = regexp.MustCompile("`([^`\n]+)`")

func ticked(s string) (words []string) {
	for _, m := range tickedWord.FindAllStringSubmatch(s, -1) {
		words = append(words, m[1])
	}
	return words
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// walls are the boundaries that no row of the table may ever open, with what they are for.
var walls = []struct {
	rooms  *regexp.Regexp // whom it is about
	except []string
	never  *regexp.Regexp // what these never import
	reason string
}{
	{rooms: regexp.MustCompile(`^internal/(model|shadow)$`), never: regexp.MustCompile(`\.|^fairlead`),
		reason: "everything else leans on these two: they import the standard library only"},
	{rooms: regexp.MustCompile(`^internal/dataplane/`), never: regexp.MustCompile(`^k8s\.io/|^fairlead/internal/(resolve|source|config|cli)`),
		reason: "a dataplane obeys Routes and must not know Kubernetes; ask resolve to say it in the model"},
	{rooms: regexp.MustCompile(`^internal/resolve$`), never: regexp.MustCompile(`^(os|os/.*|log|log/.*|net|net/http|sync|sync/.*|context|math/rand.*|k8s\.io/(klog|client-go).*)$`),
		reason: "the same objects must give the same tables: no clock, goroutine, luck, logger or network"},
	{rooms: regexp.MustCompile(`.`), except: []string{"internal/kernel", "internal/lab", "internal/story"}, never: regexp.MustCompile(`^os/exec$`),
		reason: "programs are started in kernel, without a shell (and in lab and story, which play with programs)"},
	{rooms: regexp.MustCompile(`.`), except: []string{"internal/kernel", "internal/lab", "internal/source/host"},
		never:  regexp.MustCompile(`^github\.com/(mdlayher|ti-mo|vishvananda)/`),
		reason: "netlink is spoken in kernel (source/host listens to one group of it, lab builds a world with it)"},
	{rooms: regexp.MustCompile(`.`), never: regexp.MustCompile(`^k8s\.io/(client-go/(kubernetes|informers)|kubernetes)(/|$)`),
		reason: "the full clientset costs each node megabytes of memory: source/kube uses the REST client and three groups"},
}

func TestWalls(t *testing.T) {
	for _, s := range sources(t) {
		for _, w := range walls {
			if !s.product() || !w.rooms.MatchString(s.dir) || slices.Contains(w.except, s.dir) {
				continue
			}
			for _, path := range s.imports() {
				if w.never.MatchString(path) {
					t.Errorf("%s imports %s: %s", s.path, path, w.reason)
				}
			}
		}
	}
}

// apiRooms may import k8s.io/api. Whoever else needs to know what a Service says asks resolve.
var apiRooms = map[string]string{
	"internal/resolve":      "all meaning of Kubernetes",
	"internal/source":       "objects come in here",
	"internal/source/dir":   "objects come in here",
	"internal/source/kube":  "objects come in here",
	"internal/source/saved": "objects come in here",

	"internal/source/sourcetest": "stands in for a sink in the tests of sources",
	"internal/engine":            "carries objects from sink to resolver, and opens none",
	"internal/events":            "an Event is about an object",
	"internal/cli":               "puts the rooms together; sees the taint of its own Node",
}

func TestWhoKnowsKubernetes(t *testing.T) {
	for _, s := range sources(t) {
		if !s.product() || apiRooms[s.dir] != "" {
			continue
		}
		for _, path := range s.imports() {
			if strings.HasPrefix(path, "k8s.io/api/") {
				t.Errorf("%s imports %s: only resolve and the sources read Kubernetes objects (apiRooms lists who else touches one, and why)", s.path, path)
			}
		}
	}
}

// TestSystemCalls: outside of kernel, package unix is for the names of numbers. A call is a system call, and has its place
// there, where namespaces and threads are understood; nor does anybody else make one of package syscall.
func TestSystemCalls(t *testing.T) {
	conversions := []string{"Errno", "Signal"}
	for _, s := range sources(t) {
		if !s.product() || slices.Contains([]string{"internal/kernel", "internal/lab", "internal/story"}, s.dir) {
			continue
		}
		ast.Inspect(s.File, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			f, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if x, ok := f.X.(*ast.Ident); ok && (x.Name == "unix" || x.Name == "syscall") && !slices.Contains(conversions, f.Sel.Name) {
				t.Errorf("%s:%d calls %s.%s: system calls are made in kernel", s.path, s.line(n.Pos()), x.Name, f.Sel.Name)
			}
			return true
		})
	}
}

// TestPackageComments: who opens a folder is told in a sentence or two what question it answers.
func TestPackageComments(t *testing.T) {
	said, told := map[string]bool{}, map[string]bool{}
	for _, s := range sources(t) {
		if s.test() && s.dir != "." && !strings.HasPrefix(s.dir, "test/") {
			continue
		}
		said[s.dir] = said[s.dir] || s.Doc != nil && (strings.HasPrefix(s.Doc.Text(), "Package "+s.Name.Name+" ") || strings.HasPrefix(s.Doc.Text(), "Command "))
		told[s.dir] = true
	}
	for _, dir := range slices.Sorted(maps.Keys(told)) {
		if !said[dir] {
			t.Errorf("%s: no file has a comment \"Package … …\"", dir)
		}
	}
}

// TestDataplanesHaveTheSameRooms: who knows one dataplane finds the way in the next.
func TestDataplanesHaveTheSameRooms(t *testing.T) {
	dirs, err := filepath.Glob("internal/dataplane/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no dataplanes: %v", err)
	}
	for _, dir := range dirs {
		if name := filepath.Base(dir); name == "dptest" || name == "memory" {
			continue // the suite, and the reference that fits on a page
		}
		for _, room := range []string{"README.md", "doc.go", "render.go", "apply.go", "dump.go", "probe.go", "testdata"} {
			if _, err := os.Stat(filepath.Join(dir, room)); err != nil {
				t.Errorf("%s has no %s", dir, room)
			}
		}
	}
}

// screen is how many lines of a function are seen at once. One that does not fit answers more than one question.
const screen = 60

func TestFunctionsFitOnAScreen(t *testing.T) {
	for _, s := range sources(t) {
		for _, d := range s.Decls {
			f, ok := d.(*ast.FuncDecl)
			if n := s.line(d.End()) - s.line(d.Pos()) + 1; ok && !s.test() && n > screen {
				t.Errorf("%s:%d: %s has %d lines; %d fit on a screen", s.path, s.line(d.Pos()), f.Name.Name, n, screen)
			}
		}
	}
}

// skips are the only reasons for which a test may be skipped. A skip hides what it does not run, so that anything else that
// is missing makes the test fail.
var skips = map[string]string{
	"FAIRLEAD_NO_ROOT":         "somebody asked for the tests that need no root",
	"needs root":               "the part that needs no root has run by then",
	"FAIRLEAD_SCALE":           "a measurement that takes minutes, for who asks for it",
	"kube-proxy reports no":    "kube-proxy is put to the same tests, and can't do all of it",
	"kube-proxy has no readyz": "kube-proxy is put to the same tests, and can't do all of it",
	"not objects":              "input that a fuzzer made up and that is not of the kind under test",
}

func TestSkips(t *testing.T) {
	for _, s := range sources(t) {
		ast.Inspect(s.File, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || !s.test() {
				return true
			}
			f, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, f.Sel.Name) {
				return true
			}
			why := ""
			if len(call.Args) > 0 {
				if lit, ok := call.Args[0].(*ast.BasicLit); ok {
					why = lit.Value
				}
			}
			for known := range skips {
				if strings.Contains(why, known) {
					return true
				}
			}
			t.Errorf("%s:%d: skipped because of %s, which is none of the reasons listed here (skips)", s.path, s.line(n.Pos()), why)
			return true
		})
	}
}

// words that no file may hold. They are put together here, since this file is searched as well.
var words = []struct {
	word   *regexp.Regexp
	reason string
}{
	{regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|X` + `XX)\b`), "a note to oneself: do it, or open an issue"},
	{regexp.MustCompile(`(^|[\s"'(=:])/(work|ro` + `ot|home)/`), "a path of somebody's own machine"},
	{regexp.MustCompile(`/tmp/br` + `ief`), "a path of somebody's own machine"},
	{regexp.MustCompile(`\b(doc` + `ker\.io|qu` + `ay\.io|gc` + `r\.io|gh` + `cr\.io|registry\.k` + `8s\.io|proxy\.gol` + `ang\.org|py` + `pi\.org)\b`),
		"the host of a registry: who builds or deploys chooses one"},
}

func TestWords(t *testing.T) {
	for _, path := range files(t) {
		if base := filepath.Base(path); base == "go.sum" || base == "LICENSE" {
			continue
		}
		for i, line := range strings.Split(read(t, path), "\n") {
			for _, w := range words {
				if at := w.word.FindString(line); at != "" {
					t.Errorf("%s:%d: %q is %s", path, i+1, at, w.reason)
				}
			}
		}
	}
}

// TestModules: all of Kubernetes is for test/apiserver, which is a module of its own. In the main one it would be some
// hundred modules more in what everybody downloads, and reads in an audit.
func TestModules(t *testing.T) {
	s := bufio.NewScanner(strings.NewReader(read(t, "go.mod")))
	for s.Scan() {
		if f := strings.Fields(strings.TrimPrefix(s.Text(), "require")); len(f) > 0 && f[0] == "k8s.io/kubernetes" {
			t.Errorf("go.mod: %s", s.Text())
		}
	}
}

// TestStoriesBeginWithASentence: a story says first what it shows, so that who sees it fail knows what is lost. In a script,
// the sentence is a comment.
func TestStoriesBeginWithASentence(t *testing.T) {
	n := 0
	for _, path := range files(t) {
		commands := strings.HasPrefix(path, "internal/cli/testdata/")
		script := commands || strings.HasPrefix(path, "test/stories/")
		if !commands && !strings.HasSuffix(path, ".txtar") {
			continue
		}
		n++
		first, _, _ := strings.Cut(read(t, path), "\n\n")
		var said []string
		for line := range strings.Lines(first) {
			text, comment := strings.CutPrefix(line, "# ")
			if script && !comment || strings.HasPrefix(line, "-- ") {
				break
			}
			said = append(said, strings.TrimSpace(text))
		}
		if text := strings.Join(said, " "); len(text) < 20 || !strings.Contains(text, " ") || !strings.ContainsAny(text[len(text)-1:], ".:)") {
			t.Errorf("%s: begins with %q; want a sentence that says what the story shows", path, text)
		}
	}
	if n == 0 {
		t.Error("there are no stories")
	}
}
