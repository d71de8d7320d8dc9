package slab

import (
	"context"
	"errors"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
	"pgregory.net/rapid"
)

func TestBuffersNeverOverlapAndEveryByteComesBack(t *testing.T) {
	dir := transfertest.Dir(t)
	s := newSlab(t, dir, "model", 256*blockBytes)
	rapid.Check(t, func(t *rapid.T) {
		type held struct {
			b    *Buffer
			mark byte
			read bool // a READ writes into it
			free bool // it was freed, and waits for the READ
		}
		var all []*held
		owner := map[int64]*held{} // by block
		check := func(h *held) {
			for i, at := range h.b.spans {
				if int64(len(h.b.slices[i])) != at.Length || at.Offset%Align != 0 {
					t.Fatalf("slice %d: %+v, %d bytes", i, at, len(h.b.slices[i]))
				}
				for _, v := range h.b.slices[i] {
					if v != h.mark {
						t.Fatalf("buffer %d was written by %d", h.mark, v)
					}
				}
			}
		}
		blocks := func() (n int64) {
			for _, h := range all {
				for _, e := range h.b.extents {
					n += int64(e.Count)
				}
			}
			return n
		}
		drop := func(i int) {
			h := all[i]
			for at, o := range owner {
				if o == h {
					delete(owner, at)
				}
			}
			all = append(all[:i], all[i+1:]...)
		}
		mark := byte(0)
		full, cancel := context.WithCancel(t.Context())
		cancel()
		_ = full
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				sizes := rapid.SliceOfN(rapid.Int64Range(0, 20*blockBytes), 0, 8).Draw(t, "sizes")
				b, ok := tryAlloc(s, sizes)
				if !ok {
					return
				}
				mark++
				h := &held{b: b, mark: mark}
				for _, e := range b.extents {
					for at := int64(e.Start); at < int64(e.Start+e.Count); at++ {
						if owner[at] != nil {
							t.Fatalf("block %d is %d's", at, owner[at].mark)
						}
						owner[at] = h
					}
				}
				for _, to := range b.Slices() {
					for i := range to {
						to[i] = mark
					}
				}
				all = append(all, h)
			},
			"read": func(t *rapid.T) {
				if len(all) == 0 {
					return
				}
				h := all[rapid.IntRange(0, len(all)-1).Draw(t, "which")]
				if err := h.b.begin(); (err != nil) != h.free {
					t.Fatalf("begin: %v, freed %v", err, h.free)
				} else if err == nil {
					if h.read { // one READ is enough for the model
						h.b.end()
					}
					h.read = true
				}
			},
			"end": func(t *rapid.T) {
				if len(all) == 0 {
					return
				}
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				if h := all[i]; h.read {
					check(h)
					idle := h.b.Idle()
					h.b.end()
					<-idle
					if h.read = false; h.free {
						drop(i)
					}
				}
			},
			"free": func(t *rapid.T) {
				if len(all) == 0 {
					return
				}
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				h := all[i]
				if !h.free {
					check(h)
				}
				h.b.Free()
				if h.free = true; !h.read {
					drop(i)
				}
				h.b.Free() // does nothing
			},
			"": func(t *rapid.T) {
				if got, want := s.Used(), blocks()*blockBytes; got != want {
					t.Fatalf("%d bytes used, want %d", got, want)
				}
			},
		})
		for _, h := range all {
			check(h)
			h.b.Free()
			if h.read {
				h.b.end()
			}
		}
		if n := s.Used(); n != 0 {
			t.Fatalf("%d bytes are used at the end", n)
		}
	})
}

// tryAlloc is Alloc that does not wait.
func tryAlloc(s *Slab, sizes []int64) (*Buffer, bool) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var b *Buffer
	var err error
	go func() {
		defer close(done)
		b, err = s.Alloc(ctx, sizes)
	}()
	for {
		s.gets.mu.Lock()
		waits := s.gets.queue.Len() > 0
		s.gets.mu.Unlock()
		if waits {
			cancel()
		}
		select {
		case <-done:
			cancel()
			return b, err == nil
		default:
		}
	}
}

// waits polls until n calls of Alloc wait.
func waits(t *testing.T, s *Slab, n int) {
	t.Helper()
	transfertest.Eventually(t, "calls of Alloc to wait", func() bool {
		s.gets.mu.Lock()
		defer s.gets.mu.Unlock()
		return s.gets.queue.Len() == n
	})
}

func TestALargeRequestIsNotOvertaken(t *testing.T) {
	s := newSlab(t, transfertest.Dir(t), "fifo", 10*blockBytes)
	first, err := s.Alloc(patient(t), []int64{9 * blockBytes})
	must(t, err)
	order := make(chan string, 3)
	bufs := make(chan *Buffer, 3)
	alloc := func(name string, n int64) {
		b, err := s.Alloc(patient(t), []int64{n})
		if err != nil {
			t.Error(err)
		}
		order <- name
		bufs <- b
	}
	go alloc("large", 10*blockBytes)
	waits(t, s, 1)
	go alloc("small", 1) // there is room for it
	waits(t, s, 2)
	first.Free()
	if got := <-order; got != "large" {
		t.Errorf("%s is first", got)
	}
	(<-bufs).Free()
	if got := <-order; got != "small" {
		t.Errorf("%s is second", got)
	}
	(<-bufs).Free()
}

func TestWhoGivesUpWaitingIsNotInTheWay(t *testing.T) {
	s := newSlab(t, transfertest.Dir(t), "giveup", 10*blockBytes)
	first, err := s.Alloc(patient(t), []int64{9 * blockBytes})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() {
		_, err := s.Alloc(ctx, []int64{10 * blockBytes})
		gone <- err
	}()
	waits(t, s, 1)
	small := make(chan *Buffer)
	go func() {
		b, err := s.Alloc(patient(t), []int64{1})
		if err != nil {
			t.Error(err)
		}
		small <- b
	}()
	waits(t, s, 2)
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	(<-small).Free()
	first.Free()
	if s.Used() != 0 {
		t.Error("what was given up is used")
	}
}

func TestFragmentsAreUsedTensorByTensor(t *testing.T) {
	s := newSlab(t, transfertest.Dir(t), "fragments", 10*blockBytes)
	var all []*Buffer
	for range 10 {
		b, err := s.Alloc(patient(t), []int64{blockBytes})
		must(t, err)
		all = append(all, b)
	}
	for i := 0; i < 10; i += 2 {
		all[i].Free()
	}
	b, err := s.Alloc(patient(t), []int64{10, 0, blockBytes, 20, 1000})
	must(t, err)
	if len(b.extents) != 4 || s.Used() != 9*blockBytes {
		t.Errorf("extents %v, %d bytes used", b.extents, s.Used())
	}
	b.Free()
	for i := 1; i < 10; i += 2 {
		all[i].Free()
	}
}

func TestImpossibleBuffersAreRefusedAtOnce(t *testing.T) {
	s := newSlab(t, transfertest.Dir(t), "refuse", 10*blockBytes)
	for _, c := range []struct {
		sizes []int64
		want  error
	}{
		{[]int64{10*blockBytes + 1}, ErrTooLarge},
		{[]int64{5 * blockBytes, 5*blockBytes + 1}, ErrTooLarge},
		{[]int64{1 << 62, 1 << 62, 1 << 62}, ErrTooLarge},
		{[]int64{5, -1}, ErrMismatch},
	} {
		if _, err := s.Alloc(t.Context(), c.sizes); !errors.Is(err, c.want) {
			t.Errorf("%v: %v, want %v", c.sizes, err, c.want)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Alloc(ended, []int64{1}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAPublishedBufferIsFreedByItsPayloadOnly(t *testing.T) {
	s := newSlab(t, transfertest.Dir(t), "owned", 10*blockBytes)
	b, err := s.Alloc(t.Context(), []int64{100})
	must(t, err)
	p := b.Payload(describe([]int64{100}).Specs)
	b.Free()
	if s.Used() != blockBytes {
		t.Error("Free freed a payload's buffer")
	}
	if _, err := s.Read(t.Context(), describe([]int64{100}), b); !errors.Is(err, ErrClosed) {
		t.Errorf("a READ into a payload: %v", err)
	}
	again := b.Payload(describe([]int64{100}).Specs)
	if _, err := offer(t, again, "1", 1000); !errors.Is(err, ErrClosed) {
		t.Errorf("an offer of what is another payload's: %v", err)
	}
	again.Release()
	if s.Used() != blockBytes {
		t.Error("another payload freed it")
	}
	p.Release()
	p.Release()
	if s.Used() != 0 {
		t.Error("the payload did not free it")
	}
	b, err = s.Alloc(t.Context(), []int64{100})
	must(t, err)
	p = b.Payload(describe([]int64{101}).Specs)
	if err := p.Offer(t.Context(), "1", nil, describe([]int64{100})); !errors.Is(err, ErrMismatch) {
		t.Errorf("specs of another size: %v", err)
	}
	p.Release()
}

func TestNewRefusesWhatCannotBe(t *testing.T) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	for _, n := range []int64{0, -1, 1 << 62} {
		if _, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: n}); !errors.Is(err, region.ErrOptions) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if _, err := New(t.Context(), Options{Dir: dir, Name: "a/b", Bytes: 1}); !errors.Is(err, region.ErrName) {
		t.Error(err)
	}
	p := makers[transfer.Mapped](t, dir)
	if _, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1, Planes: []transfer.Plane{p, p}}); err == nil {
		t.Error("two planes of one name")
	}
	must(t, p.Close())
	if _, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1, Planes: []transfer.Plane{p}}); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("a closed plane: %v", err)
	}
}

func BenchmarkAllocFree(b *testing.B) {
	s := newSlab(b, b.TempDir(), "bench", 64<<20)
	for _, c := range []struct {
		name  string
		sizes []int64
	}{{"1KiB", []int64{1024}}, {"3 tensors", []int64{1024, 64, 300}}} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				x, err := s.Alloc(b.Context(), c.sizes)
				must(b, err)
				x.Free()
			}
		})
	}
}
