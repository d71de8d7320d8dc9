package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/shm"
)

func (a *app) statCmd() *cobra.Command {
	var f stageFlags
	var source sourceFlags
	var deadline time.Duration
	cmd := &cobra.Command{
		Use:   "stat --key KEY (--from HOST:PORT | --metadata HEX) [--connector nixl|shm] [--deadline 5s]",
		Short: "Ask what payload there is under a key, without taking it",
		Long: `Ask a producer of ours what there is under a key; the payload stays for its reader. One line on standard output:
  {"key":..,"status":"ok|not_found|timeout|unreachable|failed","kind":"tensors|structured|object","size":..,"generation":"..",
   "tensors":[{"dtype":"torch.bfloat16","shape":[2,3],"bytes":..,"device":"cpu"}]}
with "reason" where the status is not ok. Of a structured or an object payload the first tensor is the serialized part. A producer that
is not ours tells this only to who takes the payload: "failed" then. --connector shm tells the size alone.
The exit status is 0 only if the status is ok.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			r, err := source.request(&f)
			if err != nil {
				return err
			}
			if deadline <= 0 {
				return usage("--deadline %v: want more than 0", deadline)
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			within, cancelDeadline := context.WithTimeout(ctx, deadline)
			defer cancelDeadline()
			line := statLine{Key: f.key}
			err = a.stat(within, &f, r, &line)
			if line.Status = getStatus(ctx, err); err != nil {
				line.Reason = err.Error()
			}
			if e := printJSON(a.stdout, line); e != nil {
				return e
			}
			if err != nil {
				return errReported
			}
			return nil
		},
	}
	f.addCommon(cmd)
	source.add(cmd)
	cmd.Flags().DurationVar(&deadline, "deadline", 5*time.Second, "for the answer")
	return cmd
}

type statLine struct {
	Key        string       `json:"key"`
	Status     string       `json:"status"`
	Kind       string       `json:"kind,omitempty"`
	Size       int64        `json:"size"`
	Generation string       `json:"generation,omitempty"`
	Tensors    []statTensor `json:"tensors,omitempty"`
	Reason     string       `json:"reason,omitempty"`
}

type statTensor struct {
	DType  string  `json:"dtype"`
	Shape  []int64 `json:"shape"`
	Bytes  int64   `json:"bytes"`
	Device string  `json:"device"`
}

func (a *app) stat(ctx context.Context, f *stageFlags, r stage.Request, line *statLine) error {
	if f.connector == connectorSHM {
		size, err := shm.Stat(f.shmDir, f.key)
		line.Size = size
		return err
	}
	m, err := connect.Stat(ctx, r, a.log)
	if errors.Is(err, stage.ErrPlain) {
		return fmt.Errorf("%w; it tells that only to ferry get, which takes the payload", err)
	}
	if err != nil {
		return err
	}
	line.Kind, line.Size, line.Generation = m.Kind.String(), m.Size, m.Generation.String()
	for _, s := range m.Specs {
		t := statTensor{DType: s.DType.String(), Shape: s.Shape, Bytes: s.Size, Device: s.Device.String()}
		if t.Shape == nil {
			t.Shape = []int64{}
		}
		line.Tensors = append(line.Tensors, t)
	}
	return nil
}
