package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"fairlead/internal/engine"
	"fairlead/internal/explain"
	"fairlead/internal/health"
	"fairlead/internal/model"
	"fairlead/internal/resolve"
)

// Engine is what is asked. See [engine.Engine.Do].
type Engine interface {
	Do(context.Context, func(engine.View)) error
}

// Server answers on a unix socket.
type Server struct {
	path   string
	engine Engine
	about  func() About
	turn   func(ctx context.Context, mode string) (Switched, error)
}

// New makes a server; Run opens its socket. about is called at each question about the status, from any goroutine.
func New(path string, e Engine, about func() About) *Server {
	return &Server{path: path, engine: e, about: about}
}

// Switches lets the server move the agent to another mode, which f does. It returns the server.
func (s *Server) Switches(f func(ctx context.Context, mode string) (Switched, error)) *Server {
	s.turn = f
	return s
}

// Run answers until ctx ends. A socket that can't be opened is worth one line in the log and nothing else: traffic does not
// need it.
func (s *Server) Run(ctx context.Context) {
	l, err := listen(s.path)
	if err != nil {
		klog.ErrorS(err, "No control socket; get and explain can't ask this agent (controlSocket)", "path", s.path)
		return
	}
	if ours, err := os.Lstat(s.path); err == nil {
		defer remove(s.path, ours)
	}
	server := &http.Server{Handler: s.handler(), ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute, ErrorLog: klog.NewStandardLogger("INFO")}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		klog.ErrorS(err, "Control socket", "path", s.path)
	}
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /state", s.state)
	mux.HandleFunc("GET /status", s.status)
	mux.HandleFunc("GET /why", s.why)
	mux.HandleFunc("POST /explain", s.explain)
	mux.HandleFunc("POST /switch", s.switchTo)
	return mux
}

// resolver is the part of the resolver that questions need.
type resolver interface {
	explain.Resolver
	Refusals() map[string]int
}

// ask runs f between two rounds, and answers with what it returns.
func (s *Server) ask(w http.ResponseWriter, r *http.Request, f func(engine.View) (any, error)) {
	var out any
	var failed error
	err := s.engine.Do(r.Context(), func(v engine.View) { out, failed = f(v) })
	respond(w, out, errors.Join(err, failed))
}

func respond(w http.ResponseWriter, out any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(out); err != nil {
		klog.V(2).InfoS("Control socket: the answer was not taken", "err", err)
	}
}

func (s *Server) state(w http.ResponseWriter, r *http.Request) {
	service := r.URL.Query().Get("service")
	s.ask(w, r, func(v engine.View) (any, error) {
		if service == "" {
			return pack(v.State.Clone()), nil // encoded after the engine has gone on
		}
		return pack(Only(v.State, service)), nil
	})
}

func (s *Server) why(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("service")
	s.ask(w, r, func(v engine.View) (any, error) {
		res, ok := v.Resolver.(resolver)
		if !ok {
			return nil, errors.New("this agent can't say why")
		}
		return res.Why(Named(name)), nil
	})
}

func (s *Server) explain(w http.ResponseWriter, r *http.Request) {
	var q explain.Question
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&q); err != nil {
		http.Error(w, "the question can't be read: "+err.Error(), http.StatusBadRequest)
		return
	}
	if err := q.Check(); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.ask(w, r, func(v engine.View) (any, error) {
		res, _ := v.Resolver.(explain.Resolver)
		return explain.Story(v.State, res, q), nil
	})
}

func (s *Server) switchTo(w http.ResponseWriter, r *http.Request) {
	var mode string
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&mode); err != nil {
		respond(w, nil, fmt.Errorf("the mode can't be read: %w", err))
		return
	}
	if s.turn == nil {
		respond(w, nil, errors.New("this agent can't be switched"))
		return
	}
	out, err := s.turn(r.Context(), mode)
	respond(w, out, err)
}

func (s *Server) status(w http.ResponseWriter, r *http.Request) {
	s.ask(w, r, func(v engine.View) (any, error) {
		out := Status{About: s.about(), Engine: v.Status, Frontends: len(v.State.Frontends), Pools: len(v.State.Pools)}
		if v.Status.LastError != nil {
			out.LastError, out.Engine.LastError = v.Status.LastError.Error(), nil
		}
		if res, ok := v.Resolver.(resolver); ok {
			out.Refusals = res.Refusals()
		}
		return out, nil
	})
}

// Named reads "namespace/name"; without a namespace it is "default".
func Named(s string) types.NamespacedName {
	ns, name, ok := strings.Cut(s, "/")
	if !ok {
		ns, name = "default", s
	}
	return types.NamespacedName{Namespace: ns, Name: name}
}

// Only is the part of a state that belongs to one Service ("namespace/name"; without a namespace, "default").
func Only(s *model.State, service string) *model.State {
	name := Named(service).String()
	out := model.NewState()
	out.Node = s.Node
	for k, f := range s.Frontends {
		if f.About.Service == name {
			out.Frontends[k] = f
		}
	}
	for id, p := range s.Pools {
		if id.Service == name {
			out.Pools[id] = p
		}
	}
	if c, ok := s.Checks[name]; ok {
		out.Checks[name] = c
	}
	return out
}

// Choices are the answers to why.
type Choices = []resolve.Choice

// Switched is what became of a switch to another mode.
type Switched struct {
	From, To string
	Took     time.Duration
}

// String says it in a line.
func (s Switched) String() string {
	if s.From == s.To {
		return fmt.Sprintf("fairlead serves in %s mode already", s.To)
	}
	return fmt.Sprintf("fairlead serves in %s mode now (was %s), %d ms", s.To, s.From, s.Took.Milliseconds())
}

// About is what the agent knows of itself.
type About struct {
	Version   string
	PID       int
	Mode      string // dataplane
	Written   string // the one that a restart would bring
	Backend   string // of the dataplane, if it has several
	Node      string
	Sources   []Source
	Presumed  string        // what is served is what was known at some time, and why; empty: it was told
	API       *health.API   // nil where no API is asked
	Saved     *health.Saved // nil where nothing is to be kept
	StartedAt time.Time
}

// Source is one place that truth comes from, or a part of it.
type Source struct {
	Name    string
	Synced  bool
	Objects int       // how many are known, if they are counted
	Heard   time.Time // last sign of life; zero is not known
	Problem string    // why it can't be asked now
}

// Status is how an agent is doing.
type Status struct {
	About     About
	Engine    engine.Status
	LastError string // of the last round; empty after a success
	Frontends int
	Pools     int
	Refusals  map[string]int // notices that hold, by reason
}

// tables is a state on the wire: JSON has no maps with such keys.
type tables struct {
	Frontends []model.Frontend
	Pools     []model.Pool
	Checks    []model.Check
	Node      model.Node
}

func pack(s *model.State) lazyTables { return lazyTables{s} }

// lazyTables sorts when it is encoded, which is not on the engine's goroutine.
type lazyTables struct{ *model.State }

// MarshalJSON implements [json.Marshaler].
func (l lazyTables) MarshalJSON() ([]byte, error) {
	b, err := json.Marshal(tables{l.SortedFrontends(), l.SortedPools(), l.SortedChecks(), l.Node})
	if err != nil {
		return nil, fmt.Errorf("encode the state: %w", err)
	}
	return b, nil
}

func (t tables) unpack() *model.State {
	s := model.NewState()
	s.Apply(model.Delta{Full: true, Frontends: t.Frontends, Pools: t.Pools, Checks: t.Checks, Node: &t.Node})
	return s
}
