package nixl

import (
	"bytes"
	"testing"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// producer is an agent that registers what its test wants, as unmodified peers do.
func producer(t *testing.T, f *binding.Fake, name string) *binding.Agent {
	t.Helper()
	a, err := f.Library().NewAgent(name, binding.AgentConfig{})
	must(t, err)
	t.Cleanup(func() { must(t, a.Close()) })
	_, err = a.CreateBackend("UCX", nil)
	must(t, err)
	return a
}

func metadataOf(t *testing.T, a *binding.Agent) []byte {
	t.Helper()
	md, err := a.LocalMetadata()
	must(t, err)
	return md
}

func on(p Place, kind binding.MemoryType, device uint64) Place {
	p.Type, p.Device = kind, device
	return p
}

func TestAPlainAgentsMemoryIsReadByAddressAndType(t *testing.T) {
	p := newPair(t, Options{})
	far, near := shared(t, 64<<10), shared(t, 64<<10)
	register(t, p.reader, near)
	a := producer(t, p.fake, "plain")
	dram, vram := far.Bytes[:20_000], far.Bytes[30_000:50_000]
	for kind, b := range map[binding.MemoryType][]byte{binding.DRAM: dram, binding.VRAM: vram} {
		_, err := a.Register(kind, []binding.Range{on(PlaceOf(b), kind, uint64(kind)*3).memory()})
		must(t, err)
	}
	c, err := p.reader.AddPlainAgent(t.Context(), metadataOf(t, a))
	must(t, err)
	defer c.Close()
	clear(near.Bytes)
	rd, err := c.Read(t.Context(),
		[]Place{PlaceOf(dram[100:1100]), on(PlaceOf(vram[7:5007]), binding.VRAM, 3), PlaceOf(dram[:10])},
		[]Place{PlaceOf(near.Bytes[:1000]), PlaceOf(near.Bytes[2000:7000]), PlaceOf(near.Bytes[9000:9010])})
	must(t, err)
	must(t, wait(t, rd))
	if !bytes.Equal(near.Bytes[:1000], dram[100:1100]) || !bytes.Equal(near.Bytes[2000:7000], vram[7:5007]) || !bytes.Equal(near.Bytes[9000:9010], dram[:10]) {
		t.Error("other bytes")
	}
	// One of two READs fails: the outcome is its.
	p.fake.Fail(binding.FakePost, 1, binding.StatusBackend)
	rd, err = c.Read(t.Context(), []Place{PlaceOf(dram[:10]), on(PlaceOf(vram[:10]), binding.VRAM, 3)}, []Place{PlaceOf(near.Bytes[:10]), PlaceOf(near.Bytes[10:20])})
	must(t, err)
	wantErr(t, "one of two", wait(t, rd), transfer.ErrPeerLost)
}

func TestImpossibleReadsOfAPlainAgentAreRefused(t *testing.T) {
	p := newPair(t, Options{})
	far, near := shared(t, 4096), shared(t, 4096)
	register(t, p.reader, near)
	a := producer(t, p.fake, "plain")
	_, err := a.Register(binding.DRAM, []binding.Range{PlaceOf(far.Bytes).memory()})
	must(t, err)
	c, err := p.reader.AddPlainAgent(t.Context(), metadataOf(t, a))
	must(t, err)
	defer c.Close()
	f, n := PlaceOf(far.Bytes[:10]), PlaceOf(near.Bytes[:10])
	for name, r := range map[string]struct{ from, to []Place }{
		"nothing":            {nil, nil},
		"one into two":       {[]Place{f}, []Place{n, n}},
		"other lengths":      {[]Place{f}, []Place{PlaceOf(near.Bytes[:11])}},
		"no bytes":           {[]Place{{Addr: f.Addr}}, []Place{{Addr: n.Addr}}},
		"from nowhere":       {[]Place{{Bytes: 10}}, []Place{n}},
		"from what wraps":    {[]Place{{Addr: 1<<64 - 5, Bytes: 10}}, []Place{n}},
		"not registered":     {[]Place{f}, []Place{PlaceOf(far.Bytes[10:20])}},
		"past its end":       {[]Place{f}, []Place{{Addr: n.Addr + 4090, Bytes: 10}}},
		"another device":     {[]Place{f}, []Place{on(n, binding.DRAM, 1)}},
		"another type":       {[]Place{f}, []Place{on(n, binding.VRAM, 0)}},
		"an impossible type": {[]Place{on(f, 99, 0)}, []Place{n}},
		"too many":           {make([]Place, maxPieces+1), make([]Place, maxPieces+1)},
	} {
		_, err := c.Read(t.Context(), r.from, r.to)
		wantErr(t, name, err, transfer.ErrBadRequest)
	}
	_, err = p.reader.AddPlainAgent(t.Context(), make([]byte, maxPlainMetadata+1))
	wantErr(t, "too much metadata", err, transfer.ErrBadRequest)
	_, err = p.reader.AddPlainAgent(t.Context(), []byte("garbage"))
	wantErr(t, "garbage", err, transfer.ErrBadRequest)
	must(t, c.Close())
	_, err = c.Read(t.Context(), []Place{f}, []Place{n})
	wantErr(t, "closed", err, transfer.ErrClosed)
}

// longer is metadata that lists one more piece of memory, the nth.
func longer(t *testing.T, a *binding.Agent, n int) []byte {
	t.Helper()
	r, err := a.Register(binding.DRAM, []binding.Range{{Addr: 1<<40 + uintptr(n)*4096, Len: 1}})
	must(t, err)
	md := metadataOf(t, a)
	must(t, r.Close())
	return md
}

func TestOtherMetadataOfAKnownAgentMakesNoConnectionAndLittleIsKept(t *testing.T) {
	f := binding.NewFake()
	e, err := newEngine(f.Library(), engineOptions{Name: "reader", Backends: []Backend{{Name: "UCX"}}, IdlePeers: 8}, nil)
	must(t, err)
	defer e.end()
	a := producer(t, f, "plain")
	known := map[uint64]bool{}
	for i := range maxLoads + 100 {
		id, err := e.addPeer(t.Context(), longer(t, a, i))
		must(t, err)
		known[id] = true
		if r := e.peers.byID[id]; len(r.keys) > maxKeys || len(e.peers.byKey) > maxKeys {
			t.Fatalf("%d keys, %d in all", len(r.keys), len(e.peers.byKey))
		}
		again, err := e.addPeer(t.Context(), longer(t, a, i))
		must(t, err)
		if again != id {
			t.Fatal("the same metadata is another peer")
		}
		e.dropPeer(id)
		e.dropPeer(id)
	}
	if len(known) != 2 {
		t.Errorf("%d connections for %d loads, want 2", len(known), maxLoads+100)
	}
}

func TestAnAgentThatFailedIsLoadedAnewFromOtherMetadata(t *testing.T) {
	p := newPair(t, Options{})
	near := shared(t, 4096)
	register(t, p.reader, near)
	far := shared(t, 4096)
	a := producer(t, p.fake, "plain")
	_, err := a.Register(binding.DRAM, []binding.Range{PlaceOf(far.Bytes).memory()})
	must(t, err)
	get := func(i int) error {
		c, err := p.reader.AddPlainAgent(t.Context(), longer(t, a, i))
		must(t, err)
		defer c.Close()
		rd, err := c.Read(t.Context(), []Place{PlaceOf(far.Bytes)}, []Place{PlaceOf(near.Bytes)})
		must(t, err)
		return wait(t, rd)
	}
	must(t, get(0))
	held, err := p.reader.AddPlainAgent(t.Context(), longer(t, a, 0)) // somebody else who uses it
	must(t, err)
	p.fake.Fail(binding.FakePost, 0, binding.StatusBackend)
	wantErr(t, "a READ that fails", get(1), transfer.ErrPeerLost)
	must(t, get(2))
	must(t, held.Close()) // of the one that failed: the new one stays
	must(t, get(3))
}

func TestARegistrationIsReadByAddressToo(t *testing.T) {
	p := newPair(t, Options{})
	far, near := shared(t, 8192), shared(t, 8192)
	reg := register(t, p.producer, far)
	register(t, p.reader, near)
	c, base, err := p.reader.AddRegistrationAgent(t.Context(), reg.Metadata())
	must(t, err)
	defer c.Close()
	clear(near.Bytes)
	rd, err := c.Read(t.Context(), []Place{{Addr: base + 100, Bytes: 5000}}, []Place{PlaceOf(near.Bytes[:5000])})
	must(t, err)
	must(t, wait(t, rd))
	if !bytes.Equal(near.Bytes[:5000], far.Bytes[100:5100]) {
		t.Error("other bytes")
	}
	_, _, err = p.reader.AddRegistrationAgent(t.Context(), []byte("garbage"))
	wantErr(t, "garbage", err, transfer.ErrBadRequest)
}

func TestDeviceMemoryIsServedByEachIncarnationUntilClosed(t *testing.T) {
	p := newPair(t, Options{})
	far, near := shared(t, 8192), shared(t, 8192)
	reg := register(t, p.producer, far)
	register(t, p.reader, near)
	device := shared(t, 4096)
	at := on(PlaceOf(device.Bytes), binding.VRAM, 2)
	d, err := reg.AddDevice(t.Context(), at)
	must(t, err)
	_, err = reg.AddDevice(t.Context(), at)
	wantErr(t, "twice", err, transfer.ErrBadRequest)
	_, err = reg.AddDevice(t.Context(), Place{})
	wantErr(t, "nowhere", err, transfer.ErrBadRequest)
	get := func() error {
		now, ok := reg.Incarnation()
		if !ok {
			t.Fatal("nothing serves")
		}
		c, err := p.reader.AddPlainAgent(t.Context(), now.Agent)
		must(t, err)
		defer c.Close()
		rd, err := c.Read(t.Context(), []Place{at}, []Place{PlaceOf(near.Bytes[:4096])})
		must(t, err)
		return wait(t, rd)
	}
	must(t, get())
	end, err := reg.Rotate(t.Context())
	must(t, err)
	must(t, get())
	must(t, d.Close()) // also in the former one
	wantErr(t, "after Close", get(), transfer.ErrPeerLost)
	end()
	must(t, pull(t, add(t, p.reader, reg.Metadata()), make([]byte, 100)))
	d, err = reg.AddDevice(t.Context(), at)
	must(t, err)
	must(t, get())
	dead, _ := reg.Incarnation()
	reg.cur.Load().agent.end() // its end is seen, and the next one serves the memory too
	transfertest.Eventually(t, "the next agent", func() bool {
		now, ok := reg.Incarnation()
		return ok && now.Gone != dead.Gone
	})
	must(t, get())
	must(t, d.Close())
	must(t, d.Close())
}

func TestDeviceMemoryIsNotForAgentProcesses(t *testing.T) {
	p := newPlane(t, processes(t))
	m, free := transfertest.NewMemory(t, transfertest.Dir(t), 4096)
	t.Cleanup(free)
	reg, err := p.Register(t.Context(), m, nil)
	must(t, err)
	defer reg.Close()
	_, err = reg.(*Registration).AddDevice(t.Context(), Place{Type: binding.VRAM, Addr: 4096, Bytes: 4096})
	wantErr(t, "AddDevice", err, transfer.ErrBadRequest)
}
