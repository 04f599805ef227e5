package story

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"rsc.io/script"
)

// configFile is where an agent may be told to read its configuration: --config $CONFIG.
func (st *stage) configFile() string { return filepath.Join(st.configDir(), "config.conf") }

func (st *stage) configDir() string { return filepath.Join(filepath.Dir(st.dir), "configmap") }

// configmap publishes a file of the story as the kubelet does a ConfigMap: in a new directory, to which a link is moved.
func (st *stage) configmap(_ context.Context, args []string) (string, error) {
	if len(args) != 1 {
		return "", script.ErrUsage
	}
	text, err := os.ReadFile(filepath.Join(st.dir, args[0]))
	if err != nil {
		return "", err
	}
	at := st.configDir()
	if err := os.MkdirAll(at, 0o755); err != nil {
		return "", err
	}
	version, err := os.MkdirTemp(at, "..")
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(version, filepath.Base(st.configFile())), text, 0o600); err != nil {
		return "", err
	}
	data, tmp := filepath.Join(at, "..data"), filepath.Join(at, "..data_tmp")
	if err := os.Symlink(filepath.Base(version), tmp); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, data); err != nil {
		return "", err
	}
	if _, err := os.Lstat(st.configFile()); err == nil {
		return "", nil
	}
	if err := os.Symlink("..data/"+filepath.Base(st.configFile()), st.configFile()); err != nil {
		return "", fmt.Errorf("link %s: %w", st.configFile(), err)
	}
	return "", nil
}
