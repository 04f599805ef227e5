package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"

	"fairlead/internal/kernel"
)

// maxConntrack is the most that is computed from the number of CPUs (kube-proxy has the same bound, a guess at what is
// enough). A larger minimum that somebody configured is obeyed all the same.
const maxConntrack = 1 << 20

// tune sets up the machine: connection tracking, and how willingly the kernel ends this process. Nothing here is needed to
// serve, so that what is not permitted (a container may have /proc/sys read-only, and nf_conntrack_max belongs to the
// machine's first network namespace) is answered with one line.
func tune(c *proxyv1alpha1.KubeProxyConfiguration) {
	var failed []string
	try := func(err error) {
		if err != nil {
			failed = append(failed, err.Error())
		}
	}
	loadConntrack()
	try(raiseConntrack(int(*c.Conntrack.MaxPerCore), int(*c.Conntrack.Min)))
	for name, d := range map[string]time.Duration{
		"nf_conntrack_tcp_timeout_established": c.Conntrack.TCPEstablishedTimeout.Duration,
		"nf_conntrack_tcp_timeout_close_wait":  c.Conntrack.TCPCloseWaitTimeout.Duration,
		"nf_conntrack_udp_timeout":             c.Conntrack.UDPTimeout.Duration,
		"nf_conntrack_udp_timeout_stream":      c.Conntrack.UDPStreamTimeout.Duration,
	} {
		if seconds := int(d / time.Second); seconds > 0 {
			try(kernel.SetSysctl("net/netfilter/"+name, strconv.Itoa(seconds)))
		}
	}
	if c.Conntrack.TCPBeLiberal {
		try(kernel.SetSysctl("net/netfilter/nf_conntrack_tcp_be_liberal", "1"))
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(int(*c.OOMScoreAdj))), 0o644); err != nil {
		try(fmt.Errorf("set oom_score_adj to %d: %w", *c.OOMScoreAdj, err))
	}
	if len(failed) > 0 {
		klog.InfoS("Some settings of the machine can't be changed, and stay as they are", "refused", strings.Join(failed, "; "))
	}
}

// loadConntrack makes the kernel load its connection tracking, if it has not: before that there is nothing to set. Asking it
// for its flows (of protocol 255, which nobody has) is enough.
func loadConntrack() {
	if _, err := kernel.Sysctl("net/netfilter/nf_conntrack_max"); !errors.Is(err, fs.ErrNotExist) {
		return
	}
	table, err := kernel.OpenConntrack()
	if err == nil {
		err = errors.Join(table.Flows(false, 255, func(kernel.Flow) {}), table.Close())
	}
	if err != nil {
		klog.V(2).InfoS("Connection tracking can't be loaded yet", "err", err)
	}
}

// conntrackMax is how many connections the kernel should be able to track; 0 leaves it.
func conntrackMax(perCore, least, cpus int) int {
	if perCore <= 0 {
		return 0
	}
	return max(min(perCore*cpus, maxConntrack), least)
}

// raiseConntrack raises the size of the table, and of its hash, where they are smaller.
func raiseConntrack(perCore, least int) error {
	want := conntrackMax(perCore, least, onlineCPUs())
	if want == 0 {
		return nil
	}
	have, err := kernel.Sysctl("net/netfilter/nf_conntrack_max")
	if err != nil {
		return err
	}
	if n, err := strconv.Atoi(have); err == nil && n >= want {
		return nil
	}
	if err := kernel.SetSysctl("net/netfilter/nf_conntrack_max", strconv.Itoa(want)); err != nil {
		return err
	}
	return raiseHash(want / 4) // entries in a chain, as kube-proxy and the kernel's own default have it
}

func raiseHash(want int) error {
	const path = "/sys/module/nf_conntrack/parameters/hashsize"
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the size of the conntrack hash: %w", err)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && n >= want {
		return nil
	}
	if err := os.WriteFile(path, []byte(strconv.Itoa(want)), 0o644); err != nil {
		return fmt.Errorf("set the size of the conntrack hash: %w", err)
	}
	return nil
}

// onlineCPUs counts the machine's CPUs, not those that this process may use.
func onlineCPUs() int {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	if n := countCPUs(strings.TrimSpace(string(b))); err == nil && n > 0 {
		return n
	}
	return runtime.NumCPU()
}

// countCPUs reads a list such as "0-3,8" (Documentation/admin-guide/cputopology.rst).
func countCPUs(list string) int {
	n := 0
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(from)
		if err != nil {
			return 0
		}
		b := a
		if isRange {
			if b, err = strconv.Atoi(to); err != nil || b < a {
				return 0
			}
		}
		n += b - a + 1
	}
	return n
}
