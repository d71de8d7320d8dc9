package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/node/client"
)

func (a *app) ecCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ec",
		Short: "Encodings by hand, against a node",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usage("no command %q; want put, announce, fetch or ls", args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.ecPutCmd(), a.ecAnnounceCmd(), a.ecFetchCmd(), a.ecListCmd())
	return cmd
}

// nodeFlags say which node, and which of its pools, a command works on.
type nodeFlags struct {
	socket string
	pool   string
	wait   time.Duration
}

func (f *nodeFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.socket, "socket", defaultSocket(), "the node's unix socket (environment: FERRY_SOCKET)")
	cmd.Flags().StringVar(&f.pool, "pool", "", "compatibility hash of the pool; not needed if the node has just one")
	cmd.Flags().DurationVar(&f.wait, "connect-timeout", 10*time.Second, "how long the node may take to answer the connection; one that restarts is tried again for that long")
}

func defaultSocket() string {
	if s := os.Getenv("FERRY_SOCKET"); s != "" {
		return s
	}
	return node.DefaultConfig().Socket
}

// dial connects. A socket that is not there is an error at once; a node that is ending or starting is tried again.
func (a *app) dial(ctx context.Context, f *nodeFlags, name string) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, f.wait)
	defer cancel()
	c, err := client.Dial(ctx, f.socket, client.Options{Name: name, Pool: f.pool, Log: a.log})
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("no node at --socket %s: start one with `ferry node --socket %s`, or name the socket of one that runs: %w", f.socket, f.socket, err)
		}
		return nil, fmt.Errorf("node at --socket %s: %w", f.socket, err)
	}
	return c, nil
}

// statusOf is an outcome as scripts read it: ready, missing, not_ready, incompatible, unreachable, timed_out, conflict, failed,
// canceled.
func statusOf(o ec.Outcome) string {
	switch o {
	case ec.FetchNotReady:
		return "not_ready"
	case ec.FetchTimedOut:
		return "timed_out"
	default:
		return o.String()
	}
}
