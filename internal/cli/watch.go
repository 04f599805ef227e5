package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/klog/v2"
)

// calm is how long a file must be left alone before it is read again: an editor, or the kubelet, writes in steps.
const calm = 500 * time.Millisecond

// watchConfig calls changed whenever the content of the configuration file has changed, at first since it had the fingerprint told. It watches the directory: a ConfigMap's file is a link
// that is replaced, which a watch on the file itself would miss.
func watchConfig(ctx context.Context, path string, told []byte, changed func()) {
	w, err := fsnotify.NewWatcher()
	if err == nil {
		defer w.Close()
		err = w.Add(filepath.Dir(path))
	}
	if err != nil {
		klog.ErrorS(err, "The configuration file is not watched", "path", path)
		return
	}
	timer := time.NewTimer(calm)
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Events:
			timer.Reset(calm)
		case err := <-w.Errors:
			klog.V(2).InfoS("Watching the configuration file", "err", err)
			timer.Reset(calm)
		case <-timer.C:
			if now := sum(path); now != nil && !bytes.Equal(now, told) {
				told = now
				changed()
			}
		}
	}
}

// sum is a file's fingerprint, nil when it can't be read.
func sum(path string) []byte {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	s := sha256.Sum256(b)
	return s[:]
}
