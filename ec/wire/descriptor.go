package wire

import (
	"encoding/binary"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Descriptor is one [addr, size, device] of a mem_descriptor.
type Descriptor struct {
	Addr   uint64
	Size   uint64
	Device uint32
}

// AppendMemDescriptor encodes the descriptor of a whole region, one triple a block: block i is blockBytes at base + i*blockBytes on
// device 0. The region must end within the address space. It allocates at most once, for 14 bytes a block at usual addresses.
func AppendMemDescriptor(b []byte, base uint64, blocks int, blockBytes int64) []byte {
	blocks, blockBytes = max(blocks, 0), max(blockBytes, 0)
	end := base + uint64(blocks)*uint64(blockBytes)
	var scratch [10]byte
	// What follows each address: the size and device 0.
	tail := append(msgp.AppendUint64(scratch[:0], uint64(blockBytes)), 0)
	b = slices.Grow(b, 5+blocks*(1+uintSize(end)+len(tail)))
	b = msgp.AppendArrayHeader(b, uint32(blocks))
	addr := base
	for range blocks {
		if addr > math.MaxUint32 {
			b = append(b, 0x93, 0xcf)
			b = binary.BigEndian.AppendUint64(b, addr)
		} else {
			b = append(b, 0x93)
			b = msgp.AppendUint64(b, addr)
		}
		b = append(b, tail...)
		addr += uint64(blockBytes)
	}
	return b
}

// DecodeMemDescriptor decodes at most maxBlocks triples: ErrLimit if there are more. Errors are *FrameError.
func DecodeMemDescriptor(b []byte, maxBlocks int) ([]Descriptor, error) {
	r := reader{buf: b, rest: b, name: []byte(fieldMem)}
	n, err := r.array(max(maxBlocks, 0), 4)
	if err != nil {
		return nil, err
	}
	d := make([]Descriptor, n)
	for i := range d {
		if err := r.descriptor(&d[i]); err != nil {
			return nil, err
		}
	}
	return d, r.end()
}

func (r *reader) descriptor(d *Descriptor) (err error) {
	at := *r
	three, err := r.array(3, 1)
	if err != nil {
		return err
	}
	if three != 3 {
		return at.fail(ErrMalformed, "a descriptor of %d numbers, want address, size and device", three)
	}
	if d.Addr, err = r.uint(math.MaxUint64); err != nil {
		return err
	}
	if d.Size, err = r.uint(math.MaxUint64 - d.Addr); err != nil {
		return err
	}
	device, err := r.uint(math.MaxUint32)
	d.Device = uint32(device)
	return err
}

// uintSize is the encoded size of v in bytes.
func uintSize(v uint64) int {
	switch {
	case v < 1<<7:
		return 1
	case v <= math.MaxUint8:
		return 2
	case v <= math.MaxUint16:
		return 3
	case v <= math.MaxUint32:
		return 5
	}
	return 9
}
