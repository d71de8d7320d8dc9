package transfertest

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// MemoryName is the name of a Memory plane.
const MemoryName = "memory"

// Fabric connects the Memory planes made from it. It is for tests that want a plane with tokens and notifications but without
// sockets, for instance in a testing/synctest bubble. The zero value is ready.
type Fabric struct {
	mu   sync.Mutex
	next int
	regs map[string]*memoryRegistration
}

// Plane makes a plane of the fabric.
func (f *Fabric) Plane() *MemoryPlane { return &MemoryPlane{fabric: f} }

// MemoryPlane is a transfer.Plane within one process. A READ copies in a goroutine of its own, in steps of 64 KiB, and holds the
// registration's lock for each step.
type MemoryPlane struct {
	fabric *Fabric
	mu     sync.Mutex
	closed bool
	peers  []*memoryPeer
}

// Name implements transfer.Plane.
func (p *MemoryPlane) Name() string { return MemoryName }

// Capabilities implements transfer.Plane.
func (p *MemoryPlane) Capabilities() transfer.Capabilities {
	return transfer.Capabilities{Notify: true, Cancel: true, Tokens: true}
}

// Register implements transfer.Plane.
func (p *MemoryPlane) Register(ctx context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := m.Check(); err != nil {
		return nil, err
	}
	if p.isClosed() {
		return nil, fmt.Errorf("memory: register: %w", transfer.ErrClosed)
	}
	f := p.fabric
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, o := range f.regs {
		if o.memory.Overlaps(m) {
			return nil, fmt.Errorf("%w: memory: overlaps memory that is registered", transfer.ErrBadRequest)
		}
	}
	f.next++
	r := &memoryRegistration{fabric: f, memory: m, notify: notify, name: fmt.Sprintf("memory-%d", f.next), grants: map[string]*memoryGrant{}}
	if f.regs == nil {
		f.regs = map[string]*memoryRegistration{}
	}
	f.regs[r.name] = r
	return r, nil
}

func (p *MemoryPlane) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// AddPeer implements transfer.Plane.
func (p *MemoryPlane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.fabric.mu.Lock()
	r := p.fabric.regs[string(metadata)]
	p.fabric.mu.Unlock()
	if r == nil {
		return nil, fmt.Errorf("%w: memory: no registration %.40q", transfer.ErrUnreachable, metadata)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("memory: add peer: %w", transfer.ErrClosed)
	}
	c := &memoryPeer{reg: r}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	p.peers = append(p.peers, c)
	return c, nil
}

// Close implements transfer.Plane.
func (p *MemoryPlane) Close() error {
	p.mu.Lock()
	p.closed = true
	peers := p.peers
	p.peers = nil
	p.mu.Unlock()
	for _, c := range peers {
		_ = c.Close()
	}
	return nil
}

type memoryGrant struct {
	id    string
	token []byte
	cover span.Cover
}

type memoryRegistration struct {
	fabric *Fabric
	memory transfer.Memory
	notify func(transfer.Notification)
	name   string

	mu     sync.Mutex // held while a byte of the memory is read
	closed bool
	grants map[string]*memoryGrant
}

func (r *memoryRegistration) Metadata() []byte { return []byte(r.name) }

func (r *memoryRegistration) Grant(id string, spans []region.Span) ([]byte, error) {
	if err := transfer.CheckGrant(id, spans, int64(len(r.memory.Bytes))); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("memory: grant: %w", transfer.ErrClosed)
	}
	if r.grants[id] != nil {
		return nil, fmt.Errorf("%w: memory: grant %q is live", transfer.ErrBadRequest, id)
	}
	g := &memoryGrant{id: id, token: make([]byte, 16), cover: span.NewCover(spans)}
	_, _ = rand.Read(g.token) // never fails
	r.grants[id] = g
	return bytes.Clone(g.token), nil
}

func (r *memoryRegistration) Revoke(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.grants, id)
}

func (r *memoryRegistration) Close() error {
	r.mu.Lock()
	r.closed = true
	clear(r.grants)
	r.mu.Unlock()
	r.fabric.mu.Lock()
	defer r.fabric.mu.Unlock()
	delete(r.fabric.regs, r.name)
	return nil
}

// live gives the grant of a token. The caller holds r.mu.
func (r *memoryRegistration) live(token []byte, spans []region.Span) (*memoryGrant, error) {
	for _, g := range r.grants {
		if bytes.Equal(g.token, token) && !slices.ContainsFunc(spans, func(s region.Span) bool { return !g.cover.Contains(s) }) {
			return g, nil
		}
	}
	return nil, fmt.Errorf("memory: %w", transfer.ErrDenied)
}

type memoryPeer struct {
	reg    *memoryRegistration
	ctx    context.Context
	cancel context.CancelCauseFunc
	mu     sync.Mutex
	closed bool
	reads  sync.WaitGroup
}

func (c *memoryPeer) Read(ctx context.Context, q transfer.ReadRequest) (transfer.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if _, err := q.Check(int64(len(c.reg.memory.Bytes))); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("memory: read: %w", transfer.ErrClosed)
	}
	rd := &memoryRead{done: make(chan struct{})}
	rd.ctx, rd.cancel = context.WithCancelCause(c.ctx)
	q.Token, q.Notification = bytes.Clone(q.Token), bytes.Clone(q.Notification)
	pieces := span.Pieces(q.Local, span.Slices(c.reg.memory.Bytes, q.Remote), 64<<10)
	c.reads.Go(func() {
		rd.err = rd.run(c.reg, q, pieces)
		rd.cancel(nil)
		close(rd.done)
	})
	return rd, nil
}

func (c *memoryPeer) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel(fmt.Errorf("memory: peer closed: %w", transfer.ErrClosed))
	c.reads.Wait()
	return nil
}

type memoryRead struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	done   chan struct{}
	err    error
}

func (rd *memoryRead) run(r *memoryRegistration, q transfer.ReadRequest, pieces []span.Piece) error {
	step := func(p *span.Piece) (*memoryGrant, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		g, err := r.live(q.Token, q.Remote)
		if err == nil && p != nil {
			copy(p.Dst, p.Src)
		}
		return g, err
	}
	for i := range pieces {
		if rd.ctx.Err() != nil {
			return context.Cause(rd.ctx)
		}
		if _, err := step(&pieces[i]); err != nil {
			return err
		}
	}
	g, err := step(nil)
	if err == nil && r.notify != nil {
		r.notify(transfer.Notification{Grant: g.id, Message: q.Notification})
	}
	return err
}

func (rd *memoryRead) Done() <-chan struct{} { return rd.done }
func (rd *memoryRead) Err() error            { return rd.err }
func (rd *memoryRead) Cancel()               { rd.cancel(fmt.Errorf("memory: %w", transfer.ErrCanceled)) }
