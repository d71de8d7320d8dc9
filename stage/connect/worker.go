package connect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/deploy"
	"github.com/tensorferry/tensorferry/stage/shm"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// Worker has the connectors of one worker of a deployment: one for all edges that can share it, so that a stage in the middle can
// publish what it received without a copy.
type Worker struct {
	in   map[int]source
	out  map[int]stage.Connector
	open []stage.Connector
}

type source struct {
	connector stage.Connector
	sender    stage.Endpoint
}

// edges are what shares one connector.
type edges struct {
	kind  deploy.Kind
	reads string // planes, backends and threads
	in    *deploy.Incoming
	out   *deploy.Outgoing
	from  []*deploy.Incoming
	to    []*deploy.Outgoing
}

// OpenWorker opens the connectors of a worker. Of base, what the file says counts more. A NixlConnector needs NIXL and is served by the
// planes mapped, nixl and tcp; nothing falls back to shared memory. The caller closes the Worker. On an error nothing is left.
func OpenWorker(ctx context.Context, s *deploy.Stage, base Options) (_ *Worker, err error) {
	base.complete()
	for _, warning := range s.Warnings {
		base.Log.Warn("deployment", "setting", warning.String())
	}
	w := &Worker{in: map[int]source{}, out: map[int]stage.Connector{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Close(ctx))
		}
	}()
	groups, err := group(s)
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		c, err := g.open(ctx, base)
		if err != nil {
			return nil, fmt.Errorf("stage %d, %s: %w", s.ID, g.kind, err)
		}
		w.open = append(w.open, c)
		for _, in := range g.from {
			w.in[in.From] = source{c, stage.Endpoint(in.Sender)}
		}
		for _, out := range g.to {
			w.out[out.To] = c
		}
	}
	return w, nil
}

// group finds which edges share a connector.
func group(s *deploy.Stage) ([]*edges, error) {
	var groups []*edges
	find := func(s deploy.Settings, fits func(*edges) bool) (*edges, error) {
		if err := hostOnly(s); err != nil {
			return nil, err
		}
		reads := strings.Join(s.Planes, ",") + "/" + strings.Join(s.Backends, ",") + "/" + strconv.Itoa(s.Threads)
		for _, g := range groups {
			if g.kind == s.Kind && g.reads == reads && fits(g) {
				return g, nil
			}
		}
		g := &edges{kind: s.Kind, reads: reads}
		groups = append(groups, g)
		return g, nil
	}
	for i := range s.Outgoing {
		out := &s.Outgoing[i]
		g, err := find(out.Settings, func(g *edges) bool {
			return g.out == nil || g.out.Bind == out.Bind && g.out.Lease == out.Lease && g.out.Transfer == out.Transfer
		})
		if err != nil {
			return nil, err
		}
		g.out, g.to = out, append(g.to, out)
	}
	for i := range s.Incoming {
		in := &s.Incoming[i]
		g, err := find(in.Settings, func(g *edges) bool {
			return g.in == nil || g.in.Transfer == in.Transfer && g.in.Handshake == in.Handshake && g.in.MetadataQuery == in.MetadataQuery
		})
		if err != nil {
			return nil, err
		}
		g.in, g.from = in, append(g.from, in)
	}
	return groups, nil
}

// hostOnly refuses settings that ask for device memory, which a Worker does not have.
func hostOnly(s deploy.Settings) error {
	if s.MemoryType != "" && s.MemoryType != "DRAM" {
		return fmt.Errorf("%w: memory_type %q of connector %q: this end puts host memory; leave it out, or give DRAM", ErrOptions, s.MemoryType, s.Connector)
	}
	if s.ReceiveDevice != "" && s.ReceiveDevice != "cpu" {
		return fmt.Errorf("%w: receive_device %q of connector %q: this end receives into host memory; leave it out, or give cpu", ErrOptions, s.ReceiveDevice, s.Connector)
	}
	return nil
}

func (g *edges) open(ctx context.Context, o Options) (stage.Connector, error) {
	if g.kind == deploy.SharedMemory {
		return shm.Open(shm.Options{Dir: o.Dir, Log: o.Log})
	}
	if in := g.in; in != nil {
		g.settings(&o, in.Settings)
		o.Client.Transfer, o.Client.Answer, o.Client.Query = in.Transfer, in.Handshake, in.MetadataQuery
	}
	out := g.out
	if out == nil {
		o.Bind = nil
		return Open(ctx, o)
	}
	g.settings(&o, out.Settings)
	o.Store.Lease, o.Store.Transfer = out.Lease, out.Transfer
	bind := stage.Endpoint(out.Bind)
	o.Bind = &bind
	c, err := Open(ctx, o)
	if out.AnyPort && bind.Port != 0 && errors.Is(err, unix.EADDRINUSE) {
		o.Log.Warn("the port of the peers' formula is taken: any other is used, which only a request can name", "port", bind.Port, "error", err)
		bind.Port = 0
		return Open(ctx, o)
	}
	return c, err
}

func (g *edges) settings(o *Options, s deploy.Settings) {
	o.Planes = s.Planes
	if g.kind == deploy.NIXL {
		o.Planes = []string{transfer.Mapped, transfer.NIXL, transfer.TCP}
	}
	o.Backends = nil
	for _, name := range s.Backends {
		b := nixl.Backend{Name: name}
		if name == deploy.DefaultBackend && s.Threads != deploy.DefaultThreads {
			b.Params = map[string]string{"num_threads": strconv.Itoa(s.Threads)}
		}
		o.Backends = append(o.Backends, b)
	}
}

// From is what the payloads of a stage are got with, and where they are asked for unless a request names another place; false if no
// edge comes from there.
func (w *Worker) From(id int) (stage.Connector, stage.Endpoint, bool) {
	s, ok := w.in[id]
	return s.connector, s.sender, ok
}

// To is what payloads for a stage are put with; false if no edge goes there.
func (w *Worker) To(id int) (stage.Connector, bool) {
	c, ok := w.out[id]
	return c, ok
}

// Edges are the stages that this one receives from, and publishes for, in order.
func (w *Worker) Edges() (from, to []int) {
	for id := range w.in {
		from = append(from, id)
	}
	for id := range w.out {
		to = append(to, id)
	}
	slices.Sort(from)
	slices.Sort(to)
	return from, to
}

// Healthy is false once a connector is not.
func (w *Worker) Healthy() bool {
	return !slices.ContainsFunc(w.open, func(c stage.Connector) bool { return !c.Healthy() })
}

// Close closes all connectors.
func (w *Worker) Close(ctx context.Context) error {
	var errs []error
	for _, c := range w.open {
		errs = append(errs, c.Close(ctx))
	}
	return errors.Join(errs...)
}
