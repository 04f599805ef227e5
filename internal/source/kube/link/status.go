package link

import "time"

// Status is how the link is, and how it has been.
type Status struct {
	Server    string    // URL of the API server in use
	Servers   []string  // all that may be used, in the order in which they are tried
	Connected bool      // what was asked last was answered, and our credentials were taken
	Since     time.Time // since when Connected is what it is
	Heard     time.Time // the last answer of any kind; zero is never
	NotReady  string    // the API server answers, and says itself that it is not ready: what its /readyz says; empty is ready

	NotReadySince time.Time // since when; it means nothing while NotReady is empty

	LastError   error     // the last trouble, in one line, also when it is over; nil is none ever
	LastErrorAt time.Time // when that was
	Errors      map[Trouble]uint64
	Failovers   uint64 // how often another server was taken

	Reloads []Reload // one for each thing that can be read anew, in the order of Things
	Waiting string   // why what the files say now is not in use, in one line; empty: it is

	ClientNotAfter time.Time // until when the client certificate in use is valid; zero is none
	ServerNotAfter time.Time // until when the first certificate to expire of the chain that the server showed is valid; zero is not known
	TokenNotAfter  time.Time // until when the token in use is valid, if it says so; zero is not known
}

// Reload counts how often something was read anew.
type Reload struct {
	Thing   Thing
	Used    uint64    // it was new, and has replaced what there was
	Refused uint64    // it was new, and can't be used
	Last    time.Time // when it was last used; at first the start
}

// Thing is what can be read anew.
type Thing string

// Things are all of them. A change of the file that names another file counts for both.
var Things = []Thing{Kubeconfig, ClientCertificate, Token, CA}

// What can be read anew.
const (
	Kubeconfig        Thing = "kubeconfig"
	ClientCertificate Thing = "client-certificate"
	Token             Thing = "token"
	CA                Thing = "ca"
)

// Trouble is why a request was not answered as it should be, in a word.
type Trouble string

// The kinds of trouble.
const (
	Refused      Trouble = "refused"           // nobody listens there
	Unreachable  Trouble = "unreachable"       // no route, no such network
	TimedOut     Trouble = "timeout"           // no answer in time: packets are lost, or the server hangs
	Lost         Trouble = "lost"              // the connection ended in the middle
	Name         Trouble = "dns"               // the name of the server can't be resolved
	Untrusted    Trouble = "unknown-authority" // the certificate of the server is signed by nobody we trust
	Expired      Trouble = "expired"           // a certificate, ours or the server's, is not valid at this time
	BadTLS       Trouble = "tls"               // any other failure of the handshake
	Unauthorized Trouble = "unauthorized"      // 401: our credentials are not taken
	Overloaded   Trouble = "overloaded"        // 429
	ServerError  Trouble = "server-error"      // 5xx
	Silent       Trouble = "silent"            // a watch said nothing for too long
	Behind       Trouble = "behind"            // the server knows less than we do: it lags, or was restored from a backup
	Other        Trouble = "other"
)

// Troubles are all kinds.
var Troubles = []Trouble{Refused, Unreachable, TimedOut, Lost, Name, Untrusted, Expired, BadTLS, Unauthorized, Overloaded, ServerError, Silent, Behind, Other}
