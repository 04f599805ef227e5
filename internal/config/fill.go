package config

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
)

// fill lets the flags that were given say what the file leaves open: a field that it does not have, or has as "", null or [],
// which is how kubeadm writes one that nobody set. What the file does say counts. kube-proxy uses no such flag at all beside
// a file, and whoever gave one meant it. Each flag is answered with a line.
func (o *Options) fill(proxy, flags *proxyv1alpha1.KubeProxyConfiguration, where map[string]string) ([]string, error) {
	file, err := fieldsOf(proxy)
	if err != nil {
		return nil, err
	}
	given, err := fieldsOf(flags)
	if err != nil {
		return nil, err
	}
	var notes []string
	o.fs.Visit(func(f *pflag.Flag) {
		path, ok := fieldOf[f.Name]
		switch {
		case !ok || f.Name == "hostname-override":
		case open(file, path, where):
			put(file, path, get(given, path))
			notes = append(notes, fmt.Sprintf("--%s is used, since the file leaves %s open", f.Name, path))
		default:
			notes = append(notes, fmt.Sprintf("--%s is not used: the file sets %s", f.Name, path))
		}
	})
	slices.Sort(notes)
	b, err := json.Marshal(file)
	if err != nil {
		return nil, err
	}
	return notes, json.Unmarshal(b, proxy)
}

// fieldsOf is a configuration as JSON has it.
func fieldsOf(c *proxyv1alpha1.KubeProxyConfiguration) (map[string]any, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	return out, json.Unmarshal(b, &out)
}

// open tells whether the file says nothing of a field.
func open(file map[string]any, path string, where map[string]string) bool {
	if _, written := where[path]; !written {
		return true
	}
	switch v := get(file, path).(type) {
	case nil:
		return true
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	}
	return false
}

func get(fields map[string]any, path string) any {
	section, rest, deep := strings.Cut(path, ".")
	if !deep {
		return fields[section]
	}
	sub, _ := fields[section].(map[string]any)
	return get(sub, rest)
}

func put(fields map[string]any, path string, v any) {
	section, rest, deep := strings.Cut(path, ".")
	if !deep {
		fields[section] = v
		return
	}
	sub, ok := fields[section].(map[string]any)
	if !ok {
		sub = map[string]any{}
		fields[section] = sub
	}
	put(sub, rest, v)
}
