package nixl

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// Registration is memory on offer, with the agent that serves it. It implements transfer.Registration.
type Registration struct {
	plane  *Plane
	memory *memory
	notify func(transfer.Notification)
	ctx    context.Context // ends with the registration
	cancel context.CancelFunc
	keeper sync.WaitGroup

	outlive bool        // its agents outlive this process
	epoch   uint64      // of the region, if so
	formers []*former   // the oldest first
	leaves  atomic.Bool // see Leave

	cur atomic.Pointer[incarnation] // nil: none is up

	mu       sync.Mutex
	closed   bool
	grants   map[string]struct{}
	last     []byte // metadata, of the last incarnation
	old      map[*incarnation]struct{}
	attended time.Time

	rotating sync.Mutex // held while an incarnation is started, or memory is added to all
	devices  []*memory  // that each incarnation serves too
}

// incarnation is one agent that serves.
type incarnation struct {
	agent    agent
	place    place
	metadata []byte // for own peers; set when it is installed
	outlives bool   // this process
	started  time.Time
}

func newRegistration(ctx context.Context, p *Plane, m *memory, notify func(transfer.Notification), formers []*former) (*Registration, error) {
	r := &Registration{
		plane: p, memory: m, notify: notify,
		grants: map[string]struct{}{}, old: map[*incarnation]struct{}{}, formers: formers,
	}
	if p.o.Outlive && m.file != nil {
		epoch, waits, err := region.Waiting(m.file) // an error: it is no region
		r.outlive, r.epoch = err == nil && waits > 0, epoch
	}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	i, err := r.start(ctx)
	if err != nil {
		r.cancel()
		return nil, err
	}
	r.install(i)
	if err := p.fetch.attach(ctx, nil, m); err != nil {
		r.cancel()
		i.agent.end()
		return nil, fmt.Errorf("nixl: make the memory a destination: %w", err)
	}
	r.keeper.Go(r.keep)
	return r, nil
}

// start makes an incarnation that serves the memory.
func (r *Registration) start(ctx context.Context) (*incarnation, error) {
	if r.outlive {
		r.makeRoom()
	}
	a, err := r.plane.start(ctx, roleServe, r.outlive, r.notified)
	if err != nil {
		return nil, fmt.Errorf("nixl: the serve agent did not start: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.plane.registerTimeout(uint64(len(r.memory.bytes))))
	defer cancel()
	// Read-only where that can be registered: then no peer can write it.
	at := r.memory.attachment(false)
	at.outlive, at.epoch = r.outlive, r.epoch
	pl, err := a.attach(ctx, at)
	outlives := at.outlive && err == nil
	if err != nil && at.outlive {
		r.plane.o.Log.Warn("nixl: if this process is killed, its serve agent ends too, and peers that know it may fail", "err", err)
		pl, err = a.attach(ctx, r.memory.attachment(false))
	}
	if err != nil && r.memory.writable != nil {
		r.plane.o.Log.Info("nixl: the memory cannot be served from a read-only mapping, so peers could write it", "err", err)
		pl, err = a.attach(ctx, r.memory.attachment(true))
	}
	for _, d := range r.devices {
		if err != nil {
			break
		}
		var with place
		if with, err = a.attach(ctx, d.attachment(false)); err == nil {
			pl.metadata = with.metadata
		}
	}
	if err == nil && len(pl.metadata) > maxAgentMetadata {
		err = fmt.Errorf("%w: nixl: %d bytes of agent metadata, at most %d", transfer.ErrBadRequest, len(pl.metadata), maxAgentMetadata)
	}
	if err != nil {
		a.end()
		return nil, err
	}
	return &incarnation{agent: a, place: pl, outlives: outlives, started: time.Now()}, nil
}

// makeRoom ends the oldest of the agents that were taken over where there is no number left for one more: it is the one that a peer is
// least likely to have an ack of yet. Only one that can be taken over spares peers the next end of this process.
func (r *Registration) makeRoom() {
	r.mu.Lock()
	serving := len(r.old)
	r.mu.Unlock()
	if r.cur.Load() != nil {
		serving++
	}
	live := stillServing(r.formers)
	for ; len(live) > 0 && serving+len(live) >= region.Servers; live = live[1:] {
		r.plane.o.Log.Warn("nixl: the oldest serve agent of a node before is ended, for want of a number for the next; a vLLM engine that was told of it and has not READ yet may end",
			"pid", live[0].pid(), "without_its_node_for", time.Since(live[0].since).Round(time.Second), "at_most", region.Servers)
		live[0].end()
	}
}

// install makes i the one that is handed out.
func (r *Registration) install(i *incarnation) {
	md := registrationMetadata{
		base: i.place.base, length: uint64(len(r.memory.bytes)), version: r.plane.lastFacts().Version, agent: i.place.metadata,
	}
	r.plane.mu.Lock()
	r.plane.own = i.place.metadata
	r.plane.mu.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	i.metadata = md.append(nil)
	r.last = i.metadata
	r.cur.Store(i)
}

// notified takes what the library delivers.
func (r *Registration) notified(message []byte) {
	if r.notify != nil {
		r.notify(transfer.Notification{Message: message})
	}
}

// keep starts the agent again when it has died.
func (r *Registration) keep() {
	var b backoff
	for {
		i := r.cur.Load()
		select {
		case <-r.ctx.Done():
			return
		case <-i.agent.over():
		}
		if !r.cur.CompareAndSwap(i, nil) {
			continue // it was rotated, and was a former one when it ended
		}
		r.plane.o.Log.Error("nixl: the serve agent died and is started again; READs of peers fail until they have its new metadata", hint(i)...)
		died := time.Now()
		b.ended(i.started)
		for r.cur.Load() == nil {
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(time.Until(b.until)):
			}
			if err := r.again(); err != nil {
				b.failed()
				r.plane.o.Log.Error("nixl: the serve agent did not start again", "err", err, "failures", b.failures)
			}
		}
		r.plane.o.Log.Info("nixl: the serve agent is up again; the next answers to peers tell them of it", "was_gone_for", time.Since(died).Round(time.Millisecond))
	}
}

func (r *Registration) again() error {
	r.rotating.Lock()
	defer r.rotating.Unlock()
	if r.cur.Load() != nil {
		return nil
	}
	i, err := r.start(r.ctx)
	if err == nil {
		r.install(i)
	}
	return err
}

// attendEvery bounds how often the agent is told that notifications are to be expected.
const attendEvery = 200 * time.Millisecond

// Agent is what an unmodified peer adds as a remote agent, and the address of the memory's first byte in the agent's process. Each
// call says that a peer is about to be told, so that its notification is looked for more often for a while. metadata is nil while
// there is no agent. gone is closed when the agent is over: no READ of a peer that was told this metadata can read anything any
// more. It never blocks.
func (r *Registration) Agent() (metadata []byte, base uint64, gone <-chan struct{}) {
	i := r.cur.Load()
	if i == nil || !i.agent.serving() {
		return nil, 0, nil
	}
	now := time.Now()
	r.mu.Lock()
	due := now.Sub(r.attended) >= attendEvery
	if due {
		r.attended = now
	}
	r.mu.Unlock()
	if due {
		i.agent.attend()
	}
	return i.place.metadata, i.place.base, i.agent.over()
}

// Incarnation is one agent that serves a registration, as peers are told of it.
type Incarnation struct {
	Metadata []byte          // for own peers: what AddPeer takes
	Agent    []byte          // for plain ones: what they add as a remote agent
	Base     uint64          // address of the memory's first byte in the agent's process
	Gone     <-chan struct{} // closed when the agent is over: nothing can be read by it any more
}

// Incarnation is the agent that serves now, all of it of one agent; false while there is none. Unlike Agent it does not have
// notifications looked for. It never blocks.
func (r *Registration) Incarnation() (Incarnation, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := r.cur.Load()
	if i == nil {
		return Incarnation{}, false
	}
	return Incarnation{i.metadata, i.place.metadata, i.place.base, i.agent.over()}, true
}

// Rotate starts another incarnation of the agent and hands it out from now on. The former one goes on serving peers that know it
// until the caller ends it with end, which returns when nothing can be read by it any more; its gone is closed then. A vLLM engine
// whose READ meets a dead agent that it knows ends, so end must wait until no such engine will post one: each has completed a READ on the
// new incarnation, or is gone. Close ends the former ones too.
func (r *Registration) Rotate(ctx context.Context) (end func(), err error) {
	r.rotating.Lock()
	defer r.rotating.Unlock()
	next, err := r.start(ctx)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		next.agent.end()
		return nil, fmt.Errorf("nixl: rotate: %w", transfer.ErrClosed)
	}
	r.mu.Unlock()
	former := r.cur.Load()
	r.install(next)
	if former == nil {
		return func() {}, nil
	}
	r.mu.Lock()
	r.old[former] = struct{}{}
	r.mu.Unlock()
	return func() {
		former.agent.end()
		r.mu.Lock()
		delete(r.old, former)
		r.mu.Unlock()
	}, nil
}

// Formers are the serve agents of a process that died which Register has taken over, the oldest first, see Options.Outlive. Agent and
// Metadata never name them. Until all of them are over, the memory that was granted by then must not change. When it is time to end
// one, Rotate says. The oldest are ended where there would be more than region.Servers agents. Close ends them too, unless they are to be
// left (Leave, Plane.LeaveFormers); they must not be ended after that.
func (r *Registration) Formers() []transfer.Former { return formersOf(r.formers) }

// Leave has Close leave all agents that can go on without this process, those that were taken over too, as they would be if it were
// killed: see Options.Outlive. They end by themselves. It says whether there are any.
func (r *Registration) Leave() bool {
	i := r.cur.Load()
	leaves := i != nil && i.outlives || len(stillServing(r.formers)) > 0
	r.mu.Lock()
	for i := range r.old {
		leaves = leaves || i.outlives
	}
	r.mu.Unlock()
	r.leaves.Store(leaves)
	return leaves
}

// Metadata implements transfer.Registration. It is constant while the incarnation of the agent is.
func (r *Registration) Metadata() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// Grant implements transfer.Registration. The plane has no tokens: it only keeps the names.
func (r *Registration) Grant(id string, spans []region.Span) ([]byte, error) {
	if err := transfer.CheckGrant(id, spans, int64(len(r.memory.bytes))); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("nixl: grant %q: %w", id, transfer.ErrClosed)
	}
	if _, live := r.grants[id]; live {
		return nil, fmt.Errorf("%w: nixl: grant %q is live", transfer.ErrBadRequest, id)
	}
	r.grants[id] = struct{}{}
	return nil, nil
}

// Revoke implements transfer.Registration. It promises nothing about READs: only the end of the agent does (see Agent).
func (r *Registration) Revoke(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.grants, id)
}

// Close implements transfer.Registration. It ends the agent, so no byte of the memory is read after it returns (but see Leave), and no
// byte of it is a destination any more: READs into it must have ended before.
func (r *Registration) Close() error {
	r.stop()
	r.plane.removeMemory(r.memory)
	r.plane.mu.Lock()
	delete(r.plane.regs, r)
	r.plane.mu.Unlock()
	return nil
}

// stop ends all its agents. Idempotent; a second call waits for the first.
func (r *Registration) stop() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.cancel()
	r.keeper.Wait()
	r.rotating.Lock()
	defer r.rotating.Unlock()
	if i := r.cur.Load(); i != nil {
		r.release(i)
	}
	r.mu.Lock()
	var old []*incarnation
	for i := range r.old {
		old = append(old, i)
	}
	r.mu.Unlock()
	for _, i := range old {
		r.release(i)
	}
	for _, f := range r.formers {
		if r.leaves.Load() || r.plane.leaves.Load() {
			f.leave()
			continue
		}
		f.end()
	}
}

// release ends an agent, or leaves it.
func (r *Registration) release(i *incarnation) {
	if a, ok := i.agent.(interface{ leave() }); ok && i.outlives && r.leaves.Load() {
		a.leave()
		return
	}
	i.agent.end()
}

// LeaveFormers says whether closing a registration leaves the agents that Register took over (see Registration.Formers) to the next owner
// of the region, and does not end them: for an owner that may yet give the region up, as in a start that fails.
func (p *Plane) LeaveFormers(leave bool) { p.leaves.Store(leave) }
