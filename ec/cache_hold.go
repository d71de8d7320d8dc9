package ec

import (
	"fmt"
	"time"
)

// maxHoldsOfEntry bounds the memory that announcing one key again and again can take. The oldest hold makes place: the entry
// stays held, for longer if anything.
const maxHoldsOfEntry = 4096

// hold is the promise made by one announcement.
type hold struct {
	e     *entry
	until time.Duration // since Cache.start
	order link[hold]    // in Cache.holds
	next  *hold         // the entry's next younger one
}

// Hold keeps an entry (ready or filling) from eviction for the hold's lease; each call adds one. ErrMissing.
//
// Held entries take at most HoldShare of the pool. Over it the entry that was last announced longest ago loses its holds; that
// is this one at once if it alone is larger than the share.
func (c *Cache) Hold(key string) error {
	c.mu.Lock()
	c.lapseHolds()
	e := c.find(key)
	if e == nil {
		c.mu.Unlock()
		return fmt.Errorf("%w: %q", ErrMissing, key)
	}
	var gone []notice
	if e.blocks > c.maxHeld {
		c.stats.HoldsDropped++
		gone = c.noteHold(gone, e)
	} else {
		if e.holds == maxHoldsOfEntry {
			c.unhold(e)
			c.stats.HoldsDropped++
		}
		c.addHold(e)
		for c.held.blocks > c.maxHeld {
			old := c.heldOrder.front()
			c.stats.HoldsDropped += uint64(old.holds)
			c.dropHolds(old)
			gone = c.noteHold(gone, old)
		}
	}
	c.mu.Unlock()
	c.notify(gone)
	return nil
}

// DropHold takes the oldest hold off, if there is one.
func (c *Cache) DropHold(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lapseHolds()
	if e := c.find(key); e != nil && e.holds > 0 {
		c.unhold(e)
	}
}

func (c *Cache) addHold(e *entry) {
	h := &hold{e: e, until: time.Since(c.start) + c.opt.HoldLease}
	c.holds.pushBack(h, &h.order)
	if e.newest == nil {
		e.oldest = h
		c.held.add(e)
	} else {
		e.newest.next = h
		c.heldOrder.remove(&e.held)
	}
	e.newest = h
	c.heldOrder.pushBack(e, &e.held)
	c.setHolds(e, e.holds+1)
}

// unhold takes the oldest hold off e, which has one.
func (c *Cache) unhold(e *entry) {
	h := e.oldest
	c.holds.remove(&h.order)
	e.oldest = h.next
	if e.oldest == nil {
		e.newest = nil
		c.heldOrder.remove(&e.held)
		c.held.take(e)
	}
	c.setHolds(e, e.holds-1)
}

// dropHolds takes all holds off e.
func (c *Cache) dropHolds(e *entry) {
	if e.holds == 0 {
		return
	}
	for h := e.oldest; h != nil; h = h.next {
		c.holds.remove(&h.order)
	}
	e.oldest, e.newest = nil, nil
	c.heldOrder.remove(&e.held)
	c.held.take(e)
	c.setHolds(e, 0)
}

func (c *Cache) setHolds(e *entry, n int32) {
	e.holds = n
	c.slots.SetHolds(e.slot, uint32(n))
	c.reclass(e)
}

// lapseHolds ends the holds whose lease is over. It is called first by all that depends on holds, so no timer is needed.
func (c *Cache) lapseHolds() {
	h := c.holds.front()
	if h == nil {
		return
	}
	for now := time.Since(c.start); h != nil && h.until <= now; h = c.holds.front() {
		c.unhold(h.e)
		c.stats.HoldsLapsed++
	}
}

// notice is a call of a callback that is due once the lock is free.
type notice struct {
	call  func(string, int64)
	key   string
	bytes int64
}

func (c *Cache) noteHold(to []notice, e *entry) []notice {
	return note(to, c.opt.HoldDropped, e)
}

func note(to []notice, call func(string, int64), e *entry) []notice {
	if call == nil {
		return to
	}
	return append(to, notice{call, e.key, e.bytes})
}

func (c *Cache) notify(due []notice) {
	for _, n := range due {
		n.call(n.key, n.bytes)
	}
}
