package ec

import (
	"context"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Announcement and Params are what orchestrators carry.
type (
	Announcement = wire.Announcement
	Params       = wire.Params
)

// Outcome of a fetch for one key. Exactly one is given per call.
type Outcome uint8

const (
	FetchReady Outcome = iota + 1
	FetchMissing
	FetchNotReady // still not ready when the item's budget ended
	FetchIncompatible
	FetchUnreachable
	FetchTimedOut
	FetchConflict
	FetchFailed   // anything else: bad announcement, full pool, damaged data; Result.Err says what
	FetchCanceled // the caller's context ended
)

// String gives "ready", "missing", "not ready", "incompatible", "unreachable", "timed out", "conflict", "failed", "canceled".
func (o Outcome) String() string { return "" }

// Result of a fetch.
type Result struct {
	Key     string
	Outcome Outcome
	Err     error // nil if ready
	Info    Info  // if ready
	Bytes   int64
	Plane   string // "local" if the pool had it
	Elapsed time.Duration
}

// Timeouts, all durations on this process's monotonic clock. Zero values mean the defaults.
type Timeouts struct {
	AckOwn     time.Duration // wait for an ack of one of our own nodes: 2 s
	AckPlain   time.Duration // of a plain peer, or of one not yet known: 30 s
	Read       time.Duration // one READ: 20 s
	Quarantine time.Duration // a destination after a READ that timed out: 60 s
	Item       time.Duration // one key over all tries: 60 s
	GrantLease time.Duration // a grant at the producer: 30 s
}

// WithDefaults fills in zero values.
func (t Timeouts) WithDefaults() Timeouts { return t }

// ConsumerOptions configure a Consumer.
type ConsumerOptions struct {
	Cache      *Cache
	Compat     wire.Compat
	Generation int // 1 or 2
	ItemSize   int // bytes of one element of Compat.Dtype
	Loop       *control.Loop
	Planes     []transfer.Plane // by preference
	Node       string
	Epoch      uint64
	Verify     bool // check checksums end to end where the producer keeps them
	Timeouts   Timeouts
	AllowHost  func(host string) error // nil: any
}

// Consumer pulls encodings from peers into a Cache. One READ per key however many ask.
type Consumer struct{}

func NewConsumer(o ConsumerOptions) (*Consumer, error) { return nil, ErrSpec }

// Fetch brings key into the pool and returns its one outcome. It never leaks: whatever ends it, the destination is committed,
// freed, or quarantined and then freed.
func (c *Consumer) Fetch(ctx context.Context, key string, a *Announcement, owner uint64) Result {
	return Result{}
}

// Close ends all fetches.
func (c *Consumer) Close() error { return nil }
