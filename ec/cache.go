// Package ec is the encoder cache: entries in a region (Cache), answering peers that pull them (Producer) and pulling from
// peers (Consumer).
package ec

import (
	"context"
	"errors"
	"time"

	"github.com/tensorferry/tensorferry/region"
)

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
)

// Spec says what an entry holds. Shape is [rows, width]; Bytes = rows x width x size of Dtype.
type Spec struct {
	Dtype string // as torch prints it
	Shape []int64
	Bytes int64
}

// State of an entry as callers see it.
type State uint8

const (
	Absent State = iota
	Filling
	Ready
)

func (s State) String() string { return "" }

// CacheOptions configure a Cache.
type CacheOptions struct {
	Region    *region.Region
	HoldLease time.Duration // life of a hold, default 120 s
	HoldShare float64       // part of the pool that held entries may take, default 0.5; over it the oldest hold is dropped
	// Evicted, if set, is called after an entry was evicted, outside the lock.
	Evicted func(key string, bytes int64)
}

// Cache keeps the entries of one pool. All methods are safe for concurrent use and do no I/O and no waiting: a call that cannot
// be served now says so at once.
type Cache struct{}

func NewCache(o CacheOptions) (*Cache, error) { return nil, ErrSpec }

// Reserve makes an entry that is being filled, evicting ready, unpinned, unheld entries (oldest first) if needed.
// ErrHeld: ready already, with the same spec. ErrPending: someone else is filling it (see Watch). ErrConflict, ErrFull,
// ErrTooLarge, ErrKey, ErrSpec. On any error nothing has changed, in particular nothing was evicted.
func (c *Cache) Reserve(key string, s Spec, owner uint64) (*Reservation, error) { return nil, ErrFull }

// Lookup never blocks.
func (c *Cache) Lookup(key string) (Info, State) { return Info{}, Absent }

// Pin keeps a ready entry where it is until the pin's Release. ErrMissing, ErrNotReady.
func (c *Cache) Pin(key string) (*Pin, error) { return nil, ErrMissing }

// Hold keeps an entry (ready or filling) from eviction for the hold's lease; each call adds one. ErrMissing.
func (c *Cache) Hold(key string) error { return ErrMissing }

// DropHold takes one hold off, if there is one.
func (c *Cache) DropHold(key string) {}

// Watch gives a channel that is closed at the next change of the key's state (committed, discarded, evicted).
func (c *Cache) Watch(key string) <-chan struct{} { return nil }

// Remove takes a ready, unpinned entry out. ErrMissing, ErrPinned.
func (c *Cache) Remove(key string) error { return ErrMissing }

// Entries is a snapshot in eviction order.
func (c *Cache) Entries() []Info { return nil }

// Stats is a snapshot.
func (c *Cache) Stats() Stats { return Stats{} }

// Info describes an entry.
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
}

// Stats counts.
type Stats struct {
	Blocks, FreeBlocks, QuarantinedBlocks, FillingBlocks, PinnedBlocks, HeldBlocks int
	Entries, Ready, Filling                                                        int
	Hits, Misses, Commits, Discards, Evictions, Full                               uint64
	Fragmented                                                                     uint64 // entries stored in more than one extent
}

// Reservation is the right to fill one entry. One goroutine uses it at a time.
type Reservation struct{}

func (r *Reservation) Info() Info { return Info{} }

// Buffers are the entry's bytes in the pool, one slice an extent, cut to Spec.Bytes in all. Writable until Commit, Discard or
// the quarantine's end.
func (r *Reservation) Buffers() [][]byte { return nil }

// Commit makes the entry ready. checksum nil: none is kept. ErrStale if it is over already.
func (r *Reservation) Commit(checksum *uint64) (Info, error) { return Info{}, ErrStale }

// Discard frees the extents at once: nobody may be writing them.
func (r *Reservation) Discard() {}

// Quarantine gives the key up but keeps the extents, which a transfer may still write. Settle frees them, exactly once.
func (r *Reservation) Quarantine() *Quarantined { return nil }

// Quarantined is memory that waits for a transfer to end.
type Quarantined struct{}

// Settle frees it. Idempotent.
func (q *Quarantined) Settle() {}

// Pin keeps one entry in place.
type Pin struct{}

func (p *Pin) Info() Info        { return Info{} }
func (p *Pin) Buffers() [][]byte { return nil }

// Release is idempotent.
func (p *Pin) Release() {}

var _ = context.Background
