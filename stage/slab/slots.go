package slab

import (
	"strconv"
	"sync"

	"github.com/tensorferry/tensorferry/region"
)

// maxSlots is how many payloads can have a slot at once, 512 bytes each. Readers of others ask.
const maxSlots = 1024

// slots is who has which slot of the region's table. A payload has one from before it is offered until its memory is free: it is given
// up before a byte of it is used again. So a reader of this machine that sees the slot ready with the payload's generation after its READ has
// the payload's bytes, and need not ask.
type slots struct {
	mu    sync.Mutex // of the table, too, which has one writer
	table *region.SlotTable
	free  []uint32
}

func slotsFor(blocks int) int { return min(blocks, maxSlots) }

func (s *slots) init(table *region.SlotTable) {
	s.table = table
	for i := table.Len() - 1; i >= 0; i-- {
		s.free = append(s.free, uint32(i))
	}
}

// take gives a slot to a payload whose bytes are in place. Generation 0: there is none to give.
func (s *slots) take(number uint64, h *holding, bytes int64) (slot uint32, gen uint64) {
	if len(h.extents) != 1 || bytes == 0 {
		return 0, 0
	}
	at := h.extents[0]
	at.Start += uint32(h.space.start())
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.free)
	if n == 0 {
		return 0, 0
	}
	slot = s.free[n-1]
	// The record says what is there to who looks at the file: ferry inspect.
	gen, err := s.table.Fill(int(slot), &region.Slot{
		Key: "payload-" + strconv.FormatUint(number, 10), Shape: []int64{bytes}, Dtype: "torch.uint8", Bytes: bytes, Extents: []region.Extent{at},
	})
	if err != nil {
		return 0, 0
	}
	s.table.Ready(int(slot), 0, false)
	s.free = s.free[:n-1]
	return slot, gen
}

// give takes a slot back.
func (s *slots) give(slot uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.Free(int(slot))
	s.free = append(s.free, slot)
}
