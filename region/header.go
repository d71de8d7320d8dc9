package region

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// The file format, version 1. All numbers are in the byte order of the machine: a region never leaves it.
//
//	offset  bytes  constant part, covered by the checksum
//	     0      8  magic "FERRYREG"
//	     8      4  format version
//	    12      4  length of the constant part; its checksum (xxh3, 64 bits) follows it. 0 to 16 and this rule hold for
//	               every version to come, so any version can tell a dead region file from a file that is none.
//	    16      8  size of the file
//	    24      8  bytes of a block
//	    32      8  blocks
//	    40      8  slots
//	    48      8  offset of the slot table
//	    56      8  offset of the pool
//	    64      8  time of creation, Unix nanoseconds
//	    72      4  pid of the creator
//	    76      4  rank
//	    80     64  instance, padded with zeros
//	   144    128  group, padded with zeros
//	   272     36  boot id of the machine, as text
//	   308      4  zero
//	   312      8  checksum
//	               variable part: 8-byte words, stored atomically by the owner
//	  1024      8  epoch: owners so far
//	  1032      8  pid of the owner
//	  1040      8  port of the owner's side channel, 0 if none
//	  1048      8  adopt_until: a restarted owner may take the region over until then; CLOCK_BOOTTIME nanoseconds, 0: never
//	  1056      8  serve_until: processes that serve the file go on until then once it has lost its name; same clock, 0: they end
//	  1088      8  generation given last; in a cache line of its own
//	  4096  32768  clients (see clients.go)
//	 36864         slot table (see slots.go), then zeros to the pool
const (
	headerMagic   = "FERRYREG"
	headerVersion = 1
	headerBytes   = 4096

	offVersion    = 8
	offConstLen   = 12
	offSize       = 16
	offBlockBytes = 24
	offBlocks     = 32
	offSlots      = 40
	offTable      = 48
	offPool       = 56
	offCreated    = 64
	offCreator    = 72
	offRank       = 76
	offInstance   = 80
	offGroup      = offInstance + maxInstance
	offBootID     = offGroup + maxGroup
	bootIDBytes   = 36
	constLen      = 312 // and the offset of the checksum

	offEpoch      = 1024
	offOwner      = 1032
	offPort       = 1040
	offAdoptUntil = 1048
	offServeUntil = 1056
	offGen        = 1088

	tableOffset = headerBytes + MaxClients*clientBytes

	// poolAlign is the largest base page of a Linux port, so the layout is the same for every kernel.
	poolAlign = 64 << 10
)

var order = binary.NativeEndian

// header is the decoded header page.
type header struct {
	geometry Geometry
	identity Identity
	bootID   string
	created  int64 // Unix nanoseconds
	creator  int
	epoch    uint64
	owner    int
	port     int
	gen      uint64

	adoptUntil int64 // CLOCK_BOOTTIME nanoseconds
	serveUntil int64 // the same
}

// encode writes the header into a zeroed page.
func (h *header) encode(page []byte) {
	copy(page, headerMagic)
	order.PutUint32(page[offVersion:], headerVersion)
	order.PutUint32(page[offConstLen:], constLen)
	order.PutUint64(page[offSize:], uint64(h.geometry.fileBytes()))
	order.PutUint64(page[offBlockBytes:], uint64(h.geometry.BlockBytes))
	order.PutUint64(page[offBlocks:], uint64(h.geometry.Blocks))
	order.PutUint64(page[offSlots:], uint64(h.geometry.Slots))
	order.PutUint64(page[offTable:], tableOffset)
	order.PutUint64(page[offPool:], uint64(h.geometry.poolOffset()))
	order.PutUint64(page[offCreated:], uint64(h.created))
	order.PutUint32(page[offCreator:], uint32(h.creator))
	order.PutUint32(page[offRank:], uint32(h.identity.Rank))
	copy(page[offInstance:offGroup], h.identity.Instance)
	copy(page[offGroup:offBootID], h.identity.Group)
	copy(page[offBootID:offBootID+bootIDBytes], h.bootID)
	order.PutUint64(page[constLen:], xxh3.Hash(page[:constLen]))
	order.PutUint64(page[offEpoch:], h.epoch)
	order.PutUint64(page[offOwner:], uint64(h.owner))
	order.PutUint64(page[offPort:], uint64(h.port))
	order.PutUint64(page[offAdoptUntil:], uint64(h.adoptUntil))
	order.PutUint64(page[offServeUntil:], uint64(h.serveUntil))
	order.PutUint64(page[offGen:], h.gen)
}

// isRegion says whether page begins a region file of any version of the format.
func isRegion(page []byte) bool {
	if len(page) < headerBytes || string(page[:len(headerMagic)]) != headerMagic {
		return false
	}
	n := order.Uint32(page[offConstLen:])
	return n >= offSize && n <= headerBytes-8 && order.Uint64(page[n:]) == xxh3.Hash(page[:n])
}

// isRemnant says whether a file of size bytes that begins with page is what is left of a region that somebody emptied, or cut to less
// than its header. Nothing in it is of use to anybody, and nobody owns it unless it is locked.
func isRemnant(page []byte, size int64) bool {
	return size == 0 || size < headerBytes && strings.HasPrefix(string(page), headerMagic)
}

// decodeHeader checks everything that the layout depends on against the size of the file before anything is mapped.
func decodeHeader(page []byte, size int64) (header, error) {
	var h header
	bad := func(format string, a ...any) (header, error) {
		return header{}, fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, a...))
	}
	if len(page) < headerBytes {
		return bad("%d bytes, a header has %d", size, headerBytes)
	}
	if string(page[:len(headerMagic)]) != headerMagic {
		return bad("no magic at its start")
	}
	if !isRegion(page) {
		return bad("checksum of the header is wrong")
	}
	if v := order.Uint32(page[offVersion:]); v != headerVersion {
		return bad("format version %d, this program knows %d", v, headerVersion)
	}
	if n := order.Uint32(page[offConstLen:]); n != constLen {
		return bad("constant part of %d bytes, version %d has %d", n, headerVersion, constLen)
	}
	blockBytes, blocks, slots := order.Uint64(page[offBlockBytes:]), order.Uint64(page[offBlocks:]), order.Uint64(page[offSlots:])
	if blockBytes > MaxBlockBytes || blocks > MaxBlocks || slots > MaxSlots {
		return bad("%d blocks of %d bytes and %d slots are over the limits", blocks, blockBytes, slots)
	}
	h.geometry = Geometry{BlockBytes: int64(blockBytes), Blocks: int(blocks), Slots: int(slots)}
	if err := h.geometry.validate(); err != nil {
		return bad("%v", err)
	}
	if want := h.geometry.fileBytes(); size != want || order.Uint64(page[offSize:]) != uint64(want) {
		return bad("the file has %d bytes, its header says %d, its geometry needs %d", size, order.Uint64(page[offSize:]), want)
	}
	if order.Uint64(page[offTable:]) != tableOffset || order.Uint64(page[offPool:]) != uint64(h.geometry.poolOffset()) {
		return bad("slot table at %d and pool at %d, expected %d and %d",
			order.Uint64(page[offTable:]), order.Uint64(page[offPool:]), tableOffset, h.geometry.poolOffset())
	}
	h.identity = Identity{
		Instance: text(page[offInstance:offGroup]),
		Group:    text(page[offGroup:offBootID]),
		Rank:     int(order.Uint32(page[offRank:])),
	}
	if _, err := h.identity.FileName(); err != nil {
		return bad("%v", err)
	}
	h.bootID = text(page[offBootID : offBootID+bootIDBytes])
	h.created = int64(order.Uint64(page[offCreated:]))
	h.creator = int(int32(order.Uint32(page[offCreator:])))
	h.epoch = order.Uint64(page[offEpoch:])
	h.owner = int(order.Uint64(page[offOwner:]))
	h.port = int(order.Uint64(page[offPort:]))
	h.adoptUntil = int64(order.Uint64(page[offAdoptUntil:]))
	h.serveUntil = int64(order.Uint64(page[offServeUntil:]))
	h.gen = order.Uint64(page[offGen:])
	if h.gen > maxGen {
		return bad("generation %d is over the limit", h.gen)
	}
	return h, nil
}

func text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// headerWord is a word of a mapped file, as of the variable part of its header, for sync/atomic.
func headerWord(mem []byte, off int) *uint64 { return (*uint64)(unsafe.Pointer(&mem[off])) }
