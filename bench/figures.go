package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What a program can be seen to do and to use, from outside.

// cpu is the processor time of the program and of everything it has started.
func (p *program) cpu() time.Duration {
	type process struct {
		parent int
		used   time.Duration
	}
	all := map[int]process{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
		if len(fields) < 15 {
			continue
		}
		x := process{used: cpuClock(pid)}
		x.parent, _ = strconv.Atoi(fields[1])
		for _, f := range fields[13:15] { // cutime and cstime, of children that have ended: proc_pid_stat(5)
			ticks, _ := strconv.ParseInt(f, 10, 64)
			x.used += time.Duration(ticks) * tick
		}
		all[pid] = x
	}
	var sum time.Duration
	for pid := range all {
		for at := pid; at > 1; at = all[at].parent {
			if at == p.cmd.Process.Pid {
				sum += all[pid].used
				break
			}
		}
	}
	return sum
}

const tick = 10 * time.Millisecond // USER_HZ

// cpuClock is the processor time of a process and all its threads, to the nanosecond, by its clock: clock_getcpuclockid(3). It
// is 0 when the process has ended.
func cpuClock(pid int) time.Duration {
	const cpuclockSched = 2 // CPUCLOCK_SCHED of linux/posix-timers.h
	var now unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|cpuclockSched), &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// waited is how long the program's own threads, those that run still, have waited for a processor that others had.
func (p *program) waited() (sum time.Duration) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.cmd.Process.Pid))
	for _, path := range tasks {
		var ran, waited int64 // ns: Documentation/scheduler/sched-stats.rst
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		fmt.Sscan(string(text), &ran, &waited)
		sum += time.Duration(waited)
	}
	return sum
}

// Both programs count how long they write rules, under the same names.
const (
	fullSync    = "kubeproxy_sync_full_proxy_rules_duration_seconds"
	partialSync = "kubeproxy_sync_partial_proxy_rules_duration_seconds"
)

// metric is the sum and the count of a histogram, of IPv4.
func (p *program) metric(name string) (sum, count float64) {
	answer, err := http.Get(metricsPort + "/metrics")
	if err != nil {
		say("%s: metrics: %v", p, err)
		return 0, 0
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		say("%s: metrics: %v", p, err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+`_sum{ip_family="IPv4"} `); ok {
			sum, _ = strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
		if value, ok := strings.CutPrefix(line, name+`_count{ip_family="IPv4"} `); ok {
			count, _ = strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return sum, count
}

// firstSync is how long the first write of everything took. It is counted a moment after the rules are there.
func (p *program) firstSync() float64 {
	for range 50 {
		if sum, count := p.metric(fullSync); count > 0 {
			return sum
		}
		time.Sleep(100 * time.Millisecond)
	}
	return 0
}

// lists tells how many seconds after began the program had all objects, and how many of all seconds were left then. It is the last
// line of its log that says so of a kind of objects: ours says it when the list has come, kube-proxy when its
// handlers have taken it. Both are zero where no line says so.
func (p *program) lists(began time.Time, all float64) (had, left float64) {
	text, err := os.ReadFile(p.log)
	if err != nil {
		say("%s: log: %v", p, err)
	}
	lines := strings.Split(string(text), "\n")
	for _, sign := range []string{"First list is complete", "Caches are synced", "All sources are synced"} {
		for _, line := range slices.Backward(lines) {
			if !strings.Contains(line, sign) {
				continue
			}
			at, err := logged(line, began)
			if err != nil {
				say("%s: log: %v", p, err)
				return 0, 0
			}
			had = at.Sub(began).Seconds()
			return had, all - had
		}
	}
	return 0, 0
}

// logged is when a line of klog was written, in the year of another time: Lmmdd hh:mm:ss.uuuuuu.
func logged(line string, near time.Time) (time.Time, error) {
	const layout = "2006 0102 15:04:05.000000"
	if len(line) < len(layout)-4 {
		return time.Time{}, fmt.Errorf("no time in %q", line)
	}
	return time.ParseInLocation(layout, strconv.Itoa(near.Year())+" "+line[1:len(layout)-4], time.Local)
}

// memory is resident memory in MiB: all of it, the part that is not of files, and the most it ever was.
func (p *program) memory() (rss, anon, peak float64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		return 0, 0, 0
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		for name, to := range map[string]*float64{"VmRSS:": &rss, "RssAnon:": &anon, "VmHWM:": &peak} {
			if len(fields) > 1 && fields[0] == name {
				kib, _ := strconv.ParseFloat(fields[1], 64)
				*to = kib / 1024
			}
		}
	}
	return rss, anon, peak
}

// profiled starts to take what /debug/pprof has, where profiles are wanted, and returns what waits for its end: of CPU profiles
// there is one at a time.
func (p *program) profiled(what, file string) (wait func()) {
	if p.profile == "" {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := p.takeProfile(what, file); err != nil {
			say("%s: profile %s: %v", p, what, err)
		}
	}()
	return func() { <-done }
}

// takeProfile stores a profile; it asks for it as soon as somebody listens.
func (p *program) takeProfile(what, file string) error {
	var answer *http.Response
	var err error
	for range 100 {
		if answer, err = http.Get(metricsPort + "/debug/pprof/" + what); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %.200s", answer.Status, text)
	}
	if err != nil {
		return err
	}
	name := strings.ReplaceAll(fmt.Sprintf("%s %d %s", p, p.services, file), " ", "-")
	return os.WriteFile(filepath.Join(p.profile, name), text, 0o644)
}
