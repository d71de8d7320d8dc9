package stage

import (
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// payload is one generation of a key. Guarded by the store's lock, except what is set once.
//
// It is published while it is in Store.payloads, then retired; its memory is released when it is retired and neither claims nor
// withdrawals are left.
type payload struct {
	store      *Store
	key        string
	generation wire.ID
	metadata   wire.Metadata
	memory     Memory
	room       *Room
	readers    int // who have to read it
	events     Events

	leaseEnd    time.Time // counts only while nobody has a claim
	claims      map[wire.ID]*claim
	withdrawing int                  // claims that ended and whose grant is not withdrawn yet
	reads       map[wire.ID]struct{} // claims whose readers have it
	answered    bool                 // a claim was
	condemned   bool                 // by Abort: no new claims
	retired     bool
	outcome     Outcome // once retired
}

// claim is one reader's.
type claim struct {
	p        *payload
	id       wire.ID
	owner    string
	source   string
	grant    string
	deadline time.Time
	offering int  // calls of Offer under way
	answered bool // descriptors may be out
	granted  bool // an Offer gave more than the bytes themselves
	ended    bool
	idle     bool // as the end was: see Memory.Withdraw
}

// read notes that the reader of a claim has the payload. The same claim again is the same reader.
func (p *payload) read(id wire.ID) {
	if p.reads == nil {
		p.reads = make(map[wire.ID]struct{}, 1)
	}
	if len(p.reads) < p.readers {
		p.reads[id] = struct{}{}
	}
}

// consume ends a claim whose reader has the payload, and says whether that is kept if no other claim is left.
func (p *payload) consume(id wire.ID) (keep bool) {
	p.store.stats.Done++
	p.read(id)
	if p.consumed() {
		return false
	}
	p.keepForRetry()
	return true
}

// consumed is true once all the readers that were wanted have read it.
func (p *payload) consumed() bool { return len(p.reads) >= p.readers }

// retire takes the payload off its key; if nothing reads it any more it is added to free, for release. why counts unless all its
// readers have read it.
func (p *payload) retire(free []*payload, why Outcome) []*payload {
	if s := p.store; !p.retired {
		p.retired, p.outcome = true, why
		if p.consumed() {
			p.outcome = Read
		}
		if s.payloads[p.key] == p {
			delete(s.payloads, p.key)
		}
	}
	return p.settle(free)
}

// settle adds the payload to free, once, if it is retired and nothing reads it any more.
func (p *payload) settle(free []*payload) []*payload {
	s := p.store
	if _, live := s.live[p]; !live || !p.retired || len(p.claims) > 0 || p.withdrawing > 0 {
		return free
	}
	delete(s.live, p)
	s.freeing++
	s.stats.Released++
	s.stats.Bytes -= p.metadata.Size
	return append(free, p)
}

// release frees the memory of payloads that settle gave. Called without the lock.
func release(free []*payload) {
	for _, p := range free {
		p.memory.Release()
		if p.room != nil {
			p.room.Close()
		}
		if p.events.Released != nil {
			p.events.Released(p.outcome)
		}
		s := p.store
		s.mu.Lock()
		s.freeing--
		close(s.idle)
		s.idle = make(chan struct{})
		s.mu.Unlock()
	}
}

// end takes a claim from its payload, which is retired if it has no other and is not to be kept. If end gives true, the caller
// calls Store.withdraw, without the lock; otherwise the Offer that is under way does.
func (p *payload) end(c *claim, idle, keep bool) (withdraw bool) {
	p.store.unfile(c)
	c.ended, c.idle = true, idle
	p.withdrawing++
	p.store.tasks.Add(1) // until it is withdrawn
	switch {             // the withdrawal is still to come: nothing is free yet
	case len(p.claims) > 0:
	case p.condemned:
		p.retire(nil, Aborted)
	case p.store.closing:
		p.retire(nil, Closed)
	case !keep:
		p.retire(nil, Read)
	}
	return c.offering == 0
}

// keepForRetry moves the lease's end so that a reader that failed can come again, or the next of several can come. Without it, a
// payload that was read need not be kept.
func (p *payload) keepForRetry() {
	end := time.Now().Add(p.store.o.RetryGrace)
	if p.consumed() || p.leaseEnd.Before(end) {
		p.leaseEnd = end
	}
	p.store.lookAt(p.leaseEnd)
}

// claimable says whether a claim may be granted now.
func (p *payload) claimable(c Claim, now time.Time) error {
	s := p.store
	held := p.claims[c.ID]
	switch {
	case !c.Generation.IsZero() && c.Generation != p.generation:
		return fmt.Errorf("%w: key %.64q has another generation", ErrNotFound, p.key)
	case held != nil && held.owner != c.Owner:
		return fmt.Errorf("%w: the claim is another reader's", ErrNotFound)
	case held != nil:
		return nil
	case s.closing:
		return ErrClosing
	case p.condemned:
		return s.failed(p.key)
	case len(p.claims) == 0 && !now.Before(p.leaseEnd):
		return fmt.Errorf("%w: the lease of key %.64q is over", ErrNotFound, p.key)
	case len(p.claims) >= s.o.MaxClaims:
		return fmt.Errorf("%w: key %.64q has %d readers", ErrFull, p.key, len(p.claims))
	case c.Source != "" && p.heldBy(c.Source) > s.o.MaxClaims/2:
		return fmt.Errorf("%w: %s holds more than half of the claims that key %.64q may have", ErrFull, c.Source, p.key)
	case c.Source != "" && s.sources[c.Source] >= s.o.MaxSourceClaims:
		return fmt.Errorf("%w: %s holds %d claims", ErrFull, c.Source, s.sources[c.Source])
	}
	return nil
}

// heldBy counts the claims of a source.
func (p *payload) heldBy(source string) (n int) {
	if len(p.claims) <= p.store.o.MaxClaims/2 {
		return 0 // that cannot be too many
	}
	for _, c := range p.claims {
		if c.source == source {
			n++
		}
	}
	return n
}

// failed is the error for a key without a payload.
func (s *Store) failed(key string) error {
	if f, ok := s.failures[key]; ok && time.Now().Before(f.until) {
		return &FailedError{key, f.reason}
	}
	if s.closing {
		return ErrClosing
	}
	return fmt.Errorf("%w: key %.64q", ErrNotFound, key)
}
