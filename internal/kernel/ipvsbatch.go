package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// IPVSBatch collects changes of virtual servers. Unlike a transaction of nf_tables, each takes effect by itself.
type IPVSBatch struct{ ops []ipvsOp }

type ipvsOp struct {
	cmd    uint8
	server VirtualServer
	attrs  []byte
	what   string
	other  uint8 // the command to try when this one says that the object is there already, or is not
}

// Len is the number of changes.
func (b *IPVSBatch) Len() int { return len(b.ops) }

// Serve makes a virtual server, or gives one that is there these settings. Which of both is there already is known to the caller mostly;
// when he is wrong, the other is done.
func (b *IPVSBatch) Serve(s VirtualServer, how VirtualServerSettings, there bool) {
	op := ipvsOp{ipvsNewService, s, appendServer(nil, s, &how), "make virtual server " + s.String(), ipvsSetService}
	if there {
		op.cmd, op.other = ipvsSetService, ipvsNewService
	}
	b.ops = append(b.ops, op)
}

// Unserve deletes a virtual server, with its destinations. One that is not there is no error.
func (b *IPVSBatch) Unserve(s VirtualServer) {
	b.ops = append(b.ops, ipvsOp{ipvsDelService, s, appendServer(nil, s, nil), "delete virtual server " + s.String(), 0})
}

// Send adds a destination, or gives one that is there its weight, as Serve does.
func (b *IPVSBatch) Send(s VirtualServer, d Destination, there bool) {
	attrs := appendDestination(appendServer(nil, s, nil), d, true)
	op := ipvsOp{ipvsNewDest, s, attrs, fmt.Sprintf("send %s to %s", s, d.Addr), ipvsSetDest}
	if there {
		op.cmd, op.other = ipvsSetDest, ipvsNewDest
	}
	b.ops = append(b.ops, op)
}

// Unsend deletes a destination. One that is not there is no error.
func (b *IPVSBatch) Unsend(s VirtualServer, d Destination) {
	attrs := appendDestination(appendServer(nil, s, nil), d, false)
	b.ops = append(b.ops, ipvsOp{ipvsDelDest, s, attrs, fmt.Sprintf("send %s to %s no more", s, d.Addr), 0})
}

// Do makes the changes, in order, and tells for each, by its place, what became of it. It goes on after a refusal; an error of its own
// means that nothing is known of those that have no answer yet.
func (v *IPVS) Do(b *IPVSBatch, done func(i int, err error)) error {
	for from := 0; from < len(b.ops); {
		to, size := from, 0
		for to < len(b.ops) && to-from < ipvsBatchOfMost && size < ipvsBatchMost {
			size += len(b.ops[to].attrs) + nlHeader + nfHeader
			to++
		}
		part := b.ops[from:to]
		errs := make([]error, len(part))
		if err := TryFault(func() error { return v.send(part, errs) }); err != nil {
			return fmt.Errorf("%s: %w", part[0].what, err)
		}
		for i := range part {
			done(from+i, v.again(part[i], errs[i]))
		}
		from = to
	}
	return nil
}

// again tries the other command, or finds that there is nothing to do.
func (v *IPVS) again(op ipvsOp, err error) error {
	there, gone := errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)
	switch {
	case err == nil, op.other == 0 && gone:
		return nil
	case there && (op.other == ipvsSetService || op.other == ipvsSetDest), gone && (op.other == ipvsNewService || op.other == ipvsNewDest):
		err = v.c.Do(v.family, 0, op.other, op.attrs)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op.what, err)
	}
	return nil
}

// send sends changes in one piece; the last one asks for an answer, the others answer when they are refused.
func (v *IPVS) send(ops []ipvsOp, errs []error) error {
	c := v.c
	first := c.seq + 1
	b := v.b[:0]
	for i, op := range ops {
		c.seq++
		at := len(b)
		flags := uint16(unix.NLM_F_REQUEST)
		if i == len(ops)-1 {
			flags |= unix.NLM_F_ACK
		}
		b = append(appendHead(b, v.family, flags, op.cmd, 0), op.attrs...)
		binary.NativeEndian.PutUint32(b[at:], uint32(len(b)-at))
		binary.NativeEndian.PutUint32(b[at+8:], c.seq)
	}
	v.b = b
	if err := c.room(len(b)); err != nil {
		return err
	}
	if err := c.send(b); err != nil {
		return err
	}
	for {
		n, err := c.recv(0)
		if err != nil {
			return err
		}
		for b := c.in[:n]; len(b) >= nlHeader; {
			h, body, rest, ok := cutMessage(b)
			if !ok {
				break
			}
			b = rest
			if h.typ != unix.NLMSG_ERROR || h.seq-first >= uint32(len(ops)) {
				continue
			}
			errs[h.seq-first] = answerError(h.typ, body)
			if h.seq == c.seq {
				return nil
			}
		}
	}
}
