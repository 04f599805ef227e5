package link

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"testing"
	"time"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte // its certificate
}

// newAuthority is valid from an hour ago for ten years.
func newAuthority(t testing.TB) *authority {
	t.Helper()
	return newAuthorityUntil(t, time.Now().AddDate(10, 0, 0))
}

func newAuthorityUntil(t testing.TB, until time.Time) *authority {
	t.Helper()
	key := newKey(t)
	tmpl := &x509.Certificate{SerialNumber: serial(t), NotBefore: until.AddDate(-20, 0, 0), NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	tmpl.Subject = pkix.Name{CommonName: fmt.Sprintf("authority %x", tmpl.SerialNumber)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// pool has the authority alone.
func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// issue signs a certificate for a name, or an IP address, that is good for clients and servers; PEM.
func (a *authority) issue(t testing.TB, name string, from, until time.Time) (cert, key []byte) {
	t.Helper()
	own := newKey(t)
	tmpl := &x509.Certificate{SerialNumber: serial(t), Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	if ip := net.ParseIP(name); ip != nil {
		tmpl.IPAddresses = []net.IP{ip}
	} else {
		tmpl.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &own.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

// client is a certificate for a user that is valid for an hour, and its key; PEM.
func (a *authority) client(t testing.TB, name string) (cert, key []byte) {
	t.Helper()
	return a.issue(t, name, time.Now().Add(-time.Hour), time.Now().Add(time.Hour))
}

// expired is such a certificate that was valid until a minute ago.
func (a *authority) expired(t testing.TB, name string) (cert, key []byte) {
	t.Helper()
	return a.issue(t, name, time.Now().Add(-time.Hour), time.Now().Add(-time.Minute))
}

// server is a certificate for a server that is valid for an hour.
func (a *authority) server(t testing.TB, host string) tls.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(a.client(t, host))
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func serial(t testing.TB) *big.Int {
	t.Helper()
	n, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// jwt is a token with these claims, as JSON. Nobody has signed it.
func jwt(claims string) string {
	enc := base64.RawURLEncoding.EncodeToString
	return enc([]byte(`{"alg":"RS256"}`)) + "." + enc([]byte(claims)) + "." + enc([]byte("signature"))
}
