package slab

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// shapes are payloads: the sizes of their tensors.
var shapes = map[string][]int64{
	"nothing":                  {0},
	"one byte":                 {1},
	"a tensor":                 {64 << 10},
	"more than a page":         {4097},
	"16 MiB":                   {16 << 20},
	"50 leaves":                slices.Repeat([]int64{64 << 10}, 50),
	"odd leaves":               {100, 0, 7, 4096, 1, 0, 65, 64, 63, 12345},
	"more spans than a READ's": slices.Repeat([]int64{5}, transfer.MaxSpans+100),
}

func TestEveryPlaneMovesEveryPayload(t *testing.T) {
	for name, make := range makers {
		t.Run(name, func(t *testing.T) {
			dir := transfertest.Dir(t)
			a, b := make(t, dir), make(t, dir)
			leaks(t, dir)
			producer, consumer := newSlab(t, dir, "a", 64<<20, a), newSlab(t, dir, "b", 64<<20, b)
			seed := uint64(0)
			for shape, sizes := range shapes {
				seed++
				p := put(t, producer, seed, sizes...)
				m, err := offer(t, p, "1", 0, a.Name())
				must(t, err)
				want := a.Name()
				if shape == "nothing" {
					want = Inline
				}
				if plane := get(t, consumer, m, seed); plane != want {
					t.Errorf("%s: by %s, want %s", shape, plane, want)
				}
				must(t, p.Withdraw(patient(t), "1", true))
				p.Release()
			}
			if n := producer.Used() + consumer.Used(); n != 0 {
				t.Errorf("%d bytes are used at the end", n)
			}
		})
	}
}

func TestSmallPayloadsComeInline(t *testing.T) {
	dir := transfertest.Dir(t)
	a, b := makers[transfer.TCP](t, dir), makers[transfer.TCP](t, dir)
	leaks(t, dir)
	producer, consumer := newSlab(t, dir, "a", 8<<20, a), newSlab(t, dir, "b", 8<<20, b)
	for _, c := range []struct {
		sizes []int64
		limit int64
		plane string
	}{
		{[]int64{100, 0, 33}, 133, Inline},
		{[]int64{100, 0, 33}, 132, transfer.TCP},
		{[]int64{100}, -1, transfer.TCP},
		{[]int64{wire.MaxInline}, 4 << 20, Inline},
		{[]int64{wire.MaxInline + 1}, 4 << 20, transfer.TCP},
		{[]int64{0, 0}, 0, Inline},
		{nil, 0, Inline},
	} {
		p := put(t, producer, 5, c.sizes...)
		if len(c.sizes) == 0 {
			p.Release()
			continue
		}
		m, err := offer(t, p, "1", c.limit, transfer.TCP)
		must(t, err)
		if plane := get(t, consumer, m, 5); plane != c.plane {
			t.Errorf("%v of at most %d inline: by %s, want %s", c.sizes, c.limit, plane, c.plane)
		}
		must(t, p.Withdraw(patient(t), "1", true))
		p.Release()
	}
}

func TestTheFirstOwnPlaneThatReachesTheProducerIsTaken(t *testing.T) {
	dir, elsewhere := transfertest.Dir(t), transfertest.Dir(t)
	leaks(t, dir)
	producer := newSlab(t, dir, "a", 1<<20, makers[transfer.TCP](t, dir), makers[transfer.Mapped](t, dir))
	p := put(t, producer, 3, 5000)
	defer p.Release()
	both := []string{transfer.TCP, transfer.Mapped}
	for i, c := range []struct {
		planes []transfer.Plane
		want   string
	}{
		{[]transfer.Plane{makers[transfer.Mapped](t, dir), makers[transfer.TCP](t, dir)}, transfer.Mapped},
		{[]transfer.Plane{makers[transfer.TCP](t, dir), makers[transfer.Mapped](t, dir)}, transfer.TCP},
		{[]transfer.Plane{makers[transfer.Mapped](t, elsewhere), makers[transfer.TCP](t, dir)}, transfer.TCP}, // it may not look into dir
	} {
		consumer := newSlab(t, elsewhere, fmt.Sprint("b", i), 1<<20, c.planes...)
		grant := fmt.Sprint(i)
		m, err := offer(t, p, grant, 0, both...)
		must(t, err)
		for range 2 {
			if plane := get(t, consumer, m, 3); plane != c.want {
				t.Errorf("%d: by %s, want %s", i, plane, c.want)
			}
		}
		must(t, p.Withdraw(patient(t), grant, true))
	}
}

func TestWithoutACommonPlaneTheErrorSaysWhatThereIs(t *testing.T) {
	dir, elsewhere := transfertest.Dir(t), transfertest.Dir(t)
	leaks(t, dir)
	producer := newSlab(t, dir, "a", 1<<20, makers[transfer.Mapped](t, dir))
	p := put(t, producer, 3, 5000)
	defer p.Release()
	_, err := offer(t, p, "1", 0, transfer.TCP)
	if !errors.Is(err, ErrNoPlane) {
		t.Errorf("an offer for tcp: %v", err)
	}
	if _, err := offerPlain(t, p, "2"); !errors.Is(err, ErrNoPlane) {
		t.Errorf("an offer for a plain reader: %v", err)
	}
	m, err := offer(t, p, "3", 0, transfer.TCP, transfer.Mapped)
	must(t, err)
	for name, plane := range map[string]transfer.Plane{"tcp only": makers[transfer.TCP](t, dir), "unreachable": makers[transfer.Mapped](t, elsewhere)} {
		consumer := newSlab(t, elsewhere, "b", 1<<20, plane)
		b, err := consumer.Alloc(patient(t), []int64{5000})
		must(t, err)
		if _, err = consumer.Read(patient(t), m, b); !errors.Is(err, ErrNoPlane) || !bytes.Contains([]byte(err.Error()), []byte("mapped")) {
			t.Errorf("%s: %v", name, err)
		}
		b.Free()
		if _, _, _, err = consumer.View(patient(t), m); !errors.Is(err, ErrNoPlane) {
			t.Errorf("%s: view: %v", name, err)
		}
		must(t, consumer.Close(patient(t)))
	}
	for _, grant := range []string{"1", "2", "3"} {
		must(t, p.Withdraw(patient(t), grant, true))
	}
}

func TestMetadataThatDoesNotFitIsRefusedBeforeAnythingIsRead(t *testing.T) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	s := newSlab(t, dir, "a", 1<<20, makers[transfer.Mapped](t, dir))
	p := put(t, s, 3, 5000, 10)
	defer p.Release()
	b, err := s.Alloc(patient(t), []int64{5000, 10})
	must(t, err)
	defer b.Free()
	for name, change := range map[string]func(m *wire.Metadata){
		"a tensor less":       func(m *wire.Metadata) { m.Specs = m.Specs[:1] },
		"another size":        func(m *wire.Metadata) { m.Specs[0].Size-- },
		"inline too short":    func(m *wire.Metadata) { m.Ferry.Inline = make([]byte, 5009) },
		"offset missing":      func(m *wire.Metadata) { m.Ferry.Offsets = m.Ferry.Offsets[:1] },
		"offset too many":     func(m *wire.Metadata) { m.Ferry.Offsets = append(m.Ferry.Offsets, 0) },
		"offset below 0":      func(m *wire.Metadata) { m.Ferry.Offsets[0] = -1 },
		"offset that wraps":   func(m *wire.Metadata) { m.Ferry.Offsets[0] = 1<<63 - 10 },
		"offset past the end": func(m *wire.Metadata) { m.Ferry.Offsets[0] = 1 << 20 },
	} {
		m, err := offer(t, p, "1", 0, transfer.Mapped)
		must(t, err)
		m.Ferry.Offsets = slices.Clone(m.Ferry.Offsets)
		change(m)
		if _, err := s.Read(patient(t), m, b); !errors.Is(err, ErrMismatch) && !errors.Is(err, transfer.ErrBadRequest) {
			t.Errorf("%s: %v", name, err)
		}
		select {
		case <-b.Idle():
		default:
			t.Errorf("%s: the buffer is not idle", name)
		}
	}
	must(t, p.Withdraw(patient(t), "1", true))
}

func TestAViewIsTheProducersMemoryUntilReleased(t *testing.T) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	producer := newSlab(t, dir, "a", 1<<20, makers[transfer.Mapped](t, dir))
	consumer := newSlab(t, dir, "b", 1<<20, makers[transfer.Mapped](t, dir))
	p := put(t, producer, 9, 5000, 0, 77)
	m, err := offer(t, p, "1", 0, transfer.Mapped)
	must(t, err)
	tensors, plane, release, err := consumer.View(patient(t), m)
	must(t, err)
	if plane != transfer.Mapped || len(tensors) != 3 || len(tensors[1]) != 0 {
		t.Errorf("%d tensors by %s", len(tensors), plane)
	}
	compare(t, tensors, 9)
	p.Slices()[0][0] ^= 0xff // what the producer must not do shows
	if tensors[0][0] != p.Slices()[0][0] {
		t.Error("the view is a copy")
	}
	release()
	must(t, p.Withdraw(patient(t), "1", false)) // who reads by mapping verifies: nothing to stop
	p.Release()
}
