// Command build makes the binaries of this module once and prints their paths:
//
//	go run ./cmd/build testctl kube-proxy
//
// They are kept in the user's cache folder under a key of everything they are made from, so a second call costs
// nothing. The API server takes minutes to compile on a fresh machine; kube-proxy is made only when asked for.
package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

// packages are the binaries we know, and where each comes from.
var packages = map[string]string{
	"testctl":    "./testctl",
	"kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
}

// flags stamp the version: unstamped, Kubernetes calls itself v0.0.0-master. It is that of k8s.io/kubernetes in go.mod.
var flags = []string{"-buildvcs=false", "-ldflags=-s -w" +
	" -X k8s.io/component-base/version.gitVersion=v1.37.2" +
	" -X k8s.io/component-base/version.gitMajor=1" +
	" -X k8s.io/component-base/version.gitMinor=37"}

// sources are the files of this module that decide what is built.
var sources = []string{"go.mod", "go.sum", "testctl/main.go"}

func main() {
	if len(os.Args) < 2 {
		fatal(fmt.Errorf("say what to build: testctl, kube-proxy"))
	}
	dir, err := cacheDir()
	if err != nil {
		fatal(err)
	}
	for _, name := range os.Args[1:] {
		path := filepath.Join(dir, name)
		if err := build(name, path); err != nil {
			fatal(fmt.Errorf("build %s: %w", name, err))
		}
		fmt.Println(path)
	}
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "build:", err)
	os.Exit(1)
}

// cacheDir is the folder for binaries made from these sources with this compiler and these flags.
func cacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.Version(), runtime.GOOS, runtime.GOARCH, flags)
	for _, name := range sources {
		content, err := os.ReadFile(name)
		if err != nil {
			return "", fmt.Errorf("run this in test/apiserver: %w", err)
		}
		fmt.Fprintf(sum, "%s %d\n%s", name, len(content), content)
	}
	dir := filepath.Join(base, "fairlead", fmt.Sprintf("%x", sum.Sum(nil)[:8]))
	return dir, os.MkdirAll(dir, 0o755)
}

// build makes one binary unless it is there. It is renamed into place: a build cut short leaves no half of a binary.
func build(name, path string) error {
	pkg, known := packages[name]
	if !known {
		return fmt.Errorf("unknown: say testctl or kube-proxy")
	}
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	part := fmt.Sprintf("%s.%d", path, os.Getpid())
	defer os.Remove(part)
	args := append([]string{"build", "-o", part}, flags...)
	command := exec.Command("go", append(args, pkg)...)
	command.Stdout, command.Stderr = os.Stderr, os.Stderr
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	fmt.Fprintf(os.Stderr, "go %s\n", strings.Join(command.Args[1:], " "))
	if err := command.Run(); err != nil {
		return err
	}
	return os.Rename(part, path)
}
