package ec

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/tensorferry/tensorferry/region"
)

// Adopted says what AdoptCache found in the region.
type Adopted struct {
	Entries  int      // ready ones that are served again
	Bytes    int64    // of these
	Verified int      // of these, by their checksum
	Corrupt  []string // keys of ready entries whose bytes did not match their checksum: withdrawn
	Dropped  int      // other ready entries that cannot be served: withdrawn
	Freed    int      // reservations of the dead owner itself, freed

	// Filling is what clients were filling. A client that lives may still write there, so the blocks stay as they are and others
	// who want the key find it pending, until the caller calls: Commit or Discard, for a client that has come back; Quarantine, to
	// give the key to others and keep the blocks; Quarantine and Settle, for a client that is dead. Where the key has another
	// entry, the reservation is quarantined already and Commit says ErrStale.
	Filling []*Reservation
	// Pinned has a pin for each entry that clients had pinned. The caller releases them when none of these clients can have the
	// entry in use any more.
	Pinned []*Pin
	// Granted has a pin for each entry that plain peers may still READ by an agent of the dead owner. The caller releases them when
	// no such agent lives any more.
	//
	// Entries that were withdrawn are among both: nobody finds them, and their blocks are free once the last of their pins is released.
	Granted []*Pin
}

// AdoptCache is NewCache for a region that region.Take gave, whether adopted or new. Ready entries are served again, in order of
// their generations; holds start a fresh lease. Entries that have a checksum are verified before it returns, on all processors;
// when ctx ends first, so does the call. The region's slot table must be sound, as Take has seen to.
func AdoptCache(ctx context.Context, o CacheOptions) (*Cache, *Adopted, error) {
	if o.Region == nil {
		return nil, nil, fmt.Errorf("%w: no region", ErrOptions)
	}
	return adoptCache(ctx, o, o.Region.Geometry(), o.Region.Pool(), o.Region.Slots())
}

func adoptCache(ctx context.Context, o CacheOptions, g region.Geometry, pool []byte, slots slotTable) (*Cache, *Adopted, error) {
	c, err := bareCache(o, g, pool, slots)
	if err != nil {
		return nil, nil, err
	}
	a := &adoption{c: c, named: make(map[string]bool)}
	if err := a.scan(); err != nil {
		return nil, nil, err
	}
	a.choose()
	if err := a.verify(ctx); err != nil {
		return nil, nil, err
	}
	if err := a.enter(); err != nil {
		return nil, nil, err
	}
	a.holds()
	slices.Sort(c.freeSlots)
	slices.Reverse(c.freeSlots) // the lowest are used first
	return c, &a.Adopted, nil
}

// adoption is one call of AdoptCache.
type adoption struct {
	Adopted
	c              *Cache
	ready, filling []found
	withdrawn      []found         // that somebody may be reading
	named          map[string]bool // keys of chosen ready entries
	entries        []*entry        // those with holds
}

// found is a slot in use.
type found struct {
	region.Slot
	slot int
}

// inUse says whether somebody who was told of the entry may be reading it.
func (f *found) inUse() bool { return f.Pins > 0 || f.Slot.Granted }

func (a *adoption) free(slot int) {
	a.c.slots.Free(slot)
	a.c.freeSlots = append(a.c.freeSlots, int32(slot))
}

// withdraw takes a ready entry out. Its blocks are free only if nobody may be reading them: a plain peer takes whatever it READs for what
// it was granted.
func (a *adoption) withdraw(f found) {
	if !f.inUse() {
		a.free(f.slot)
		return
	}
	a.c.slots.SetHolds(f.slot, 0)
	f.Holds = 0
	a.c.slots.Withdraw(f.slot)
	a.withdrawn = append(a.withdrawn, f)
}

// scan sorts slots by what they hold.
func (a *adoption) scan() error {
	for i := range a.c.slots.Len() {
		s, err := a.c.slots.Load(i)
		switch {
		case err != nil:
			return fmt.Errorf("ec: slot %d: %w", i, err)
		case s.State == region.SlotFree:
			a.c.freeSlots = append(a.c.freeSlots, int32(i))
		case s.State == region.SlotReady:
			a.ready = append(a.ready, found{s, i})
		case s.Pins > 0 || s.Granted: // withdrawn by an owner before
			a.withdrawn = append(a.withdrawn, found{s, i})
		case s.Key == "" || s.Owner == 0: // torn, or being filled by the dead owner itself
			a.free(i)
			a.Freed++
		default:
			a.filling = append(a.filling, found{s, i})
		}
	}
	return nil
}

// choose drops ready entries that cannot be served: of two of one key the older.
func (a *adoption) choose() {
	slices.SortFunc(a.ready, func(x, y found) int { return cmp.Compare(y.Gen, x.Gen) })
	a.ready = slices.DeleteFunc(a.ready, func(f found) bool {
		if a.named[f.Key] || !servable(f.Slot) {
			a.withdraw(f)
			a.Dropped++
			return true
		}
		a.named[f.Key] = true
		return false
	})
}

func servable(s region.Slot) bool {
	spec, err := checkSpec(Spec{Dtype: s.Dtype, Shape: s.Shape, Bytes: s.Bytes})
	return err == nil && spec.Dtype == s.Dtype && checkKey(s.Key) == nil
}

// verify drops ready entries whose bytes are not what was committed.
func (a *adoption) verify(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	var mu sync.Mutex
	wrong := make(map[int]bool)
	for _, f := range a.ready {
		if !f.HasChecksum {
			continue
		}
		a.Verified++
		g.Go(func() error {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if checksum(a.c.buffers(f.Extents, f.Bytes)) != f.Checksum {
				mu.Lock()
				wrong[f.slot] = true
				mu.Unlock()
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("ec: verifying adopted entries: %w", err)
	}
	a.Verified -= len(wrong)
	a.ready = slices.DeleteFunc(a.ready, func(f found) bool {
		if wrong[f.slot] {
			a.withdraw(f)
			a.Corrupt = append(a.Corrupt, f.Key)
			delete(a.named, f.Key)
		}
		return wrong[f.slot]
	})
	return nil
}

// enter makes entries of what is left.
func (a *adoption) enter() error {
	slices.Reverse(a.ready) // the oldest is the first to go
	for _, f := range a.ready {
		e, err := a.entry(f, phaseReady)
		if err != nil {
			return err
		}
		a.c.seq++
		e.seq = a.c.seq
		e.sum, e.hasSum = f.Checksum, f.HasChecksum
		a.c.names.put(e, a.c.names.hash(e.key))
		a.c.evict.add(e)
		a.pin(e, f)
		a.c.reclass(e)
		a.Entries++
		a.Bytes += f.Bytes
	}
	for _, f := range a.withdrawn {
		e, err := a.entry(f, phaseQuarantined)
		if err != nil {
			return err
		}
		a.pin(e, f)
		a.c.reclass(e)
	}
	slices.SortFunc(a.filling, func(x, y found) int { return cmp.Compare(y.Gen, x.Gen) })
	for _, f := range a.filling {
		phase := phaseFilling
		if a.named[f.Key] || !servable(f.Slot) { // given up by its owner before that died
			phase = phaseQuarantined
		}
		e, err := a.entry(f, phase)
		if err != nil {
			return err
		}
		if phase == phaseFilling {
			a.named[f.Key] = true
			a.c.names.put(e, a.c.names.hash(e.key))
		}
		a.c.reclass(e)
		a.Filling = append(a.Filling, &Reservation{e, e.gen})
	}
	return nil
}

// pin makes the pins for those who may be reading an entry.
func (a *adoption) pin(e *entry, f found) {
	if f.Pins > 0 {
		e.pins++
		p := &Pin{e: e}
		p.keep()
		a.Pinned = append(a.Pinned, p)
	}
	if f.Slot.Granted {
		e.pins++
		p := &Pin{e: e}
		p.grant()
		a.Granted = append(a.Granted, p)
	}
}

// entry takes the blocks of a slot.
func (a *adoption) entry(f found, p phase) (*entry, error) {
	c := a.c
	if err := c.alloc.Take(f.Extents); err != nil {
		return nil, fmt.Errorf("ec: slot %d (%q): %w", f.slot, f.Key, err)
	}
	e := c.newEntry()
	e.key, e.dtype, e.bytes, e.slot, e.gen, e.owner, e.phase, e.extents = f.Key, f.Dtype, f.Bytes, f.slot, f.Gen, f.Owner, p, f.Extents
	e.blocks = 0
	for _, x := range f.Extents {
		e.blocks += int(x.Count)
	}
	e.shape = new([2]int64)
	copy(e.shape[:], f.Shape)
	c.bySlot[f.slot] = e
	c.setEdges(e, uint32(f.slot)+1)
	if f.Holds > 0 && p != phaseQuarantined {
		e.holds = int32(min(f.Holds, maxHoldsOfEntry)) // what it had: holds makes them anew
		a.entries = append(a.entries, e)
	}
	return e, nil
}

// holds starts fresh leases, as many as an entry had and the share allows, the newest entries first.
func (a *adoption) holds() {
	c := a.c
	slices.SortFunc(a.entries, func(x, y *entry) int { return cmp.Compare(y.gen, x.gen) })
	keep, blocks := len(a.entries), 0
	for i, e := range a.entries {
		if blocks += e.blocks; blocks > c.maxHeld {
			keep = i
			break
		}
	}
	for _, e := range a.entries[keep:] {
		c.setHolds(e, 0)
	}
	a.entries = a.entries[:keep]
	slices.Reverse(a.entries)
	for _, e := range a.entries {
		n := e.holds
		for e.holds = 0; e.holds < n; {
			c.addHold(e)
		}
	}
}

// Keep records the pin in the region as a client's. Should this process die, whoever adopts the region finds the entry in
// Adopted.Pinned. Idempotent; without effect after Release.
func (p *Pin) Keep() {
	p.e.c.mu.Lock()
	defer p.e.c.mu.Unlock()
	if !p.over && !p.stored {
		p.keep()
	}
}

func (p *Pin) keep() {
	p.stored = true
	p.e.stored++
	p.e.c.slots.SetPins(p.e.slot, uint32(p.e.stored))
}

// KeepGranted records in the region that a plain peer may READ the entry for as long as the pin is held. Should this process die,
// whoever adopts the region finds the entry in Adopted.Granted. Call it before the peer is told. Idempotent; without effect after
// Release.
func (p *Pin) KeepGranted() {
	p.e.c.mu.Lock()
	defer p.e.c.mu.Unlock()
	if !p.over && !p.granted {
		p.grant()
	}
}

func (p *Pin) grant() {
	p.granted = true
	if p.e.granted++; p.e.granted == 1 {
		p.e.c.slots.SetGranted(p.e.slot, true)
	}
}

// ungrant is called by Release.
func (p *Pin) ungrant() {
	if !p.granted {
		return
	}
	if p.e.granted--; p.e.granted == 0 && !p.settles() {
		p.e.c.slots.SetGranted(p.e.slot, false)
	}
}

// unkeep is called by Release.
func (p *Pin) unkeep() {
	if !p.stored {
		return
	}
	if p.e.stored--; !p.settles() {
		p.e.c.slots.SetPins(p.e.slot, uint32(p.e.stored))
	}
}

// settles says that the slot of a withdrawn entry is freed with this pin, in one store: without pins and grants it would look like a
// client's reservation.
func (p *Pin) settles() bool { return p.e.phase == phaseQuarantined && p.e.pins == 1 }

// unpinned is called when an entry has lost its last pin.
func (c *Cache) unpinned(e *entry) {
	if e.phase == phaseQuarantined {
		c.settle(e)
		return
	}
	c.reclass(e)
}
