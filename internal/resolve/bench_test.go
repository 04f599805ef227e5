package resolve

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const endpointsEach = 4

type crowdedCluster struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
}

func crowded(n int) crowdedCluster {
	var c crowdedCluster
	for i := range n {
		name := fmt.Sprintf("svc-%d", i)
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name, ResourceVersion: fmt.Sprint(i)}}
		svc.Spec.Type, svc.Spec.ClusterIP = corev1.ServiceTypeNodePort, fmt.Sprintf("10.96.%d.%d", i/256, i%256)
		svc.Spec.Ports = []corev1.ServicePort{{Name: "http", Port: 80, NodePort: int32(20000 + i%40000)}}
		c.services = append(c.services, svc)
		c.slices = append(c.slices, crowdedSlice(i, name, endpointsEach))
	}
	return c
}

func crowdedSlice(i int, service string, n int) *discoveryv1.EndpointSlice {
	port, name, tcp := int32(8080), "http", corev1.ProtocolTCP
	yes, no := true, false
	s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: service + "-abcde", Labels: map[string]string{discoveryv1.LabelServiceName: service}}}
	s.AddressType = discoveryv1.AddressTypeIPv4
	s.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}}
	for j := range n {
		node := fmt.Sprintf("n%d", j)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 100+j, i/256, i%256)}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
		})
	}
	return s
}

func (c crowdedCluster) tell(r *Resolver) {
	for _, s := range c.services {
		r.Service(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s)
	}
	for _, s := range c.slices {
		r.Slice(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s)
	}
}

func benchConfig() Config { return Config{NodeName: "n1", IPv4: true, AllowExternalIPs: true} }

// BenchmarkFull tells everything and resolves it. MiB/resolver is what the resolver itself holds afterwards, without the
// objects and without the state that the engine keeps.
func BenchmarkFull(b *testing.B) {
	for _, n := range []int{1000, 30000} {
		b.Run(fmt.Sprintf("%dx%d", n, endpointsEach), func(b *testing.B) {
			c := crowded(n)
			before := heap()
			var r *Resolver
			start := cpu()
			for b.Loop() {
				r = New(benchConfig())
				c.tell(r)
				if d := r.Delta(); len(d.Frontends) != 2*n {
					b.Fatal(len(d.Frontends))
				}
			}
			b.ReportMetric((cpu()-start).Seconds()*1000/float64(b.N), "cpu-ms/op")
			b.ReportMetric(float64(heap()-before)/(1<<20), "MiB/resolver")
			runtime.KeepAlive(r)
			runtime.KeepAlive(c)
		})
	}
}

// BenchmarkOneSlice changes one slice, back and forth.
func BenchmarkOneSlice(b *testing.B) {
	for _, n := range []int{1000, 30000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			c := crowded(n)
			r := New(benchConfig())
			c.tell(r)
			r.Delta()
			name := c.services[n/2].Name
			nn := types.NamespacedName{Namespace: "bench", Name: name + "-abcde"}
			slices := []*discoveryv1.EndpointSlice{crowdedSlice(n/2, name, endpointsEach-1), crowdedSlice(n/2, name, endpointsEach)}
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				r.Slice(nn, slices[i%2])
				if d := r.Delta(); len(d.Pools) != 1 || len(d.Frontends) != 0 {
					b.Fatal(d.Lines())
				}
				i++
			}
		})
	}
}

// BenchmarkUnchanged tells a Service again that means the same.
func BenchmarkUnchanged(b *testing.B) {
	c := crowded(1000)
	r := New(benchConfig())
	c.tell(r)
	r.Delta()
	again := c.services[500].DeepCopy()
	nn := types.NamespacedName{Namespace: again.Namespace, Name: again.Name}
	b.ReportAllocs()
	for b.Loop() {
		r.Service(nn, again)
		if !r.Delta().Empty() {
			b.Fatal("not empty")
		}
	}
}

// BenchmarkSharedAddress tells Services that share one external address on many ports, as MetalLB permits.
func BenchmarkSharedAddress(b *testing.B) {
	const n = 5000
	c := crowded(n)
	for i, s := range c.services {
		s.Spec.ExternalIPs, s.Spec.Ports[0].Port = []string{"203.0.113.1"}, int32(1000+i)
	}
	for b.Loop() {
		r := New(benchConfig())
		c.tell(r)
		if d := r.Delta(); len(d.Frontends) != 3*n {
			b.Fatal(len(d.Frontends))
		}
	}
}

// cpu is what the process has used so far, garbage collection included: on a machine that is shared it says more than time.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
