package slab

import (
	"cmp"
	"container/list"
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// space is which blocks are free, and who waits for some.
type space struct {
	mu     sync.Mutex
	free   *region.Allocator
	blocks int
	queue  list.List // of *waiting, the first come first
	closed bool
	idle   chan struct{} // closed when closed and no block is used
}

// waiting is an Alloc that found no room.
type waiting struct {
	b    *Buffer
	done chan struct{} // closed with the lock held, when b has its blocks or err is set
	err  error
}

func (p *space) init(blocks int) {
	p.free, p.blocks, p.idle = region.NewAllocator(blocks), blocks, make(chan struct{})
}

// used counts blocks.
func (p *space) used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(p.blocks - p.free.FreeBlocks())
}

// close lets nobody wait any more. The channel is closed when no block is used.
func (p *space) close() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for e := p.queue.Front(); e != nil; e = e.Next() {
		w := e.Value.(*waiting)
		w.err = ErrClosed
		close(w.done)
	}
	p.queue.Init()
	p.checkIdle()
	return p.idle
}

// checkIdle is called with the lock, once closed and whenever blocks were given back after that.
func (p *space) checkIdle() {
	if p.closed && p.free.FreeBlocks() == p.blocks && !isClosed(p.idle) {
		close(p.idle)
	}
}

// take gives b its blocks, waiting for them in the order of calls.
func (p *space) take(ctx context.Context, b *Buffer) error {
	if b.blocks > p.blocks {
		return fmt.Errorf("%w: %d bytes in %d tensors, the slab has %d", ErrTooLarge, b.bytes, len(b.spans), int64(p.blocks)*blockBytes)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("slab: %w", err)
	}
	p.mu.Lock()
	switch {
	case p.closed:
		p.mu.Unlock()
		return ErrClosed
	case p.queue.Len() == 0 && p.place(b):
		p.mu.Unlock()
		return nil
	}
	w := &waiting{b: b, done: make(chan struct{})}
	e := p.queue.PushBack(w)
	p.mu.Unlock()
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-w.done: // it was faster
		return w.err
	default:
	}
	p.queue.Remove(e)
	p.serve() // it may have been the one in the way
	return fmt.Errorf("slab: waiting for %d bytes of room: %w", b.bytes, ctx.Err())
}

// give takes b's blocks back.
func (p *space) give(b *Buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.free.Free(b.extents); err != nil {
		panic("slab: " + err.Error()) // a buffer is given back once: see Buffer.settle
	}
	b.extents = nil
	p.serve()
	p.checkIdle()
}

// serve gives room to who waits, as far as it goes. With the lock.
func (p *space) serve() {
	for e := p.queue.Front(); e != nil; e = p.queue.Front() {
		w := e.Value.(*waiting)
		if !p.place(w.b) {
			return
		}
		p.queue.Remove(e)
		close(w.done)
	}
}

// place finds room for b: one extent, or else, where there is too little in one place, one for each tensor. With the lock.
func (p *space) place(b *Buffer) bool {
	if b.blocks == 0 {
		return true
	}
	var ok bool
	if b.extents, ok = p.free.AppendAlloc(b.one[:0], b.blocks, 1); ok {
		at := int64(b.extents[0].Start) * blockBytes
		for i := range b.spans {
			b.spans[i].Offset = at
			at += align(b.spans[i].Length)
		}
		return true
	}
	// A grant of one extent is one span; of scattered ones it must not have too many.
	return len(b.spans) > 1 && len(b.spans) <= transfer.MaxSpans && p.scatter(b)
}

// scatter gives each tensor an extent of its own, the largest first, since that is the hardest to place.
func (p *space) scatter(b *Buffer) bool {
	order := make([]int, len(b.spans))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(b.spans[j].Length, b.spans[i].Length) })
	var extents []region.Extent
	for _, i := range order {
		if b.spans[i].Length == 0 {
			break
		}
		var ok bool
		if extents, ok = p.free.AppendAlloc(extents, blocksFor(b.spans[i].Length), 1); !ok {
			if err := p.free.Free(extents); err != nil {
				panic("slab: " + err.Error()) // they were given a moment ago
			}
			return false
		}
		b.spans[i].Offset = int64(extents[len(extents)-1].Start) * blockBytes
	}
	b.extents = extents
	return true
}

func align(n int64) int64 { return (n + Align - 1) &^ (Align - 1) }

func blocksFor(n int64) int { return int((n + blockBytes - 1) / blockBytes) }

// measure gives the bytes and the blocks of tensors of those sizes in one extent.
func measure(sizes []int64) (bytes int64, blocks int, err error) {
	room := int64(0)
	for i, n := range sizes {
		if n < 0 {
			return 0, 0, fmt.Errorf("%w: tensor %d of %d bytes", ErrMismatch, i, n)
		}
		if n > math.MaxInt64/2-room {
			return 0, 0, fmt.Errorf("%w: tensor %d of %d bytes", ErrTooLarge, i, n)
		}
		bytes += n
		room += align(n)
	}
	return bytes, blocksFor(room), nil
}
