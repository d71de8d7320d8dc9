package nixl

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

const (
	checkBytes = 4096        // of each registration are read
	hungRead   = time.Minute // after that a READ of a check that does not end is ended with its fetch agent
)

// Checker tells whether a plane can move bytes now, by what peers would use: it READs from each registration with the plane's own
// fetch agent. SelfTest does more, and starts agents of its own for it; this takes well under a millisecond.
type Checker struct {
	p *Plane

	mu   sync.Mutex    // held for a check
	hung chan struct{} // closed when the READ that a check gave up has ended; nil: there is none
	when time.Time     // that READ began
}

// NewChecker makes the checker of a plane. There is nothing to close.
func NewChecker(p *Plane) *Checker { return &Checker{p: p} }

// Check is nil if a READ from each registration succeeds before ctx ends. One that hangs cannot be stopped: until it has ended, a
// check fails at once; after a minute its fetch agent is replaced, which ends it.
func (c *Checker) Check(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hung != nil {
		select {
		case <-c.hung:
			c.hung = nil
		default:
			return fmt.Errorf("%w: nixl: a READ from an agent of this plane, %v ago, does not end", transfer.ErrPeerLost, time.Since(c.when).Round(time.Second))
		}
	}
	c.p.mu.Lock()
	var regs []*Registration
	for r := range c.p.regs {
		regs = append(regs, r)
	}
	c.p.mu.Unlock()
	for _, r := range regs {
		if err := c.read(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

func (c *Checker) read(ctx context.Context, r *Registration) error {
	i, up := r.Incarnation()
	if !up {
		return fmt.Errorf("%w: nixl: the serve agent is down", transfer.ErrPeerLost)
	}
	peer, err := c.p.AddPeer(ctx, i.Metadata)
	if err != nil {
		return fmt.Errorf("reach the serve agent: %w", err)
	}
	n := min(checkBytes, len(r.memory.bytes))
	began := time.Now()
	rd, err := peer.Read(ctx, transfer.ReadRequest{Remote: []region.Span{{Length: int64(n)}}, Local: [][]byte{make([]byte, n)}})
	if err != nil {
		_ = peer.Close() // gives nil
		return fmt.Errorf("READ from the serve agent: %w", err)
	}
	select {
	case <-rd.Done():
		_ = peer.Close() // gives nil
		if err := rd.Err(); err != nil {
			return fmt.Errorf("READ from the serve agent: %w", err)
		}
		return nil
	case <-ctx.Done():
	}
	hung := make(chan struct{})
	c.hung, c.when = hung, began
	go func() {
		timer := time.NewTimer(hungRead)
		defer timer.Stop()
		select {
		case <-rd.Done():
		case <-timer.C:
		}
		_ = peer.Close() // gives nil
		close(hung)
	}()
	return fmt.Errorf("READ from the serve agent: %w", ctx.Err())
}
