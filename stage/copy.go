package stage

import (
	"github.com/tensorferry/tensorferry/internal/stream"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/zeebo/xxh3"
)

const (
	// sumChunk is what is copied and then summed while it is in the processor's cache.
	sumChunk = 128 << 10
	// streamBytes is from where copies past the caches are faster, whether a cache has the bytes or not (BenchmarkFill, and
	// stream.BenchmarkCopy: by a tenth if one has them, and by two thirds if none has).
	streamBytes = 8 << 20
	// page is what a slab hands out.
	page = 4096
)

// footprint is how much of a slab the tensors take: those on the CPU.
func footprint(specs []wire.Spec) (n int64) {
	for i := range specs {
		if specs[i].Device.CPU() {
			n += roundUp(specs[i].Size, slab.Align)
		}
	}
	return roundUp(n, page)
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// fill copies tensors, those on a device excepted, and gives their checksum if it is wanted. One goroutine does: two gained nothing
// that could be measured at 16 and 256 MiB (BenchmarkFill).
func fill(to [][]byte, tensors []tensor.Tensor, wanted bool) *uint64 {
	if !wanted {
		for i, t := range tensors {
			if from := t.Data(); len(from) >= streamBytes {
				stream.Copy(to[i], from)
			} else {
				copy(to[i], from)
			}
		}
		return nil
	}
	h := xxh3.New()
	for i, t := range tensors {
		from, to := t.Data(), to[i]
		for len(from) > 0 {
			n := copy(to[:min(sumChunk, len(to))], from)
			_, _ = h.Write(to[:n]) // never fails
			from, to = from[n:], to[n:]
		}
	}
	s := h.Sum64()
	return &s
}

// sum is the checksum of all bytes in order.
func sum(tensors [][]byte) *uint64 {
	h := xxh3.New()
	for _, b := range tensors {
		_, _ = h.Write(b) // never fails
	}
	s := h.Sum64()
	return &s
}
