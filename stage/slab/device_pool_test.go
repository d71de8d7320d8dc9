package slab

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// devicePool gives a slab and a pool of pages of its own.
func devicePool(t *testing.T, pages int) (*Slab, *DevicePool, uint64) {
	t.Helper()
	s := newSlab(t, transfertest.Dir(t), "a", 1<<20, fakeNIXL(t))
	_, addr := vram(t, pages*blockBytes)
	p, err := s.DevicePool(patient(t), cuda(1), addr, int64(pages*blockBytes))
	must(t, err)
	t.Cleanup(func() { must(t, p.Close(patient(t))) })
	return s, p, addr
}

func TestAPoolHandsOutAlignedMemoryAndGetsItBackWithTheBuffer(t *testing.T) {
	s, p, addr := devicePool(t, 4)
	b, err := s.Alloc(t.Context(), []int64{100, 0, 0, 0})
	must(t, err)
	must(t, b.PlaceIn(t.Context(), p, []int64{0, 300, 0, 5000}))
	if p.Used() != 2*blockBytes || p.Bytes() != 4*blockBytes || p.Device() != cuda(1) || b.Bytes() != 5400 || !b.OnDevice() {
		t.Errorf("%d of %d bytes used on %v, a buffer of %d", p.Used(), p.Bytes(), p.Device(), b.Bytes())
	}
	for i, want := range map[int]struct {
		addr  uint64
		bytes int64
	}{1: {addr, 300}, 3: {addr + 2*DeviceAlign, 5000}} {
		v, err := b.Tensor(i, tensor.Uint8, tensor.Shape{want.bytes})
		must(t, err)
		if v.Addr() != want.addr || v.Device() != cuda(1) {
			t.Errorf("tensor %d is %v at %#x, want %#x", i, v, v.Addr(), want.addr)
		}
		if _, err := b.Tensor(i, tensor.Uint8, tensor.Shape{want.bytes + 1}); !errors.Is(err, tensor.ErrShape) {
			t.Errorf("tensor %d of another size: %v", i, err)
		}
	}
	if v, err := b.Tensor(0, tensor.Uint8, tensor.Shape{100}); err != nil || !v.Device().CPU() {
		t.Errorf("%v, %v", v, err)
	}

	// Who comes later waits for what is freed.
	later, err := s.Alloc(t.Context(), []int64{0})
	must(t, err)
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := later.PlaceIn(short, p, []int64{3 * blockBytes}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no room: %v", err)
	}
	placed := make(chan error)
	go func() { placed <- later.PlaceIn(patient(t), p, []int64{3 * blockBytes}) }()
	b.Free()
	must(t, <-placed)
	if p.Used() != 3*blockBytes {
		t.Errorf("%d bytes used", p.Used())
	}
	closing, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := p.Close(closing); !errors.Is(err, ErrInUse) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("closed under a buffer: %v", err)
	}
	more, err := s.Alloc(t.Context(), []int64{0})
	must(t, err)
	if err := more.PlaceIn(t.Context(), p, []int64{1}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	more.Free()
	later.Free()
}

func TestImpossiblePlacesInAPoolAreRefusedAndTakeNothing(t *testing.T) {
	s, p, addr := devicePool(t, 4)
	other, _, _ := devicePool(t, 1)
	foreign, err := other.Alloc(t.Context(), []int64{0})
	must(t, err)
	b, err := s.Alloc(t.Context(), []int64{10, 0})
	must(t, err)
	freed, err := s.Alloc(t.Context(), []int64{0})
	must(t, err)
	freed.Free()
	for name, c := range map[string]struct {
		b     *Buffer
		sizes []int64
		want  error
	}{
		"too few sizes":       {b, []int64{0}, ErrMismatch},
		"a size below 0":      {b, []int64{0, -1}, ErrMismatch},
		"more than the pool":  {b, []int64{0, 4*blockBytes + 1}, ErrTooLarge},
		"another slab's":      {foreign, []int64{10}, ErrMismatch},
		"a buffer that ended": {freed, []int64{10}, ErrClosed},
	} {
		if err := c.b.PlaceIn(t.Context(), p, c.sizes); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	foreign.Free() // it failed midway
	must(t, b.PlaceIn(t.Context(), p, []int64{0, 0}))
	if p.Used() != 0 {
		t.Errorf("%d bytes used", p.Used())
	}
	if err := b.PlaceIn(t.Context(), p, []int64{10, 0}); !errors.Is(err, ErrMismatch) { // has a place in the slab
		t.Error(err)
	}
	b.Free()
	if p.Used() != 0 {
		t.Errorf("%d bytes used", p.Used())
	}
	for _, n := range []int64{-1, 0, blockBytes - 1} {
		if _, err := s.DevicePool(t.Context(), cuda(2), addr, n); !errors.Is(err, transfer.ErrBadRequest) {
			t.Errorf("a pool of %d bytes: %v", n, err)
		}
	}
}
