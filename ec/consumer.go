package ec

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Errors of fetches, beside those of the cache. Result.Err wraps one of these, one of the cache's, or one of package transfer.
var (
	ErrIncompatible = errors.New("ec: the peer is not compatible")
	ErrUnreachable  = errors.New("ec: the peer cannot be reached")
	ErrTimeout      = errors.New("ec: no answer in time")
	ErrChecksum     = errors.New("ec: the bytes read do not have the producer's checksum")
	ErrChanged      = errors.New("ec: the producer's entry changed while it was read")
	ErrBadAck       = errors.New("ec: the peer's ack makes no sense")
	ErrPeer         = errors.New("ec: the peer failed")
	ErrClosed       = errors.New("ec: closed")
)

// Announcement and Params are what orchestrators carry.
type (
	Announcement = wire.Announcement
	Params       = wire.Params
)

// PlaneLocal is Result.Plane of an entry that was in the pool, or came into it from an engine of this machine.
const PlaneLocal = "local"

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
	FetchCanceled // the caller's context ended, or the consumer was closed
)

// outcomes is one more than the last Outcome.
const outcomes = FetchCanceled + 1

var outcomeNames = [outcomes]string{
	FetchReady:        "ready",
	FetchMissing:      "missing",
	FetchNotReady:     "not ready",
	FetchIncompatible: "incompatible",
	FetchUnreachable:  "unreachable",
	FetchTimedOut:     "timed out",
	FetchConflict:     "conflict",
	FetchFailed:       "failed",
	FetchCanceled:     "canceled",
}

// String gives "ready", "missing", "not ready", "incompatible", "unreachable", "timed out", "conflict", "failed", "canceled".
func (o Outcome) String() string {
	if o == 0 || o >= outcomes {
		return fmt.Sprintf("Outcome(%d)", uint8(o))
	}
	return outcomeNames[o]
}

// Result of a fetch.
type Result struct {
	Key     string
	Outcome Outcome
	Err     error // nil if ready
	Info    Info  // if ready
	Bytes   int64 // of the encoding, if ready; whether they moved for this call or for another says Plane
	Plane   string
	Elapsed time.Duration
}

// Timeouts, all durations on this process's monotonic clock. Zero values mean the defaults.
type Timeouts struct {
	AckOwn     time.Duration // wait for an ack of one of our own nodes: 2 s
	AckPlain   time.Duration // of a plain peer, or of one not yet known: 30 s
	Connect    time.Duration // a peer that cannot be connected to for so long is unreachable: 5 s
	Read       time.Duration // one READ: 20 s
	Quarantine time.Duration // a destination after a READ that timed out: 60 s
	Item       time.Duration // one Fetch over all tries, and one pull: 60 s
	GrantLease time.Duration // a grant at the producer: 30 s
	// PlainLease is how old, counted from the request, what a plain peer granted may be when its READ is complete: 28 s. Such a
	// peer reuses the memory 30 s after its ack (vLLM 0.32's pin lease) and cannot be asked whether it has.
	PlainLease time.Duration
	Idle       time.Duration // a connection that no fetch uses is closed: 60 s
}

// WithDefaults fills in zero values.
func (t Timeouts) WithDefaults() Timeouts {
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{
		{&t.AckOwn, 2 * time.Second},
		{&t.AckPlain, 30 * time.Second},
		{&t.Connect, 5 * time.Second},
		{&t.Read, 20 * time.Second},
		{&t.Quarantine, 60 * time.Second},
		{&t.Item, 60 * time.Second},
		{&t.GrantLease, 30 * time.Second},
		{&t.PlainLease, 28 * time.Second},
		{&t.Idle, 60 * time.Second},
	} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	return t
}

// ConsumerOptions configure a Consumer.
type ConsumerOptions struct {
	Cache      *Cache
	Compat     wire.Compat
	Generation int // 1 or 2
	ItemSize   int // bytes of one element of Compat.Dtype
	Loop       *control.Loop
	Planes     []transfer.Plane // by preference
	Node       string           // this node's id; an ack that names it means that the announcement's address is our own
	Epoch      uint64
	Verify     bool // check checksums end to end where the producer keeps them, and keep one of every entry
	Timeouts   Timeouts
	AllowHost  func(host string) error // nil: any
	Log        *slog.Logger            // nil: slog.Default()
}

// PlainReader is implemented by a Plane that can READ from unmodified peers, whose acks bear an agent's metadata and a
// descriptor of the whole region in place of a plane offer.
type PlainReader interface {
	// AddPlainPeer makes such an agent readable. Its pool is len(blocks) blocks of blockBytes, block i at address blocks[i] of
	// its process; spans of READs are offsets in that pool. Errors and ownership as with Plane.AddPeer.
	AddPlainPeer(ctx context.Context, agentMetadata []byte, blocks []uint64, blockBytes int64) (transfer.Peer, error)
}

// conn is what a Consumer needs of a control.Dealer.
type conn interface {
	Send(body []byte) error
	Close() error
}

// dialFunc starts connecting and returns at once.
type dialFunc func(ctx context.Context, addr string, h control.DealerHandler) (conn, error)

// Consumer pulls encodings from peers into a Cache. One READ per key however many ask. All methods are safe for concurrent use.
type Consumer struct {
	o         ConsumerOptions
	t         Timeouts
	dial      dialFunc
	dialLocal dialLocalFunc // nil: no local paths
	hash      string
	planes    []string // names, by preference
	blocks    int64    // in the pool
	log       *throttledLog
	ctx       context.Context // ends at Close
	cancel    context.CancelFunc
	work      sync.WaitGroup // flights, destinations in quarantine, and peers of planes being added or closed
	stats     consumerCounters

	mu      sync.Mutex
	closed  bool
	flights map[string]*flight // by key; those that may be joined
	peers   map[string]*peer   // by address
	own     map[string]bool    // addresses that answered as one of our own nodes (true) or a plain peer (false)
}

// maxKnownPeers bounds what is remembered of addresses; one that is forgotten is waited for longer once.
const maxKnownPeers = 4096

// NewConsumer checks the options; it connects to nobody yet.
func NewConsumer(o ConsumerOptions) (*Consumer, error) {
	if o.Loop == nil {
		return nil, fmt.Errorf("%w: no control loop", ErrOptions)
	}
	c, err := newConsumer(o, func(ctx context.Context, addr string, h control.DealerHandler) (conn, error) {
		return o.Loop.Dial(ctx, addr, h)
	})
	if err != nil {
		return nil, err
	}
	c.dialLocal = func(ctx context.Context, name string, h control.DealerHandler) (localConn, error) {
		d, err := o.Loop.DialLocal(ctx, name, h)
		if err != nil {
			return nil, err
		}
		return d, nil
	}
	return c, nil
}

func newConsumer(o ConsumerOptions, dial dialFunc) (*Consumer, error) {
	switch {
	case o.Cache == nil:
		return nil, fmt.Errorf("%w: no cache", ErrOptions)
	case o.Generation != wire.Generation1 && o.Generation != wire.Generation2:
		return nil, fmt.Errorf("%w: protocol generation %d; give 1 or 2", ErrOptions, o.Generation)
	case o.ItemSize <= 0 || o.Compat.BlockBytes <= 0 || o.Compat.BlockBytes%int64(o.ItemSize) != 0:
		return nil, fmt.Errorf("%w: blocks of %d bytes for elements of %d", ErrOptions, o.Compat.BlockBytes, o.ItemSize)
	}
	c := &Consumer{
		o:       o,
		t:       o.Timeouts.WithDefaults(),
		dial:    dial,
		hash:    o.Compat.Hash(),
		blocks:  int64(o.Cache.Stats().Blocks),
		log:     newThrottledLog(o.Log),
		flights: map[string]*flight{},
		peers:   map[string]*peer{},
		own:     map[string]bool{},
	}
	for _, p := range o.Planes {
		c.planes = append(c.planes, p.Name())
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Fetch brings key into the pool and returns its one outcome. It never leaks: whatever ends it, the destination is committed,
// freed, or quarantined and then freed.
//
// An entry that is in the pool is ready at once; one that an engine of this machine is filling is waited for. Else it is pulled
// from the announcement's address. Calls for one key share one pull, which goes on while any of them waits; each caller's
// context ends only its own call. A caller whose announcement names another address than the pull it shared gets a pull of its
// own if that one fails. a is not changed and not kept.
//
// An entry that is ready may be evicted again until it is pinned: pin it, and fetch it once more if it has gone.
func (c *Consumer) Fetch(ctx context.Context, key string, a *Announcement, owner uint64) Result {
	return c.FetchUntil(ctx, key, a, owner, time.Now().Add(c.t.Item))
}

// Budget is Timeouts.Item.
func (c *Consumer) Budget() time.Duration { return c.t.Item }

// FetchUntil is Fetch with an end of its own to the item's time, for who fetches a key more than once: FetchTimedOut, or what kept it until
// then.
func (c *Consumer) FetchUntil(ctx context.Context, key string, a *Announcement, owner uint64, budget time.Time) Result {
	start := time.Now()
	r := c.fetch(ctx, key, a, owner, budget)
	r.Key, r.Elapsed = key, time.Since(start)
	c.stats.outcomes[r.Outcome].Add(1)
	return r
}

func (c *Consumer) fetch(ctx context.Context, key string, a *Announcement, owner uint64, budget time.Time) Result {
	if err := ctx.Err(); err != nil {
		return canceled(err)
	}
	if a == nil {
		a = &Announcement{}
	}
	if r, ok := c.ready(key, a); ok {
		return r
	}
	w, err := c.wanted(key, a)
	if err != nil {
		return Result{Outcome: outcomeOf(err), Err: err}
	}
	if r, ok := c.readOneSided(ctx, w, owner); ok {
		return r
	}
	var over <-chan time.Time
	for {
		f, joined, err := c.join(w, owner, budget)
		if err != nil {
			return canceled(err)
		}
		if over == nil && budget.Before(f.until.Add(-budgetSlack)) {
			timer := time.NewTimer(time.Until(budget))
			defer timer.Stop()
			over = timer.C
		}
		if joined && !f.want.spec.equal(w.spec) {
			c.leave(f, errAbandoned)
			return Result{Outcome: FetchConflict, Err: fmt.Errorf("%w: %q is being pulled as %v, announced as %v", ErrConflict, key, f.want.spec, w.spec)}
		}
		select {
		case <-f.done:
		case <-ctx.Done():
			c.leave(f, errAbandoned)
			return canceled(ctx.Err())
		case <-over:
			if c.leave(f, errBudget) {
				<-f.done // at once, and it knows what it waited for
				return f.result
			}
			return Result{Outcome: FetchTimedOut, Err: fmt.Errorf("%w: %q from %s: the time for this item is over; others wait for it on", ErrTimeout, key, w.addr)}
		}
		failed := f.result.Outcome != FetchReady && f.result.Outcome != FetchCanceled
		if joined && failed && f.want.addr != w.addr && time.Now().Before(budget) {
			continue // that address failed; this caller knows another
		}
		return f.result
	}
}

// ready is the result for an entry that the pool has; false if it has none that is ready.
func (c *Consumer) ready(key string, a *Announcement) (Result, bool) {
	info, state := c.o.Cache.Lookup(key)
	switch {
	case state != Ready:
		return Result{}, false
	case !c.fits(a, info.Spec):
		return Result{Outcome: FetchConflict, Err: fmt.Errorf("%w: %q is %v here, announced as %v, %d bytes", ErrConflict, key, info.Spec, a.Shape, a.SizeBytes)}, true
	}
	return Result{Outcome: FetchReady, Info: info, Bytes: info.Spec.Bytes, Plane: PlaneLocal}, true
}

func canceled(err error) Result { return Result{Outcome: FetchCanceled, Err: err} }

// outcomeOf maps an error to the outcome that it means.
func outcomeOf(err error) Outcome {
	switch {
	case errors.Is(err, ErrMissing):
		return FetchMissing
	case errors.Is(err, ErrNotReady):
		return FetchNotReady
	case errors.Is(err, ErrIncompatible):
		return FetchIncompatible
	case errors.Is(err, ErrUnreachable), errors.Is(err, transfer.ErrUnreachable), errors.Is(err, transfer.ErrPeerLost):
		return FetchUnreachable
	case errors.Is(err, ErrTimeout):
		return FetchTimedOut
	case errors.Is(err, ErrConflict):
		return FetchConflict
	case errors.Is(err, ErrClosed):
		return FetchCanceled
	}
	return FetchFailed
}

// budgetSlack is how much longer than its own time a caller waits for a pull that is about to end by itself, with what kept it.
const budgetSlack = 10 * time.Millisecond

// join finds the flight of a key or starts one, which has Timeouts.Item, or until budget if that is about as long: others may join it, and have
// more time left than who started it. Every join is followed by the end of the flight or by leave.
func (c *Consumer) join(w wanted, owner uint64, budget time.Time) (f *flight, joined bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, false, ErrClosed
	}
	if f := c.flights[w.key]; f != nil {
		f.waiters++
		return f, true, nil
	}
	until := time.Now().Add(c.t.Item)
	if !budget.Before(until.Add(-budgetSlack)) {
		until = budget
	}
	f = newFlight(c, w, owner, until)
	c.flights[w.key] = f
	c.work.Add(1)
	go f.run()
	return f, false, nil
}

// leave is the end of one caller's wait. The last one ends the flight, for that cause; whoever asks from then on starts a new one.
func (c *Consumer) leave(f *flight, cause error) (last bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.waiters--
	if f.waiters == 0 {
		c.forget(f)
		f.cancel(cause)
	}
	return f.waiters == 0
}

// forget takes a flight out of those that may be joined. Called with the lock held.
func (c *Consumer) forget(f *flight) {
	if c.flights[f.want.key] == f {
		delete(c.flights, f.want.key)
	}
}

// know remembers what kind of peer answered.
func (c *Consumer) know(addr string, own bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, there := c.own[addr]; !there && len(c.own) >= maxKnownPeers {
		for old := range c.own {
			delete(c.own, old)
			break
		}
	}
	c.own[addr] = own
}

// ackWait is how long to wait for that peer's ack.
func (c *Consumer) ackWait(addr string) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.own[addr] {
		return c.t.AckOwn
	}
	return c.t.AckPlain
}

// Close ends all fetches (FetchCanceled), closes all connections and waits until no plane writes the pool any more, for
// Timeouts.Quarantine at most. The error says how many destinations may still be written then: the pool must stay mapped.
func (c *Consumer) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	for _, f := range c.flights {
		f.cancel(ErrClosed)
	}
	c.mu.Unlock()
	c.cancel()

	// Flights end by themselves now, each letting go of its peer. Closing the peers ends the READs of planes that can.
	c.mu.Lock()
	peers := make([]*peer, 0, len(c.peers))
	for addr, p := range c.peers {
		peers = append(peers, p)
		delete(c.peers, addr)
	}
	c.mu.Unlock()
	for _, p := range peers {
		p.close()
	}
	quiet := make(chan struct{})
	go func() {
		c.work.Wait()
		close(quiet)
	}()
	select {
	case <-quiet:
		return nil
	case <-time.After(c.t.Quarantine):
		return fmt.Errorf("ec: %d destinations may still be written: %w", c.stats.quarantined.Load(), ErrTimeout)
	}
}
