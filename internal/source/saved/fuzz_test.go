package saved

import (
	"bytes"
	"hash/maphash"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"fairlead/internal/source/sourcetest"
)

// FuzzRead: whatever a file holds, reading it ends, without a panic, and needs no more memory than a few times its size.
func FuzzRead(f *testing.F) {
	whole := appendNode([]byte(magic), "n1")
	whole = appendObject(whole, thing{aService, name("a")}, service("a", "10.0.0.1"))
	whole = appendObject(whole, thing{aSlice, name("a-1")}, slice("a-1"))
	whole = appendHeard(whole, time.Unix(1_700_000_000, 0))
	whole = appendObject(whole, thing{aService, name("a")}, nil)
	f.Add(whole)
	f.Add(whole[:len(whole)-3])
	f.Add([]byte(magic + "\xff\xff\x3f\x00\x00\x00\x00\x00"))
	f.Add(seal(append([]byte(magic), "........s\xff\xff\xff\xff\x0f"...), len(magic)))
	seed := maphash.MakeSeed()
	f.Fuzz(func(t *testing.T, data []byte) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		x, err := survey(bytes.NewReader(data), "n1", seed)
		runtime.ReadMemStats(&after)
		if grown := after.TotalAlloc - before.TotalAlloc; grown > uint64(1<<20+64*len(data)) {
			t.Errorf("%d bytes needed %d of memory", len(data), grown)
		}
		if err != nil {
			return
		}
		if x.end > int64(len(data)) {
			t.Errorf("%d bytes of %d were whole", x.end, len(data))
		}
		r, _, err := read(bytes.NewReader(data[:x.end]))
		if err != nil {
			t.Fatal(err)
		}
		var to sourcetest.Sink
		for {
			body, err := r.next()
			if err != nil {
				break
			}
			what, n, ok := split(body)
			if !ok {
				continue
			}
			if tell, err := decode(what, body[n:]); err == nil {
				tell(&to)
			}
		}
		if r.at != x.end {
			t.Errorf("read up to %d, and then up to %d", x.end, r.at)
		}
		var out bytes.Buffer
		if _, err := copyLast(&out, bytes.NewReader(data[:x.end]), x, seed, time.Now()); err != nil {
			t.Error(err)
		}
	})
}

// decoys are bodies that no record of ours has.
func TestDecoys(t *testing.T) {
	for what, body := range map[string]string{
		"unknown kind": "x\x02ns\x01a", "no name": "s\x02ns\x00", "name too long": "s\x00\x80\x08" + strings.Repeat("a", 1024), "cut": "s\x02n", "no key": "s",
	} {
		if _, _, ok := split([]byte(body)); ok {
			t.Errorf("%s was taken", what)
		}
	}
	data, _ := service("b", "").Marshal()
	if _, err := decode(thing{aService, name("a")}, data); err == nil {
		t.Error("an object under another's name was taken")
	}
	if _, err := decode(thing{aService, name("a")}, []byte{0xff}); err == nil {
		t.Error("what is no object was taken")
	}
	var none *corev1.Service
	if pointer(none) != nil {
		t.Error("nil is something")
	}
}
