package saved

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/maphash"
	"io"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/source"
)

// The format of a journal: magic, then records. A record is its length and the CRC-32C of its body (4 bytes each, little
// endian), and the body. A body is its kind (1 byte), and
//
//	ofNode   the name of the node that wrote it. It comes first, and once
//	heard    8 bytes, little endian: when the API was last heard, in nanoseconds since 1970. The first one comes after everything that there was
//	others   namespace and name, each with its length before it (uvarint), and the object as protobuf; nothing if it is gone
const (
	magic  = "fairlead journal 1\n" // another number is another format
	prefix = 8                      // length and sum
)

// kind is what a record is about.
type kind byte

const (
	ofNode       kind = 'N'
	heard        kind = 'h'
	aService     kind = 's'
	aSlice       kind = 'e'
	aNode        kind = 'n'
	aServiceCIDR kind = 'c'
)

const (
	maxName = 512     // a namespace, or a name: DNS names, of 253 bytes at most
	maxBody = 4 << 20 // no object is larger: etcd takes 1.5 MiB
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// thing is what an object is of.
type thing struct {
	kind kind
	name types.NamespacedName
}

// appendTo adds what a body begins with.
func (t thing) appendTo(b []byte) []byte {
	b = append(b, byte(t.kind))
	b = append(binary.AppendUvarint(b, uint64(len(t.name.Namespace))), t.name.Namespace...)
	return append(binary.AppendUvarint(b, uint64(len(t.name.Name))), t.name.Name...)
}

// gone tells that the thing is.
func (t thing) gone(to source.Sink) {
	switch t.kind {
	case aService:
		to.Service(t.name, nil)
	case aSlice:
		to.Slice(t.name, nil)
	case aNode:
		to.Node(t.name.Name, nil)
	case aServiceCIDR:
		to.ServiceCIDR(t.name.Name, nil)
	}
}

// object can write itself as protobuf.
type object interface {
	Size() int
	MarshalToSizedBuffer([]byte) (int, error)
}

// pointer is o as an object, nil for nil.
func pointer[T any, P interface {
	*T
	object
}](o P) object {
	if o == nil {
		return nil
	}
	return o
}

// appendObject adds a record; a nil object is gone. One that can't be written, which is not known to happen, is written as gone:
// what is not known to be there takes no traffic.
func appendObject(b []byte, t thing, o object) []byte {
	start := len(b)
	b = t.appendTo(append(b, make([]byte, prefix)...))
	if o != nil {
		keyed, n := len(b), o.Size()
		b = slices.Grow(b, n)[:keyed+n]
		if _, err := o.MarshalToSizedBuffer(b[keyed:]); err != nil || len(b)-start > maxBody {
			b = b[:keyed]
		}
	}
	return seal(b, start)
}

func appendNode(b []byte, name string) []byte {
	start := len(b)
	return seal(append(append(append(b, make([]byte, prefix)...), byte(ofNode)), name...), start)
}

func appendHeard(b []byte, at time.Time) []byte {
	start := len(b)
	b = append(append(b, make([]byte, prefix)...), byte(heard))
	return seal(binary.LittleEndian.AppendUint64(b, uint64(at.UnixNano())), start)
}

// seal fills in length and sum of the record that begins at start and is the last.
func seal(b []byte, start int) []byte {
	body := b[start+prefix:]
	binary.LittleEndian.PutUint32(b[start:], uint32(len(body)))
	binary.LittleEndian.PutUint32(b[start+4:], crc32.Checksum(body, castagnoli))
	return b
}

// reader reads records, up to the first that is not whole.
type reader struct {
	in   *bufio.Reader
	at   int64 // where the next record begins
	body []byte
}

var errTorn = errors.New("the record is not whole")

// read begins a journal, and gives the node that wrote it.
func read(in io.Reader) (r *reader, node string, err error) {
	r = &reader{in: bufio.NewReaderSize(in, 64<<10), at: int64(len(magic))}
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(r.in, head); err != nil || string(head) != magic {
		return nil, "", errors.New("it is no journal, or one of another version")
	}
	body, err := r.next()
	if err != nil || kind(body[0]) != ofNode {
		return nil, "", errors.New("it does not say of which node it is")
	}
	return r, string(body[1:]), nil
}

// next gives a body, which is valid until the next call. At the end the error is io.EOF.
func (r *reader) next() ([]byte, error) {
	var head [prefix]byte
	if _, err := io.ReadFull(r.in, head[:]); err != nil {
		if err == io.EOF {
			return nil, io.EOF
		}
		return nil, torn(err)
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > maxBody {
		return nil, errTorn
	}
	if err := r.fill(int(n)); err != nil {
		return nil, torn(err)
	}
	if crc32.Checksum(r.body, castagnoli) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, errTorn
	}
	r.at += prefix + int64(n)
	return r.body, nil
}

// fill reads a body. Room is made as it comes, and not for what the length says alone.
func (r *reader) fill(n int) error {
	const step = 64 << 10
	r.body = r.body[:0]
	for len(r.body) < n {
		from := len(r.body)
		r.body = append(r.body, make([]byte, min(step, n-from))...)
		if _, err := io.ReadFull(r.in, r.body[from:]); err != nil {
			return err
		}
	}
	return nil
}

func torn(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return errTorn
	}
	return err
}

// split takes a body about a thing apart. keyed is how long the part is that names the thing.
func split(body []byte) (t thing, keyed int, ok bool) {
	t.kind = kind(body[0])
	switch t.kind {
	case aService, aSlice, aNode, aServiceCIDR:
	default:
		return t, 0, false
	}
	rest := body[1:]
	var names [2]string
	for i := range names {
		n, used := binary.Uvarint(rest)
		if used <= 0 || n > maxName || n > uint64(len(rest)-used) {
			return t, 0, false
		}
		names[i], rest = string(rest[used:used+int(n)]), rest[used+int(n):]
	}
	t.name = types.NamespacedName{Namespace: names[0], Name: names[1]}
	return t, len(body) - len(rest), t.name.Name != ""
}

func heardIn(body []byte) (time.Time, bool) {
	if len(body) != 9 {
		return time.Time{}, false
	}
	return time.Unix(0, int64(binary.LittleEndian.Uint64(body[1:]))), true
}

// index is what a journal says, in short.
type index struct {
	last  map[uint64]int64 // where the last record of each thing begins, by the hash of its key
	heard time.Time        // when the API had last been heard; zero: the journal did not get as far as to hold everything
	end   int64            // of the last record that is whole
	torn  error            // why not all of it could be read; nil: it was
}

// survey reads a journal through. What two things with one hash would lose, once in 2^64, is one of them until the API tells it.
func survey(in io.Reader, node string, seed maphash.Seed) (index, error) {
	r, of, err := read(in)
	if err != nil {
		return index{}, err
	}
	if of != node {
		return index{}, fmt.Errorf("it is of node %q", of)
	}
	x := index{last: map[uint64]int64{}}
	for {
		x.end = r.at
		body, err := r.next()
		if err == io.EOF {
			return x, nil
		}
		if err != nil {
			x.torn = err
			return x, nil
		}
		if kind(body[0]) == heard {
			if at, ok := heardIn(body); ok {
				x.heard = at
			}
			continue
		}
		if _, n, ok := split(body); ok { // what is not known is of a later version, and nobody misses it
			x.last[maphash.Bytes(seed, body[:n])] = x.end
		}
	}
}

// decode makes an object of what follows the key of a record, and tells it.
func decode(t thing, data []byte) (tell func(source.Sink), err error) {
	switch t.kind {
	case aService:
		o := &corev1.Service{}
		err, tell = o.Unmarshal(data), func(to source.Sink) { to.Service(t.name, o) }
		return tell, same(err, t, o.Namespace, o.Name)
	case aSlice:
		o := &discoveryv1.EndpointSlice{}
		err, tell = o.Unmarshal(data), func(to source.Sink) { to.Slice(t.name, o) }
		delete(o.Annotations, corev1.EndpointsLastChangeTriggerTime) // an old change is no measure of how fast we are
		return tell, same(err, t, o.Namespace, o.Name)
	case aNode:
		o := &corev1.Node{}
		err, tell = o.Unmarshal(data), func(to source.Sink) { to.Node(t.name.Name, o) }
		return tell, same(err, t, o.Namespace, o.Name)
	default:
		o := &networkingv1.ServiceCIDR{}
		err, tell = o.Unmarshal(data), func(to source.Sink) { to.ServiceCIDR(t.name.Name, o) }
		return tell, same(err, t, o.Namespace, o.Name)
	}
}

func same(err error, t thing, namespace, name string) error {
	if err != nil {
		return err
	}
	if t.name != (types.NamespacedName{Namespace: namespace, Name: name}) {
		return fmt.Errorf("it is of %s/%s", namespace, name)
	}
	return nil
}
