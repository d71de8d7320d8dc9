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
// another, with the library's observable rules and with faults on demand. Library gives what Load would.
//
// It is as unkind as the library: a transfer is not over when Post returns, and is half done in between; a request that was released in
// progress goes on writing until its agent is closed; a READ of a peer that dies leaves rubbish in its destination; what was registered after
// metadata was made is not known by it; a refresh that fails loses the peer, and its name for good.
type Fake struct {
	mu     sync.Mutex
	next   handle
	steps  int
	keys   bool
	agents map[handle]*fakeAgent
	byName map[string]*fakeAgent // the newest of each name
	faults []fakeFault
	made   map[FakeCall]int
}

// FakeCall names what a fault of a Fake applies to.
type FakeCall string

// The calls that can be made to fail.
const (
	FakeBackend       FakeCall = "create backend"
	FakeRegister      FakeCall = "register"
	FakeDeregister    FakeCall = "deregister" // it is deregistered nevertheless
	FakeMetadata      FakeCall = "local metadata"
	FakeAddPeer       FakeCall = "add peer" // of a peer that is known: that is lost, and its name with it
	FakePrepare       FakeCall = "prepare"
	FakeCreate        FakeCall = "create request"
	FakePost          FakeCall = "post"
	FakeStatus        FakeCall = "status"
	FakeRelease       FakeCall = "release request"
	FakeNotify        FakeCall = "notify"
	FakeNotifications FakeCall = "notifications"
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
	peers         map[string]*fakePeer
	lost          map[string]bool // names that cannot be loaded any more
	prepared      map[handle]fakePrepared
	requests      map[handle]*fakeRequest
	orphans       []*fakeRequest // released in progress
	inbox         []Notification
}

// fakePeer is a peer as its metadata shows it.
type fakePeer struct {
	*fakeAgent
	memory []fakeMemory
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
	peer   *fakePeer // nil: own
	typ    MemoryType
	ranges []Range
}

type fakeRequest struct {
	operation     Operation
	peer          *fakePeer
	local, remote []Range
	notification  []byte
	posted        bool
	rounds        int
	done          Status
}

// NewFake makes a NIXL of its own: agents of different fakes never meet.
func NewFake() *Fake {
	return &Fake{steps: 1, agents: map[handle]*fakeAgent{}, byName: map[string]*fakeAgent{}, made: map[FakeCall]int{}}
}

// Steps is how many calls of Post and Status a transfer takes before the one that completes it: 1 at first; 0 completes it in Post, as
// the library does over shared memory.
func (f *Fake) Steps(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.steps = n
}

// FreshKeys gives each registration a key of its own, as RDMA does: the same memory, registered anew, is another one to peers.
func (f *Fake) FreshKeys() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keys = true
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

// Calls is how many calls of a kind live agents have made, those that failed too: for tests of what polls.
func (f *Fake) Calls(call FakeCall) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.made[call]
}

// Kill ends an agent as SIGKILL would: peers' requests fail, its own objects just stop working.
func (f *Fake) Kill(name string) { f.set(name, func(a *fakeAgent) { a.dead = true }) }

// Freeze stops an agent as SIGSTOP would: peers' requests stay in progress until Thaw.
func (f *Fake) Freeze(name string) { f.set(name, func(a *fakeAgent) { a.frozen = true }) }

// Thaw ends Freeze. READs of the agent that were released meanwhile are over when it returns: their bytes are written.
func (f *Fake) Thaw(name string) {
	f.set(name, func(thawed *fakeAgent) {
		thawed.frozen = false
		for _, a := range f.agents {
			for range f.steps + 1 {
				a.stepOrphans()
			}
		}
	})
}

func (f *Fake) set(name string, change func(*fakeAgent)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := f.byName[name]; a != nil {
		change(a)
	}
}

// Live counts what has not been released, over all agents: for leak checks. Objects counts more.
func (f *Fake) Live() (agents, registrations, requests, peers int) {
	o := f.Objects()
	return o.Agents, o.Registrations, o.Requests, o.Peers
}

// FakeObjects are numbers of what has not been released.
type FakeObjects struct {
	Agents, Backends, Registrations, Prepared, Requests, Peers int
	Orphans                                                    int // requests that were released and still write
}

// Objects counts over all agents.
func (f *Fake) Objects() (o FakeObjects) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.agents {
		o.Agents++
		o.Backends += len(a.backends)
		o.Registrations += len(a.registrations)
		o.Prepared += len(a.prepared)
		o.Requests += len(a.requests)
		o.Peers += len(a.peers)
		o.Orphans += len(a.orphans)
	}
	return o
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
	if !a.frozen {
		a.stepOrphans()
	}
	if s := f.fault(call); s != StatusSuccess {
		return s
	}
	return do(f, a)
}

func (f *Fake) fault(call FakeCall) Status {
	f.made[call]++
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
		backends: map[handle]fakeBackend{}, registrations: map[handle][]fakeMemory{}, peers: map[string]*fakePeer{}, lost: map[string]bool{},
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
	s = c.with(agent, FakeBackend, func(f *Fake, a *fakeAgent) Status {
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
	return f.fault(FakeDeregister)
}

func (c *fakeCalls) localMetadata(agent handle) (md []byte, s Status) {
	s = c.with(agent, FakeMetadata, func(f *Fake, a *fakeAgent) Status {
		if len(a.backends) == 0 {
			return StatusBackend
		}
		md = fakeMetadata(a.name, a.incarnation)
		md = md[:len(md)-len(appendNumber(nil, "nixlSecElms", 0))]
		md = appendNumber(md, "nixlSecElms", uint64(len(a.registrations)))
		for _, h := range slices.Sorted(maps.Keys(a.registrations)) {
			memories := a.registrations[h]
			md = appendField(md, "bknd", []byte("UCX"))
			md = appendField(md, "nixlDList", []byte(sectionList))
			md = appendField(md, "t", binary.LittleEndian.AppendUint32(nil, uint32(memories[0].typ)))
			md = appendNumber(md, "n", uint64(len(memories)))
			for _, m := range memories {
				var d []byte
				for _, word := range []uint64{uint64(m.Addr), m.Len, m.Device, 1} {
					d = binary.LittleEndian.AppendUint64(d, word)
				}
				d = append(d, byte(m.typ), 8)
				key := uint64(0)
				if f.keys {
					key = uint64(h)
				}
				md = appendField(md, "", append(binary.LittleEndian.AppendUint64(d, key), 0xff))
			}
		}
		return StatusSuccess
	})
	return md, s
}

// fakeMetadata is in the library's format, with the incarnation as the one connection, of an agent that has registered nothing.
func fakeMetadata(name string, incarnation uint64) []byte {
	md := []byte(metadataMark)
	md = appendField(md, "Agent", []byte(name))
	md = appendNumber(md, "Conns", 1)
	md = appendField(md, "t", []byte("UCX"))
	md = appendNumber(md, "c", incarnation)
	md = appendField(md, "", []byte(sectionMark))
	return appendNumber(md, "nixlSecElms", 0)
}

func appendNumber(b []byte, tag string, n uint64) []byte {
	return appendField(b, tag, binary.LittleEndian.AppendUint64(nil, n))
}

func (c *fakeCalls) loadPeer(agent handle, metadata []byte) (name string, s Status) {
	m, err := parseMetadata(metadata)
	if err != nil || m.odd != nil || len(m.connections["UCX"]) != 8 {
		return "", StatusBackend
	}
	known := false
	s = c.with(agent, FakeAddPeer, func(f *Fake, a *fakeAgent) Status {
		known = true
		peer := f.agents[handle(binary.LittleEndian.Uint64([]byte(m.connections["UCX"])))]
		if a.lost[m.name] || peer == nil || peer.dead {
			return StatusBackend
		}
		p := a.peers[m.name]
		if p == nil {
			p = &fakePeer{fakeAgent: peer}
		}
		if p.fakeAgent != peer {
			return StatusBackend
		}
		a.peers[m.name] = p
		for k := range m.memory {
			p.memory = append(p.memory, fakeMemory{Range{uintptr(k.addr), k.len, k.device}, MemoryType(k.kind)})
		}
		return StatusSuccess
	})
	if s == StatusSuccess || known {
		return m.name, s
	}
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	if a := f.agents[agent]; a != nil && a.peers[m.name] != nil { // a fault in the middle of a refresh
		delete(a.peers, m.name)
		a.lost[m.name] = true
	}
	return "", s
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

func (c *fakeCalls) connect(agent handle, peer string, _ []handle) Status {
	return c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		if p := a.peers[peer]; p == nil || p.dead {
			return StatusBackend
		}
		return StatusSuccess
	})
}

func (c *fakeCalls) knows(agent handle, peer string, t MemoryType, ranges []Range) Status {
	return c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		if p := a.peers[peer]; p == nil || !p.shows(t, ranges) {
			return StatusBackend
		}
		return StatusSuccess
	})
}

// shows tells whether the peer's metadata has the ranges.
func (p *fakePeer) shows(t MemoryType, ranges []Range) bool {
	for _, r := range ranges {
		if !slices.ContainsFunc(p.memory, func(m fakeMemory) bool { return m.holds(t, r) }) {
			return false
		}
	}
	return true
}

func (m fakeMemory) holds(t MemoryType, r Range) bool {
	return m.typ == t && m.Device == r.Device && r.Addr >= m.Addr && uint64(r.Addr)+r.Len <= uint64(m.Addr)+m.Len
}

func (a *fakeAgent) covers(t MemoryType, ranges []Range) bool {
	for _, r := range ranges {
		ok := false
		for _, memories := range a.registrations {
			for _, m := range memories {
				ok = ok || m.holds(t, r)
			}
		}
		if !ok {
			return false
		}
	}
	return true
}

func (c *fakeCalls) prepare(agent handle, peer string, t MemoryType, ranges []Range, _ []handle) (h handle, s Status) {
	s = c.with(agent, FakePrepare, func(f *Fake, a *fakeAgent) Status {
		p := fakePrepared{typ: t, ranges: slices.Clone(ranges)}
		owner := a
		if peer != prepareLocal {
			if p.peer = a.peers[peer]; p.peer == nil || !p.peer.shows(t, ranges) {
				return StatusBackend
			}
			owner = p.peer.fakeAgent
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
		if peer == nil || peer.dead || !a.covers(r.localType, r.local) || !peer.shows(r.remoteType, r.remote) || !peer.covers(r.remoteType, r.remote) {
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
		if a.peers[r.peer.name] == nil || r.posted && r.done == StatusInProgress {
			return StatusBackend
		}
		r.posted, r.done, r.rounds = true, StatusInProgress, 0
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
		if r.rounds > 0 && r.operation == Read {
			for _, l := range r.local { // some of it came
				clear(unsafe.Slice((*byte)(pointer(l.Addr)), l.Len)[:l.Len/2])
			}
		}
		r.done = StatusBackend
	case r.peer.frozen:
		r.rounds = max(r.rounds, 1)
	default:
		r.rounds++
		over := r.rounds > a.f.steps
		for i := range r.local {
			local := unsafe.Slice((*byte)(pointer(r.local[i].Addr)), r.local[i].Len)
			remote := unsafe.Slice((*byte)(pointer(r.remote[i].Addr)), r.remote[i].Len)
			if r.operation == Write {
				local, remote = remote, local
			}
			if !over {
				remote = remote[:len(remote)/2]
			}
			copy(local, remote)
		}
		if !over {
			break
		}
		if r.notification != nil {
			r.peer.inbox = append(r.peer.inbox, Notification{Peer: a.name, Message: r.notification})
		}
		r.done = StatusSuccess
	}
	return r.done
}

// stepOrphans moves on what was released in progress.
func (a *fakeAgent) stepOrphans() {
	a.orphans = slices.DeleteFunc(a.orphans, func(r *fakeRequest) bool { return a.step(r) != StatusInProgress })
}

func (c *fakeCalls) releaseRequest(agent, request handle) bool {
	f := (*Fake)(c)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault(FakeRelease) != StatusSuccess {
		return false
	}
	if a := f.agents[agent]; a != nil { // dead or not
		if r := a.requests[request]; r != nil && r.posted && r.done == StatusInProgress {
			r.notification = nil
			a.orphans = append(a.orphans, r)
		}
		delete(a.requests, request)
	}
	return true
}

func (c *fakeCalls) requestBackend(agent, request handle, among []handle) (h handle, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		if a.requests[request] == nil || len(among) == 0 {
			return StatusInvalidParam
		}
		h = slices.Min(among)
		return StatusSuccess
	})
	return h, s
}

func (c *fakeCalls) estimate(agent, request handle) (e Estimate, s Status) {
	s = c.with(agent, "", func(_ *Fake, a *fakeAgent) Status {
		r := a.requests[request]
		if r == nil {
			return StatusInvalidParam
		}
		for _, l := range r.local {
			e.Duration += microseconds(1 + l.Len>>14)
		}
		return StatusSuccess
	})
	return e, s
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
	s = c.with(agent, FakeNotifications, func(_ *Fake, a *fakeAgent) Status {
		n, a.inbox = a.inbox, nil
		return StatusSuccess
	})
	return n, s
}

func (c *fakeCalls) notify(agent handle, peer string, message []byte) Status {
	return c.with(agent, FakeNotify, func(_ *Fake, a *fakeAgent) Status {
		p := a.peers[peer]
		if p == nil || p.dead {
			return StatusBackend
		}
		p.inbox = append(p.inbox, Notification{Peer: a.name, Message: slices.Clone(message)})
		return StatusSuccess
	})
}
