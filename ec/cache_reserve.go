package ec

import (
	"fmt"
	"math"
	"slices"

	"github.com/tensorferry/tensorferry/region"
)

const noneStuck = math.MaxInt

// Reserve makes an entry that is being filled, evicting ready, unpinned, unheld entries (oldest first) if needed, and held ones
// if those do not do. owner is the caller's to choose; it is recorded.
//
// The entry lies in one extent if a free run is long enough once as many blocks are free as it needs; else in up to
// region.MaxExtents, ascending. More is evicted only where even those do not do.
//
// ErrHeld: ready already, with the same spec. ErrPending: someone else is filling it (see Watch). ErrConflict, ErrFull,
// ErrTooLarge, ErrKey, ErrSpec. On any error nothing has changed, in particular nothing was evicted.
func (c *Cache) Reserve(key string, s Spec, owner uint64) (*Reservation, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
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
	if e := c.entries[key]; e != nil {
		defer c.mu.Unlock()
		switch {
		case !s.equal(e.spec):
			return nil, fmt.Errorf("%w: %q is %v, asked for %v", ErrConflict, key, e.spec, s)
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
	e := &entry{key: key, spec: s, blocks: int(blocks), owner: owner, phase: phaseFilling}
	copy(e.shape[:], s.Shape)
	e.spec.Shape = e.shape[:]
	e.extents = slices.Clip(append(e.one[:0], extents...))
	e.res = Reservation{c: c, e: e}
	err = c.enter(e)
	c.mu.Unlock()
	c.notify(due)
	if err != nil {
		return nil, err
	}
	return &e.res, nil
}

// enter gives a new entry a slot and its name.
func (c *Cache) enter(e *entry) error {
	last := len(c.freeSlots) - 1
	e.slot = int(c.freeSlots[last])
	gen, err := c.slots.Fill(e.slot, region.Slot{
		Key: e.key, Dtype: e.spec.Dtype, Shape: e.spec.Shape, Bytes: e.spec.Bytes, Extents: e.extents, Owner: e.owner,
	})
	if err != nil { // all that Fill checks was checked here, so this is a region that is gone
		c.giveBack(e.extents)
		return fmt.Errorf("ec: reserving %q: %w", e.key, err)
	}
	e.gen = gen
	c.freeSlots = c.freeSlots[:last]
	c.bySlot[e.slot] = e
	c.entries[e.key] = e
	if w := c.absent[e.key]; w != nil {
		e.watch = w
		delete(c.absent, e.key)
	}
	c.reclass(e)
	return nil
}

// makeRoom allocates n blocks and sees to a free slot. It tries in the allocator what evicting one entry after another would
// give, and evicts only once it is known that this does; else the allocator is put back as it was. The extents are c.found.
func (c *Cache) makeRoom(n int) (extents []region.Extent, due []notice, ok bool) {
	haveSlot := len(c.freeSlots) > 0
	free := c.alloc.FreeBlocks()
	if haveSlot && free >= n {
		if x, ok := c.alloc.AppendAlloc(c.found[:0], n, region.MaxExtents); ok {
			return x, nil, true
		}
	}
	loose, held := c.tally[classLoose], c.tally[classHeld]
	if n > free+loose.blocks+held.blocks || n >= c.stuck || !haveSlot && loose.entries+held.entries == 0 {
		return nil, nil, false
	}

	plan := c.plan[:0]
	defer func() { clear(plan); c.plan = plan }()
	for !ok {
		v := c.nextVictim(plan)
		if v == nil {
			break
		}
		plan = append(plan, v)
		c.giveBack(v.extents)
		if c.alloc.FreeBlocks() >= n {
			extents, ok = c.alloc.AppendAlloc(c.found[:0], n, region.MaxExtents)
		}
	}
	if !ok {
		c.stuck = n
		for _, v := range plan {
			c.spare(v)
		}
		return nil, nil, false
	}

	// Of those it took to get so many blocks, some may lie outside of what was then allocated: they stay.
	for _, v := range plan {
		if overlap(v.extents, extents) {
			due = c.evictNow(v, due)
		} else {
			c.spare(v)
		}
	}
	if len(c.freeSlots) == 0 { // only a slot was lacking: one victim was enough, and it was spared
		c.giveBack(plan[0].extents)
		due = c.evictNow(plan[0], due)
	}
	return extents, due, true
}

// nextVictim is the entry to go after those of the plan: by the policy, and when that has no more, the held one that was last
// announced longest ago.
func (c *Cache) nextVictim(plan []*entry) *entry {
	if v := c.evict.next(); v != nil {
		return v
	}
	v := c.heldOrder.front()
	if len(plan) > 0 && plan[len(plan)-1].class == classHeld {
		v = c.heldOrder.after(&plan[len(plan)-1].held)
	}
	for v != nil && v.class != classHeld { // pinned, or being filled
		v = c.heldOrder.after(&v.held)
	}
	return v
}

// spare takes a victim off the plan.
func (c *Cache) spare(v *entry) {
	c.takeBack(v.extents)
	if v.class == classLoose {
		c.evict.putBack(v)
	}
}

// evictNow evicts an entry whose blocks are free already.
func (c *Cache) evictNow(v *entry, due []notice) []notice {
	if v.holds > 0 {
		c.stats.HoldsDropped += uint64(v.holds)
		due = c.noteHold(due, v)
	}
	due = note(due, c.opt.Evicted, v)
	c.stats.Evictions++
	c.unname(v, phaseGone)
	c.vacate(v)
	return due
}

// overlap tells if two short ascending lists of extents have a block in common.
func overlap(a, b []region.Extent) bool {
	for len(a) > 0 && len(b) > 0 {
		switch {
		case a[0].Start+a[0].Count <= b[0].Start:
			a = a[1:]
		case b[0].Start+b[0].Count <= a[0].Start:
			b = b[1:]
		default:
			return true
		}
	}
	return false
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

// Reservation is the right to fill one entry. One goroutine uses it at a time.
type Reservation struct {
	c    *Cache
	e    *entry
	kept *Quarantined // of Quarantine
}

// Info describes the entry as it is now.
func (r *Reservation) Info() Info {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return r.e.info()
}

// Buffers are the entry's bytes in the pool, one slice an extent, cut to Spec.Bytes in all. Writable until Commit, Discard or
// the quarantine's end.
func (r *Reservation) Buffers() [][]byte { return r.c.buffers(r.e) }

// Commit makes the entry ready. checksum nil: none is kept. ErrStale if it is over already.
func (r *Reservation) Commit(checksum *uint64) (Info, error) {
	c, e := r.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.phase != phaseFilling {
		return Info{}, fmt.Errorf("%w: %q was committed or given up before", ErrStale, e.key)
	}
	if checksum != nil {
		e.sum, e.hasSum = *checksum, true
	}
	c.slots.Ready(e.slot, e.sum, e.hasSum)
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
	return e.info(), nil
}

// Discard frees the extents at once: nobody may be writing them. It does nothing if the reservation is over already.
func (r *Reservation) Discard() {
	c, e := r.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.phase != phaseFilling {
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
	c, e := r.c, r.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.kept == nil {
		r.kept = &Quarantined{c: c, e: e}
		if e.phase == phaseFilling {
			c.unname(e, phaseQuarantined)
			c.stats.Quarantines++
		}
	}
	return r.kept
}

// Quarantined is memory that waits for a transfer to end.
type Quarantined struct {
	c *Cache
	e *entry
}

// Settle frees it. Idempotent.
func (q *Quarantined) Settle() {
	c, e := q.c, q.e
	c.mu.Lock()
	defer c.mu.Unlock()
	if e.phase != phaseQuarantined {
		return
	}
	e.phase = phaseGone
	c.reclass(e)
	c.vacate(e)
	c.giveBack(e.extents)
}
