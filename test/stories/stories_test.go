// Package stories tells what fairlead does with real packets, one story a file. Each file says in its first sentence what
// it shows; package story explains the language.
//
// The stories need root (namespaces) and the binary (make build). FAIRLEAD names another binary, FAIRLEAD_MODES the modes
// that all of them are told for (iptables,iptables-legacy,nftables), FAIRLEAD_STORIES a pattern of other files.
package stories

import (
	"bytes"
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fairlead/internal/story"

	"go.uber.org/goleak"
)

// atOnce is how many stories run at the same time; storyLimit is far more than the longest takes.
const (
	atOnce     = 2
	storyLimit = 3 * time.Minute
)

func TestMain(m *testing.M) {
	story.MaybeFault()
	goleak.VerifyTestMain(m)
}

func TestStories(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("FAIRLEAD_NO_ROOT") == "1" {
			t.Skip("FAIRLEAD_NO_ROOT=1: no story is told")
		}
		t.Fatal("stories need root; set FAIRLEAD_NO_ROOT=1 to do without them")
	}
	files, err := filepath.Glob(cmp.Or(os.Getenv("FAIRLEAD_STORIES"), "*.txtar"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no stories: %v", err)
	}
	gate := make(chan struct{}, atOnce)
	for _, mode := range modes() {
		for _, file := range files {
			t.Run(mode+"/"+strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
				t.Parallel()
				gate <- struct{}{}
				defer func() { <-gate }()
				tell(t, file, options(t, mode))
			})
		}
	}
}

func tell(t *testing.T, file string, o story.Options) {
	ctx, cancel := context.WithTimeout(context.Background(), storyLimit)
	defer cancel()
	var log bytes.Buffer
	if err := story.Run(ctx, file, o, &log); err != nil {
		t.Errorf("%v\n%s", err, log.String())
	} else if testing.Verbose() {
		t.Log("\n" + log.String())
	}
}

// modes are those of --proxy-mode, and iptables-legacy: iptables on nodes that have the older kind of it.
func modes() []string {
	if m := os.Getenv("FAIRLEAD_MODES"); m != "" {
		return strings.Split(m, ",")
	}
	return []string{"iptables", "iptables-legacy", "nftables"}
}

func options(t *testing.T, mode string) story.Options {
	mode, legacy := strings.CutSuffix(mode, "-legacy")
	return story.Options{Binary: binary(t), Mode: mode, Legacy: legacy}
}

func binary(t *testing.T) string {
	t.Helper()
	path := os.Getenv("FAIRLEAD")
	if path == "" {
		path = "../../bin/fairlead"
	}
	path, err := filepath.Abs(path)
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("no fairlead to try (make build, or FAIRLEAD=path): %v", err)
	}
	return path
}
