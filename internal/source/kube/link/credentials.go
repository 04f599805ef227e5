package link

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"
)

// settings are what a [Connection] says at one time, read whole into memory and found well-formed: nothing in it changes
// when a file does. They are never changed.
type settings struct {
	rest      *rest.Config        // names no file; a plugin (exec, auth-provider) is still one
	servers   []*url.URL          // at least one, no repeats; each with a host, and a port unless it is the scheme's
	files     []string            // the paths of all that was looked at, also of what need not be there
	sums      map[Thing]sum       // of what there is
	from      map[Thing]string    // where that came from, for people
	inCluster bool                // the service account of the pod
	insecure  bool                // the certificate of the server is not checked
	anonymous bool                // no certificate, token, password or plugin says who we are
	client    *tls.Certificate    // with its Leaf; nil is none
	roots     *x509.CertPool      // who signs for the server; nil is whom the system trusts
	signers   []*x509.Certificate // what roots is made of

	clientNotAfter time.Time // of the client certificate; zero is none
	tokenNotAfter  time.Time // of the token; zero is none, or it does not say
}

// sum is a fingerprint.
type sum [sha256.Size]byte

// none is the fingerprint of what is not there.
var none sum

// sum is the fingerprint of a thing.
func (s *settings) sum(t Thing) sum { return s.sums[t] }

// same tells whether nothing is different.
func (s *settings) same(o *settings) bool {
	return !slices.ContainsFunc(Things, func(t Thing) bool { return s.sum(t) != o.sum(t) })
}

// flaw is why what the files say can't be used.
type flaw struct {
	thing Thing
	files []string // that were looked at until then
	cause error
}

func (f *flaw) Error() string { return f.cause.Error() }
func (f *flaw) Unwrap() error { return f.cause }

// bad makes a flaw of an error.
func bad(t Thing, format string, args ...any) error {
	return &flaw{thing: t, cause: fmt.Errorf(format, args...)}
}

// thingOf is what an error of read or invalidNow is about; empty is nothing that it can tell.
func thingOf(err error) Thing {
	var f *flaw
	if errors.As(err, &f) {
		return f.thing
	}
	return ""
}

// filesOf are the files that a read looked at before it failed with err: a change of one of them may be the remedy.
func filesOf(err error) []string {
	var f *flaw
	if errors.As(err, &f) {
		return f.files
	}
	return nil
}

// readTries is how often files that change while they are read are read again. A swap of the kubelet is one rename, so that the second
// look is whole.
const readTries = 3

// read reads all that the connection is made of. An error, of one line that names the file, says that something is malformed: missing,
// empty, half-written, not fitting together. Whether what was read is valid at this time, is another question: see
// [settings.invalidNow].
func (c Connection) read() (*settings, error) { return c.readBy(readFile) }

func (c Connection) readBy(read func(string) ([]byte, error)) (*settings, error) {
	for try := 1; ; try++ {
		l := newLook(read)
		s, err := c.settings(l)
		if try < readTries && l.stale() {
			continue
		}
		if err != nil {
			return nil, &flaw{thing: thingOf(err), files: l.paths, cause: OneLine(err)}
		}
		s.files = l.paths
		return s, nil
	}
}

func (c Connection) settings(l *look) (*settings, error) {
	cfg, err := c.load(l)
	if err != nil {
		return nil, err
	}
	c.dress(cfg)
	s := &settings{rest: cfg, inCluster: c.inCluster(), insecure: cfg.Insecure, sums: map[Thing]sum{}, from: map[Thing]string{}}
	if s.servers, err = c.allServers(cfg); err != nil {
		return nil, bad(Kubeconfig, "%w", err)
	}
	if c.Kubeconfig != "" {
		s.sums[Kubeconfig], s.from[Kubeconfig] = sumOf(l.found[c.Kubeconfig].data), c.Kubeconfig
	}
	for _, part := range []func(*look, string) error{s.readCertificate, s.readToken, s.readCA} {
		if err := part(l, c.Kubeconfig); err != nil {
			return nil, err
		}
	}
	s.anonymous = s.client == nil && cfg.BearerToken == "" && cfg.Username == "" && cfg.ExecProvider == nil && cfg.AuthProvider == nil
	return s, nil
}

// readCertificate reads the client certificate and its key, which must be a pair.
func (s *settings) readCertificate(l *look, kubeconfig string) error {
	cfg := s.rest
	defer func() { cfg.CertFile, cfg.KeyFile = "", "" }()
	if cfg.CertFile == "" && cfg.CertData == nil {
		cfg.KeyData = nil // a key alone is for nothing
		return nil
	}
	cert, certFrom, err := l.inlineOr(cfg.CertData, cfg.CertFile, kubeconfig+" (client-certificate-data)")
	if err != nil {
		return bad(ClientCertificate, "read client certificate: %w", err)
	}
	key, keyFrom, err := l.inlineOr(cfg.KeyData, cfg.KeyFile, kubeconfig+" (client-key-data)")
	if err != nil {
		return bad(ClientCertificate, "read client key: %w", err)
	}
	if err := wholePEM(cert); err != nil {
		return bad(ClientCertificate, "client certificate %s: %w", certFrom, err)
	}
	if err := wholePEM(key); err != nil {
		return bad(ClientCertificate, "client key %s: %w", keyFrom, err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return bad(ClientCertificate, "client certificate %s with key %s: %w", certFrom, keyFrom, err)
	}
	cfg.CertData, cfg.KeyData = cert, key
	s.client, s.clientNotAfter = &pair, pair.Leaf.NotAfter
	s.sums[ClientCertificate], s.from[ClientCertificate] = sumOf(cert, key), certFrom
	return nil
}

// readToken reads the token. That of a file is taken before one in the kubeconfig, as in client-go.
func (s *settings) readToken(l *look, kubeconfig string) error {
	cfg, from := s.rest, kubeconfig+" (token)"
	if cfg.BearerTokenFile != "" {
		raw, err := l.file(cfg.BearerTokenFile)
		if err != nil {
			return bad(Token, "read token: %w", err)
		}
		from, cfg.BearerToken, cfg.BearerTokenFile = cfg.BearerTokenFile, strings.TrimSpace(string(raw)), ""
		if cfg.BearerToken == "" {
			return bad(Token, "read token: %s is empty", from)
		}
	}
	if cfg.BearerToken == "" {
		return nil
	}
	if i := strings.IndexFunc(cfg.BearerToken, func(r rune) bool { return r < 0x21 || r > 0x7e }); i >= 0 {
		return bad(Token, "token %s: its character %d can't be part of a token", from, i+1)
	}
	s.sums[Token], s.from[Token] = sumOf([]byte(cfg.BearerToken)), from
	s.tokenNotAfter = expiry(cfg.BearerToken)
	return nil
}

// readCA reads the certificates of those who may sign for the server. None is whom the system trusts.
func (s *settings) readCA(l *look, kubeconfig string) error {
	cfg := s.rest
	if cfg.CAFile == "" && len(cfg.CAData) == 0 {
		cfg.CAData = nil
		return nil
	}
	data, from, err := l.inlineOr(cfg.CAData, cfg.CAFile, kubeconfig+" (certificate-authority-data)")
	if s.inCluster && errors.Is(err, os.ErrNotExist) { // as in client-go
		cfg.CAFile = ""
		return nil
	}
	if err != nil {
		return bad(CA, "read certificate authority: %w", err)
	}
	if err := wholePEM(data); err != nil {
		return bad(CA, "certificate authority %s: %w", from, err)
	}
	if s.signers = certificates(data); len(s.signers) == 0 {
		return bad(CA, "certificate authority %s: there is no certificate in it", from)
	}
	if cfg.Insecure {
		return bad(CA, "%s: insecure-skip-tls-verify and a certificate authority contradict each other", kubeconfig)
	}
	s.roots = x509.NewCertPool()
	for _, c := range s.signers {
		s.roots.AddCert(c)
	}
	cfg.CAData, cfg.CAFile = data, ""
	s.sums[CA], s.from[CA] = sumOf(data), from
	return nil
}

// invalidNow tells, in one line, what is not valid at this time though it is well-formed; nil is nothing. It may do at the
// start, and must not replace what is valid.
func (s *settings) invalidNow(now time.Time) error {
	if s.anonymous && s.from[Kubeconfig] != "" && s.servers[0].Scheme == "https" { // it may have been cut off just before them
		return bad(Kubeconfig, "kubeconfig %s: no credentials for its current-context", s.from[Kubeconfig])
	}
	if s.client != nil {
		if why := outside(s.client.Leaf, now); why != "" {
			return bad(ClientCertificate, "client certificate %s: %s", s.from[ClientCertificate], why)
		}
	}
	if t := s.tokenNotAfter; !t.IsZero() && now.After(t) {
		return bad(Token, "token %s: expired since %s", s.from[Token], stamp(t))
	}
	why := ""
	for _, c := range s.signers {
		if why = outside(c, now); why == "" {
			return nil
		}
	}
	if why != "" {
		return bad(CA, "certificate authority %s: none of its %d certificates is valid now; the last: %s", s.from[CA], len(s.signers), why)
	}
	return nil
}

// outside tells why a certificate is not valid at this time; empty is that it is.
func outside(c *x509.Certificate, now time.Time) string {
	switch {
	case now.After(c.NotAfter):
		return "expired since " + stamp(c.NotAfter)
	case now.Before(c.NotBefore):
		return "not valid until " + stamp(c.NotBefore)
	}
	return ""
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// wholePEM tells what is wrong when a text is no PEM (RFC 7468), or a part of one: each block that begins must be read to its end.
func wholePEM(data []byte) error {
	if len(bytes.TrimSpace(data)) == 0 {
		return errors.New("it is empty")
	}
	begun, blocks := 0, 0
	for line := range bytes.Lines(data) {
		if bytes.HasPrefix(line, pemBegin) || bytes.HasPrefix(pemBegin, line) {
			begun++
		}
	}
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		blocks++
	}
	switch {
	case begun == 0:
		return errors.New("there is no PEM block in it")
	case blocks < begun:
		return fmt.Errorf("%d of its %d PEM blocks can't be read: it is cut off, or damaged", begun-blocks, begun)
	}
	return nil
}

var pemBegin = []byte("-----BEGIN ")

// certificates are those of a PEM that can be read. Others are passed over, as by crypto/x509: big bundles have oddities.
func certificates(data []byte) (out []*x509.Certificate) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != "CERTIFICATE" || len(block.Headers) != 0 {
			continue
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil {
			out = append(out, c)
		}
	}
	return out
}

// expiry is the time after which a JWT is not valid (RFC 7519, section 4.1.4), as it says itself; zero is that it does not. The
// signature is for the server to check.
func expiry(token string) time.Time {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}
	}
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil {
		return time.Time{}
	}
	var claims struct {
		Exp *float64 `json:"exp"`
	}
	if err := json.Unmarshal(raw, &claims); err != nil || claims.Exp == nil || *claims.Exp < 0 || *claims.Exp >= 1<<38 { // year 10680
		return time.Time{}
	}
	return time.Unix(int64(*claims.Exp), 0)
}

// sumOf is the fingerprint of texts, each with its end.
func sumOf(texts ...[]byte) sum {
	h := sha256.New()
	for _, t := range texts {
		one := sha256.Sum256(t)
		h.Write(one[:])
	}
	return sum(h.Sum(nil))
}
