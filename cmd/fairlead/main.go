// Command fairlead is the Kubernetes service proxy of one node. Called kube-proxy, it is `fairlead run`.
package main

import (
	"os"

	"fairlead/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args, os.Stdout, os.Stderr)) }
