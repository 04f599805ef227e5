package config

import (
	"bytes"
	"fmt"
	"os"

	sigsyaml "sigs.k8s.io/yaml"
)

// YAML is the effective configuration: a file that says all of it, and can be given to --config.
func (c *Config) YAML() ([]byte, error) {
	proxy, err := sigsyaml.Marshal(c.Proxy)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", ProxyKind, err)
	}
	ours := c.Own
	ours.APIVersion, ours.Kind = OwnAPIVersion, OwnKind
	own, err := sigsyaml.Marshal(ours)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", OwnKind, err)
	}
	return bytes.Join([][]byte{proxy, own}, []byte("---\n")), nil
}

// WriteTo writes the effective configuration to a file.
func (c *Config) WriteTo(name string) error {
	data, err := c.YAML()
	if err != nil {
		return err
	}
	if err := os.WriteFile(name, data, 0o644); err != nil {
		return fmt.Errorf("write config: %w", err)
	}
	return nil
}
