package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// The two flavours of iptables, as "iptables --version" calls them.
const (
	flavourNFT    = "nf_tables"
	flavourLegacy = "legacy"
)

// newBackend opens the back end that cfg names, or else the one that this node uses, and looks whether it can serve the
// families of cfg.
func newBackend(ctx context.Context, cfg Config) (backend, error) {
	be, err := openBackend(ctx, cfg.Backend)
	if err != nil {
		return nil, err
	}
	for _, v6 := range [...]bool{false, true} {
		if v6 && !cfg.V6 || !v6 && !cfg.V4 {
			continue
		}
		if _, err := able(be, v6); err != nil {
			return nil, errors.Join(fmt.Errorf("%s, %s: %w", be.Name(), familyName(v6), err), be.Close())
		}
	}
	return be, nil
}

// Able tells for each family why its rules can't be written on this node, nil when they can. The name of the back end is
// that of Config.
func Able(ctx context.Context, name string) (v4, v6 error) {
	be, err := openBackend(ctx, name)
	if err != nil {
		return err, err
	}
	defer be.Close()
	_, v4 = able(be, false)
	_, v6 = able(be, true)
	return v4, v6
}

// LegacyUsed tells why the old tables can hold nothing: the kernel has not loaded what they are made of. Opening that back end would
// load it.
func LegacyUsed() error {
	x, err := kernel.OpenXTables(false)
	if err != nil {
		if x, err = kernel.OpenXTables(true); err != nil {
			return err
		}
	}
	return x.Close()
}

func familyName(v6 bool) string {
	if v6 {
		return "IPv6"
	}
	return "IPv4"
}

// proven is a back end that can tell what its kernel can do.
type proven interface {
	backend
	supports(v6 bool, e kernel.Extension) (bool, error)
}

func openBackend(ctx context.Context, flavour string) (proven, error) {
	if flavour == "" {
		var err error
		if flavour, err = detect(ctx); err != nil {
			return nil, err
		}
	}
	switch flavour {
	case flavourNFT, "nft":
		n, err := newNFT()
		if err != nil {
			return nil, err
		}
		return n, nil
	case flavourLegacy:
		l, err := newLegacy()
		if err != nil {
			return nil, err
		}
		return l, nil
	}
	return nil, fmt.Errorf("iptables back end %q: want nf_tables or legacy", flavour)
}

// detect chooses as iptables-wrapper does, so that all of Kubernetes' programs on a node write to the same place: where the
// kubelet's chains are, or those of another kube-proxy; else what the iptables of the node is; else what the kernel has.
func detect(ctx context.Context) (string, error) {
	nftKube, nftErr := kubeChainsNFT()
	if legacyKube := kubeChainsLegacy(ctx); legacyKube != nftKube {
		if legacyKube {
			return flavourLegacy, nil
		}
		return flavourNFT, nil
	}
	if v, err := installedFlavour(ctx); err == nil && (v == flavourLegacy || nftErr == nil) {
		return v, nil
	}
	switch {
	case nftErr == nil:
		return flavourNFT, nil
	case kernel.Installed(program(false, "restore")):
		return flavourLegacy, nil
	}
	return "", fmt.Errorf("no way to write iptables rules: %w, and no iptables-legacy-restore is installed", nftErr)
}

// kubeChainsNFT tells whether nf_tables holds chains of Kubernetes' programs. An error means that this kernel has no
// nf_tables, or does not let us.
func kubeChainsNFT() (found bool, err error) {
	conn, err := kernel.OpenNFNetlink()
	if err != nil {
		return false, err
	}
	defer conn.Close()
	for _, v6 := range [...]bool{false, true} {
		err := conn.Dump(nftType(unix.NFT_MSG_GETCHAIN), family(v6), nil, func(m kernel.NFMessage) error {
			id, ok := cutChain(m.Attrs, v6)
			found = found || ok && !id.builtin()
			return nil
		})
		if err != nil && !errors.Is(err, kernel.ErrDumpInterrupted) {
			return false, fmt.Errorf("nf_tables: %w", noSubsystem(err))
		}
	}
	return found, nil
}

// noSubsystem says in words what the kernel answers when it has no nf_tables: EINVAL of the netlink family.
func noSubsystem(err error) error {
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w (this kernel has no CONFIG_NF_TABLES)", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w (needs CAP_NET_ADMIN)", err)
	}
	return err
}

// installedFlavour asks the installed iptables: "iptables v1.8.9 (nf_tables)". Before 1.8 there was only legacy, and it said
// nothing.
func installedFlavour(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var out []byte
	cmd := kernel.Command{Name: "iptables", Args: []string{"--version"}}
	cmd.Stdout = func(r io.Reader) (err error) { out, err = io.ReadAll(io.LimitReader(r, 1<<10)); return err }
	if err := cmd.Run(ctx); err != nil {
		return "", err
	}
	if strings.Contains(string(out), flavourNFT) {
		return flavourNFT, nil
	}
	return flavourLegacy, nil
}

// kubeChainsLegacy tells whether the old tables hold chains of Kubernetes' programs. Tables that are not loaded have none.
func kubeChainsLegacy(ctx context.Context) bool {
	found := false
	for _, v6 := range [...]bool{false, true} {
		x, err := kernel.OpenXTables(v6)
		if err != nil {
			continue
		}
		names, err := x.Tables()
		x.Close()
		if err != nil || len(names) == 0 {
			continue
		}
		_ = save(ctx, v6, func(id ChainID, _ string) { found = found || strings.HasPrefix(id.Name, kubePrefix) })
	}
	return found
}

// need is something that rules of ours can't do without, and what for.
type need struct {
	kernel.Extension
	why string
}

// needs are in every rule set; wants only in some Services' rules.
var (
	needs = [...]need{
		{kernel.Extension{Name: "addrtype", Revision: 1}, "to know the node's own addresses"},
		{kernel.Extension{Name: "conntrack", Revision: 3}, "to know new connections"},
		{kernel.Extension{Name: "statistic", Revision: 0}, "to share the load between backends"},
		{kernel.Extension{Name: "DNAT", Revision: 2, Target: true}, "to send packets to backends"},
		{kernel.Extension{Name: "MASQUERADE", Revision: 0, Target: true}, "to hide clients behind the node"},
		{kernel.Extension{Name: "MARK", Revision: 2, Target: true}, "to note what is to be hidden"},
		{kernel.Extension{Name: "REJECT", Revision: 0, Target: true}, "to refuse connections"},
	}
	wants = [...]need{
		{kernel.Extension{Name: "recent", Revision: 1}, "for Services with ClientIP affinity"},
		{kernel.Extension{Name: "sctp", Revision: 0}, "for Services with SCTP ports"},
	}
)

func (e need) String() string {
	kind := "match"
	if e.Target {
		kind = "target"
	}
	return fmt.Sprintf("%s %s (%s)", kind, e.Name, e.why)
}

// able tells in words why rules of one family can't be written: the kernel has no IPv6, no NAT, or lacks a match. What only
// some Services need and the kernel lacks is listed in lacks.
func able(be proven, v6 bool) (lacks []string, err error) {
	if v6 {
		if why := kernel.IPv6Off(); why != "" {
			return nil, errors.New(why)
		}
	}
	for _, n := range needs {
		if ok, err := be.supports(v6, n.Extension); err != nil || !ok {
			return nil, errors.Join(err, fmt.Errorf("this kernel lacks the iptables %s", n))
		}
	}
	for _, n := range wants {
		if ok, _ := be.supports(v6, n.Extension); !ok {
			lacks = append(lacks, n.String())
		}
	}
	return lacks, nil
}

func (n *nft) supports(v6 bool, e kernel.Extension) (bool, error) {
	return n.conn.Supports(family(v6), e)
}

func (l *legacy) supports(v6 bool, e kernel.Extension) (bool, error) {
	x := l.tables[b2i(v6)]
	if x == nil {
		return false, errors.New("this kernel has no legacy iptables of this family")
	}
	return x.Supports(e)
}
