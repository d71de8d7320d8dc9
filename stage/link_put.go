package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// Put implements Connector. A payload of the key that nobody claimed makes way for it, at once if there is no room for both. Tensors on
// a device are borrowed, see PutOptions; those on the CPU are copied. Errors are also ErrOptions (the Link has no Bind) and ErrDevice (a
// tensor on a device without Borrow, or in memory that is not registered).
func (l *Link) Put(ctx context.Context, key string, root tensor.Node, o PutOptions) (*Published, error) {
	packed, err := wire.Pack(root, o.Pack)
	if err != nil {
		return nil, err
	}
	m := wire.Metadata{Kind: packed.Kind, Ferry: &wire.FerryMetadata{Top: packed.Top}}
	if m.Specs, m.Size, err = packed.Specs(); err != nil {
		return nil, err
	}
	lent, err := l.borrow(packed.Tensors, o.Borrow)
	if err != nil {
		return nil, err
	}
	sizes := make([]int64, len(packed.Tensors))
	for i, t := range packed.Tensors {
		sizes[i] = int64(len(t.Data()))
	}
	return l.publish(ctx, key, &m, o, func(ctx context.Context) (*slab.Buffer, error) {
		b, err := l.o.Slab.AllocPut(ctx, sizes)
		if err != nil {
			return nil, err
		}
		filled := false
		defer func() { // a tensor in a mapped file may be cut off under the copy, which the caller may survive
			if !filled {
				b.Free()
			}
		}()
		for _, at := range lent {
			if err := b.Place(at.tensor, at.memory, packed.Tensors[at.tensor].Addr(), packed.Tensors[at.tensor].Bytes()); err != nil {
				return nil, fmt.Errorf("%w: tensor %d: %w", ErrDevice, at.tensor, err)
			}
		}
		m.Ferry.Sum = fill(b.Slices(), packed.Tensors, l.o.Sum && len(lent) == 0)
		filled = true
		return b, nil
	})
}

// borrowed is a tensor that is put where it is.
type borrowed struct {
	tensor int
	memory *slab.DeviceMemory
}

// borrow finds the memory of the tensors on devices.
func (l *Link) borrow(tensors []tensor.Tensor, allowed bool) (all []borrowed, err error) {
	for i, t := range tensors {
		if t.Device().CPU() || t.Bytes() == 0 {
			continue
		}
		if !allowed {
			return nil, fmt.Errorf("%w: tensor %d is on %v; lend it with PutOptions.Borrow, or copy it to the CPU first", ErrDevice, i, t.Device())
		}
		d, err := l.o.Slab.Holder(t)
		if err != nil {
			return nil, fmt.Errorf("%w: tensor %d: %w", ErrDevice, i, err)
		}
		all = append(all, borrowed{i, d})
	}
	return all, nil
}

// Republish implements Connector, without a copy unless got came inline or in place. Tensors on a device stay in their pool until the
// payload is released; they do not need PutOptions.Borrow.
func (l *Link) Republish(ctx context.Context, key string, got *Got, o PutOptions) (*Published, error) {
	r := got.received
	if got.release == nil || r == nil {
		return PutAgain(ctx, l, key, got, o)
	}
	got.received, got.release = nil, nil
	m := wire.Metadata{Kind: r.meta.Kind, Specs: r.meta.Specs, Size: r.meta.Size, Ferry: &wire.FerryMetadata{}}
	if f := r.meta.Ferry; f != nil {
		m.Ferry.Top = f.Top
		m.Ferry.Sum = f.Sum
	}
	p, err := l.publish(ctx, key, &m, o, func(context.Context) (*slab.Buffer, error) {
		if l.o.Sum && m.Ferry.Sum == nil && !r.buffer.OnDevice() {
			m.Ferry.Sum = sum(r.buffer.Slices())
		}
		return r.buffer, nil
	})
	if err != nil {
		r.buffer.Free() // published or not, once
	}
	return p, err
}

// publish puts what content gives; m has Kind, Specs, Size and Ferry. From success of content on its buffer is freed by publish or
// by the store.
func (l *Link) publish(ctx context.Context, key string, m *wire.Metadata, o PutOptions, content func(context.Context) (*slab.Buffer, error)) (*Published, error) {
	if l.store == nil {
		return nil, fmt.Errorf("%w: this link only gets; give it a Bind to put", ErrOptions)
	}
	ctx, end := l.live(ctx)
	defer end()
	room, err := l.store.reserveFor(ctx, key, footprint(m.Specs))
	if err != nil {
		return nil, closingFirst(ctx, err)
	}
	published := false
	defer func() {
		if !published {
			room.Close()
		}
	}()
	b, err := content(ctx)
	if err != nil {
		return nil, closingFirst(ctx, err)
	}
	m.SenderHost, m.SenderPort = l.o.Advertise, l.server.Port()
	p, claimed, released := NewPublished(Published{Key: key, Size: m.Size})
	memory := b.Payload(m.Specs)
	p.Generation, err = l.store.Put(Put{Key: key, Metadata: *m, Memory: memory, Room: room, Lease: o.Lease, Readers: o.Readers,
		Events: Events{Claimed: claimed, Released: released}})
	if err != nil {
		memory.Release()
		return nil, err
	}
	published = true
	// Where the bytes are is told to who claims them, not to who has the metadata.
	told := *m
	told.Generation, told.Ferry = p.Generation, &wire.FerryMetadata{Node: l.o.Node, Local: l.server.Local(), Top: m.Ferry.Top}
	p.Metadata = wire.AppendMetadata(nil, &told)
	return p, nil
}

// closingFirst is ErrClosing if that is why ctx ended.
func closingFirst(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), ErrClosing) {
		return ErrClosing
	}
	return err
}
