package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// maxParams bounds what is read as parameters. A chat response that carries them is text; this is far above any.
const maxParams = 64 << 20

func (a *app) ecFetchCmd() *cobra.Command {
	var f nodeFlags
	var source, out string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "fetch --params FILE|- [--out DIR] [--timeout 60s]",
		Short: "Pull announced encodings into the node's pool, and into files",
		Long: `Pull each key of an ec_transfer_params map that has an address. FILE (- for standard input) is the map, or a chat completion
that has it. One line a key, as it is known: {"key":..,"status":..,"bytes":..,"ms":..,"plane":..}, with "reason" where the status is
not ready; also if the node itself cannot be reached, which is "failed". Statuses: ready, missing, not_ready, incompatible, unreachable, timed_out, conflict, failed, canceled. The plane is
"local" where the pool had it. With --out, DIR/KEY.bin gets the encoding's bytes without padding (bytes of KEY other than letters,
digits, '-', '_' and '.' are written as %XX). Where that is longer than 255 bytes, the name is its first 180 bytes, or up to two
fewer so as not to split a %XX, then "-", the first 16 hex digits of KEY's SHA-256, and ".bin". The exit status is 0 only if all of those keys are ready, and
there is at least one.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if source == "" {
				return usage("--params is missing: want a file, or - for standard input")
			}
			if timeout <= 0 {
				return usage("--timeout %v: want more than 0", timeout)
			}
			params, err := a.readParams(source)
			if err != nil {
				return err
			}
			if err := something(source, params); err != nil {
				return err
			}
			if out != "" {
				if err := os.MkdirAll(out, 0o755); err != nil {
					return err
				}
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			start := time.Now()
			c, err := a.dial(ctx, &f, "ferry ec fetch")
			if err != nil {
				return a.notFetched(ctx, params, time.Since(start), err)
			}
			defer c.Close()
			return a.fetch(ctx, c, params, timeout, out)
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&source, "params", "", "file with ec_transfer_params or with a chat completion, or -")
	cmd.Flags().StringVar(&out, "out", "", "directory for KEY.bin; made if it is not there")
	cmd.Flags().DurationVar(&timeout, "timeout", 60*time.Second, "budget of each key over all tries")
	return cmd
}

type fetchLine struct {
	Key    string  `json:"key"`
	Status string  `json:"status"`
	Bytes  int64   `json:"bytes"`
	MS     float64 `json:"ms"`
	Plane  string  `json:"plane"`
	Reason string  `json:"reason,omitempty"`
}

func (a *app) fetch(ctx context.Context, c *client.Client, params ec.Params, timeout time.Duration, out string) error {
	good := true
	fetch := c.Fetch
	if out != "" {
		fetch = c.FetchMap // nothing evicts it while it is written
	}
	start := time.Now()
	results, err := fetch(ctx, params, timeout)
	if err != nil {
		return a.notFetched(ctx, params, time.Since(start), err)
	}
	for r := range results {
		line := fetchLine{
			Key: r.Key, Status: statusOf(r.Outcome), Bytes: r.Bytes,
			MS: float64(r.Elapsed.Microseconds()) / 1000, Plane: r.Plane, Reason: r.Reason,
		}
		if r.Mapped != nil {
			err := writeFile(out, fileName(r.Key, ".bin"), r.Mapped.Buffers())
			r.Mapped.Release()
			if err != nil {
				line.Status, line.Reason = statusOf(ec.FetchFailed), fmt.Sprintf("pulled, but not written: %v", err)
			}
		}
		good = good && line.Status == statusOf(ec.FetchReady)
		if err := printJSON(a.stdout, line); err != nil {
			return err
		}
	}
	if !good {
		return errReported
	}
	return nil
}

// something is an error if there is nothing to pull, nor to be said of a key.
func something(source string, params ec.Params) error {
	keys := params.Keys()
	for _, key := range keys {
		if announced, _ := params.Get(key); announced.Servable() || params.Err(key) != nil {
			return nil
		}
	}
	if len(keys) == 0 {
		return fmt.Errorf("--params %s: nothing to fetch: no key is announced", source)
	}
	return fmt.Errorf("--params %s: nothing to fetch: none of %d keys has an address, such as %.64q; who announced them did not have them", source, len(keys), keys[0])
}

// notFetched gives each key that was to be pulled its line, where the node was not even asked. It returns what is to be said of that.
func (a *app) notFetched(ctx context.Context, params ec.Params, elapsed time.Duration, why error) error {
	outcome := ec.FetchFailed
	if ctx.Err() != nil {
		outcome = ec.FetchCanceled
	}
	for _, key := range params.Keys() {
		announced, _ := params.Get(key)
		bad := params.Err(key)
		if bad == nil && !announced.Servable() {
			continue
		}
		line := fetchLine{Key: key, Status: statusOf(outcome), MS: float64(elapsed.Microseconds()) / 1000, Reason: why.Error()}
		if bad != nil {
			line.Status, line.Reason = statusOf(ec.FetchFailed), bad.Error()
		}
		if err := printJSON(a.stdout, line); err != nil {
			return errors.Join(why, err)
		}
	}
	return why
}

// readParams reads a bare map, or the one of a chat completion.
func (a *app) readParams(source string) (ec.Params, error) {
	var p ec.Params
	in := a.stdin
	if source != "-" {
		f, err := os.Open(source)
		if err != nil {
			return p, err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxParams+1))
	if err != nil {
		return p, err
	}
	if len(b) > maxParams {
		return p, fmt.Errorf("--params %s: more than %d bytes", source, maxParams)
	}
	var outer struct {
		Params  json.RawMessage `json:"ec_transfer_params"`
		Choices json.RawMessage `json:"choices"`
		Error   json.RawMessage `json:"error"`
	}
	if err := json.Unmarshal(b, &outer); err != nil {
		return p, fmt.Errorf("--params %s: want a JSON object, an ec_transfer_params map or a chat completion that has one: %w", source, err)
	}
	switch {
	case outer.Params != nil:
		b = outer.Params
	case outer.Choices != nil:
		return p, fmt.Errorf("--params %s: a chat completion without ec_transfer_params: its engine announced nothing", source)
	case outer.Error != nil:
		return p, fmt.Errorf("--params %s: an engine's error, not its answer: %.200s", source, outer.Error)
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return p, fmt.Errorf("--params %s: %w", source, err)
	}
	return p, nil
}
