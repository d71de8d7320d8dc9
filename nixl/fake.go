package nixl

import (
	"encoding/binary"
	"maps"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Fake is a NIXL made of Go maps, for tests of programs that use this package: agents of one process that copy memory from one
// another, with the library's observable rules (unknown metadata, dead peers, unregistered memory and double names are errors) and with
// faults on demand. Library gives what Load would.
type Fake struct {
	mu     sync.Mutex
	next   handle
	agents map[handle]*fakeAgent
	byName map[string]*fakeAgent // the newest of each name
	faults []fakeFault
}

// FakeCall names what a fault of a Fake applies to.
type FakeCall string

// The calls that can be made to fail.
const (
	FakeRegister FakeCall = "register"
	FakeAddPeer  FakeCall = "add peer"
	FakeCreate   FakeCall = "create request"
	FakePost     FakeCall = "post"
	FakeStatus   FakeCall = "status"
)

type fakeFault struct {
	call   FakeCall
	skip   int
	status Status
}

type fakeAgent struct {
	f             *Fake
	h             handle
	name          string
	incarnation   uint64
	telemetry     bool
	dead, frozen  bool
	backends      map[handle]fakeBackend
	registrations map[handle][]fakeMemory
	peers         map[string]*fakeAgent
	prepared      map[handle]fakePrepared
	requests      map[handle]*fakeRequest
	inbox         []Notification
}

type fakeBackend struct {
	kind   string
	params map[string]string
}

type fakeMemory struct {
	Range
	typ MemoryType
}

type fakePrepared struct {
	peer   *fakeAgent // nil: own
	typ    MemoryType
	ranges []Range
}

type fakeRequest struct {
	operation     Operation
	peer          *fakeAgent
	local, remote []Range
	notification  []byte
	posted        bool
	done          Status
}

// NewFake makes a NIXL of its own: agents of different fakes never meet.
func NewFake() *Fake {
	return &Fake{agents: map[handle]*fakeAgent{}, byName: map[string]*fakeAgent{}}
}

// Library is the fake as a library.
func (f *Fake) Library() *Library {
	return &Library{Why: "a fake", Version: "fake", c: (*fakeCalls)(f)}
}

// Fail makes the call fail with the status once, after skip calls of its kind that go through.
func (f *Fake) Fail(call FakeCall, skip int, s Status) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.faults = append(f.faults, fakeFault{call, skip, s})
}

// Kill ends an agent as SIGKILL would: peers' requests fail, its own objects just stop working.
func (f *Fake) Kill(name string) { f.set(name, func(a *fakeAgent) { a.dead = true }) }

// Freeze stops an agent as SIGSTOP would: peers' requests stay in progress until Thaw.
func (f *Fake) Freeze(name string) { f.set(name, func(a *fakeAgent) { a.frozen = true }) }

// Thaw ends Freeze.
func (f *Fake) Thaw(name string) { f.set(name, func(a *fakeAgent) { a.frozen = false }) }

func (f *Fake) set(name string, change func(*fakeAgent)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := f.byName[name]; a != nil {
		change(a)
	}
}

// Live counts what has not been released, over all agents: for leak checks.
func (f *Fake) Live() (agents, registrations, requests, peers int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.agents {
		agents++
		registrations += len(a.registrations)
		requests += len(a.requests)
		peers += len(a.peers)
	}
	return agents, registrations, requests, peers
}

// fakeCalls is the Fake as the seam sees it.
type fakeCalls Fake

var _ calls = (*fakeCalls)(nil)

// with runs do under the lock for a live agent, after the faults for call.
func (c *fakeCalls) with(agent handle, call FakeCall, do func(f *Fake, a *fakeAgent) Status) Status {
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.agents[agent]
	if a == nil || a.dead {
		return StatusInvalidParam
	}
	if s := f.fault(call); s != StatusSuccess {
		return s
	}
	return do(f, a)
}

func (f *Fake) fault(call FakeCall) Status {
	for i := range f.faults {
		if f.faults[i].call != call {
			continue
		}
		if f.faults[i].skip > 0 {
			f.faults[i].skip--
			return StatusSuccess
		}
		s := f.faults[i].status
		f.faults = slices.Delete(f.faults, i, i+1)
		return s
	}
	return StatusSuccess
}

func (f *Fake) handle() handle {
	f.next++
	return f.next
}

func (c *fakeCalls) createAgent(name string, o AgentConfig) (handle, Status) {
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.handle()
	a := &fakeAgent{
		f: f, h: h, name: name, incarnation: uint64(h), telemetry: o.Telemetry,
		backends: map[handle]fakeBackend{}, registrations: map[handle][]fakeMemory{}, peers: map[string]*fakeAgent{},
		prepared: map[handle]fakePrepared{}, requests: map[handle]*fakeRequest{},
	}
	f.agents[h], f.byName[name] = a, a
	return h, StatusSuccess
}

func (c *fakeCalls) destroyAgent(agent handle) {
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := f.agents[agent]; a != nil {
		a.dead = true
		delete(f.agents, agent)
	}
}

func (c *fakeCalls) plugins(agent handle) (names []string, s Status) {
	s = c.with(agent, "", func(*Fake, *fakeAgent) Status { names = []string{"UCX"}; return StatusSuccess })
	return names, s
}

func (c *fakeCalls) createBackend(agent handle, kind string, params map[string]string) (h handle, s Status) {
	s = c.with(agent, "", func(f *Fake, a *fakeAgent) Status {
		if kind != "UCX" {
			return StatusBackend
		}
		h = f.handle()
		a.backends[h] = fakeBackend{kind, maps.Clone(params)}
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) backendParams(agent, backend handle) (params map[string]string, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		params = maps.Clone(a.backends[backend].params)
		return StatusSuccess
	})
	return params, s
}

func (c *fakeCalls) destroyBackend(handle) {}

func (c *fakeCalls) register(agent handle, t MemoryType, ranges []Range, _ []handle) (h handle, s Status) {
	s = c.with(agent, FakeRegister, func(f *Fake, a *fakeAgent) Status {
		if len(a.backends) == 0 {
			return StatusBackend
		}
		h = f.handle()
		for _, r := range ranges {
			a.registrations[h] = append(a.registrations[h], fakeMemory{r, t})
		}
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) deregister(agent, registration handle) Status {
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := f.agents[agent]; a != nil { // dead or not
		delete(a.registrations, registration)
	}
	return StatusSuccess
}

func (c *fakeCalls) localMetadata(agent handle) (md []byte, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		md = fakeMetadata(a.name, a.incarnation)
		return StatusSuccess
	})
	return md, s
}

// fakeMetadata is in the library's format, with the incarnation as the one connection.
func fakeMetadata(name string, incarnation uint64) []byte {
	number := func(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }
	md := []byte(metadataMark)
	md = appendField(md, "Agent", []byte(name))
	md = appendField(md, "Conns", number(1))
	md = appendField(md, "t", []byte("UCX"))
	md = appendField(md, "c", number(incarnation))
	md = appendField(md, "", []byte("MemSection"))
	return appendField(md, "nixlSecElms", number(0))
}

// fakeIncarnation is its inverse.
func fakeIncarnation(metadata []byte) (uint64, bool) {
	f := fields{metadata[len(metadataMark):]}
	var value []byte
	for _, tag := range []string{"Agent", "Conns", "t", "c"} {
		var err error
		if value, err = f.next(tag); err != nil {
			return 0, false
		}
	}
	if len(value) != 8 {
		return 0, false
	}
	return binary.LittleEndian.Uint64(value), true
}

func appendField(b []byte, tag string, value []byte) []byte {
	b = append(b, tag...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(value)))
	return append(append(b, value...), '|')
}

func (c *fakeCalls) loadPeer(agent handle, metadata []byte) (name string, s Status) {
	s = c.with(agent, FakeAddPeer, func(f *Fake, a *fakeAgent) Status {
		var err error
		if name, err = peekName(metadata); err != nil {
			return StatusBackend
		}
		incarnation, ok := fakeIncarnation(metadata)
		peer := f.agents[handle(incarnation)]
		if !ok || peer == nil || peer.dead || peer.name != name || a.peers[name] != nil && a.peers[name] != peer {
			return StatusBackend
		}
		a.peers[name] = peer
		return StatusSuccess
	})
	return name, s
}

func (c *fakeCalls) invalidatePeer(agent handle, name string) Status {
	return c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		if a.peers[name] == nil {
			return StatusBackend
		}
		delete(a.peers, name)
		return StatusSuccess
	})
}

func (a *fakeAgent) covers(t MemoryType, ranges []Range) bool {
	for _, r := range ranges {
		ok := false
		for _, memories := range a.registrations {
			for _, m := range memories {
				ok = ok || m.typ == t && m.Device == r.Device && r.Addr >= m.Addr && uint64(r.Addr)+r.Len <= uint64(m.Addr)+m.Len
			}
		}
		if !ok {
			return false
		}
	}
	return true
}

func (c *fakeCalls) prepare(agent handle, peer string, t MemoryType, ranges []Range, _ []handle) (h handle, s Status) {
	s = c.with(agent, "", func(f *Fake, a *fakeAgent) Status {
		p := fakePrepared{typ: t, ranges: slices.Clone(ranges)}
		owner := a
		if peer != prepareLocal {
			if p.peer = a.peers[peer]; p.peer == nil {
				return StatusBackend
			}
			owner = p.peer
		}
		if !owner.covers(t, ranges) {
			return StatusBackend
		}
		h = f.handle()
		a.prepared[h] = p
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) releasePrepared(agent, prepared handle) {
	c.with(agent, "", func(_ *Fake, a *fakeAgent) Status { delete(a.prepared, prepared); return StatusSuccess })
}

func (c *fakeCalls) createRequest(agent handle, r requestArgs) (h handle, s Status) {
	s = c.with(agent, FakeCreate, func(f *Fake, a *fakeAgent) Status {
		peer := a.peers[r.peer]
		if peer == nil || peer.dead || !a.covers(r.localType, r.local) || !peer.covers(r.remoteType, r.remote) {
			return StatusBackend
		}
		h = f.handle()
		a.requests[h] = &fakeRequest{
			operation: r.operation, peer: peer, local: slices.Clone(r.local), remote: slices.Clone(r.remote),
			notification: slices.Clone(r.notification),
		}
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) makeRequest(agent handle, r preparedArgs) (h handle, s Status) {
	s = c.with(agent, FakeCreate, func(f *Fake, a *fakeAgent) Status {
		local, remote := a.prepared[r.local], a.prepared[r.remote]
		if remote.peer == nil || remote.peer.dead {
			return StatusBackend
		}
		request := &fakeRequest{operation: r.operation, peer: remote.peer, notification: slices.Clone(r.notification)}
		for i := range r.localIndices {
			request.local = append(request.local, local.ranges[r.localIndices[i]])
			request.remote = append(request.remote, remote.ranges[r.remoteIndices[i]])
		}
		h = f.handle()
		a.requests[h] = request
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) post(agent, request handle) Status {
	return c.with(agent, FakePost, func(_ *Fake, a *fakeAgent) Status {
		r := a.requests[request]
		if r == nil {
			return StatusInvalidParam
		}
		r.posted, r.done = true, StatusInProgress
		return a.step(r)
	})
}

func (c *fakeCalls) status(agent, request handle) Status {
	return c.with(agent, FakeStatus, func(_ *Fake, a *fakeAgent) Status {
		r := a.requests[request]
		if r == nil || !r.posted {
			return StatusInvalidParam
		}
		return a.step(r)
	})
}

// step moves a posted request on.
func (a *fakeAgent) step(r *fakeRequest) Status {
	switch {
	case r.done != StatusInProgress:
	case r.peer.dead:
		r.done = StatusBackend
	case !r.peer.frozen:
		for i := range r.local {
			local := unsafe.Slice((*byte)(pointer(r.local[i].Addr)), r.local[i].Len)
			remote := unsafe.Slice((*byte)(pointer(r.remote[i].Addr)), r.remote[i].Len)
			if r.operation == Read {
				copy(local, remote)
			} else {
				copy(remote, local)
			}
		}
		if r.notification != nil {
			r.peer.inbox = append(r.peer.inbox, Notification{Peer: a.name, Message: r.notification})
		}
		r.done = StatusSuccess
	}
	return r.done
}

func (c *fakeCalls) releaseRequest(agent, request handle) {
	c.with(agent, "", func(_ *Fake, a *fakeAgent) Status { delete(a.requests, request); return StatusSuccess })
}

func (c *fakeCalls) telemetry(agent, request handle) (t Telemetry, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		r := a.requests[request]
		if !a.telemetry || r == nil || r.done != StatusSuccess || !r.posted {
			return StatusNoTelemetry
		}
		for _, l := range r.local {
			t.Bytes += l.Len
		}
		t.Descriptors = uint64(len(r.local))
		return StatusSuccess
	})
	return t, s
}

func (c *fakeCalls) unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

func (c *fakeCalls) notifications(agent handle) (n []Notification, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		n, a.inbox = a.inbox, nil
		return StatusSuccess
	})
	return n, s
}

func (c *fakeCalls) notify(agent handle, peer string, message []byte) Status {
	return c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		p := a.peers[peer]
		if p == nil || p.dead {
			return StatusBackend
		}
		p.inbox = append(p.inbox, Notification{Peer: a.name, Message: slices.Clone(message)})
		return StatusSuccess
	})
}
