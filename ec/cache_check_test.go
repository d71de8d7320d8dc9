package ec

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
)

// check compares all that the cache keeps in more than one place: blocks are free, or in one entry, or in one quarantine;
// the slot table agrees with the entries, the counters with both, and everything that may be evicted has its turn.
func (c *Cache) check() error {
	c.mu.Lock()
	defer c.mu.Unlock()

	owner := make([]*entry, c.blocks)
	var tallies [classes]tally
	var held tally
	used, named, holds, queued := 0, 0, 0, 0
	for slot, e := range c.bySlot {
		s, err := c.slots.Load(slot)
		if err != nil {
			return fmt.Errorf("slot %d: %w", slot, err)
		}
		if e == nil {
			if s.State != region.SlotFree || !slices.Contains(c.freeSlots, int32(slot)) {
				return fmt.Errorf("slot %d has no entry, state %d, not on the stack of free slots", slot, s.State)
			}
			continue
		}
		want := region.Slot{
			State: region.SlotFilling, Gen: e.gen, Key: e.key, Dtype: e.dtype, Shape: e.shape[:], Bytes: e.bytes,
			Extents: e.extents, Owner: e.owner, Holds: uint32(e.holds), Pins: uint32(e.stored), Granted: e.granted > 0,
		}
		if e.hasSum {
			want.Checksum, want.HasChecksum = e.sum, true
		}
		if e.phase == phaseReady {
			want.State = region.SlotReady
		}
		if fmt.Sprint(s) != fmt.Sprint(want) {
			return fmt.Errorf("slot %d says %+v, its entry %+v", slot, s, want)
		}
		if e.slot != slot || e.class != e.classify() || e.class == classGone || e.pins < 0 || e.planned {
			return fmt.Errorf("entry of slot %d: %+v", slot, e)
		}
		if e.phase != phaseQuarantined {
			named++
			if c.find(e.key) != e {
				return fmt.Errorf("entry %q of slot %d is not found by its key", e.key, slot)
			}
		}
		tallies[e.class].add(e)

		n, end := 0, uint32(0)
		for i, x := range e.extents {
			if i > 0 && x.Start < end || x.Count == 0 {
				return fmt.Errorf("extents of %q: %v", e.key, e.extents)
			}
			end = x.Start + x.Count
			n += int(x.Count)
			for b := x.Start; b < end; b++ {
				if owner[b] != nil {
					return fmt.Errorf("block %d is in %q and %q", b, owner[b].key, e.key)
				}
				owner[b] = e
			}
		}
		if n != e.blocks || len(e.extents) > region.MaxExtents || (e.bytes+c.blockBytes-1)/c.blockBytes != int64(n) {
			return fmt.Errorf("%q of %d bytes and %d blocks has extents %v", e.key, e.bytes, e.blocks, e.extents)
		}
		used += n

		mine := int32(0)
		for h := e.oldest; h != nil; h = h.next {
			mine++
			if h.e != e || !h.order.linked() || h.next == nil && h != e.newest || h.next != nil && h.until > h.next.until {
				return fmt.Errorf("hold %d of %q is out of order", mine, e.key)
			}
		}
		if mine != e.holds || mine > 0 != e.held.linked() {
			return fmt.Errorf("%q has %d holds, counts %d", e.key, mine, e.holds)
		}
		if mine > 0 {
			held.add(e)
		}
		holds += int(mine)

		in := e.queued()
		if in {
			queued++
		}
		if e.class == classLoose && !in || in && e.phase != phaseReady {
			return fmt.Errorf("%q, class %d: among those to evict: %v", e.key, e.class, in)
		}
	}
	if named != c.names.len {
		return fmt.Errorf("%d keys, %d entries with a name", c.names.len, named)
	}
	if tallies != c.tally || held != c.held || held.entries != c.heldOrder.len || holds != c.holds.len {
		return fmt.Errorf("tallies %v, counted %v; held %v, counted %v; holds %d, counted %d", c.tally, tallies, c.held, held, c.holds.len, holds)
	}
	if held.blocks > c.maxHeld {
		return fmt.Errorf("%d blocks held, at most %d", held.blocks, c.maxHeld)
	}
	if n := policyLen(c.evict); n != queued {
		return fmt.Errorf("the policy has %d entries, %d say so", n, queued)
	}
	var age time.Duration
	for h := c.holds.front(); h != nil; h = c.holds.after(&h.order) {
		if h.until < age {
			return fmt.Errorf("holds are not in the order of their ends")
		}
		age = h.until
	}

	for b, mark := range c.edges {
		want := uint32(0)
		if e := owner[b]; e != nil {
			for _, x := range e.extents {
				if uint32(b) == x.Start || uint32(b) == x.Start+x.Count-1 {
					want = uint32(e.slot) + 1
				}
			}
		}
		if mark != want {
			return fmt.Errorf("block %d is marked %d as an edge, want %d", b, mark, want)
		}
	}
	if len(c.plan) != 0 {
		return fmt.Errorf("a plan of %d victims is left", len(c.plan))
	}

	// What no entry has must be free in the allocator, to the block.
	if free := c.alloc.FreeBlocks(); free != c.blocks-used {
		return fmt.Errorf("%d blocks free, %d of %d in use", free, used, c.blocks)
	}
	for b := 0; b < c.blocks; b++ {
		if owner[b] == nil {
			x := []region.Extent{{Start: uint32(b), Count: 1}}
			if err := c.alloc.Take(x); err != nil {
				return fmt.Errorf("block %d is in no entry and not free: %w", b, err)
			}
			if err := c.alloc.Free(x); err != nil {
				return err
			}
		}
	}
	return nil
}

// policyLen is how many entries have their place in a policy.
func policyLen(p policy) int {
	if s, ok := p.(*sieve); ok {
		return s.orders[0].len() + s.orders[1].len()
	}
	return p.(*fifo).len()
}

// auditTable is a slot table in memory that checks what the file format asks of the order of writes.
type auditTable struct {
	t     interface{ Errorf(string, ...any) }
	slots []region.Slot
	gen   uint64
	used  map[uint32]int // block -> slot, from Fill to Free
}

func newAuditTable(t interface{ Errorf(string, ...any) }, n int) *auditTable {
	return &auditTable{t: t, slots: make([]region.Slot, n), used: map[uint32]int{}}
}

func (a *auditTable) Len() int { return len(a.slots) }

func (a *auditTable) Fill(i int, filled *region.Slot) (uint64, error) {
	s := *filled
	if a.slots[i].State != region.SlotFree {
		a.t.Errorf("Fill of slot %d, which is %+v", i, a.slots[i])
	}
	for _, x := range s.Extents {
		for b := x.Start; b < x.Start+x.Count; b++ {
			if o, ok := a.used[b]; ok {
				a.t.Errorf("Fill of slot %d with block %d, which slot %d still has", i, b, o)
			}
			a.used[b] = i
		}
	}
	a.gen++
	s.State, s.Gen = region.SlotFilling, a.gen
	s.Shape, s.Extents = slices.Clone(s.Shape), slices.Clone(s.Extents)
	a.slots[i] = s
	return a.gen, nil
}

func (a *auditTable) Ready(i int, checksum uint64, hasChecksum bool) {
	if a.slots[i].State != region.SlotFilling {
		a.t.Errorf("Ready of slot %d, which is %+v", i, a.slots[i])
	}
	a.slots[i].State, a.slots[i].Checksum, a.slots[i].HasChecksum = region.SlotReady, checksum, hasChecksum
}

func (a *auditTable) Free(i int) {
	if a.slots[i].State == region.SlotFree {
		a.t.Errorf("Free of slot %d, which is free", i)
	}
	for _, x := range a.slots[i].Extents {
		for b := x.Start; b < x.Start+x.Count; b++ {
			delete(a.used, b)
		}
	}
	a.slots[i] = region.Slot{}
}

func (a *auditTable) SetHolds(i int, n uint32) {
	if a.slots[i].State == region.SlotFree {
		a.t.Errorf("SetHolds of slot %d, which is free", i)
	}
	a.slots[i].Holds = n
}

func (a *auditTable) SetPins(i int, n uint32) {
	if s := a.slots[i]; s.State != region.SlotReady && !withdrawn(s) {
		a.t.Errorf("SetPins of slot %d, which is %+v", i, a.slots[i])
	}
	a.slots[i].Pins = n
}

func (a *auditTable) SetGranted(i int, granted bool) {
	if s := a.slots[i]; s.State != region.SlotReady && !withdrawn(s) {
		a.t.Errorf("SetGranted of slot %d, which is %+v", i, a.slots[i])
	}
	a.slots[i].Granted = granted
}

func (a *auditTable) Withdraw(i int) {
	s := &a.slots[i]
	if s.State = region.SlotFilling; !withdrawn(*s) {
		a.t.Errorf("Withdraw of slot %d, which is %+v", i, *s)
	}
	s.Checksum, s.HasChecksum = 0, false
}

// withdrawn tells a slot that was ready from one that is being filled.
func withdrawn(s region.Slot) bool {
	return s.State == region.SlotFilling && (s.Pins > 0 || s.Granted)
}

func (a *auditTable) Prefetch(int) {}

func (a *auditTable) Load(i int) (region.Slot, error) { return a.slots[i], nil }

const testBlock = 16 // bytes of a block in tests

// newTestCache makes a cache over memory of its own, which is checked when the test ends.
func newTestCache(t testing.TB, blocks, slots int, o CacheOptions) *Cache {
	t.Helper()
	g := region.Geometry{BlockBytes: testBlock, Blocks: blocks, Slots: slots}
	c, err := newCache(o, g, make([]byte, g.PoolBytes()), newAuditTable(t, slots))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.check(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// spec is that of n whole blocks.
func spec(n int) Spec {
	return Spec{Dtype: "torch.bfloat16", Shape: []int64{int64(n), testBlock / 2}, Bytes: int64(n) * testBlock}
}

func reserve(t testing.TB, c *Cache, key string, n int) *Reservation {
	t.Helper()
	r, err := c.Reserve(key, spec(n), 7)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// put makes a ready entry of n blocks.
func put(t testing.TB, c *Cache, key string, n int) Info {
	t.Helper()
	i, err := reserve(t, c, key, n).Commit(nil)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func pin(t testing.TB, c *Cache, key string) *Pin {
	t.Helper()
	p, err := c.Pin(key)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// keys are those of Entries.
func keys(c *Cache) []string {
	var k []string
	for _, i := range c.Entries() {
		k = append(k, i.Key)
	}
	return k
}

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
