package slab

import (
	"context"
	"fmt"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
)

// DeviceAlign is where each tensor in a DevicePool begins: a multiple of it, in bytes from the pool's begin (what CUDA's own allocator
// aligns to at least).
const DeviceAlign = 256

// DevicePool is memory of a device that hands out room for what is READ: see Buffer.PlaceIn. Nobody learns an address in it before the
// bytes are there, and it comes back when its buffer is free: so what a READ may still write is never used for anything else.
type DevicePool struct {
	memory *DeviceMemory
	space  space
}

// DevicePool makes a pool of an allocation that the caller owns and keeps until Close; nobody else may write it. It is handed out
// in whole pages of 4 KiB, and takes 4 bytes of the host's memory for each KiB. Errors are those of Device. The caller closes it before
// the slab.
func (s *Slab) DevicePool(ctx context.Context, device tensor.Device, addr uint64, bytes int64) (*DevicePool, error) {
	if bytes < blockBytes {
		return nil, fmt.Errorf("%w: a pool of %d bytes; give at least %d", transfer.ErrBadRequest, bytes, blockBytes)
	}
	d, err := s.Device(ctx, device, addr, bytes)
	if err != nil {
		return nil, err
	}
	p := &DevicePool{memory: d}
	p.space.init(0, int(bytes/blockBytes), DeviceAlign)
	return p, nil
}

// Device is where the pool is.
func (p *DevicePool) Device() tensor.Device { return p.memory.device }

// Bytes is the size of the pool.
func (p *DevicePool) Bytes() int64 { return p.space.bytes() }

// Used is the bytes in buffers that are not free, those in quarantine included. A buffer takes whole pages.
func (p *DevicePool) Used() int64 { return p.space.used() * blockBytes }

// Close hands out nothing more and waits until all is free, or ctx is done: ErrInUse then, and it may be called again. After nil
// nothing reads or writes the memory any more.
func (p *DevicePool) Close(ctx context.Context) error {
	select {
	case <-p.space.close():
		return p.memory.Close()
	case <-ctx.Done():
		return fmt.Errorf("%w: %d bytes of a pool on %v: %w", ErrInUse, p.Used(), p.Device(), ctx.Err())
	}
}

// PlaceIn places tensors in the pool: sizes has one number for each of the buffer's, 0 for those that are not to be there. It waits for
// room as Alloc does. If it fails, free the buffer. Errors: ErrTooLarge, ErrClosed, ErrMismatch, ctx's.
func (b *Buffer) PlaceIn(ctx context.Context, p *DevicePool, sizes []int64) error {
	if len(sizes) != len(b.spans) {
		return fmt.Errorf("%w: %d sizes for a buffer of %d tensors", ErrMismatch, len(sizes), len(b.spans))
	}
	h := &holding{}
	if _, err := p.space.want(h, sizes); err != nil || h.blocks == 0 {
		return err
	}
	if err := p.space.take(ctx, h); err != nil {
		return fmt.Errorf("%w (memory of %v)", err, p.Device())
	}
	b.mu.Lock()
	if b.freed || b.owned || b.device != nil {
		b.mu.Unlock()
		p.space.give(h)
		return fmt.Errorf("%w: a buffer that was freed or published, or has tensors in a pool", ErrClosed)
	}
	b.device = h
	b.mu.Unlock()
	for i, at := range h.spans {
		if at.Length == 0 {
			continue
		}
		if err := b.Place(i, p.memory, p.memory.at.Addr+uint64(at.Offset), at.Length); err != nil {
			return err
		}
	}
	return nil
}
