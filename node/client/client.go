// Package client is the Go client of a node's engine API (docs/engine-api.md): what an engine on the node's machine uses to save,
// announce, fetch and map encodings.
//
// A Client is one connection. The node treats its end, however it comes, as the death of the engine: reservations are
// discarded, pins released. Methods are safe for concurrent use; each takes one round trip.
package client

import (
	"context"
	"encoding/json"
	"time"

	"github.com/tensorferry/tensorferry/ec"
)

// Options of Dial.
type Options struct {
	Name string // shows in logs and lists
	Pool string // compatibility hash of the pool wanted; "" if the node has just one
}

// Pool describes the pool that the connection uses.
type Pool struct {
	Group       string
	Model       string
	Dtype       string
	VLLMVersion string
	BlockBytes  int64
	Blocks      int
	Region      string // path, for people
	Node        string
	Epoch       uint64
	PeerHost    string
	PeerPort    int
	Generation  int
}

// Client is a connection to a node.
type Client struct{}

// Dial connects to the node's unix socket, says who it is and maps the pool.
func Dial(ctx context.Context, socket string, o Options) (*Client, error) { return nil, ec.ErrMissing }

func (c *Client) Pool() Pool { return Pool{} }

// Close ends the connection; what was reserved is discarded, what was mapped is released.
func (c *Client) Close() error { return nil }

// Done is closed when the connection is lost.
func (c *Client) Done() <-chan struct{} { return nil }

// Reserve asks for an extent to fill. Errors wrap those of package ec: ErrHeld (there is nothing to do), ErrPending (another
// engine fills it: wait with WaitReady), ErrConflict, ErrFull, ErrTooLarge.
func (c *Client) Reserve(ctx context.Context, key string, s ec.Spec) (*Reservation, error) {
	return nil, ec.ErrFull
}

// Reservation is an extent of the mapped pool to fill.
type Reservation struct{}

func (r *Reservation) Key() string                       { return "" }
func (r *Reservation) Buffers() [][]byte                 { return nil }
func (r *Reservation) Commit(ctx context.Context) error  { return ec.ErrStale }
func (r *Reservation) Discard(ctx context.Context) error { return ec.ErrStale }

// Put is Reserve, copy, Commit. Putting a key that is held with the same spec is no error (held is true).
func (c *Client) Put(ctx context.Context, key string, s ec.Spec, data []byte) (held bool, err error) {
	return false, ec.ErrFull
}

// WaitReady waits until the key is ready, or nobody is filling it any more (ec.ErrMissing).
func (c *Client) WaitReady(ctx context.Context, key string) error { return ec.ErrMissing }

// AnnounceItem is one key to announce. A key that is not held is announced without an address.
type AnnounceItem struct {
	Key         string
	ItemIndices []int
	Metadata    json.RawMessage
}

// Announce takes a hold on each key and gives the ec_transfer_params map.
func (c *Client) Announce(ctx context.Context, items []AnnounceItem) (ec.Params, error) {
	return ec.Params{}, ec.ErrMissing
}

// FetchResult is the outcome for one key.
type FetchResult struct {
	Key     string
	Outcome ec.Outcome
	Reason  string // for people, "" if ready
	Bytes   int64
	Spec    ec.Spec
	Plane   string // "local": the pool had it, no byte moved
	Elapsed time.Duration
}

// Fetch pulls every key of p that has an address; results come as they are known and the channel is closed after the last.
// timeout 0 means the node's item budget.
func (c *Client) Fetch(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan FetchResult, error) {
	return nil, ec.ErrMissing
}

// Map pins a ready entry and gives its bytes where they are in the pool. ErrMissing, ErrNotReady.
func (c *Client) Map(ctx context.Context, key string) (*Mapped, error) { return nil, ec.ErrMissing }

// Mapped is a pinned entry. Read only.
type Mapped struct{}

func (m *Mapped) Spec() ec.Spec     { return ec.Spec{} }
func (m *Mapped) Buffers() [][]byte { return nil }
func (m *Mapped) Release()          {}

// Lookup says what the pool knows of each key.
func (c *Client) Lookup(ctx context.Context, keys ...string) ([]ec.Info, error) {
	return nil, ec.ErrMissing
}

// List is all entries.
func (c *Client) List(ctx context.Context) ([]ec.Info, error) { return nil, ec.ErrMissing }

// Remove takes a ready, unpinned entry out of the pool.
func (c *Client) Remove(ctx context.Context, key string) error { return ec.ErrMissing }
