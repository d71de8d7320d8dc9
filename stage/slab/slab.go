// Package slab is the memory that stage payloads live in: one region of shared memory, registered once on each data plane. Puts copy
// into it, gets READ into it. No memory is registered, and no agent made, for a single payload.
package slab

import (
	"context"
	"errors"
	"log/slog"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

var (
	// ErrTooLarge: the buffer is larger than the slab.
	ErrTooLarge = errors.New("slab: larger than the slab")
	// ErrNoPlane: nothing that the producer offers can be read from here. The text lists what was offered, and why each failed.
	ErrNoPlane = errors.New("slab: no plane reaches the producer")
	// ErrClosed: after Close.
	ErrClosed = errors.New("slab: closed")
)

// Align is where each tensor of a buffer begins: a multiple of it, in bytes (a cache line; enough for every dtype).
const Align = 64

// Options of a Slab.
type Options struct {
	Dir   string // default region.DefaultDir
	Name  string // names the region file, [A-Za-z0-9._-]{1,64}
	Bytes int64
	// Planes by preference: payloads are offered on all of them, and read by the first that works. The caller closes them, after the
	// slab. The nixl plane, if there, also serves plain peers.
	Planes []transfer.Plane
	Log    *slog.Logger
}

// Slab hands out buffers. All methods are safe for concurrent use.
type Slab struct{}

// New makes the region and registers it on every plane. The caller closes it.
func New(ctx context.Context, o Options) (*Slab, error) { return nil, errors.New("not built") }

// Bytes is the size of the slab.
func (s *Slab) Bytes() int64 { return 0 }

// Used is the bytes in buffers that are not free, those in quarantine included.
func (s *Slab) Used() int64 { return 0 }

// Alloc makes a buffer with one slice for each size, in order; 0 gives an empty slice. It waits for room, in the order of calls,
// until ctx is done. The content is what was there before. The caller frees the buffer, or hands it to a Payload.
// Errors: ErrTooLarge, ErrClosed, ctx's.
func (s *Slab) Alloc(ctx context.Context, sizes []int64) (*Buffer, error) { return nil, ErrClosed }

// Read READs all tensors that m describes into the slices of into, which has one for each of m.Specs, by the first plane that both
// ends have: for own producers what m.Ferry offers, for plain ones the NIXL agent of m. It gives the plane's name ("inline" for bytes
// that came in m itself). On success, all bytes are in place.
//
// If ctx is done before the READ is over, Read returns ctx's error and the READ may still write into the buffer: see Buffer.Idle.
// Errors: ErrNoPlane, and those of package transfer (ErrDenied, ErrPeerLost, ..).
func (s *Slab) Read(ctx context.Context, m *wire.Metadata, into *Buffer) (plane string, err error) {
	return "", ErrNoPlane
}

// View gives the tensors' bytes where they are at a producer of this machine, without a copy: one read-only slice for each of
// m.Specs. They stay mapped until release is called. Whether they still are what was granted is for the caller to verify at the
// producer before it believes them, and its claim has to hold as long as they are in use. ErrNoPlane: not to be had without a copy.
func (s *Slab) View(ctx context.Context, m *wire.Metadata) (tensors [][]byte, plane string, release func(), err error) {
	return nil, "", nil, ErrNoPlane
}

// Close waits for buffers to be free until ctx is done, then ends the registrations and removes the region. Memory that a READ may
// still write, or a reader still reads, stays mapped for the life of the process; the error then wraps context's.
func (s *Slab) Close(ctx context.Context) error { return nil }

// Buffer is memory for the tensors of one payload.
type Buffer struct{}

// Slices are the tensors' memory, one for each size asked for.
func (b *Buffer) Slices() [][]byte { return nil }

// Idle gives a channel that is closed when no READ writes into the buffer (any more).
func (b *Buffer) Idle() <-chan struct{} { return nil }

// Free gives the memory back: at once, or when the READ into it is over. Calls after the first do nothing.
func (b *Buffer) Free() {}

// Payload offers the buffer to readers: it implements stage.Memory. specs describe the slices. The buffer is the payload's from
// then on: its Release frees it. Nobody may write it any more.
func (b *Buffer) Payload(specs []wire.Spec) *Payload { return nil }

// Payload is a published buffer. It implements stage.Memory.
type Payload struct{}

// Offer implements stage.Memory. For an own reader it fills in Ferry.Inline if the payload is small enough, else Ferry.Planes (a
// grant on each plane that the reader named) and Ferry.Offsets. For a plain reader (ask is nil): AgentMetadata and Groups, of the
// serving agent of now.
func (p *Payload) Offer(ctx context.Context, grant string, ask *wire.FerryRequest, m *wire.Metadata) error {
	return ErrClosed
}

// Withdraw implements stage.Memory. Tokens are revoked. Whoever could still READ without one (a plain reader, or an own one by nixl)
// and did not end its claim itself is stopped by rotation: the serving agent that it was told is ended once no other claim needs it.
func (p *Payload) Withdraw(ctx context.Context, grant string, idle bool) error { return nil }

// Release implements stage.Memory.
func (p *Payload) Release() {}
