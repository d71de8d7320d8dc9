package main

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/file"
	"github.com/tensorferry/tensorferry/stage/shm"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// page is what memory is counted in where payloads are put.
const page = 4096

// kept is the lease of what is served until a signal: longer than any process lives.
const kept = 100 * 365 * 24 * time.Hour

func (a *app) putCmd() *cobra.Command {
	var f stageFlags
	var listen, advertise string
	var lease time.Duration
	var keep bool
	cmd := &cobra.Command{
		Use:   "put FILE --key KEY --listen HOST:PORT [--connector nixl|shm] [--planes ..] [--lease 1h] [--keep]",
		Short: "Offer a file's tensors to another stage, until they were read",
		Long: `Put a stage payload: of a .safetensors file a map of its tensors, of a .npy file its tensor, of a .json or .msgpack file its value. ferry get
reads it, or an unmodified vLLM-Omni connector: NixlConnector (--connector nixl, on HOST:PORT; port 0 is any free one), or
SharedMemoryConnector (--connector shm, needs no --listen). One line an event on standard output:
  {"event":"put","key":..,"size":..,"host":..,"port":..,"metadata":"HEX of the msgpack map"}    it can be read now
  {"event":"claimed"}                                                                            the first reader has begun
  {"event":"released"}                                                                           it was read, its memory is free
The exit status is 0 if it was read. --keep serves any number of readers until SIGTERM, and then exits with 0.
HOST may be an address of the network: who reaches the port can read the payload.`,
		Args: args(1, 1, "one FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			if lease <= 0 {
				return usage("--lease %v: want more than 0", lease)
			}
			if keep && !cmd.Flags().Changed("lease") {
				lease = kept
			}
			bind, err := f.endpoint(listen)
			if err != nil {
				return err
			}
			if err := checkAdvertised(bind, advertise); err != nil {
				return err
			}
			if err := file.Check(args[0]); err != nil {
				return usageError{err}
			}
			ctx, cancel := a.interruptible(cmd.Context())
			defer cancel()
			p, err := file.Open(args[0])
			if err != nil {
				return err
			}
			defer p.Close()
			if len(p.Dropped) > 0 {
				a.log.Warn("the file's metadata is no part of the payload", "file", args[0], "keys", p.Dropped)
			}
			c, err := a.putConnector(ctx, &f, p, bind, advertise)
			if err != nil {
				return err
			}
			o := stage.PutOptions{Lease: lease}
			if keep && f.connector != connectorSHM {
				o.Readers = math.MaxInt
			}
			err = a.put(ctx, c, f.key, p, o, keep)
			if e := c.Cleanup(f.key); e != nil && !errors.Is(e, stage.ErrClaimed) { // a reader that has it still gets it
				err = errors.Join(err, e)
			}
			end, cancelEnd := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
			defer cancelEnd()
			return errors.Join(err, c.Close(end))
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&listen, "listen", "", "HOST:PORT on which readers ask; port 0 is any free one")
	cmd.Flags().StringVar(&advertise, "advertise-host", "", "host that the metadata names; the one of --listen if empty")
	cmd.Flags().DurationVar(&lease, "lease", time.Hour, "how long the payload waits for its first reader")
	cmd.Flags().BoolVar(&keep, "keep", false, "serve until SIGTERM, however often it is read")
	return cmd
}

// checkAdvertised refuses a host that no reader can dial.
func checkAdvertised(bind *stage.Endpoint, advertise string) error {
	if bind == nil { // shared memory
		return nil
	}
	host := cmp.Or(advertise, bind.Host)
	if host == "*" || host == "auto" || hostname.Unspecified(host) {
		return usage("--advertise-host: %s is no host that a reader can dial; want the name or address by which readers reach this machine", host)
	}
	return nil
}

// putConnector opens the connector, with just the memory that the payload takes.
func (a *app) putConnector(ctx context.Context, f *stageFlags, p *file.File, bind *stage.Endpoint, advertise string) (stage.Connector, error) {
	if f.connector == connectorSHM {
		return shm.Open(shm.Options{Dir: f.shmDir, Log: a.log})
	}
	packed, err := wire.Pack(p.Root, wire.PackOptions{})
	if err != nil {
		return nil, err
	}
	sizes := make([]int64, len(packed.Tensors))
	for i, t := range packed.Tensors {
		sizes[i] = t.Bytes()
	}
	o := f.options(a)
	o.Bind, o.Advertise = bind, advertise
	o.Bytes = (connect.Room(sizes) + page - 1) / page * page
	o.Store.MaxBytes = o.Bytes
	return connect.Open(ctx, o)
}

type putLine struct {
	Event    string `json:"event"`
	Key      string `json:"key"`
	Size     int64  `json:"size"`
	Host     string `json:"host"`
	Port     int    `json:"port"`
	Metadata string `json:"metadata"`
}

type eventLine struct {
	Event string `json:"event"`
}

// put publishes p and reports until it was read, or until ctx is done.
func (a *app) put(ctx context.Context, c stage.Connector, key string, p *file.File, o stage.PutOptions, keep bool) error {
	show := a.progress("putting " + key)
	defer show.end()
	var pub *stage.Published
	publish := func() error {
		return p.Use(func() (err error) {
			pub, err = c.Put(ctx, key, p.Root, o)
			return err
		})
	}
	if err := publish(); err != nil {
		return err
	}
	line := putLine{Event: "put", Key: key, Size: pub.Size, Metadata: hex.EncodeToString(pub.Metadata)}
	if h, err := wire.DecodeHandoff(pub.Metadata); err == nil {
		line.Host, line.Port = h.Host, h.Port
	}
	if err := printJSON(a.stdout, line); err != nil {
		return err
	}
	show.now(fmt.Sprintf("%s: %s wait for a reader", key, size(pub.Size)))
	claimed := pub.Claimed()
	for {
		select {
		case <-claimed:
			claimed = nil
			if err := printJSON(a.stdout, eventLine{"claimed"}); err != nil {
				return err
			}
			show.now(key + ": being read")
		case <-pub.Released():
			if claimed != nil { // both at once
				select {
				case <-claimed:
					if err := printJSON(a.stdout, eventLine{"claimed"}); err != nil {
						return err
					}
				default:
				}
			}
			if pub.Outcome() != stage.Read {
				return fmt.Errorf("key %q was not read: %v", key, pub.Outcome())
			}
			if err := printJSON(a.stdout, eventLine{"released"}); err != nil || !keep {
				return err
			}
			if err := publish(); err != nil { // in shared memory, where a payload has one reader
				return err
			}
			claimed = pub.Claimed()
		case <-ctx.Done():
			if keep {
				return nil
			}
			return fmt.Errorf("ended before key %q was read", key)
		}
	}
}
