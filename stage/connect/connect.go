// Package connect opens a stage.Link with all that it needs: data planes, and a slab of shared memory.
package connect

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// ErrOptions: a bad value in Options.
var ErrOptions = errors.New("connect: bad options")

// DefaultBytes is the size of a slab that Options do not give.
const DefaultBytes = 1 << 30

// Options of a Connector. Zero values are the defaults.
type Options struct {
	// Bind and Advertise are as in stage.LinkOptions. The tcp plane listens on Bind's host too.
	Bind      *stage.Endpoint
	Advertise string
	// Network lets NIXL's agents use all network interfaces, on which they listen, and not loopback only. A Bind off loopback does too.
	Network bool

	// Planes by preference; one that is named and missing is an error. Nil: all that are there.
	Planes []string
	// AgentCommand starts NIXL's agent processes, see transfer/nixl; empty: agents run in this process, and what goes wrong in NIXL
	// ends it.
	AgentCommand []string
	Library      string         // path of libnixl_capi.so; "": where it is found
	Backends     []nixl.Backend // default: UCX

	Dir   string // of the slab; default region.DefaultDir
	Bytes int64  // of the slab, which is taken at once; default DefaultBytes. With Bind, half of it is for puts (see Store.MaxBytes)

	Store  stage.Options
	Client stage.ClientOptions
	Sum    bool // keep a checksum of each payload, which own readers verify
	Log    *slog.Logger
}

func (o *Options) complete() {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Bytes == 0 {
		o.Bytes = DefaultBytes
	}
}

// Connector is a Link that owns what it stands on.
type Connector struct {
	*stage.Link
	slab   *slab.Slab
	planes []transfer.Plane
}

// Open sweeps what killed connectors left in the directory, and opens a Connector. The caller closes it. On an error nothing is left.
func Open(ctx context.Context, o Options) (_ *Connector, err error) {
	o.complete()
	sweep(&o)
	c := &Connector{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.closeRest(ctx))
		}
	}()
	if c.planes, err = Planes(ctx, o); err != nil {
		return nil, err
	}
	if c.slab, err = slab.New(ctx, slab.Options{Dir: o.Dir, Name: Name(), Bytes: o.Bytes, Planes: c.planes, Log: o.Log}); err != nil {
		return nil, err
	}
	c.Link, err = stage.NewLink(ctx, stage.LinkOptions{
		Slab: c.slab, Bind: o.Bind, Advertise: o.Advertise, Store: o.Store, Client: o.Client, Sum: o.Sum, Log: o.Log,
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Name makes a name for a slab that no other process has.
func Name() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return "stage-" + hex.EncodeToString(b[:])
}

// sweep is best effort: what it cannot do keeps nobody from starting.
func sweep(o *Options) {
	swept, err := region.Sweep(region.SweepOptions{Dir: o.Dir})
	if err != nil {
		o.Log.Warn("what killed processes left was not looked for", "error", err)
	}
	for _, s := range swept {
		if s.Reaped {
			o.Log.Info("reaped what a killed process left", "path", s.Path, "bytes", s.Bytes, "reason", s.Reason)
		}
	}
}

// Close is the Link's, then ends slab and planes.
func (c *Connector) Close(ctx context.Context) error {
	return errors.Join(c.Link.Close(ctx), c.closeRest(ctx))
}

func (c *Connector) closeRest(ctx context.Context) error {
	var err error
	if c.slab != nil {
		if err = c.slab.Close(ctx); err != nil {
			err = fmt.Errorf("slab: %w", err)
		}
	}
	return errors.Join(err, closePlanes(c.planes))
}
