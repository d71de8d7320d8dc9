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

// space is which blocks of a piece of memory are free, and who waits for some.
type space struct {
	align int64 // where a tensor begins: a multiple of it

	mu     sync.Mutex
	first  int // the piece's first block
	blocks int
	free   *region.Allocator
	queue  list.List // of *waiting, the first come first
	closed bool
	idle   chan struct{} // closed when closed and no block is used
}

// holding is what one buffer has of one space. Guarded by the space once it has some.
type holding struct {
	space   *space
	blocks  int
	spans   []region.Span // of each tensor in the memory that the space is of; one without bytes is nowhere
	extents []region.Extent

	// What most buffers need, so that they are one allocation.
	one     [1]region.Extent
	oneSpan [1]region.Span
}

// waiting is one who found no room.
type waiting struct {
	h    *holding
	done chan struct{} // closed with the lock held, when h has its blocks or err is set
	err  error
}

func (p *space) init(first, blocks int, align int64) {
	p.align, p.idle = align, make(chan struct{})
	p.free = region.NewAllocator(0)
	p.resize(first, blocks)
}

// resize makes it another piece of memory. It is false, and nothing is done, if any of it is in use or wanted.
func (p *space) resize(first, blocks int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.free.FreeBlocks() < p.blocks || p.queue.Len() > 0 {
		return false
	}
	p.first, p.blocks, p.free = first, blocks, region.NewAllocator(blocks)
	return true
}

// bytes is the size of the piece.
func (p *space) bytes() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int64(p.blocks) * blockBytes
}

// want says what h is to have: room for tensors of those sizes.
func (p *space) want(h *holding, sizes []int64) (bytes int64, err error) {
	if bytes, h.blocks, err = measure(sizes, p.align); err != nil {
		return 0, err
	}
	h.space = p
	if len(sizes) == 1 {
		h.spans = h.oneSpan[:]
	} else {
		h.spans = make([]region.Span, len(sizes))
	}
	for i, n := range sizes {
		h.spans[i].Length = n
	}
	return bytes, nil
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

// take gives h its blocks, waiting for them in the order of calls.
func (p *space) take(ctx context.Context, h *holding) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("slab: %w", err)
	}
	p.mu.Lock()
	switch {
	case p.closed:
		p.mu.Unlock()
		return ErrClosed
	case h.blocks > p.blocks:
		defer p.mu.Unlock()
		return fmt.Errorf("%w: %d bytes in %d tensors, here are %d for all", ErrTooLarge, int64(h.blocks)*blockBytes, len(h.spans), int64(p.blocks)*blockBytes)
	case p.queue.Len() == 0 && p.place(h):
		p.mu.Unlock()
		return nil
	}
	w := &waiting{h: h, done: make(chan struct{})}
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
	return fmt.Errorf("slab: waiting for %d bytes of room: %w", int64(h.blocks)*blockBytes, ctx.Err())
}

// give takes h's blocks back.
func (p *space) give(h *holding) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.free.Free(h.extents); err != nil {
		panic("slab: " + err.Error()) // a buffer is given back once: see Buffer.settle
	}
	h.extents = nil
	p.serve()
	p.checkIdle()
}

// serve gives room to who waits, as far as it goes. With the lock.
func (p *space) serve() {
	for e := p.queue.Front(); e != nil; e = p.queue.Front() {
		w := e.Value.(*waiting)
		if !p.place(w.h) {
			return
		}
		p.queue.Remove(e)
		close(w.done)
	}
}

// place finds room for h: one extent, or else, where there is too little in one place, one for each tensor. With the lock.
func (p *space) place(h *holding) bool {
	if h.blocks == 0 {
		return true
	}
	var ok bool
	if h.extents, ok = p.free.AppendAlloc(h.one[:0], h.blocks, 1); ok {
		at := p.offset(h.extents[0])
		for i := range h.spans {
			h.spans[i].Offset = at
			at += roundUp(h.spans[i].Length, p.align)
		}
		return true
	}
	// A grant of one extent is one span; of scattered ones it must not have too many.
	return len(h.spans) > 1 && len(h.spans) <= transfer.MaxSpans && p.scatter(h)
}

// start is the piece's first block.
func (p *space) start() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.first
}

// offset is where an extent begins, in bytes.
func (p *space) offset(e region.Extent) int64 { return (int64(p.first) + int64(e.Start)) * blockBytes }

// scatter gives each tensor an extent of its own, the largest first, since that is the hardest to place.
func (p *space) scatter(h *holding) bool {
	order := make([]int, len(h.spans))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(h.spans[j].Length, h.spans[i].Length) })
	var extents []region.Extent
	for _, i := range order {
		if h.spans[i].Length == 0 {
			break
		}
		var ok bool
		if extents, ok = p.free.AppendAlloc(extents, blocksFor(h.spans[i].Length), 1); !ok {
			if err := p.free.Free(extents); err != nil {
				panic("slab: " + err.Error()) // they were given a moment ago
			}
			return false
		}
		h.spans[i].Offset = p.offset(extents[len(extents)-1])
	}
	h.extents = extents
	return true
}

// roundUp needs a power of 2.
func roundUp(n, to int64) int64 { return (n + to - 1) &^ (to - 1) }

func blocksFor(n int64) int { return int((n + blockBytes - 1) / blockBytes) }

// measure gives the bytes and the blocks of tensors of those sizes in one extent, each aligned.
func measure(sizes []int64, align int64) (bytes int64, blocks int, err error) {
	room := int64(0)
	for i, n := range sizes {
		if n < 0 {
			return 0, 0, fmt.Errorf("%w: tensor %d of %d bytes", ErrMismatch, i, n)
		}
		if n > math.MaxInt64/2-room {
			return 0, 0, fmt.Errorf("%w: tensor %d of %d bytes", ErrTooLarge, i, n)
		}
		bytes += n
		room += roundUp(n, align)
	}
	return bytes, blocksFor(room), nil
}
