package region

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// record is what a slot says of its entry, constant from Fill to Free. Its words follow each other without gaps, so that a
// common entry (a key of 64 digits, two dimensions, one extent) is 16 words:
//
//	word  0      lengths, one byte each from the lowest: key - 1, dtype, dimensions, extents
//	      1      bytes of the encoding
//	      2      owner
//	      then   dimensions, extents (start | count << 32), dtype and key in whole words, padded with zeros
type record struct {
	n    int
	slot [slotWords]uint64 // a whole slot, so that Fill stores it in one piece; the record's words are at wordRecord
}

const recordFixed = 3

// The longest record fits a slot.
const _ = uint(recordWords - (recordFixed + MaxDims + MaxExtents + (MaxDtype+MaxKey)/8))

// recordLen is the number of words of a record by its lengths; false if they are impossible.
func recordLen(lengths uint64) (n int, ok bool) {
	key, dtype, dims, extents := unpackLengths(lengths)
	if lengths>>32 != 0 || dtype > MaxDtype || dims > MaxDims || extents > MaxExtents {
		return 0, false
	}
	return recordFixed + dims + extents + wordsFor(dtype) + wordsFor(key), true
}

func unpackLengths(l uint64) (key, dtype, dims, extents int) {
	return int(l&0xff) + 1, int(l >> 8 & 0xff), int(l >> 16 & 0xff), int(l >> 24 & 0xff)
}

func wordsFor(bytes int) int { return (bytes + 7) / 8 }

func (r *record) words() *[recordWords]uint64 { return (*[recordWords]uint64)(r.slot[wordRecord:]) }

// sum binds the record to one generation, so that what an earlier entry left in the slot never passes for it.
func (r *record) sum(gen uint64) uint64 {
	return xxh3.HashSeed(unsafe.Slice((*byte)(unsafe.Pointer(r.words())), r.n*8), gen)
}

// encode checks and packs s.
func (r *record) encode(s *Slot, g Geometry) error {
	if err := checkEntry(s, g); err != nil {
		return err
	}
	w := r.words()
	w[0] = uint64(len(s.Key)-1) | uint64(len(s.Dtype))<<8 | uint64(len(s.Shape))<<16 | uint64(len(s.Extents))<<24
	w[1] = uint64(s.Bytes)
	w[2] = s.Owner
	n := recordFixed
	for _, d := range s.Shape {
		w[n] = uint64(d)
		n++
	}
	for _, e := range s.Extents {
		w[n] = uint64(e.Start) | uint64(e.Count)<<32
		n++
	}
	n += r.putText(n, s.Dtype)
	n += r.putText(n, s.Key)
	r.n = n
	return nil
}

func (r *record) putText(at int, s string) int {
	n := wordsFor(len(s))
	if n > 0 {
		r.words()[at+n-1] = 0
	}
	copy(r.bytes(at, n*8), s)
	return n
}

// bytes is a view of the words from at on.
func (r *record) bytes(at, n int) []byte {
	return (*[recordWords * 8]byte)(unsafe.Pointer(r.words()))[at*8 : at*8+n]
}

// load copies the words out of a slot, false if their lengths are impossible.
func (r *record) load(w *[slotWords]uint64) bool {
	lengths := atomic.LoadUint64(&w[wordRecord])
	n, ok := recordLen(lengths)
	if !ok {
		return false
	}
	r.n = n
	to := r.words()
	to[0] = lengths
	for i := 1; i < n; i++ {
		to[i] = atomic.LoadUint64(&w[wordRecord+i])
	}
	return true
}

// decode unpacks into s and checks it. The lengths were checked by load.
func (r *record) decode(s *Slot, g Geometry) error {
	w := r.words()
	key, dtype, dims, extents := unpackLengths(w[0])
	s.Bytes = int64(w[1])
	s.Owner = w[2]
	at := recordFixed
	s.Shape = make([]int64, dims)
	for i := range s.Shape {
		s.Shape[i] = int64(w[at+i])
	}
	at += dims
	s.Extents = make([]Extent, extents)
	for i := range s.Extents {
		s.Extents[i] = Extent{Start: uint32(w[at+i]), Count: uint32(w[at+i] >> 32)}
	}
	at += extents
	s.Dtype = string(r.bytes(at, dtype))
	s.Key = string(r.bytes(at+wordsFor(dtype), key))
	return checkEntry(s, g)
}

var errExtents = errors.New("extents must be ascending, apart, not empty and inside the pool")

// checkEntry is the one place that says what an entry may be, for writers and readers alike.
func checkEntry(s *Slot, g Geometry) error {
	switch {
	case len(s.Key) < 1 || len(s.Key) > MaxKey:
		return fmt.Errorf("key of %d bytes, must be 1 to %d", len(s.Key), MaxKey)
	case len(s.Dtype) > MaxDtype:
		return fmt.Errorf("dtype of %d bytes, at most %d", len(s.Dtype), MaxDtype)
	case len(s.Shape) > MaxDims:
		return fmt.Errorf("%d dimensions, at most %d", len(s.Shape), MaxDims)
	case len(s.Extents) > MaxExtents:
		return fmt.Errorf("%d extents, at most %d", len(s.Extents), MaxExtents)
	case s.Bytes < 0:
		return fmt.Errorf("%d bytes", s.Bytes)
	}
	for _, d := range s.Shape {
		if d < 0 {
			return fmt.Errorf("dimension %d", d)
		}
	}
	var end, blocks uint64
	for i, e := range s.Extents {
		if e.Count == 0 || i > 0 && uint64(e.Start) < end {
			return fmt.Errorf("%w: %v", errExtents, s.Extents)
		}
		end = uint64(e.Start) + uint64(e.Count)
		blocks += uint64(e.Count)
	}
	if end > uint64(g.Blocks) {
		return fmt.Errorf("%w: %v of %d blocks", errExtents, s.Extents, g.Blocks)
	}
	if room := int64(blocks) * g.BlockBytes; s.Bytes > room {
		return fmt.Errorf("%d bytes in extents of %d", s.Bytes, room)
	}
	return nil
}
