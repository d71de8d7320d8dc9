// Package wire has the messages of the encoder-cache peer-to-peer protocol: byte for byte those of vLLM's ECCPUConnector
// (generations 1 and 2), plus the `ferry` extension that only our own nodes read, and the announcement that orchestrators carry.
//
// Decoders take a closed set of types, check depth and sizes before they allocate, and never panic. What a decoder returns shares
// no memory with its input. Functions keep no state and are safe for concurrent use.
//
// # What is accepted
//
// The tolerance is that of the peers' own decoder (msgspec 0.23): unknown fields, a missing or late type, integers and strings in
// longer encodings than needed, and a field given twice (the last wins) are accepted. A wrong type, a missing required field, nil,
// a truncated message, a trailing byte, bad UTF-8 and an unknown status are refused. Four things are refused here that the peers
// take: nesting over MaxDepth (it ends their process at about 1,000), block numbers that are negative or 2^31 and over (the peers'
// consumer fails on them later), anything over the limits below, and a field name that is not UTF-8.
package wire

import "strconv"

// Protocol generations (EC_CONNECTOR_VERSION of the peers). A sender leaves its own generation out on the wire.
const (
	Generation1 = 1
	Generation2 = 2
)

// ExtensionVersion is the version of the `ferry` extension that this package speaks.
const ExtensionVersion = 1

// Limits of what is decoded. Bytes where nothing else is said.
const (
	MaxFrame     = 256 << 20 // of an ack (a vLLM ack carries 14 bytes a block of the whole region)
	MaxRequest   = 64 << 10  // of a request, a verify, a verified
	MaxKey       = 256       // of an mm_hash
	MaxSession   = 256
	MaxHash      = 256       // of a compatibility hash (a real one has 64)
	MaxDepth     = 16        // maps and arrays in one another, the message itself included
	MaxBlocksAck = 1_000_000 // block numbers in one ack
	MaxBlock     = 1<<31 - 1 // the largest block number
)

// Limits of the extension. The encoder does not cut: what is over a limit is refused by the peer.
const (
	MaxNode          = 64
	MaxGrant         = 256
	MaxPlanes        = 8
	MaxLocal         = 108 // of a unix socket's name
	MaxPlaneName     = 64
	MaxPlaneMetadata = 64 << 10 // of each plane
	MaxToken         = 256
	MaxExtents       = 64   // a more fragmented entry goes as Blocks
	MaxPulled        = 200  // entries of one Pulled, which so stays below MaxRequest
	MaxCompatText    = 4096 // of each text of Compat
)

// Status of an ack.
type Status uint8

const (
	OK           Status = 0
	NackMissing  Status = 1
	NackIncompat Status = 2
	NackVersion  Status = 3
	NackInternal Status = 4
	NackNotReady Status = 5
)

var statusNames = [...]string{"OK", "NACK_MISSING", "NACK_INCOMPAT", "NACK_VERSION", "NACK_INTERNAL", "NACK_NOT_READY"}

// Retryable is true for NOT_READY only.
func (s Status) Retryable() bool { return s == NackNotReady }

// String gives the peers' name, e.g. "NACK_MISSING".
func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return "Status(" + strconv.Itoa(int(s)) + ")"
}

// Request is XferReq.
type Request struct {
	Key        string // mm_hash
	CompatHash string
	Session    string
	// Version is the sender's generation. Decoded: the receiver's configured generation if left out, and math.MaxInt for a number
	// too large for an int. Encoded: 0 means the sender's own.
	Version int
	Ferry   *FerryRequest // nil from a plain peer
}

// Ack is XferAck.
type Ack struct {
	Key           string
	Status        Status
	Session       string
	Blocks        []uint32 // each at most MaxBlock
	AgentMetadata []byte
	MemDescriptor []byte
	Ferry         *FerryAck // nil from a plain peer
}

// FerryRequest is the extension of a request: who asks, and by which planes it can read.
type FerryRequest struct {
	V      int    // extension version; 0 is written as ExtensionVersion
	Node   string // instance id of the asking node
	Epoch  uint64
	Planes []string // by preference
	Sum    bool     // wants the checksum if there is one
	Compat Compat   // the parts of the compatibility hash, so that a mismatch can name the field
	Try    uint64   // counts the requests of one connection; the ack echoes it, so that a late ack is told from the one awaited
}

// FerryAck is the extension of an ack, also of a NACK (then only V, Node, Epoch, Try and Local are set).
type FerryAck struct {
	V       int    // extension version; 0 is written as ExtensionVersion
	Try     uint64 // of the request
	Node    string
	Epoch   uint64
	Gen     uint64      // generation of the entry
	Slot    uint32      // its slot
	Grant   string      // names the grant in verify
	Extents [][2]uint32 // runs of blocks (start, count): own peers read these, Blocks may be empty
	Rows    int64       // of the encoding; 0: not said
	Bytes   int64       // bytes of the encoding without padding
	LeaseMS int64       // how long the grant lives on the producer's clock
	Sum     *uint64     // xxh3, if asked for and kept
	Planes  []PlaneOffer
	Local   string // of a peer of this machine: the name of the producer's local socket (control.Loop.DialLocal)
}

// PlaneOffer is one way to read.
type PlaneOffer struct {
	Name     string
	Metadata []byte
	Token    []byte
}

// Verify is our own message: after its READ an own consumer asks whether the grant held all the while. Type tag "ferry_verify".
type Verify struct {
	Key, Session, Grant string
	Gen                 uint64
	Failed              bool // the READ failed: just let go of the grant
}

// Verified answers Verify: OK means that the entry kept its generation from grant to now; the grant is over either way. Type tag "ferry_verified".
type Verified struct {
	Key, Session, Grant string
	Gen                 uint64
	OK                  bool
}

// Pulled is our own message: the consumer has read these entries without asking, where it found them in the producer's slot table,
// so that their holds may end. It has no answer, and one that is lost costs nothing but the holds' leases. Type tag "ferry_pulled".
type Pulled struct {
	CompatHash string // of the pool
	Entries    []PulledEntry
}

// PulledEntry names what was read.
type PulledEntry struct {
	Key string
	Gen uint64
}

// Message is one of Request, Ack, Verify, Verified, Pulled.
type Message interface{ isMessage() }

func (*Request) isMessage()  {}
func (*Ack) isMessage()      {}
func (*Verify) isMessage()   {}
func (*Verified) isMessage() {}
func (*Pulled) isMessage()   {}

// Names on the wire.
const (
	tagRequest  = "req"
	tagAck      = "ack"
	tagVerify   = "ferry_verify"
	tagVerified = "ferry_verified"
	tagPulled   = "ferry_pulled"

	fieldType     = "type"
	fieldKey      = "mm_hash"
	fieldCompat   = "compatibility_hash"
	fieldSession  = "session_id"
	fieldVersion  = "connector_version"
	fieldStatus   = "status"
	fieldBlocks   = "src_block_indices"
	fieldAgent    = "agent_metadata"
	fieldMem      = "mem_descriptor"
	fieldFerry    = "ferry"
	fieldV        = "v"
	fieldNode     = "node"
	fieldEpoch    = "epoch"
	fieldPlanes   = "planes"
	fieldSum      = "sum"
	fieldParts    = "compat"
	fieldTry      = "try"
	fieldGen      = "gen"
	fieldSlot     = "slot"
	fieldGrant    = "grant"
	fieldExtents  = "extents"
	fieldRows     = "rows"
	fieldBytes    = "bytes"
	fieldLease    = "lease_ms"
	fieldName     = "name"
	fieldMetadata = "metadata"
	fieldToken    = "token"
	fieldFailed   = "failed"
	fieldOK       = "ok"
	fieldEntries  = "entries"
	fieldLocal    = "local"

	fieldVLLMVersion = "vllm_version"
	fieldModel       = "model"
	fieldDtype       = "dtype"
	fieldBlockBytes  = "block_size_bytes"
)
