package ipvs

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/dataplane/nftables"
	"fairlead/internal/kernel"
	"fairlead/internal/model"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the goldens anew")

// The virtual servers of the golden cluster are what testdata says.
func TestGolden(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		file := filepath.Join("testdata", map[bool]string{false: "golden4.txt", true: "golden6.txt"}[v6])
		got := rendered(dptest.Golden(v6))
		if *update {
			if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), got); d != "" {
			t.Errorf("%s (-want +got; -update writes it anew):\n%s", file, d)
		}
	}
}

// rendered lists servers and their destinations; a mark as the number of its pool.
func rendered(d model.Delta) string {
	p := newPools()
	services := map[model.PoolID]*service{}
	at := func(id model.PoolID) *service {
		s := services[serviceID(id)]
		if s == nil {
			s = &service{id: serviceID(id), fronts: map[model.Key]model.Frontend{}}
			services[serviceID(id)] = s
		}
		return s
	}
	for _, f := range d.Frontends {
		at(f.Routes[model.FromOutside].Pool).fronts[f.Key] = f
	}
	for _, p := range d.Pools {
		at(p.ID).pools[p.ID.Scope] = p
	}
	var out []string
	for _, f := range d.Frontends {
		s := services[serviceID(f.Routes[model.FromOutside].Pool)]
		for k, srv := range s.servers(Config{V4: true, V6: true, Scheduler: "wrr"}, *d.Node, p.of) {
			name := fmt.Sprintf("%s/%d", k.Addr, k.Proto)
			if n, ok := nftables.NumberOf(k.Mark); ok && k.Mark != 0 {
				name = fmt.Sprintf("pool %d", n)
			}
			line := fmt.Sprintf("%s %s: %s flags %#x timeout %d -> %v weight %d\n", s.id.Service, name, srv.how.Scheduler, srv.how.Flags, srv.how.Timeout, srv.to, srv.weight)
			if !slices.Contains(out, line) {
				out = append(out, line)
			}
		}
	}
	slices.Sort(out)
	return strings.Join(out, "")
}

// A pool keeps its number until it is freed, and no two have the same.
func TestNumbers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newPools()
		has := map[model.PoolID]uint32{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := model.PoolID{Service: fmt.Sprint(rapid.IntRange(0, 9).Draw(t, "pool"))}
			if n, ok := has[id]; ok && rapid.Bool().Draw(t, "free") {
				p.free(n)
				delete(has, id)
				continue
			}
			n := p.of(id)
			if had, ok := has[id]; ok && had != n {
				t.Fatalf("%v had number %d, has %d", id, had, n)
			}
			has[id] = n
			for other, m := range has {
				if other != id && m == n {
					t.Fatalf("%v and %v have number %d", id, other, n)
				}
			}
		}
	})
}

// A mark says its number, and no other mark is taken for ours.
func TestMarks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint32Range(1, byAddress).Draw(t, "number")
		if got, ok := nftables.NumberOf(nftables.MarkOf(n)); !ok || got != n {
			t.Fatalf("number %d is read as %d (%v)", n, got, ok)
		}
		if isOurs(kernel.VirtualServer{Mark: rapid.Uint32Range(1, 0xffff).Draw(t, "mark")}, kernel.VirtualServerSettings{}) {
			t.Fatal("a stranger's mark is taken for ours")
		}
	})
}
