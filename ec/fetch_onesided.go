package ec

import (
	"context"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// A pull that asks nobody. A peer whose region is attached here shows its slot table, and the announcement says which slot to look
// at. What the slot says is copied out of the pool, and then looked at again: if it still has the generation that it had before, its
// owner has not given a block of it to another entry meanwhile, so the bytes are the entry's. Nothing was granted and nothing is
// pinned, so the copy may be of anything until that second look, and nobody sees it before. Whatever does not fit (no such peer
// yet, another key in the slot, an entry that goes in the middle) is a pull of the usual kind.

// TryFetch is Fetch where no peer need be asked: the pool has the entry, or it can be read by what the announcement says of the
// producer's slot table, and is no larger than limit. It waits for nothing but the READ, which on such planes is a copy. False:
// nothing is known and nothing has changed; Fetch finds out.
func (c *Consumer) TryFetch(key string, a *Announcement, owner uint64, limit int64) (Result, bool) {
	if a == nil || a.Slot == nil || a.SizeBytes > limit {
		return Result{}, false
	}
	start := time.Now()
	r, ok := c.ready(key, a)
	if !ok {
		w, err := c.wanted(key, a)
		if err != nil {
			return Result{}, false
		}
		if r, ok = c.readOneSided(c.ctx, w, owner); !ok {
			return Result{}, false
		}
	}
	r.Key, r.Elapsed = key, time.Since(start)
	c.stats.outcomes[r.Outcome].Add(1)
	return r, true
}

// readOneSided is such a pull. False: it did not work out, and the pool is as it was.
func (c *Consumer) readOneSided(ctx context.Context, w wanted, owner uint64) (Result, bool) {
	if w.slot == nil {
		return Result{}, false
	}
	p, l := c.witness(w.addr)
	if l == nil {
		return Result{}, false
	}
	defer c.work.Done()
	defer c.release(p)
	defer p.unlink(l)
	table := l.peer.(transfer.Witness)
	s, ok := table.Slot(*w.slot)
	if !ok || s.State != region.SlotReady || s.Key != w.key || !w.spec.equal(Spec{Dtype: s.Dtype, Shape: s.Shape, Bytes: s.Bytes}) {
		return Result{}, false
	}
	res, err := c.o.Cache.Reserve(w.key, w.spec, owner)
	if err != nil {
		return Result{}, false
	}
	rd, err := l.peer.Read(ctx, transfer.ReadRequest{Remote: spansOf(s.Extents, c.o.Compat.BlockBytes, s.Bytes), Local: res.Buffers()})
	if err != nil {
		res.Discard()
		return Result{}, false
	}
	if !c.await(ctx, rd) {
		c.quarantine(w, res, rd, p, l)
		if err := ctx.Err(); err != nil {
			return canceled(err), true
		}
		return Result{}, false
	}
	if rd.Err() != nil || !table.Holds(*w.slot, s.Gen) {
		c.stats.overtaken.Add(1)
		res.Discard()
		return Result{}, false
	}
	var sum *uint64
	if c.o.Verify {
		is := res.Checksum()
		if s.HasChecksum && is != s.Checksum {
			c.stats.checksumFailed.Add(1)
			c.log.warn("checksum", w.addr, "an entry does not have the checksum that its producer's slot table has for it",
				"key", w.key, "is", fmt.Sprintf("%016x", is), "want", fmt.Sprintf("%016x", s.Checksum))
			res.Discard()
			return Result{}, false
		}
		sum = &is
	}
	info, err := res.Commit(sum)
	if err != nil {
		return Result{}, false
	}
	c.stats.bytes.Add(uint64(s.Bytes))
	c.stats.oneSided.Add(1)
	p.pulled(w.key, s.Gen)
	return Result{Outcome: FetchReady, Info: info, Bytes: s.Bytes, Plane: l.name}, true
}

// await waits for the end of a READ. False: it has not ended, and may still write its destination.
func (c *Consumer) await(ctx context.Context, rd transfer.Read) bool {
	select {
	case <-rd.Done():
		return true
	default:
	}
	late := time.NewTimer(c.t.Read)
	defer late.Stop()
	select {
	case <-rd.Done():
		return true
	case <-late.C:
	case <-ctx.Done():
	case <-c.ctx.Done():
	}
	return false
}

// witness gives the peer of an address, and what is open to it on the plane that a pull would use, if that plane sees its slot table;
// else nil. Nothing is opened: that takes a peer's answer. The caller gives both back with unlink and release, and then calls
// work.Done.
func (c *Consumer) witness(addr string) (*peer, *planeLink) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[addr]
	if c.closed || p == nil {
		return nil, nil
	}
	l := p.witness(c.planes)
	if l == nil {
		return nil, nil
	}
	c.use(p)
	c.work.Add(1)
	return p, l
}

// witness gives the link of the first of the planes that one is open on, if that is a Witness.
func (p *peer) witness(planes []string) *planeLink {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range planes {
		l := p.links[name]
		if l == nil {
			continue
		}
		select {
		case <-l.ready:
		default:
			return nil // it is being opened
		}
		if l.err != nil {
			continue
		}
		if _, ok := l.peer.(transfer.Witness); !ok {
			return nil
		}
		l.refs++
		return l
	}
	return nil
}
