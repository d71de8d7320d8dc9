package region

// Limits of a slot, fixed by the file format.
const (
	SlotBytes  = 512 // bytes of one slot in the file
	MaxKey     = 256 // bytes of a key
	MaxDims    = 4   // dimensions of a shape
	MaxExtents = 8   // extents of one entry
	MaxDtype   = 24  // bytes of a dtype's name, as torch prints it
)

// SlotState is the first word of a slot.
type SlotState uint32

const (
	SlotFree    SlotState = 0
	SlotFilling SlotState = 1 // reserved: bytes of its extents may change at any time
	SlotReady   SlotState = 2
)

// Slot is a decoded copy of one slot.
type Slot struct {
	State       SlotState
	Gen         uint64 // unique in the life of the file, never reused, also over restarts
	Key         string
	Dtype       string // as torch prints it, e.g. "torch.bfloat16"
	Shape       []int64
	Bytes       int64 // bytes of the encoding, without the padding of the last block
	Extents     []Extent
	Owner       uint64 // who fills it; meaning given by the node
	Checksum    uint64 // xxh3 of the encoding's bytes, if HasChecksum
	HasChecksum bool
	Holds       uint32
}

// SlotTable is the table of slots of a mapped region. Reads are safe from any process; writes are the owner's, under its lock.
type SlotTable struct{}

// Len is the number of slots.
func (t *SlotTable) Len() int { return 0 }

// Fill writes a reservation: state filling and a new generation are visible before any byte of the extents may change.
// It returns the generation. s.State and s.Gen are ignored.
func (t *SlotTable) Fill(i int, s Slot) (uint64, error) { return 0, ErrClosed }

// Ready publishes the entry: all stores to its extents that happened before the call are visible to who sees SlotReady.
func (t *SlotTable) Ready(i int, checksum uint64, hasChecksum bool) {}

// Free takes the entry out. It must come before any of its blocks is given to another slot.
func (t *SlotTable) Free(i int) {}

// SetHolds records the number of holds.
func (t *SlotTable) SetHolds(i int, n uint32) {}

// Load gives a consistent copy, or ErrFormat if the slot's content is impossible (never a panic).
func (t *SlotTable) Load(i int) (Slot, error) { return Slot{}, ErrClosed }

// Check reads state and generation in place: true if slot i is ready with generation gen at the time of the call.
func (t *SlotTable) Check(i int, gen uint64) bool { return false }
