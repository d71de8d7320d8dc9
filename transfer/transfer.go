// Package transfer is the contract of a data plane: what ec and stage need from whatever moves the bytes.
//
// A producer registers its pool once, hands its metadata to consumers by the control plane, and grants spans of it. A consumer
// adds the producer as a peer and posts READs; it never gets bytes pushed at it. Planes: transfer/mapped, transfer/tcp,
// transfer/nixl. Package transfertest is the conformance suite that all of them pass; package faulty wraps a plane with faults.
package transfer

import (
	"context"
	"errors"
	"os"

	"github.com/tensorferry/tensorferry/region"
)

// Errors of planes. A plane's errors wrap one of these where one fits.
var (
	ErrUnreachable = errors.New("transfer: this plane cannot reach that peer")
	ErrDenied      = errors.New("transfer: the peer refused the READ (no such grant, or it ended)")
	ErrBadRequest  = errors.New("transfer: bad request")
	ErrPeerLost    = errors.New("transfer: the peer went away during the READ")
	ErrCanceled    = errors.New("transfer: canceled")
	ErrClosed      = errors.New("transfer: closed")
)

// Names of the planes.
const (
	Mapped = "mapped"
	TCP    = "tcp"
	NIXL   = "nixl"
)

// Memory is what a producer offers. The caller owns it and keeps it mapped until Registration.Close returns.
type Memory struct {
	Bytes      []byte   // the pool
	File       *os.File // a freshly opened description of the region's file, nil for memory that no file holds; the plane dups it
	Path       string   // the file's path
	FileOffset int64    // offset of Bytes[0] in File
}

// Capabilities say what a plane can do beyond READ.
type Capabilities struct {
	Notify  bool // the producer's plane reports ReadRequest.Notification when the READ is complete
	Cancel  bool // Read.Cancel ends a READ before its bytes are there
	InPlace bool // a Peer is also a Viewer
	Tokens  bool // a READ is only served under a live grant
}

// Plane is one data plane of one process. All methods are safe for concurrent use.
type Plane interface {
	Name() string
	Capabilities() Capabilities
	// Register offers m to peers. notify, which may be nil, is called from a goroutine of the plane's and must not block.
	Register(ctx context.Context, m Memory, notify func(Notification)) (Registration, error)
	// AddPeer makes a registration of another process (or of this one) readable. ErrUnreachable: choose another plane.
	// The caller closes the peer.
	AddPeer(ctx context.Context, metadata []byte) (Peer, error)
	// Close ends the plane; registrations and peers must be closed first.
	Close() error
}

// Notification says that a peer's READ under Grant is complete. Planes without tokens leave Grant empty, and say nothing of a READ
// that asked for no notification.
type Notification struct {
	Grant   string
	Message []byte
}

// Registration is memory on offer.
type Registration interface {
	// Metadata is what AddPeer needs, constant while the registration lives. Opaque, at most 64 KiB.
	Metadata() []byte
	// Grant makes spans readable under the token it returns (nil on a plane without tokens) until Revoke.
	// id names the grant and is unique among live grants.
	Grant(id string, spans []region.Span) (token []byte, err error)
	// Revoke ends a grant: when it returns, no byte is read under it any more, so its memory may be reused. A READ that was
	// under way fails at the reader. On planes without tokens it returns at once and promises nothing: see package ec.
	Revoke(id string)
	// Close withdraws the memory; no byte of it is touched after it returns.
	Close() error
}

// ReadRequest asks for remote spans in local memory.
type ReadRequest struct {
	Token        []byte        // from the grant
	Remote       []region.Span // in the peer's registered memory; the sum of lengths equals that of Local
	Local        [][]byte      // destination: the plane may write it until Read.Done is closed
	Notification []byte        // delivered to the producer on completion, if the plane can; at most 4 KiB; nil: not asked for
}

// Peer is a producer's registration as seen by a consumer.
type Peer interface {
	// Read posts a READ and returns without waiting for bytes. ctx bounds the posting only.
	Read(ctx context.Context, r ReadRequest) (Read, error)
	// Close lets go of the peer; READs in flight end first with an error or success.
	Close() error
}

// Read is a READ in flight.
type Read interface {
	// Done is closed at the terminal status: from then on the plane never writes the destination again.
	// A plane that cannot cancel may keep it open for ever if the peer is frozen; the caller quarantines the destination.
	Done() <-chan struct{}
	// Err is nil if all bytes are in place. Valid after Done is closed.
	Err() error
	// Cancel asks for an early end; Done still tells when it is over. A no-op where the plane cannot.
	Cancel()
}

// Witness is implemented by a Peer that sees the slot table of the region that it reads.
type Witness interface {
	// Holds tells whether the slot is ready with that generation at the time of the call, without asking anybody. After a READ of
	// an entry that was granted from that slot and generation, it vouches for the bytes. False where it cannot tell.
	Holds(slot uint32, gen uint64) bool
	// Slot gives a copy of what the slot says now. A READ of the extents of a ready one, if Holds gives true after it, is of the
	// entry that the slot named, whoever wrote it: nobody need have granted it. False where the peer cannot tell.
	Slot(slot uint32) (region.Slot, bool)
}

// Viewer is implemented by a Peer whose bytes can be used where they are, without a copy.
type Viewer interface {
	// View gives read-only slices of the peer's memory. They stay mapped until release is called; whether their content still
	// is what was granted is the caller's to verify (generation in the slot table, or verify at the producer).
	View(token []byte, remote []region.Span) (spans [][]byte, release func(), err error)
}
