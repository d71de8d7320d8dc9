package ec

import (
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/region"
)

// Reserve makes an entry that is being filled, evicting ready, unpinned, unheld entries by the policy if needed, and held ones
// if those do not do. owner is the caller's to choose; it is recorded.
//
// The entry lies in one extent wherever that takes no more than one of the first entries to go and its neighbours in the
// pool. Else, with pins all about, it lies in as few extents as can be, at most region.MaxExtents, ascending.
//
// ErrHeld: ready already, with the same spec. ErrPending: someone else is filling it (see Watch). ErrConflict, ErrFull,
// ErrTooLarge, ErrKey, ErrSpec. On any error nothing has changed, in particular nothing was evicted.
func (c *Cache) Reserve(key string, s Spec, owner uint64) (*Reservation, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	hash := c.names.hash(key)
	c.names.prefetch(hash)
	s, err := checkSpec(s)
	if err != nil {
		return nil, err
	}
	blocks := (s.Bytes-1)/c.blockBytes + 1
	if blocks > int64(c.blocks) {
		return nil, fmt.Errorf("%w: %q needs %d bytes, the pool has %d; give the node more ec_cpu_bytes",
			ErrTooLarge, key, s.Bytes, int64(c.blocks)*c.blockBytes)
	}

	c.mu.Lock()
	if e := c.names.get(key, hash); e != nil {
		defer c.mu.Unlock()
		switch {
		case !s.equal(e.spec()):
			return nil, fmt.Errorf("%w: %q is %v, asked for %v", ErrConflict, key, e.spec(), s)
		case e.phase == phaseFilling:
			return nil, fmt.Errorf("%w: %q, by owner %d", ErrPending, key, e.owner)
		}
		c.evict.hit(e)
		return nil, fmt.Errorf("%w: %q", ErrHeld, key)
	}
	c.lapseHolds()
	extents, due, ok := c.makeRoom(int(blocks))
	if !ok {
		c.stats.Full++
		full := c.fullError(key, int(blocks))
		c.mu.Unlock()
		return nil, full
	}
	e := c.newEntry()
	e.key, e.dtype, e.bytes, e.blocks, e.owner, e.phase = key, s.Dtype, s.Bytes, int(blocks), owner, phaseFilling
	// What it had in its life before mostly does again: it was evicted for this one.
	if e.shape == nil || *e.shape != [2]int64(s.Shape) {
		if *c.shape != [2]int64(s.Shape) {
			c.shape = &[2]int64{s.Shape[0], s.Shape[1]}
		}
		e.shape = c.shape
	}
	if !slices.Equal(e.extents, extents) {
		e.extents = slices.Clone(extents)
	}
	err = c.enter(e, hash)
	r := c.newReservation(e)
	c.mu.Unlock()
	c.notify(due)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// atOnce is how many reservations are allocated together: the most for which Go's allocator adds nothing (512 bytes).
const atOnce = 32

// newReservation is of an entry being filled. Many are made in one piece of memory.
func (c *Cache) newReservation(e *entry) *Reservation {
	if len(c.reservations) == 0 {
		c.reservations = make([]Reservation, atOnce)
	}
	r := &c.reservations[0]
	c.reservations = c.reservations[1:]
	r.e, r.gen = e, e.gen
	return r
}

// enter gives a new entry a slot and its name.
func (c *Cache) enter(e *entry, hash uint32) error {
	last := len(c.freeSlots) - 1
	e.slot = int(c.freeSlots[last])
	s := &c.filling
	s.Key, s.Dtype, s.Shape, s.Bytes, s.Extents, s.Owner = e.key, e.dtype, e.shape[:], e.bytes, e.extents, e.owner
	gen, err := c.slots.Fill(e.slot, s)
	if err != nil { // all that Fill checks was checked here, so this is a region that is gone
		c.giveBack(e.extents)
		c.drop(e)
		return fmt.Errorf("ec: reserving %q: %w", e.key, err)
	}
	e.gen = gen
	c.freeSlots = c.freeSlots[:last]
	c.bySlot[e.slot] = e
	c.setEdges(e, uint32(e.slot)+1)
	c.names.put(e, hash)
	if w := c.absent[e.key]; w != nil {
		e.watch = w
		delete(c.absent, e.key)
	}
	c.reclass(e)
	return nil
}

func (c *Cache) fullError(key string, n int) error {
	t := &c.tally
	free, may := c.alloc.FreeBlocks(), t[classLoose].blocks+t[classHeld].blocks
	why := ""
	switch {
	case n <= free+may && n >= c.stuck:
		why = fmt.Sprintf("; these lie in more than %d pieces", region.MaxExtents)
	case n <= free+may:
		why = fmt.Sprintf("; all %d slots are in use", len(c.bySlot))
	}
	return fmt.Errorf("%w: %q needs %d blocks of %d; free or evictable %d, pinned %d, being filled %d, quarantined %d%s",
		ErrFull, key, n, c.blocks, free+may, t[classPinned].blocks, t[classFilling].blocks, t[classQuarantined].blocks, why)
}

// Reservation is the right to fill one entry. One goroutine uses it at a time. It is small because one is allocated for each entry,
// and how often the collector has to run depends on that alone.
type Reservation struct {
	e   *entry
	gen uint64 // of e while that is the entry reserved
}

// Info describes the entry as it is now. Once that is gone: Absent, with its generation and nothing else.
func (r *Reservation) Info() Info {
	r.e.c.mu.Lock()
	defer r.e.c.mu.Unlock()
	if r.e.gen != r.gen {
		return Info{Gen: r.gen}
	}
	return r.e.info()
}

// Buffers are the entry's bytes in the pool, one slice an extent, cut to Spec.Bytes in all. Writable until Commit, Discard or
// the quarantine's end. Nil once the entry is gone.
func (r *Reservation) Buffers() [][]byte {
	r.e.c.mu.Lock()
	defer r.e.c.mu.Unlock()
	if r.e.gen != r.gen {
		return nil
	}
	return r.e.c.buffers(r.e.extents, r.e.bytes)
}

// Checksum is xxh3 of the bytes of Buffers, which is the one that entries keep.
func (r *Reservation) Checksum() uint64 { return checksum(r.Buffers()) }

// is tells if the entry reserved is in the given phase.
func (r *Reservation) is(p phase) bool { return r.e.gen == r.gen && r.e.phase == p }

// Commit makes the entry ready. checksum nil: none is kept. ErrStale if it is over already.
func (r *Reservation) Commit(checksum *uint64) (info Info, err error) {
	c, e := r.e.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.is(phaseFilling) {
		return Info{}, fmt.Errorf("%w: the reservation of generation %d was committed or given up before", ErrStale, r.gen)
	}
	if checksum != nil {
		e.sum, e.hasSum = *checksum, true
		c.slots.Ready(e.slot, e.sum, true)
	} else {
		c.slots.Ready(e.slot, 0, false)
	}
	c.seq++
	e.seq = c.seq
	e.phase = phaseReady
	c.evict.add(e)
	c.reclass(e)
	c.stats.Commits++
	if len(e.extents) > 1 {
		c.stats.Fragmented++
	}
	e.wake()
	e.describe(&info)
	return info, nil
}

// Discard frees the extents at once: nobody may be writing them. It does nothing if the reservation is over already.
func (r *Reservation) Discard() {
	c, e := r.e.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if !r.is(phaseFilling) {
		return
	}
	c.unname(e, phaseGone)
	c.vacate(e)
	c.giveBack(e.extents)
	c.stats.Discards++
}

// Quarantine gives the key up but keeps the extents, which a transfer may still write. Settle frees them, exactly once. The
// slot says filling until then, so whoever finds the region after a crash sees that the bytes may change. Asked again it gives
// the same answer; after Commit or Discard, one with nothing to settle.
func (r *Reservation) Quarantine() *Quarantined {
	c, e := r.e.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.is(phaseFilling) {
		c.unname(e, phaseQuarantined)
		c.stats.Quarantines++
	}
	return (*Quarantined)(r)
}

// Quarantined is memory that waits for a transfer to end.
type Quarantined Reservation

// Settle frees it. Idempotent.
func (q *Quarantined) Settle() {
	c, e := q.e.c, q.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if (*Reservation)(q).is(phaseQuarantined) {
		c.settle(e)
	}
}

// settle frees what is quarantined.
func (c *Cache) settle(e *entry) {
	e.phase = phaseGone
	c.reclass(e)
	c.vacate(e)
	c.giveBack(e.extents)
}
