package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// until gives ctx, ended also when the client closes.
func (c *Client) until(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(c.stopping, func() { cancel(ErrClosing) })
	return ctx, func() {
		unhook()
		cancel(nil)
	}
}

// takeInline delivers what came in the reply, which is the proof that the claim held.
func (g *get) takeInline(gr granted) (*Got, error) {
	err := checkSum(gr.m, gr.inline)
	if err == nil {
		var root tensor.Node
		if root, err = unpack(gr.m, gr.inline); err == nil {
			g.done(gr)
			return NewGot(Got{Key: g.r.Key, Root: root, Kind: gr.m.Kind, Size: gr.m.Size, Plane: slab.Inline}, func() error { return nil }), nil
		}
	}
	g.giveBack(gr, err.Error())
	return nil, g.spoilt(err)
}

// read makes room and READs into it.
func (g *get) read(ctx context.Context, gr granted) (*Got, error) {
	ctx, cancel := g.c.until(ctx)
	defer cancel()
	sizes := make([]int64, len(gr.m.Specs))
	for i := range sizes {
		sizes[i] = gr.m.Specs[i].Size
	}
	buf, err := g.c.o.Slab.Alloc(ctx, sizes)
	if err != nil {
		err = g.cause(ctx, err)
		g.giveBack(gr, err.Error())
		return nil, fmt.Errorf("stage: room for key %.64q: %w", g.r.Key, err)
	}
	plane, err := g.c.o.Slab.Read(ctx, gr.m, buf)
	if err != nil {
		err = g.cause(ctx, err)
		g.finish(gr, wire.Fail, err.Error(), buf.Idle())
		buf.Free()
		return nil, fmt.Errorf("stage: READ of key %.64q: %w", g.r.Key, g.readFailed(ctx, gr, err))
	}
	got, err := g.deliver(ctx, gr, buf, plane)
	if err != nil {
		buf.Free()
		return nil, err
	}
	return got, nil
}

// cause is err, or that the client closes if that is behind it.
func (g *get) cause(ctx context.Context, err error) error {
	if errors.Is(err, context.Canceled) && errors.Is(context.Cause(ctx), ErrClosing) {
		return ErrClosing
	}
	return err
}

// readFailed says whether another try makes sense: at a producer of ours the payload is still there, and the READ may have failed
// only because the claim was lost.
func (g *get) readFailed(ctx context.Context, gr granted, err error) error {
	if gr.s == nil || ctx.Err() != nil || errors.Is(err, slab.ErrNoPlane) {
		return err
	}
	return again(err)
}

// deliver makes the value of what was read, and ends the claim.
func (g *get) deliver(ctx context.Context, gr granted, buf *slab.Buffer, plane string) (*Got, error) {
	mem := buf.Slices()
	if err := checkSum(gr.m, mem); err != nil {
		g.giveBack(gr, err.Error())
		return nil, g.spoilt(err)
	}
	root, err := unpack(gr.m, mem)
	switch {
	case gr.s == nil:
		g.done(gr)
	case err != nil:
		// Only if the claim held it is the payload that is wrong. It is given back either way.
		if lost := g.verified(ctx, gr, wire.Fail, err.Error()); lost != nil {
			return nil, lost
		}
	default:
		err = g.verified(ctx, gr, wire.Verify, "")
	}
	if err != nil {
		return nil, g.spoilt(err)
	}
	got := NewGot(Got{Key: g.r.Key, Root: root, Kind: gr.m.Kind, Size: gr.m.Size, Plane: plane}, func() error {
		buf.Free()
		return nil
	})
	got.received = &received{buffer: buf, meta: landed(gr.m)}
	return got, nil
}

// landed describes the payload as it is here: in host memory, published by nobody.
func landed(m *wire.Metadata) *wire.Metadata {
	l := &wire.Metadata{Kind: m.Kind, Specs: m.Specs, Size: m.Size}
	for i := range l.Specs {
		l.Specs[i].Device = tensor.Device{}
	}
	if m.Ferry != nil {
		l.Ferry = &wire.FerryMetadata{Top: m.Ferry.Top, Sum: m.Ferry.Sum}
	}
	return l
}

// verified ends a claim and asks whether it held.
func (g *get) verified(ctx context.Context, gr granted, op wire.Op, reason string) error {
	err := gr.settle(ctx, g.c.stopping.Done(), op, reason)
	if errors.Is(err, ErrLost) {
		g.c.stats.lost.Add(1)
		return again(err)
	}
	return err
}

// view gives the payload where it is. Neither a payload nor an error: that is not to be had, and the claim still stands.
func (g *get) view(ctx context.Context, gr granted) (*Got, error) {
	ctx, cancel := g.c.until(ctx)
	defer cancel()
	mem, plane, release, err := g.c.o.Slab.View(ctx, gr.m)
	if errors.Is(err, slab.ErrNoPlane) {
		return nil, nil
	}
	if err != nil {
		err = g.cause(ctx, err)
		g.giveBack(gr, err.Error())
		return nil, fmt.Errorf("stage: view of key %.64q: %w", g.r.Key, g.readFailed(ctx, gr, err))
	}
	root, err := unpack(gr.m, mem)
	if err != nil {
		release()
		if lost := g.verified(ctx, gr, wire.Fail, err.Error()); lost != nil {
			return nil, lost
		}
		return nil, g.spoilt(err)
	}
	return NewGot(Got{Key: g.r.Key, Root: root, Kind: gr.m.Kind, Size: gr.m.Size, Plane: plane}, func() error {
		release()
		err := gr.settle(context.Background(), nil, wire.Verify, "")
		if err != nil {
			g.c.stats.lost.Add(1)
		}
		return err
	}), nil
}

// unpack makes the value of a payload whose tensors are in mem.
func unpack(m *wire.Metadata, mem [][]byte) (tensor.Node, error) {
	p := wire.Payload{Kind: m.Kind, Tensors: make([]tensor.Tensor, len(m.Specs))}
	if m.Ferry != nil {
		p.Top = m.Ferry.Top
	}
	for i := range m.Specs {
		var err error
		if p.Tensors[i], err = tensor.New(m.Specs[i].DType, m.Specs[i].Shape, mem[i]); err != nil {
			return nil, err
		}
	}
	return p.Unpack()
}

// checkSum compares what was read with the producer's checksum, if there is one. The error wraps ErrCorrupt.
func checkSum(m *wire.Metadata, mem [][]byte) error {
	if m.Ferry == nil || m.Ferry.Sum == nil {
		return nil
	}
	got := *sum(mem)
	if got != *m.Ferry.Sum {
		return fmt.Errorf("%w: %#x of what was read, %#x of what was put", ErrCorrupt, got, *m.Ferry.Sum)
	}
	return nil
}

// spoilt makes the error for a payload that was read and cannot be delivered.
func (g *get) spoilt(err error) error {
	if errors.Is(err, ErrCorrupt) {
		g.c.stats.corrupt.Add(1)
		err = again(err)
	}
	return fmt.Errorf("stage: key %.64q: %w", g.r.Key, err)
}

// againError is an error after which the get may begin anew.
type againError struct{ error }

func (e againError) Unwrap() error { return e.error }

func again(err error) error { return againError{err} }
