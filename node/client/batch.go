package client

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// Op is one operation of a batch.
type Op struct {
	op          api.Op
	err         error // found before sending
	reservation *Reservation
	mapped      *Mapped
}

// OpResult is what became of an Op. Err is nil if it was carried out; the other fields are set by the operations that give them.
type OpResult struct {
	Err          error
	Reservation  *Reservation     // ReserveOp
	Mapped       *Mapped          // MapOp
	Info         ec.Info          // ReserveOp, CommitOp, MapOp, LookupOp
	Announcement *ec.Announcement // AnnounceOp
	Stats        ec.Stats         // StatsOp
}

// ReserveOp is Client.Reserve.
func ReserveOp(key string, s ec.Spec) Op {
	return Op{op: api.Op{Kind: api.OpReserve, Key: key, Dtype: s.Dtype, Shape: s.Shape, Bytes: s.Bytes}}
}

// CommitOp is Reservation.Commit.
func CommitOp(r *Reservation) Op {
	return Op{op: api.Op{Kind: api.OpCommit, Key: r.Key()}, reservation: r}
}

// DiscardOp is Reservation.Discard.
func DiscardOp(r *Reservation) Op {
	return Op{op: api.Op{Kind: api.OpDiscard, Key: r.Key()}, reservation: r}
}

// AnnounceOp is Client.Announce for one key.
func AnnounceOp(i AnnounceItem) Op {
	return Op{op: api.Op{Kind: api.OpAnnounce, Key: i.Key, ItemIndices: i.ItemIndices, Metadata: i.Metadata}}
}

// MapOp is Client.Map.
func MapOp(key string) Op { return Op{op: api.Op{Kind: api.OpMap, Key: key}} }

// ReleaseOp is Mapped.Release.
func ReleaseOp(m *Mapped) Op {
	return Op{op: api.Op{Kind: api.OpRelease, Key: m.info.Key}, mapped: m}
}

// LookupOp is Client.Lookup for one key.
func LookupOp(key string) Op { return Op{op: api.Op{Kind: api.OpLookup, Key: key}} }

// RemoveOp is Client.Remove.
func RemoveOp(key string) Op { return Op{op: api.Op{Kind: api.OpRemove, Key: key}} }

// StatsOp is Client.Stats.
func StatsOp() Op { return Op{op: api.Op{Kind: api.OpStats}} }

// Batch carries out ops in order, in one round trip (more only for thousands), and gives one result an operation. One that fails
// does not stop those behind it.
//
// When the connection is lost under it, the batch is carried out again on the next one, as if it had not been before: what was
// reserved or mapped the first time is free again, what was committed or released stays so. Only a Hold can be taken twice, which
// ends with its lease. An error means that no connection came in time (ErrDisconnected), the client is over (ErrClosed) or ctx
// ended, before the call or during it: then nothing that was reserved or mapped here stays so, what was to be committed or discarded or
// released here is over, and whether the rest was carried out is not known.
func (c *Client) Batch(ctx context.Context, ops ...Op) ([]OpResult, error) {
	if err := ctx.Err(); err != nil {
		drop(ops)
		return nil, err
	}
	b := &batch{ops: ops, results: make([]OpResult, len(ops))}
	for i := range ops {
		if err := ops[i].begin(); err != nil {
			b.results[i].Err = err
		} else {
			b.todo = append(b.todo, i)
		}
	}
	b.left = slices.Clone(b.todo)
	defer b.over(c)
	if len(b.todo) == 0 {
		return b.results, nil
	}
	for n := 0; ; n++ {
		l, send, index := b.prepare(c, n > 0)
		got, err := c.do(ctx, l, send)
		if err == nil {
			b.left = b.left[:0]
			for j := range got {
				r := &b.results[index[j]]
				c.finish(l, r, send[j], &got[j], n > 0)
				if errors.Is(r.Err, ErrDisconnected) { // it lost its memory between the answer and here
					err = r.Err
					b.left = append(b.left, index[j])
				}
			}
			if err == nil {
				return b.results, nil
			}
		}
		if !errors.Is(err, ErrDisconnected) {
			c.post(l, ends(send))
			b.giveBack()
			return nil, err
		}
		if err := c.again(ctx, err); err != nil {
			b.giveBack()
			return nil, err
		}
	}
}

// drop ends what operations were to end, without waiting for the node.
func drop(ops []Op) {
	for i := range ops {
		if r := ops[i].reservation; r != nil {
			r.drop()
		}
		if m := ops[i].mapped; m != nil {
			m.Release()
		}
	}
}

// batch is one call of Batch.
type batch struct {
	ops     []Op
	results []OpResult
	todo    []int // those that the node is asked for
	left    []int // of these, those without a result
}

// giveBack ends what was reserved and mapped, without waiting for the node.
func (b *batch) giveBack() {
	for i := range b.results {
		if r := b.results[i].Reservation; r != nil {
			r.drop()
		}
		if m := b.results[i].Mapped; m != nil {
			m.Release()
		}
	}
}

// prepare gives the operations as the current connection understands them, and their places in the batch. What has its result by the
// restatement is left out.
func (b *batch) prepare(c *Client, again bool) (l *link, send []api.Op, index []int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l = c.link
	for _, i := range b.left {
		o := &b.ops[i]
		op := o.op
		var on *link
		switch {
		case o.reservation != nil:
			on, op.Handle = o.reservation.link, o.reservation.handle
		case o.mapped != nil:
			on, op.Handle = o.mapped.link, o.mapped.handle
		default:
			send, index = append(send, op), append(index, i)
			continue
		}
		if on == l {
			send, index = append(send, op), append(index, i)
			continue
		}
		r := &b.results[i]
		r.Err = fmt.Errorf("%s %q: %w: the node that had it is gone, and the one now does not know it", op.Kind, op.Key, ec.ErrStale)
		switch {
		case op.Kind == api.OpRelease, op.Kind == api.OpDiscard && again && !o.reservation.committed:
			r.Err = nil // it is over, as was wanted
		case op.Kind == api.OpCommit && o.reservation.committed:
			r.Err, r.Info = nil, o.reservation.info
		}
	}
	return l, send, index
}

// over takes what the batch has ended off the list of what is restated.
func (b *batch) over(c *Client) {
	shed := false
	c.mu.Lock()
	for _, i := range b.todo {
		if r := b.ops[i].reservation; r != nil {
			delete(c.filled, r)
			shed = c.unused(r.mapping) || shed
		}
		if m := b.ops[i].mapped; m != nil {
			delete(c.pinned, m)
			shed = c.unused(m.mapping) || shed
		}
	}
	c.mu.Unlock()
	if shed {
		c.shed()
	}
}

// ends are the operations that make sure, after a batch of which nothing is known, that what it was to end is over. Where it is over
// already they do nothing.
func ends(ops []api.Op) []api.Op {
	var out []api.Op
	for _, o := range ops {
		switch o.Kind {
		case api.OpCommit, api.OpDiscard:
			out = append(out, api.Op{Kind: api.OpDiscard, Key: o.Key, Handle: o.Handle})
		case api.OpRelease:
			out = append(out, o)
		}
	}
	return out
}

// begin checks an operation, and uses up the reservation or pin that it ends, so that none is ended twice.
func (o *Op) begin() error {
	if o.reservation == nil && o.mapped == nil { // those have a handle, by the time it is sent
		if err := o.op.Check(); err != nil {
			return fmt.Errorf("%s %.64q: %w", o.op.Kind, o.op.Key, err)
		}
	}
	over := o.reservation != nil && o.reservation.over.Swap(true) || o.mapped != nil && o.mapped.over.Swap(true)
	if over {
		return fmt.Errorf("%s %q: %w", o.op.Kind, o.op.Key, ec.ErrStale)
	}
	return nil
}

// finish turns what came over the wire into a result.
func (c *Client) finish(l *link, r *OpResult, op api.Op, got *api.Result, again bool) {
	if again && op.Kind == api.OpRemove && got.Code == api.CodeMissing {
		return // the first time has removed it
	}
	if r.Err = failure(op, got.Code, got.Message); r.Err != nil {
		return
	}
	if got.Info != nil {
		r.Info = *got.Info
	}
	if got.Stats != nil {
		r.Stats = *got.Stats
	}
	switch op.Kind {
	case api.OpReserve:
		if r.Reservation, r.Err = c.reserved(l, got.Handle, r.Info); r.Err != nil {
			c.post(l, []api.Op{{Kind: api.OpDiscard, Handle: got.Handle}})
		}
	case api.OpMap:
		c.mu.Lock()
		r.Mapped, r.Err = c.mapped(l, got.Handle, r.Info)
		c.mu.Unlock()
		if r.Err != nil {
			c.post(l, []api.Op{{Kind: api.OpRelease, Handle: got.Handle}})
		}
	case api.OpAnnounce:
		r.Announcement = &ec.Announcement{}
		if r.Err = r.Announcement.UnmarshalJSON(got.Entry); r.Err != nil {
			r.Announcement = nil
		}
	}
}

func (c *Client) reserved(l *link, handle uint64, i ec.Info) (*Reservation, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, buffers, err := c.buffers(l, i)
	if err != nil {
		return nil, err
	}
	r := &Reservation{c: c, mapping: m, key: i.Key, buffers: buffers, link: l, handle: handle, info: i}
	m.uses++
	c.filled[r] = struct{}{}
	return r, nil
}

// mapped is what came with a pin. On an error the pin is the caller's to release. Called with the lock held.
func (c *Client) mapped(l *link, handle uint64, i ec.Info) (*Mapped, error) {
	m, buffers, err := c.buffers(l, i)
	if err != nil {
		return nil, err
	}
	p := &Mapped{c: c, mapping: m, info: i, buffers: buffers, link: l, handle: handle}
	m.uses++
	c.pinned[p] = struct{}{}
	return p, nil
}

// buffers are an entry's bytes in the mapping of a connection, which must not be lost yet: what is not on the client's lists when it
// restates is the next user's. The node is trusted but checked: a bad extent is an error, not a fault. Called with the lock held.
func (c *Client) buffers(l *link, i ec.Info) (*mapping, [][]byte, error) {
	c.memory.RLock()
	defer c.memory.RUnlock()
	m := l.mapping
	if c.mapping == nil {
		return nil, nil, ErrClosed
	}
	select {
	case <-l.gone:
		return nil, nil, l.err
	default:
	}
	g := m.Geometry()
	left := i.Spec.Bytes
	out := make([][]byte, 0, len(i.Extents))
	for _, e := range i.Extents {
		start, end := int64(e.Start)*g.BlockBytes, (int64(e.Start)+int64(e.Count))*g.BlockBytes
		if end > int64(len(m.bytes)) || left <= 0 {
			return nil, nil, fmt.Errorf("%w: extents %v do not fit %d bytes in a pool of %d blocks", ErrProtocol, i.Extents, i.Spec.Bytes, g.Blocks)
		}
		n := min(end-start, left)
		out = append(out, m.bytes[start:start+n:start+n])
		left -= n
	}
	if left != 0 {
		return nil, nil, fmt.Errorf("%w: extents %v do not fit %d bytes", ErrProtocol, i.Extents, i.Spec.Bytes)
	}
	return m, out, nil
}

// one is a batch of one.
func (c *Client) one(ctx context.Context, op Op) (OpResult, error) {
	r, err := c.Batch(ctx, op)
	if err != nil {
		return OpResult{}, err
	}
	return r[0], r[0].Err
}
