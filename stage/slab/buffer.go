package slab

import (
	"context"
	"fmt"
	"sync"
)

// Buffer is memory for the tensors of one payload.
type Buffer struct {
	slab    *Slab
	bytes   int64 // of all tensors
	holding       // what it has of the slab
	slices  [][]byte
	places  []placed // of each tensor in device memory; nil: none is
	device  *holding // what it has of a DevicePool; nil: nothing

	mu       sync.Mutex
	writers  int           // READs that may still write into it
	idle     chan struct{} // of Idle; nil: nobody asked since the last READ began
	owned    bool          // by a Payload
	freed    bool
	returned bool // its blocks are the slab's again
	vouched  bool // see Vouched

	oneSlice [1][]byte // so that a buffer of one tensor is one allocation
}

// Alloc makes a buffer for a READ, with one slice for each size, in order; 0 gives an empty slice. It waits for room, in the order of
// calls, until ctx is done: a large request is not overtaken by small ones that come later. Each slice begins at a multiple of Align;
// where there is room they lie one after the other. The content is what was there before. The caller frees the buffer, or hands it to
// a Payload. Errors: ErrTooLarge, ErrClosed, ErrMismatch (a negative size), ctx's.
func (s *Slab) Alloc(ctx context.Context, sizes []int64) (*Buffer, error) {
	return s.alloc(ctx, &s.gets, sizes)
}

// AllocPut is Alloc for what is put: from the part that Divide set aside for it, else the same.
func (s *Slab) AllocPut(ctx context.Context, sizes []int64) (*Buffer, error) {
	if s.divided.Load() {
		return s.alloc(ctx, &s.puts, sizes)
	}
	return s.Alloc(ctx, sizes)
}

func (s *Slab) alloc(ctx context.Context, from *space, sizes []int64) (*Buffer, error) {
	b := &Buffer{slab: s}
	var err error
	if b.bytes, err = from.want(&b.holding, sizes); err != nil {
		return nil, err
	}
	if err := from.take(ctx, &b.holding); err != nil {
		return nil, err
	}
	if b.slices = b.oneSlice[:]; len(sizes) != 1 {
		b.slices = make([][]byte, len(sizes))
	}
	for i, at := range b.spans {
		if at.Length > 0 {
			b.slices[i] = s.pool[at.Offset : at.Offset+at.Length : at.Offset+at.Length]
		} else {
			b.slices[i] = []byte{}
		}
	}
	return b, nil
}

// Slices are the tensors' memory, one for each size asked for; empty for one in device memory. Not to be used after Free.
func (b *Buffer) Slices() [][]byte { return b.slices }

// Bytes is the sum of the tensors' sizes.
func (b *Buffer) Bytes() int64 { return b.bytes }

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Idle gives a channel that is closed when no READ writes into the buffer (any more).
func (b *Buffer) Idle() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.writers == 0 {
		return closedChan
	}
	if b.idle == nil {
		b.idle = make(chan struct{})
	}
	return b.idle
}

// Free gives the memory back: at once, or when the READ into it is over. Calls after the first do nothing, and so does Free of a
// buffer that is a Payload's.
func (b *Buffer) Free() {
	b.mu.Lock()
	if b.owned {
		b.mu.Unlock()
		return
	}
	b.freed = true
	b.settle()
}

// Vouched says that what was READ into the buffer last was the payload's: the plane has tokens, or the slot table of the payload's region
// told so right after the READ. False says nothing: then the producer has to be asked.
func (b *Buffer) Vouched() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.vouched
}

func (b *Buffer) vouch(held bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.vouched = held
}

// begin books a READ into the buffer.
func (b *Buffer) begin() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.freed || b.owned {
		return fmt.Errorf("%w: a READ into a buffer that was freed or published", ErrClosed)
	}
	b.writers++
	b.vouched = false
	return nil
}

// end is called when the READ will not write any more.
func (b *Buffer) end() {
	b.mu.Lock()
	b.writers--
	if b.writers == 0 && b.idle != nil {
		close(b.idle)
		b.idle = nil
	}
	b.settle()
}

// settle gives the blocks back if nobody needs them, once. It unlocks.
func (b *Buffer) settle() {
	over := b.freed && b.writers == 0 && !b.returned
	b.returned = b.returned || over
	b.mu.Unlock()
	if !over {
		return
	}
	for _, p := range b.places {
		if p.memory != nil {
			p.memory.leave()
		}
	}
	if b.device != nil {
		b.device.space.give(b.device)
	}
	if b.blocks > 0 {
		b.space.give(&b.holding)
	}
}
