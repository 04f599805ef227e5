package cli

import (
	"context"
	"errors"

	"fairlead/internal/config"
	"fairlead/internal/engine"
	"fairlead/internal/model"
	"fairlead/internal/relay"
)

// relays tells whether NodePorts on localhost are relayed: in the modes whose rules can't serve them there, unless somebody
// has switched kube-proxy's gate off.
func relays(c *config.Config) bool { return c.Mode == "nftables" && !c.NoRelay }

// newRelay makes the relay. It is there in every mode, and listens where the state says so.
func (a *agent) newRelay() *relay.Relay {
	return relay.New(relay.Config{Notice: a.notice1, Listening: a.metrics.RelayListening, Failed: a.metrics.RelayFailed,
		Look: func(ctx context.Context, f func(*model.State)) error {
			return a.look(ctx, func(v engine.View) { f(v.State) })
		}})
}

// look asks the engine, once there is one.
func (a *agent) look(ctx context.Context, f func(engine.View)) error {
	if e := a.engine.Load(); e != nil {
		return e.Do(ctx, f)
	}
	return errors.New("starting")
}
