package story

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// standIn is an agent that knows ClusterIPs and nothing else, so that the engine and the lab can be tried by themselves. It
// reads the directory of manifests over and over and writes naive rules.
func standIn(args []string) {
	manifests := ""
	for i, a := range args {
		if a == "--manifests" {
			manifests = args[i+1]
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ready := make(chan struct{})
	go func() {
		for last := ""; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			rules4, rules6 := naiveRules(manifests)
			if rules4+rules6 == last {
				continue
			}
			err := restore("iptables-restore", rules4)
			if err == nil {
				err = restore("ip6tables-restore", rules6)
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, "failed:", err)
				continue
			}
			if last == "" {
				close(ready)
			}
			last = rules4 + rules6
		}
	}()
	<-ready
	mux := http.NewServeMux()
	mux.HandleFunc("/readyz", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "# HELP x y\nx_total{a=\"1\",b=\"2\"} 3\nx_total{a=\"2\",b=\"2\"} 4.5\n")
	})
	fmt.Println("the stand-in is ready")
	go http.ListenAndServe("127.0.0.1:10249", mux)
	fmt.Fprintln(os.Stderr, http.ListenAndServe("127.0.0.1:10256", mux))
	os.Exit(1)
}

func restore(tool, rules string) error {
	cmd := exec.Command(tool)
	cmd.Stdin = strings.NewReader(rules)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", tool, err, out)
	}
	return nil
}

type naiveSlice struct {
	Kind, AddressType string
	Metadata          struct{ Labels map[string]string }
	Endpoints         []struct {
		Addresses  []string
		Conditions struct{ Ready bool }
	}
	Ports []struct {
		Name, Protocol string
		Port           int
	}
}

func naiveRules(dir string) (v4, v6 string) {
	var services []service
	var slices []naiveSlice
	files, _ := filepath.Glob(filepath.Join(dir, "*.yaml"))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		for _, doc := range bytes.Split(data, []byte("\n---")) {
			var s service
			var sl naiveSlice
			if yaml.Unmarshal(doc, &s) == nil && s.Kind == "Service" {
				services = append(services, s)
			}
			if yaml.Unmarshal(doc, &sl) == nil && sl.Kind == "EndpointSlice" {
				slices = append(slices, sl)
			}
		}
	}
	return naiveFamily(services, slices, false), naiveFamily(services, slices, true)
}

func naiveFamily(services []service, slices []naiveSlice, v6 bool) string {
	nat, filter := "*nat\n", "*filter\n-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n"
	for _, s := range services {
		for _, ip := range s.clusterIPs() {
			for _, p := range s.Spec.Ports {
				if ip.Is6() != v6 {
					continue
				}
				match := fmt.Sprintf("-d %s -p %s --dport %d", ip, strings.ToLower(p.protocol()), p.Port)
				n, f := naivePort(match, strings.ToLower(p.protocol()), naiveBackends(s, p, slices, v6))
				nat, filter = nat+n, filter+f
			}
		}
	}
	pods := map[bool]string{false: "10.244.0.0/16", true: "fd00:10:244::/48"}[v6]
	services6 := map[bool]string{false: "10.96.0.0/16", true: "fd00:96::/112"}[v6]
	nat += fmt.Sprintf("-A POSTROUTING ! -s %s -m conntrack --ctorigdst %s -j MASQUERADE\n", pods, services6)
	for _, sl := range slices {
		for _, e := range sl.Endpoints {
			if a, err := netip.ParseAddr(e.Addresses[0]); err == nil && a.Is6() == v6 {
				nat += fmt.Sprintf("-A POSTROUTING -s %s -d %s -j MASQUERADE\n", a, a)
			}
		}
	}
	return nat + "COMMIT\n" + filter + "COMMIT\n"
}

func naiveBackends(s service, p port, slices []naiveSlice, v6 bool) (backends []netip.AddrPort) {
	for _, sl := range slices {
		if sl.Metadata.Labels["kubernetes.io/service-name"] != s.Metadata.Name || (sl.AddressType == "IPv6") != v6 {
			continue
		}
		for _, sp := range sl.Ports {
			if sp.Name != p.Name || sp.Protocol != p.protocol() {
				continue
			}
			for _, e := range sl.Endpoints {
				if e.Conditions.Ready {
					backends = append(backends, netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(sp.Port)))
				}
			}
		}
	}
	return backends
}

func naivePort(match, proto string, backends []netip.AddrPort) (nat, filter string) {
	if len(backends) == 0 {
		reject := "-j REJECT"
		if proto == "tcp" {
			reject = "-j REJECT --reject-with tcp-reset"
		}
		return "", fmt.Sprintf("-A FORWARD %s %s\n-A OUTPUT %s %s\n", match, reject, match, reject)
	}
	for i, b := range backends {
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			nat += fmt.Sprintf("-A %s %s -m statistic --mode random --probability %.10f -j DNAT --to-destination %s\n",
				chain, match, 1/float64(len(backends)-i), b)
		}
	}
	return nat, ""
}
