package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version is set by the Makefile (-X).
var version = ""

// versions gives the version of the program and the revision it was built from.
func versions() (number, revision string) {
	number = version
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	if number == "" {
		number = "v0.0.0-dev"
	}
	return number, revision
}

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), versionLine()) },
	}
}

func versionLine() string {
	number, _ := versions()
	return "fairlead " + number
}

func rawVersion() string {
	number, revision := versions()
	return fmt.Sprintf("version=%s revision=%s go=%s platform=%s/%s", number, revision, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// versionFlag is kube-proxy's --version: alone or true, raw, or vX.Y.Z, which sets the version that is reported.
type versionFlag struct{ asked, raw bool }

func (v *versionFlag) String() string { return "false" }
func (v *versionFlag) Type() string   { return "version" }
func (v *versionFlag) Set(s string) error {
	switch {
	case s == "true":
		v.asked = true
	case s == "false":
		v.asked = false
	case s == "raw":
		v.asked, v.raw = true, true
	case len(s) > 1 && s[0] == 'v' && s[1] >= '0' && s[1] <= '9':
		version = s
	default:
		return fmt.Errorf("want true, false, raw or vX.Y.Z")
	}
	return nil
}
