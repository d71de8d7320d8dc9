package ec

import (
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
)

// PlainServer is implemented by a Registration that unmodified peers, which know no `ferry` map, can READ: a NIXL agent.
type PlainServer interface {
	// Agent is what such a peer adds as a remote agent, and the address of the memory's first byte in the agent's process.
	// metadata differs from one incarnation of the agent to the next, and is nil while there is none. gone is closed when the
	// incarnation is over: no READ of a peer that was told this metadata can read anything any more.
	// It is called on the control goroutine and does not block.
	Agent() (metadata []byte, base uint64, gone <-chan struct{})
}

// maxPlainBlocks is the largest pool that a plain peer can be served from: an ack to it describes every block, in 14 bytes each, and
// must fit into what may wait for one peer (control.DefaultQueueBytes).
const maxPlainBlocks = 4_000_000

// refusePlain says why a plain peer is not served.
func (p *Producer) refusePlain(from control.Source, r *wire.Request, pool *servedPool) {
	p.stats.PlainRefused++
	if pool.blocks > maxPlainBlocks {
		p.log.warn("plain large", from.Addr, "a peer without the ferry extension asks, but the pool has too many blocks to be described to it: answered NACK_INTERNAL",
			"key", r.Key, "blocks", pool.blocks, "at_most", maxPlainBlocks, "fix", "make ec_cpu_bytes smaller, or use Tensorferry's connector on the other end")
		return
	}
	p.log.warn("plain", from.Addr, "a peer without the ferry extension asks, but no data plane here can serve it: answered NACK_INTERNAL",
		"key", r.Key, "planes", pool.planes(), "fix", "start this node with the nixl plane, or use Tensorferry's connector on the other end")
}

// incarnation is one life of the agent that serves plain peers.
type incarnation struct {
	metadata   []byte
	descriptor descriptor
	gone       <-chan struct{}
	acked      time.Time // not before the last ack that named it
	inherited  bool      // from a process that died, at acked
}

// descriptor is an encoded mem_descriptor of a whole pool, megabytes of a large one. All peers are sent the same.
type descriptor struct {
	shared *control.Shared // nil: it is small, or could not be shared
	bytes  []byte          // if so
}

// shareFrom is the least size of a descriptor that is worth sharing.
const shareFrom = 64 << 10

func (p *Producer) describe(base uint64, pool *servedPool) descriptor {
	b := wire.AppendMemDescriptor(nil, base, pool.blocks, pool.compat.BlockBytes)
	if len(b) < shareFrom {
		return descriptor{bytes: b}
	}
	shared, err := control.NewShared(b)
	if err != nil {
		p.log.warn("descriptor", "", "the descriptor of a pool is copied for each plain peer", "err", err)
		return descriptor{bytes: b}
	}
	return descriptor{shared: shared}
}

func (i *incarnation) over() bool {
	select {
	case <-i.gone:
		return true
	default:
		return false
	}
}

// agent gives the incarnation that serves now, or nil. Called with the lock held.
func (p *Producer) agent(pool *servedPool) *incarnation {
	metadata, base, gone := pool.plain.Agent()
	if metadata == nil {
		return nil
	}
	if i := pool.agent; i != nil && slices.Equal(i.metadata, metadata) {
		return i
	}
	i := &incarnation{
		metadata:   metadata,
		descriptor: p.describe(base, pool),
		gone:       gone,
	}
	pool.agent = i
	p.watchers.Go(func() {
		select {
		case <-i.gone:
			p.agentGone(pool)
		case <-p.closing:
		}
	})
	return i
}

// servable says whether an ack for that grant can be sent now: there is an agent, the ack says all that the session needs of it
// (descriptorWithheld), and naming it spoils no READ of the session. A vLLM
// consumer that is told of another agent takes the former one away at once, and what it READs from there fails (over shared memory
// it is complete when it is posted, over a network it is not). So a session that may be reading waits until its READs are
// complete, or as long as it would itself. Called with the lock held.
func (p *Producer) servable(id grantKey) bool {
	agent := p.agent(id.pool)
	if agent == nil {
		return false // it is being started again
	}
	s := p.grants.plain[id.session]
	if s != nil && s.descriptorWithheld(agent) {
		return false
	}
	if s == nil || s.agent == nil || s.agent == agent || s.agent.over() {
		return true
	}
	// All its grants are the former one's. The key that is asked for is not being read.
	reading := s.grants
	if p.grants.byKey[id] != nil {
		reading--
	}
	if reading <= 0 {
		return true
	}
	if s.moving.IsZero() {
		s.moving = time.Now()
	}
	return time.Since(s.moving) >= plainReadTimeout
}

// plainReadTimeout is the time that vLLM gives a READ (0.32).
const plainReadTimeout = 20 * time.Second

// agentGone ends the grants of plain peers that were told of no incarnation but such as are over: a late READ can only fail.
func (p *Producer) agentGone(pool *servedPool) {
	var ended []*grant
	p.mu.Lock()
	for _, g := range p.grants.byID {
		if g.plain && g.pool == pool && !slices.ContainsFunc(g.told, func(i *incarnation) bool { return !i.over() }) {
			p.grants.remove(g)
			p.stats.AgentGone++
			ended = append(ended, g)
		}
	}
	p.mu.Unlock()
	p.reaper.add(ended...)
}

// fillPlain writes what an OK ack to a plain peer says: of the agent that was there when the grant was made or renewed. Called
// with the lock held.
func (p *Producer) fillPlain(a *answer, g *grant) {
	agent, ack := g.pool.agent, &a.ack
	for _, e := range g.info.Extents {
		for b := e.Start; b < e.Start+e.Count; b++ {
			ack.Blocks = append(ack.Blocks, b)
		}
	}
	ack.AgentMetadata = agent.metadata
	if p.grants.descriptorDue(g.session, agent) {
		a.described = true
		a.shared, ack.MemDescriptor = agent.descriptor.shared, agent.descriptor.bytes
	}
	agent.acked = time.Now()
	g.acks++
	g.told = remember(g.told, agent)
	s := p.grants.plainSession(g.session)
	for _, former := range g.pool.rotation.heirs {
		if former.fresh() && !former.over() {
			s.knows = remember(s.knows, former) // it may have been told by a process before
		}
	}
	s.conn, s.gone = g.conn, time.Time{}
}

func remember(all []*incarnation, i *incarnation) []*incarnation {
	all = slices.DeleteFunc(all, (*incarnation).over)
	if !slices.Contains(all, i) {
		all = append(all, i)
	}
	return all
}

// readByPlain counts a complete READ. It returns the grant if that was the last one that the peer may do: a peer acts on each ack
// it was sent, whenever it comes to it, so a grant that was acked twice is READ twice, or not, and cannot be ended by the first.
func (p *Producer) readByPlain(id grantKey) *grant {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.grants.plain[id.session]; s != nil {
		s.warm = true
	}
	g := p.grants.byKey[id]
	if g == nil {
		return nil
	}
	p.stats.Notified++
	g.read++
	s := p.grants.plainSession(g.session)
	if len(g.told) == 1 && g.told[0] == s.agent {
		s.read = true // by the agent that it is told of now, and not by a former one
	}
	if len(g.told) == 1 && g.told[0] != s.moved {
		s.moved, s.movedAt = g.told[0], time.Now()
	}
	if g.read < g.acks {
		return nil
	}
	return g
}

// unsent takes back what fillPlain counted for an ack that could not be sent. It returns the grant if all that were sent have been READ,
// the last of them meanwhile.
func (p *Producer) unsent(id grantKey, described bool) *grant {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.grants.plain[id.session]; s != nil && described {
		s.descriptors--
	}
	g := p.grants.byKey[id]
	if g == nil {
		return nil
	}
	if g.acks--; g.acks == 0 || g.read < g.acks {
		return nil
	}
	return g
}
