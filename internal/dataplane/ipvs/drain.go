package ipvs

import (
	"context"
	"errors"
	"time"

	"fairlead/internal/kernel"
	"fairlead/internal/model"
)

// reapPeriod is how often what drains is looked at. The kernel does not tell when a destination's last connection ends.
const reapPeriod = 5 * time.Second

// Watch reports what others do to our rules, and looks after what drains; see engine.Watcher.
func (d *Dataplane) Watch(ctx context.Context, drift func(what string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watched := make(chan error, 1)
	go func() { watched <- d.front.Watch(ctx, drift) }()
	tick := time.NewTicker(reapPeriod)
	defer tick.Stop()
	for {
		select {
		case err := <-watched:
			return err
		case <-tick.C:
			if err := d.reap(); err != nil {
				d.cfg.Log(err)
			}
		}
	}
}

// Mend puts right a few elements of our rules; see engine.Mender.
func (d *Dataplane) Mend() ([]model.Key, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.front.Mend()
}

// reap takes out the destinations whose last flow has ended, or whose time is up. While the kernel is not known it does nothing: an Apply
// is due then.
func (d *Dataplane) reap() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.loaded {
		return nil
	}
	var failed error
	for k, l := range d.live {
		if !l.drains() {
			continue
		}
		failed = errors.Join(failed, d.conn.Destinations(k, func(to kernel.Destination) {
			if since := l.dests[to.Addr]; !since.IsZero() && d.over(to, since) {
				d.forget(k, l, to.Addr)
			}
		}))
		if l.owner == nil {
			d.leave(k, l, server{})
		}
		d.end(k, l)
	}
	gone, err := d.put()
	if err = errors.Join(failed, err, d.drop(gone)); err != nil {
		d.loaded = false
	}
	return err
}

func (l *live) drains() bool {
	for _, since := range l.dests {
		if !since.IsZero() {
			return true
		}
	}
	return false
}

func (d *Dataplane) over(to kernel.Destination, since time.Time) bool {
	return to.Active+to.Inactive == 0 || d.cfg.DrainLimit > 0 && time.Since(since) > d.cfg.DrainLimit
}
