package ec

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/control"
)

// A plain peer that was sent an ack may READ what it names at any time, and cannot be told to stop. Where it never does (it died, or
// aborted the request), only the end of the agent that its acks named frees the memory. So the agent is rotated: a new incarnation
// goes into all acks from now on, and the former one ends when nobody who knows it will use it any more. It must not end earlier: a
// vLLM engine whose READ meets a dead agent that it knows ends with it.

// Rotator may be implemented by a PlainServer whose agent can be replaced while the former one goes on serving.
type Rotator interface {
	// Rotate starts another incarnation, which Agent gives from its return on. end ends the former one and returns when nothing can
	// be read by it any more; its gone is closed then.
	Rotate(ctx context.Context) (end func(), err error)
}

const (
	burnedSourceShare = 0.05             // of a pool's blocks that may be burned by one source
	burnedTotalShare  = 0.25             // and by all
	burnedTime        = 5 * time.Minute  // burned grants are got rid of after that, however few they are
	rotateTimeout     = 30 * time.Second // for a new incarnation to be up
	rotateRetry       = 30 * time.Second // after one that did not come up
	sessionGone       = 5 * time.Minute  // a session whose connection ended does nothing more after that
	// No ack is acted on later than that by a session whose connection stands. An engine looks at its acks in each step, and a vLLM
	// engine ends itself when a step takes 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, 0.32); one that is stopped loses its connection.
	lateAck = 10 * time.Minute
	// The same for a session that never READ. It knows no agent, so it adds the one that an ack names, and adding a dead one fails that
	// key only. One that has added the agent has its first READ under way, for 20 s at most, and acts on its other acks in the next
	// steps; vLLM gives an item 60 s in all.
	lateFirstAck = 90 * time.Second
	// A READ that was posted before a session's first one on the new incarnation: vLLM gives it 20 s, and its memory 60 s more.
	lastReads   = 90 * time.Second
	retireCheck = 5 * time.Second // how often it is asked who may still use a former incarnation
)

// rotation is the state of a pool's rotation, under the producer's lock.
type rotation struct {
	running  bool
	retiring *incarnation   // serves what it was told of until it is READ; nil: no former one is left
	since    time.Time      // retiring is no more handed out
	kept     int            // blocks that only inherited ones serve
	heirs    []*incarnation // the inherited ones
	due      *time.Timer    // looks at burned grants again
}

// overBurned names the limit of burned grants that keeps one more grant from a plain peer, or "". From when a new incarnation is started
// until the former one is over twice as much may be burned: the peer has to be able to READ on the new one. Sources that have little
// answer for themselves only.
func (sp *servedPool) overBurned(source string, little bool) string {
	share := 1.0
	if sp.rotation.running {
		share = 2
	}
	if u := sp.burnedBy.of(source); u.grants > 0 && float64(u.blocks) > share*burnedSourceShare*float64(sp.blocks) {
		return fmt.Sprintf("%d blocks acked to that source and not read", u.blocks)
	}
	if u := &sp.burned; !little && u.grants > 0 && float64(u.blocks) > share*burnedTotalShare*float64(sp.blocks) {
		return fmt.Sprintf("%d blocks acked to plain peers and not read", u.blocks)
	}
	return ""
}

// considerRotation rotates the pool's agent if too much is burned, and else looks again when what is burned now has been for
// burnedTime. Called with the lock held.
func (p *Producer) considerRotation(pool *servedPool) {
	r := &pool.rotation
	rotator, ok := pool.plain.(Rotator)
	if !ok || r.running || p.closed || pool.burned.grants == 0 {
		return
	}
	over := float64(pool.burned.blocks) > burnedTotalShare*float64(pool.blocks)
	for _, u := range pool.burnedBy {
		over = over || float64(u.blocks) > burnedSourceShare*float64(pool.blocks)
	}
	if !over && !p.burnedFor(pool, burnedTime) {
		p.lookAgain(pool, burnedTime/4)
		return
	}
	r.running = true
	p.watchers.Go(func() { p.rotate(pool, rotator) })
}

// burnedFor tells whether a grant has been burned for so long. Called with the lock held.
func (p *Producer) burnedFor(pool *servedPool, d time.Duration) bool {
	for _, g := range p.grants.byID {
		if g.burned && g.pool == pool && time.Since(g.expires) >= d {
			return true
		}
	}
	return false
}

// lookAgain calls considerRotation after d, unless that is to come already. Called with the lock held.
func (p *Producer) lookAgain(pool *servedPool, d time.Duration) {
	r := &pool.rotation
	if r.due != nil {
		return
	}
	r.due = time.AfterFunc(d, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		r.due = nil
		p.considerRotation(pool)
	})
}

// rotate replaces the agent and retires the former one.
func (p *Producer) rotate(pool *servedPool, rotator Rotator) {
	retry := rotateRetry
	defer func() { p.rotated(pool, retry) }()
	ctx, cancel := context.WithTimeout(context.Background(), rotateTimeout)
	defer cancel()
	go func() {
		select {
		case <-p.closing:
			cancel()
		case <-ctx.Done():
		}
	}()

	p.mu.Lock()
	former := pool.agent
	p.mu.Unlock()
	end, err := rotator.Rotate(ctx)
	if err != nil {
		p.log.warn("rotate", "", "the agent that serves plain peers could not be replaced; what they were granted and have not read stays", "err", err)
		return
	}
	p.mu.Lock()
	pool.rotation.retiring, pool.rotation.since = former, time.Now()
	p.stats.Rotations++
	p.agent(pool)
	p.mu.Unlock()
	retry = 0
	if former == nil {
		end()
		return
	}
	p.retire(pool, former, end)
}

// retire ends a former incarnation once nobody will use it any more.
func (p *Producer) retire(pool *servedPool, former *incarnation, end func()) {
	check := time.NewTicker(retireCheck)
	defer check.Stop()
	for {
		select {
		case <-p.closing:
			return // the registration's Close ends all incarnations, or leaves them
		default:
		}
		if p.retired(pool, former) {
			break
		}
		select {
		case <-check.C:
		case <-former.gone:
		case <-p.closing:
		}
	}
	end()
}

// rotated is the end of rotate. What was burned meanwhile may be over a limit by now; the next rotation begins after retry then.
func (p *Producer) rotated(pool *servedPool, retry time.Duration) {
	p.agentGone(pool) // before it is looked at what is burned
	p.mu.Lock()
	defer p.mu.Unlock()
	pool.rotation.running, pool.rotation.retiring, pool.rotation.kept, pool.rotation.heirs = false, nil, 0, nil
	switch {
	case p.closed || pool.burned.grants == 0:
	case retry > 0:
		p.lookAgain(pool, retry)
	default:
		p.considerRotation(pool)
	}
}

// retired tells whether no session will use the incarnation any more. A session READs by it only when it acts on an ack that named it. So
// what counts is the acks that it may not have acted on yet: those without a notification of their READ.
func (p *Producer) retired(pool *servedPool, former *incarnation) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case former.over() || time.Since(former.acked) >= lateAck:
		return true
	case former.inherited:
		return p.retiredHeir(pool, former)
	}
	lateFirst := time.Since(former.acked) >= lateFirstAck
	for _, g := range p.grants.byID {
		if !g.plain || g.pool != pool || !slices.Contains(g.told, former) {
			continue
		}
		s := p.grants.plainSession(g.session)
		if over := lateFirst && !s.warm; !over && !p.actedOnAll(s, pool) {
			return false
		}
	}
	return true
}

// retiredHeir is retired for the agents of a process that died. Its acks are not known: any session may have one until it has shown that
// it has not, and sessions that only that process knew are gone with their connections. Called with the lock held.
func (p *Producer) retiredHeir(pool *servedPool, former *incarnation) bool {
	if former.fresh() {
		return false
	}
	for _, s := range p.grants.plain {
		if slices.Contains(s.knows, former) && !p.actedOnAll(s, pool) {
			return false
		}
	}
	return true
}

// actedOnAll tells whether a session does not act any more on what it was acked before the agent of now was: it is gone, or it has READ
// by the new one, some time ago. Acks of a session are acted on in their order. Called with the lock held.
func (p *Producer) actedOnAll(s *plainSession, pool *servedPool) bool {
	if !s.gone.IsZero() && time.Since(s.gone) >= sessionGone {
		return true
	}
	return s.moved != nil && s.moved == pool.agent && time.Since(s.movedAt) >= lastReads
}

// Left implements control.LeaveHandler.
func (p *Producer) Left(from control.Source) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.grants.plain {
		if s.conn == from.ID && s.gone.IsZero() {
			s.gone = time.Now()
		}
	}
}
