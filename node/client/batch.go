package client

import (
	"context"
	"fmt"

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
	return Op{op: api.Op{Kind: api.OpCommit, Key: r.info.Key, Handle: r.handle}, reservation: r}
}

// DiscardOp is Reservation.Discard.
func DiscardOp(r *Reservation) Op {
	return Op{op: api.Op{Kind: api.OpDiscard, Key: r.info.Key, Handle: r.handle}, reservation: r}
}

// AnnounceOp is Client.Announce for one key.
func AnnounceOp(i AnnounceItem) Op {
	return Op{op: api.Op{Kind: api.OpAnnounce, Key: i.Key, ItemIndices: i.ItemIndices, Metadata: i.Metadata}}
}

// MapOp is Client.Map.
func MapOp(key string) Op { return Op{op: api.Op{Kind: api.OpMap, Key: key}} }

// ReleaseOp is Mapped.Release.
func ReleaseOp(m *Mapped) Op {
	return Op{op: api.Op{Kind: api.OpRelease, Key: m.info.Key, Handle: m.handle}, mapped: m}
}

// LookupOp is Client.Lookup for one key.
func LookupOp(key string) Op { return Op{op: api.Op{Kind: api.OpLookup, Key: key}} }

// RemoveOp is Client.Remove.
func RemoveOp(key string) Op { return Op{op: api.Op{Kind: api.OpRemove, Key: key}} }

// StatsOp is Client.Stats.
func StatsOp() Op { return Op{op: api.Op{Kind: api.OpStats}} }

// Batch carries out ops in order, in one round trip (more only for thousands), and gives one result an operation. One that fails
// does not stop those behind it. An error means that the connection was lost or ctx ended: then nothing that was reserved or mapped
// here stays so, and whether the rest was carried out is not known.
func (c *Client) Batch(ctx context.Context, ops ...Op) ([]OpResult, error) {
	results := make([]OpResult, len(ops))
	send := make([]api.Op, 0, len(ops))
	index := make([]int, 0, len(ops))
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for i := range ops {
		if err := ops[i].begin(); err != nil {
			results[i].Err = err
			continue
		}
		send, index = append(send, ops[i].op), append(index, i)
	}
	got, err := c.do(ctx, send)
	if err != nil {
		c.post(ends(send))
		return nil, err
	}
	for j := range got {
		i := index[j]
		c.finish(&results[i], send[j], &got[j])
	}
	return results, nil
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
	if err := o.op.Check(); err != nil {
		return fmt.Errorf("%s %.64q: %w", o.op.Kind, o.op.Key, err)
	}
	over := o.reservation != nil && o.reservation.over.Swap(true) || o.mapped != nil && o.mapped.over.Swap(true)
	if over {
		return fmt.Errorf("%s %q: %w", o.op.Kind, o.op.Key, ec.ErrStale)
	}
	return nil
}

// finish turns what came over the wire into a result.
func (c *Client) finish(r *OpResult, op api.Op, got *api.Result) {
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
		buffers, err := c.buffers(r.Info)
		if err != nil {
			r.Err = err
			c.post([]api.Op{{Kind: api.OpDiscard, Handle: got.Handle}})
			return
		}
		r.Reservation = &Reservation{c: c, handle: got.Handle, info: r.Info, buffers: buffers}
	case api.OpMap:
		if r.Mapped, r.Err = c.mapped(got.Handle, r.Info); r.Err != nil {
			c.post([]api.Op{{Kind: api.OpRelease, Handle: got.Handle}})
		}
	case api.OpAnnounce:
		r.Announcement, r.Err = api.DecodeEntry(op.Key, got.Entry)
	}
}

// mapped is what came with a pin. On an error the pin is the caller's to release.
func (c *Client) mapped(handle uint64, i ec.Info) (*Mapped, error) {
	buffers, err := c.buffers(i)
	if err != nil {
		return nil, err
	}
	return &Mapped{c: c, handle: handle, info: i, buffers: buffers}, nil
}

// buffers are an entry's bytes in the mapping. The node is trusted but checked: a bad extent is an error, not a fault.
func (c *Client) buffers(i ec.Info) ([][]byte, error) {
	c.memory.RLock()
	defer c.memory.RUnlock()
	if c.bytes == nil {
		return nil, ErrClosed
	}
	left, block := i.Spec.Bytes, c.pool.BlockBytes
	out := make([][]byte, 0, len(i.Extents))
	for _, e := range i.Extents {
		start, end := int64(e.Start)*block, (int64(e.Start)+int64(e.Count))*block
		if end > int64(len(c.bytes)) || left <= 0 {
			return nil, fmt.Errorf("%w: extents %v do not fit %d bytes in a pool of %d blocks", ErrProtocol, i.Extents, i.Spec.Bytes, c.pool.Blocks)
		}
		n := min(end-start, left)
		out = append(out, c.bytes[start:start+n:start+n])
		left -= n
	}
	if left != 0 {
		return nil, fmt.Errorf("%w: extents %v do not fit %d bytes", ErrProtocol, i.Extents, i.Spec.Bytes)
	}
	return out, nil
}

// one is a batch of one.
func (c *Client) one(ctx context.Context, op Op) (OpResult, error) {
	r, err := c.Batch(ctx, op)
	if err != nil {
		return OpResult{}, err
	}
	return r[0], r[0].Err
}
