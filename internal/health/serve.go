package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"k8s.io/klog/v2"

	"fairlead/internal/model"
)

// listenAgain is how long it is waited before a port that could not be opened is tried again (kube-proxy's
// nodeHealthzRetryInterval).
const listenAgain = 5 * time.Second

// Port is an HTTP port of fairlead itself.
type Port struct {
	Name     string                                           // for people: "health", "metrics"
	Addr     string                                           // host:port
	HardFail bool                                             // give up when it can't be opened (bindAddressHardFail); else try again and again
	Reason   string                                           // of the notice when it can't
	Notice   func(model.Notice)                               // may be nil
	Long     time.Duration                                    // longest answer; 0 is ten seconds
	Listen   func(network, addr string) (net.Listener, error) // nil is net.Listen
}

// Serve answers on the port until ctx ends. It returns an error only when the port can't be opened and HardFail is set.
func (p Port) Serve(ctx context.Context, h http.Handler) error {
	for ctx.Err() == nil {
		l, err := p.open(ctx)
		if l == nil {
			return err
		}
		server := newHTTP(h)
		if p.Long > 0 {
			server.WriteTimeout = p.Long
		}
		stop := context.AfterFunc(ctx, func() { server.Close() })
		err = server.Serve(l)
		stop()
		if !errors.Is(err, http.ErrServerClosed) {
			klog.ErrorS(err, "Opening a port again", "port", p.Name, "address", p.Addr)
		}
	}
	return nil
}

// open opens the port, in the end. When ctx ends before that, there is neither a listener nor an error.
func (p Port) open(ctx context.Context) (net.Listener, error) {
	listen := p.Listen
	if listen == nil {
		listen = net.Listen
	}
	for told := false; ; {
		l, err := listen("tcp", p.Addr)
		if err == nil {
			klog.V(1).InfoS("Port is open", "port", p.Name, "address", p.Addr)
			return l, nil
		}
		err = fmt.Errorf("open the %s port: %w", p.Name, err)
		if !told {
			told = true
			klog.ErrorS(err, "Port", "retry", !p.HardFail)
			if p.Notice != nil {
				p.Notice(model.Notice{Reason: p.Reason, Message: err.Error()})
			}
		}
		if p.HardFail {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(listenAgain):
		}
	}
}

// newHTTP is a server that nobody can hold up: these ports are open to whom the network lets through.
func newHTTP(h http.Handler) *http.Server {
	return &http.Server{Handler: h, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute,
		MaxHeaderBytes: 16 << 10, ErrorLog: klog.NewStandardLogger("INFO")}
}
