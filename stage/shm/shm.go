// Package shm is a stage.Connector that does the job, and speaks the wire, of vLLM-Omni's SharedMemoryConnector: payloads between
// processes of one machine, as files in shared memory.
//
// # The wire
//
// A payload is the file DIR/KEY: the serialized value (wire.AppendObject), mode 0600, nothing else. Beside it is its lock file
// DIR/shm_KEY_lockfile.lock, of 0 bytes, whose flock a writer holds while it makes the segment and a reader while it reads. The reader
// then removes both. A segment of 0 bytes is one that is being made. Tuples arrive as lists, as there: the serializer has none.
//
// # What is different from the peers here
//
//   - A segment appears with all its bytes at once. A writer that is killed leaves no part of one; a part that a plain writer left is
//     not read (it has holes), and is no payload that anybody waits for.
//   - A reader takes a payload off only when it has it, decoded. Whether nobody can write to it any more, or cut it off under a mapping,
//     is asked of the kernel (fcntl(2), leases), not believed.
//   - The lock counts only if its file still has its name. A plain reader deletes that file under a plain writer that waits for it;
//     here a segment without lock file is read all the same, and a put is given one again as long as it is unread.
//   - The key is the only name there is. A put takes the place of an unread payload if that is this connector's, or of a connector that
//     was killed, or was never finished, or is older than the lease; any other is ErrTaken. The peers overwrite it.
//   - Only regular files of this user with one name are touched, no link is followed. Files of others are left alone by everything.
//   - Waits end with their context, and have an end of their own.
//
// # What it cannot do
//
// A payload has one reader. Nobody is told of an Abort but gets of the same connector. Claimed and Released come together, when the
// segment goes, and nothing tells a reader from who overwrites or deletes it: all of them are stage.Read. Whoever runs under this user
// can read, replace and delete payloads; so does Python's resource tracker, when a plain reader that had opened a segment, even if just
// to look, ends without reading it, or a plain writer ends. Where the processes are in containers, they have to share the directory;
// leases and locks go by the file and know no namespaces.
package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
	"golang.org/x/sync/semaphore"
)

var (
	// ErrKey: a key that cannot be the name of a segment, or metadata of another key.
	ErrKey = errors.New("stage/shm: bad key")
	// ErrTaken: there is an unread payload under the key that is not this connector's. Use another key, or have it read.
	ErrTaken = errors.New("stage/shm: key is taken")
	// ErrForeign: what is there is no segment, or not as it was announced, or not of this user.
	ErrForeign = errors.New("stage/shm: not a segment to read")
)

const (
	// DefaultMaxPayload is far above what stages send, and below what would be a mistake.
	DefaultMaxPayload = 64 << 30
	// putPatience bounds a put whose context has no deadline.
	putPatience = 30 * time.Second
	// maxLease is for ever: more would overflow the clock.
	maxLease = 100 * 365 * 24 * time.Hour
	// closeGrace is for readers that are in the middle of a read when Close may wait no longer.
	closeGrace = 2 * time.Second
	// maxFailures that are remembered.
	maxFailures = 4096
)

// Options of a Connector. Zero values are the defaults.
type Options struct {
	Dir        string        // default region.DefaultDir, where the peers' segments are
	Lease      time.Duration // how long a payload is kept unread; default stage.DefaultLease. The peers have none
	MaxBytes   int64         // of unread payloads; a put waits for room. Default: half of the directory's file system
	MaxPayload int64         // largest payload of a get, bytes; default DefaultMaxPayload
	Log        *slog.Logger
}

func (o *Options) complete() error {
	if o.Lease < 0 || o.MaxBytes < 0 || o.MaxPayload < 0 {
		return fmt.Errorf("%w: Lease %v, MaxBytes %d, MaxPayload %d; give none below 0", stage.ErrOptions, o.Lease, o.MaxBytes, o.MaxPayload)
	}
	o.Dir = cmp.Or(o.Dir, region.DefaultDir)
	o.Lease = cmp.Or(o.Lease, stage.DefaultLease)
	o.MaxPayload = cmp.Or(o.MaxPayload, DefaultMaxPayload)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Connector implements stage.Connector.
type Connector struct {
	o    Options
	dir  *folder
	room *semaphore.Weighted

	closing context.Context // done once Close began
	cancel  context.CancelFunc
	once    sync.Once
	err     error          // of Close
	work    sync.WaitGroup // puts and gets under way

	mu       sync.Mutex
	closed   bool
	record   *record           // nil before the first put
	watcher  *watcher          // nil before the first put and the first wait
	entries  map[string]*entry // what was put and is unread, by key
	idle     chan struct{}     // closed when an entry goes, and made anew
	failures map[string]failure
}

// failure is what Abort said of a key.
type failure struct {
	reason string
	until  time.Time
}

// Open makes a connector, and reaps what killed ones left unread for longer than their leases. The caller closes it.
func Open(o Options) (*Connector, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	dir, err := openFolder(o.Dir)
	if err != nil {
		return nil, err
	}
	if o.MaxBytes == 0 {
		_, total := dir.space()
		o.MaxBytes = total / 2
	}
	c := &Connector{o: o, dir: dir, room: semaphore.NewWeighted(o.MaxBytes), entries: make(map[string]*entry),
		idle: make(chan struct{}), failures: make(map[string]failure)}
	c.closing, c.cancel = context.WithCancel(context.Background())
	swept, err := sweep(dir, false)
	for _, s := range swept {
		if s.Reaped {
			o.Log.Info("reaped what a killed connector left", "path", s.Path, "bytes", s.Bytes, "why", s.Reason)
		}
	}
	if err != nil {
		o.Log.Warn("what killed connectors left was not reaped", "error", err)
	}
	return c, nil
}

// begin starts a put or a get; whoever gets true calls work.Done.
func (c *Connector) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.work.Add(1)
	return true
}

// live gives a context that also ends when Close begins; its cause is then ErrClosing. Without a deadline it ends after patience.
func (c *Connector) live(ctx context.Context, patience time.Duration) (context.Context, func()) {
	timeout := func() {}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		timeout = cancel
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.closing, func() { cancel(stage.ErrClosing) })
	return ctx, func() {
		stop()
		cancel(nil)
		timeout()
	}
}

// Healthy implements stage.Connector.
func (c *Connector) Healthy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed
}

// Republish implements stage.Connector, by a copy.
func (c *Connector) Republish(ctx context.Context, key string, got *stage.Got, o stage.PutOptions) (*stage.Published, error) {
	return stage.PutAgain(ctx, c, key, got, o)
}

// Cleanup implements stage.Connector. What this connector did not put is left alone.
func (c *Connector) Cleanup(key string) error {
	c.mu.Lock()
	e := c.entries[key]
	c.mu.Unlock()
	if e == nil {
		return nil
	}
	return c.drop(e, stage.CleanedUp)
}

// Abort implements stage.Connector. There is nothing on this wire that says it: what is unread is released, gets of this connector fail
// with the reason for stage.DefaultFailureKept, and readers elsewhere wait for their deadlines. A put of the key ends it.
func (c *Connector) Abort(key, reason string) {
	now := time.Now()
	c.mu.Lock()
	e := c.entries[key]
	if len(c.failures) >= maxFailures {
		for k, f := range c.failures { // those that are over, and any others until a quarter is free
			if len(c.failures) > maxFailures/4*3 || !now.Before(f.until) {
				delete(c.failures, k)
			}
		}
	}
	c.failures[key] = failure{reason, now.Add(stage.DefaultFailureKept)}
	w := c.watcher
	c.mu.Unlock()
	if w != nil {
		w.wake(key)
	}
	if e == nil {
		return
	}
	if err := c.drop(e, stage.Aborted); err != nil {
		c.o.Log.Debug("a payload that was given up is still there", "key", key, "error", err)
	}
}

// failed is the error for a key that Abort gave up, nil if it did not.
func (c *Connector) failed(key string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f, ok := c.failures[key]; ok && time.Now().Before(f.until) {
		return &stage.FailedError{Key: key, Reason: f.reason}
	}
	return nil
}

// Close implements stage.Connector. Gets that wait end at once. What was put and is unread waits for its readers until ctx is done, and
// is then removed, as the peers remove it when they close; a read that is under way has 2 s more. stage.ErrBusy: it took longer, and its
// payload was left to its reader, or to the next Open once its lease is over. What was got stays valid until it is released. Later calls
// wait for the first and give what it gave.
func (c *Connector) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	c.once.Do(func() { c.err = c.close(ctx) })
	return c.err
}

func (c *Connector) close(ctx context.Context) error {
	c.work.Wait()
	for c.unread() > 0 && ctx.Err() == nil {
		c.awaitRelease(ctx)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
	defer cancel()
	left := c.dropAll()
	for left > 0 && ctx.Err() == nil {
		short, end := context.WithTimeout(ctx, pollFast)
		c.awaitRelease(short)
		end()
		left = c.dropAll()
	}
	c.mu.Lock()
	w, r := c.watcher, c.record
	c.mu.Unlock()
	var errs []error
	if w != nil {
		errs = append(errs, w.close())
	}
	if r != nil {
		errs = append(errs, r.close(left == 0))
	}
	if left > 0 {
		errs = append(errs, fmt.Errorf("%w: %d payloads in %s are being read", stage.ErrBusy, left, c.o.Dir))
	}
	return errors.Join(append(errs, c.dir.close())...)
}

func (c *Connector) unread() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.entries)
}

// awaitRelease waits for an entry to go.
func (c *Connector) awaitRelease(ctx context.Context) {
	c.mu.Lock()
	idle, n := c.idle, len(c.entries)
	c.mu.Unlock()
	if n == 0 {
		return
	}
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// dropAll removes what is unread, and says how much could not be.
func (c *Connector) dropAll() (left int) {
	for _, e := range c.snapshot() {
		if c.drop(e, stage.Closed) != nil {
			left++
		}
	}
	return left
}

func (c *Connector) snapshot() []*entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]*entry, 0, len(c.entries))
	for _, e := range c.entries {
		all = append(all, e)
	}
	return all
}

func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

var _ stage.Connector = (*Connector)(nil)
