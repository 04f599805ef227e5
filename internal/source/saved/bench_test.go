package saved

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"fairlead/internal/source"
)

const many = 30_000 // Services, and slices of 4 endpoints

type nowhere struct{ source.Sink }

func (nowhere) Service(types.NamespacedName, *corev1.Service)          {}
func (nowhere) Slice(types.NamespacedName, *discoveryv1.EndpointSlice) {}
func (nowhere) Presumed()                                              {}
func (nowhere) Synced()                                                {}

// cluster is what is left of it after trimming.
func cluster() (services []*corev1.Service, slices []*discoveryv1.EndpointSlice) {
	yes, no, port, proto, zone := true, false, int32(8080), corev1.ProtocolTCP, "eu-central-1a"
	for i := range many {
		ns, n := fmt.Sprintf("team-%d", i%100), fmt.Sprintf("service-%05d", i)
		s := service(n, fmt.Sprintf("10.96.%d.%d", i>>8, i&255))
		s.Namespace, s.UID = ns, types.UID(fmt.Sprintf("%08d-aaaa-bbbb-cccc-dddddddddddd", i))
		s.Spec.Type, s.Spec.SessionAffinity, s.Spec.ClusterIPs = corev1.ServiceTypeClusterIP, corev1.ServiceAffinityNone, []string{s.Spec.ClusterIP}
		services = append(services, s)
		e := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: n + "-x7k2p", ResourceVersion: fmt.Sprint(1_000_000 + i),
			Generation: 3, Labels: map[string]string{discoveryv1.LabelServiceName: n}}, AddressType: discoveryv1.AddressTypeIPv4,
			Ports: []discoveryv1.EndpointPort{{Port: &port, Protocol: &proto}}}
		for j := range 4 {
			node := fmt.Sprintf("node-%04d", (i+j)%1000)
			e.Endpoints = append(e.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.128.%d.%d", i>>8, i&255)},
				Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}, NodeName: &node, Zone: &zone,
				TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: fmt.Sprintf("%s-6d4cf56db6-%05d", n, j), UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-%04d-000000000000", i, j))}})
		}
		slices = append(slices, e)
	}
	return services, slices
}

func listAll(to source.Sink, services []*corev1.Service, slices []*discoveryv1.EndpointSlice) {
	for i, s := range services {
		to.Service(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, s)
		e := slices[i]
		to.Slice(types.NamespacedName{Namespace: e.Namespace, Name: e.Name}, e)
	}
}

// BenchmarkList is the first list of a large cluster, as far as the source waits for it; then, until it is on the disk. Beside it,
// ns/object, what the source waits for each, and bytes/object, of the journal.
func BenchmarkList(b *testing.B) {
	services, slices := cluster()
	b.ReportAllocs()
	var told, kept time.Duration
	var bytes int64
	for i := 0; b.Loop(); i++ {
		a := api{make(chan source.Sink, 1)}
		s := New(Config{Of: a, Dir: filepath.Join(b.TempDir(), fmt.Sprint(i)), Node: "n1", MaxAge: time.Hour})
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx, nowhere{}) }()
		to := <-a.ready
		start := time.Now()
		listAll(to, services, slices)
		to.Synced()
		told += time.Since(start)
		cancel()
		<-done
		kept += time.Since(start)
		now := s.Status()
		if bytes = now.Bytes; now.Problem != "" || now.Objects != 2*many {
			b.Fatalf("%+v", now)
		}
	}
	b.ReportMetric(float64(told.Nanoseconds())/float64(b.N*2*many), "ns/object")
	b.ReportMetric(float64(bytes)/(2*many), "bytes/object")
	b.ReportMetric(float64(kept.Milliseconds())/float64(b.N), "ms-on-disk")
}

// BenchmarkReplay is a start without the API, from when the API is late until all was told; and, in its second part, a compaction.
func BenchmarkReplay(b *testing.B) {
	services, slices := cluster()
	dir := b.TempDir()
	run := func(wait time.Duration, during func(s *Source, to source.Sink)) {
		a := api{make(chan source.Sink, 1)}
		s := New(Config{Of: a, Dir: dir, Node: "n1", MaxAge: time.Hour, Wait: wait})
		ctx, cancel := context.WithCancel(b.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx, nowhere{}) }()
		during(s, <-a.ready)
		cancel()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
	}
	run(time.Hour, func(_ *Source, to source.Sink) { listAll(to, services, slices); to.Synced() })
	b.Run("replay", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			run(time.Nanosecond, func(s *Source, _ source.Sink) {
				for !s.Status().Replayed {
					time.Sleep(time.Millisecond)
				}
			})
		}
	})
	b.Run("compact", func(b *testing.B) {
		b.ReportAllocs()
		run(time.Hour, func(s *Source, to source.Sink) {
			listAll(to, services, slices)
			to.Synced()
			for s.Status().Bytes < 10<<20 {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(100 * time.Millisecond) // the writer rests; nobody tells it anything
			for b.Loop() {
				if err := s.disk.compact(s.seed, time.Now()); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}
