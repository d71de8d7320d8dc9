// Package api has the messages of a node's engine API and the framing that carries them: docs/engine-api.md is its text for
// other languages. Both ends use it: package node serves, package client asks.
//
// A frame is a 4-byte big-endian length and that many bytes of msgpack, always one map. Decoders take a closed set of types, skip
// fields they do not know, check sizes and depth before they allocate, and never panic.
package api

import (
	"errors"

	"github.com/tensorferry/tensorferry/ec"
)

// Version is the protocol version spoken here. A hello states a range; the node picks the highest that both speak.
const (
	Version    = 1
	MinVersion = 1
)

// Limits of the protocol.
const (
	MaxRequestFrame = 8 << 20  // bytes of a frame to the node
	MaxReplyFrame   = 16 << 20 // bytes of a frame to a client: a reply may echo all metadata of a request
	MaxOps          = 4096     // operations in a request
	MaxAsync        = 8192     // fetches, waits and listings in flight on a connection
	MaxHandles      = 1 << 16  // reservations and pins of a connection
	MaxMetadata     = 64 << 10 // bytes of an announcement's metadata
	MaxEntry        = 80 << 10 // bytes of one entry of ec_transfer_params, as JSON
	MaxListChunk    = 512      // entries in one push of a listing
	MaxItemIndices  = 4096     // item_indices of an announcement

	maxText   = 4096 // bytes of a message for people, a path or a name
	maxToken  = 64   // bytes of a token
	maxDepth  = 8    // nesting of fields that are skipped
	maxDims   = 8    // dimensions of a shape; the cache allows fewer
	maxFields = 256  // fields of a map
)

// Errors of decoding and framing.
var (
	ErrMalformed = errors.New("engine api: malformed message")
	ErrLimit     = errors.New("engine api: over a limit")
	ErrBacklog   = errors.New("engine api: the other end does not read")
	ErrClosed    = errors.New("engine api: connection closed")
)

// Kind says what an operation does.
type Kind uint8

// The operations. What each reads of an Op and writes into its Result is in docs/engine-api.md.
const (
	OpUnknown Kind = iota // an operation of a later version: answered with CodeUnsupported
	OpReserve
	OpCommit
	OpDiscard
	OpAnnounce
	OpFetch
	OpCancel
	OpMap
	OpRelease
	OpLookup
	OpWait
	OpList
	OpRemove
	OpStats
	OpResume
	OpRepin
	OpRestated
	kinds
)

var kindNames = [kinds]string{
	"", "reserve", "commit", "discard", "announce", "fetch", "cancel", "map", "release", "lookup", "wait", "list", "remove", "stats",
	"resume", "repin", "restated",
}

// String is the operation's name on the wire.
func (k Kind) String() string {
	if k >= kinds || k == OpUnknown {
		return "unknown"
	}
	return kindNames[k]
}

// Hello is the first frame of a connection, from the client.
type Hello struct {
	Version    int // the highest that the client speaks
	MinVersion int
	Name       string // for logs and lists
	Pool       string // compatibility hash of the pool wanted; "": the node's only one
	Token      []byte // the token of the last welcome: this client was here before, and will restate what it has
	Epoch      uint64 // the epoch of that welcome
}

// Welcome answers a hello. With its first byte travels, by SCM_RIGHTS, a descriptor of the pool's file.
type Welcome struct {
	Version    int
	Node       string // the node's instance id
	Epoch      uint64 // owners that the region has had
	Conn       uint64 // this connection's number in the node's lists
	Token      []byte // names this client over reconnects
	PeerHost   string
	PeerPort   int
	Generation int // of ec_transfer_params, 1 or 2
	Pool       PoolInfo
}

// PoolInfo describes the pool of a connection.
type PoolInfo struct {
	Group       string
	Model       string
	Dtype       string
	VLLMVersion string
	BlockBytes  int64
	Blocks      int
	Offset      int64 // of the pool in the file
	Region      string
	Checksums   bool
}

// Refused says why the node ends the connection. It is the last frame.
type Refused struct {
	Code    Code
	Message string
}

// Request carries operations that are carried out in order and answered by one Reply.
type Request struct {
	ID  uint64
	Ops []Op
	// Late: the reply may come together with the first push, however late that is, if each operation was begun.
	Late bool
}

// Op is one operation; unused fields are zero and left out on the wire.
type Op struct {
	Kind        Kind
	Key         string
	Dtype       string
	Shape       []int64
	Bytes       int64
	Handle      uint64 // commit, discard: a reservation's; release: a pin's
	HasSum      bool
	Sum         uint64 // commit: xxh3 of the bytes, if the client made it
	Ref         uint64 // fetch, wait, list: names their pushes, chosen by the client; cancel: which one
	ItemIndices []int  // announce
	Metadata    []byte // announce: a JSON object
	Entry       []byte // fetch: the key's entry of ec_transfer_params, JSON
	TimeoutMS   int64  // fetch, wait: 0 means the node's limit
	Gen         uint64 // resume, repin: the generation of what the client has from an earlier connection
	Map         bool   // fetch: pin the entry as soon as it is ready
}

// Reply answers a Request, one result an operation, in order.
type Reply struct {
	ID      uint64
	Results []Result
}

// Result of one operation. Code CodeOK means that it was carried out.
type Result struct {
	Code    Code
	Message string    // for people
	Handle  uint64    // reserve: the reservation; map: the pin
	Info    *ec.Info  // reserve, commit, map, lookup
	Entry   []byte    // announce: the key's entry, JSON
	Stats   *ec.Stats // stats
}

// Event says what a push is about.
type Event uint8

// The events.
const (
	EventUnknown Event = iota // of a later version: ignored
	EventFetched              // Outcome, Message, Handle, Info, Bytes, Plane, ElapsedUS
	EventWaited               // Code: CodeOK (ready, Info) or why not
	EventListed               // Entries
	events
)

var eventNames = [events]string{"", "fetched", "waited", "listed"}

// Push tells of something that an operation started. Ref is that operation's; Last is set on the final push for a Ref.
type Push struct {
	Ref       uint64
	Event     Event
	Last      bool
	Code      Code
	Message   string
	Handle    uint64 // fetched, if the fetch asked for a pin and is ready: the pin
	Outcome   string // as ec.Outcome prints it
	Info      *ec.Info
	Bytes     int64
	Plane     string
	ElapsedUS int64
	Entries   []ec.Info
}

// Bye says that the client has unmapped the pool: what it had reserved can be given to others at once. It is the last frame.
type Bye struct{}

// Message is one of *Hello, *Welcome, *Refused, *Request, *Reply, *Push, *Bye.
type Message interface{ isMessage() }

func (*Hello) isMessage()   {}
func (*Welcome) isMessage() {}
func (*Refused) isMessage() {}
func (*Request) isMessage() {}
func (*Reply) isMessage()   {}
func (*Push) isMessage()    {}
func (*Bye) isMessage()     {}
