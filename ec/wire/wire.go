// Package wire has the messages of the encoder-cache peer-to-peer protocol: byte for byte those of vLLM's ECCPUConnector
// (generations 1 and 2), plus the `ferry` extension that only our own nodes read, and the announcement that orchestrators carry.
//
// Decoders take a closed set of types, check depth and sizes before they allocate, and never panic.
package wire

import "errors"

var (
	ErrMalformed = errors.New("wire: malformed message")
	ErrLimit     = errors.New("wire: message over a limit")
)

// Protocol generations (EC_CONNECTOR_VERSION of the peers). A sender leaves its own generation out on the wire.
const (
	Generation1 = 1
	Generation2 = 2
)

// Limits of what is decoded.
const (
	MaxFrame     = 256 << 20 // bytes of an ack (a vLLM ack carries 14 bytes a block of the whole region)
	MaxRequest   = 64 << 10  // bytes of a request
	MaxKey       = 256       // bytes of an mm_hash
	MaxSession   = 256
	MaxDepth     = 16
	MaxBlocksAck = 1_000_000 // block numbers in one ack
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

// Retryable is true for NOT_READY only.
func (s Status) Retryable() bool { return s == NackNotReady }

// String gives the peers' name, e.g. "NACK_MISSING".
func (s Status) String() string { return "" }

// Request is XferReq.
type Request struct {
	Key        string // mm_hash
	CompatHash string
	Session    string
	Version    int           // decoded: the receiver's configured generation if left out
	Ferry      *FerryRequest // nil from a plain peer
}

// Ack is XferAck.
type Ack struct {
	Key           string
	Status        Status
	Session       string
	Blocks        []uint32
	AgentMetadata []byte
	MemDescriptor []byte
	Ferry         *FerryAck // nil from a plain peer
}

// FerryRequest is the extension of a request: who asks, and by which planes it can read.
type FerryRequest struct {
	V      int    // extension version, 1
	Node   string // instance id of the asking node
	Epoch  uint64
	Planes []string // by preference
	Sum    bool     // wants the checksum if there is one
	Compat Compat   // the parts of the compatibility hash, so that a mismatch can name the field
	Try    uint64   // counts the requests of one connection; the ack echoes it, so that a late ack is told from the one awaited
}

// FerryAck is the extension of an ack, also of a NACK (then only V, Node, Epoch and Try are set).
type FerryAck struct {
	V       int
	Try     uint64 // of the request
	Node    string
	Epoch   uint64
	Gen     uint64      // generation of the entry
	Slot    uint32      // its slot
	Grant   string      // names the grant in verify
	Extents [][2]uint32 // runs of blocks (start, count): own peers read these, Blocks may be empty
	Bytes   int64       // bytes of the encoding without padding
	LeaseMS int64       // how long the grant lives on the producer's clock
	Sum     *uint64     // xxh3, if asked for and kept
	Planes  []PlaneOffer
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

// Message is one of Request, Ack, Verify, Verified.
type Message interface{ isMessage() }

func (*Request) isMessage()  {}
func (*Ack) isMessage()      {}
func (*Verify) isMessage()   {}
func (*Verified) isMessage() {}

// Append* encode; generation is the sender's own (left out on the wire when Version equals it).
func AppendRequest(b []byte, r *Request, generation int) []byte { return b }
func AppendAck(b []byte, a *Ack) []byte                         { return b }
func AppendVerify(b []byte, v *Verify) []byte                   { return b }
func AppendVerified(b []byte, v *Verified) []byte               { return b }

// DecodeAtProducer decodes what a ROUTER receives: *Request or *Verify. generation is the receiver's configured one.
func DecodeAtProducer(b []byte, generation int) (Message, error) { return nil, ErrMalformed }

// DecodeAtConsumer decodes what a DEALER receives: *Ack or *Verified. Strings and byte slices are copies.
func DecodeAtConsumer(b []byte) (Message, error) { return nil, ErrMalformed }

// Compat is what two ends must agree on.
type Compat struct {
	VLLMVersion string
	Model       string
	Dtype       string // as torch prints it
	BlockBytes  int64
}

// Hash is the compatibility hash, sha256 in hex.
func (c Compat) Hash() string { return "" }

// Notification is "SESSION:MM_HASH".
func Notification(session, key string) []byte { return nil }

// ParseNotification is its inverse (session ids hold no colon; keys may).
func ParseNotification(b []byte) (session, key string, err error) { return "", "", ErrMalformed }

// Descriptor is one [addr, size, device] of a mem_descriptor.
type Descriptor struct {
	Addr   uint64
	Size   uint64
	Device uint32
}

// AppendMemDescriptor encodes the descriptor of a whole region, one triple a block.
func AppendMemDescriptor(b []byte, base uint64, blocks int, blockBytes int64) []byte { return b }

// DecodeMemDescriptor decodes at most maxBlocks triples.
func DecodeMemDescriptor(b []byte, maxBlocks int) ([]Descriptor, error) { return nil, ErrMalformed }
