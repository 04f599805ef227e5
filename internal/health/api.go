package health

import "time"

// API is what is known of the way to the Kubernetes API. Its JSON is a part of /readyz and of `get status -o json`; tools read
// it. A time that is left out is never, or not known.
type API struct {
	Server    string    `json:"server"`              // URL of the API server in use
	Servers   []string  `json:"servers"`             // all that may be used, in the order in which they are tried
	Connected bool      `json:"connected"`           // what was asked last was answered, and our credentials were taken
	Since     time.Time `json:"since,omitzero"`      // since when Connected is what it is
	Heard     time.Time `json:"heard,omitzero"`      // the last answer of any kind
	NotReady  string    `json:"notReady,omitempty"`  // what an API server says that answers and is not ready itself
	View      *float64  `json:"viewAgeSeconds"`      // how old the oldest part of what we know is; null until all of it was heard of
	LastError string    `json:"lastError,omitempty"` // the last trouble, also when it is over

	LastErrorAt time.Time         `json:"lastErrorAt,omitzero"`
	Errors      map[string]uint64 `json:"errors"` // by kind of trouble, all kinds
	Failovers   uint64            `json:"failovers"`

	Reloads map[string]Reload `json:"reloads"`           // by what is read anew, all there is
	Waiting string            `json:"waiting,omitempty"` // why what the files say now is not in use

	ClientNotAfter time.Time `json:"clientCertificateNotAfter,omitzero"`
	ServerNotAfter time.Time `json:"serverCertificateNotAfter,omitzero"` // of its chain, the first to expire
	TokenNotAfter  time.Time `json:"tokenNotAfter,omitzero"`
}

// Reload counts how often something was read anew.
type Reload struct {
	Used    uint64    `json:"used"`          // and has replaced what there was
	Refused uint64    `json:"refused"`       // and can't be used
	Last    time.Time `json:"last,omitzero"` // when it was last used; at first the start
}

// Saved is what is kept on disk of what the API said, for a start without it. Its JSON is where that of [API] is.
type Saved struct {
	Dir      string    `json:"dir"`
	Problem  string    `json:"problem,omitempty"` // why nothing is kept
	Ignored  string    `json:"ignored,omitempty"` // why what was kept before this start was not used, though it was needed
	Bytes    int64     `json:"bytes"`
	Objects  int       `json:"objects"`
	Replayed bool      `json:"replayed"`      // what was kept before was used
	AsOf     time.Time `json:"asOf,omitzero"` // when the API had last been heard by then
}
