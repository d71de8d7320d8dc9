package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/pebbe/zmq4"
	"github.com/spf13/cobra"
)

// versionInfo says what this binary is made of.
type versionInfo struct {
	Version  string `json:"version"`
	Revision string `json:"revision"`
	Modified bool   `json:"modified"` // built from a tree with changes that are not in the revision
	Go       string `json:"go"`
	Platform string `json:"platform"`
	ZMQ      string `json:"libzmq"`
}

func readVersion() versionInfo {
	v := versionInfo{Version: "(devel)", Revision: "unknown", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, ZMQ: zmqVersion()}
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if b.Main.Version != "" {
		v.Version = b.Main.Version
	}
	for _, s := range b.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

func zmqVersion() string {
	major, minor, patch := zmq4.Version()
	return fmt.Sprintf("%d.%d.%d", major, minor, patch)
}

func (a *app) versionCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say what this binary is built from",
		Args:  noArgs,
		RunE: func(*cobra.Command, []string) error {
			v := readVersion()
			if asJSON {
				return printJSON(a.stdout, v)
			}
			changed := ""
			if v.Modified {
				changed = ", with changes"
			}
			_, err := fmt.Fprintf(a.stdout, "ferry %s (revision %s%s)\n%s %s\nlibzmq %s\n", v.Version, v.Revision, changed, v.Go, v.Platform, v.ZMQ)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object")
	return cmd
}
