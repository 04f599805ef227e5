package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
)

// The API server takes 4 ms for a Service with its slice and address while there are few, and more than 20 ms when there are
// many. So it makes the first of each itself, defaults and all, and the others are written to etcd as copies of those, in
// the encoding in which it stores them. It sees them like what another API server of the cluster has written.

// etcdURL is where etcd's JSON gateway takes transactions.
var etcdURL = fmt.Sprintf("http://127.0.0.1:%d/v3/kv/txn", apiPort+1)

// stored are the objects of one Service. Every Service has an address object of its own in the API.
type stored struct {
	service *corev1.Service
	slice   *discoveryv1.EndpointSlice
	address *networkingv1.IPAddress
}

// first has the API server make the objects of Service 0.
func (c *control) first(endpoints int) (*stored, error) {
	s := &stored{new(corev1.Service), new(discoveryv1.EndpointSlice), new(networkingv1.IPAddress)}
	if err := c.send(http.MethodPost, servicesPath, serviceObject(0), s.service); err != nil {
		return nil, err
	}
	if err := c.send(http.MethodPost, slicesPath, sliceObject(0, 0, endpoints), s.slice); err != nil {
		return nil, err
	}
	path := "/apis/networking.k8s.io/v1/ipaddresses/" + serviceAddr(0).String()
	if err := c.send(http.MethodGet, path, nil, s.address); err != nil {
		return nil, err
	}
	s.service.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Service"))
	s.slice.SetGroupVersionKind(discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"))
	s.address.SetGroupVersionKind(networkingv1.SchemeGroupVersion.WithKind("IPAddress"))
	return s, nil
}

// of are the objects of another Service that are like these.
func (s *stored) of(i, endpoints int) *stored {
	o := &stored{s.service.DeepCopy(), s.slice.DeepCopy(), s.address.DeepCopy()}
	for kind, object := range []metav1.Object{o.service, o.slice, o.address} {
		object.SetUID(types.UID(fmt.Sprintf("bea7be27-0000-4000-%04d-%012d", kind, i)))
		object.SetResourceVersion("") // etcd's own
	}
	service, slice := serviceObject(i), sliceObject(i, 0, endpoints)
	o.service.Name, o.service.Labels = service.Name, service.Labels
	o.service.Spec.ClusterIP, o.service.Spec.ClusterIPs = service.Spec.ClusterIP, service.Spec.ClusterIPs
	o.slice.Name, o.slice.Labels, o.slice.Endpoints = slice.Name, slice.Labels, slice.Endpoints
	o.address.Name, o.address.Spec.ParentRef.Name = serviceAddr(i).String(), service.Name
	return o
}

// operation is one of a transaction of etcd's JSON gateway; keys and values are base64 there, as encoding/json has them.
type operation struct {
	Put    *keyValue `json:"request_put,omitempty"`
	Delete *keyValue `json:"request_delete_range,omitempty"`
}

type keyValue struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value,omitempty"`
}

// keys are where the API server keeps the objects of a Service: it, its slice, its address.
func keys(i int) [3][]byte {
	name, addr := serviceName(i), serviceAddr(i)
	return [3][]byte{[]byte("/registry/services/specs/default/" + name), []byte("/registry/endpointslices/default/" + sliceName(i)),
		[]byte("/registry/ipaddresses/" + addr.String())}
}

func (s *stored) puts(i int) ([]operation, error) {
	var all []operation
	encoder := protobuf.NewSerializer(nil, nil)
	for n, object := range []runtime.Object{s.service, s.slice, s.address} {
		var value bytes.Buffer
		if err := encoder.Encode(object, &value); err != nil {
			return nil, fmt.Errorf("encode %s of %s: %w", object.GetObjectKind().GroupVersionKind().Kind, serviceName(i), err)
		}
		all = append(all, operation{Put: &keyValue{Key: keys(i)[n], Value: value.Bytes()}})
	}
	return all, nil
}

func deletes(i int) (all []operation) {
	for _, k := range keys(i) {
		all = append(all, operation{Delete: &keyValue{Key: k}})
	}
	return all
}

// resize has that many Services in the API; what is there already stays as it is. The first is never taken away.
func (b *bench) resize(services int) (err error) {
	if b.first == nil {
		if b.first, err = b.api.first(b.o.endpoints); err != nil {
			return err
		}
		b.filled = 1
	}
	step := func(i int) ([]operation, error) { return b.first.of(i, b.o.endpoints).puts(i) }
	if services < b.filled {
		step = func(i int) ([]operation, error) { b.set[i] = 0; return deletes(i), nil }
	}
	if err := transact(min(b.filled, services), max(b.filled, services), step); err != nil {
		return err
	}
	b.filled = services
	return b.api.check(services)
}

// transact writes the operations of the Services from first until before end, those of many in one transaction, some
// transactions at a time.
func transact(first, end int, of func(i int) ([]operation, error)) error {
	const (
		workers = 4
		at      = 40 // Services in a transaction: etcd takes 128 operations
	)
	next := make(chan int)
	failed := make([]error, workers)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for from := range next {
				if failed[w] != nil {
					continue // drain
				}
				var ops []operation
				for i := from; i < min(end, from+at) && failed[w] == nil; i++ {
					var more []operation
					more, failed[w] = of(i)
					ops = append(ops, more...)
				}
				if failed[w] == nil {
					failed[w] = commit(ops)
				}
			}
		})
	}
	for i := first; i < end; i += at {
		next <- i
	}
	close(next)
	all.Wait()
	return errors.Join(failed...)
}

func commit(ops []operation) error {
	body, err := json.Marshal(map[string]any{"success": ops})
	if err != nil {
		return err
	}
	answer, err := http.Post(etcdURL, "application/json", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("write to etcd: %w", err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		return fmt.Errorf("write to etcd: %s, %v: %.500s", answer.Status, err, text)
	}
	return nil
}

// check waits until the API tells of so many slices, and asks whether the last Service is there as it was meant. Its cache hears
// from etcd a moment later.
func (c *control) check(services int) error {
	for until := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		count, err := c.count(slicesPath)
		if err != nil {
			return err
		}
		if count == services {
			break
		}
		if time.Now().After(until) {
			return fmt.Errorf("the API has %d EndpointSlices, want %d", count, services)
		}
	}
	want, got := serviceObject(services-1), new(corev1.Service)
	if err := c.send(http.MethodGet, servicesPath+"/"+want.Name, nil, got); err != nil {
		return err
	}
	if got.Spec.ClusterIP != want.Spec.ClusterIP || got.Spec.Type != corev1.ServiceTypeClusterIP || len(got.Spec.Ports) != 1 {
		return fmt.Errorf("the API has Service %s as %+v", got.Name, got.Spec)
	}
	return nil
}

// count is how many objects a list has, without the list.
func (c *control) count(path string) (int, error) {
	var list metav1.PartialObjectMetadataList
	if err := c.send(http.MethodGet, path+"?limit=1", nil, &list); err != nil {
		return 0, err
	}
	n := len(list.Items)
	if list.RemainingItemCount != nil {
		n += int(*list.RemainingItemCount)
	}
	return n, nil
}
