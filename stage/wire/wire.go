// Package wire has the messages that stage payloads are moved by: byte for byte those of vLLM-Omni's NixlConnector (metadata of
// schema 1, claim and done with their replies) and its object serializer, plus the `ferry` extension that only our own ends read.
//
// Decoders take a closed set of types, check depth and sizes before they allocate, and never panic. What they return shares no
// memory with their input, except where a comment says that something is a view. Functions keep no state and are safe for
// concurrent use.
//
// # What is accepted
//
// Of messages: what the peers' own decoder (msgspec 0.23) and checks take. Unknown fields, fields in any order, integers and
// strings in longer encodings than needed, and a field given twice (the last wins) are accepted. A wrong type, a missing field, a
// truncated message, a trailing byte and bad UTF-8 are refused. Refused here although the peers take them: nesting over MaxDepth
// (it ends a request at about 1,000 there), whatever is over a limit below, metadata whose size is not the sum of its tensors,
// unknown kinds, and dtypes that hold no whole elements (torch.qint8, torch.bits8, ..).
//
// # What never happens
//
// No pickle is read, whatever a peer sends: the serializer is msgpack with a closed set of kinds, and numpy arrays of objects are
// refused by their dtype.
package wire

import (
	"github.com/tensorferry/tensorferry/tensor"
)

// ExtensionVersion is the version of the `ferry` extension that this package speaks.
const ExtensionVersion = 1

// SchemaVersion of the metadata.
const SchemaVersion = 1

// Limits of what is decoded. Bytes where nothing else is said.
const (
	MaxRequest       = 64 << 10 // of a claim, done, verify, fail
	MaxReply         = 32 << 20 // of a reply or of metadata: 65,536 tensors take about 9 MiB
	MaxKey           = 4 << 10
	MaxID            = 256     // of a generation or claim id (real ones have 32)
	MaxDepth         = 16      // maps and arrays in one another, the message itself included
	MaxTensors       = 1 << 16 // of one payload
	MaxGroups        = 64      // of memory types
	MaxMemoryType    = 64
	MaxHost          = 255
	MaxAgentMetadata = 8 << 20
)

// Limits of the extension. The encoder does not cut: what is over a limit is refused by the peer.
const (
	MaxNode          = 64
	MaxPlanes        = 8
	MaxPlaneName     = 64
	MaxPlaneMetadata = 64 << 10 // of each plane
	MaxToken         = 256
	MaxReason        = 1024
	MaxLocal         = 107     // what a unix socket's name may have
	MaxInline        = 1 << 20 // of a payload inside its reply
)

// Kind says how a payload's tensors make up its value.
type Kind uint8

// The kinds of schema 1.
const (
	Tensors    Kind = iota + 1 // a tensor, or a list of them
	Structured                 // tensor 0 is a skeleton, the others its leaves
	Object                     // tensor 0 is the serialized value
)

var kindNames = [...]string{Tensors: "tensors", Structured: "structured", Object: "object"}

// String is the name on the wire.
func (k Kind) String() string {
	if k == 0 || int(k) >= len(kindNames) {
		return "unknown"
	}
	return kindNames[k]
}

// Metadata describes a published payload: what put returns, and with Claim what a claim is answered with.
type Metadata struct {
	Kind          Kind
	AgentMetadata []byte // of the NIXL agent that serves Groups; empty if there is none
	Groups        []Group
	Specs         []Spec // one a tensor
	Size          int64  // the sum of the tensors' bytes
	SenderHost    string // where claims go; "" with port 0 if the sender serves none
	SenderPort    int
	// Legacy metadata has no generation: nobody claims it, its sender guarantees the memory.
	Legacy     bool
	Generation ID
	Claim      ID // the zero ID in what put returns
	Ferry      *FerryMetadata
}

// Spec is one tensor.
type Spec struct {
	DType  tensor.DType
	Shape  tensor.Shape
	Device tensor.Device
	Size   int64 // bytes
}

// Group is the registered memory of one kind. Tensors without elements are in no group.
type Group struct {
	MemoryType string // NIXL's: "DRAM", "VRAM", ..
	Regions    []Region
}

// Region is where one tensor's bytes are at the sender.
type Region struct {
	Tensor int // index in Specs
	Addr   uint64
	Bytes  int64
	Device int // the device's number, 0 for DRAM
}

// SpecOf describes t.
func SpecOf(t tensor.Tensor) Spec {
	return Spec{t.DType(), t.Shape(), t.Device(), t.Bytes()}
}

// Op is what a request asks for.
type Op uint8

// The requests. Those from Verify on are ours: only own producers know them, others answer NotFound.
const (
	// Unknown is any other message. The answer is NotFound.
	Unknown Op = iota
	// Get claims a payload.
	Get
	// Done ends a claim; its answer, always Acked, says nothing.
	Done
	// Verify ends a claim after the READ. The answer is Held if the claim held all the while, so that what was read is what was
	// put, else Lost. It may be repeated over another connection; while the claim still is the former one's, the answer is NotFound.
	Verify
	// Fail ends a claim whose READ failed: the payload stays for another claim. The answer is Held or Lost.
	Fail
	// Stat asks what there is, without a claim. The answer is Found, with metadata that has no descriptors, or as to Get.
	Stat
)

// Request is one request.
type Request struct {
	Op Op
	// Key of the payload. A key that is no string names nothing here: the request is then decoded without a claim, which the
	// protocol answers with NotFound (Get) or Acked (Done).
	Key string
	// Generation that is wanted; the zero ID is any (Get only).
	Generation ID
	// Claim names the claim. The zero ID claims nothing: missing, nil, empty and zero are one.
	Claim ID
	Ferry *FerryRequest // nil from a plain peer
}

// Status says what a reply is.
type Status uint8

// The replies. Those from Held on are sent to own ends only.
const (
	Found            Status = iota + 1 // with Metadata
	NotFound                           // no such payload, or not for this claim: ask again later
	Acked                              // the answer to Done
	GeometryMismatch                   // of a later version's paged payloads
	Held                               // the claim held until now
	Lost                               // it did not
	Failed                             // the producer will not put it, Reason says why
	Closing                            // the producer takes no new claims
)

var statusNames = [...]string{Found: "found", NotFound: "not found", Acked: "acked", GeometryMismatch: "page geometry mismatch",
	Held: "held", Lost: "lost", Failed: "failed", Closing: "closing"}

func (s Status) String() string {
	if s == 0 || int(s) >= len(statusNames) {
		return "unknown"
	}
	return statusNames[s]
}

// Reply is one reply.
type Reply struct {
	Status   Status
	Try      uint64 // of the request; 0 from a plain peer, and in Found that of Metadata.Ferry counts
	Reason   string // of Failed
	Metadata *Metadata
}

// FerryRequest is the extension of a request: who asks, and what it can take.
type FerryRequest struct {
	V      int    // extension version; 0 is written as ExtensionVersion
	Try    uint64 // numbers the requests of one connection; the reply echoes it
	Node   string // instance id of the asking node
	Epoch  uint64
	Planes []string // by preference (Get)
	Inline int64    // the largest payload to put into the reply, bytes; 0 is none (Get)
	Sum    bool     // wants the checksum if there is one (Get)
	WaitMS int64    // how long the answer may be held back until the key is put (Get)
	Reason string   // why the READ failed (Fail)
}

// FerryMetadata is the extension of a reply with metadata, and of what put returns: there it says who the producer is.
type FerryMetadata struct {
	V       int    // extension version; 0 is written as ExtensionVersion
	Try     uint64 // of the request
	Node    string
	Epoch   uint64
	Local   string // names the producer's socket for readers of its machine (see control.Router.ListenLocal)
	LeaseMS int64  // how long the claim lives on the producer's clock
	// Slot and Gen name the payload's slot in the slot table of the region that it lies in: one that sees the table need not ask
	// whether its bytes were the payload's. Gen 0: it has none.
	Slot   uint32
	Gen    uint64
	Top    Top
	Planes []PlaneOffer
	// Offsets are where each tensor that has bytes begins in the memory that Planes offer, in the order of Specs. Empty if it is
	// not all there: then only Groups say where it is.
	Offsets []int64
	Sum     *uint64 // xxh3 of all tensors' bytes, in the order of Specs
	// Inline has all tensors' bytes one after the other, nil if they are not in the reply. Decoded it is a view over the frame.
	Inline []byte
}

// PlaneOffer is one way to read.
type PlaneOffer struct {
	Name     string
	Metadata []byte
	Token    []byte
}

// Names on the wire.
const (
	prefixGet    = "nixl_get_meta"
	prefixDone   = "nixl_xfer_done"
	prefixVerify = "ferry_verify"
	prefixFail   = "ferry_fail"
	prefixStat   = "ferry_stat"
	prefixAnswer = "ferry_answer"

	bareNotFound = "nixl_meta_not_found"
	bareAck      = "nixl_ack"
	bareGeometry = "nixl_page_geometry_mismatch"

	fieldSchema     = "schema_version"
	fieldKind       = "kind"
	fieldAgent      = "agent_metadata"
	fieldGroups     = "descriptor_groups"
	fieldSpecs      = "tensor_specs"
	fieldSize       = "size"
	fieldHost       = "sender_host"
	fieldPort       = "sender_zmq_port"
	fieldSourceHost = "source_host"
	fieldSourcePort = "source_port"
	fieldGeneration = "generation"
	fieldClaim      = "claim_id"
	fieldKey        = "key"
	fieldMemory     = "memory_type"
	fieldIndices    = "tensor_indices"
	fieldRegions    = "regions"
	fieldShape      = "shape"
	fieldDType      = "dtype"
	fieldDevice     = "device"

	fieldFerry    = "ferry"
	fieldV        = "v"
	fieldTry      = "try"
	fieldNode     = "node"
	fieldEpoch    = "epoch"
	fieldLocal    = "local"
	fieldPlanes   = "planes"
	fieldInline   = "inline"
	fieldSum      = "sum"
	fieldWait     = "wait_ms"
	fieldReason   = "reason"
	fieldLease    = "lease_ms"
	fieldSlot     = "slot"
	fieldGen      = "gen"
	fieldTop      = "top"
	fieldOffsets  = "offsets"
	fieldName     = "name"
	fieldMetadata = "metadata"
	fieldToken    = "token"
	fieldStatus   = "status"
)
