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
Grants are among the pins.`,
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
}

func lineOf(e ec.Info) entryLine {
	state := "not_ready"
	switch {
	case e.State == ec.Ready && e.Pins > 0:
		state = "pinned"
	case e.State == ec.Ready:
		state = "ready"
	}
	return entryLine{e.Key, e.Spec.Bytes, e.Spec.Shape, state, e.Pins, e.Holds, e.Grants, e.Burned}
}
