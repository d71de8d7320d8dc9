package nixl

import (
	"fmt"
	"strings"
	"sync"
	"time"
)

// AgentConfig of an agent. The zero value is good: a progress thread, strict synchronization.
type AgentConfig struct {
	NoProgressThread bool          // requests then move only while Status, Wait or Notifications are called
	ProgressDelay    time.Duration // pause of the progress thread between rounds
	Telemetry        bool          // keep figures for Request.Telemetry
}

// Agent is one endpoint: it registers memory, and reads and writes that of peers.
type Agent struct {
	name string
	c    calls
	h    handle

	// gate is held for reading by every call into the library, and for writing by Close.
	gate   sync.RWMutex
	closed bool

	mu            sync.Mutex
	backends      map[*Backend]struct{}
	registrations map[*Registration]struct{}
	requests      map[*Request]struct{}
	prepared      map[*Prepared]struct{}
	peers         map[string]*Peer
}

// NewAgent makes an agent. Names should be unique among all agents that ever meet, and new for each incarnation: NIXL confuses an old
// agent with a new one of its name.
func (l *Library) NewAgent(name string, c AgentConfig) (*Agent, error) {
	if err := checkName("agent", name); err != nil {
		return nil, err
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

const maxName = 255

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

// Close releases everything of the agent and ends it: READs in progress stop, and nothing writes their destinations afterwards.
// It waits for calls under way. Idempotent.
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
	a.requests, a.prepared, a.registrations, a.backends, a.peers = nil, nil, nil, nil, nil
	return first
}

// Plugins are the names of the backends that the library can create, e.g. "UCX".
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
// The first UCX backend of a process takes about half a second.
func (a *Agent) CreateBackend(kind string, params map[string]string) (*Backend, error) {
	if err := checkName("backend", kind); err != nil {
		return nil, err
	}
	for key, value := range params {
		if key == "" || strings.IndexByte(key, 0) >= 0 || strings.IndexByte(value, 0) >= 0 {
			return nil, fmt.Errorf("%w: backend %s: parameter %q", ErrBadArgument, kind, key)
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
	for _, b := range backends {
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

func (a *Agent) dropRegistration(r *Registration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	_, live := a.registrations[r]
	delete(a.registrations, r)
	return live
}

// LocalMetadata is what a peer needs to read what is registered now. Opaque; it grows with each registration.
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
	over  bool // under agent.mu
}

// AddPeer makes another agent known by its metadata. Metadata of an agent that is known already refreshes it (it may have registered
// more since) and gives the same Peer. An agent that restarted under its old name is a new Peer; the earlier one is ErrStalePeer from
// then on. Metadata that is not NIXL's is an error.
func (a *Agent) AddPeer(metadata []byte) (*Peer, error) {
	name, err := peekName(metadata)
	if err != nil {
		return nil, err
	}
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	a.mu.Lock()
	defer a.mu.Unlock()
	got, s := a.c.loadPeer(a.h, metadata)
	old := a.peers[name]
	if s == StatusSuccess && old != nil {
		return old, nil
	}
	if s != StatusSuccess && old != nil {
		// NIXL refuses the metadata of another incarnation over a name that it knows.
		old.over = true
		delete(a.peers, name)
		a.c.invalidatePeer(a.h, name)
		got, s = a.c.loadPeer(a.h, metadata)
	}
	if s != StatusSuccess {
		return nil, s.err(fmt.Sprintf("load %d bytes of metadata of peer %s", len(metadata), name))
	}
	p := &Peer{agent: a, name: got}
	a.peers[got] = p
	return p, nil
}

// Name of the peer's agent.
func (p *Peer) Name() string { return p.name }

func (p *Peer) check() error {
	p.agent.mu.Lock()
	defer p.agent.mu.Unlock()
	if p.over {
		return fmt.Errorf("peer %s: %w", p.name, ErrStalePeer)
	}
	return nil
}

// Close forgets the peer. Idempotent.
func (p *Peer) Close() error {
	if err := p.agent.enter(); err != nil {
		return nil
	}
	defer p.agent.leave()
	p.agent.mu.Lock()
	defer p.agent.mu.Unlock()
	if p.over {
		return nil
	}
	p.over = true
	delete(p.agent.peers, p.name)
	return p.agent.c.invalidatePeer(p.agent.h, p.name).err("forget peer " + p.name)
}

// Notify sends a message to the peer outside of any request.
func (p *Peer) Notify(message []byte) error {
	if err := p.agent.enter(); err != nil {
		return err
	}
	defer p.agent.leave()
	if err := p.check(); err != nil {
		return err
	}
	return p.agent.c.notify(p.agent.h, p.name, message).err("notify " + p.name)
}

// Notification is a message of a peer.
type Notification struct {
	Peer    string // name of its agent
	Message []byte
}

// Notifications takes the messages that have come since the last call. It also drives progress.
func (a *Agent) Notifications() ([]Notification, error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	n, s := a.c.notifications(a.h)
	return n, s.err("notifications")
}
