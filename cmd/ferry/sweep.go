package main

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/shm"
)

func (a *app) sweepCmd() *cobra.Command {
	var o region.SweepOptions
	var sockets []string
	cmd := &cobra.Command{
		Use:   "sweep [--dir DIR] [--socket PATH]...",
		Short: "Reap what killed processes left: regions and payloads that nobody owns, and sockets",
		Long: `Remove the regions of dead owners that wait for no restart any more or were emptied, what killed creators left beside them,
payloads that dead ferry put processes left in shared memory and whose lease is over, and the sockets of dead nodes. What lives
stays, and so does what is another user's, a symbolic link, or no region by its content. A node that starts does so for regions
only. One line a file:
{"file":..,"bytes":..,"reaped":true|false,"reason":..}
With --dry-run all of it stays, and "would_reap" is there in the place of "reaped".

Engines that still have a region mapped keep its memory until they end. NIXL agents that outlived the node end with the region.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			swept, err := region.Sweep(o)
			for _, s := range swept {
				err = errors.Join(err, printJSON(a.stdout, lineOfSwept(s.Path, s.Bytes, s.Reaped, s.Reason, o.DryRun)))
			}
			payloads, shmErr := shm.Sweep(o.Dir, o.DryRun)
			err = errors.Join(err, shmErr)
			for _, s := range payloads {
				err = errors.Join(err, printJSON(a.stdout, lineOfSwept(s.Path, s.Bytes, s.Reaped, s.Reason, o.DryRun)))
			}
			if !cmd.Flags().Changed("socket") {
				sockets = []string{node.DefaultConfig().Socket}
			}
			for _, path := range sockets {
				stale, sockErr := node.SweepSocket(cmd.Context(), path, o.DryRun)
				switch {
				case sockErr != nil:
					err = errors.Join(err, printJSON(a.stdout, lineOfSwept(path, 0, false, sockErr.Error(), o.DryRun)))
				case stale:
					err = errors.Join(err, printJSON(a.stdout, lineOfSwept(path, 0, true, "nobody listens on it", o.DryRun)))
				}
			}
			return err
		},
	}
	dir := os.Getenv(node.EnvName("shm_dir"))
	if dir == "" {
		dir = region.DefaultDir
	}
	cmd.Flags().StringVar(&o.Dir, "dir", dir, "where the regions are ("+node.EnvName("shm_dir")+")")
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only say what would be reaped")
	cmd.Flags().BoolVar(&o.Force, "force", false, "also reap regions that still wait for their node's restart: their entries are lost")
	cmd.Flags().StringArrayVar(&sockets, "socket", nil, "engine socket to look at; the default one if none is given")
	return cmd
}

type sweptLine struct {
	File      string `json:"file"`
	Bytes     int64  `json:"bytes"`
	Reaped    *bool  `json:"reaped,omitempty"`     // nil with --dry-run
	WouldReap *bool  `json:"would_reap,omitempty"` // nil without
	Reason    string `json:"reason"`
}

// lineOfSwept is the line of a file that is gone, or with dry would be, if yes.
func lineOfSwept(file string, bytes int64, yes bool, reason string, dry bool) sweptLine {
	l := sweptLine{File: file, Bytes: bytes, Reason: reason}
	if dry {
		l.WouldReap = &yes
	} else {
		l.Reaped = &yes
	}
	return l
}
