package ipvs

import (
	"time"

	"fairlead/internal/dataplane/nftables"
)

// Config is what the dataplane depends on beside the model.
type Config struct {
	V4, V6        bool          // families to serve
	MasqueradeBit int           // bit of the packet mark that asks for masquerade; the one below is ours too; 0..31
	Scheduler     string        // of all virtual servers, as the kernel names it; empty is rr
	DrainLimit    time.Duration // how long an endpoint that was removed keeps its flows at most; 0 is for as long as they live
	TCPTimeout    time.Duration // of idle connections; 0 leaves it as it is
	TCPFinTimeout time.Duration // of connections after a FIN
	UDPTimeout    time.Duration // of UDP flows
	KeepInvalid   bool          // do not drop packets that conntrack calls invalid
	Log           func(error)   // told of what does not work, and keeps nothing else from working; may be nil
}

// DefaultScheduler is kube-proxy's too.
const DefaultScheduler = "rr"

func (c Config) families() []bool {
	var out []bool
	if c.V4 {
		out = append(out, false)
	}
	if c.V6 {
		out = append(out, true)
	}
	return out
}

func (c Config) serves(v6 bool) bool { return v6 && c.V6 || !v6 && c.V4 }

// tableName is of the nftables table ahead.
const tableName = "fairlead-ipvs"

func (c Config) front() nftables.Config {
	return nftables.Config{V4: c.V4, V6: c.V6, MasqueradeBit: c.MasqueradeBit, KeepInvalid: c.KeepInvalid, Log: c.Log,
		Ahead: &nftables.Ahead{Table: tableName}}
}
