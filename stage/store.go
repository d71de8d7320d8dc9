// Package stage moves payloads between the stages of a pipeline: what a producer puts under a key, a consumer gets.
//
// Store is the producer's side: what is published, who claimed it, and when its memory is free again. It knows no sockets and no
// planes: requests are handed to it decoded, memory is behind the interface Memory.
package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/stage/wire"
	"golang.org/x/sync/semaphore"
)

var (
	// ErrNotFound: nothing is published under the key, or not this generation, or its lease is over.
	ErrNotFound = errors.New("stage: not found")
	// ErrClaimed: the payload is being read, so it cannot be replaced or cleaned up. Retry after its readers are done.
	ErrClaimed = errors.New("stage: claimed")
	// ErrFailed: the producer said that the payload will not come. See FailedError for why.
	ErrFailed = errors.New("stage: the producer failed")
	// ErrClosing: the store takes nothing new.
	ErrClosing = errors.New("stage: closing")
	// ErrFull: over a bound of Options.
	ErrFull = errors.New("stage: full")
	// ErrBusy: memory is still being read, and its readers could not be stopped in time. It is never freed then.
	ErrBusy = errors.New("stage: memory still in use")
	// ErrOptions: a bad value in Options or Put.
	ErrOptions = errors.New("stage: bad options")
)

// FailedError has the producer's reason. It wraps ErrFailed.
type FailedError struct{ Key, Reason string }

func (e *FailedError) Error() string {
	return fmt.Sprintf("%v: key %.64q: %s", ErrFailed, e.Key, e.Reason)
}

func (e *FailedError) Unwrap() error { return ErrFailed }

// Defaults of Options; the first two are the peers' own.
const (
	DefaultLease       = time.Hour
	DefaultTransfer    = 300 * time.Second
	DefaultMargin      = 30 * time.Second
	DefaultRetryGrace  = 30 * time.Second
	DefaultFailureKept = time.Minute
	DefaultMaxPayloads = 1 << 16
	DefaultMaxClaims   = 64
	// DefaultMaxSourceClaims is more than a machine's consumers read at once, and some 10 MB of records.
	DefaultMaxSourceClaims = 1 << 14
)

// Options of a Store. Zero values are the defaults. Times are on the monotonic clock.
type Options struct {
	Lease       time.Duration // how long an unclaimed payload is kept, from its put
	Transfer    time.Duration // how long a reader may take, from its claim (the peers' transfer timeout)
	Margin      time.Duration // added to Transfer before a claim without an end is ended by force
	RetryGrace  time.Duration // how long a payload is kept at least after a reader failed, or for the next of several; how long Verify may be repeated
	FailureKept time.Duration // how long Abort is remembered
	MaxBytes    int64         // of all payloads together; 0 is no cap
	MaxPayloads int           // also of failures that are remembered
	MaxClaims   int           // of one payload at once; one source (see Claim) has at most half of them and one
	// MaxSourceClaims is how many claims one source (see Claim) holds at once: claims are free to ask for, so that somebody may.
	MaxSourceClaims int
	Log             *slog.Logger
}

func (o *Options) complete() error {
	for _, d := range []struct {
		name  string
		v     *time.Duration
		usual time.Duration
	}{
		{"Lease", &o.Lease, DefaultLease}, {"Transfer", &o.Transfer, DefaultTransfer}, {"Margin", &o.Margin, DefaultMargin},
		{"RetryGrace", &o.RetryGrace, DefaultRetryGrace}, {"FailureKept", &o.FailureKept, DefaultFailureKept},
	} {
		if *d.v < 0 {
			return fmt.Errorf("%w: %s is %v; give a time above 0", ErrOptions, d.name, *d.v)
		}
		if *d.v == 0 {
			*d.v = d.usual
		}
	}
	if o.MaxBytes < 0 || o.MaxPayloads < 0 || o.MaxClaims < 0 || o.MaxSourceClaims < 0 {
		return fmt.Errorf("%w: MaxBytes %d, MaxPayloads %d, MaxClaims %d, MaxSourceClaims %d; give none below 0", ErrOptions,
			o.MaxBytes, o.MaxPayloads, o.MaxClaims, o.MaxSourceClaims)
	}
	if o.MaxPayloads == 0 {
		o.MaxPayloads = DefaultMaxPayloads
	}
	if o.MaxClaims == 0 {
		o.MaxClaims = DefaultMaxClaims
	}
	if o.MaxSourceClaims == 0 {
		o.MaxSourceClaims = DefaultMaxSourceClaims
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Memory is the registered memory of one payload. The store calls it without its lock, possibly for several claims at once.
type Memory interface {
	// Offer makes the memory readable under grant, which names one claim and is never used again, and fills in what its reader
	// needs: for an own reader, who sent ask, Ferry's Inline, or Planes and Offsets; for a plain one (ask is nil, m.Ferry is too)
	// AgentMetadata and Groups. It is called again with the same grant when a claim is repeated. Descriptors leave only after the claim
	// is recorded. It must not block for long: it may run on the goroutine that answers all readers.
	Offer(ctx context.Context, grant string, ask *wire.FerryRequest, m *wire.Metadata) error
	// Withdraw ends what Offer gave. When it returns nil, no byte is read under the grant any more. idle says that the reader itself
	// ended its claim, so none is being read; otherwise readers have to be stopped: a token is revoked, a serving agent rotated. An
	// error keeps the memory out of use; Withdraw is then tried again.
	Withdraw(ctx context.Context, grant string, idle bool) error
	// Release frees the memory. Called exactly once, after every grant was withdrawn.
	Release()
}

// Store holds what is published. All methods are safe for concurrent use. One lock guards keys, claims and leases together, and is
// never held while Memory is called.
type Store struct {
	o    Options
	room *semaphore.Weighted // nil without a cap

	mu       sync.Mutex
	payloads map[string]*payload
	live     map[*payload]struct{} // whose memory is not released yet: those in payloads, and those that are only being withdrawn
	failures map[string]failure
	verified verified
	watchers map[string]map[*func()]struct{}
	owners   map[string]map[*claim]struct{} // claims that end with their connection
	sources  map[string]int                 // how many claims each holds
	grants   uint64                         // counts claims, so that each has a grant of its own
	next     time.Time                      // when reap has to look again
	looked   time.Time                      // when it looked last
	closing  bool
	idle     chan struct{} // closed and replaced whenever a payload's memory is released
	freeing  int           // payloads whose memory is being released
	stats    Stats

	wake  chan struct{} // next is earlier now
	ctx   context.Context
	stop  context.CancelFunc
	tasks sync.WaitGroup // reap and withdrawals
}

// Stats of a Store.
type Stats struct {
	Payloads    int   // published
	Claims      int   // held
	Withdrawing int   // grants that ended and are not withdrawn yet
	Bytes       int64 // of all memory that is not released
	Puts        uint64
	Granted     uint64 // claims, repeated ones not counted
	Done        uint64 // claims ended by their reader, after a READ
	Failed      uint64 // claims ended by their reader, without one
	Lapsed      uint64 // claims ended by time, or with their connection
	Expired     uint64 // payloads that nobody claimed
	Released    uint64 // payloads
}

type failure struct {
	reason string
	until  time.Time
}

// NewStore makes a store. The caller closes it.
func NewStore(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	s := &Store{
		o:        o,
		payloads: make(map[string]*payload),
		live:     make(map[*payload]struct{}),
		failures: make(map[string]failure),
		verified: verified{keep: o.RetryGrace, until: make(map[claimName]time.Time)},
		watchers: make(map[string]map[*func()]struct{}),
		owners:   make(map[string]map[*claim]struct{}),
		sources:  make(map[string]int),
		idle:     make(chan struct{}),
		wake:     make(chan struct{}, 1),
	}
	if o.MaxBytes > 0 {
		s.room = semaphore.NewWeighted(o.MaxBytes)
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.tasks.Go(s.reap)
	return s, nil
}

// Room is bytes that were taken from the cap.
type Room struct {
	once sync.Once
	free func()
}

// Close gives the bytes back. Calls after the first do nothing.
func (r *Room) Close() { r.once.Do(r.free) }

// Reserve waits until n bytes fit under MaxBytes, in the order of calls: ask before memory is made, so that a producer is held back
// by its consumers. The caller closes the Room, or puts it with its payload. Errors: ErrFull if n is over the cap by itself, and
// ctx's.
func (s *Store) Reserve(ctx context.Context, n int64) (*Room, error) {
	switch {
	case n < 0:
		return nil, fmt.Errorf("%w: %d bytes", ErrOptions, n)
	case s.room == nil:
		return &Room{free: func() {}}, nil
	case n > s.o.MaxBytes:
		return nil, fmt.Errorf("%w: a payload of %d bytes, all together may have %d", ErrFull, n, s.o.MaxBytes)
	}
	if err := s.room.Acquire(ctx, n); err != nil {
		return nil, fmt.Errorf("stage: waiting for %d bytes of room: %w", n, err)
	}
	return &Room{free: func() { s.room.Release(n) }}, nil
}

// reserveFor is Reserve for a put of key. What the put cannot do is said before it waits, and if it has to wait, the payload that it
// replaces is released first.
func (s *Store) reserveFor(ctx context.Context, key string, n int64) (*Room, error) {
	s.mu.Lock()
	old, err := s.puttable(key)
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if s.room == nil || n < 0 || n > s.o.MaxBytes {
		return s.Reserve(ctx, n)
	}
	if s.room.TryAcquire(n) {
		return &Room{free: func() { s.room.Release(n) }}, nil
	}
	if old != nil {
		s.mu.Lock()
		var free []*payload
		if s.payloads[key] == old && len(old.claims) == 0 {
			free = old.retire(nil, Replaced)
		}
		s.mu.Unlock()
		release(free)
	}
	return s.Reserve(ctx, n)
}

// Put is a payload to publish.
type Put struct {
	Key string
	// Metadata says what the payload is: Kind, Specs, Size, SenderHost, SenderPort; for own readers also Ferry's Top and Sum, if it
	// is not nil. The rest is filled in for each claim.
	Metadata wire.Metadata
	Memory   Memory
	Room     *Room         // may be nil
	Lease    time.Duration // 0: that of Options
	Readers  int           // how many have to read it, by claims of their own, before it is released; 0: 1
	Events   Events
}

// Events of one payload, each called at most once, without the store's lock, by whatever goroutine made it happen; nil is not called.
// They must not block.
type Events struct {
	Claimed  func()        // the first claim was answered
	Released func(Outcome) // the memory was released
}

// Put publishes p under a new generation, which it returns, and wakes who watches the key. An unclaimed payload of the key is
// replaced. From success on p's memory and room are the store's. Errors, which leave them the caller's: ErrClaimed, ErrClosing,
// ErrFull, ErrOptions.
func (s *Store) Put(p Put) (generation wire.ID, err error) {
	if p.Key == "" || len(p.Key) > wire.MaxKey || !utf8.ValidString(p.Key) || p.Memory == nil || p.Lease < 0 || p.Readers < 0 {
		return wire.ID{}, fmt.Errorf("%w: a put with a key of %d bytes (1 to %d, UTF-8), lease %v, %d readers", ErrOptions,
			len(p.Key), wire.MaxKey, p.Lease, p.Readers)
	}
	if p.Lease == 0 {
		p.Lease = s.o.Lease
	}
	if p.Readers == 0 {
		p.Readers = 1
	}
	now := time.Now()
	n := &payload{
		store: s, key: p.Key, metadata: p.Metadata, memory: p.Memory, room: p.Room, readers: p.Readers, events: p.Events,
		generation: wire.NewID(), leaseEnd: now.Add(p.Lease), claims: make(map[wire.ID]*claim),
	}
	n.metadata.Generation, n.metadata.Legacy, n.metadata.Claim = n.generation, false, wire.ID{}

	var free []*payload
	defer func() { release(free) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.puttable(p.Key)
	if err != nil {
		return wire.ID{}, err
	}
	if old != nil {
		free = old.retire(free, Replaced)
	}
	s.payloads[p.Key] = n
	s.live[n] = struct{}{}
	delete(s.failures, p.Key)
	s.stats.Puts++
	s.stats.Bytes += n.metadata.Size
	s.lookAt(n.leaseEnd)
	s.notify(p.Key)
	return n.generation, nil
}

// puttable says whether key may be put now, and what that replaces. With the lock.
func (s *Store) puttable(key string) (old *payload, err error) {
	old = s.payloads[key]
	switch {
	case s.closing:
		return nil, ErrClosing
	case old != nil && len(old.claims) > 0:
		return nil, fmt.Errorf("%w: key %.64q has %d readers", ErrClaimed, key, len(old.claims))
	case old == nil && len(s.payloads) >= s.o.MaxPayloads:
		return nil, fmt.Errorf("%w: %d payloads", ErrFull, len(s.payloads))
	}
	return old, nil
}

// Cleanup releases the payload of a key that nobody claimed. Nothing published is no error. ErrClaimed: it is being read.
func (s *Store) Cleanup(key string) error {
	var free []*payload
	defer func() { release(free) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.payloads[key]
	if p == nil {
		return nil
	}
	if len(p.claims) > 0 {
		return fmt.Errorf("%w: key %.64q has %d readers", ErrClaimed, key, len(p.claims))
	}
	free = p.retire(free, CleanedUp)
	return nil
}

// Abort says that the producer failed: whoever waits for the key, or claims it within FailureKept, is told so with the reason. A
// payload that is there is given to nobody else, and released when its readers have ended, however they end.
func (s *Store) Abort(key, reason string) {
	var free []*payload
	defer func() { release(free) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.payloads[key]; p != nil {
		p.condemned = true
		if len(p.claims) == 0 {
			free = p.retire(free, Aborted)
		}
	}
	if len(s.failures) >= s.o.MaxPayloads {
		s.forgetFailures(time.Now())
	}
	if len(s.failures) < s.o.MaxPayloads {
		f := failure{reason, time.Now().Add(s.o.FailureKept)}
		s.failures[key] = f
		s.lookAt(f.until)
	}
	s.notify(key)
}

// Stats counts.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	st.Payloads = len(s.payloads)
	for p := range s.live {
		st.Claims += len(p.claims)
		st.Withdrawing += p.withdrawing
	}
	return st
}

// Healthy is false from the begin of Close on.
func (s *Store) Healthy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closing
}
