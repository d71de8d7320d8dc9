package ec

import "github.com/tensorferry/tensorferry/region"

// phase is where an entry stands in its life: filling, then ready, quarantined or gone. The next life of its memory is another
// generation.
type phase uint8

const (
	phaseFilling phase = iota + 1
	phaseReady
	phaseQuarantined // the key is given up, the blocks may still be written
	phaseGone
)

// class says what may become of an entry's blocks. Every entry with blocks is counted in one class.
type class uint8

const (
	classGone class = iota // has no blocks
	classFilling
	classQuarantined
	classPinned
	classHeld  // ready, unpinned, held: goes if nothing else can
	classLoose // ready, unpinned, unheld: may be evicted
	classes
)

// tally counts entries.
type tally struct{ entries, blocks int }

func (t *tally) add(e *entry)  { t.entries++; t.blocks += e.blocks }
func (t *tally) take(e *entry) { t.entries--; t.blocks -= e.blocks }

// entry is one key's bytes. All of it is under the cache's lock.
//
// Entries are used again, since a collector that has to find millions of dead ones takes longer than all that the cache does. So
// whoever has a pointer to one outside the lock compares generations, or has it pinned; and what callers see of it, shape and
// extents, lies elsewhere and is never written again.
//
// The order of the fields is that of need: in lines of 64 bytes, what eviction looks at, what a reservation sets as well, the rest.
type entry struct {
	queue   link[entry] // of the eviction policy, as heap, turn and sieve
	turn    uint64
	gen     uint64 // 0: gone
	phase   phase
	class   class
	hasSum  bool
	planned bool   // in Cache.plan
	hash    uint32 // of the key, for Cache.names
	heap    int32  // its place in order.back, from 1; 0: not there
	pins    int32
	c       *Cache

	extents []region.Extent
	watch   chan struct{} // nil: nobody watches
	slot    int
	blocks  int
	holds   int32
	stored  int32 // pins that the region records
	granted int32 // pins for grants that the region records
	sieve   sieveMark

	key   string
	dtype string
	shape *[2]int64
	bytes int64
	owner uint64
	seq   uint64 // of its commit

	sum            uint64 // if hasSum
	oldest, newest *hold
	held           link[entry] // of Cache.heldOrder

	_ [16]byte // whole lines: Go's allocator puts a size that is a power of two at a multiple of itself
}

// newEntry is one to be given all that describes it; the rest is as in an entry that nobody has used yet.
func (c *Cache) newEntry() *entry {
	if len(c.idle) == 0 {
		c.idle = append(c.idle, &entry{c: c})
	}
	last := len(c.idle) - 1
	e := c.idle[last]
	c.idle = c.idle[:last]
	e.pins, e.stored, e.granted, e.seq, e.sieve = 0, 0, 0, 0, sieveMark{}
	e.hasSum = false
	return e
}

// drop keeps an entry that is gone for another life.
func (c *Cache) drop(e *entry) {
	e.gen = 0
	c.idle = append(c.idle, e)
}

func (e *entry) spec() Spec { return Spec{Dtype: e.dtype, Shape: e.shape[:], Bytes: e.bytes} }

func (e *entry) state() State {
	switch e.phase {
	case phaseFilling:
		return Filling
	case phaseReady:
		return Ready
	}
	return Absent
}

func (e *entry) info() (i Info) {
	e.describe(&i)
	return i
}

// describe fills in an empty Info. It sets field by field, in place: to copy what was just written takes longer than the rest.
func (e *entry) describe(i *Info) {
	i.Key, i.State, i.Gen, i.Slot, i.Extents = e.key, e.state(), e.gen, e.slot, e.extents
	i.Spec.Dtype, i.Spec.Shape, i.Spec.Bytes = e.dtype, e.shape[:], e.bytes
	i.Pins, i.Holds, i.Owner = int(e.pins), int(e.holds), e.owner
	if e.hasSum {
		i.Checksum, i.HasChecksum = e.sum, true
	}
}

// buffers are the parts of the pool that so many bytes in these extents are.
func (c *Cache) buffers(extents []region.Extent, bytes int64) [][]byte {
	bufs := make([][]byte, len(extents))
	for i, x := range extents {
		off := int64(x.Start) * c.blockBytes
		n := min(int64(x.Count)*c.blockBytes, bytes)
		bufs[i] = c.pool[off : off+n : off+n]
		bytes -= n
	}
	return bufs
}

func (e *entry) classify() class {
	switch e.phase {
	case phaseFilling:
		return classFilling
	case phaseQuarantined:
		return classQuarantined
	case phaseReady:
		switch {
		case e.pins > 0:
			return classPinned
		case e.holds > 0:
			return classHeld
		}
		return classLoose
	}
	return classGone
}

// wake tells those who watch.
func (e *entry) wake() {
	if e.watch != nil {
		close(e.watch)
		e.watch = nil
	}
}

// find is the entry of a key that is filling or ready, nil if there is none.
func (c *Cache) find(key string) *entry { return c.names.get(key, c.names.hash(key)) }

// reclass is called after every change of an entry's phase, and of its pins or holds from or to none.
func (c *Cache) reclass(e *entry) {
	was, is := e.class, e.classify()
	if was == is {
		return
	}
	e.class = is
	if was != classGone {
		c.tally[was].take(e)
	}
	if is != classGone {
		c.tally[is].add(e)
	}
	if is == classLoose && (was == classPinned || was == classHeld) {
		c.evict.freed(e)
	}
	switch was {
	case classFilling, classQuarantined, classPinned: // blocks that could not be had before
		c.stuck = noneStuck
	}
}

// unname takes an entry out of sight: key, holds, watch, place in the order of eviction. Its slot and blocks stay.
func (c *Cache) unname(e *entry, to phase) {
	e.phase = to // first: what loses its holds must not become evictable on the way
	c.evict.remove(e)
	c.dropHolds(e)
	c.reclass(e)
	c.names.remove(e)
	e.wake()
}

// vacate frees the slot of an entry that has no name any more, and the entry for another life, which begins with a Reserve to
// come. Its blocks are in no other slot yet: whoever puts them there holds the lock and does it after this.
func (c *Cache) vacate(e *entry) {
	c.slots.Free(e.slot)
	c.setEdges(e, 0)
	c.bySlot[e.slot] = nil
	c.freeSlots = append(c.freeSlots, int32(e.slot))
	c.drop(e)
}

// giveBack frees blocks. That they are in use is the cache's own book-keeping: if that is wrong, going on would hand one
// block to two entries.
func (c *Cache) giveBack(x []region.Extent) {
	if err := c.alloc.Free(x); err != nil {
		panic("ec: an entry's blocks were free: " + err.Error())
	}
}

// takeBack undoes giveBack.
func (c *Cache) takeBack(x []region.Extent) {
	if err := c.alloc.Take(x); err != nil {
		panic("ec: blocks freed under the lock were taken: " + err.Error())
	}
}
