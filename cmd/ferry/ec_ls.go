package main

import (
	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/ec"
)

func (a *app) ecListCmd() *cobra.Command {
	var f nodeFlags
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the entries of a pool",
		Long: `List the entries of a pool in the order of eviction, one a line:
{"key":..,"bytes":..,"shape":[..],"state":"not_ready|ready|pinned","pins":..,"holds":..}
An entry that peers were granted has "grants":.., and "burned":.. says how many of these are past their lease and may still be READ.
Grants are among the pins. One that is not ready has "owner":.., the engine that fills it, as /v1/status names it.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			c, err := a.dial(ctx, &f, "ferry ec ls")
			if err != nil {
				return err
			}
			defer c.Close()
			entries, err := c.List(ctx)
			if err != nil {
				return err
			}
			for _, e := range entries {
				if err := printJSON(a.stdout, lineOf(e)); err != nil {
					return err
				}
			}
			return nil
		},
	}
	f.add(cmd)
	return cmd
}

type entryLine struct {
	Key   string  `json:"key"`
	Bytes int64   `json:"bytes"`
	Shape []int64 `json:"shape"`
	State string  `json:"state"`
	Pins  int     `json:"pins"`
	Holds int     `json:"holds"`

	Grants int `json:"grants,omitempty"`
	Burned int `json:"burned,omitempty"`

	Owner uint64 `json:"owner,omitempty"` // of one that is not ready; none: the node itself
}

func lineOf(e ec.Info) entryLine {
	l := entryLine{Key: e.Key, Bytes: e.Spec.Bytes, Shape: e.Spec.Shape, Pins: e.Pins, Holds: e.Holds, Grants: e.Grants, Burned: e.Burned}
	switch {
	case e.State == ec.Ready && e.Pins > 0:
		l.State = "pinned"
	case e.State == ec.Ready:
		l.State = "ready"
	default:
		l.State, l.Owner = "not_ready", e.Owner
	}
	return l
}
