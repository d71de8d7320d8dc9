package slab

import (
	"context"
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestPutsAndGetsOfADividedSlabHaveRoomOfTheirOwn(t *testing.T) {
	s := newSlab(t, t.TempDir(), "a", 10*blockBytes)
	for _, n := range []int64{-1, 0, 9*blockBytes + 1, 11 * blockBytes} {
		if _, err := s.Divide(n); !errors.Is(err, ErrMismatch) {
			t.Errorf("%d bytes for puts: %v", n, err)
		}
	}
	b, err := s.AllocPut(t.Context(), []int64{10 * blockBytes}) // not divided yet
	must(t, err)
	if _, err := s.Divide(blockBytes); !errors.Is(err, ErrMismatch) {
		t.Errorf("under a buffer: %v", err)
	}
	b.Free()
	for range 2 { // the first counts
		if n, err := s.Divide(3*blockBytes - 1); err != nil || n != 3*blockBytes {
			t.Errorf("%d, %v", n, err)
		}
	}
	if _, err := s.AllocPut(t.Context(), []int64{3*blockBytes + 1}); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
	if _, err := s.Alloc(t.Context(), []int64{7*blockBytes + 1}); !errors.Is(err, ErrTooLarge) {
		t.Error(err)
	}
	gets, err := s.Alloc(t.Context(), []int64{7 * blockBytes})
	must(t, err)
	puts, err := s.AllocPut(t.Context(), []int64{3 * blockBytes})
	must(t, err)
	fill := func(b *Buffer, with byte) {
		for i := range b.Slices()[0] {
			b.Slices()[0][i] = with
		}
	}
	fill(gets, 1)
	fill(puts, 2)
	if gets.Slices()[0][7*blockBytes-1] != 1 || s.Used() != s.Bytes() {
		t.Errorf("they overlap, or %d of %d bytes are used", s.Used(), s.Bytes())
	}
	gets.Free()
	puts.Free()
	if s.Used() != 0 {
		t.Errorf("%d bytes used", s.Used())
	}
}

// The two parts hand out disjoint memory, and all of it comes back.
func TestPartsNeverShareAByte(t *testing.T) {
	s := newSlab(t, t.TempDir(), "a", 64*blockBytes)
	_, err := s.Divide(24 * blockBytes)
	must(t, err)
	rapid.Check(t, func(r *rapid.T) {
		var held []*Buffer
		for range rapid.IntRange(1, 20).Draw(r, "steps") {
			if len(held) > 0 && rapid.IntRange(0, 2).Draw(r, "free") == 0 {
				i := rapid.IntRange(0, len(held)-1).Draw(r, "which")
				held[i].Free()
				held = append(held[:i], held[i+1:]...)
				continue
			}
			sizes := rapid.SliceOfN(rapid.Int64Range(0, 8*blockBytes), 1, 4).Draw(r, "sizes")
			alloc := s.Alloc
			if rapid.Bool().Draw(r, "put") {
				alloc = s.AllocPut
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond) // it may not fit now
			b, err := alloc(ctx, sizes)
			cancel()
			if err == nil {
				held = append(held, b)
			} else if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, ErrTooLarge) {
				r.Fatal(err)
			}
		}
		at := map[int64]bool{}
		for _, b := range held {
			for _, e := range b.extents {
				for i := range int64(e.Count) {
					block := b.space.offset(e)/blockBytes + i
					if at[block] || block >= 64 {
						r.Fatalf("block %d is had twice, or is none", block)
					}
					at[block] = true
				}
			}
		}
		for _, b := range held {
			b.Free()
		}
		if s.Used() != 0 {
			r.Fatalf("%d bytes used", s.Used())
		}
	})
}
