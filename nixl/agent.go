package nixl

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Sync says who may call an agent.
type Sync int32

const (
	// SyncStrict: any goroutine at any time; the library has one lock for the agent.
	SyncStrict Sync = iota
	// SyncOneOwner: the library takes no lock. All calls on the agent and what belongs to it must come one after the other.
	SyncOneOwner
)

// native is the value of nixl_capi_thread_sync_t: 0 none, 1 strict.
func (s Sync) native() int32 {
	if s == SyncOneOwner {
		return 0
	}
	return 1
}

// AgentConfig of an agent. The zero value is good: a progress thread, strict synchronization.
type AgentConfig struct {
	Sync             Sync
	NoProgressThread bool          // requests then move only while Status, Wait or Notifications are called
	ProgressDelay    time.Duration // pause of the progress thread between rounds
	Telemetry        bool          // keep figures for Request.Telemetry
}

// Agent is one endpoint: it registers memory, and reads and writes that of peers.
type Agent struct {
	name string
	c    calls
	h    handle

	// gate is held for reading by every call into the library, and for writing by those that take away what others may be using by
	// name or address: Close, AddPeer, Peer.Close, Registration.Close. (With SyncStrict the library itself lets in one call at a time.)
	gate   sync.RWMutex
	closed bool
	layout layout
	probes uint64        // names given to metadata that was only tried
	epoch  atomic.Uint64 // grows with each registration
	closes uint64        // registrations closed so far

	mu            sync.Mutex
	backends      map[*Backend]struct{}
	registrations map[*Registration]struct{}
	requests      map[*Request]struct{}
	prepared      map[*Prepared]struct{}
	peers         map[string]*Peer
	stuck         []handle // requests that the library would not release
}

// NewAgent makes an agent. Names should be unique among all agents that ever meet, and new for each incarnation: NIXL confuses an old
// agent with a new one of its name. A name has 1 to 255 bytes, none of them 0. The caller closes the agent. ErrBadArgument: the name, or
// AgentConfig.Sync.
func (l *Library) NewAgent(name string, c AgentConfig) (*Agent, error) {
	if err := checkName("agent", name); err != nil {
		return nil, err
	}
	if c.Sync != SyncStrict && c.Sync != SyncOneOwner {
		return nil, fmt.Errorf("%w: agent %s: Sync %d is neither SyncStrict nor SyncOneOwner", ErrBadArgument, name, c.Sync)
	}
	h, s := l.c.createAgent(name, c)
	if s != StatusSuccess {
		return nil, s.err("create agent " + name)
	}
	return &Agent{
		name: name, c: l.c, h: h,
		backends: map[*Backend]struct{}{}, registrations: map[*Registration]struct{}{}, requests: map[*Request]struct{}{},
		prepared: map[*Prepared]struct{}{}, peers: map[string]*Peer{},
	}, nil
}

const (
	maxName    = 255
	maxWorkers = 256 // of a UCX backend: each has sockets, memory and time of the start
)

func checkName(what, name string) error {
	if name == "" || len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
		return fmt.Errorf("%w: %s name %.40q: 1 to %d bytes without NUL", ErrBadArgument, what, name, maxName)
	}
	return nil
}

// Name of the agent.
func (a *Agent) Name() string { return a.name }

// enter must be followed by leave; between them the C agent exists.
func (a *Agent) enter() error {
	a.gate.RLock()
	if a.closed {
		a.gate.RUnlock()
		return fmt.Errorf("agent %s: %w", a.name, ErrClosed)
	}
	return nil
}

func (a *Agent) leave() { a.gate.RUnlock() }

// enterAlone is enter with no other call under way; gate.Unlock must follow if it gives nil.
func (a *Agent) enterAlone() error {
	a.gate.Lock()
	if a.closed {
		a.gate.Unlock()
		return fmt.Errorf("agent %s: %w", a.name, ErrClosed)
	}
	return nil
}

// release gives a request back. One that the library would not release is tried again at the next release, and when the agent closes.
func (a *Agent) release(request handle) {
	a.mu.Lock()
	again := a.stuck[:min(len(a.stuck), maxStuckTries)]
	a.stuck = a.stuck[len(again):]
	a.mu.Unlock()
	var left []handle
	if !a.c.releaseRequest(a.h, request) {
		left = append(left, request)
	}
	for _, h := range again {
		if !a.c.releaseRequest(a.h, h) {
			left = append(left, h)
		}
	}
	if left != nil {
		a.mu.Lock()
		a.stuck = append(a.stuck, left...)
		a.mu.Unlock()
	}
}

// maxStuckTries of requests that were not released, at each release of another.
const maxStuckTries = 8

// Close releases everything of the agent and ends it: READs in progress stop, and nothing writes their destinations afterwards.
// It waits for calls under way, not for requests: Wait for those that READ over a network first. Ending under them can end the process that is
// read from (an assertion of its UCX). Idempotent. An error is of memory that the library would not deregister; the agent is over all the same.
func (a *Agent) Close() error {
	a.gate.Lock()
	defer a.gate.Unlock()
	if a.closed {
		return nil
	}
	a.closed = true
	for r := range a.requests {
		a.c.releaseRequest(a.h, r.h)
	}
	for _, h := range a.stuck {
		a.c.releaseRequest(a.h, h) // if not now, then with the agent
	}
	for p := range a.prepared {
		a.c.releasePrepared(a.h, p.h)
	}
	var first error
	for r := range a.registrations {
		if err := a.c.deregister(a.h, r.h).err("deregister"); err != nil && first == nil {
			first = err
		}
	}
	for b := range a.backends {
		a.c.destroyBackend(b.h)
	}
	a.c.destroyAgent(a.h)
	a.requests, a.prepared, a.registrations, a.backends, a.peers, a.stuck = nil, nil, nil, nil, nil, nil
	return first
}

// Plugins are the names of the backends that the library can create, e.g. "UCX", each good for CreateBackend where its own libraries and
// devices are there.
func (a *Agent) Plugins() ([]string, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	names, s := a.c.plugins(a.h)
	return names, s.err("list plugins")
}

// Backend moves the bytes for an agent.
type Backend struct {
	agent *Agent
	h     handle
	kind  string
}

// CreateBackend starts a backend, e.g. "UCX", with its parameters (nil: its defaults). It lives as long as the agent.
// The first UCX backend of a process takes about half a second. ErrBadArgument: a kind or a parameter with a NUL, or without a name, or UCX's
// num_workers that is no number of 1 to 256, which the library would take, for ever or without a word; a Status
// (StatusBackend, StatusNotFound) if there is no such plugin, or it refuses a parameter.
func (a *Agent) CreateBackend(kind string, params map[string]string) (*Backend, error) {
	if err := checkName("backend", kind); err != nil {
		return nil, err
	}
	for key, value := range params {
		if key == "" || strings.IndexByte(key, 0) >= 0 || strings.IndexByte(value, 0) >= 0 {
			return nil, fmt.Errorf("%w: backend %s: parameter %q", ErrBadArgument, kind, key)
		}
	}
	if value, ok := params["num_workers"]; ok && kind == "UCX" {
		if n, err := strconv.ParseUint(value, 10, 16); err != nil || n < 1 || n > maxWorkers {
			return nil, fmt.Errorf("%w: backend UCX: num_workers %.40q: a whole number of 1 to %d", ErrBadArgument, value, maxWorkers)
		}
	}
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	h, s := a.c.createBackend(a.h, kind, params)
	if s != StatusSuccess {
		return nil, s.err("create backend " + kind)
	}
	b := &Backend{agent: a, h: h, kind: kind}
	a.mu.Lock()
	a.backends[b] = struct{}{}
	a.mu.Unlock()
	return b, nil
}

// Kind is the plugin's name.
func (b *Backend) Kind() string { return b.kind }

// Params are the parameters in force.
func (b *Backend) Params() (map[string]string, error) {
	if err := b.agent.enter(); err != nil {
		return nil, err
	}
	defer b.agent.leave()
	params, s := b.agent.c.backendParams(b.agent.h, b.h)
	return params, s.err("parameters of backend " + b.kind)
}

func (a *Agent) backendHandles(backends []*Backend) ([]handle, error) {
	handles := make([]handle, 0, len(backends))
	for i, b := range backends {
		if b == nil {
			return nil, fmt.Errorf("%w: backend %d of %d is nil", ErrBadArgument, i, len(backends))
		}
		if b.agent != a {
			return nil, fmt.Errorf("%w: backend %s belongs to agent %s", ErrBadArgument, b.kind, b.agent.name)
		}
		handles = append(handles, b.h)
	}
	return handles, nil
}

func (a *Agent) addRegistration(r *Registration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	for other := range a.registrations {
		if other.typ == r.typ && overlap(other.ranges, r.ranges) {
			return fmt.Errorf("%w: register: a range is registered already", ErrBadArgument)
		}
	}
	a.registrations[r] = struct{}{}
	return nil
}

func overlap(as, bs []Range) bool {
	for _, a := range as {
		for _, b := range bs {
			if a.Device == b.Device && uint64(a.Addr) < uint64(b.Addr)+b.Len && uint64(b.Addr) < uint64(a.Addr)+a.Len {
				return true
			}
		}
	}
	return false
}

// covers tells whether each range lies in one registration that was there at that epoch, and still is.
func (a *Agent) covers(t MemoryType, ranges []Range, epoch uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, r := range ranges {
		ok := false
		for g := range a.registrations {
			ok = ok || g.typ == t && g.epoch <= epoch && slices.ContainsFunc(g.ranges, func(m Range) bool {
				return m.Device == r.Device && r.Addr >= m.Addr && r.Len <= m.Len && uint64(r.Addr-m.Addr) <= m.Len-r.Len
			})
		}
		if !ok {
			return false
		}
	}
	return true
}

func (a *Agent) dropRegistration(r *Registration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, live := a.registrations[r]
	delete(a.registrations, r)
	return live
}

// LocalMetadata is what a peer's AddPeer needs before it can read what is registered now: the agent's name, how to connect, and its keys. It
// is opaque, and grows with each registration (44 bytes a range with UCX of 1.3). Where the memory lies has to be sent beside it, see the
// package. The slice is the caller's.
func (a *Agent) LocalMetadata() ([]byte, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	md, s := a.c.localMetadata(a.h)
	return md, s.err("local metadata")
}

// Peer is another agent, known by its metadata.
type Peer struct {
	agent *Agent
	name  string

	// Under the agent's gate.
	over  error          // why it is not to be used any more
	loads uint64         // times that the library has lost and reloaded it: requests and lists of before point to what is gone
	last  []byte         // metadata that was loaded last
	known *agentMetadata // of all metadata loaded
}

// AddPeer makes another agent known by its metadata. Metadata of an agent that is known already refreshes it (it may have registered
// more since) and gives the same Peer; what its sender told of addresses travels beside it, see the package. metadata is not kept. An agent that restarted under its old name, or registered the same memory anew, is a new Peer; the
// earlier one is ErrStalePeer from then on. Metadata that is not NIXL's, that is damaged, or that is this agent's own is ErrBadArgument.
//
// Metadata that cannot be loaded leaves a Peer of that name as it was, as far as the library can: metadata of another incarnation is tried
// under a name of its own first. If a refresh fails inside of the library, which then has forgotten the peer, what was loaded before is loaded
// again; requests and lists made before are ErrStalePeer then. If that fails too (NIXL 1.3 and 1.5 cannot load a name again whose memory
// they refused), the Peer is ErrStalePeer, the error says so, and only a new agent can add that name again.
//
// No other call of the agent runs meanwhile. That may take as long as connecting takes. A dead agent, or one that cannot be reached, is a
// Status here, or of the first request, as its backend connects.
func (a *Agent) AddPeer(metadata []byte) (*Peer, error) {
	m, err := parseMetadata(metadata)
	if err != nil {
		return nil, err
	}
	if m.name == a.name {
		return nil, fmt.Errorf("%w: metadata of agent %q, which is this one", ErrBadArgument, m.name)
	}
	if err := a.enterAlone(); err != nil {
		return nil, err
	}
	defer a.gate.Unlock()
	if !a.layout.known {
		if own, s := a.c.localMetadata(a.h); s == StatusSuccess {
			a.layout = layoutOf(own)
		}
	}
	if err := a.layout.check(m); err != nil {
		return nil, err
	}
	failed := func(s Status, more string) error {
		return s.err(fmt.Sprintf("load %d bytes of metadata of peer %s%s", len(metadata), m.name, more))
	}
	old := a.peers[m.name]
	if old == nil {
		if _, s := a.c.loadPeer(a.h, metadata); s != StatusSuccess {
			a.c.invalidatePeer(a.h, m.name)
			return nil, failed(s, "")
		}
		return a.newPeer(m, metadata), nil
	}
	if m.agrees(old.known) {
		known := a.c.knows(a.h, m.name, DRAM, nil)
		lost := known != StatusSuccess && known != statusMissing // by itself, after a READ that failed
		_, s := a.c.loadPeer(a.h, metadata)
		if s == StatusSuccess {
			if lost {
				old.loads++
			}
			old.known.add(m)
			old.last = bytes.Clone(metadata)
			return old, nil
		}
		return nil, failed(s, a.restore(old))
	}
	a.probes++
	probe := fmt.Sprintf("%.200s, tried %d by %.20s", m.name, a.probes, a.name)
	_, s := a.c.loadPeer(a.h, renamed(metadata, m.name, probe))
	a.c.invalidatePeer(a.h, probe)
	if s != StatusSuccess {
		return nil, failed(s, "; the peer known by that name is as before")
	}
	a.c.invalidatePeer(a.h, m.name)
	if _, s := a.c.loadPeer(a.h, metadata); s != StatusSuccess {
		return nil, failed(s, a.restore(old))
	}
	old.over = ErrStalePeer
	return a.newPeer(m, metadata), nil
}

// restore loads what was known of a peer that the library may have lost, and says how that went.
func (a *Agent) restore(p *Peer) string {
	a.c.invalidatePeer(a.h, p.name)
	if _, s := a.c.loadPeer(a.h, p.last); s == StatusSuccess {
		p.loads++
		if m, err := parseMetadata(p.last); err == nil {
			p.known = m
		}
		return "; the peer known by that name was loaded again"
	}
	a.c.invalidatePeer(a.h, p.name)
	p.over = ErrStalePeer
	delete(a.peers, p.name)
	return "; the peer known by that name is lost"
}

func (a *Agent) newPeer(m *agentMetadata, metadata []byte) *Peer {
	p := &Peer{agent: a, name: m.name, last: bytes.Clone(metadata), known: m}
	a.peers[m.name] = p
	return p
}

// Name of the peer's agent.
func (p *Peer) Name() string { return p.name }

// check is for those who are in the gate.
func (p *Peer) check() error {
	if p.over != nil {
		return fmt.Errorf("peer %s: %w", p.name, p.over)
	}
	return nil
}

// Close forgets the peer: what is made with it is ErrClosed from then on. READs in progress are not stopped, and may still write.
// Idempotent. An error says that the library had forgotten it already.
func (p *Peer) Close() error {
	if err := p.agent.enterAlone(); err != nil {
		return nil
	}
	defer p.agent.gate.Unlock()
	if p.over != nil {
		return nil
	}
	p.over = ErrClosed
	delete(p.agent.peers, p.name)
	return p.agent.c.invalidatePeer(p.agent.h, p.name).err("forget peer " + p.name)
}

// Notify sends a message to the peer outside of any request. nil: it was accepted, not that it arrived. ErrStalePeer, or ErrClosed of the peer.
func (p *Peer) Notify(message []byte) error {
	if err := p.agent.enterFor(p, nil); err != nil {
		return err
	}
	defer p.agent.leave()
	return p.agent.c.notify(p.agent.h, p.name, message).err("notify " + p.name)
}

// Connect makes the connections to the peer now, by the given backends (none: all that both have), which the first transfer would do.
// ErrBadArgument: a backend of another agent; ErrStalePeer.
func (p *Peer) Connect(backends ...*Backend) error {
	handles, err := p.agent.backendHandles(backends)
	if err != nil {
		return err
	}
	if err := p.agent.enterFor(p, nil); err != nil {
		return err
	}
	defer p.agent.leave()
	return p.agent.c.connect(p.agent.h, p.name, handles).err("connect to " + p.name)
}

// Knows tells whether the peer's metadata, as loaded here, has all these ranges (none: whether there is any metadata). It asks nobody:
// the peer may be dead. A Status is the answer no; ErrBadArgument: a memory type that is none, a range of address or
// length 0, or one that wraps.
func (p *Peer) Knows(d Descs) error {
	if err := d.Type.check("knows"); err != nil {
		return err
	}
	if len(d.Ranges) > 0 {
		if _, err := checkRanges("knows", d.Type, d.Ranges); err != nil {
			return err
		}
	}
	if err := p.agent.enterFor(p, nil); err != nil {
		return err
	}
	defer p.agent.leave()
	return p.agent.c.knows(p.agent.h, p.name, d.Type, d.Ranges).err(fmt.Sprintf("%d ranges of peer %s", len(d.Ranges), p.name))
}

// Notification is a message of a peer.
type Notification struct {
	Peer    string // name of its agent
	Message []byte
}

// Notifications takes the messages that have come since the last call. It also drives progress. The library has no event for them: poll,
// often while they are likely. A notification of a READ that did not end inside of Post may be sent only when its reader asks for Status again.
func (a *Agent) Notifications() ([]Notification, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	n, s := a.c.notifications(a.h)
	return n, s.err("notifications")
}
