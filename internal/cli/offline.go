package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/config"
	"fairlead/internal/control"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
	"fairlead/internal/source/dir"
)

// offlineFlags gives a command all flags of run, so that the command line of an agent can be pasted, and shows the few that
// matter to it.
func offlineFlags(cmd *cobra.Command, o *config.Options) {
	shown := []string{"control-socket", "manifests", "config", "proxy-mode", "hostname-override", "cluster-cidr", "nodeport-addresses"}
	all := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o.AddFlags(all)
	all.VisitAll(func(f *pflag.Flag) { f.Hidden = f.Hidden || !slices.Contains(shown, f.Name) })
	cmd.Flags().SetNormalizeFunc(all.GetNormalizeFunc())
	cmd.Flags().AddFlagSet(all)
}

// frozen is a state that nobody changes any more: what the kernel held, or what files say.
type frozen struct {
	state    *model.State
	resolver *resolve.Resolver // nil: the kernel gives no reasons
}

func (f frozen) State(_ context.Context, service string) (*model.State, error) {
	if service == "" {
		return f.state, nil
	}
	return control.Only(f.state, service), nil
}

func (f frozen) Why(_ context.Context, service string) (control.Choices, error) {
	if f.resolver == nil {
		return nil, errors.New("the kernel gives no reasons: ask the agent, or --manifests")
	}
	return f.resolver.Why(control.Named(service)), nil
}

func (f frozen) Status(context.Context) (control.Status, error) {
	return control.Status{}, errors.New("there is no agent behind this: ask one")
}

// fromKernel reads the kernel back.
func fromKernel(ctx context.Context, c *config.Config) (frozen, error) {
	d, _, err := newDataplane(ctx, c)
	if err != nil {
		return frozen{}, err
	}
	s, err := d.Dump(ctx)
	if err = errors.Join(err, d.Close()); err != nil {
		return frozen{}, fmt.Errorf("read the kernel back: %w", err)
	}
	if s.Node.Name == "" { // rules do not say where they are
		cidrs := s.Node.ServiceCIDRs
		s.Node = here(c)
		s.Node.ServiceCIDRs = cidrs
	}
	return frozen{state: s}, nil
}

// here is what this machine and the flags say of the node.
func here(c *config.Config) model.Node {
	r := resolve.New(resolverConfig(c, families{v4: true, v6: true}))
	r.Addrs(ownAddrs())
	s := model.NewState()
	s.Apply(r.Delta())
	return s.Node
}

func ownAddrs() []netip.Addr {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out
}

// fromManifests resolves files as an agent on the node would, with the addresses that the Node object says it has.
func fromManifests(ctx context.Context, c *config.Config) (frozen, error) {
	r := resolve.New(resolverConfig(c, families{v4: true, v6: true}))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t := &taker{resolver: r, node: c.Node, synced: cancel}
	if err := dir.New(c.Own.Manifests, nil).Run(ctx, t); err != nil {
		return frozen{}, err
	}
	t.Lock()
	defer t.Unlock()
	r.Addrs(append(t.addrs, netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()))
	s := model.NewState()
	s.Apply(r.Delta())
	return frozen{s, r}, nil
}

// taker is a sink that hands on to a resolver until all was told.
type taker struct {
	sync.Mutex
	resolver *resolve.Resolver
	node     string
	addrs    []netip.Addr
	synced   func()
}

func (t *taker) Service(n types.NamespacedName, s *corev1.Service) {
	t.Lock()
	defer t.Unlock()
	t.resolver.Service(n, s)
}

func (t *taker) Slice(n types.NamespacedName, s *discoveryv1.EndpointSlice) {
	t.Lock()
	defer t.Unlock()
	t.resolver.Slice(n, s)
}

func (t *taker) Node(name string, n *corev1.Node) {
	t.Lock()
	defer t.Unlock()
	t.resolver.Node(name, n)
	if name != t.node || n == nil {
		return
	}
	t.addrs = nil
	for _, a := range n.Status.Addresses {
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			t.addrs = append(t.addrs, ip)
		}
	}
}

func (t *taker) ServiceCIDR(name string, c *networkingv1.ServiceCIDR) {
	t.Lock()
	defer t.Unlock()
	t.resolver.ServiceCIDR(name, c)
}

func (t *taker) Addrs([]netip.Addr) {}

func (t *taker) Presumed() {}

func (t *taker) Synced() { t.synced() }
