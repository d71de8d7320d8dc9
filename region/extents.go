package region

import (
	"fmt"
	"math"
)

// DefaultSlots is the number of slots given to a pool of that many blocks: one for 4 blocks, but at least 4096 (or one a block,
// if that is less) and at most 262,144 (a table of 128 MiB).
func DefaultSlots(blocks int) int {
	return min(max(blocks/4, min(blocks, 4096)), 1<<18)
}

// Allocator hands out extents of whole blocks. It is not safe for concurrent use.
//
// It knows the maximal runs of free blocks. Two bitsets order them, by start and by length; runs of one length are a list. Every
// operation is a few steps in these whatever the sizes, never a loop over blocks. It takes 16 bytes a block, once.
type Allocator struct {
	blocks int
	free   int
	starts bitset   // first blocks of runs
	sizes  bitset   // lengths of which there is a run
	runs   []run    // by first block; meaningful for members of starts
	heads  []uint32 // by length, the list's first run; meaningful for members of sizes
}

// run is a free run: its length, and its neighbours in the list of that length.
type run struct{ length, prev, next uint32 }

const none = math.MaxUint32 // no block has this number

// NewAllocator starts with all blocks free. blocks is 0 to MaxBlocks.
func NewAllocator(blocks int) *Allocator {
	a := &Allocator{
		blocks: blocks,
		starts: newBitset(blocks),
		sizes:  newBitset(blocks + 1),
		runs:   make([]run, blocks),
		heads:  make([]uint32, blocks+1),
	}
	if blocks > 0 {
		a.insert(0, blocks)
	}
	return a
}

// Alloc gives n blocks: one extent if any free run is long enough (the shortest such run, its first blocks), else at most
// maxExtents extents in ascending order (the longest runs, so as few as can be), else false and nothing is taken. n under 1 is
// false too.
func (a *Allocator) Alloc(n, maxExtents int) ([]Extent, bool) {
	return a.AppendAlloc(nil, n, maxExtents)
}

// AppendAlloc is Alloc that appends to dst, for callers who bring the memory. dst is unchanged when it gives false.
func (a *Allocator) AppendAlloc(dst []Extent, n, maxExtents int) ([]Extent, bool) {
	if n < 1 || n > a.free || maxExtents < 1 {
		return dst, false
	}
	if size := a.sizes.next(n); size >= 0 {
		return append(dst, a.cut(size, n)), true
	}
	if !a.reaches(n, maxExtents) {
		return dst, false
	}
	first := len(dst)
	for n > 0 {
		size := a.sizes.next(n)
		if size < 0 {
			size = a.sizes.prev(n)
		}
		e := a.cut(size, min(n, size))
		n -= int(e.Count)
		at := len(dst) // insertion sort: the list is short
		dst = append(dst, e)
		for ; at > first && dst[at-1].Start > e.Start; at-- {
			dst[at] = dst[at-1]
		}
		dst[at] = e
	}
	return dst, true
}

// reaches says whether the longest maxExtents runs have n blocks together.
func (a *Allocator) reaches(n, maxExtents int) bool {
	for size := a.sizes.prev(a.blocks); size > 0; size = a.sizes.prev(size - 1) {
		for at := a.heads[size]; at != none; at = a.runs[at].next {
			n -= size
			maxExtents--
			if n <= 0 {
				return true
			}
			if maxExtents == 0 {
				return false
			}
		}
	}
	return false
}

// cut takes the first n blocks of a run of the given size.
func (a *Allocator) cut(size, n int) Extent {
	start := int(a.heads[size])
	a.remove(start)
	if n < size {
		a.insert(start+n, size-n)
	}
	return Extent{Start: uint32(start), Count: uint32(n)}
}

// Free gives extents back. Freeing a block that is free is a bug of the caller and is reported as an error, changing nothing.
func (a *Allocator) Free(e []Extent) error {
	for i := range e {
		if err := a.give(e[i]); err != nil {
			for _, done := range e[:i] {
				a.take(done)
			}
			return err
		}
	}
	return nil
}

// Take marks given extents as used (adoption); an error if a block of one is not free, changing nothing.
func (a *Allocator) Take(e []Extent) error {
	for i := range e {
		if err := a.take(e[i]); err != nil {
			for _, done := range e[:i] {
				a.give(done)
			}
			return err
		}
	}
	return nil
}

// give frees one extent and joins it with the free runs that it touches.
func (a *Allocator) give(e Extent) error {
	start, end, err := a.bounds(e)
	if err != nil {
		return err
	}
	next := a.starts.next(start)
	if next >= 0 && next < end {
		return fmt.Errorf("region: block %d of %v is free already", next, e)
	}
	prev := a.starts.prev(start)
	if prev >= 0 {
		switch prevEnd := prev + int(a.runs[prev].length); {
		case prevEnd > start:
			return fmt.Errorf("region: block %d of %v is free already", start, e)
		case prevEnd == start:
			a.remove(prev)
			start = prev
		}
	}
	if next == end {
		end += int(a.runs[next].length)
		a.remove(next)
	}
	a.insert(start, end-start)
	return nil
}

// take uses one extent, which must lie in one free run.
func (a *Allocator) take(e Extent) error {
	start, end, err := a.bounds(e)
	if err != nil {
		return err
	}
	at := a.starts.prev(start)
	if at < 0 || at+int(a.runs[at].length) < end {
		return fmt.Errorf("region: not all blocks of %v are free", e)
	}
	runEnd := at + int(a.runs[at].length)
	a.remove(at)
	if at < start {
		a.insert(at, start-at)
	}
	if end < runEnd {
		a.insert(end, runEnd-end)
	}
	return nil
}

func (a *Allocator) bounds(e Extent) (start, end int, err error) {
	start, end = int(e.Start), int(e.Start)+int(e.Count)
	if e.Count == 0 || end > a.blocks {
		return 0, 0, fmt.Errorf("region: extent %v is empty or not inside %d blocks", e, a.blocks)
	}
	return start, end, nil
}

// FreeBlocks is the number of free blocks.
func (a *Allocator) FreeBlocks() int { return a.free }

// LargestRun is the length of the longest free run, 0 if nothing is free.
func (a *Allocator) LargestRun() int { return max(0, a.sizes.prev(a.blocks)) }

// insert adds a run that touches no other.
func (a *Allocator) insert(start, length int) {
	a.starts.add(start)
	r := run{length: uint32(length), prev: none, next: none}
	if head := a.heads[length]; a.sizes.has(length) {
		a.runs[head].prev = uint32(start)
		r.next = head
	} else {
		a.sizes.add(length)
	}
	a.heads[length] = uint32(start)
	a.runs[start] = r
	a.free += length
}

// remove takes a run out.
func (a *Allocator) remove(start int) {
	a.starts.remove(start)
	r := a.runs[start]
	if r.next != none {
		a.runs[r.next].prev = r.prev
	}
	switch {
	case r.prev != none:
		a.runs[r.prev].next = r.next
	case r.next != none:
		a.heads[r.length] = r.next
	default:
		a.sizes.remove(int(r.length))
	}
	a.free -= int(r.length)
}
