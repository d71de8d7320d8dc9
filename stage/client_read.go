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
	g.r.land(gr.m)
	err := checkSum(gr.m, gr.inline)
	if err == nil {
		var root tensor.Node
		if root, err = unpack(gr.m, inMemory(gr.inline)); err == nil {
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
	g.r.land(gr.m)
	buf, err := g.room(ctx, gr.m)
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

// land makes m say where each tensor is to be here. The serialized part is always on the CPU.
func (r *Request) land(m *wire.Metadata) {
	for i := range m.Specs {
		s := &m.Specs[i]
		serialized := m.Kind != wire.Tensors && i == 0
		if r.Device != nil && !serialized && (r.AllOnDevice || !s.Device.CPU()) {
			s.Device = r.Device.Device()
		} else {
			s.Device = tensor.Device{}
		}
	}
}

// room makes a buffer for the tensors, each where it is to be.
func (g *get) room(ctx context.Context, m *wire.Metadata) (*slab.Buffer, error) {
	host, device := make([]int64, len(m.Specs)), make([]int64, len(m.Specs))
	for i := range m.Specs {
		if s := &m.Specs[i]; s.Device.CPU() {
			host[i] = s.Size
		} else {
			device[i] = s.Size
		}
	}
	buf, err := g.c.o.Slab.Alloc(ctx, host)
	if err != nil || g.r.Device == nil {
		return buf, err
	}
	if err := buf.PlaceIn(ctx, g.r.Device, device); err != nil {
		buf.Free()
		return nil, err
	}
	return buf, nil
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
	if !buf.OnDevice() {
		if err := checkSum(gr.m, buf.Slices()); err != nil {
			g.giveBack(gr, err.Error())
			return nil, g.spoilt(err)
		}
	}
	root, err := unpack(gr.m, buf.Tensor)
	switch {
	case gr.s == nil:
		g.done(gr)
	case err == nil && buf.Vouched() && gr.stands():
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

// landed describes the payload as it is here, published by nobody.
func landed(m *wire.Metadata) *wire.Metadata {
	l := &wire.Metadata{Kind: m.Kind, Specs: m.Specs, Size: m.Size}
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
	g.r.land(gr.m)
	mem, plane, release, err := g.c.o.Slab.View(ctx, gr.m)
	if errors.Is(err, slab.ErrNoPlane) {
		return nil, nil
	}
	if err != nil {
		err = g.cause(ctx, err)
		g.giveBack(gr, err.Error())
		return nil, fmt.Errorf("stage: view of key %.64q: %w", g.r.Key, g.readFailed(ctx, gr, err))
	}
	root, err := unpack(gr.m, inMemory(mem))
	if err != nil {
		release()
		if lost := g.verified(ctx, gr, wire.Fail, err.Error()); lost != nil {
			return nil, lost
		}
		return nil, g.spoilt(err)
	}
	return NewGot(Got{Key: g.r.Key, Root: root, Kind: gr.m.Kind, Size: gr.m.Size, Plane: plane}, func() error {
		if release() && gr.stands() {
			g.done(gr)
			return nil
		}
		err := gr.settle(context.Background(), nil, wire.Verify, "")
		if err != nil {
			g.c.stats.lost.Add(1)
		}
		return err
	}), nil
}

// unpack makes the value of a payload that has landed. bytes gives a tensor that has some.
func unpack(m *wire.Metadata, bytes func(i int, d tensor.DType, shape tensor.Shape) (tensor.Tensor, error)) (tensor.Node, error) {
	p := wire.Payload{Kind: m.Kind, Tensors: make([]tensor.Tensor, len(m.Specs))}
	if m.Ferry != nil {
		p.Top = m.Ferry.Top
	}
	for i := range m.Specs {
		var err error
		switch s := &m.Specs[i]; {
		case s.Size > 0:
			p.Tensors[i], err = bytes(i, s.DType, s.Shape)
		case s.Device.CPU():
			p.Tensors[i], err = tensor.New(s.DType, s.Shape, nil)
		default:
			p.Tensors[i], err = tensor.OnDevice(s.DType, s.Shape, s.Device, 0)
		}
		if err != nil {
			return nil, err
		}
	}
	return p.Unpack()
}

// inMemory is for unpack: each tensor in a slice of mem.
func inMemory(mem [][]byte) func(int, tensor.DType, tensor.Shape) (tensor.Tensor, error) {
	return func(i int, d tensor.DType, shape tensor.Shape) (tensor.Tensor, error) {
		return tensor.New(d, shape, mem[i])
	}
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
