package iptables

import (
	"errors"
	"fmt"

	"fairlead/internal/kernel"

	"golang.org/x/sys/unix"
)

// accounts are the nfacct counters that kube-proxy has: packets that rules dropped or let pass, by name.
type accounts struct {
	conn *kernel.NFNetlink
}

// The counters (k8s.io/kubernetes/pkg/proxy/metrics).
const (
	acctInvalid   = "ct_state_invalid_dropped_pkts"
	acctLocalhost = "localhost_nps_accepted_pkts"
)

// openAccounts makes the counters where they are missing. The error says so when the kernel has none (CONFIG_NETFILTER_NETLINK_ACCT).
func openAccounts() (*accounts, error) {
	conn, err := kernel.OpenNFNetlink()
	if err != nil {
		return nil, err
	}
	for _, name := range [...]string{acctInvalid, acctLocalhost} {
		err := conn.Do(unix.NFNL_SUBSYS_ACCT<<8|nfacctNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.AF_UNSPEC, kernel.AppendAttrString(nil, nfacctName, name))
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.EBUSY) {
			conn.Close()
			return nil, fmt.Errorf("make nfacct counter %s: %w", name, err)
		}
	}
	return &accounts{conn}, nil
}

// linux/netfilter/nfnetlink_acct.h
const (
	nfacctNew  = 0 // NFNL_MSG_ACCT_NEW
	nfacctGet  = 1 // NFNL_MSG_ACCT_GET
	nfacctName = 1 // NFACCT_NAME
	nfacctPkts = 2 // NFACCT_PKTS
)

// packets reads a counter; ok is false when it is not there.
func (a *accounts) packets(name string) (n uint64, ok bool) {
	m, err := a.conn.Get(unix.NFNL_SUBSYS_ACCT<<8|nfacctGet, unix.AF_UNSPEC, kernel.AppendAttrString(nil, nfacctName, name))
	if err != nil {
		return 0, false
	}
	for typ, v := range kernel.Attrs(m.Attrs) {
		if typ == nfacctPkts {
			return kernel.AttrU64(v), true
		}
	}
	return 0, false
}

func (a *accounts) Close() error { return a.conn.Close() }
