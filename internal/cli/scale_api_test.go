package cli

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// asAPI makes the test binary an API server of so many Services and endpoints ("30000x4"), in a process of its own, so that its
// memory is not the agent's. It prints its address, streams lists as protobuf, and for each number that it reads (one a line)
// changes the endpoints of that Service.
const asAPI = "FAIRLEAD_SCALE_API"

// scale is how many Services, and endpoints of each.
type scale struct{ services, endpoints int }

func parseScale(text string) (scale, error) {
	var s scale
	if n, err := fmt.Sscanf(text, "%dx%d", &s.services, &s.endpoints); err != nil || n != 2 || s.services < 1 || s.endpoints < 1 {
		return s, fmt.Errorf("%q: want a scale like 30000x4", text)
	}
	return s, nil
}

func (s scale) String() string { return fmt.Sprintf("%dx%d", s.services, s.endpoints) }

// scaleAPI is that server.
type scaleAPI struct {
	scale
	mu    sync.Mutex
	moved map[int]int // how often the endpoints of a Service were changed
	slice chan []byte // frames for the watch of slices
}

func serveScale(text string) error {
	s, err := parseScale(text)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	a := &scaleAPI{scale: s, moved: map[int]int{}, slice: make(chan []byte, 1024)}
	fmt.Println(l.Addr())
	go func() {
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			if i, err := strconv.Atoi(lines.Text()); err == nil {
				a.change(i)
			}
		}
		os.Exit(0) // whoever started us has ended
	}()
	return http.Serve(l, a)
}

func (a *scaleAPI) change(i int) {
	a.mu.Lock()
	a.moved[i]++
	n := a.moved[i]
	a.mu.Unlock()
	a.slice <- frame("MODIFIED", a.sliceObject(i, n))
}

// scaleVersion is one that no change comes to.
const scaleVersion = "9000000"

// scaleKinds are the kinds of empty lists.
var scaleKinds = map[string]string{"services": `"kind":"ServiceList","apiVersion":"v1"`, "nodes": `"kind":"NodeList","apiVersion":"v1"`,
	"endpointslices": `"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1"`}

func (a *scaleAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := path.Base(r.URL.Path)
	if kind := scaleKinds[resource]; kind != "" && r.URL.Query().Get("limit") == "1" { // which version it has, before a watch goes on
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		fmt.Fprintf(w, `{%s,"metadata":{"resourceVersion":"%s"},"items":[]}`, kind, scaleVersion)
		return
	}
	if r.Method != http.MethodGet || r.URL.Query().Get("watch") == "" || !slices.Contains([]string{"services", "endpointslices", "nodes"}, resource) {
		http.Error(w, "this server streams Services, slices and Nodes", http.StatusNotFound)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	if strings.Contains(r.URL.RawQuery, "sendInitialEvents=true") {
		a.stream(w, resource)
	}
	w.(http.Flusher).Flush()
	for {
		select {
		case f := <-a.slice:
			if resource != "endpointslices" {
				a.slice <- f
				time.Sleep(time.Millisecond)
				continue
			}
			w.Write(f)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// stream sends what there is, and that this was all.
func (a *scaleAPI) stream(w io.Writer, resource string) {
	end := &metav1.ObjectMeta{ResourceVersion: "2000000", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}
	var last typedObject
	switch resource {
	case "services":
		for i := range a.services {
			w.Write(frame("ADDED", a.serviceObject(i)))
		}
		last = &corev1.Service{TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}, ObjectMeta: *end}
	case "endpointslices":
		for i := range a.services {
			w.Write(frame("ADDED", a.sliceObject(i, 0)))
		}
		last = &discoveryv1.EndpointSlice{TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"}, ObjectMeta: *end}
	case "nodes":
		last = &corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: *end}
	}
	if last != nil {
		w.Write(frame("BOOKMARK", last))
	}
}

// typedObject is an object that says its kind and can write itself as protobuf.
type typedObject interface{ runtime.Object }

// frame is a watch event as it travels: its length, and the event as protobuf.
func frame(kind string, o typedObject) []byte {
	s := protobuf.NewSerializer(nil, nil)
	var obj, event strings.Builder
	if err := s.Encode(o, &obj); err != nil {
		panic(err)
	}
	e := &metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: []byte(obj.String())}}
	if err := protobuf.NewRawSerializer(nil, nil).Encode(e, &event); err != nil {
		panic(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(event.Len())), event.String()...)
}

func scaleName(i int) string { return fmt.Sprintf("service-%05d", i) }

// serviceObject looks like what helm and kubectl make.
func (a *scaleAPI) serviceObject(i int) *corev1.Service {
	ip := fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)
	single, inner := corev1.IPFamilyPolicySingleStack, corev1.ServiceInternalTrafficPolicyCluster
	return &corev1.Service{
		TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("team-%d", i%100), Name: scaleName(i), UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-cccc-dddddddddddd", i)),
			ResourceVersion: fmt.Sprint(1_000_000 + i), CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			Labels:        map[string]string{"app": "web", "helm.sh/chart": "web-1.2.3"},
			Annotations:   map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("{ much } ", 40)},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl", Operation: "Apply", FieldsV1: &metav1.FieldsV1{Raw: make([]byte, 500)}}},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": scaleName(i)},
			Ports:           []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromString("http")}},
			SessionAffinity: corev1.ServiceAffinityNone, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single, InternalTrafficPolicy: &inner,
		},
	}
}

// sliceObject looks like what the EndpointSlice controller makes, after so many changes.
func (a *scaleAPI) sliceObject(i, change int) *discoveryv1.EndpointSlice {
	port, name, tcp, zone, yes, no := int32(8080), "http", corev1.ProtocolTCP, "eu-central-1a", true, false
	asked := "2026-11-30T19:00:00Z"
	if change > 0 {
		asked = time.Now().Format(time.RFC3339Nano)
	}
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{Kind: "EndpointSlice", APIVersion: "discovery.k8s.io/v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("team-%d", i%100), Name: scaleName(i) + "-x7k2p", GenerateName: scaleName(i) + "-",
			UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-cccc-eeeeeeeeeeee", i)), ResourceVersion: fmt.Sprint(2_000_000 + i + change), Generation: int64(3 + change),
			CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			Labels:            map[string]string{discoveryv1.LabelServiceName: scaleName(i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io", "app": "web"},
			Annotations:       map[string]string{corev1.EndpointsLastChangeTriggerTime: asked},
			OwnerReferences:   []metav1.OwnerReference{{Kind: "Service", Name: scaleName(i), UID: "x"}},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
	}
	for e := range a.endpoints {
		node := fmt.Sprintf("node-%04d", (i+e)%1000)
		n := 2*(i*a.endpoints+e) + change%2 // an address of its own for each endpoint, and another after a change
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+n>>16, n>>8&255, n&255)},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node, Zone: &zone, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: s.Namespace,
				Name: fmt.Sprintf("%s-6d4cf56db6-%03d%02d", scaleName(i), change%1000, e), UID: types.UID(fmt.Sprintf("%08d-aaaa-bbbb-%04d-%012d", i, e, change))},
		})
	}
	return s
}
