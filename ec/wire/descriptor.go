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

// DecodeMemDescriptor decodes at most maxBlocks triples: ErrLimit if there are more. Errors are *FrameError. It takes 24 bytes for a triple
// that may have 4.
func DecodeMemDescriptor(b []byte, maxBlocks int) (d []Descriptor, err error) {
	err = EachMemDescriptor(b, maxBlocks, func(i, n int, one Descriptor) error {
		if d == nil {
			d = make([]Descriptor, n)
		}
		d[i] = one
		return nil
	})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// EachMemDescriptor calls each with the triples of a mem_descriptor, at most maxBlocks (ErrLimit), one after another: i of n, which is no more
// than a quarter of the bytes of b. It ends at the first error of each, or *FrameError, and allocates nothing.
func EachMemDescriptor(b []byte, maxBlocks int, each func(i, n int, d Descriptor) error) error {
	r := newReader(b)
	r.At([]byte(fieldMem))
	n := r.Array(max(maxBlocks, 0), 4)
	for i := range n {
		d := r.descriptor()
		if !r.OK() {
			break
		}
		if err := each(i, n, d); err != nil {
			return err
		}
	}
	r.end()
	return r.err()
}

func (r *reader) descriptor() (d Descriptor) {
	r.tuple(3, "a descriptor of %d numbers, want address, size and device")
	d.Addr = r.Uint(math.MaxUint64)
	d.Size = r.Uint(math.MaxUint64 - d.Addr)
	d.Device = uint32(r.Uint(math.MaxUint32))
	return d
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
