package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Sysctl reads a kernel setting of the calling thread's network namespace, by its path below /proc/sys
// ("net/ipv4/ip_forward").
func Sysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// SetSysctl changes a kernel setting, unless it has the value already: an agent without the right to write may still find
// everything as it should be.
func SetSysctl(name, value string) error {
	if have, err := Sysctl(name); err == nil && have == value {
		return nil
	}
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644); err != nil {
		return fmt.Errorf("set sysctl %s to %s: %w", name, value, err)
	}
	return nil
}
