package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// NFBatch collects nf_tables messages that become true together or not at all. Its memory is used again after Reset.
type NFBatch struct {
	b []byte
	n int
}

// Reset starts an empty transaction.
func (t *NFBatch) Reset() {
	if cap(t.b) > keepMost {
		t.b = nil
	}
	t.b, t.n = t.b[:0], 0
	t.b = appendHead(t.b, unix.NFNL_MSG_BATCH_BEGIN, unix.NLM_F_REQUEST, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	t.b = AppendAttrU32(t.b, unix.NFNL_BATCH_GENID, 0) // 0 is any
	binary.NativeEndian.PutUint32(t.b, uint32(len(t.b)))
}

// keepMost is the largest buffer that is kept for the next transaction; most are far smaller.
const keepMost = 256 << 10

// Expect makes the kernel refuse the transaction with ERESTART when anything in nf_tables changed since it had this
// generation; see [NFNetlink.Generation].
func (t *NFBatch) Expect(generation uint32) {
	binary.BigEndian.PutUint32(t.b[nlHeader+nfHeader+attrHeader:], generation)
}

// Add appends a message: kind is one of NFT_MSG_*, flags of NLM_F_CREATE and its kin; attrs appends the attributes.
func (t *NFBatch) Add(kind uint8, flags uint16, family uint8, attrs func(b []byte) []byte) {
	at := len(t.b)
	t.b = appendHead(t.b, unix.NFNL_SUBSYS_NFTABLES<<8|uint16(kind), unix.NLM_F_REQUEST|flags, family, 0)
	t.b = attrs(t.b)
	binary.NativeEndian.PutUint32(t.b[at:], uint32(len(t.b)-at))
	t.n++
}

// Len is the number of messages added.
func (t *NFBatch) Len() int { return t.n }

// Size is the length in bytes.
func (t *NFBatch) Size() int { return len(t.b) }

// BatchError is the first refusal in a transaction, of which nothing was done then.
type BatchError struct {
	Index int // of the message, counted from 0 in the order of Add; -1 when the transaction as a whole failed
	Err   error
}

func (e *BatchError) Error() string {
	if e.Index < 0 {
		return fmt.Sprintf("nf_tables transaction: %v", e.Err)
	}
	return fmt.Sprintf("nf_tables message %d: %v", e.Index, e.Err)
}

func (e *BatchError) Unwrap() error { return e.Err }

// Commit sends the transaction. An error is a [BatchError], or of the socket.
func (c *NFNetlink) Commit(t *NFBatch) error {
	if t.n == 0 {
		return nil
	}
	return TryFault(func() error { return c.commit(t) })
}

func (c *NFNetlink) commit(t *NFBatch) error {
	first := c.seq + 1
	last := c.number(t)
	if err := c.room(len(t.b)); err != nil {
		return err
	}
	if err := c.send(t.b); err != nil {
		return fmt.Errorf("%w (transaction of %d KiB)", err, len(t.b)>>10)
	}
	return c.outcome(first, last)
}

// number gives the messages their sequence numbers, asks for an answer to the last one, and appends the end mark.
func (c *NFNetlink) number(t *NFBatch) (last uint32) {
	at := 0
	for off := 0; off < len(t.b); {
		at = off
		c.seq++
		binary.NativeEndian.PutUint32(t.b[off+8:], c.seq)
		off += align4(int(binary.NativeEndian.Uint32(t.b[off:])))
	}
	last = c.seq
	flags := binary.NativeEndian.Uint16(t.b[at+6:])
	binary.NativeEndian.PutUint16(t.b[at+6:], flags|unix.NLM_F_ACK)

	c.seq++
	end := len(t.b)
	t.b = appendHead(t.b, unix.NFNL_MSG_BATCH_END, unix.NLM_F_REQUEST, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	binary.NativeEndian.PutUint32(t.b[end:], uint32(len(t.b)-end))
	binary.NativeEndian.PutUint32(t.b[end+8:], c.seq)
	return last
}

// room makes the send buffer large enough: the kernel takes a transaction in one piece (netlink_sendmsg).
func (c *NFNetlink) room(size int) error {
	if c.buffer >= size+4096 {
		return nil
	}
	have, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return fmt.Errorf("netfilter: size of send buffer: %w", err)
	}
	if c.buffer = have; have >= size+4096 {
		return nil
	}
	want := size + size/4 + 4096
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, want); err != nil {
		return fmt.Errorf("netfilter: send buffer of %d bytes (needs CAP_NET_ADMIN): %w", want, err)
	}
	return nil
}

// outcome reads the answers, which all wait in the socket by now: one for each refused message, then one for the last message;
// or one numbered first when the transaction as a whole was refused.
func (c *NFNetlink) outcome(first, last uint32) error {
	var bad *BatchError
	done := false
	for {
		n, err := c.recv(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN) && bad != nil:
			return bad
		case errors.Is(err, unix.EAGAIN):
			return errors.New("nf_tables transaction: no answer")
		case errors.Is(err, unix.ENOBUFS): // more refusals than the socket holds; the first ones are there
			continue
		case err != nil:
			return err
		}
		for b := c.in[:n]; len(b) >= nlHeader; {
			h, body, rest, ok := cutMessage(b)
			if !ok {
				break
			}
			b = rest
			if h.typ != unix.NLMSG_ERROR || h.seq-first > last-first {
				continue
			}
			done = done || h.seq == last
			if err := answerError(h.typ, body); err != nil && (bad == nil || h.seq == first) {
				bad = &BatchError{Index: int(h.seq-first) - 1, Err: err}
			}
		}
		if done && bad == nil {
			return nil
		}
	}
}

// Generation is the number of the last transaction on nf_tables in this namespace.
func (c *NFNetlink) Generation() (uint32, error) {
	m, err := c.Get(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, nil)
	if err != nil {
		return 0, fmt.Errorf("nf_tables generation: %w", err)
	}
	for typ, v := range Attrs(m.Attrs) {
		if typ == unix.NFTA_GEN_ID {
			return AttrU32(v), nil
		}
	}
	return 0, errors.New("nf_tables generation: not in the answer")
}

// Messages gives what was added, in its order: kind is one of NFT_MSG_*. The attributes are not copied.
func (t *NFBatch) Messages(each func(kind uint8, flags uint16, family uint8, attrs []byte)) {
	for b := t.b; len(b) >= nlHeader; {
		h, body, rest, ok := cutMessage(b)
		if !ok {
			return
		}
		if b = rest; h.typ>>8 == unix.NFNL_SUBSYS_NFTABLES && len(body) >= nfHeader {
			each(uint8(h.typ), h.flags, body[0], body[nfHeader:])
		}
	}
}
