package ec

import "github.com/tensorferry/tensorferry/region"

// phase is where an entry stands in its life: filling, then ready, quarantined or gone; never back. An entry is made for one
// reservation and never used again, so whoever has a pointer to it, a reservation or a pin, cannot touch its successor.
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

// entry is one key's bytes. What is set by Reserve does not change; the rest is under the cache's lock. It is one allocation.
type entry struct {
	c       *Cache
	res     Reservation // the one that fills it
	kept    Quarantined // what becomes of it if that one gives up
	key     string
	dtype   string
	shape   [2]int64
	bytes   int64
	blocks  int
	extents []region.Extent
	one     [1]region.Extent // memory of extents, mostly
	slot    int
	gen     uint64
	owner   uint64

	phase   phase
	class   class
	hasSum  bool
	planned bool   // in Cache.plan
	hash    uint32 // of the key, for Cache.names
	heap    int32  // its place in order.back, from 1; 0: not there
	pins    int32
	stored  int32 // pins that the region records
	granted int32 // pins for grants that the region records
	holds   int32
	sum     uint64
	seq     uint64 // of its commit
	turn    uint64 // of the eviction policy, as the next two
	queue   link[entry]
	sieve   sieveMark
	watch   chan struct{} // nil: nobody watches

	oldest, newest *hold
	held           link[entry] // of Cache.heldOrder
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

func (e *entry) info() Info {
	return Info{
		Key: e.key, Spec: e.spec(), State: e.state(), Gen: e.gen, Slot: e.slot, Extents: e.extents,
		Pins: int(e.pins), Holds: int(e.holds), Owner: e.owner, Checksum: e.sum, HasChecksum: e.hasSum,
	}
}

// buffers needs no lock: an entry's extents and size never change.
func (e *entry) buffers() [][]byte {
	left := e.bytes
	bufs := make([][]byte, len(e.extents))
	for i, x := range e.extents {
		off := int64(x.Start) * e.c.blockBytes
		n := min(int64(x.Count)*e.c.blockBytes, left)
		bufs[i] = e.c.pool[off : off+n : off+n]
		left -= n
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

// vacate frees the slot of an entry that has no name any more. Its blocks are in no other slot yet: whoever puts them there
// holds the lock and does it after this.
func (c *Cache) vacate(e *entry) {
	c.slots.Free(e.slot)
	c.setEdges(e, 0)
	c.bySlot[e.slot] = nil
	c.freeSlots = append(c.freeSlots, int32(e.slot))
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
