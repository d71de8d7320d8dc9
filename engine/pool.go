package engine

import (
	"context"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// Pool is what an engine needs of its node. Each call is one round trip, however many keys a step has. An error of a call means
// that the connection is lost or the context has ended; errors about keys are in the results and wrap those of package ec.
// OverClient gives a Pool.
type Pool interface {
	Pool() client.Pool
	Done() <-chan struct{}
	Close() error
	// Map pins ready entries. ErrMissing, ErrNotReady.
	Map(ctx context.Context, keys ...string) ([]MapResult, error)
	// Reserve asks for extents to fill, one a key. ErrHeld, ErrPending, ErrConflict, ErrFull, ErrTooLarge.
	Reserve(ctx context.Context, items ...ReserveItem) ([]ReserveResult, error)
	// Commit makes reservations ready and pins the entries.
	Commit(ctx context.Context, filled ...Reservation) ([]MapResult, error)
	Announce(ctx context.Context, items []client.AnnounceItem) (ec.Params, error)
	WaitReady(ctx context.Context, key string) error
	// Fetch pulls, and pins what it brought: a result's Mapped, if it has one, is the caller's to release.
	Fetch(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan client.FetchResult, error)
}

// ReserveItem is one key to fill.
type ReserveItem struct {
	Key  string
	Spec ec.Spec
}

// ReserveResult has a Reservation, or the reason why there is none.
type ReserveResult struct {
	Reservation Reservation
	Err         error
}

// MapResult has a Mapped, or the reason why there is none.
type MapResult struct {
	Mapped Mapped
	Err    error
}

// Reservation is an extent of the pool to fill: Spec.Bytes in all, one slice an extent.
type Reservation interface {
	Key() string
	Buffers() [][]byte
	Discard(ctx context.Context) error
}

// Mapped is a pinned entry, read only.
type Mapped interface {
	Spec() ec.Spec
	Buffers() [][]byte
	Release()
}

// OverClient makes a Pool of a connection to a node.
func OverClient(c *client.Client) Pool { return overClient{c} }

type overClient struct{ *client.Client }

func (o overClient) Map(ctx context.Context, keys ...string) ([]MapResult, error) {
	ops := make([]client.Op, len(keys))
	for i, k := range keys {
		ops[i] = client.MapOp(k)
	}
	got, err := o.Batch(ctx, ops...)
	if err != nil {
		return nil, err
	}
	results := make([]MapResult, len(got))
	for i := range got {
		results[i] = mapResult(&got[i])
	}
	return results, nil
}

func (o overClient) Fetch(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan client.FetchResult, error) {
	return o.FetchMap(ctx, p, timeout)
}

// mapResult keeps a nil pointer from becoming a Mapped that is not nil.
func mapResult(r *client.OpResult) MapResult {
	if r.Err != nil {
		return MapResult{Err: r.Err}
	}
	return MapResult{Mapped: r.Mapped}
}

func (o overClient) Reserve(ctx context.Context, items ...ReserveItem) ([]ReserveResult, error) {
	ops := make([]client.Op, len(items))
	for i, it := range items {
		ops[i] = client.ReserveOp(it.Key, it.Spec)
	}
	got, err := o.Batch(ctx, ops...)
	if err != nil {
		return nil, err
	}
	results := make([]ReserveResult, len(got))
	for i, r := range got {
		if r.Err != nil {
			results[i].Err = r.Err
		} else {
			results[i].Reservation = r.Reservation
		}
	}
	return results, nil
}

func (o overClient) Commit(ctx context.Context, filled ...Reservation) ([]MapResult, error) {
	ops := make([]client.Op, 0, 2*len(filled))
	for _, r := range filled {
		ops = append(ops, client.CommitOp(r.(*client.Reservation)), client.MapOp(r.Key()))
	}
	got, err := o.Batch(ctx, ops...)
	if err != nil {
		return nil, err
	}
	results := make([]MapResult, len(filled))
	for i := range results {
		commit, mapped := &got[2*i], &got[2*i+1]
		results[i] = mapResult(mapped)
		if commit.Err != nil {
			if mapped.Err == nil {
				mapped.Mapped.Release() // another's entry
			}
			results[i] = MapResult{Err: commit.Err}
		}
	}
	return results, nil
}
