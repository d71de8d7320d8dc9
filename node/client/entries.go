package client

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// Reserve asks for an extent to fill. Errors wrap those of package ec: ErrHeld (there is nothing to do), ErrPending (another
// engine fills it: wait with WaitReady), ErrConflict, ErrFull, ErrTooLarge.
func (c *Client) Reserve(ctx context.Context, key string, s ec.Spec) (*Reservation, error) {
	r, err := c.one(ctx, ReserveOp(key, s))
	return r.Reservation, err
}

// Reservation is an extent of the mapped pool to fill. One goroutine uses it at a time.
type Reservation struct {
	c       *Client
	mapping *mapping
	key     string
	buffers [][]byte
	over    atomic.Bool

	// Under Client.mu.
	link      *link // that handle is of; nil: the node does not know it any more
	handle    uint64
	info      ec.Info
	committed bool // by a node that was gone before it said so
}

// Key is what was reserved.
func (r *Reservation) Key() string { return r.key }

// Buffers are the entry's bytes in the pool, one slice an extent, Spec.Bytes in all. They may be written until Commit or Discard
// is called.
func (r *Reservation) Buffers() [][]byte { return r.buffers }

// Commit makes the entry ready: all bytes must be in place, and none is written after the call. ec.ErrStale if it is over already,
// or the node was gone for so long that others could have the key. The reservation is over after the call, whatever the error: if ctx
// ends during the call, or the connection is lost, the entry is committed or discarded; if it had ended before, it is discarded.
func (r *Reservation) Commit(ctx context.Context) error {
	_, err := r.c.one(ctx, CommitOp(r))
	return err
}

// Discard gives the extent back: nothing may write it any more, whatever the error. ec.ErrStale if the reservation is over already.
func (r *Reservation) Discard(ctx context.Context) error {
	_, err := r.c.one(ctx, DiscardOp(r))
	return err
}

// drop is Discard without waiting for the node.
func (r *Reservation) drop() {
	if r.over.Swap(true) {
		return
	}
	c := r.c
	c.mu.Lock()
	delete(c.filled, r)
	l, handle := r.link, r.handle
	shed := c.unused(r.mapping)
	c.mu.Unlock()
	if shed {
		c.shed()
	}
	if l != nil {
		c.post(l, []api.Op{{Kind: api.OpDiscard, Key: r.key, Handle: handle}})
	}
}

// Put is Reserve, copy, Commit. Putting a key that is held with the same spec is no error (held is true).
func (c *Client) Put(ctx context.Context, key string, s ec.Spec, data []byte) (held bool, err error) {
	if int64(len(data)) != s.Bytes {
		return false, fmt.Errorf("put %q: %w: %d bytes given, the spec says %d", key, ec.ErrSpec, len(data), s.Bytes)
	}
	r, err := c.Reserve(ctx, key, s)
	if api.CodeOf(err) == api.CodeHeld {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	if err := c.fill(r, data); err != nil {
		return false, fmt.Errorf("put %q: %w", key, err)
	}
	return false, r.Commit(ctx)
}

// fill copies while Close waits.
func (c *Client) fill(r *Reservation, data []byte) error {
	c.memory.RLock()
	defer c.memory.RUnlock()
	if c.mapping == nil {
		return ErrClosed
	}
	for _, b := range r.buffers {
		data = data[copy(b, data):]
	}
	return nil
}

// AnnounceItem is one key to announce. A key that is not held is announced without an address.
type AnnounceItem struct {
	Key         string
	ItemIndices []int
	Metadata    json.RawMessage // a JSON object of at most 64 KiB; nil is {}
}

// Announce takes a hold on each key and gives the ec_transfer_params map, in the order of items. An item that the node refuses is
// an error of the whole; holds taken for the others end with their lease. More keys than one map may have (wire.MaxEntries), which no peer
// would take, are ErrLimit, and nothing is held.
func (c *Client) Announce(ctx context.Context, items []AnnounceItem) (ec.Params, error) {
	if len(items) > wire.MaxEntries {
		return ec.Params{}, fmt.Errorf("%w: %d keys to announce, at most %d in one ec_transfer_params: announce them in parts", ErrLimit, len(items), wire.MaxEntries)
	}
	ops := make([]Op, len(items))
	for i, item := range items {
		ops[i] = AnnounceOp(item)
	}
	results, err := c.Batch(ctx, ops...)
	if err != nil {
		return ec.Params{}, err
	}
	var p ec.Params
	for i := range results {
		if results[i].Err != nil {
			return ec.Params{}, results[i].Err
		}
		p.Set(items[i].Key, results[i].Announcement)
	}
	return p, nil
}

// Map pins a ready entry and gives its bytes where they are in the pool. ErrMissing, ErrNotReady.
func (c *Client) Map(ctx context.Context, key string) (*Mapped, error) {
	r, err := c.one(ctx, MapOp(key))
	return r.Mapped, err
}

// Mapped is a pinned entry. Read only: the pool is shared by all engines of the machine.
type Mapped struct {
	c       *Client
	mapping *mapping
	info    ec.Info
	buffers [][]byte
	over    atomic.Bool

	// Under Client.mu.
	link   *link // that handle is of; nil: no node knows the pin
	handle uint64
}

// Spec says what the entry holds.
func (m *Mapped) Spec() ec.Spec { return m.info.Spec }

// Info is the entry as it was when it was mapped.
func (m *Mapped) Info() ec.Info { return m.info }

// Buffers are the entry's bytes, one slice an extent, Spec.Bytes in all. They stay as they are until Release.
func (m *Mapped) Buffers() [][]byte { return m.buffers }

// Valid is nil if the buffers hold the entry now, as they do until Release unless a node was gone for good: restarted without its
// region, or so late that the pin could not be restated. Called after the bytes were copied or used, it vouches for the copy. It
// reads the slot in place and asks nobody. ec.ErrStale, ErrClosed.
func (m *Mapped) Valid() error {
	m.c.memory.RLock()
	defer m.c.memory.RUnlock()
	switch {
	case m.c.mapping == nil:
		return ErrClosed
	case m.over.Load() || m.mapping.table == nil:
		return fmt.Errorf("%q: %w: released", m.info.Key, ec.ErrStale)
	case !m.mapping.table.Check(m.info.Slot, m.info.Gen):
		return fmt.Errorf("%q: %w: its blocks are another's since a node was lost", m.info.Key, ec.ErrStale)
	}
	return nil
}

// Release lets the entry go. It does not wait for the node. Idempotent.
func (m *Mapped) Release() {
	if m.over.Swap(true) {
		return
	}
	c := m.c
	c.mu.Lock()
	delete(c.pinned, m)
	l, handle := m.link, m.handle
	shed := c.unused(m.mapping)
	c.mu.Unlock()
	if shed {
		c.shed()
	}
	if l != nil {
		c.post(l, []api.Op{{Kind: api.OpRelease, Key: m.info.Key, Handle: handle}})
	}
}

// Lookup says what the pool knows of each key; State is ec.Absent for one that it does not know. It never waits for anybody who
// fills.
func (c *Client) Lookup(ctx context.Context, keys ...string) ([]ec.Info, error) {
	ops := make([]Op, len(keys))
	for i, k := range keys {
		ops[i] = LookupOp(k)
	}
	results, err := c.Batch(ctx, ops...)
	if err != nil {
		return nil, err
	}
	infos := make([]ec.Info, len(results))
	for i := range results {
		if results[i].Err != nil {
			return nil, results[i].Err
		}
		infos[i] = results[i].Info
	}
	return infos, nil
}

// Remove takes a ready, unpinned entry out of the pool. ErrMissing, ErrNotReady, ErrPinned of package ec.
func (c *Client) Remove(ctx context.Context, key string) error {
	_, err := c.one(ctx, RemoveOp(key))
	return err
}

// Stats are the pool's counters.
func (c *Client) Stats(ctx context.Context) (ec.Stats, error) {
	r, err := c.one(ctx, StatsOp())
	return r.Stats, err
}
