package nixl

import (
	"math"
	"unsafe"

	binding "github.com/tensorferry/tensorferry/nixl"
)

// Place is memory of one process, as NIXL's descriptors name it.
type Place struct {
	Type   binding.MemoryType
	Addr   uint64
	Bytes  uint64
	Device uint64 // 0 for DRAM
}

// PlaceOf names the bytes of b, which must not be empty, nor on the Go heap if an agent is to read or write them.
func PlaceOf(b []byte) Place {
	return Place{Addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), Bytes: uint64(len(b))}
}

// valid says whether p can be anywhere.
func (p Place) valid() bool {
	return p.Type >= binding.DRAM && p.Type <= binding.File && p.Addr > 0 && p.Bytes > 0 && p.Addr <= math.MaxUint64-p.Bytes
}

// Contains says whether all of o is in p.
func (p Place) Contains(o Place) bool {
	return o.valid() && p.Type == o.Type && p.Device == o.Device && o.Addr >= p.Addr && o.Addr-p.Addr <= p.Bytes && o.Bytes <= p.Bytes-(o.Addr-p.Addr)
}

// overlaps says whether they share a byte.
func (p Place) overlaps(o Place) bool {
	return p.Type == o.Type && p.Device == o.Device && p.Addr < o.Addr+o.Bytes && o.Addr < p.Addr+p.Bytes
}

func (p Place) memory() binding.Range {
	return binding.Range{Addr: uintptr(p.Addr), Len: p.Bytes, Device: p.Device}
}
