package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// api is a small Kubernetes API: it lists and watches, streams lists, forgets old versions, and takes Events.
type api struct {
	t   *testing.T
	srv *httptest.Server

	mu        sync.Mutex
	version   int
	compacted int // watches from before this version get 410
	objects   map[string]map[string]metav1.Object
	log       []change
	bell      chan struct{} // closed at each change
	cut       chan struct{} // closed to end all watches
	old       bool          // does not know how to stream lists
	refuse    int           // status code for everything; 0 is none
	noCIDRs   int           // status code for ServiceCIDRs; 0 is none
	queries   map[string][]url.Values
	events    []*eventsv1.Event
	noEvents  []int // status codes for the next Events posted
}

type change struct {
	version  int
	resource string
	kind     string
	object   metav1.Object
}

func newAPI(t *testing.T) *api {
	a := &api{t: t, version: 1, objects: map[string]map[string]metav1.Object{}, bell: make(chan struct{}), cut: make(chan struct{}), queries: map[string][]url.Values{}}
	a.srv = httptest.NewUnstartedServer(a)
	return a
}

// start serves, at the address that addr chose.
func (a *api) start() *api {
	a.srv.Start()
	a.t.Cleanup(func() { a.cutWatches(); a.srv.CloseClientConnections(); a.srv.Close() })
	return a
}

func (a *api) rest() *rest.Config {
	return a.restAt(a.srv.Listener.Addr())
}

func (a *api) restAt(addr net.Addr) *rest.Config {
	c, err := Connection{Master: "http://" + addr.String(), ContentType: runtime.ContentTypeJSON, QPS: -1}.RestConfig()
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

func (a *api) put(objects ...metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range objects {
		a.version++
		o.SetResourceVersion(strconv.Itoa(a.version))
		resource, key, kind := resourceOf(o), keyOf(o), "MODIFIED"
		if a.objects[resource] == nil {
			a.objects[resource] = map[string]metav1.Object{}
		}
		if a.objects[resource][key] == nil {
			kind = "ADDED"
		}
		a.objects[resource][key] = o
		a.log = append(a.log, change{a.version, resource, kind, o})
	}
	a.ring()
}

func (a *api) remove(o metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	o.SetResourceVersion(strconv.Itoa(a.version))
	delete(a.objects[resourceOf(o)], keyOf(o))
	a.log = append(a.log, change{a.version, resourceOf(o), "DELETED", o})
	a.ring()
}

func (a *api) ring() {
	close(a.bell)
	a.bell = make(chan struct{})
}

// cutWatches ends all watches, as an API server does that restarts.
func (a *api) cutWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.cut)
	a.cut = make(chan struct{})
}

// rewrite changes one object and removes another behind the back of all watches, which end; the version they had is forgotten.
func (a *api) rewrite(changed, gone metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version += 2
	a.log, a.compacted = nil, a.version
	changed.SetResourceVersion(strconv.Itoa(a.version))
	a.objects[resourceOf(changed)][keyOf(changed)] = changed
	delete(a.objects[resourceOf(gone)], keyOf(gone))
	close(a.cut)
	a.cut = make(chan struct{})
}

// set changes a switch of the API.
func (a *api) set(f func(*api)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a)
}

func resourceOf(o metav1.Object) string {
	switch o.(type) {
	case *corev1.Service:
		return "services"
	case *discoveryv1.EndpointSlice:
		return "endpointslices"
	case *corev1.Node:
		return "nodes"
	case *networkingv1.ServiceCIDR:
		return "servicecidrs"
	}
	panic(fmt.Sprintf("%T", o))
}

var lists = map[string]metav1.TypeMeta{
	"services":       {Kind: "ServiceList", APIVersion: "v1"},
	"endpointslices": {Kind: "EndpointSliceList", APIVersion: "discovery.k8s.io/v1"},
	"nodes":          {Kind: "NodeList", APIVersion: "v1"},
	"servicecidrs":   {Kind: "ServiceCIDRList", APIVersion: "networking.k8s.io/v1"},
}

// typed is the object as JSON that says its kind.
func typed(resource string, o any) json.RawMessage {
	raw, _ := json.Marshal(o)
	m := map[string]any{}
	_ = json.Unmarshal(raw, &m)
	m["kind"], m["apiVersion"] = strings.TrimSuffix(lists[resource].Kind, "List"), lists[resource].APIVersion
	raw, _ = json.Marshal(m)
	return raw
}

func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	q := r.URL.Query()
	a.mu.Lock()
	a.queries[resource] = append(a.queries[resource], q)
	refuse, old, compacted := a.refuse, a.old, a.compacted
	noCIDRs := a.noCIDRs
	a.mu.Unlock()
	since, _ := strconv.Atoi(q.Get("resourceVersion"))
	switch {
	case refuse != 0:
		status(w, refuse, "Unauthorized", "no")
	case noCIDRs == http.StatusNotFound && resource == "servicecidrs":
		status(w, noCIDRs, metav1.StatusReasonNotFound, "the server could not find the requested resource")
	case noCIDRs != 0 && resource == "servicecidrs":
		status(w, noCIDRs, metav1.StatusReasonForbidden, "servicecidrs.networking.k8s.io is forbidden")
	case r.Method == http.MethodPost:
		a.post(w, r)
	case q.Get("watch") != "" && q.Get("sendInitialEvents") != "" && old:
		status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
	case q.Get("watch") != "" && q.Get("sendInitialEvents") == "" && since < compacted:
		status(w, http.StatusGone, metav1.StatusReasonExpired, "too old resource version")
	case q.Get("watch") != "":
		a.watch(w, r, resource, since, q.Get("sendInitialEvents") != "")
	default:
		a.list(w, resource)
	}
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: message})
}

func (a *api) list(w http.ResponseWriter, resource string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	items := []json.RawMessage{}
	for _, key := range slices.Sorted(maps.Keys(a.objects[resource])) {
		items = append(items, typed(resource, a.objects[resource][key]))
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"kind": lists[resource].Kind, "apiVersion": lists[resource].APIVersion,
		"metadata": map[string]string{"resourceVersion": strconv.Itoa(a.version)}, "items": items,
	})
}

func (a *api) watch(w http.ResponseWriter, r *http.Request, resource string, since int, stream bool) {
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, o any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": typed(resource, o)})
	}
	a.mu.Lock()
	cut := a.cut
	if stream {
		for _, key := range slices.Sorted(maps.Keys(a.objects[resource])) {
			send("ADDED", a.objects[resource][key])
		}
		since = a.version
		send("BOOKMARK", &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(since), Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	}
	for {
		for _, c := range a.log {
			if c.resource == resource && c.version > since {
				send(c.kind, c.object)
			}
		}
		since = a.version
		bell := a.bell
		a.mu.Unlock()
		w.(http.Flusher).Flush()
		select {
		case <-bell:
		case <-cut:
			return
		case <-r.Context().Done():
			return
		}
		a.mu.Lock()
	}
}

func (a *api) post(w http.ResponseWriter, r *http.Request) {
	e := new(eventsv1.Event)
	if err := json.NewDecoder(r.Body).Decode(e); err != nil {
		a.t.Errorf("posted Event: %v", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.noEvents) > 0 {
		code := a.noEvents[0]
		a.noEvents = a.noEvents[1:]
		status(w, code, "", "no")
		return
	}
	a.events = append(a.events, e)
	a.ring()
	w.Header().Set("Content-Type", "application/json")
	e.TypeMeta = metav1.TypeMeta{Kind: "Event", APIVersion: "events.k8s.io/v1"}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(e)
}
