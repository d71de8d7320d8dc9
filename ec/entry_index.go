package ec

import (
	"hash/maphash"
	"math/bits"
	"unsafe"

	"github.com/tensorferry/tensorferry/internal/prefetch"
)

// index finds entries by key. It is a table of slot numbers of fixed size, at most a quarter full, searched from a key's place onwards:
// half full, most searches went past the first cell, and guessing wrong about that cost more than the memory (16 to 32 bytes a slot of 512
// or more). A map of Go's takes twice as long for a key that comes and goes: it hashes it three times, compares it once more to delete it, and
// spreads over more memory.
type index struct {
	seed   maphash.Seed
	cells  []cell   // a power of two
	bySlot []*entry // the cache's
	len    int
}

// cell is empty if slot is 0.
type cell struct {
	hash uint32
	slot uint32 // + 1
}

func newIndex(bySlot []*entry) index {
	return index{seed: maphash.MakeSeed(), cells: make([]cell, 1<<bits.Len(uint(4*len(bySlot)-1))), bySlot: bySlot}
}

// hash is what the other methods want of a key.
func (x *index) hash(key string) uint32 { return uint32(maphash.String(x.seed, key)) }

func (x *index) place(hash uint32) int { return int(hash) & (len(x.cells) - 1) }

func (x *index) after(at int) int { return (at + 1) & (len(x.cells) - 1) }

// get is the entry of a key, nil if there is none.
func (x *index) get(key string, hash uint32) *entry {
	for at := x.place(hash); x.cells[at].slot != 0; at = x.after(at) {
		if c := x.cells[at]; c.hash == hash {
			if e := x.bySlot[c.slot-1]; e.key == key {
				return e
			}
		}
	}
	return nil
}

// prefetch asks the processor for the place of a hash.
func (x *index) prefetch(hash uint32) { prefetch.Lines(unsafe.Pointer(&x.cells[x.place(hash)]), 1) }

// put takes in an entry that is in its slot. There must be none of its key.
func (x *index) put(e *entry, hash uint32) {
	e.hash = hash
	at := x.place(hash)
	for x.cells[at].slot != 0 {
		at = x.after(at)
	}
	x.cells[at] = cell{hash, uint32(e.slot) + 1}
	x.len++
}

// remove takes an entry out that is in.
func (x *index) remove(e *entry) {
	at := x.place(e.hash)
	for x.cells[at].slot != uint32(e.slot)+1 {
		at = x.after(at)
	}
	x.len--
	// What follows moves up, unless it would then be in front of its place.
	for next := x.after(at); ; next = x.after(next) {
		c := x.cells[next]
		if c.slot == 0 {
			break
		}
		if from := x.place(c.hash); (next-from)&(len(x.cells)-1) >= (next-at)&(len(x.cells)-1) {
			x.cells[at] = c
			at = next
		}
	}
	x.cells[at] = cell{}
}
