package nftables

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fairlead/internal/dataplane/dptest"
	"fairlead/internal/kernel"
)

// Elements that somebody else deletes, adds or changes are put right one by one, and told with the process's name; for more
// than elements everything has to be applied again.
func TestMend(t *testing.T) {
	ns, err := kernel.NewNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	ctx, cancel := context.WithCancel(t.Context())
	heard, ended := make(chan string, 100), make(chan error, 1)
	err = ns.Do(func() error {
		d, err := New(Config{V4: true, V6: true, MasqueradeBit: 14})
		if err != nil {
			return err
		}
		defer d.Close()
		go func() {
			ended <- ns.Do(func() error { return d.Watch(ctx, func(what string) { heard <- what }) })
		}()
		time.Sleep(100 * time.Millisecond) // until it listens
		if err := d.Apply(ctx, dptest.Golden(false)); err != nil {
			return err
		}
		before := listed(t)
		for _, c := range mendings {
			if err := nft(c.do); err != nil {
				return err
			}
			select {
			case what := <-heard:
				if !strings.Contains(what, c.says) || !strings.Contains(what, "by nft (process ") {
					t.Errorf("%s: told %q, want %q in it", c.do, what, c.says)
				}
			case <-time.After(5 * time.Second):
				return fmt.Errorf("%s: nothing was told", c.do)
			}
			_, err := d.Mend()
			if (err != nil) != c.more {
				t.Errorf("%s: Mend says %v", c.do, err)
			}
			if err != nil {
				if err := d.Apply(ctx, dptest.Golden(false)); err != nil {
					return err
				}
			}
			if after := listed(t); after != before {
				t.Errorf("%s: not as before:\n%s", c.do, after)
			}
		}
		return nil
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

var mendings = []struct {
	do, says string
	more     bool
}{
	{do: "delete element ip fairlead services { 10.96.0.10 . tcp . 80 }", says: "element 10.96.0.10:80/tcp was deleted from services of ip fairlead"},
	{do: "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 0x1 }", says: "from endpoints"},
	{do: "delete element ip fairlead sticky-endpoints { 10.96.0.11 . tcp . 443 . 0x1 }", says: "from sticky-endpoints"},
	{do: "delete element ip fairlead sticky-numbers { 10.96.0.11 . tcp . 443 . 0x1 }", says: "from sticky-numbers"},
	{do: "delete element ip fairlead allowed { 203.0.113.1 . tcp . 80 . 198.51.100.0/24 }", says: "from allowed"},
	{do: "delete element ip fairlead cluster-ips { 10.96.0.13 }", says: "from cluster-ips"},
	{do: "delete element ip fairlead hairpin { 10.244.1.10 . 10.244.1.10 }", says: "from hairpin"},
	{do: "delete element ip fairlead from-pod { 0x1 }", says: "from from-pod"},
	{do: "flush map ip fairlead services", says: "from services"},
	{do: "add element ip fairlead cluster-ips { 192.0.2.1 }", says: "was added to cluster-ips"},
	{do: "add element ip fairlead services { 192.0.2.1 . tcp . 22 : 0x1 }", says: "element 192.0.2.1:22/tcp was added to services"},
	{do: "add element ip fairlead allowed { 203.0.113.1 . tcp . 80 . 10.0.0.0/8 }", says: "was added to allowed"},
	{do: "delete element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 0x0 }; add element ip fairlead endpoints { 10.96.0.10 . tcp . 80 . 0x0 : 192.0.2.66 . 66 }",
		says: "endpoints"},
	{do: "flush chain ip fairlead cluster-2", says: "a rule was deleted from chain cluster-2 of ip fairlead", more: true},
	{do: "delete table ip fairlead", says: "table ip fairlead was deleted", more: true},
}

func nft(words string) error {
	if out, err := exec.Command("nft", words).CombinedOutput(); err != nil {
		return fmt.Errorf("nft %s: %w: %s", words, err, out)
	}
	return nil
}

func listed(t *testing.T) string {
	out, err := exec.Command("nft", "list", "table", "ip", tableName).CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	return sortElements(string(out))
}
