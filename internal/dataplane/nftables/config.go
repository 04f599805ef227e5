package nftables

// Config is what the rules depend on beside the model.
type Config struct {
	V4, V6        bool        // families to serve
	MasqueradeBit int         // bit of the packet mark that asks for masquerade (kube-proxy's nftables.masqueradeBit); 0..31
	KeepInvalid   bool        // do not drop packets that conntrack calls invalid (conntrack.tcpBeLiberal)
	Log           func(error) // told of what does not work, and keeps nothing else from working; may be nil
	Ahead         *Ahead      // not nil: the table stands ahead of another balancer, which chooses the endpoints
}

func (c Config) mark() uint32 { return 1 << c.MasqueradeBit }

func (c Config) families() []bool {
	switch {
	case c.V4 && c.V6:
		return []bool{false, true}
	case c.V4:
		return []bool{false}
	case c.V6:
		return []bool{true}
	}
	return nil
}
