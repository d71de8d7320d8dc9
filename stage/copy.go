package stage

import (
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/internal/stream"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/zeebo/xxh3"
)

const (
	// sumChunk is what is copied and then summed while it is in the processor's cache.
	sumChunk = 128 << 10
	// streamBytes is from where copies past the caches are faster, whether a cache has the bytes or not (stream.BenchmarkCopy: by a tenth
	// if one has them, and by two thirds if none has), and from where a second core pays for being woken.
	streamBytes = 8 << 20
	// copyPiece is what one goroutine copies before it looks for more. maxCopiers saturate the memory of what was measured (as in mapped).
	copyPiece  = 1 << 20
	maxCopiers = 4
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

// fill copies tensors, those on a device excepted, and gives their checksum if it is wanted. A fault of the copy (a tensor in a mapped file
// that was cut off) is a panic in the caller's goroutine, if the caller has asked for one (debug.SetPanicOnFault).
func fill(to [][]byte, tensors []tensor.Tensor, wanted bool) *uint64 {
	if wanted {
		return fillAndSum(to, tensors)
	}
	total := int64(0)
	for _, t := range tensors {
		total += int64(len(t.Data()))
	}
	if total < streamBytes {
		for i, t := range tensors {
			copy(to[i], t.Data())
		}
		return nil
	}
	c := copies{}
	for i, t := range tensors {
		from, to := t.Data(), to[i]
		for len(from) > 0 {
			n := min(copyPiece, len(from))
			c.pieces = append(c.pieces, [2][]byte{to[:n], from[:n]})
			from, to = from[n:], to[n:]
		}
	}
	c.run(min(runtime.GOMAXPROCS(0), maxCopiers))
	return nil
}

// copies are pieces that goroutines copy past the caches, one by one.
type copies struct {
	pieces [][2][]byte // to, from
	next   atomic.Int64
	fault  atomic.Pointer[any] // what a helper panicked with
}

// run copies with so many goroutines, this one included.
func (c *copies) run(workers int) {
	onFault := debug.SetPanicOnFault(false)
	debug.SetPanicOnFault(onFault)
	var helpers sync.WaitGroup
	for range workers - 1 {
		helpers.Go(func() {
			debug.SetPanicOnFault(onFault)
			defer func() {
				if p := recover(); p != nil {
					c.fault.CompareAndSwap(nil, &p)
				}
			}()
			c.work()
		})
	}
	defer helpers.Wait() // also if this one panics: nobody writes afterwards
	c.work()
	helpers.Wait()
	if p := c.fault.Load(); p != nil {
		panic(*p)
	}
}

func (c *copies) work() {
	for c.fault.Load() == nil {
		i := int(c.next.Add(1)) - 1
		if i >= len(c.pieces) {
			return
		}
		stream.Copy(c.pieces[i][0], c.pieces[i][1])
	}
}

// fillAndSum sums what it has just copied. It is one goroutine's: so is the sum.
func fillAndSum(to [][]byte, tensors []tensor.Tensor) *uint64 {
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
