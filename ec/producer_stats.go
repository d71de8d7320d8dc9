package ec

import (
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
)

// ProducerStats is a snapshot for metrics. Counters only grow; the others are of now.
type ProducerStats struct {
	Acks           [wire.NackNotReady + 1]uint64 // by status
	Granted        uint64                        // grants made
	Renewals       uint64                        // requests for a grant that was still there
	BytesGranted   uint64                        // bytes of encodings, once a grant
	LeaseExpiries  uint64
	VerifiesOK     uint64 // own peers whose READ was of the granted bytes
	VerifiesFailed uint64 // own peers that were told to read again
	Pulled         uint64 // READs of own peers that asked nobody
	Notified       uint64 // plain peers' READs complete
	AgentGone      uint64 // grants of plain peers that ended with the agent that served them
	Rotations      uint64 // of the agent that serves plain peers
	LetGo          uint64 // grants given up before a READ was complete
	BadFrames      uint64 // frames and notifications that were dropped
	Capped         uint64 // requests over a limit, answered MISSING or NOT_READY
	PlainRefused   uint64 // plain peers that no plane here serves
	SendFailed     uint64 // answers that could not be queued

	PoolGrants     // of all pools together; RetiringFor is the longest
	Retiring   int // pools with a former agent
}

// PoolGrants is what peers may READ of a pool now. Blocks are counted once, however many grants are for them.
type PoolGrants struct {
	Grants         int
	GrantedBlocks  int
	Burned         int // of plain peers, past their lease and not read
	BurnedBlocks   int
	RetiringFor    time.Duration // since a former agent was last handed out that still serves what it was told of; 0: there is none
	RetiringBlocks int           // that only former agents serve: free at their end
}

// Stats is a snapshot.
func (p *Producer) Stats() ProducerStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	for _, pool := range p.order {
		g := p.grantsOf(pool)
		s.Grants += g.Grants
		s.GrantedBlocks += g.GrantedBlocks
		s.Burned += g.Burned
		s.BurnedBlocks += g.BurnedBlocks
		s.RetiringBlocks += g.RetiringBlocks
		s.RetiringFor = max(s.RetiringFor, g.RetiringFor)
		if pool.rotation.retiring != nil {
			s.Retiring++
		}
	}
	return s
}

// Granted is about the pool of a cache that p serves; zero of any other.
func (p *Producer) Granted(c *Cache) PoolGrants {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.order {
		if pool.cache == c {
			return p.grantsOf(pool)
		}
	}
	return PoolGrants{}
}

// grantsOf is called with the lock held.
func (p *Producer) grantsOf(pool *servedPool) PoolGrants {
	g := PoolGrants{
		Grants: pool.total.grants, GrantedBlocks: pool.total.blocks, Burned: pool.burned.grants, BurnedBlocks: pool.burned.blocks,
	}
	if r := &pool.rotation; r.retiring != nil {
		g.RetiringFor = time.Since(r.since)
		g.RetiringBlocks = r.kept + p.onlyBy(pool, r.retiring)
	}
	return g
}

// onlyBy counts the blocks of grants that no incarnation serves but that one.
func (p *Producer) onlyBy(pool *servedPool, former *incarnation) int {
	var u usage
	for _, g := range p.grants.byID {
		if g.plain && g.pool == pool && !slices.ContainsFunc(g.told, func(i *incarnation) bool { return i != former && !i.over() }) {
			u.add(g)
		}
	}
	return u.blocks
}
