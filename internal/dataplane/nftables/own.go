package nftables

import "encoding/binary"

// ownNumbers are the numbers by which the affinity map knows endpoints of Services with ClientIP affinity. An endpoint keeps
// its number as long as the kernel holds it, over restarts too and whatever happens to others; one that went has it again when it comes
// back before everything was read anew. The numbers by which endpoints are drawn are each Service's own, and change when one goes.
type ownNumbers struct {
	numbers map[string]uint32 // by packed endpoint
	next    uint32
	from    uint32 // next, when the kernel was read
}

// crowded tells that so many endpoints have come that it is worth reading the kernel again to forget those that went.
func (o *ownNumbers) crowded() bool { return o.next-o.from > 1<<16 }

// ownNumbersIn are those that the kernel holds.
func ownNumbersIn(found []*held) ownNumbers {
	o := ownNumbers{numbers: map[string]uint32{}}
	for _, h := range found {
		for _, r := range h.rows {
			for _, s := range r.scopes() {
				for n := 0; n*numberLen < len(s.numbers); n++ {
					number := binary.NativeEndian.Uint32([]byte(part(s.numbers, n, numberLen)))
					o.numbers[part(s.endpoints, n, backendLen(h.v6))] = number
					o.next = max(o.next, number+1)
				}
			}
		}
	}
	o.from = o.next
	return o
}

// of gives packed endpoints of one family their numbers, packed.
func (o *ownNumbers) of(endpoints string, size int) string {
	var out []byte
	for ; len(endpoints) >= size; endpoints = endpoints[size:] {
		n, ok := o.numbers[endpoints[:size]]
		if !ok {
			n = o.next
			o.next++
			o.numbers[endpoints[:size]] = n
		}
		out = appendNumber(out, n)
	}
	return string(out)
}
