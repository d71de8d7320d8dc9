package slab

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

var nixls = map[string]func(t testing.TB) *nixl.Plane{"fake": fakeNIXL, "real": realNIXL}

func TestAPlainReaderFindsEveryPayload(t *testing.T) {
	for name, make := range nixls {
		t.Run(name, func(t *testing.T) {
			dir := transfertest.Dir(t)
			a, b := make(t), make(t)
			leaks(t, dir)
			producer, consumer := newSlab(t, dir, "a", 64<<20, a), newSlab(t, dir, "b", 64<<20, b)
			seed := uint64(0)
			for shape, sizes := range shapes {
				seed++
				p := put(t, producer, seed, sizes...)
				m, err := offerPlain(t, p, "1")
				must(t, err)
				if m.Ferry != nil {
					t.Error("a plain reader is told of the extension")
				}
				want := transfer.NIXL
				if shape == "nothing" {
					want = Inline
				}
				if plane := get(t, consumer, m, seed); plane != want {
					t.Errorf("%s: by %s", shape, plane)
				}
				must(t, p.Withdraw(patient(t), "1", true))
				p.Release()
			}
		})
	}
}

// plainProducer registers each payload anew with one agent, as unmodified peers do.
type plainProducer struct {
	t      testing.TB
	agent  *binding.Agent
	memory []byte
	last   *binding.Registration
}

func newPlainProducer(t testing.TB, l *binding.Library, name string, n int) *plainProducer {
	t.Helper()
	p := &plainProducer{t: t}
	var err error
	p.agent, err = l.NewAgent(name, binding.AgentConfig{})
	must(t, err)
	_, err = p.agent.CreateBackend("UCX", nil)
	must(t, err)
	p.memory, err = unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED|unix.MAP_POPULATE)
	must(t, err)
	t.Cleanup(func() {
		must(t, p.agent.Close())
		_ = unix.Munmap(p.memory)
	})
	return p
}

// put registers n bytes at that offset in place of the last payload, and says so as a peer does.
func (p *plainProducer) put(kind binding.MemoryType, device int, offset, n int64, seed uint64) *wire.Metadata {
	p.t.Helper()
	if p.last != nil {
		must(p.t, p.last.Close())
	}
	b := p.memory[offset : offset+n]
	transfertest.Fill(b, seed)
	r := binding.RangeOf(b)
	r.Device = uint64(device)
	var err error
	p.last, err = p.agent.Register(kind, []binding.Range{r})
	must(p.t, err)
	m := describe([]int64{n})
	m.AgentMetadata, err = p.agent.LocalMetadata()
	must(p.t, err)
	m.Groups = []wire.Group{{MemoryType: kind.String(), Regions: []wire.Region{{Addr: uint64(r.Addr), Bytes: n, Device: device}}}}
	return overTheWire(p.t, m)
}

// O1: their agents leak sockets at each get.
func TestGetsFromAPlainProducerMakeOneConnection(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := fakeNIXL(t)
	leaks(t, dir)
	consumer := newSlab(t, dir, "b", 1<<20, plane)
	p := newPlainProducer(t, fake.Library(), "plain-many", 1<<20)
	_, _, _, before := fake.Live()
	const gets = 10_000
	for i := range gets {
		offset := int64(i % 200 * 4096)
		get(t, consumer, p.put(binding.DRAM, 0, offset, 1+int64(i%4096), uint64(i)), uint64(i))
		if _, _, requests, peers := fake.Live(); peers > before+1 || requests > 0 {
			t.Fatalf("after %d gets %d peers and %d requests", i+1, peers-before, requests)
		}
	}
}

func TestGetsFromARealPlainProducerKeepTheirDescriptors(t *testing.T) {
	plane := realNIXL(t) // skips
	t.Cleanup(func() { must(t, plane.Close()) })
	l := realLibrary(t)
	p := newPlainProducer(t, l, fmt.Sprint("plain-", unix.Getpid()), 64<<20)
	s, err := New(patient(t), Options{Dir: transfertest.Dir(t), Name: "b", Bytes: 1 << 20, Planes: []transfer.Plane{plane}})
	must(t, err)
	defer s.Close(patient(t))
	first := 0
	for i := range 300 {
		get(t, s, p.put(binding.DRAM, 0, int64(i%40)*65536, 65536-int64(i%7)*4096, uint64(i)), uint64(i))
		switch n := descriptors(t); { // the producer's, which is in this process
		case i == 20:
			first = n
		case i > 20 && n > first+2:
			t.Fatalf("%d descriptors after %d gets, %d after 20", n, i, first)
		}
	}
}

func TestMemoryOfEveryTypeIsReadUnderItsOwn(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := fakeNIXL(t)
	leaks(t, dir)
	consumer := newSlab(t, dir, "b", 1<<20, plane)
	p := newPlainProducer(t, fake.Library(), "plain-vram", 1<<20)
	get(t, consumer, p.put(binding.VRAM, 3, 4096, 5000, 77), 77)
	m := p.put(binding.VRAM, 3, 4096, 5000, 77)
	b, err := consumer.Alloc(patient(t), []int64{5000})
	must(t, err)
	defer b.Free()
	for name, c := range map[string]struct {
		change func(*wire.Metadata)
		want   error
	}{
		"another device":     {func(m *wire.Metadata) { m.Groups[0].Regions[0].Device = 2 }, transfer.ErrPeerLost},
		"another type":       {func(m *wire.Metadata) { m.Groups[0].MemoryType = "DRAM" }, transfer.ErrPeerLost},
		"not registered":     {func(m *wire.Metadata) { m.Groups[0].Regions[0].Addr++ }, transfer.ErrPeerLost},
		"an unknown type":    {func(m *wire.Metadata) { m.Groups[0].MemoryType = "TAPE" }, ErrNoPlane},
		"no groups":          {func(m *wire.Metadata) { m.Groups = nil }, ErrNoPlane},
		"another tensor":     {func(m *wire.Metadata) { m.Groups[0].Regions[0].Tensor = 1 }, ErrMismatch},
		"no tensor":          {func(m *wire.Metadata) { m.Groups[0].Regions[0].Tensor = -1 }, ErrMismatch},
		"too short a region": {func(m *wire.Metadata) { m.Groups[0].Regions[0].Bytes-- }, ErrMismatch},
		"a region twice": {func(m *wire.Metadata) {
			m.Groups[0].Regions = append(m.Groups[0].Regions, m.Groups[0].Regions[0])
		}, ErrMismatch},
		"an address that wraps": {func(m *wire.Metadata) { m.Groups[0].Regions[0].Addr = 1<<64 - 10 }, transfer.ErrBadRequest},
		"no agent":              {func(m *wire.Metadata) { m.AgentMetadata = []byte("x") }, transfer.ErrBadRequest},
	} {
		m := *m
		m.Groups = []wire.Group{{MemoryType: m.Groups[0].MemoryType, Regions: []wire.Region{m.Groups[0].Regions[0]}}}
		c.change(&m)
		if _, err := consumer.Read(patient(t), &m, b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		<-b.Idle()
	}
	get(t, consumer, p.put(binding.VRAM, 3, 4096, 5000, 78), 78) // none of that has hurt the peer
}

func TestAPlainReadThatFailsOnceIsReadAgain(t *testing.T) {
	dir := transfertest.Dir(t)
	f := binding.NewFake()
	plane, err := nixl.New(nixl.Options{Loaded: f.Library()})
	must(t, err)
	leaks(t, dir)
	consumer := newSlab(t, dir, "b", 1<<20, plane)
	p := newPlainProducer(t, f.Library(), "plain-again", 1<<20)
	get(t, consumer, p.put(binding.DRAM, 0, 0, 5000, 1), 1)
	f.Fail(binding.FakePost, 0, binding.StatusBackend)
	get(t, consumer, p.put(binding.DRAM, 0, 0, 5000, 2), 2)
}

func TestAPlainProducerThatDiedIsLost(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := fakeNIXL(t)
	leaks(t, dir)
	consumer := newSlab(t, dir, "b", 1<<20, plane)
	p := newPlainProducer(t, fake.Library(), "plain-dead", 1<<20)
	m := p.put(binding.DRAM, 0, 0, 5000, 1)
	get(t, consumer, m, 1)
	fake.Kill("plain-dead")
	b, err := consumer.Alloc(patient(t), []int64{5000})
	must(t, err)
	if _, err := consumer.Read(patient(t), m, b); !errors.Is(err, transfer.ErrPeerLost) {
		t.Error(err)
	}
	b.Free()
	if consumer.Used() != 0 {
		t.Error("the buffer is not free")
	}
	p.last = nil
}

// noWay is a nixl plane that reaches no plain producer.
type noWay struct {
	*nixl.Plane
	tries int
}

func (p *noWay) AddPlainAgent(context.Context, []byte) (*nixl.PlainAgent, error) {
	p.tries++
	return nil, transfer.ErrUnreachable
}

func TestAPlainProducerThatCannotBeReachedIsNoPlane(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := &noWay{Plane: fakeNIXL(t)}
	leaks(t, dir)
	s := newSlab(t, dir, "b", 1<<20, plane)
	p := newPlainProducer(t, fake.Library(), "plain-away", 1<<20)
	m := p.put(binding.DRAM, 0, 0, 5000, 1)
	b, err := s.Alloc(patient(t), []int64{5000})
	must(t, err)
	defer b.Free()
	if _, err := s.Read(patient(t), m, b); !errors.Is(err, ErrNoPlane) || !errors.Is(err, transfer.ErrUnreachable) || plane.tries != 1 {
		t.Errorf("%v after %d tries", err, plane.tries)
	}
}

func realLibrary(t testing.TB) *binding.Library {
	t.Helper()
	var opts []binding.Option
	if path := libraryPath(); path != "" {
		opts = append(opts, binding.WithPath(path))
	}
	l, err := binding.Load(opts...)
	if err != nil {
		t.Skipf("the real NIXL is not here: %v", err)
	}
	return l
}

func TestCloseEndsAPlainReadThatWasGivenUp(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := fakeNIXL(t)
	leaks(t, dir)
	p := newPlainProducer(t, fake.Library(), "plain-frozen", 1<<20)
	s, err := New(patient(t), Options{Dir: dir, Name: "b", Bytes: 1 << 20, Planes: []transfer.Plane{plane}})
	must(t, err)
	m := p.put(binding.DRAM, 0, 0, 5000, 1)
	get(t, s, m, 1)
	fake.Freeze("plain-frozen")
	b, err := s.Alloc(patient(t), []int64{5000})
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := s.Read(ctx, m, b); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	b.Free()
	if s.Used() == 0 {
		t.Error("free, and the READ is not over")
	}
	reading := make(chan error)
	other, err := s.Alloc(patient(t), []int64{5000})
	must(t, err)
	go func() {
		_, err := s.Read(t.Context(), m, other)
		reading <- err
	}()
	transfertest.Eventually(t, "the READ to begin", func() bool { return !isClosed(other.Idle()) })
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	go func() {
		if err := <-reading; !errors.Is(err, ErrClosed) {
			t.Errorf("a READ that the slab's end met: %v", err)
		}
		close(reading)
	}()
	if err := s.Close(ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	<-reading
	if !isClosed(b.Idle()) || !isClosed(other.Idle()) {
		t.Error("a READ goes on after Close")
	}
	if _, err := s.Read(t.Context(), m, other); !errors.Is(err, ErrClosed) {
		t.Errorf("a READ after Close: %v", err)
	}
	other.Free()
	fake.Thaw("plain-frozen")
	must(t, plane.Close())
}
