package stage

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// Put implements Connector. A payload of the key that nobody claimed makes way for it, at once if there is no room for both.
// ErrOptions: the Link has no Bind. ErrDevice: a tensor that is not in this machine's memory.
func (l *Link) Put(ctx context.Context, key string, root tensor.Node, o PutOptions) (*Published, error) {
	packed, err := wire.Pack(root, o.Pack)
	if err != nil {
		return nil, err
	}
	m := wire.Metadata{Kind: packed.Kind, Ferry: &wire.FerryMetadata{Top: packed.Top}}
	if m.Specs, m.Size, err = packed.Specs(); err != nil {
		return nil, err
	}
	sizes := make([]int64, len(packed.Tensors))
	for i, t := range packed.Tensors {
		if !t.Device().CPU() {
			return nil, fmt.Errorf("%w: tensor %d is on %v; copy it to the CPU first", ErrDevice, i, t.Device())
		}
		sizes[i] = t.Bytes()
	}
	return l.publish(ctx, key, &m, o, func(ctx context.Context) (*slab.Buffer, error) {
		b, err := l.o.Slab.Alloc(ctx, sizes)
		if err != nil {
			return nil, err
		}
		m.Ferry.Sum = fill(b.Slices(), packed.Tensors, l.o.Sum)
		return b, nil
	})
}

// Republish puts what was got by this Link under another key, without a copy unless it was got in place: got is the Link's from then
// on, whatever the error. Its Root must not be written any more, and not be used once the payload is released.
func (l *Link) Republish(ctx context.Context, key string, got *Got, o PutOptions) (*Published, error) {
	r := got.received
	switch {
	case got.release == nil:
		return nil, fmt.Errorf("%w: what was got was released already", ErrOptions)
	case r == nil:
		p, err := l.Put(ctx, key, got.Root, o)
		return p, errors.Join(err, got.Release())
	}
	got.received, got.release = nil, nil
	m := wire.Metadata{Kind: r.meta.Kind, Specs: r.meta.Specs, Size: r.meta.Size, Ferry: &wire.FerryMetadata{}}
	if f := r.meta.Ferry; f != nil {
		m.Ferry.Top = f.Top
		m.Ferry.Sum = f.Sum
	}
	p, err := l.publish(ctx, key, &m, o, func(context.Context) (*slab.Buffer, error) {
		if l.o.Sum && m.Ferry.Sum == nil {
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
	b, err := content(ctx)
	if err != nil {
		room.Close()
		return nil, closingFirst(ctx, err)
	}
	m.SenderHost, m.SenderPort = l.o.Advertise, l.server.Port()
	p, claimed, released := NewPublished(Published{Key: key, Size: m.Size})
	memory := b.Payload(m.Specs)
	p.Generation, err = l.store.Put(Put{Key: key, Metadata: *m, Memory: memory, Room: room, Lease: o.Lease, Readers: o.Readers,
		Events: Events{Claimed: claimed, Released: released}})
	if err != nil {
		memory.Release()
		room.Close()
		return nil, err
	}
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
