package kernel

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// LoadModule loads a module of the kernel with modprobe(8), unless it is there. A kernel may have it built in, and then the file system
// does not always tell: an error is no proof.
func LoadModule(name string) error {
	if _, err := os.Stat(filepath.Join("/sys/module", name)); err == nil {
		return nil
	}
	if !Installed("modprobe") {
		return fmt.Errorf("load kernel module %s: modprobe is not installed", name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := (Command{Name: "modprobe", Args: []string{"--", name}}).Run(ctx); err != nil {
		return fmt.Errorf("load kernel module %s: %w", name, err)
	}
	return nil
}
