package kernel

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestLeftovers removes what carries the names of another proxy, and nothing beside it.
func TestLeftovers(t *testing.T) {
	ns, err := NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	err = ns.Do(func() error {
		run("nft", "add", "table", "ip", "kube-proxy")
		run("nft", "add", "chain", "ip", "kube-proxy", "services")
		run("nft", "add", "table", "ip", "other")
		run("ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port")
		run("ipset", "add", "KUBE-CLUSTER-IP", "10.96.0.1,tcp:443")
		run("ipset", "create", "other", "hash:ip")
		for _, name := range []string{"kube-ipvs0", "other0"} {
			if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
		run("ipset", "create", "KUBE-BUSY", "hash:ip")
		run("iptables", "-A", "INPUT", "-m", "set", "--match-set", "KUBE-BUSY", "src", "-j", "DROP")
		if _, err := DestroyIPSets("KUBE-BUSY"); err == nil || err.Error() != "destroy ipset KUBE-BUSY: a rule still uses it" {
			t.Errorf("a set in use: %v", err)
		}
		run("iptables", "-F", "INPUT")
		for range 2 { // the second time there is nothing to do
			if err := DeleteNFTable(unix.NFPROTO_IPV4, "kube-proxy"); err != nil {
				t.Error(err)
			}
			if _, err := DestroyIPSets("KUBE-"); err != nil {
				t.Error(err)
			}
			if err := DeleteLink("kube-ipvs0", "bridge"); err != nil {
				t.Error(err)
			}
		}
		if err := DeleteLink("lo", "bridge"); err != nil {
			t.Error(err)
		}
		if got := strings.TrimSpace(run("nft", "list", "tables")); !strings.Contains(got, "table ip other") || strings.Contains(got, "kube-proxy") {
			t.Errorf("tables: %s", got)
		}
		if got := strings.TrimSpace(run("ipset", "list", "-n")); got != "other" {
			t.Errorf("sets: %s", got)
		}
		links, err := netlink.LinkList()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range links {
			names = append(names, l.Attrs().Name)
		}
		if slices.Contains(names, "kube-ipvs0") || !slices.Contains(names, "other0") || !slices.Contains(names, "lo") {
			t.Errorf("links: %v", names)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
