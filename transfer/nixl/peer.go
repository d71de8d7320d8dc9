package nixl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// peer implements transfer.Peer.
type peer struct {
	plane    *Plane
	metadata []byte // the agent's
	name     string // the agent's
	layout   layout

	mu     sync.Mutex
	closed bool
	known  agent   // the fetch agent that has it
	id     uint64  // there
	adding *adding // under way; nil: none
	reads  map[*read]struct{}
	quiet  chan struct{} // closed when closed and no READ is left
	once   sync.Once
}

// AddPeer implements transfer.Plane.
func (p *Plane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m, err := parseMetadata(metadata)
	if err != nil {
		return nil, err
	}
	return asPeer(p.addPeer(ctx, m.agent, m.version, layout{length: int64(m.length), base: m.base}))
}

// AddPlainPeer makes the agent of an unmodified peer readable. Its pool is len(blocks) blocks of blockBytes, block i at address
// blocks[i] of its process; spans of READs are offsets in that pool. blocks is not kept. Errors and ownership as with AddPeer.
func (p *Plane) AddPlainPeer(ctx context.Context, agentMetadata []byte, blocks []uint64, blockBytes int64) (transfer.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(agentMetadata) > maxAgentMetadata {
		return nil, fmt.Errorf("%w: nixl: %d bytes of agent metadata, at most %d", transfer.ErrBadRequest, len(agentMetadata), maxAgentMetadata)
	}
	l, err := plainLayout(blocks, blockBytes)
	if err != nil {
		return nil, err
	}
	return asPeer(p.addPeer(ctx, agentMetadata, olderVersions, l))
}

// asPeer gives no peer as a nil interface.
func asPeer(c *peer, err error) (transfer.Peer, error) {
	if err != nil {
		return nil, err
	}
	return c, nil
}

// addPeer refuses a peer whose agent would be crashed. version is what is known of its library.
func (p *Plane) addPeer(ctx context.Context, metadata []byte, version string, l layout) (*peer, error) {
	p.mu.Lock()
	own, ours := p.own, p.facts.Version
	p.mu.Unlock()
	if clash(own, metadata) {
		return nil, fmt.Errorf("%w: nixl: NIXL %s here would crash the peer's %s, since both are on one machine: use one version there", transfer.ErrUnreachable, ours, version)
	}
	name, err := binding.AgentName(metadata)
	if err != nil {
		return nil, classify(fmt.Errorf("nixl: add an agent: %w", err), transfer.ErrBadRequest)
	}
	c := &peer{plane: p, metadata: slices.Clone(metadata), name: name, layout: l, reads: map[*read]struct{}{}, quiet: make(chan struct{})}
	if _, _, err := c.handle(ctx); err != nil {
		_ = c.Close() // gives nil
		return nil, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		_ = c.Close()
		return nil, fmt.Errorf("nixl: add peer: %w", transfer.ErrClosed)
	}
	p.peers[c] = struct{}{}
	p.mu.Unlock()
	return c, nil
}

// adding is the peer on its way to a fetch agent.
type adding struct {
	agent agent
	done  chan struct{}
	id    uint64 // these two are set before done is closed
	err   error
}

// handle gives the peer on the fetch agent of now, which it adds it to if that is a new one. ctx bounds the wait.
func (c *peer) handle(ctx context.Context) (agent, uint64, error) {
	if err := c.plane.fetch.suspects.admit(ctx, c.name); err != nil {
		return nil, 0, err
	}
	a, err := c.plane.fetch.get(ctx)
	if err != nil {
		return nil, 0, err
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, 0, fmt.Errorf("nixl: read: %w", transfer.ErrClosed)
	}
	if c.known == a {
		defer c.mu.Unlock()
		return a, c.id, nil
	}
	d := c.adding
	if d == nil || d.agent != a {
		d = &adding{agent: a, done: make(chan struct{})}
		c.adding = d
		go c.add(d)
	}
	c.mu.Unlock()
	select {
	case <-d.done:
		return a, d.id, d.err
	case <-ctx.Done():
		return nil, 0, fmt.Errorf("nixl: the fetch agent is adding the peer: %w", ctx.Err())
	}
}

// add ends with the agent at the latest.
func (c *peer) add(d *adding) {
	f := c.plane.fetch
	f.adds(d.agent, c.name, 1)
	d.id, d.err = d.agent.addPeer(context.Background(), c.metadata)
	if d.err != nil {
		f.tell(d.agent, c.name, d.err)
	}
	f.adds(d.agent, c.name, -1)
	c.mu.Lock()
	known := d.err == nil && c.adding == d && !c.closed
	if known {
		c.known, c.id = d.agent, d.id // what knew it before is over or retired, its id with it
	}
	if c.adding == d {
		c.adding = nil
	}
	c.mu.Unlock()
	if d.err == nil && !known {
		d.agent.dropPeer(d.id)
	}
	close(d.done)
}

// tell says how it went with a peer.
func (f *fetcher) tell(a agent, name string, err error) {
	switch {
	case errors.Is(err, errDied):
		f.suspects.blame(a, name)
	case !errors.Is(err, errEnded):
		f.suspects.acquit(name)
	}
}

// reading says whether a READ of it by a can still succeed.
func (c *peer) reading(a agent) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.reads {
		if r.agent == a && !r.unsettled.Load() {
			return true
		}
	}
	return false
}

// Read implements transfer.Peer. A READ into memory that is not registered here is done through the bounce buffer.
func (c *peer) Read(ctx context.Context, r transfer.ReadRequest) (transfer.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	total, err := r.Check(c.layout.length)
	if err != nil {
		return nil, err
	}
	a, id, err := c.handle(ctx)
	if err != nil {
		return nil, err
	}
	locals, direct := c.plane.locate(r.Local)
	var pieces []piece
	var bounce *memory
	if direct {
		if pieces, err = c.layout.pieces(r.Remote, locals); err != nil {
			return nil, err
		}
	} else if bounce, err = c.plane.bounceBuffer(); err == nil {
		err = c.plane.fetch.attach(ctx, a, bounce)
	}
	if err != nil {
		return nil, err
	}
	rd, err := c.begin(a)
	if err != nil {
		return nil, err
	}
	// A notification costs the peer wake-ups, and the READ a wait: over shared memory the bytes are there when the request is posted.
	end := readOp{peer: id, notify: r.Notification != nil, note: slices.Clone(r.Notification)}
	if direct {
		end.pieces = pieces
		rd.post(end, rd.end)
		return rd, nil
	}
	parts := span.Split(slices.Clone(r.Remote), slices.Clone(r.Local), total, int((total+bounceSlot-1)/bounceSlot))
	go rd.staged(end, bounce, parts)
	return rd, nil
}

// begin books a READ.
func (c *peer) begin(a agent) (*read, error) {
	rd := &read{peer: c, agent: a, done: make(chan struct{})}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("nixl: read: %w", transfer.ErrClosed)
	}
	c.reads[rd] = struct{}{}
	return rd, nil
}

// Close implements transfer.Peer. READs in flight get Options.Drain to end; then the fetch agent is ended, which fails every READ of
// the plane that is in flight, and is the one sure way to end those of a peer that is frozen.
func (c *peer) Close() error {
	c.once.Do(func() {
		c.mu.Lock()
		c.closed = true
		if len(c.reads) == 0 {
			close(c.quiet)
		}
		c.mu.Unlock()
		c.drain()
		c.mu.Lock()
		known, id := c.known, c.id
		c.mu.Unlock()
		if known != nil {
			known.dropPeer(id)
		}
		c.plane.mu.Lock()
		delete(c.plane.peers, c)
		c.plane.mu.Unlock()
	})
	<-c.quiet
	return nil
}

func (c *peer) drain() {
	timer := time.NewTimer(c.plane.o.Drain)
	defer timer.Stop()
	select {
	case <-c.quiet:
		return
	case <-timer.C:
	}
	c.mu.Lock()
	agents := map[agent]bool{}
	for r := range c.reads {
		agents[r.agent] = true
	}
	n := len(c.reads)
	c.mu.Unlock()
	if n > 0 {
		c.plane.o.Log.Warn("nixl: a peer was given up with READs in flight that do not end: the fetch agent is replaced", "reads", n, "waited", c.plane.o.Drain)
	}
	for a := range agents {
		a.end()
	}
	<-c.quiet
}

// read implements transfer.Read.
type read struct {
	peer  *peer
	agent agent
	done  chan struct{}
	err   error // set before done is closed

	unsettled atomic.Bool // it failed, and ends with the agent
}

// post has the agent do a READ, and sees to it that nothing writes its destination when done is called.
func (r *read) post(op readOp, done func(error)) {
	r.agent.read(op, func(err error) {
		if !errors.Is(err, errUnsettled) {
			done(err)
			return
		}
		r.unsettled.Store(true)
		r.peer.plane.fetch.retire(r.agent)
		go func() {
			<-r.agent.over()
			done(err)
		}()
	})
}

// Done implements transfer.Read.
func (r *read) Done() <-chan struct{} { return r.done }

// Err implements transfer.Read.
func (r *read) Err() error { return r.err }

// Cancel implements transfer.Read: NIXL cannot.
func (r *read) Cancel() {}

// end is called once.
func (r *read) end(err error) {
	r.err = err
	c := r.peer
	c.plane.fetch.tell(r.agent, c.name, err)
	close(r.done)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.reads, r)
	if c.closed && len(c.reads) == 0 {
		close(c.quiet)
	}
}

// staged reads part by part into a slot of the bounce buffer, and copies from there. last is the READ of the last part, less its pieces.
func (r *read) staged(last readOp, bounce *memory, parts []span.Part) {
	r.end(func() error {
		var slot []byte
		select {
		case slot = <-bounce.slots:
		case <-r.agent.over():
			return errEnded
		}
		ended := make(chan error, 1)
		defer func() { bounce.slots <- slot }()
		for i, part := range parts {
			op, err := readOp{peer: last.peer}, error(nil)
			if i == len(parts)-1 {
				op = last
			}
			if op.pieces, err = r.peer.layout.pieces(part.Remote, []local{{bounce.id, bounce.offsetOf(slot), uint64(part.Bytes)}}); err != nil {
				return err
			}
			r.post(op, func(err error) { ended <- err })
			if err := <-ended; err != nil {
				return err
			}
			from := slot
			for _, to := range part.Local {
				from = from[copy(to, from):]
			}
		}
		return nil
	}())
}
