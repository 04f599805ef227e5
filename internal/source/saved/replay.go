package saved

import (
	"context"
	"fmt"
	"hash/maphash"
	"io"
	"time"

	"k8s.io/klog/v2"
)

// replay tells what was kept before, as far as the API has not told it yet, and that it is presumed.
func (s *Source) replay(ctx context.Context, before believed) error {
	if before.problem != nil {
		return before.problem
	}
	info, err := before.f.Stat()
	if err != nil {
		return err
	}
	x, err := survey(io.NewSectionReader(before.f, 0, info.Size()), s.config.Node, s.seed)
	if err == nil {
		err = s.judge(x)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", before.f.Name(), err)
	}
	if x.torn != nil {
		klog.ErrorS(x.torn, "The journal is believed up to its last whole record", "file", before.f.Name(), "bytes", x.end, "of", info.Size())
	}
	r, _, err := read(io.NewSectionReader(before.f, 0, x.end))
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		began := r.at
		body, err := r.next()
		if err == io.EOF {
			s.presumed(x.heard)
			return nil
		}
		if err != nil {
			return err // it was whole a moment ago
		}
		t, keyed, ok := split(body)
		if h := maphash.Bytes(s.seed, body[:keyed]); ok && keyed < len(body) && x.last[h] == began {
			if done := s.again(t, h, body[keyed:]); done {
				return nil
			}
		}
	}
	return nil
}

// judge tells why a journal is not believed.
func (s *Source) judge(x index) error {
	switch age := time.Since(x.heard); {
	case x.heard.IsZero() && x.torn != nil:
		return fmt.Errorf("it is damaged where it should say what there was: %w", x.torn)
	case x.heard.IsZero():
		return fmt.Errorf("it does not say all that there was")
	case age > s.config.MaxAge:
		return fmt.Errorf("it is too old: the API was last heard at %s, %s ago; the limit is %s", x.heard.Format(time.RFC3339), age.Round(time.Second), s.config.MaxAge)
	case age < -s.config.MaxAge: // a node without a battery begins in 1970
		return fmt.Errorf("its age can't be told: the API was last heard at %s, and the clock says %s", x.heard.Format(time.RFC3339), time.Now().Format(time.RFC3339))
	}
	return nil
}

// again tells a thing that was kept, unless the API has told of it. It is done when that has told all.
func (s *Source) again(t thing, h uint64, data []byte) (done bool) {
	tell, err := decode(t, data)
	if err != nil {
		klog.ErrorS(err, "One object in the journal can't be read; going on without it", "object", t.name)
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, told := s.sizes[h]; !told && !s.synced {
		s.replayed[h] = t
		tell(s.to)
	}
	return s.synced
}

// presumed says that all was told that was kept.
func (s *Source) presumed(asOf time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.synced {
		return
	}
	s.status.Replayed, s.status.AsOf = true, asOf
	klog.InfoS("The API does not answer; serving what was known", "asOf", asOf.Format(time.RFC3339), "objects", len(s.replayed))
	s.to.Presumed()
}
