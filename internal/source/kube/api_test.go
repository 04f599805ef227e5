package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
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

// api is a small Kubernetes API: it lists and watches, streams lists, forgets old versions, and takes Events. It can lag
// behind what it knows, and be restored from a backup.
type api struct {
	t   *testing.T
	srv *httptest.Server

	mu        sync.Mutex
	version   int
	compacted int // watches from before this version get 410
	objects   map[string]map[string]metav1.Object
	base      map[string]map[string]metav1.Object // objects as they were before the log begins
	log       []change
	lag       int            // how many versions what is served is behind
	empty     bool           // lists are empty
	wants     int            // where bookmarks are at, counted
	told      map[string]int // by resource: the highest version that was served
	bell      chan struct{}  // closed at each change
	cut       chan struct{}  // closed to end all watches
	old       bool           // does not know how to stream lists
	refuse    int            // status code for everything; 0 is none
	noWatches int            // status code for watches; 0 is none
	noCIDRs   int            // status code for ServiceCIDRs; 0 is none
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
	a := newDirectAPI(t)
	a.srv = httptest.NewUnstartedServer(a)
	return a
}

// newDirectAPI makes one without a network; see direct.
func newDirectAPI(t *testing.T) *api {
	return &api{t: t, version: 1, objects: map[string]map[string]metav1.Object{}, told: map[string]int{}, bell: make(chan struct{}), cut: make(chan struct{}), queries: map[string][]url.Values{}}
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

// direct is a connection without a network, for tests in a bubble of time (testing/synctest).
func (a *api) direct() *rest.Config {
	return &rest.Config{Host: "http://api.test", Transport: handlerTransport{a}, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeJSON}}
}

// handlerTransport has requests answered by a handler in this process.
type handlerTransport struct{ http.Handler }

func (t handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context())
	body, to := io.Pipe()
	context.AfterFunc(ctx, func() { body.CloseWithError(context.Cause(ctx)) })
	w := &handlerResponse{head: http.Header{}, to: to, begun: make(chan int, 1)}
	go func() {
		t.ServeHTTP(w, r.WithContext(ctx))
		w.WriteHeader(http.StatusOK)
		to.Close()
	}()
	select {
	case code := <-w.begun:
		return &http.Response{StatusCode: code, Header: w.head, Body: bodyOf{body, cancel}, Request: r, ProtoMajor: 1, ProtoMinor: 1, ContentLength: -1}, nil
	case <-ctx.Done():
		cancel()
		return nil, ctx.Err()
	}
}

type handlerResponse struct {
	head  http.Header
	to    *io.PipeWriter
	once  sync.Once
	begun chan int
}

func (w *handlerResponse) Header() http.Header  { return w.head }
func (w *handlerResponse) WriteHeader(code int) { w.once.Do(func() { w.begun <- code }) }
func (w *handlerResponse) Flush()               { w.WriteHeader(http.StatusOK) }
func (w *handlerResponse) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.to.Write(b)
}

type bodyOf struct {
	io.Reader
	cancel context.CancelFunc
}

func (b bodyOf) Close() error { b.cancel(); return nil }

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

// restore takes the API back to an older version, as etcd does that is restored from a backup. The API servers are restarted.
func (a *api) restore(version int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.log = slices.DeleteFunc(a.log, func(c change) bool { return c.version > version })
	a.version, a.compacted = version, min(a.compacted, version)
	a.objects = a.at(version)
	close(a.cut)
	a.cut = make(chan struct{})
}

// forget compacts everything, after something else was written: no watch can go on.
func (a *api) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.compacted = a.version
	close(a.cut)
	a.cut = make(chan struct{})
}

// bookmark sends one on each watch.
func (a *api) bookmark() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wants++
	a.ring()
}

// at is what existed at a version.
func (a *api) at(version int) map[string]map[string]metav1.Object {
	out := map[string]map[string]metav1.Object{}
	for resource, objects := range a.base {
		out[resource] = maps.Clone(objects)
	}
	for _, c := range a.log {
		switch {
		case c.version > version:
			return out
		case c.kind == "DELETED":
			delete(out[c.resource], keyOf(c.object))
		case out[c.resource] == nil:
			out[c.resource] = map[string]metav1.Object{keyOf(c.object): c.object}
		default:
			out[c.resource][keyOf(c.object)] = c.object
		}
	}
	return out
}

// served is the version that is served, and what there is in it.
func (a *api) served(resource string) (int, []metav1.Object) {
	version := max(1, a.version-a.lag)
	all := a.at(version)[resource]
	if a.empty {
		all = nil
	}
	var out []metav1.Object
	for _, key := range slices.Sorted(maps.Keys(all)) {
		out = append(out, all[key])
	}
	a.told[resource] = max(a.told[resource], version)
	return version, out
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
	a.base = map[string]map[string]metav1.Object{}
	for resource, objects := range a.objects {
		a.base[resource] = maps.Clone(objects)
	}
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
	noCIDRs, now := a.noCIDRs, max(1, a.version-a.lag)
	if q.Get("watch") != "" && refuse == 0 {
		refuse = a.noWatches
	}
	a.mu.Unlock()
	since, _ := strconv.Atoi(q.Get("resourceVersion"))
	switch {
	case refuse != 0:
		status(w, refuse, metav1.StatusReason(strings.ReplaceAll(http.StatusText(refuse), " ", "")), "no")
	case noCIDRs == http.StatusNotFound && resource == "servicecidrs":
		status(w, noCIDRs, metav1.StatusReasonNotFound, "the server could not find the requested resource")
	case noCIDRs != 0 && resource == "servicecidrs":
		status(w, noCIDRs, metav1.StatusReasonForbidden, "servicecidrs.networking.k8s.io is forbidden")
	case r.Method == http.MethodPost:
		a.post(w, r)
	case q.Get("watch") != "" && q.Get("sendInitialEvents") != "" && old:
		status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
	case since > now && (q.Get("watch") == "" || q.Get("sendInitialEvents") != ""):
		tooLarge(w, since, now)
	case q.Get("watch") != "" && q.Get("sendInitialEvents") == "" && since < compacted:
		status(w, http.StatusGone, metav1.StatusReasonExpired, "too old resource version")
	case q.Get("watch") != "":
		a.watch(w, r, resource, since, q.Get("sendInitialEvents") != "")
	default:
		a.list(w, resource, q.Get("limit"))
	}
}

// tooLarge refuses to serve what is as new as that (k8s.io/apiserver/pkg/storage/errors.go). client-go repeats such requests itself.
func tooLarge(w http.ResponseWriter, wanted, now int) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Retry-After", "1")
	w.WriteHeader(http.StatusGatewayTimeout)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
		Code: http.StatusGatewayTimeout, Reason: metav1.StatusReasonTimeout, Message: fmt.Sprintf("Too large resource version: %d, current: %d", wanted, now),
		Details: &metav1.StatusDetails{RetryAfterSeconds: 1, Causes: []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}}})
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: message})
}

func (a *api) list(w http.ResponseWriter, resource, limit string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.told[resource]
	version, objects := a.served(resource)
	items, meta := []json.RawMessage{}, map[string]string{"resourceVersion": strconv.Itoa(version)}
	if n, err := strconv.Atoi(limit); err == nil && n < len(objects) {
		objects, meta["continue"] = objects[:n], "more"
	}
	if limit == "1" {
		a.told[resource] = before // only a question
	}
	for _, o := range objects {
		items = append(items, typed(resource, o))
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": lists[resource].Kind, "apiVersion": lists[resource].APIVersion, "metadata": meta, "items": items})
}

// watch sends what happens after since. From a version that is yet to come it is silent until then, as a real one.
func (a *api) watch(w http.ResponseWriter, r *http.Request, resource string, since int, stream bool) {
	w.Header().Set("Content-Type", "application/json")
	var out bytes.Buffer
	send := func(kind string, o any) {
		_ = json.NewEncoder(&out).Encode(map[string]any{"type": kind, "object": typed(resource, o)})
	}
	mark := func(annotations map[string]string) {
		send("BOOKMARK", &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(since), Annotations: annotations}})
	}
	a.mu.Lock()
	cut, marks := a.cut, a.wants
	if stream {
		version, objects := a.served(resource)
		for _, o := range objects {
			send("ADDED", o)
		}
		since = version
		mark(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	for {
		now, _ := a.served(resource)
		for _, c := range a.log {
			if c.resource == resource && c.version > since && c.version <= now {
				send(c.kind, c.object)
			}
		}
		since = max(since, now)
		if marks != a.wants && since == now {
			mark(nil)
		}
		marks = a.wants
		bell := a.bell
		a.mu.Unlock()
		_, _ = out.WriteTo(w)
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

// query is what matters of a request for the state of a resource.
type query struct {
	list    bool // the whole, streamed or not
	version string
}

func (a *api) asked(resource string) (out []query) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, q := range a.queries[resource] {
		if q.Get("limit") != "1" {
			out = append(out, query{q.Get("watch") == "" || q.Get("sendInitialEvents") != "", q.Get("resourceVersion")})
		}
	}
	return out
}
