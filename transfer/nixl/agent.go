package nixl

import (
	"context"
	"fmt"
	"os"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// agent is one incarnation of a NIXL agent, in this process (engine) or in one of its own (child). Methods are safe for concurrent
// use. Errors wrap those of package transfer.
type agent interface {
	// attach registers memory. An id is attached once.
	attach(ctx context.Context, m attachment) (place, error)
	// detach withdraws it. No READ that writes it may be in flight.
	detach(id uint32)
	// addPeer makes an agent known by its metadata and counts its users; each success is followed by dropPeer.
	addPeer(ctx context.Context, metadata []byte) (peer uint64, err error)
	dropPeer(peer uint64)
	// read starts a READ. done is called once: from then on nothing writes the destination, but after errUnsettled. It must not block.
	read(r readOp, done func(error))
	// attend says that notifications are likely to come soon. It never blocks.
	attend()
	// serving is false once peers cannot read by it any more. It is so long before over where a process with a large mapping dies.
	serving() bool
	// over is closed when nothing of the agent touches any memory any more.
	over() <-chan struct{}
	// died says of an agent that is over that nobody ended it.
	died() bool
	// end ends the agent, whatever it is doing, and returns when it is over. READs in flight fail first.
	end()
}

// errUnsettled is about a READ that failed and may yet write its destination until the agent is over, see Settled of the binding's requests.
// It is one of several pieces mostly: of some, which UCX had begun, nobody learns the end.
var errUnsettled = fmt.Errorf("%w: nixl: a READ failed that may not have ended", transfer.ErrPeerLost)

// attachment is memory as an agent gets it: bytes where it runs in this process, a file to map where it does not.
type attachment struct {
	id       uint32
	place    Place    // in this process
	bytes    []byte   // nil: of a device
	file     *os.File // nil: there is none
	offset   int64    // of bytes[0] in file
	writable bool     // map it for writing: file must allow it
	outlive  bool     // go on serving it if the plane's process is killed; file is a region's, and not writable
	epoch    uint64   // of the region's owner, if outlive
}

// place is attached memory as peers see it.
type place struct {
	base     uint64 // address of its first byte in the agent's process
	metadata []byte // the agent's, with this memory
}

// piece is a run of bytes that is contiguous at both ends.
type piece struct {
	memory uint32 // attached
	offset uint64 // in it
	remote uint64 // address in the peer's process
	length uint64
	device uint64 // of the peer's that the address is on; 0 for DRAM
}

// readOp is a READ by addresses.
type readOp struct {
	peer   uint64
	far    binding.MemoryType // of the peer's memory; that of ours is where the pieces are attached, the same for all
	pieces []piece
	notify bool   // tell the peer when it is complete
	note   []byte // with this, which may be empty
}

// maxPieces of one READ.
const maxPieces = 64 << 10
