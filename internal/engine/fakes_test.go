package engine_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"io"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"fairlead/internal/engine"
	"fairlead/internal/model"
	"fairlead/internal/source"
)

func TestMain(m *testing.M) {
	quiet := flag.NewFlagSet("klog", flag.PanicOnError)
	klog.InitFlags(quiet)
	_ = quiet.Parse([]string{"-logtostderr=false", "-stderrthreshold=FATAL"})
	klog.SetOutput(io.Discard)
	goleak.VerifyTestMain(m)
}

// resolver makes a frontend of each Service: its address is in spec.clusterIP, and there is nothing else to it.
type resolver struct {
	calls   int
	deltas  int
	held    map[types.NamespacedName]model.Key
	next    model.Delta
	notices []model.Notice
	port    uint16 // of all frontends: a setting
}

func (r *resolver) Service(n types.NamespacedName, s *corev1.Service) {
	r.calls++
	old, had := r.held[n]
	if had {
		delete(r.held, n)
		r.next = r.next.Then(model.Delta{GoneFrontends: []model.Key{old}})
	}
	if s == nil || s.Spec.ClusterIP == "" {
		return
	}
	k := model.Key{IP: netip.MustParseAddr(s.Spec.ClusterIP), Port: cmp.Or(r.port, 80), Proto: model.TCP}
	if r.held == nil {
		r.held = map[types.NamespacedName]model.Key{}
	}
	r.held[n] = k
	r.next = r.next.Then(model.Delta{Frontends: []model.Frontend{{Key: k, About: model.About{Service: n.String()}}}})
}

// setPort changes the setting.
func (r *resolver) setPort(port uint16) {
	r.port = port
	for n, old := range r.held {
		k := old
		if k.Port = port; k != old {
			r.held[n] = k
			r.next = r.next.Then(model.Delta{GoneFrontends: []model.Key{old}, Frontends: []model.Frontend{{Key: k, About: model.About{Service: n.String()}}}})
		}
	}
}

func (r *resolver) Slice(types.NamespacedName, *discoveryv1.EndpointSlice) { r.calls++ }
func (r *resolver) Node(string, *corev1.Node)                              { r.calls++ }
func (r *resolver) ServiceCIDR(string, *networkingv1.ServiceCIDR)          { r.calls++ }
func (r *resolver) Addrs([]netip.Addr)                                     { r.calls++ }

func (r *resolver) Delta() model.Delta {
	d := r.next
	r.next = model.Delta{}
	r.deltas++
	return d
}

func (r *resolver) Notices() []model.Notice {
	n := r.notices
	r.notices = nil
	return n
}

// call is one Apply that a plane saw.
type call struct {
	at time.Duration // since the start
	d  model.Delta
}

// plane remembers what it was asked, and does as it is told.
type plane struct {
	mu     sync.Mutex
	start  time.Time
	calls  []call
	fail   func(n int) error // by the number of the call, from 1
	takes  time.Duration
	found  *model.State
	unread error
}

func (p *plane) Apply(ctx context.Context, d model.Delta) error {
	p.mu.Lock()
	p.calls = append(p.calls, call{time.Since(p.start), d})
	n, fail, takes := len(p.calls), p.fail, p.takes
	p.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(takes):
	}
	if fail != nil {
		return fail(n)
	}
	return nil
}

func (p *plane) Dump(context.Context) (*model.State, error) {
	if p.found == nil {
		return model.NewState(), p.unread
	}
	return p.found, nil
}

func (p *plane) Remove(context.Context) error { return nil }
func (p *plane) Close() error                 { return nil }

func (p *plane) seen() []call {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

var errPlane = errors.New("no luck")

func always(int) error { return errPlane }

// observer remembers what it was told.
type observer struct {
	applied []model.Delta
	failed  []error
	drifts  []string
}

func (o *observer) Applied(d model.Delta, _ time.Duration) { o.applied = append(o.applied, d) }
func (o *observer) Failed(err error, _ model.Delta)        { o.failed = append(o.failed, err) }
func (o *observer) Drifted(what string)                    { o.drifts = append(o.drifts, what) }

// rig is an engine that runs in a bubble of fake time.
type rig struct {
	*engine.Engine
	t        *testing.T
	resolver *resolver
	plane    *plane
	observer *observer
	sink     source.Sink
	stop     func()
}

// bubble runs f with an engine on fake time, and ends it.
func bubble(t *testing.T, c engine.Config, p *plane, f func(*rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, resolver: &resolver{}, plane: p, observer: &observer{}}
		p.start = time.Now()
		c.Resolver, c.Observers = r.resolver, []engine.Observer{r.observer}
		if c.Dataplane == nil {
			c.Dataplane = p
		}
		r.Engine = engine.New(c)
		r.sink = r.Sink("test")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		r.stop = func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
			done <- nil
		}
		f(r)
		r.stop()
	})
}

// service tells the sink of a Service; no address makes it one that resolves to nothing.
func (r *rig) service(name, ip string) {
	n := types.NamespacedName{Namespace: "ns", Name: name}
	r.sink.Service(n, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip}})
}

func (r *rig) gone(name string) {
	r.sink.Service(types.NamespacedName{Namespace: "ns", Name: name}, nil)
}

// calls waits d, and gives what the plane was asked since the start.
func (r *rig) calls(d time.Duration) []call {
	time.Sleep(d)
	synctest.Wait()
	return r.plane.seen()
}

// want checks how often the plane was asked until d from now.
func (r *rig) want(n int, d time.Duration) []call {
	r.t.Helper()
	got := r.calls(d)
	if len(got) != n {
		r.t.Fatalf("%d rounds, want %d: %v", len(got), n, got)
	}
	return got
}

func ips(fs []model.Frontend) []string {
	var out []string
	for _, f := range fs {
		out = append(out, f.Key.IP.String())
	}
	slices.Sort(out)
	return out
}

func keyIPs(ks []model.Key) []string {
	var out []string
	for _, k := range ks {
		out = append(out, k.IP.String())
	}
	slices.Sort(out)
	return out
}
