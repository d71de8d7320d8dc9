package slab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

var (
	// ErrInUse: buffers still have tensors in the device memory.
	ErrInUse = errors.New("slab: device memory in use")
	// ErrUnregistered: a tensor on a device, in memory that was not registered.
	ErrUnregistered = errors.New("slab: device memory that is not registered")
)

// deviceRegistration serves memory of devices beside the slab: nixl's, with agents in this process.
type deviceRegistration interface {
	AddDevice(ctx context.Context, at nixl.Place) (*nixl.DeviceMemory, error)
}

// DeviceMemory is memory of a device, registered once, that tensors of buffers can lie in: see Buffer.Place.
type DeviceMemory struct {
	slab   *Slab
	device tensor.Device
	at     nixl.Place
	served *nixl.DeviceMemory

	mu     sync.Mutex
	users  int // tensors
	closed bool
}

// Device makes memory of a device usable for payloads: for those that are put, and as a destination of READs. addr and bytes name an
// allocation that the caller owns and keeps until Close; NIXL takes it as VRAM, as the peers do for all that is not the CPU's. It needs
// the nixl plane with agents in this process (nixl.Options.Command empty); only NIXL reads it, of own readers as of plain ones. In a
// process with CUDA the slab's directory has to be in shared memory: NIXL has CUDA register the slab, which takes no file of a disk. The
// caller closes it before the slab. Errors: ErrNoPlane, and those of nixl.Registration.AddDevice.
func (s *Slab) Device(ctx context.Context, device tensor.Device, addr uint64, bytes int64) (*DeviceMemory, error) {
	if device.CPU() || device.Index < 0 || bytes <= 0 {
		return nil, fmt.Errorf("%w: %d bytes on device %v; give one with its number, such as cuda:0", transfer.ErrBadRequest, bytes, device)
	}
	for _, w := range s.ways {
		if reg, ok := w.reg.(deviceRegistration); ok {
			d := &DeviceMemory{
				slab: s, device: device,
				at: nixl.Place{Type: binding.VRAM, Addr: addr, Bytes: uint64(bytes), Device: uint64(device.Index)},
			}
			var err error
			if d.served, err = reg.AddDevice(ctx, d.at); err != nil {
				return nil, fmt.Errorf("slab: %w", err)
			}
			s.deviceMu.Lock()
			s.devices[d] = struct{}{}
			s.deviceMu.Unlock()
			return d, nil
		}
	}
	return nil, fmt.Errorf("%w: memory of a device needs nixl, here are %s", ErrNoPlane, names(s.Planes()))
}

// Holder gives the registered memory that a tensor lies in. ErrUnregistered: it lies in none, or not wholly.
func (s *Slab) Holder(t tensor.Tensor) (*DeviceMemory, error) {
	at := nixl.Place{Type: binding.VRAM, Addr: t.Addr(), Bytes: uint64(t.Bytes()), Device: uint64(t.Device().Index)}
	s.deviceMu.Lock()
	defer s.deviceMu.Unlock()
	for d := range s.devices {
		if d.device == t.Device() && d.at.Contains(at) {
			return d, nil
		}
	}
	return nil, fmt.Errorf("%w: %d bytes at %#x of %v; register the allocation they are in, once, with Slab.Device", ErrUnregistered,
		t.Bytes(), t.Addr(), t.Device())
}

// Close ends the registration; nothing reads or writes the memory after it. ErrInUse, and nothing is done: buffers that are not free
// have tensors in it, those included that a READ may still write, or that a reader may still READ.
func (d *DeviceMemory) Close() error {
	d.mu.Lock()
	if d.users > 0 {
		defer d.mu.Unlock()
		return fmt.Errorf("%w: by %d tensors", ErrInUse, d.users)
	}
	d.closed = true
	d.mu.Unlock()
	d.slab.deviceMu.Lock()
	delete(d.slab.devices, d)
	d.slab.deviceMu.Unlock()
	return d.served.Close()
}

// leave is called when a buffer with a tensor in it is free.
func (d *DeviceMemory) leave() {
	d.mu.Lock()
	d.users--
	d.mu.Unlock()
}

// placed is a tensor in device memory.
type placed struct {
	memory *DeviceMemory
	at     nixl.Place
}

// Place says that a tensor, which was asked for with 0 bytes, lies in device memory: bytes at addr. Call it before the buffer is read
// into or published. The slab does not keep others off these bytes, the caller does, until the buffer is free: then they may be
// used again, as the buffer's own may. Errors: ErrMismatch, ErrClosed.
func (b *Buffer) Place(tensor int, d *DeviceMemory, addr uint64, bytes int64) error {
	at := nixl.Place{Type: d.at.Type, Addr: addr, Bytes: uint64(bytes), Device: d.at.Device}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.freed || b.owned || b.writers > 0:
		return fmt.Errorf("%w: a tensor is placed in a buffer that is in use, or was freed", ErrClosed)
	case bytes <= 0 || d.slab != b.slab || !d.at.Contains(at):
		return fmt.Errorf("%w: %d bytes at %#x are not in the device memory, or it is another slab's", ErrMismatch, bytes, addr)
	case tensor < 0 || tensor >= len(b.spans) || b.spans[tensor].Length > 0 || b.places != nil && b.places[tensor].memory != nil:
		return fmt.Errorf("%w: tensor %d has a place, or is none", ErrMismatch, tensor)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("%w: the device memory", ErrClosed)
	}
	d.users++
	if b.places == nil {
		b.places = make([]placed, len(b.spans))
	}
	b.places[tensor] = placed{d, at}
	b.bytes += bytes
	return nil
}

// Tensor gives a tensor of the buffer, wherever it lies, as a view. Errors are those of tensor.New, for a dtype and shape that do not
// have its bytes.
func (b *Buffer) Tensor(i int, dtype tensor.DType, shape tensor.Shape) (tensor.Tensor, error) {
	if b.places == nil || b.places[i].memory == nil {
		return tensor.New(dtype, shape, b.slices[i])
	}
	p := b.places[i]
	t, err := tensor.OnDevice(dtype, shape, p.memory.device, p.at.Addr)
	if err == nil && t.Bytes() != int64(p.at.Bytes) {
		err = fmt.Errorf("%w: tensor %d has %d bytes, a %v of shape %v %d", tensor.ErrShape, i, p.at.Bytes, dtype, shape, t.Bytes())
	}
	return t, err
}

// size is that of one tensor, wherever it lies.
func (b *Buffer) size(tensor int) int64 {
	if n := b.spans[tensor].Length; n > 0 || b.places == nil {
		return n
	}
	return int64(b.places[tensor].at.Bytes)
}

// place is where a tensor is in the agents that serve and fill it, whose mapping of the slab begins at base. Bytes is 0 if it has none.
func (b *Buffer) place(tensor int, base uint64) nixl.Place {
	if at := b.spans[tensor]; at.Length > 0 {
		return nixl.Place{Addr: base + uint64(at.Offset), Bytes: uint64(at.Length)}
	}
	if b.places == nil {
		return nixl.Place{}
	}
	return b.places[tensor].at
}

// OnDevice says whether a tensor lies in device memory.
func (b *Buffer) OnDevice() bool {
	return slices.ContainsFunc(b.places, func(p placed) bool { return p.memory != nil })
}

// base is where this process has the slab.
func (s *Slab) base() uint64 { return nixl.PlaceOf(s.pool).Addr }

// addressed are spans of memory that begins at base.
func addressed(spans []region.Span, base uint64) []nixl.Place {
	out := make([]nixl.Place, len(spans))
	for i, at := range spans {
		out[i] = nixl.Place{Addr: base + uint64(at.Offset), Bytes: uint64(at.Length)}
	}
	return out
}
