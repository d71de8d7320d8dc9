package ec

import (
	"math"
	"unsafe"

	"github.com/tensorferry/tensorferry/internal/prefetch"
	"github.com/tensorferry/tensorferry/region"
)

// noneStuck is Cache.stuck when nothing is known not to fit.
const noneStuck = math.MaxInt

// Limits of the search for a run around one of the first entries to go, by simulation on Zipf traces with a tenth of the entries
// pinned (bench/cache). Half as many seeds leave ten times as many entries in pieces.
const (
	maxSeeds   = 32 // so many of them are looked at
	maxRunCost = 4  // so many times the blocks needed may it cost
)

// makeRoom allocates n blocks and sees to a free slot. It tries in the allocator what evicting would give, and evicts only once
// it is known that this does; else the allocator is put back as it was. The extents are in c.found.
//
// First to last: a free run; a run around one of the first entries to go; pieces without evicting; pieces, evicting in order. The
// second gives whole entries at the price of evicting some that are not the very next. Over time no more is evicted for it: what
// goes beyond the need is room for the entries to come.
func (c *Cache) makeRoom(n int) (extents []region.Extent, due []notice, ok bool) {
	haveSlot := len(c.freeSlots) > 0
	if haveSlot {
		if x, ok := c.alloc.AppendAlloc(c.found[:0], n, 1); ok {
			return x, nil, true
		}
	}
	free, loose, held := c.alloc.FreeBlocks(), c.tally[classLoose], c.tally[classHeld]
	if n > free+loose.blocks+held.blocks || n >= c.stuck || !haveSlot && loose.entries+held.entries == 0 {
		return nil, nil, false
	}

	if free == 0 {
		if extents, due = c.replace(n); extents != nil {
			return extents, due, true
		}
	}
	defer c.endPlan()
	if c.alloc.LargestRun() < n && c.planRun(n, free) {
		extents, ok = c.alloc.AppendAlloc(c.found[:0], n, 1)
	} else if haveSlot {
		if x, ok := c.alloc.AppendAlloc(c.found[:0], n, region.MaxExtents); ok {
			return x, nil, true
		}
	}
	for !ok {
		v := c.nextVictim()
		if v == nil {
			c.stuck = n
			for _, v := range c.plan {
				c.spare(v)
			}
			return nil, nil, false
		}
		c.planOn(v)
		extents, ok = c.alloc.AppendAlloc(c.found[:0], n, region.MaxExtents)
	}

	// Of those that it took to get so many blocks, some may lie outside of what was then allocated: they stay.
	for _, v := range c.plan {
		if overlap(v.extents, extents) {
			due = c.evictNow(v, due)
		} else {
			c.spare(v)
		}
	}
	if len(c.freeSlots) == 0 { // only a slot was lacking: one victim was enough, and it was spared
		v := c.plan[0]
		c.giveBack(v.extents)
		due = c.evictNow(v, due)
	}
	return extents, due, true
}

// replace is makeRoom for a full pool where the first to go has just n blocks, in one extent: they are then the new entry's. It gives
// what planRun and the allocator would, which need not know. Else nil, and nothing has changed.
func (c *Cache) replace(n int) ([]region.Extent, []notice) {
	v := c.evict.next()
	switch {
	case v == nil:
		return nil, nil
	case v.blocks != n || len(v.extents) > 1:
		c.evict.putBack(v)
		return nil, nil
	}
	c.expect()
	return v.extents, c.evictNow(v, nil)
}

// expect asks the processor for what the replace after the next will touch. Of all that the cache has, that was touched longest ago, and
// to wait for memory takes as long as all else; it comes while others do something else. One call ahead is too late for it.
func (c *Cache) expect() {
	e := c.evict.coming()
	if e == nil {
		return
	}
	if e = e.queue.next.of; e == nil {
		return
	}
	c.slots.Prefetch(e.slot)
	c.names.prefetch(e.hash)
	prefetch.Lines(unsafe.Pointer(e.queue.next), entryLines) // the one after it, whose slot is asked for the next time
}

// Of an entry, so many lines are touched when it goes and another comes. A link is where its entry begins.
const entryLines = 3

var (
	_ [0]struct{} = [unsafe.Offsetof(entry{}.queue)]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(entry{}) % prefetch.Line]struct{}{}
)

// planOn adds a victim to the plan: its blocks are free in the allocator, nothing else has changed.
func (c *Cache) planOn(v *entry) {
	v.planned = true
	c.plan = append(c.plan, v)
	c.giveBack(v.extents)
}

func (c *Cache) endPlan() {
	for _, v := range c.plan {
		v.planned = false
	}
	clear(c.plan)
	c.plan = c.plan[:0]
}

// spare takes a victim off the plan.
func (c *Cache) spare(v *entry) {
	c.takeBack(v.extents)
	if v.class == classLoose {
		c.evict.putBack(v)
	}
}

// nextVictim is the entry to go after those of the plan: by the policy, and when that has no more, the held one that was last
// announced longest ago.
func (c *Cache) nextVictim() *entry {
	if v := c.evict.next(); v != nil {
		return v
	}
	v := c.heldOrder.front()
	if last := len(c.plan) - 1; last >= 0 && c.plan[last].class == classHeld {
		v = c.heldOrder.after(&c.plan[last].held)
	}
	for v != nil && v.class != classHeld { // pinned, or being filled
		v = c.heldOrder.after(&v.held)
	}
	return v
}

// evictNow evicts an entry whose blocks are another's already, or free.
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

// planRun plans to free a run of n blocks around one of the first entries to go. With less than n blocks free the first has to go
// anyway, however large it is.
func (c *Cache) planRun(n, free int) bool {
	found := false
	for len(c.seeds) < maxSeeds && !found {
		seed := c.evict.next()
		if seed == nil {
			break
		}
		c.seeds = append(c.seeds, seed)
		limit := maxRunCost * n
		if free < n {
			limit = max(limit, seed.blocks)
		}
		found = c.runAround(seed, n, limit)
	}
	for _, seed := range c.seeds {
		if !seed.planned {
			c.evict.putBack(seed)
		}
	}
	clear(c.seeds)
	c.seeds = c.seeds[:0]
	return found
}

// reach is how far a run gets on one side of a seed by evicting a number of neighbours.
type reach struct {
	e     *entry // the last of them, nil for none
	run   int    // blocks, with the free ones beyond e
	evict int    // cost of those that go
}

// runAround plans the seed and those of its neighbours that make the cheapest run of n blocks with it, false if that costs more
// than limit. An entry that lies there in two pieces is counted twice: an estimate, on the safe side.
func (c *Cache) runAround(seed *entry, n, limit int) bool {
	best := limit - seed.blocks + 1
	if best <= 0 {
		return false
	}
	if len(seed.extents) == 1 && seed.blocks >= n {
		c.planOn(seed)
		return true
	}
	var left, right []*entry
	for _, x := range seed.extents {
		need := n - int(x.Count)
		c.left = c.reachFrom(c.left[:0], seed, int(x.Start), -1, need, best-1)
		c.right = c.reachFrom(c.right[:0], seed, int(x.Start+x.Count), 1, need, best-1)
		j := len(c.right) - 1
		for i, l := range c.left {
			if l.run+c.right[j].run < need {
				continue
			}
			for j > 0 && l.run+c.right[j-1].run >= need {
				j--
			}
			if cost := l.evict + c.right[j].evict; cost < best {
				best = cost
				left, right = neighbours(left, c.left[1:i+1]), neighbours(right, c.right[1:j+1])
			}
		}
	}
	if best > limit-seed.blocks {
		return false
	}
	c.planOn(seed)
	for _, side := range [][]*entry{left, right} {
		for _, v := range side {
			if !v.planned {
				c.planOn(v)
			}
		}
	}
	return true
}

func neighbours(to []*entry, side []reach) []*entry {
	to = to[:0]
	for _, r := range side {
		to = append(to, r.e)
	}
	return to
}

// reachFrom goes from block number at, an edge of the seed, to the left (dir -1) or right (1) until the run has need blocks, an
// entry may not go, or it would cost more than limit.
func (c *Cache) reachFrom(to []reach, seed *entry, at, dir, need, limit int) []reach {
	if dir < 0 {
		at--
	}
	var r reach
	for {
		for at >= 0 && at < c.blocks && c.edges[at] == 0 && r.run < need { // free: beside an edge or a free block
			r.run++
			at += dir
		}
		to = append(to, r)
		if r.run >= need || at < 0 || at >= c.blocks {
			return to
		}
		e := c.bySlot[c.edges[at]-1]
		if e.class != classLoose {
			return to
		}
		if e != seed {
			r.evict += c.evict.cost(e)
		}
		if r.evict > limit {
			return to
		}
		r.e = e
		for _, x := range e.extents {
			if first, last := int(x.Start), int(x.Start+x.Count)-1; first == at || last == at {
				r.run += int(x.Count)
				at += dir * int(x.Count)
				break
			}
		}
	}
}

// setEdges marks the first and last block of each of an entry's extents.
func (c *Cache) setEdges(e *entry, mark uint32) {
	for _, x := range e.extents {
		c.edges[x.Start] = mark
		c.edges[x.Start+x.Count-1] = mark
	}
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
