package lab

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// Noise is another program that writes to the firewall of a node all the time: it makes and removes an nf_tables table of
// its own, and holds the xtables lock half of the time.
type Noise struct {
	cancel context.CancelFunc
	done   chan struct{}
	writes int
	err    error
}

const (
	noisePause = 3 * time.Millisecond  // between two writes
	noiseHold  = 30 * time.Millisecond // of the lock, and as long without it
)

// StartNoise begins to write, until Stop or the end of the world.
func (a *Actor) StartNoise() *Noise {
	ctx, cancel := context.WithCancel(a.world.ctx)
	n := &Noise{cancel: cancel, done: make(chan struct{})}
	a.running.Go(func() {
		defer close(n.done)
		n.err = a.Do(func() error { return n.write(ctx, a.lockFile()) })
	})
	return n
}

// lockFile is the xtables lock of the actor's programs.
func (a *Actor) lockFile() string { return filepath.Join(a.world.dir, a.Name+".xtables.lock") }

func (n *Noise) write(ctx context.Context, lockFile string) error {
	c, err := kernel.OpenNFNetlink()
	if err != nil {
		return err
	}
	defer c.Close()
	lock, err := os.OpenFile(lockFile, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	for held, since := false, time.Now(); ctx.Err() == nil; time.Sleep(noisePause) {
		if time.Since(since) > noiseHold {
			how := unix.LOCK_UN
			if !held {
				how = unix.LOCK_EX | unix.LOCK_NB
			}
			if err := unix.Flock(int(lock.Fd()), how); err == nil {
				held = !held
			}
			since = time.Now()
		}
		if err := noisyTable(c); err != nil {
			return err
		}
		n.writes++
	}
	return nil
}

func noisyTable(c *kernel.NFNetlink) error {
	name := func(b []byte) []byte { return kernel.AppendAttrString(b, unix.NFTA_TABLE_NAME, "noise") }
	var t kernel.NFBatch
	for _, kind := range []uint8{unix.NFT_MSG_NEWTABLE, unix.NFT_MSG_DELTABLE} {
		t.Reset()
		flags := uint16(0)
		if kind == unix.NFT_MSG_NEWTABLE {
			flags = unix.NLM_F_CREATE
		}
		t.Add(kind, flags, unix.NFPROTO_INET, name)
		if err := c.Commit(&t); err != nil {
			return fmt.Errorf("noise: %w", err)
		}
	}
	return nil
}

// Stop ends the noise and tells how often it wrote.
func (n *Noise) Stop() (writes int, err error) {
	n.cancel()
	<-n.done
	return n.writes, n.err
}
