package nftables

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// canned answers each question for elements with the same bytes.
type canned struct {
	conn
	attrs []byte
}

func (c canned) Dump(_ uint16, _ uint8, _ []byte, each func(kernel.NFMessage) error) error {
	return each(kernel.NFMessage{Attrs: c.attrs})
}

// elementsOf makes the message in which the kernel gives elements.
func elementsOf(elements []byte) []byte {
	b, at := kernel.BeginNest(nil, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
	return kernel.EndNest(append(b, elements...), at)
}

func heldForTest(v6 bool) *held {
	h := &held{v6: v6, counters: map[string]bool{}, chains: map[chainID]sum{}, shapes: map[shapeID]shape{}, rows: map[model.Key]row{},
		about: map[model.Key]string{}, facts: map[fact]struct{}{}}
	for s := range setsCount {
		h.sets[s] = true
	}
	return h
}

func (h *held) readElements(c conn) error {
	return errors.Join(h.readRoutes(c), h.readFacts(c), h.readRows(c))
}

// Between two lists of ours somebody may put another set in the place of one: keys and values are of other lengths then. What is
// read so is torn, and no reason to fall.
func TestElementsOfOtherLengths(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for key := range 45 {
			for _, value := range []int{0, 1, 4, 7, 8, 20, 64} {
				e := element{key: make([]byte, key), end: make([]byte, value), value: make([]byte, value)}
				err := heldForTest(v6).readElements(canned{attrs: elementsOf(appendElement(nil, e))})
				if !errors.Is(err, kernel.ErrDumpInterrupted) {
					t.Errorf("v6 %v, key of %d bytes, value of %d: %v; want it torn", v6, key, value, err)
				}
			}
		}
	}
}

// Nothing that could come from the kernel makes the readers fall.
func FuzzElements(f *testing.F) {
	f.Add(appendElement(nil, element{key: make([]byte, 16), value: make([]byte, 8), comment: "a/b ClusterIP"}))
	f.Add(appendElement(nil, element{key: make([]byte, 4), verdict: &verdict{code: unix.NFT_GOTO, chain: "cluster-2"}}))
	f.Add(appendElement(nil, element{anything: true}))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, v6 := range []bool{false, true} {
			c := canned{attrs: elementsOf(b)}
			heldForTest(v6).readElements(c)
			for s := range setsCount {
				keyIn(c.attrs, s, v6)
			}
		}
	})
}

// An element that stands for all keys is noticed, and is none of a frontend's.
func TestElementForAnything(t *testing.T) {
	h := heldForTest(false)
	if err := h.readElements(canned{attrs: elementsOf(appendElement(nil, element{anything: true}))}); err != nil {
		t.Fatal(err)
	}
	for _, s := range []setID{setServices, setAllowed, setFromOutside, setClusterIPs} {
		if !h.anything[s] {
			t.Errorf("%s: not noticed", s)
		}
	}
	if len(h.rows)+len(h.facts)+len(h.strays) != 0 {
		t.Errorf("rows %v, facts %v, strays %v; want none", h.rows, h.facts, h.strays)
	}
}

// Only a chain's very name is its name.
func TestOtherSpellings(t *testing.T) {
	for _, name := range []string{"cluster-02", "cluster-+2", "cluster-0", "cluster--1", "local-2-sticky-010", "cluster-2-sticky-0", "refuse-masquerade",
		"cluster-99999999999999999999", "nodeport-nodeport-cluster-2", "cluster-2-masquerade-sticky-3", ""} {
		if got, ok := targetOf(&verdict{code: unix.NFT_GOTO, chain: name}); ok {
			t.Errorf("%q is taken for %+v", name, got)
		}
	}
}

// The kernel changes no chain's hook, so a chain of our name with another one can't become ours.
func TestChainsOfOtherKinds(t *testing.T) {
	elsewhere := &hook{unix.NF_INET_FORWARD, 5, "filter"}
	for _, c := range []struct {
		name string
		at   *hook
		want bool
	}{
		{chainForward, hookForward, false}, {chainForward, elsewhere, true}, {chainPrerouting, nil, true},
		{"cluster-2", nil, false}, {"cluster-2", elsewhere, true}, {chainRefuse, elsewhere, true}, {"stranger", elsewhere, false}, {"stranger", nil, false},
	} {
		if got := isOtherKind(c.name, c.at); got != c.want {
			t.Errorf("%s with hook %v: %v, want %v", c.name, c.at, got, c.want)
		}
	}
}
