package mapped

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"
	"unsafe"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// peer is an attached registration. It implements transfer.Viewer and transfer.Witness.
type peer struct {
	plane *Plane
	m     *mapping

	mu     sync.Mutex
	closed bool
	reads  map[*read]struct{}
	idle   sync.WaitGroup // READs in flight
	once   sync.Once
	err    error // of Close
}

// AddPeer implements transfer.Plane.
func (p *Plane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l, err := decodeLocation(metadata)
	if err != nil {
		return nil, err
	}
	m, err := p.acquire(l)
	if err != nil {
		return nil, err
	}
	c := &peer{plane: p, m: m, reads: map[*read]struct{}{}}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.peers[c] = struct{}{}
	}
	p.mu.Unlock()
	if closed {
		_ = p.release(m)
		return nil, fmt.Errorf("mapped: add peer: %w", transfer.ErrClosed)
	}
	return c, nil
}

// Read implements transfer.Peer. A READ of at most inlineBytes is over when it returns.
func (c *peer) Read(ctx context.Context, r transfer.ReadRequest) (transfer.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	total, err := r.Check(int64(len(c.m.pool)))
	if err != nil {
		return nil, err
	}
	past := total >= parallelBytes || c.plane.burst.add(time.Now(), total) && total >= pieceBytes
	rd := newRead(span.Pieces(r.Local, span.Slices(c.m.pool, r.Remote), pieceBytes), past)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, fmt.Errorf("mapped: read: %w", transfer.ErrClosed)
	}
	c.reads[rd] = struct{}{}
	c.idle.Add(1)
	c.mu.Unlock()
	finished := func() {
		c.mu.Lock()
		delete(c.reads, rd)
		c.mu.Unlock()
		c.idle.Done()
	}
	if total <= inlineBytes {
		rd.run(1)
		finished()
		return rd, nil
	}
	workers := 1
	if total >= parallelBytes {
		workers = c.plane.workers
	}
	go func() {
		defer finished()
		rd.run(workers)
	}()
	return rd, nil
}

// Holds implements transfer.Witness. Memory that is no region has no slots.
func (c *peer) Holds(slot uint32, gen uint64) bool {
	c.mu.Lock() // the mapping stays until Close has had it
	defer c.mu.Unlock()
	return !c.closed && c.m.region != nil && c.m.region.Slots().Check(int(slot), gen)
}

// Slot implements transfer.Witness.
func (c *peer) Slot(slot uint32) (region.Slot, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.m.region == nil {
		return region.Slot{}, false
	}
	s, err := c.m.region.Slots().Load(int(slot))
	return s, err == nil
}

// View implements transfer.Viewer. The token is not looked at. Reading a view of a file that its owner has truncated ends the
// process with SIGBUS; region files are never truncated.
func (c *peer) View(_ []byte, remote []region.Span) ([][]byte, func(), error) {
	if _, err := transfer.CheckSpans(remote, int64(len(c.m.pool))); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, fmt.Errorf("mapped: view: %w", transfer.ErrClosed)
	}
	c.plane.mu.Lock()
	c.m.refs++
	c.plane.mu.Unlock()
	var once sync.Once
	release := func() { once.Do(func() { _ = c.plane.release(c.m) }) }
	return span.Slices(c.m.pool, remote), release, nil
}

// Close implements transfer.Peer: it cancels READs in flight and waits for them.
func (c *peer) Close() error {
	c.once.Do(func() {
		c.mu.Lock()
		c.closed = true
		for rd := range c.reads {
			rd.stop(fmt.Errorf("mapped: peer closed: %w", transfer.ErrClosed))
		}
		c.mu.Unlock()
		c.idle.Wait()
		c.plane.mu.Lock()
		delete(c.plane.peers, c)
		c.plane.mu.Unlock()
		c.err = c.plane.release(c.m)
	})
	return c.err
}

// alignment is the distance from b's start to the next page.
func alignment(b []byte) uintptr {
	page := uintptr(os.Getpagesize())
	return (page - uintptr(unsafe.Pointer(&b[0]))%page) % page
}
