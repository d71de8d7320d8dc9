package engine

import (
	"context"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// Pool is what an engine needs of its node: the calls of client.Client, whose documentation is theirs. OverClient gives one.
type Pool interface {
	Pool() client.Pool
	Done() <-chan struct{}
	Close() error
	Lookup(ctx context.Context, keys ...string) ([]ec.Info, error)
	Reserve(ctx context.Context, key string, s ec.Spec) (Reservation, error)
	WaitReady(ctx context.Context, key string) error
	Map(ctx context.Context, key string) (Mapped, error)
	Announce(ctx context.Context, items []client.AnnounceItem) (ec.Params, error)
	Fetch(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan client.FetchResult, error)
}

// Reservation is an extent of the pool to fill.
type Reservation interface {
	Buffers() [][]byte
	Commit(ctx context.Context) error
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

func (o overClient) Reserve(ctx context.Context, key string, s ec.Spec) (Reservation, error) {
	r, err := o.Client.Reserve(ctx, key, s)
	if err != nil {
		return nil, err // not r: a nil pointer in an interface is not nil
	}
	return r, nil
}

func (o overClient) Map(ctx context.Context, key string) (Mapped, error) {
	m, err := o.Client.Map(ctx, key)
	if err != nil {
		return nil, err
	}
	return m, nil
}
