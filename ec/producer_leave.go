package ec

import (
	"context"
	"time"
)

// A producer that ends takes its agents with it, and a vLLM engine that acts on an ack after that ends too. So one that is ended cleanly
// stops granting first, gives those that were acked a moment to READ, and leaves the agents whose acks are still unread.

// Leaver may be implemented by a PlainServer, or a Successor, whose agents can go on without this process.
type Leaver interface {
	// Leave has Close leave all agents that can go on, and says whether there are any. They end by themselves.
	Leave() bool
}

// unreadPoll is how often it is asked whether peers have READ what they were acked. It is for the end of a node only.
const unreadPoll = 5 * time.Millisecond

// Stop ends granting, and nothing else. Requests are not answered any more: a peer that hears nothing asks the next producer at this
// address.
func (p *Producer) Stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
}

// Settle returns when plain peers have READ all that they were acked, or when ctx ends. What has been burned is not waited for: its peer
// has most likely given it up. Call Stop first.
func (p *Producer) Settle(ctx context.Context) {
	tick := time.NewTicker(unreadPoll)
	defer tick.Stop()
	for p.reading() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// reading says whether a plain peer is likely to READ yet.
func (p *Producer) reading() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.order {
		if pool.plainHeld.total.grants > pool.burned.grants {
			return true
		}
	}
	return false
}

// Unread counts what plain peers may still READ of the pool of a cache: grants of this producer, and entries that one before it granted and
// whose agents still serve. Call it after Stop.
func (p *Producer) Unread(c *Cache) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.order {
		if pool.cache != c {
			continue
		}
		n += pool.plainHeld.total.grants
		for _, h := range pool.rotation.heirs {
			if !h.over() {
				return n + pool.inherited
			}
		}
	}
	return n
}

// Leave has Close leave the agents that serve the pool of a cache to plain peers, with what was granted: the region goes on recording it, and
// its memory must not change after that. It says whether there are any that can be left.
func (p *Producer) Leave(c *Cache) (left bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.order {
		if pool.cache != c {
			continue
		}
		for _, s := range []any{pool.plain, pool.former} {
			if l, ok := s.(Leaver); ok && l.Leave() {
				left = true
			}
		}
		pool.left = left
	}
	return left
}
