// Package ec is the encoder cache: entries in a region (Cache), answering peers that pull them (Producer) and pulling from
// peers (Consumer).
package ec

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/region"
)

// Errors of this package. Errors returned wrap one of these and say for which key and why.
var (
	ErrMissing  = errors.New("ec: no such entry")
	ErrNotReady = errors.New("ec: entry is not ready")
	ErrHeld     = errors.New("ec: entry is already there")
	ErrPending  = errors.New("ec: entry is being filled by another")
	ErrConflict = errors.New("ec: key is there with another shape or dtype")
	ErrFull     = errors.New("ec: pool is full of entries that may not be evicted")
	ErrTooLarge = errors.New("ec: larger than the pool")
	ErrKey      = errors.New("ec: bad key")
	ErrSpec     = errors.New("ec: bad shape, dtype or size")
	ErrStale    = errors.New("ec: reservation or pin is over")
	ErrPinned   = errors.New("ec: entry is pinned")
	ErrOptions  = errors.New("ec: bad options")
)

// Defaults of CacheOptions.
const (
	DefaultHoldLease = 120 * time.Second
	DefaultHoldShare = 0.5
)

// maxAbsentWatches bounds what Watch remembers of keys that are not there; such keys come from outside and may never be.
const maxAbsentWatches = 4096

// State of an entry as callers see it.
type State uint8

const (
	Absent State = iota
	Filling
	Ready
)

// String gives "absent", "filling" or "ready".
func (s State) String() string {
	switch s {
	case Absent:
		return "absent"
	case Filling:
		return "filling"
	case Ready:
		return "ready"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// CacheOptions configure a Cache.
type CacheOptions struct {
	Region    *region.Region
	HoldLease time.Duration // life of a hold, default 120 s
	HoldShare float64       // part of the pool that held entries may take, in (0, 1], default 0.5; over it the oldest hold is dropped
	Policy    string        // which entries go when room is needed: PolicyFIFO, the default, or PolicySIEVE

	// Evicted, if set, is called after an entry was evicted, outside the lock, by the goroutine that needed the room and before
	// its Reserve returns. Calls made for several goroutines come in no fixed order.
	Evicted func(key string, bytes int64)
	// HoldDropped, if set, is called in the same way after an entry lost its holds before their time: to keep to HoldShare, or
	// to make room. In the second case Evicted is called too.
	HoldDropped func(key string, bytes int64)
}

// Info describes an entry. Spec.Shape and Extents are shared with the cache: read only.
type Info struct {
	Key         string
	Spec        Spec
	State       State
	Gen         uint64
	Slot        int
	Extents     []region.Extent
	Pins        int
	Holds       int
	Owner       uint64
	Checksum    uint64
	HasChecksum bool

	// Of the grants that a producer made of it: those there are, and of these the burned ones. Set by Producer.CountGrants only.
	Grants, Burned int
}

// Stats counts. Blocks = FreeBlocks + QuarantinedBlocks + FillingBlocks + the blocks of ready entries.
type Stats struct {
	Blocks, FreeBlocks, QuarantinedBlocks, FillingBlocks int
	PinnedBlocks                                         int // of entries with a pin
	HeldBlocks                                           int // of entries with a hold, filling and pinned ones too

	Entries, Ready, Filling int
	Quarantined             int // reservations given up that wait for Settle, and what AdoptCache withdrew and somebody may read
	Holds                   int

	Hits, Misses              uint64 // calls of Pin that found the entry ready, that did not
	Commits, Discards         uint64
	Quarantines               uint64
	Evictions                 uint64
	Full                      uint64 // calls of Reserve that ended with ErrFull
	Fragmented                uint64 // commits of entries that lie in more than one extent
	HoldsDropped, HoldsLapsed uint64 // before their lease ended, at its end
}

// slotTable is what the cache needs of region.SlotTable; tests record the order of writes through it.
type slotTable interface {
	Len() int
	Fill(i int, s *region.Slot) (uint64, error)
	Ready(i int, checksum uint64, hasChecksum bool)
	Free(i int)
	SetHolds(i int, n uint32)
	SetPins(i int, n uint32)
	SetGranted(i int, granted bool)
	Withdraw(i int)
	Prefetch(i int)
	Load(i int) (region.Slot, error)
}

// Cache keeps the entries of one pool. All methods are safe for concurrent use and do no I/O and no waiting: a call that cannot
// be served now says so at once.
//
// An entry is filling (reserved), then ready. A ready entry may be evicted unless it is pinned (somebody uses its bytes) or held
// (somebody was told of it and has yet to come). A hold only delays: where room is needed and nothing else may go, held entries
// go too. A pin is kept.
type Cache struct {
	opt        CacheOptions
	pool       []byte
	blockBytes int64
	blocks     int
	maxHeld    int       // blocks that held entries may take
	start      time.Time // holds count from here, on the monotonic clock

	mu           sync.Mutex
	slots        slotTable
	alloc        *region.Allocator
	names        index         // filling and ready entries
	bySlot       []*entry      // also quarantined
	edges        []uint32      // by block: slot + 1 at the first and last block of each extent, 0 within and where it is free
	freeSlots    []int32       // a stack, as the next
	idle         []*entry      // that are in no slot
	reservations []Reservation // not used yet
	filling      region.Slot   // of enter
	shape        *[2]int64     // that was made last: the next entry often has the same
	evict        policy
	holds        ring[hold]  // by age, all leases being equal also by end
	heldOrder    ring[entry] // entries with a hold, by their newest
	held         tally       // what heldOrder has
	tally        [classes]tally
	plan         []*entry // of makeRoom; this and the next four are kept for their memory
	seeds        []*entry // of planRun
	found        [region.MaxExtents]region.Extent
	left, right  []reach
	stuck        int    // so many blocks, or more, are known not to fit in MaxExtents pieces even if all that may go went
	seq          uint64 // of commits
	absent       map[string]chan struct{}
	stats        Stats // the counters only
}

// NewCache takes over a region that nobody else uses and whose slots are all free. The region must outlive the cache.
func NewCache(o CacheOptions) (*Cache, error) {
	if o.Region == nil {
		return nil, fmt.Errorf("%w: no region", ErrOptions)
	}
	g := o.Region.Geometry()
	return newCache(o, g, o.Region.Pool(), o.Region.Slots())
}

func newCache(o CacheOptions, g region.Geometry, pool []byte, slots slotTable) (*Cache, error) {
	c, err := bareCache(o, g, pool, slots)
	if err != nil {
		return nil, err
	}
	for i := slots.Len() - 1; i >= 0; i-- { // the lowest slots are used first
		s, err := slots.Load(i)
		if err != nil {
			return nil, fmt.Errorf("ec: slot %d: %w", i, err)
		}
		if s.State != region.SlotFree {
			return nil, fmt.Errorf("%w: slot %d of the region is in use (key %q); its blocks cannot be given away", ErrOptions, i, s.Key)
		}
		c.freeSlots = append(c.freeSlots, int32(i))
	}
	return c, nil
}

// bareCache knows nothing of the slots yet, not even which are free.
func bareCache(o CacheOptions, g region.Geometry, pool []byte, slots slotTable) (*Cache, error) {
	if o.HoldLease == 0 {
		o.HoldLease = DefaultHoldLease
	}
	if o.HoldShare == 0 {
		o.HoldShare = DefaultHoldShare
	}
	if o.HoldLease < 0 {
		return nil, fmt.Errorf("%w: HoldLease %v; give a time above 0", ErrOptions, o.HoldLease)
	}
	if !(o.HoldShare > 0 && o.HoldShare <= 1) { // NaN too
		return nil, fmt.Errorf("%w: HoldShare %v; give a part of the pool above 0, at most 1", ErrOptions, o.HoldShare)
	}
	if g.Blocks <= 0 || g.BlockBytes <= 0 || slots.Len() <= 0 || int64(len(pool)) < g.PoolBytes() {
		return nil, fmt.Errorf("%w: region of %d blocks of %d bytes, %d slots, %d bytes mapped", ErrOptions, g.Blocks, g.BlockBytes, slots.Len(), len(pool))
	}
	evict, err := newPolicy(o.Policy)
	if err != nil {
		return nil, err
	}
	c := &Cache{
		opt:        o,
		pool:       pool,
		blockBytes: g.BlockBytes,
		blocks:     g.Blocks,
		maxHeld:    int(o.HoldShare * float64(g.Blocks)),
		start:      time.Now(),
		slots:      slots,
		alloc:      region.NewAllocator(g.Blocks),
		bySlot:     make([]*entry, slots.Len()),
		edges:      make([]uint32, g.Blocks),
		freeSlots:  make([]int32, 0, slots.Len()),
		evict:      evict,
		shape:      new([2]int64),
		stuck:      noneStuck,
		absent:     make(map[string]chan struct{}),
	}
	c.names = newIndex(c.bySlot)
	return c, nil
}

// Lookup tells what is known of a key. It counts as no use of the entry.
func (c *Cache) Lookup(key string) (Info, State) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lapseHolds()
	e := c.find(key)
	if e == nil {
		return Info{}, Absent
	}
	return e.info(), e.state()
}

// Pin keeps a ready entry where it is until the pin's Release. ErrMissing, ErrNotReady.
func (c *Cache) Pin(key string) (*Pin, error) {
	c.mu.Lock()
	e := c.find(key)
	if e == nil || e.phase != phaseReady {
		c.stats.Misses++
		c.mu.Unlock()
		if e == nil {
			return nil, fmt.Errorf("%w: %q", ErrMissing, key)
		}
		return nil, fmt.Errorf("%w: %q", ErrNotReady, key)
	}
	c.stats.Hits++
	c.evict.hit(e)
	e.pins++
	if e.pins == 1 {
		c.reclass(e)
	}
	c.mu.Unlock()
	return &Pin{e: e}, nil
}

// Remove takes a ready, unpinned entry out, held or not. ErrMissing, ErrNotReady, ErrPinned.
func (c *Cache) Remove(key string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.find(key)
	switch {
	case e == nil:
		return fmt.Errorf("%w: %q", ErrMissing, key)
	case e.phase != phaseReady:
		return fmt.Errorf("%w: %q", ErrNotReady, key)
	case e.pins > 0:
		return fmt.Errorf("%w: %q, by %d", ErrPinned, key, e.pins)
	}
	c.unname(e, phaseGone)
	c.vacate(e)
	c.giveBack(e.extents)
	return nil
}

// Watch gives a channel that is closed at the next change of the key's state: committed, discarded or quarantined, evicted or
// removed. For a key that is not there it is the end of the next reservation of it. To wait for a state: Watch, then look, then
// wait, in a loop. A channel may be closed without a change when very many absent keys are watched.
func (c *Cache) Watch(key string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.find(key); e != nil {
		if e.watch == nil {
			e.watch = make(chan struct{})
		}
		return e.watch
	}
	if w := c.absent[key]; w != nil {
		return w
	}
	if len(c.absent) >= maxAbsentWatches {
		for _, w := range c.absent {
			close(w)
		}
		clear(c.absent)
	}
	w := make(chan struct{})
	c.absent[key] = w
	return w
}

// Entries is a snapshot: the ready entries in the order in which they became ready, then those being filled.
func (c *Cache) Entries() []Info {
	type item struct {
		seq  uint64
		info Info
	}
	c.mu.Lock()
	c.lapseHolds()
	items := make([]item, 0, c.names.len)
	for _, e := range c.bySlot {
		if e != nil && e.phase != phaseQuarantined {
			items = append(items, item{e.seq, e.info()})
		}
	}
	c.mu.Unlock()

	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(-cmp.Compare(a.info.State, b.info.State), cmp.Compare(a.seq, b.seq), cmp.Compare(a.info.Gen, b.info.Gen))
	})
	infos := make([]Info, len(items))
	for i := range items {
		infos[i] = items[i].info
	}
	return infos
}

// Stats is a snapshot.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lapseHolds()
	s := c.stats
	s.Blocks = c.blocks
	s.FreeBlocks = c.alloc.FreeBlocks()
	s.QuarantinedBlocks = c.tally[classQuarantined].blocks
	s.Quarantined = c.tally[classQuarantined].entries
	s.FillingBlocks = c.tally[classFilling].blocks
	s.Filling = c.tally[classFilling].entries
	s.PinnedBlocks = c.tally[classPinned].blocks
	s.HeldBlocks = c.held.blocks
	s.Holds = c.holds.len
	s.Entries = c.names.len
	s.Ready = s.Entries - s.Filling
	return s
}

// Pin keeps one entry in place.
type Pin struct {
	e    *entry
	over bool // under the cache's lock, as stored

	stored  bool // counted in entry.stored
	granted bool // counted in entry.granted
}

// Info describes the entry as it is now. After Release: Absent, and nothing else.
func (p *Pin) Info() Info {
	p.e.c.mu.Lock()
	defer p.e.c.mu.Unlock()
	if p.over {
		return Info{}
	}
	return p.e.info()
}

// Buffers are the entry's bytes in the pool, one slice an extent, cut to Spec.Bytes in all. They may be read, not written,
// until Release; nil after it.
func (p *Pin) Buffers() [][]byte {
	p.e.c.mu.Lock()
	defer p.e.c.mu.Unlock()
	if p.over {
		return nil
	}
	return p.e.c.buffers(p.e.extents, p.e.bytes)
}

// Release is idempotent.
func (p *Pin) Release() {
	e := p.e
	e.c.mu.Lock()
	defer e.c.mu.Unlock()
	if p.over {
		return
	}
	p.over = true
	p.unkeep()
	p.ungrant()
	e.pins--
	if e.pins == 0 {
		e.c.unpinned(e)
	}
}
