package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// IPv6Off tells in words why IPv6 does not work in the network namespace of the calling thread, "" when it does.
func IPv6Off() string {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
		return "this kernel has no IPv6 (/proc/net/if_inet6 is missing)"
	}
	const setting = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
	b, err := os.ReadFile(setting)
	switch {
	case err != nil:
		return fmt.Sprintf("IPv6: %v", err)
	case strings.TrimSpace(string(b)) == "1":
		return "IPv6 is switched off (net.ipv6.conf.all.disable_ipv6=1)"
	}
	return ""
}
