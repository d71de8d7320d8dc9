package stage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// Connector is one worker's end of the edges between stages: what it puts others get, what others put it gets. A middle stage does
// both. Implemented by Link (the job and the wire of vLLM-Omni's NixlConnector) and by shm.Connector (of its SharedMemoryConnector).
// All methods are safe for concurrent use.
type Connector interface {
	// Put publishes a copy of root under key; root may be changed afterwards. Errors: ErrClaimed, ErrClosing, ErrFull, ErrOptions,
	// those of wire.Pack, and ctx's while it waits for room.
	Put(ctx context.Context, key string, root tensor.Node, o PutOptions) (*Published, error)
	// Get gets a payload, by the deadline of ctx. Errors: ErrNotFound, ErrFailed, ErrClosing, those of package slab and transfer, and
	// ctx's. A get that fails leaves the payload for another one, where the producer is ours.
	Get(ctx context.Context, r Request) (*Got, error)
	// Republish puts what this connector got under another key. got is the connector's from then on, whatever the error: its Root must
	// not be written any more, and not be used once the payload is released. Errors are those of Put, and of got's Release; ErrOptions: got
	// was released already.
	Republish(ctx context.Context, key string, got *Got, o PutOptions) (*Published, error)
	// Cleanup releases what was put under key and nobody claimed. ErrClaimed: it is being read.
	Cleanup(key string) error
	// Abort tells who waits for key, or asks for it soon, that it will not come.
	Abort(key, reason string)
	// Healthy is false once Close began, or when the connector can serve no more.
	Healthy() bool
	// Close refuses new work at once, waits for readers until ctx is done, and ends in bounded time.
	Close(ctx context.Context) error
}

// PutOptions of one payload. Zero values are the connector's defaults.
type PutOptions struct {
	Lease   time.Duration // how long it is kept unclaimed
	Readers int           // how many have to read it before it is released; default 1
	Pack    wire.PackOptions
	// Borrow lets a Link put tensors that are on a device (tensor.OnDevice), in memory registered with slab.Slab.Device. They are not
	// copied: from success on their bytes must not be written, nor freed, until Published.Released is closed, and stay the payload's for
	// ever if Close of the Link cannot stop a reader (ErrBusy). What writes them has to be over before Put: wait for the stream. Without
	// it a tensor on a device is refused.
	Borrow bool
}

// Published is a payload that was put.
type Published struct {
	Key        string
	Generation wire.ID
	Size       int64  // bytes of all tensors
	Metadata   []byte // msgpack, for whoever gets it: wire.DecodeHandoff takes it

	claimed, released chan struct{}
	outcome           Outcome // before released is closed
}

// Claimed is closed when the first reader has claimed it.
func (p *Published) Claimed() <-chan struct{} { return p.claimed }

// Released is closed when its memory is free again, borrowed memory included.
func (p *Published) Released() <-chan struct{} { return p.released }

// Outcome says why it was released; valid once Released is closed.
func (p *Published) Outcome() Outcome { return p.outcome }

// Outcome says how a payload ended.
type Outcome uint8

// The outcomes.
const (
	Read      Outcome = iota + 1 // every reader that was wanted has got it
	Expired                      // nobody claimed it in time
	Replaced                     // by another put of its key
	CleanedUp                    // by Cleanup
	Aborted                      // by Abort
	Closed                       // the connector was closed
)

var outcomeNames = [...]string{Read: "read", Expired: "expired", Replaced: "replaced", CleanedUp: "cleaned up", Aborted: "aborted", Closed: "closed"}

// String is a word for a log.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) && o != 0 {
		return outcomeNames[o]
	}
	return fmt.Sprintf("outcome %d", o)
}

// Endpoint is where a producer answers claims.
type Endpoint struct {
	Host string
	Port int
}

// Request says which payload to get.
type Request struct {
	Key string
	// Metadata is what put returned, or any msgpack map with an endpoint (see wire.Handoff). Nil: From is asked for the key.
	Metadata []byte
	// From counts where Metadata names no endpoint. It belongs to this request: replicas of a producer differ by it.
	From Endpoint
	// Wait waits for a payload that is not there yet, until the deadline. Otherwise Get gives ErrNotFound at the first answer.
	Wait bool
	// InPlace asks for the bytes where they are at a producer of ours on this machine, without a copy. The claim is then held until
	// Release. A copy is made where that is not possible.
	InPlace bool
	// Device is where tensors go that the producer has on a device; with AllOnDevice, those that it has on the CPU too. Nil: all go to the
	// CPU, as the serialized part of a payload always does. NIXL reads them straight into the pool; they are there when Get returns,
	// and until Release: what works on them has to be over before that. Memory of a get that failed comes back to the pool when
	// nothing writes it any more. Only a Link has this, not together with InPlace.
	Device      *slab.DevicePool
	AllOnDevice bool
}

// Got is a payload.
type Got struct {
	Key   string
	Root  tensor.Node // its tensors are views over memory of the connector, read-only if InPlace
	Kind  wire.Kind
	Size  int64
	Plane string // that moved the bytes: "mapped", "tcp", "nixl", "inline", "shm"

	release func() error
	// received is what a Link needs to publish the payload again without a copy; nil if its memory is not the Link's own.
	received *received
}

// received is a payload in a buffer of the slab. Whoever takes it off its Got frees the buffer, or publishes it.
type received struct {
	buffer *slab.Buffer
	meta   *wire.Metadata // Kind, Specs, Size; Ferry's Top and Sum, if it is there
}

// Release gives the memory back: Root must not be used any more. Calls after the first do nothing. The error is of a payload that
// was used in place and did not stay what was put (its producer restarted, or its claim ran out): what was read from it may be wrong.
func (g *Got) Release() error {
	if g.release == nil {
		return nil
	}
	f := g.release
	g.release = nil
	return f()
}

// PutAgain is for implementations of Connector: Republish by a copy.
func PutAgain(ctx context.Context, c Connector, key string, got *Got, o PutOptions) (*Published, error) {
	if got.release == nil {
		return nil, fmt.Errorf("%w: what was got was released already", ErrOptions)
	}
	p, err := c.Put(ctx, key, got.Root, o)
	return p, errors.Join(err, got.Release())
}

// NewGot is for implementations of Connector: g with what its Release does, once.
func NewGot(g Got, release func() error) *Got {
	g.release = release
	return &g
}

// NewPublished is for implementations of Connector: p, and what marks it claimed and released. Each does something once.
func NewPublished(p Published) (_ *Published, claimed func(), released func(Outcome)) {
	p.claimed, p.released = make(chan struct{}), make(chan struct{})
	var claim, end sync.Once
	return &p, func() { claim.Do(func() { close(p.claimed) }) }, func(o Outcome) {
		end.Do(func() {
			p.outcome = o
			close(p.released)
		})
	}
}
