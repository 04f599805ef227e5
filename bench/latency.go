package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Client and server are processes of their own, each on a processor of its own where there are two: a scheduler that moves
// them about changes the figures by half. They call the kernel directly, without the Go scheduler between.
func pin(cpu int) error {
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	var set unix.CPUSet
	set.Set(cpu % runtime.NumCPU())
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("stay on processor %d: %w", cpu, err)
	}
	return nil
}

// role is this program in another role, ready to start.
func role(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	// Without asynchronous preemption the Go runtime sends no signals, which would interrupt system calls.
	cmd.Env = append(os.Environ(), roleKey+"="+name, "GODEBUG=asyncpreemptoff=1")
	cmd.Stderr = os.Stderr
	return cmd
}

// serve starts the server of all endpoints, and waits until it listens.
func (w *world) serve() error {
	w.serving = role("server")
	ready, err := w.serving.StdoutPipe()
	if err != nil {
		return err
	}
	if err := w.server.Do(w.serving.Start); err != nil {
		return err
	}
	if n, err := ready.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("the server does not start: %w", err)
	}
	return nil
}

// serveForever accepts, says at which address, and closes.
func serveForever() error {
	if err := pin(1); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: podPort}); err != nil {
		return err
	}
	if err := unix.Listen(fd, 4096); err != nil {
		return err
	}
	fmt.Print("r")
	for {
		conn, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, 0, 0, 0)
		if errno != 0 {
			continue // the client was quicker: it has reset
		}
		var here unix.RawSockaddrInet4
		size := uint32(unsafe.Sizeof(here))
		unix.RawSyscall(unix.SYS_GETSOCKNAME, conn, uintptr(unsafe.Pointer(&here)), uintptr(unsafe.Pointer(&size)))
		unix.RawSyscall6(unix.SYS_SENDTO, conn, uintptr(unsafe.Pointer(&here.Addr)), 4, unix.MSG_NOSIGNAL, 0, 0)
		unix.RawSyscall(unix.SYS_CLOSE, conn, 0, 0)
	}
}

// place is what the latency is measured to.
type place struct {
	name string
	to   netip.AddrPort
}

// Latency is of connect() to one place, in microseconds; each figure is the median over the repeats. The ratios are taken
// within each repeat.
type Latency struct {
	P01, P50, P99       float64
	ToDirect, ToTracked float64 // p01 ÷ p01
	P50ToDirect         float64
	Failed, Slow        int // slow: more than 200 ms
}

// quantiles are those of one repeat.
type quantiles struct {
	P01, P50, P99 float64
	Failed, Slow  int
}

// latency runs the client, with all places taking turns.
func (w *world) latency(places []place, connects, repeats int) (map[string]Latency, error) {
	args := []string{strconv.Itoa(connects), strconv.Itoa(repeats)}
	for _, p := range places {
		args = append(args, p.to.String())
	}
	cmd := role("client", args...)
	var out []byte
	err := w.client.Do(func() (err error) { out, err = cmd.Output(); return err })
	if err != nil {
		return nil, fmt.Errorf("measure connections: %w", err)
	}
	var all [][]quantiles // by repeat, by place; the first two places are direct and tracked
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, fmt.Errorf("measure connections: %w", err)
	}
	result := map[string]Latency{}
	for i, p := range places {
		over := func(f func(repeat []quantiles) float64) float64 {
			var values []float64
			for _, r := range all {
				values = append(values, f(r))
			}
			return median(values)
		}
		l := Latency{
			P01:         over(func(r []quantiles) float64 { return r[i].P01 }),
			P50:         over(func(r []quantiles) float64 { return r[i].P50 }),
			P99:         over(func(r []quantiles) float64 { return r[i].P99 }),
			ToDirect:    over(func(r []quantiles) float64 { return r[i].P01 / r[0].P01 }),
			ToTracked:   over(func(r []quantiles) float64 { return r[i].P01 / r[1].P01 }),
			P50ToDirect: over(func(r []quantiles) float64 { return r[i].P50 / r[0].P50 }),
		}
		for _, r := range all {
			l.Failed += r[i].Failed
			l.Slow += r[i].Slow
		}
		result[p.name] = l
	}
	return result, nil
}

// connectMany is the client: arguments are connections per repeat, repeats, and places.
func connectMany() error {
	if err := pin(0); err != nil {
		return err
	}
	connects, err := strconv.Atoi(os.Args[1])
	if err != nil {
		return err
	}
	repeats, err := strconv.Atoi(os.Args[2])
	if err != nil {
		return err
	}
	var all [][]quantiles
	times := make([]float64, connects)
	for range repeats {
		var repeat []quantiles
		for _, p := range os.Args[3:] {
			to, err := netip.ParseAddrPort(p)
			if err != nil {
				return err
			}
			q, err := connectTo(to, times)
			if err != nil {
				return err
			}
			repeat = append(repeat, q)
		}
		all = append(all, repeat)
	}
	return json.NewEncoder(os.Stdout).Encode(all)
}

// connectTo fills times, after a few connections that warm the path, and returns their quantiles.
func connectTo(to netip.AddrPort, times []float64) (quantiles, error) {
	const warm = 50
	var q quantiles
	at := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: to.Port()<<8 | to.Port()>>8, Addr: to.Addr().As4()}
	n := 0
	for i := range warm + len(times) {
		took, err := connectOnce(&at)
		switch {
		case i < warm:
		case err != nil:
			q.Failed++
		default:
			if took > 200*time.Millisecond {
				q.Slow++
			}
			times[n] = float64(took.Nanoseconds()) / 1000
			n++
		}
	}
	if n == 0 {
		return q, errors.New("no connection to " + to.String())
	}
	got := times[:n]
	slices.Sort(got)
	q.P01, q.P50, q.P99 = quantile(got, 0.01), quantile(got, 0.5), quantile(got, 0.99)
	return q, nil
}

// connectOnce times the system call alone, and closes with a reset.
func connectOnce(to *unix.RawSockaddrInet4) (time.Duration, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	limit := unix.Timeval{Sec: 3}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return 0, err
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return 0, err
	}
	began := time.Now()
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), unsafe.Sizeof(*to))
	took := time.Since(began)
	if errno != 0 {
		return 0, errno
	}
	return took, nil
}

// quantile is of sorted values.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return quantile(sorted, 0.5)
}

// walked counts, for each address that a Service is at, the rules that a packet to it meets in the nat table's tree of
// Services until one of them takes it, in the text of iptables-save.
func walked(save string) map[netip.Addr]int {
	type rule struct {
		to     netip.Prefix
		target string
	}
	chains := map[string][]rule{}
	for line := range strings.Lines(save) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != "-A" {
			continue
		}
		var r rule
		for i, word := range words[:len(words)-1] {
			switch word {
			case "-d":
				r.to, _ = netip.ParsePrefix(words[i+1])
			case "-j", "-g":
				r.target = words[i+1]
			}
		}
		chains[words[1]] = append(chains[words[1]], r)
	}
	cost := map[netip.Addr]int{}
	var walk func(chain string, before int)
	walk = func(chain string, before int) {
		for i, r := range chains[chain] {
			switch {
			case strings.HasPrefix(r.target, "KUBE-SVC-") && r.to.IsSingleIP():
				if _, seen := cost[r.to.Addr()]; !seen {
					cost[r.to.Addr()] = before + i + 1
				}
			case strings.HasPrefix(r.target, "KUBE-") && r.to.IsValid() && before < 1<<20:
				walk(r.target, before+i+1)
			}
		}
	}
	walk("KUBE-SERVICES", 0)
	return cost
}
