package region

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/tensorferry/tensorferry/internal/prefetch"
)

// Limits of a slot, fixed by the file format.
const (
	SlotBytes  = 512 // bytes of one slot in the file
	MaxKey     = 256 // bytes of a key
	MaxDims    = 4   // dimensions of a shape
	MaxExtents = 8   // extents of one entry
	MaxDtype   = 24  // bytes of a dtype's name, as torch prints it
)

// A slot is 64 words of 8 bytes, each stored atomically:
//
//	word  0      generation << 2 | state: one store changes both
//	      1      checksum of the record (xxh3, seeded with the generation)
//	      2      holds
//	      3      checksum of the encoding
//	      4      flags: bit 0, the encoding has a checksum
//	      5      pins of clients
//	      6      1: granted to peers that may READ it by an agent that outlives the owner
//	      8..63  the record (see record.go), constant from Fill to Free
//
// The order of stores makes a table truthful at whatever instruction its owner is killed. Fill stores word 0 as filling, then words
// 2 to the end of the record, then word 1: a record that is half written has a wrong checksum, and its extents were not handed out
// yet. Ready stores words 3 and 4, then word 0. Withdraw and Free store word 0. Words 5 and 6 are stored before a client or a peer is
// told, and after it let go.
const (
	slotWords    = SlotBytes / 8
	wordState    = 0
	wordSum      = 1
	wordHolds    = 2
	wordChecksum = 3
	wordFlags    = 4
	wordPins     = 5
	wordGranted  = 6
	wordRecord   = 8
	recordWords  = slotWords - wordRecord

	stateBits   = 2
	flagHasSum  = 1
	maxGen      = 1<<(64-stateBits) - 1 - 1<<32 // a file's counter starts below this, and 2^32 more fit
	loadRetries = 1000
)

// SlotState says what a slot holds. It is the low two bits of the slot's first word; the generation is the rest.
type SlotState uint32

const (
	SlotFree    SlotState = 0
	SlotFilling SlotState = 1 // reserved: bytes of its extents may change at any time; or withdrawn, if it has Pins or is Granted
	SlotReady   SlotState = 2
)

func (s SlotState) String() string {
	switch s {
	case SlotFree:
		return "free"
	case SlotFilling:
		return "filling"
	case SlotReady:
		return "ready"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Slot is a decoded copy of one slot.
type Slot struct {
	State       SlotState
	Gen         uint64 // unique in the life of the file, never reused, also over restarts; below 2^62
	Key         string // 1 to MaxKey bytes
	Dtype       string // as torch prints it, e.g. "torch.bfloat16"; up to MaxDtype bytes
	Shape       []int64
	Bytes       int64    // bytes of the encoding, without the padding of the last block
	Extents     []Extent // ascending, not touching each other's blocks, together at least Bytes long
	Owner       uint64   // Client.ID of who fills it; 0: the owner of the file itself, whose death ends it
	Checksum    uint64   // xxh3 of the encoding's bytes, if HasChecksum
	HasChecksum bool
	Holds       uint32
	Pins        uint32 // of clients, which outlive the owner
	Granted     bool   // see SetGranted
}

// SlotTable is the table of slots of a mapped region. Reads are safe from any process and goroutine, at any time; writes are the
// owner's, under its lock. The table dies with its Region or Mapping. A write to an attacher's table is a bug and panics, and so
// is an index out of range in Ready, Withdraw, Free, SetHolds, SetPins and SetGranted; what a peer may name (Load, Check) is checked.
type SlotTable struct {
	words    []uint64
	gen      *uint64 // the generation given last
	geometry Geometry
	writable bool
	filling  record // of Fill, for its memory
}

// newSlotTable is over a mapped file, from its first byte.
func newSlotTable(mem []byte, g Geometry, writable bool) *SlotTable {
	return &SlotTable{
		words:    unsafe.Slice((*uint64)(unsafe.Pointer(&mem[tableOffset])), g.Slots*slotWords),
		gen:      headerWord(mem, offGen),
		geometry: g,
		writable: writable,
	}
}

func (t *SlotTable) slot(i int) *[slotWords]uint64 {
	return (*[slotWords]uint64)(t.words[i*slotWords:])
}

func (t *SlotTable) writableSlot(i int) *[slotWords]uint64 {
	if !t.writable {
		panic("region: write to an attached slot table, which only its owner may write")
	}
	return t.slot(i)
}

// Len is the number of slots.
func (t *SlotTable) Len() int { return t.geometry.Slots }

// Fill writes a reservation: state filling and a new generation are visible before any byte of the extents may change.
// It returns the generation, and keeps nothing of s. State, Gen, Checksum, HasChecksum, Pins and Granted of s are ignored. ErrSlot:
// the slot is not free, or s does not fit the format or the pool; nothing has changed then.
func (t *SlotTable) Fill(i int, s *Slot) (uint64, error) {
	if uint(i) >= uint(t.Len()) {
		return 0, fmt.Errorf("%w: %d of %d", ErrSlot, i, t.Len())
	}
	w := t.writableSlot(i)
	if now := atomic.LoadUint64(&w[wordState]); stateOf(now) != SlotFree {
		return 0, fmt.Errorf("%w: slot %d is %s", ErrSlot, i, stateOf(now))
	}
	r := &t.filling
	if err := r.encode(s, t.geometry); err != nil {
		return 0, fmt.Errorf("%w: %v", ErrSlot, err)
	}
	gen := atomic.LoadUint64(t.gen) + 1
	storeWord(t.gen, gen)
	r.slot[wordHolds] = uint64(s.Holds)
	storeWord(&w[wordState], gen<<stateBits|uint64(SlotFilling))
	storeWords(w[wordHolds:], r.slot[wordHolds:wordRecord+r.n])
	storeWord(&w[wordSum], r.sum(gen))
	return gen, nil
}

// Ready publishes the entry: all stores to its extents that happened before the call are visible to who sees SlotReady.
// Only a filling slot changes.
func (t *SlotTable) Ready(i int, checksum uint64, hasChecksum bool) {
	w := t.writableSlot(i)
	now := atomic.LoadUint64(&w[wordState])
	if stateOf(now) != SlotFilling {
		return
	}
	if hasChecksum {
		storeWord(&w[wordChecksum], checksum)
		storeWord(&w[wordFlags], flagHasSum)
	}
	storeWord(&w[wordState], genOf(now)<<stateBits|uint64(SlotReady))
}

// Withdraw makes a ready entry one that is filling, under its generation: who looks does not find it, and its blocks stay taken for
// those who have it pinned or were granted it. Only a ready slot changes.
func (t *SlotTable) Withdraw(i int) {
	w := t.writableSlot(i)
	if now := atomic.LoadUint64(&w[wordState]); stateOf(now) == SlotReady {
		storeWord(&w[wordState], genOf(now)<<stateBits|uint64(SlotFilling))
	}
}

// Free takes the entry out. It must come before any of its blocks is given to another slot.
func (t *SlotTable) Free(i int) {
	w := t.writableSlot(i)
	storeWord(&w[wordState], genOf(atomic.LoadUint64(&w[wordState]))<<stateBits|uint64(SlotFree))
}

// Prefetch asks the processor to bring what Free, Fill and Ready will touch of a slot into its cache, for an entry of a common size.
// It changes nothing.
func (t *SlotTable) Prefetch(i int) {
	const commonWords = wordRecord + 16 // see record
	prefetch.Lines(unsafe.Pointer(t.slot(i)), commonWords*8/prefetch.Line)
}

// SetHolds records the number of holds.
func (t *SlotTable) SetHolds(i int, n uint32) {
	storeWord(&t.writableSlot(i)[wordHolds], uint64(n))
}

// SetPins records the number of pins that clients have. Their death, not the owner's, ends these.
func (t *SlotTable) SetPins(i int, n uint32) {
	storeWord(&t.writableSlot(i)[wordPins], uint64(n))
}

// SetGranted records whether peers were granted the entry that may READ it after the owner's death, by an agent that outlives it.
func (t *SlotTable) SetGranted(i int, granted bool) {
	var word uint64
	if granted {
		word = 1
	}
	storeWord(&t.writableSlot(i)[wordGranted], word)
}

// Load gives a consistent copy, or ErrFormat if the slot's content is impossible (never a panic). ErrSlot: no such slot.
//
// A free slot has a state and the generation of its last entry, nothing else. A filling slot whose record is not complete (its
// owner is writing it, or died of it) has a state and a generation only: no byte of its extents was handed out yet.
//
// An attacher of a file that was cut short has ErrFormat, and false from Check.
func (t *SlotTable) Load(i int) (s Slot, err error) {
	if uint(i) >= uint(t.Len()) {
		return Slot{}, fmt.Errorf("%w: %d of %d", ErrSlot, i, t.Len())
	}
	if t.writable {
		return t.load(i)
	}
	if !guarded(func() { s, err = t.load(i) }) {
		return Slot{}, fmt.Errorf("%w: slot %d is not there any more: the file was cut short", ErrFormat, i)
	}
	return s, err
}

func (t *SlotTable) load(i int) (Slot, error) {
	w := t.slot(i)
	var now uint64
	for range loadRetries {
		now = atomic.LoadUint64(&w[wordState])
		s := Slot{State: stateOf(now), Gen: genOf(now)}
		if s.State == SlotFree {
			return s, nil
		}
		if s.State != SlotFilling && s.State != SlotReady {
			return Slot{}, fmt.Errorf("%w: slot %d: %s", ErrFormat, i, s.State)
		}
		var r record
		complete := r.load(w) && atomic.LoadUint64(&w[wordSum]) == r.sum(s.Gen)
		holds := atomic.LoadUint64(&w[wordHolds])
		checksum := atomic.LoadUint64(&w[wordChecksum])
		flags := atomic.LoadUint64(&w[wordFlags])
		pins := atomic.LoadUint64(&w[wordPins])
		granted := atomic.LoadUint64(&w[wordGranted])
		if atomic.LoadUint64(&w[wordState]) != now {
			continue
		}
		if !complete {
			if s.State == SlotFilling {
				return s, nil
			}
			return Slot{}, fmt.Errorf("%w: slot %d: checksum of its record is wrong", ErrFormat, i)
		}
		if err := r.decode(&s, t.geometry); err != nil {
			return Slot{}, fmt.Errorf("%w: slot %d: %v", ErrFormat, i, err)
		}
		if s.State == SlotReady && flags&flagHasSum != 0 {
			s.Checksum, s.HasChecksum = checksum, true
		}
		s.Holds, s.Pins, s.Granted = uint32(holds), uint32(pins), granted != 0
		return s, nil
	}
	// It changes faster than it can be read: whatever it holds now, nobody may rely on its bytes.
	return Slot{State: SlotFilling, Gen: genOf(now)}, nil
}

// Check reads state and generation in place: true if slot i is ready with generation gen at the time of the call. False for a
// slot that does not exist. A reader that copied bytes out of the slot's extents before the call, and had true before that as
// well, has the bytes of that generation.
func (t *SlotTable) Check(i int, gen uint64) (is bool) {
	if uint(i) >= uint(t.Len()) {
		return false
	}
	orderLoads()
	if t.writable {
		return t.check(i, gen)
	}
	return guarded(func() { is = t.check(i, gen) }) && is
}

func (t *SlotTable) check(i int, gen uint64) bool {
	return atomic.LoadUint64(&t.words[i*slotWords]) == gen<<stateBits|uint64(SlotReady) && bits.LeadingZeros64(gen) >= stateBits
}

func stateOf(w uint64) SlotState { return SlotState(w & (1<<stateBits - 1)) }
func genOf(w uint64) uint64      { return w >> stateBits }
