package stage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

func cuda(index int) tensor.Device { return tensor.Device{Kind: "cuda", Index: index} }

// deviceBytes is memory of the host that the fake takes for a device's.
type deviceBytes []byte

func newDeviceBytes(t testing.TB, n int) deviceBytes {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

func (d deviceBytes) addr() uint64 { return uint64(uintptr(unsafe.Pointer(&d[0]))) }

// at gives the bytes of a tensor on the device.
func (d deviceBytes) at(t testing.TB, v tensor.Tensor) []byte {
	t.Helper()
	if v.Addr() < d.addr() || v.Addr()+uint64(v.Bytes()) > d.addr()+uint64(len(d)) {
		t.Fatalf("%v is not on the device", v)
	}
	return d[v.Addr()-d.addr():][:v.Bytes()]
}

// holds puts the bytes of v at an offset and gives the tensor that they are on the device.
func (d deviceBytes) holds(t testing.TB, device tensor.Device, offset int, v tensor.Tensor) tensor.Tensor {
	t.Helper()
	copy(d[offset:], v.Data())
	on, err := tensor.OnDevice(v.DType(), v.Shape(), device, d.addr()+uint64(offset))
	if err != nil {
		t.Fatal(err)
	}
	return on
}

// newDeviceLink gives a Link whose slab has NIXL's fake, and memory of a device that is registered for puts.
func newDeviceLink(t testing.TB, device tensor.Device, set ...func(*LinkOptions)) (*Link, deviceBytes, *slab.DeviceMemory) {
	t.Helper()
	s := newPlainSlab(t, 4<<20)
	d := newDeviceBytes(t, 1<<20)
	m, err := s.Device(t.Context(), device, d.addr(), int64(len(d)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return newLink(t, 0, append(set, func(o *LinkOptions) { o.Slab = s })...), d, m
}

// newPool gives a pool of a Link's device. At the end nothing of it may be in use.
func newPool(t testing.TB, l *Link, device tensor.Device, n int) (*slab.DevicePool, deviceBytes) {
	t.Helper()
	d := newDeviceBytes(t, n)
	p, err := l.o.Slab.DevicePool(t.Context(), device, d.addr(), int64(n))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return p, d
}

// emptyOn is a tensor without elements.
func emptyOn(t testing.TB, device tensor.Device) tensor.Tensor {
	t.Helper()
	v, err := tensor.OnDevice(tensor.Float32, tensor.Shape{0, 3}, device, 0)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// mixed is a value with tensors on the device and on the CPU, and what it is with all of them on the CPU.
func mixed(t testing.TB, d deviceBytes, device tensor.Device) (onDevice, onCPU tensor.Node) {
	t.Helper()
	hidden, small, ids := bytesOf(t, 100_000, 1), bytesOf(t, 700, 2), bytesOf(t, 3000, 3)
	make := func(hidden, small, empty tensor.Tensor) tensor.Node {
		return tensor.Map{tensor.Field("hidden", hidden), tensor.Field("ids", ids), tensor.Field("more", tensor.List{empty, small}), tensor.Field("n", tensor.Int(7))}
	}
	none, err := tensor.New(tensor.Float32, tensor.Shape{0, 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return make(d.holds(t, device, 8192, hidden), d.holds(t, device, 100, small), emptyOn(t, device)), make(hidden, small, none)
}

// fetched gives a value that was got with its tensors copied from the device that they are to be on.
func fetched(t testing.TB, n tensor.Node, d deviceBytes, device tensor.Device) (v tensor.Node, onDevice int) {
	t.Helper()
	switch n := n.(type) {
	case tensor.Tensor:
		if n.Device().CPU() {
			return n, 0
		}
		if n.Device() != device {
			t.Errorf("on %v, want %v", n.Device(), device)
		}
		var b []byte
		if n.Bytes() > 0 {
			b = bytes.Clone(d.at(t, n))
		}
		c, err := tensor.New(n.DType(), n.Shape(), b)
		if err != nil {
			t.Fatal(err)
		}
		return c, 1
	case tensor.List:
		out := tensor.List{}
		for _, v := range n {
			c, k := fetched(t, v, d, device)
			out, onDevice = append(out, c), onDevice+k
		}
		return out, onDevice
	case tensor.Map:
		out := tensor.Map{}
		for _, e := range n {
			c, k := fetched(t, e.Value, d, device)
			out, onDevice = append(out, tensor.Entry{Key: e.Key, Value: c}), onDevice+k
		}
		return out, onDevice
	}
	return n, 0
}

func TestTensorsOnADeviceArePutWhereTheyAreAndReadToWhereTheyAreWanted(t *testing.T) {
	from, source, memory := newDeviceLink(t, cuda(1), withSum)
	to, _, _ := newDeviceLink(t, cuda(0), onlyGets)
	pool, landing := newPool(t, to, cuda(2), 1<<20)
	v, want := mixed(t, source, cuda(1))
	for name, c := range map[string]struct {
		r        Request
		v, want  tensor.Node
		onDevice int
	}{
		"to the CPU":             {Request{}, v, want, 0},
		"in place":               {Request{InPlace: true}, v, want, 0},
		"to the device":          {Request{Device: pool}, v, want, 3},
		"all to the device":      {Request{Device: pool, AllOnDevice: true}, v, want, 4},
		"the CPU's to the CPU":   {Request{Device: pool}, want, want, 0},
		"the CPU's to a device":  {Request{Device: pool, AllOnDevice: true}, want, want, 4},
		"an object":              {Request{Device: pool, AllOnDevice: true}, tensor.String("x"), tensor.String("x"), 0},
		"a tensor of no element": {Request{Device: pool}, emptyOn(t, cuda(1)), emptyOf(t), 1},
	} {
		t.Run(name, func(t *testing.T) {
			clear(landing)
			p := mustPut(t, from, "k", c.v, PutOptions{Borrow: true})
			c.r.Key, c.r.Metadata = "k", p.Metadata
			got := mustGet(t, to, c.r)
			receive(t, p.Released())
			if v, n := fetched(t, got.Root, landing, cuda(2)); !tensor.Equal(v, c.want) || n != c.onDevice {
				t.Errorf("by %s: %d tensors on the device, want %d; got %.200v, want %.200v", got.Plane, n, c.onDevice, v, c.want)
			}
			if err := got.Release(); err != nil {
				t.Error(err)
			}
			if pool.Used() != 0 {
				t.Errorf("%d bytes of the pool are used", pool.Used())
			}
		})
	}
	idle(t, from)
	idle(t, to)
	if err := memory.Close(); err != nil { // nobody has it any more
		t.Error(err)
	}
}

func emptyOf(t testing.TB) tensor.Tensor {
	t.Helper()
	v, err := tensor.New(tensor.Float32, tensor.Shape{0, 3}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestAPlainReaderIsToldAGroupForEachMemoryTypeOfOneAgent(t *testing.T) {
	l, source, _ := newDeviceLink(t, cuda(1))
	v, _ := mixed(t, source, cuda(1))
	p := mustPut(t, l, "k", v, PutOptions{Borrow: true})
	r := newPlain(t, l.server)
	c := Claim{Key: "k", Generation: p.Generation, ID: wire.TextID("1")}
	m := r.ask(wire.Get, c).Metadata
	if m == nil || len(m.AgentMetadata) == 0 || m.Ferry != nil || len(m.Groups) != 2 || m.Groups[0].MemoryType != "DRAM" || m.Groups[1].MemoryType != "VRAM" {
		t.Fatalf("%+v", m)
	}
	// Tensor 0 is the skeleton, 3 has no elements.
	var host []int
	for _, r := range m.Groups[0].Regions {
		host = append(host, r.Tensor)
		if r.Device != 0 {
			t.Errorf("DRAM on device %d", r.Device)
		}
	}
	want := []wire.Region{{Tensor: 1, Addr: source.addr() + 8192, Bytes: 100_000, Device: 1}, {Tensor: 4, Addr: source.addr() + 100, Bytes: 700, Device: 1}}
	if fmt.Sprint(host) != "[0 2]" || fmt.Sprint(m.Groups[1].Regions) != fmt.Sprint(want) {
		t.Errorf("DRAM %v, VRAM %+v, want [0 2], %+v", host, m.Groups[1].Regions, want)
	}
	var devices []string
	for _, s := range m.Specs {
		devices = append(devices, s.Device.String())
	}
	if fmt.Sprint(devices) != "[cpu cuda:1 cpu cuda:1 cuda:1]" {
		t.Error(devices)
	}
	if a := r.ask(wire.Done, c); a.Status != wire.Acked {
		t.Error(a.Status)
	}
	receive(t, p.Released())
}

func TestBorrowedMemoryIsThePayloadsUntilItIsReleased(t *testing.T) {
	from, source, memory := newDeviceLink(t, cuda(0))
	to, _, _ := newDeviceLink(t, cuda(0), onlyGets)
	a, _ := mixed(t, source, cuda(0))
	p := mustPut(t, from, "k", a, PutOptions{Borrow: true, Readers: 2})
	q := mustPut(t, from, "other", a, PutOptions{Borrow: true}) // may lend the same bytes
	for range 2 {
		if err := memory.Close(); !errors.Is(err, slab.ErrInUse) {
			t.Errorf("closed under a payload: %v", err)
		}
		if err := mustGet(t, to, Request{Key: "k", Metadata: p.Metadata}).Release(); err != nil {
			t.Error(err)
		}
	}
	receive(t, p.Released())
	if err := memory.Close(); !errors.Is(err, slab.ErrInUse) {
		t.Errorf("closed under the other: %v", err)
	}
	if err := from.Cleanup("other"); err != nil {
		t.Error(err)
	}
	receive(t, q.Released())
	if err := memory.Close(); err != nil {
		t.Error(err)
	}
	if _, err := from.Put(t.Context(), "k", a, PutOptions{Borrow: true}); !errors.Is(err, slab.ErrUnregistered) {
		t.Errorf("after Close: %v", err)
	}
	idle(t, from)
}

func TestDeviceTensorsThatCannotBePutAreNamed(t *testing.T) {
	l, d, _ := newDeviceLink(t, cuda(1))
	on := func(device tensor.Device, offset, n int) tensor.Node {
		v, err := tensor.OnDevice(tensor.Uint8, tensor.Shape{int64(n)}, device, d.addr()+uint64(offset))
		if err != nil {
			t.Fatal(err)
		}
		return tensor.List{bytesOf(t, 10, 1), v}
	}
	for name, c := range map[string]struct {
		v      tensor.Node
		borrow bool
		want   error
	}{
		"not lent":             {on(cuda(1), 0, 10), false, ErrDevice},
		"of another device":    {on(cuda(0), 0, 10), true, slab.ErrUnregistered},
		"of another kind":      {on(tensor.Device{Kind: "npu", Index: 1}, 0, 10), true, slab.ErrUnregistered},
		"without a number":     {on(cuda(-1), 0, 10), true, slab.ErrUnregistered},
		"past the end":         {on(cuda(1), 1<<20-9, 10), true, slab.ErrUnregistered},
		"before the begin":     {on(cuda(1), -1, 10), true, slab.ErrUnregistered},
		"in somebody's memory": {on(cuda(1), 1<<21, 10), true, slab.ErrUnregistered},
	} {
		if p, err := l.Put(t.Context(), "k", c.v, PutOptions{Borrow: c.borrow}); !errors.Is(err, c.want) || !errors.Is(err, ErrDevice) || p != nil {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	idle(t, l)
}

func TestAReaderWithoutNIXLIsToldWhatDeviceMemoryNeeds(t *testing.T) {
	from, source, _ := newDeviceLink(t, cuda(0))
	v, _ := mixed(t, source, cuda(0))
	p := mustPut(t, from, "k", v, PutOptions{Borrow: true})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := newLink(t, 1<<20, onlyGets).Get(ctx, Request{Key: "k", Metadata: p.Metadata})
	if !errors.Is(err, ErrFailed) {
		t.Errorf("%v, want ErrFailed", err)
	}
	to, _, _ := newDeviceLink(t, cuda(0), onlyGets)
	if err := mustGet(t, to, Request{Key: "k", Metadata: p.Metadata}).Release(); err != nil { // it is still there
		t.Error(err)
	}
	receive(t, p.Released())
}

func TestDestinationsThatCannotBeAreNamed(t *testing.T) {
	from, source, _ := newDeviceLink(t, cuda(0))
	to, _, _ := newDeviceLink(t, cuda(0), onlyGets)
	pool, _ := newPool(t, to, cuda(1), 64<<10)
	foreign, _ := newPool(t, from, cuda(2), 1<<20)
	v, want := mixed(t, source, cuda(0))
	for name, c := range map[string]struct {
		r    Request
		want error
	}{
		"in place and on a device": {Request{Device: pool, InPlace: true}, ErrOptions},
		"all on no device":         {Request{AllOnDevice: true}, ErrOptions},
		"a pool that is too small": {Request{Device: pool}, slab.ErrTooLarge},
		"another slab's pool":      {Request{Device: foreign}, slab.ErrMismatch},
	} {
		p := mustPut(t, from, name, v, PutOptions{Borrow: true})
		c.r.Key, c.r.Metadata = name, p.Metadata
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		if _, err := to.Get(ctx, c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		cancel()
		consume(t, to, Request{Key: name, Metadata: p.Metadata}, want) // it is still there
		receive(t, p.Released())
	}
	if pool.Used()+foreign.Used() != 0 {
		t.Errorf("%d and %d bytes of the pools are used", pool.Used(), foreign.Used())
	}
	idle(t, to)
}

// The READ of a get that gave up may write at any later time: its memory is nobody's until it is over.
func TestDeviceMemoryIsInQuarantineUntilAReadThatWasGivenUpIsOver(t *testing.T) {
	from, source, _ := newDeviceLink(t, cuda(0))
	to, _, _ := newDeviceLink(t, cuda(0), onlyGets)
	pool, landing := newPool(t, to, cuda(1), 64<<10)
	v := source.holds(t, cuda(0), 0, bytesOf(t, 50_000, 1))
	p := mustPut(t, from, "k", v, PutOptions{Borrow: true})
	r := newPlain(t, from.server)
	c := Claim{Key: "k", Generation: p.Generation, ID: wire.TextID("1")}
	agent, err := binding.AgentName(r.ask(wire.Get, c).Metadata.AgentMetadata)
	if err != nil {
		t.Fatal(err)
	}
	agents.Freeze(agent)
	reads := func() int {
		_, _, requests, _ := agents.Live()
		return requests
	}
	before := reads()
	ctx, cancel := context.WithCancel(t.Context())
	gave := make(chan error)
	go func() {
		_, err := to.Get(ctx, Request{Key: "k", Metadata: p.Metadata, Device: pool})
		gave <- err
	}()
	eventually(t, "it reads", func() bool { return reads() > before })
	cancel()
	if err := receive(t, gave); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if pool.Used() == 0 {
		t.Fatal("nothing is in quarantine")
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := to.Get(short, Request{Key: "k", Metadata: p.Metadata, Device: pool}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a get of as much: %v", err)
	}
	if from.Stats().Store.Claims < 2 {
		t.Error("its claim ended before its READ")
	}
	agents.Thaw(agent)
	eventually(t, "the pool is free", func() bool { return pool.Used() == 0 })
	r.ask(wire.Done, c)
	eventually(t, "its claim ends", func() bool { return from.Stats().Store.Claims == 0 })
	// The plain reader used it up, or the claims that failed kept it.
	q := mustPut(t, from, "again", v, PutOptions{Borrow: true})
	got := mustGet(t, to, Request{Key: "again", Metadata: q.Metadata, Device: pool})
	if !bytes.Equal(landing.at(t, got.Root.(tensor.Tensor)), source[:50_000]) {
		t.Error("other bytes")
	}
	closing, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := pool.Close(closing); !errors.Is(err, slab.ErrInUse) {
		t.Errorf("closed under what was got: %v", err)
	}
	if err := got.Release(); err != nil {
		t.Error(err)
	}
	if err := from.Cleanup("k"); err != nil {
		t.Error(err)
	}
	receive(t, q.Released())
}

func TestWhatWasGotOnADeviceIsRepublishedWithoutACopy(t *testing.T) {
	for _, sum := range []bool{false, true} {
		set := func(o *LinkOptions) { o.Sum = sum }
		thinker, source, _ := newDeviceLink(t, cuda(0), set)
		talker, _, _ := newDeviceLink(t, cuda(0), set)
		vocoder, _, _ := newDeviceLink(t, cuda(0), onlyGets)
		pool, landing := newPool(t, talker, cuda(1), 1<<20)
		v, want := mixed(t, source, cuda(0))
		for i, c := range []struct {
			put tensor.Node
			all bool
		}{{v, false}, {want, true}} {
			key := keyOf(i)
			p := mustPut(t, thinker, key, c.put, PutOptions{Borrow: true})
			got := mustGet(t, talker, Request{Key: key, Metadata: p.Metadata, Device: pool, AllOnDevice: c.all})
			hidden := got.Root.(tensor.Map).Get("hidden").(tensor.Tensor)
			q, err := talker.Republish(t.Context(), key, got, PutOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := got.Release(); err != nil {
				t.Error(err)
			}
			receive(t, p.Released())
			if hidden.Device() != cuda(1) || pool.Used() == 0 {
				t.Errorf("hidden is on %v, %d bytes of the pool are used", hidden.Device(), pool.Used())
			}
			if !bytes.Equal(landing.at(t, hidden), want.(tensor.Map).Get("hidden").(tensor.Tensor).Data()) {
				t.Error("other bytes")
			}
			consume(t, vocoder, Request{Key: key, Metadata: q.Metadata}, want)
			receive(t, q.Released())
			if pool.Used() != 0 {
				t.Errorf("%d bytes of the pool are used", pool.Used())
			}
		}
		idle(t, talker)
	}
}
