package region

// DefaultSlots is the number of slots given to a pool of that many blocks.
func DefaultSlots(blocks int) int { return blocks }

// Allocator hands out extents of whole blocks. It is not safe for concurrent use.
type Allocator struct{}

// NewAllocator starts with all blocks free.
func NewAllocator(blocks int) *Allocator { return &Allocator{} }

// Alloc gives n blocks: one extent if any free run is long enough (best fit), else at most maxExtents extents in ascending
// order, else false and nothing is taken.
func (a *Allocator) Alloc(n, maxExtents int) ([]Extent, bool) { return nil, false }

// Free gives extents back. Freeing a block that is free is a bug of the caller and is reported as an error, changing nothing.
func (a *Allocator) Free(e []Extent) error { return nil }

// Take marks given extents as used (adoption); an error if one is not free.
func (a *Allocator) Take(e []Extent) error { return nil }

func (a *Allocator) FreeBlocks() int { return 0 }
func (a *Allocator) LargestRun() int { return 0 }
