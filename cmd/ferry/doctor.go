package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/node"
)

func (a *app) doctorCmd() *cobra.Command {
	var f configFlags
	var peer, params string
	var asJSON bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "doctor [--peer HOST:PORT]",
		Short: "Will it work here?",
		Long: `Checks this machine for a node of the given configuration (the same flags, environment and --config as ferry node): shared
memory, kernel, limits, ports, libzmq, the environment in force, TCP congestion control, NIXL with a transfer to itself.

With --peer it also starts a small node inside this process and checks the way to a node that runs, over the control channel and
over a data plane. Control: it asks for a key that nobody has, which a live and compatible peer answers with MISSING. Data: it
pulls the probe, one block of known bytes that every Tensorferry node makes when it is asked for it, and compares it byte for byte.
A peer of another kind has no probe; for it, --params takes the ec_transfer_params of a real encoding. The model, dtype, block
bytes and vLLM version must be the peer's.

Each line says OK, WARN or FAIL. The exit status is 0 if nothing is FAIL. With --peer, a socket or port of this machine that is in use is only
worth a WARN: a node that runs here has them.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := f.read(cmd)
			if err != nil {
				return err
			}
			if params != "" && peer == "" {
				return usage("--params is for --peer, which is missing")
			}
			if timeout <= 0 {
				return usage("--timeout %v: want more than 0", timeout)
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			findings := append(examine(ctx, c, peer != ""), checkNIXL(ctx, c)...)
			if peer != "" {
				found, err := a.examinePeer(ctx, c, peer, params, timeout)
				if err != nil {
					return err
				}
				findings = append(findings, found...)
			}
			return a.printFindings(findings, asJSON)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&peer, "peer", "", "HOST:PORT of a live node's side channel")
	cmd.Flags().StringVar(&params, "params", "", "with --peer: file with the ec_transfer_params of encodings that the peer holds, or -")
	cmd.Flags().DurationVar(&timeout, "timeout", 10*time.Second, "how long each question to the peer may take")
	cmd.Flags().BoolVar(&asJSON, "json", false, "one JSON object a line")
	return cmd
}

// Verdicts.
const (
	good = "OK"
	warn = "WARN"
	fail = "FAIL"
)

// finding is one line of the doctor's report.
type finding struct {
	Check   string `json:"check"`
	Verdict string `json:"verdict"`
	Detail  string `json:"detail"`
	Fix     string `json:"fix,omitempty"`
}

func (a *app) printFindings(all []finding, asJSON bool) error {
	bad := 0
	w := tabwriter.NewWriter(a.stdout, 0, 0, 2, ' ', 0)
	for _, f := range all {
		if f.Verdict == fail {
			bad++
		}
		if asJSON {
			if err := printJSON(a.stdout, f); err != nil {
				return err
			}
			continue
		}
		text := f.Detail
		if f.Fix != "" {
			text += "; " + f.Fix
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Verdict, f.Check, text)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if bad > 0 {
		return errReported
	}
	return nil
}

// examine looks at this machine. Beside a question to a peer, what a node that runs here has already is only worth a warning: it may be
// the one that is asked about the way.
func examine(ctx context.Context, c node.Config, beside bool) []finding {
	inUse := fail
	if beside {
		inUse = warn
	}
	found := []finding{checkConfig(c, beside), checkShm(c), checkKernel(), checkPopulate(), checkMemlock(c), checkFiles(), checkSocket(ctx, c, inUse)}
	found = append(found, checkPorts(c, inUse)...)
	found = append(found, checkZMQ(), checkCongestion())
	return append(found, checkEnv(os.Environ())...)
}

// checkConfig is about a pool only if one is described: doctor runs before there is a configuration, too. For a question to a peer the
// pool needs no size.
func checkConfig(c node.Config, beside bool) finding {
	if beside && len(c.Pools) == 1 && c.Pools[0].ECCPUBytes == "" {
		c.Pools = []node.PoolConfig{c.Pools[0]}
		c.Pools[0].ECCPUBytes = strconv.FormatInt(probeBlocks*c.Pools[0].BlockBytes, 10)
	}
	if len(c.Pools) == 0 {
		return finding{"config", warn, "no pool is described, so only the machine is checked", "give the flags or the --config of ferry node"}
	}
	if err := c.Validate(); err != nil {
		return finding{"config", fail, err.Error(), ""}
	}
	return finding{"config", good, fmt.Sprintf("%d pool(s)", len(c.Pools)), ""}
}

// wantedBytes is the size of all pools; what cannot be read counts as 0, checkConfig has said so.
func wantedBytes(c node.Config) (n int64) {
	for _, p := range c.Pools {
		if b, err := node.ParseBytes(p.ECCPUBytes); err == nil {
			n += b
		}
	}
	return n
}

// ask runs one question with a time limit of its own.
func ask[T any](ctx context.Context, limit time.Duration, question func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return question(ctx)
}
