package link

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
)

// The numbers of TLS alerts that are about validity in time (RFC 8446, section 6).
const alertCertificateExpired = tls.AlertError(45)

// troubleOf sorts an error of a request.
func troubleOf(err error) Trouble {
	var name *net.DNSError
	var authority x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var hostname x509.HostnameError
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var waited net.Error
	switch {
	case errors.As(err, &name):
		return Name
	case errors.As(err, &authority):
		return Untrusted
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired, errors.As(err, &alert) && alert == alertCertificateExpired:
		return Expired
	case errors.As(err, &invalid), errors.As(err, &hostname), errors.As(err, &alert), errors.As(err, &record):
		return BadTLS
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return Unreachable
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &waited) && waited.Timeout(),
		strings.Contains(err.Error(), "client connection lost"): // net/http's word for an HTTP/2 ping that was not answered
		return TimedOut
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), strings.Contains(err.Error(), forceClosed):
		return Lost
	case strings.Contains(err.Error(), "tls: "):
		return BadTLS
	}
	return Other
}
