// Package slab is the memory that stage payloads live in: one region of shared memory, registered once on each data plane. Puts copy
// into it, gets READ into it. No memory is registered, and no agent made, for a single payload.
//
// # When memory is free again
//
// A Buffer is free when its owner has freed it and no READ writes into it any more; a Payload is when its Store has withdrawn every
// grant of it. What withdrawing means depends on how the reader reads:
//
//   - By a token (tcp): revoking it ends the READ.
//   - By mapping the file (mapped): nothing stops such a reader, and nothing has to. It is one of our own, asks the producer after
//     its READ whether its claim still holds, and drops what it read if not; or it sees in the region's slot table that the payload
//     is still there.
//   - By a NIXL agent (plain readers, and own ones by nixl): only the end of that agent stops it. So the agent is rotated; see server.
package slab

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

var (
	// ErrTooLarge: the buffer is larger than the slab.
	ErrTooLarge = errors.New("slab: larger than the slab")
	// ErrNoPlane: nothing that the producer offers can be read from here, or nothing that the reader can take is offered here. The
	// text lists what was offered, and why each failed.
	ErrNoPlane = errors.New("slab: no plane reaches the producer")
	// ErrClosed: after Close, or after the buffer was freed.
	ErrClosed = errors.New("slab: closed")
	// ErrMismatch: metadata, specs and buffer do not fit one another.
	ErrMismatch = errors.New("slab: sizes do not match")
)

// Align is where each tensor of a buffer begins: a multiple of it, in bytes (a cache line; enough for every dtype).
const Align = 64

// blockBytes is what the region hands out: a page.
const blockBytes = 4096

// group is the slab's in the region's identity, so that it never shares a file with an encoder pool of the same instance name.
var group = hex.EncodeToString([]byte("stage"))

// closePatience bounds what Close waits for planes after its context has ended.
const closePatience = 15 * time.Second

// Options of a Slab.
type Options struct {
	Dir   string // default region.DefaultDir
	Name  string // names the region file, [A-Za-z0-9._-]{1,64}
	Bytes int64  // rounded up to 4 KiB
	// Planes by preference: payloads are offered on all of them, and read by the first that works. The caller closes them, after the
	// slab. The nixl plane, if there, also serves plain peers.
	Planes []transfer.Plane
	Log    *slog.Logger
}

// Slab hands out buffers. All methods are safe for concurrent use.
type Slab struct {
	log    *slog.Logger
	region *region.Region
	pool   []byte
	ways   []*way // by preference

	gets     space // all of it until it is divided
	puts     space // the end of it, once divided
	divided  atomic.Bool
	dividing sync.Mutex

	slots slots

	deviceMu sync.Mutex
	devices  map[*DeviceMemory]struct{} // that are not closed

	payloads atomic.Uint64 // numbers them
	work     sync.WaitGroup
	gate     sync.RWMutex // orders the begin of READs and the closing
	closed   chan struct{}
	once     sync.Once
	err      error // of Close
}

// way is one plane: the registration that serves the slab, and the producers that are known.
type way struct {
	plane  transfer.Plane
	reg    transfer.Registration
	tokens bool    // a READ needs a grant
	server *server // nil: its readers have tokens, or verify
	peers  peers
}

// New makes the region, reaps what a dead owner left under its name, and registers it on every plane. The caller closes it. Errors
// are those of region.Create and of the planes' Register.
func New(ctx context.Context, o Options) (*Slab, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Bytes <= 0 || o.Bytes > math.MaxUint32*int64(blockBytes) {
		return nil, fmt.Errorf("%w: a slab of %d bytes", region.ErrOptions, o.Bytes)
	}
	blocks := int((o.Bytes + blockBytes - 1) / blockBytes)
	r, err := region.Create(ctx, region.Options{
		Dir: o.Dir, Identity: region.Identity{Instance: o.Name, Group: group}, Replace: true,
		Geometry: region.Geometry{BlockBytes: blockBytes, Blocks: blocks, Slots: slotsFor(blocks)},
	})
	if err != nil {
		return nil, fmt.Errorf("slab: %w", err)
	}
	s := &Slab{log: o.Log, region: r, pool: r.Pool(), closed: make(chan struct{}), devices: map[*DeviceMemory]struct{}{}}
	s.gets.init(0, blocks, Align)
	s.puts.init(blocks, 0, Align)
	s.slots.init(r.Slots())
	for _, p := range o.Planes {
		if err = s.register(ctx, p); err != nil {
			break
		}
	}
	if err != nil {
		for _, w := range s.ways {
			_ = w.reg.Close() // nobody knows it yet
		}
		return nil, errors.Join(err, r.Close(true))
	}
	s.work.Go(s.tidy)
	return s, nil
}

func (s *Slab) register(ctx context.Context, p transfer.Plane) error {
	if slices.Contains(s.Planes(), p.Name()) {
		return fmt.Errorf("slab: two planes %s: a reader could not tell them apart", p.Name())
	}
	f, err := s.region.Reopen(true)
	if err != nil {
		return fmt.Errorf("slab: %w", err)
	}
	defer f.Close() // the plane has a description of its own
	reg, err := p.Register(ctx, transfer.Memory{Bytes: s.pool, File: f, Path: s.region.Path(), FileOffset: s.region.PoolOffset()}, nil)
	if err != nil {
		return fmt.Errorf("slab: register on plane %s: %w", p.Name(), err)
	}
	w := &way{plane: p, reg: reg, tokens: p.Capabilities().Tokens}
	w.peers.init(p, &s.work)
	if a, ok := reg.(agentRegistration); ok {
		w.server = newServer(a, s.log)
	}
	s.ways = append(s.ways, w)
	return nil
}

// tidy closes peers that nobody has used for a while.
func (s *Slab) tidy() {
	tick := time.NewTicker(peerIdle / 4)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			for _, w := range s.ways {
				w.peers.tidy(time.Now())
			}
		case <-s.closed:
			return
		}
	}
}

// Bytes is the size of the slab.
func (s *Slab) Bytes() int64 { return int64(len(s.pool)) }

// Divide sets a part of the slab aside for AllocPut, whole pages; Alloc has the rest. So who waits for room to put never waits for
// what was got, however many do so while they hold what they got. It gives the size of that part. A slab is divided once, before anything
// of it is in use, by whoever comes first; later calls only tell. ErrMismatch: nothing would be left, or some of it is in use.
func (s *Slab) Divide(puts int64) (int64, error) {
	s.dividing.Lock()
	defer s.dividing.Unlock()
	if s.divided.Load() {
		return s.puts.bytes(), nil
	}
	blocks, all := blocksFor(puts), len(s.pool)/blockBytes
	if puts <= 0 || blocks >= all {
		return 0, fmt.Errorf("%w: %d bytes for puts of a slab of %d", ErrMismatch, puts, s.Bytes())
	}
	if !s.gets.resize(0, all-blocks) {
		return 0, fmt.Errorf("%w: a slab is divided before anything of it is in use, and %d bytes are", ErrMismatch, s.Used())
	}
	s.puts.resize(all-blocks, blocks)
	s.divided.Store(true)
	return s.puts.bytes(), nil
}

// Used is the bytes in buffers that are not free, those in quarantine included. A buffer takes whole pages.
func (s *Slab) Used() int64 { return (s.gets.used() + s.puts.used()) * blockBytes }

// Path is the region file's.
func (s *Slab) Path() string { return s.region.Path() }

// Close waits for buffers to be free until ctx is done, then ends the registrations and removes the region. Memory that a READ may
// still write, or a reader still reads, stays mapped for the life of the process; the error then wraps context's. It returns at most
// 15 s after ctx is done, whatever the planes do. Later calls give the first one's error.
func (s *Slab) Close(ctx context.Context) error {
	s.once.Do(func() { s.err = s.close(ctx) })
	return s.err
}

func (s *Slab) close(ctx context.Context) error {
	var err error
	gets, puts := s.gets.close(), s.puts.close()
	for _, idle := range []<-chan struct{}{gets, puts} {
		select {
		case <-idle:
		case <-ctx.Done():
			err = fmt.Errorf("slab: %d bytes are still in use: %w", s.Used(), ctx.Err())
		}
	}
	s.gate.Lock()
	close(s.closed)
	s.gate.Unlock()
	ended := make(chan error, 1)
	go func() {
		var planes sync.WaitGroup
		errs := make([]error, len(s.ways))
		for i, w := range s.ways {
			planes.Go(func() {
				w.peers.close() // ends READs that are still under way
				if w.server != nil {
					w.server.close()
				}
				errs[i] = w.reg.Close()
			})
		}
		planes.Wait()
		s.work.Wait() // READs that were abandoned, peers that are being closed
		ended <- errors.Join(errs...)
	}()
	patience := time.NewTimer(closePatience)
	defer patience.Stop()
	select {
	case e := <-ended:
		err = errors.Join(err, e)
	case <-patience.C:
		return errors.Join(err, fmt.Errorf("slab: a plane does not let go of the memory: %w", context.DeadlineExceeded), s.region.Unlink())
	}
	if s.Used() > 0 {
		return errors.Join(err, s.region.Unlink()) // whoever has the buffers may still touch them
	}
	return errors.Join(err, s.region.Close(true))
}
