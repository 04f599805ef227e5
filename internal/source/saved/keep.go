package saved

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"
)

// How the journal is written.
const (
	writeEvery  = time.Second      // what was told is written after so long
	sureEvery   = 10 * time.Second // what was written is made sure to be on the disk at most so often
	beatEvery   = time.Minute      // when the API was last heard is written at most so often
	muchWaiting = 128 << 10        // bytes: they are written at once
	mostSpare   = 512 << 10        // bytes of room that is used again
	mostWaiting = 16 << 20         // bytes: a disk that lets so much wait is given up
	floor       = 1 << 20          // bytes of a journal that are not worth a compaction
)

var errSlow = errors.New("the disk takes too long")

// keep writes what was told, until ctx ends.
func (s *Source) keep(ctx context.Context) {
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for last := false; !last; {
		var sure <-chan time.Time
		if d := s.disk; d.dirty && d.placed {
			sure = time.After(time.Until(d.surely.Add(sureEvery)))
		}
		beats := false
		select {
		case <-ctx.Done():
		case <-s.hurry:
		case <-sure:
		case <-beat.C:
			beats = true
		case <-s.wake:
			select {
			case <-ctx.Done():
			case <-s.hurry:
			case <-time.After(writeEvery):
			}
		}
		last = ctx.Err() != nil // what comes after is not waited for, what came before is written
		if err := s.work(beats || last); err != nil {
			s.stop(err)
		}
		s.clear()
	}
	s.end()
}

// work writes what waits, and does what is due.
func (s *Source) work(beats bool) error {
	d := s.disk
	s.mu.Lock()
	waiting, synced, live, stopped := s.buf, s.synced, s.live, s.status.Problem != ""
	s.buf, s.spare = s.spare, nil
	s.mu.Unlock()
	if stopped {
		return nil
	}
	if err := d.write(waiting); err != nil {
		return err
	}
	lastHeard := s.config.Heard()
	switch {
	case !synced:
	case !d.placed: // now it holds everything
		if lastHeard.IsZero() {
			lastHeard = time.Now()
		}
		if err := errors.Join(d.write(appendHeard(nil, lastHeard)), d.place(d.f)); err != nil {
			return err
		}
		s.beat = lastHeard
	case d.size > 2*live+floor, beats && d.missing():
		if err := d.compact(s.seed, lastHeard); err != nil {
			return err
		}
		s.beat = lastHeard
	case beats && lastHeard.After(s.beat):
		if err := d.write(appendHeard(nil, lastHeard)); err != nil {
			return err
		}
		s.beat = lastHeard
	}
	s.mu.Lock()
	s.status.Bytes = d.size
	if s.spare == nil && cap(waiting) <= mostSpare {
		s.spare = waiting[:0]
	}
	s.mu.Unlock()
	if d.dirty && d.placed && time.Since(d.surely) >= sureEvery {
		return d.sync()
	}
	return nil
}

// stop gives the journal up.
func (s *Source) stop(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopLocked(err)
}

func (s *Source) stopLocked(err error) {
	if s.status.Problem != "" {
		return
	}
	s.status.Problem, s.buf = err.Error(), nil
	klog.ErrorS(err, "The state can't be kept on disk; this run does without, and traffic is not affected", "dir", s.config.Dir)
	give(s.hurry)
}

// clear removes, once the journal was given up, what a later process must not believe: our own journal at once, and that of the
// process before when the API has told all.
func (s *Source) clear() {
	s.mu.Lock()
	stopped, synced := s.status.Problem != "", s.synced
	s.mu.Unlock()
	if !stopped || s.cleared {
		return
	}
	err := s.disk.discard()
	if synced {
		s.cleared = true
		err = errors.Join(err, s.disk.forget())
	}
	if err != nil {
		klog.ErrorS(err, "What is kept on disk is out of date, and can't be removed", "dir", s.config.Dir)
	}
}

// end closes the journal, if it is one.
func (s *Source) end() {
	d := s.disk
	if d.f == nil {
		return
	}
	if !d.placed {
		_ = d.discard() // the one of before is better
		return
	}
	if err := errors.Join(d.f.Sync(), d.f.Close()); err != nil {
		klog.ErrorS(err, "Close the journal", "dir", s.config.Dir)
	}
	d.f = nil
}
