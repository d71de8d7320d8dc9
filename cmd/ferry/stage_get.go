package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/file"
	"github.com/tensorferry/tensorferry/stage/shm"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

func (a *app) getCmd() *cobra.Command {
	var f stageFlags
	var source sourceFlags
	var deadline time.Duration
	var out string
	cmd := &cobra.Command{
		Use:   "get --key KEY (--from HOST:PORT | --metadata HEX) [--connector nixl|shm] [--deadline 30s] --out FILE",
		Short: "Read a payload that another stage has put, into a file",
		Long: `Get a stage payload from ferry put, or from an unmodified vLLM-Omni connector, into a file: .safetensors for a map or list of
tensors, .npy for one tensor, .json for a value without tensors, .msgpack for any. One that does not fit is kept in FILE.msgpack. It
waits until the deadline for a payload that is not there yet. One line on standard output:
  {"key":..,"status":"ok|not_found|timeout|unreachable|failed","size":..,"ms":..,"plane":".."}
with "reason" where the status is not ok. not_found: the producer answered, and had not put it by the deadline. The plane is what
moved the bytes: mapped, nixl, tcp, shm, or inline, in the answer itself. The exit status is 0 only if the status is ok.
Where there is no NIXL, a producer that is not ours is told apart before anything is taken from it, and its payload stays.
--connector shm needs neither --from nor --metadata.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			r, err := source.request(&f)
			if err != nil {
				return err
			}
			switch {
			case deadline <= 0:
				return usage("--deadline %v: want more than 0", deadline)
			case out == "":
				return usage("--out is missing: want a file that ends in .safetensors, .npy, .json or .msgpack")
			}
			if err := file.Check(out); err != nil {
				return usageError{err}
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			r.Wait = true
			return a.get(ctx, &f, r, deadline, out)
		},
	}
	f.add(cmd)
	source.add(cmd)
	cmd.Flags().DurationVar(&deadline, "deadline", 30*time.Second, "for all of it: finding the payload and reading it")
	cmd.Flags().StringVar(&out, "out", "", "file for the payload: .safetensors, .npy, .json or .msgpack")
	return cmd
}

// sourceFlags say who has the payload.
type sourceFlags struct{ from, metadata string }

func (s *sourceFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.from, "from", "", "HOST:PORT of the producer")
	cmd.Flags().StringVar(&s.metadata, "metadata", "", "what put returned, the msgpack map in hex")
}

func (s *sourceFlags) request(f *stageFlags) (stage.Request, error) {
	r := stage.Request{Key: f.key}
	if f.connector == connectorNIXL && (s.from == "") == (s.metadata == "") {
		return r, usage("want one of --from HOST:PORT and --metadata HEX")
	}
	if s.from != "" {
		if f.connector == connectorSHM {
			return r, usage("--from is for --connector %s: shared memory is found by its key", connectorNIXL)
		}
		at, err := parseEndpoint("--from", s.from, 1)
		if err != nil {
			return r, err
		}
		r.From = *at
	}
	b, err := hex.DecodeString(strings.TrimSpace(s.metadata))
	if err != nil {
		return r, usage("--metadata: %v; want the hex digits of what put printed", err)
	}
	if len(b) > 0 {
		r.Metadata = b
	}
	return r, nil
}

type getLine struct {
	Key    string  `json:"key"`
	Status string  `json:"status"`
	Size   int64   `json:"size"`
	MS     float64 `json:"ms"`
	Plane  string  `json:"plane"`
	Reason string  `json:"reason,omitempty"`
}

func (a *app) get(ctx context.Context, f *stageFlags, r stage.Request, deadline time.Duration, out string) error {
	show := a.progress("getting " + r.Key)
	defer show.end()
	start := time.Now()
	line := getLine{Key: r.Key}
	within, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	err := a.getInto(within, f, r, out, show, &line)
	if line.MS = float64(time.Since(start).Microseconds()) / 1000; err != nil {
		line.Reason = err.Error()
	}
	line.Status = getStatus(ctx, err)
	if err := printJSON(a.stdout, line); err != nil {
		return err
	}
	if err != nil {
		return errReported
	}
	return nil
}

// endGet is how long a get takes at most to end what it has begun, beyond its deadline.
const endGet = 2 * time.Second

// getInto gets the payload and writes it. A file that cannot be made is known before anything is taken.
func (a *app) getInto(ctx context.Context, f *stageFlags, r stage.Request, out string, show *progress, line *getLine) error {
	if err := file.CanSave(out); err != nil {
		return err
	}
	c, err := a.getConnector(ctx, f, r)
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endGet)
		defer cancel()
		if e := c.Close(end); e != nil {
			a.log.Warn("ending", "error", e)
		}
	}()
	got, err := c.Get(ctx, r)
	if err != nil {
		return err
	}
	line.Size, line.Plane = got.Size, got.Plane
	show.now("writing " + size(got.Size) + " to " + out)
	return errors.Join(save(out, got.Root), got.Release())
}

// save writes the payload to out. It may be gone from its producer by now: one that does not fit that format is kept beside, in a file that
// takes any, and one for which there is no room there in the directory for temporary files.
func save(out string, root tensor.Node) error {
	err := file.Save(out, root)
	if err == nil {
		return nil
	}
	beside := out + file.MsgPack
	if !errors.Is(err, file.ErrUnfit) {
		beside = filepath.Join(os.TempDir(), filepath.Base(out)+file.MsgPack)
	}
	if e := file.Save(beside, root); e != nil {
		return errors.Join(err, e)
	}
	return fmt.Errorf("%w; the payload is in %s", err, beside)
}

// getter is what a payload is got with.
type getter interface {
	Get(context.Context, stage.Request) (*stage.Got, error)
	Close(context.Context) error
}

func (a *app) getConnector(ctx context.Context, f *stageFlags, r stage.Request) (getter, error) {
	if f.connector == connectorSHM {
		return shm.Open(shm.Options{Dir: f.shmDir, Log: a.log})
	}
	o := f.options(a)
	if h, err := wire.DecodeHandoff(r.Metadata); err == nil && h.Host != "" {
		r.From.Host = h.Host
	}
	o.Network = !hostname.Loopback(r.From.Host)
	return connect.OpenReader(ctx, o)
}

// getStatus is the word for an error; ctx is the command's, without the deadline.
func getStatus(ctx context.Context, err error) string {
	switch {
	case err == nil:
		return "ok"
	case ctx.Err() != nil:
		return "canceled"
	case errors.Is(err, stage.ErrNotFound):
		return "not_found"
	case errors.Is(err, stage.ErrUnreachable):
		return "unreachable"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "failed"
}
