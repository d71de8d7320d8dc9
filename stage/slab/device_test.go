package slab

import (
	"errors"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// vram is memory of the host that the fake takes for a device's.
func vram(t testing.TB, n int) (bytes []byte, addr uint64) {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(t, err)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b, uint64(uintptr(unsafe.Pointer(&b[0])))
}

func cuda(index int) tensor.Device { return tensor.Device{Kind: "cuda", Index: index} }

// putMixed publishes three tensors: of the slab, of device memory, without elements, and of device memory again.
func putMixed(t testing.TB, s *Slab, d *DeviceMemory, bytes []byte, addr, seed uint64) *Payload {
	t.Helper()
	sizes := []int64{3000, 5000, 0, 700}
	b, err := s.Alloc(patient(t), []int64{3000, 0, 0, 0})
	must(t, err)
	transfertest.Fill(b.Slices()[0], seed)
	transfertest.Fill(bytes[8192:8192+5000], seed+1000)
	transfertest.Fill(bytes[100:800], seed+3000)
	must(t, b.Place(1, d, addr+8192, 5000))
	must(t, b.Place(3, d, addr+100, 700))
	specs := describe(sizes).Specs
	specs[1].Device, specs[3].Device = cuda(1), cuda(1)
	return b.Payload(specs)
}

func TestMixedPayloadsHaveAGroupForEachMemoryTypeAndGlobalIndices(t *testing.T) {
	dir := transfertest.Dir(t)
	a, b := fakeNIXL(t), fakeNIXL(t)
	leaks(t, dir)
	producer, consumer := newSlab(t, dir, "a", 1<<20, a), newSlab(t, dir, "b", 1<<20, b)
	bytes, addr := vram(t, 1<<20)
	d, err := producer.Device(patient(t), cuda(1), addr, 1<<20)
	must(t, err)
	p := putMixed(t, producer, d, bytes, addr, 11)

	m, err := offerPlain(t, p, "1")
	must(t, err)
	if len(m.Groups) != 2 || m.Groups[0].MemoryType != "DRAM" || m.Groups[1].MemoryType != "VRAM" || len(m.Groups[0].Regions) != 1 ||
		len(m.Groups[1].Regions) != 2 || m.Groups[1].Regions[0] != (wire.Region{Tensor: 1, Addr: addr + 8192, Bytes: 5000, Device: 1}) ||
		m.Groups[1].Regions[1].Tensor != 3 {
		t.Errorf("%+v", m.Groups)
	}
	get(t, consumer, m, 11)
	own, err := offer(t, p, "2", 1<<20, transfer.NIXL)
	must(t, err)
	if plane := get(t, consumer, own, 11); plane != transfer.NIXL {
		t.Error(plane)
	}
	if _, err := offer(t, p, "3", 1<<20, transfer.TCP); !errors.Is(err, ErrNoPlane) {
		t.Errorf("an offer for tcp only: %v", err)
	}
	must(t, p.Withdraw(patient(t), "1", true))
	must(t, p.Withdraw(patient(t), "3", true))
	if err := d.Close(); !errors.Is(err, ErrInUse) {
		t.Errorf("closed under a payload: %v", err)
	}

	// A rotation serves the device's memory too.
	must(t, p.Withdraw(patient(t), "2", false))
	m, err = offerPlain(t, p, "4")
	must(t, err)
	get(t, consumer, m, 11)
	must(t, p.Withdraw(patient(t), "4", true))
	p.Release()
	must(t, d.Close())
	must(t, d.Close())
	if now, ok := producer.ways[0].reg.(*nixl.Registration).Incarnation(); !ok {
		t.Error("nothing serves")
	} else if string(now.Agent) == "" {
		t.Error("no metadata")
	}
	if _, err := producer.Device(patient(t), cuda(1), addr, 1<<20); err != nil {
		t.Errorf("registered again: %v", err)
	}
}

func TestReadsGoIntoDeviceMemory(t *testing.T) {
	dir := transfertest.Dir(t)
	a, b := fakeNIXL(t), fakeNIXL(t)
	local, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	must(t, err)
	leaks(t, dir)
	producer, consumer := newSlab(t, dir, "a", 1<<20, a), newSlab(t, dir, "b", 1<<20, b, local)
	from, fromAddr := vram(t, 1<<20)
	source, err := producer.Device(patient(t), cuda(1), fromAddr, 1<<20)
	must(t, err)
	to, toAddr := vram(t, 1<<20)
	dest, err := consumer.Device(patient(t), cuda(0), toAddr, 1<<20)
	must(t, err)

	mixed := putMixed(t, producer, source, from, fromAddr, 21)
	host := put(t, producer, 21, 3000, 5000, 0, 700)
	small := put(t, producer, 21, 3000, 5000, 0, 700)
	for name, c := range map[string]struct {
		p      *Payload
		plain  bool
		inline int64
		want   error
	}{
		"mixed, plain": {mixed, true, 0, nil},
		"mixed, own":   {mixed, false, 0, nil},
		"host, plain":  {host, true, 0, nil},
		"host, own":    {host, false, 0, nil},
		"inline":       {small, false, 1 << 20, ErrNoPlane},
	} {
		var m *wire.Metadata
		if c.plain {
			m, err = offerPlain(t, c.p, name)
		} else {
			m, err = offer(t, c.p, name, c.inline, transfer.NIXL, transfer.Mapped)
		}
		must(t, err)
		clear(to)
		into, err := consumer.Alloc(patient(t), []int64{0, 5000, 0, 0})
		must(t, err)
		must(t, into.Place(0, dest, toAddr+1, 3000))
		must(t, into.Place(3, dest, toAddr+50_000, 700))
		plane, err := consumer.Read(patient(t), m, into)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if c.want == nil {
			if plane != transfer.NIXL {
				t.Errorf("%s: by %s", name, plane)
			}
			compare(t, [][]byte{to[1:3001], into.Slices()[1], {}, to[50_000:50_700]}, 21)
		}
		into.Free()
		must(t, c.p.Withdraw(patient(t), name, true))
	}
	for _, p := range []*Payload{mixed, host, small} {
		p.Release()
	}
	must(t, dest.Close())
	must(t, source.Close())
}

func TestImpossibleDeviceMemoryIsRefused(t *testing.T) {
	dir := transfertest.Dir(t)
	plane := fakeNIXL(t)
	local, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	must(t, err)
	leaks(t, dir)
	s, without := newSlab(t, dir, "a", 1<<20, plane), newSlab(t, dir, "b", 1<<20, local)
	_, addr := vram(t, 1<<20)
	if _, err := without.Device(t.Context(), cuda(0), addr, 1); !errors.Is(err, ErrNoPlane) {
		t.Errorf("without nixl: %v", err)
	}
	d, err := s.Device(t.Context(), cuda(0), addr, 1<<20)
	must(t, err)
	defer d.Close()
	other, err := s.Device(t.Context(), cuda(1), addr, 1<<20) // another device may have the same addresses
	must(t, err)
	for name, c := range map[string]struct {
		device tensor.Device
		addr   uint64
		bytes  int64
	}{
		"the CPU": {tensor.Device{}, addr, 1}, "a device without a number": {cuda(-1), addr, 1}, "no bytes": {cuda(2), addr, 0},
		"address 0": {cuda(2), 0, 1}, "an address that wraps": {cuda(2), 1<<64 - 1, 2}, "registered": {cuda(0), addr + 100, 1},
	} {
		if _, err := s.Device(t.Context(), c.device, c.addr, c.bytes); !errors.Is(err, transfer.ErrBadRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b, err := s.Alloc(t.Context(), []int64{5, 0, 0})
	must(t, err)
	for name, c := range map[string]struct {
		tensor int
		addr   uint64
		bytes  int64
	}{
		"a tensor of the slab": {0, addr, 10}, "no such tensor": {3, addr, 10}, "below 0": {-1, addr, 10}, "no bytes": {1, addr, 0},
		"before it": {1, addr - 1, 10}, "past its end": {1, addr + 1<<20 - 9, 10}, "longer than it": {1, addr, 1<<20 + 1},
	} {
		if err := b.Place(c.tensor, d, c.addr, c.bytes); !errors.Is(err, ErrMismatch) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, b.Place(1, d, addr, 10))
	if err := b.Place(1, d, addr, 10); !errors.Is(err, ErrMismatch) {
		t.Errorf("twice: %v", err)
	}
	must(t, other.Close())
	if err := b.Place(2, other, addr, 10); !errors.Is(err, ErrClosed) {
		t.Errorf("in closed memory: %v", err)
	}
	b.Free()
	if err := b.Place(2, d, addr, 10); !errors.Is(err, ErrClosed) {
		t.Errorf("in a freed buffer: %v", err)
	}
}

func TestDeviceMemoryNeedsAgentsInThisProcess(t *testing.T) {
	plane := realNIXL(t) // its agents are processes
	dir := transfertest.Dir(t)
	s := newSlab(t, dir, "a", 1<<20, plane)
	_, addr := vram(t, 4096)
	if _, err := s.Device(t.Context(), cuda(0), addr, 4096); !errors.Is(err, transfer.ErrBadRequest) {
		t.Error(err)
	}
}

func TestAFailedRegistrationOfDeviceMemoryLeavesNothing(t *testing.T) {
	dir := transfertest.Dir(t)
	f := binding.NewFake()
	plane, err := nixl.New(nixl.Options{Loaded: f.Library()})
	must(t, err)
	leaks(t, dir)
	s := newSlab(t, dir, "a", 1<<20, plane)
	_, addr := vram(t, 4096)
	_, before, _, _ := f.Live()
	f.Fail(binding.FakeRegister, 0, binding.StatusBackend)
	if _, err := s.Device(t.Context(), cuda(0), addr, 4096); !errors.Is(err, transfer.ErrBadRequest) {
		t.Error(err)
	}
	if _, after, _, _ := f.Live(); after != before {
		t.Errorf("%d registrations, %d before", after, before)
	}
	d, err := s.Device(t.Context(), cuda(0), addr, 4096)
	must(t, err)
	must(t, d.Close())
	if _, after, _, _ := f.Live(); after != before {
		t.Errorf("%d registrations after Close, %d before", after, before)
	}
}
