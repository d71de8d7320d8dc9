package stage

import (
	"context"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// Claim names one reader's claim of a payload.
type Claim struct {
	Key        string
	Generation wire.ID // the zero ID is any, in Claim only
	ID         wire.ID // chosen by the reader; the same again is the same claim
	// Owner is the authenticated connection of an own reader: the claim ends with it (see Drop), and nobody else can end it. "" is
	// a plain reader, who owns its claim by the id alone, over any connection.
	Owner string
	Ask   *wire.FerryRequest // what an own reader can take; nil for a plain one
}

// Claim grants a claim and gives the metadata for its reader. The claim is recorded before Memory.Offer is asked for descriptors, so
// that none leaves without one. A claim that is held already is answered again, and its time starts anew.
//
// Errors: ErrNotFound (a plain reader is told so whatever the error), ErrFailed, ErrClosing, ErrFull, and those of Memory.Offer,
// which end a claim that was never answered.
func (s *Store) Claim(ctx context.Context, c Claim) (*wire.Metadata, error) {
	s.mu.Lock()
	p := s.payloads[c.Key]
	if p == nil || c.ID.IsZero() {
		defer s.mu.Unlock()
		return nil, s.failed(c.Key)
	}
	now := time.Now()
	if err := p.claimable(c, now); err != nil {
		s.mu.Unlock()
		return nil, err
	}
	held := p.claims[c.ID]
	if held == nil {
		s.grants++
		s.stats.Granted++
		held = &claim{owner: c.Owner, grant: strconv.FormatUint(s.grants, 36)}
		p.claims[c.ID] = held
	}
	held.deadline = now.Add(s.o.Transfer + s.o.Margin)
	held.offering++
	s.lookAt(held.deadline)
	s.mu.Unlock()

	m := p.offer(c)
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(s.ctx, cancel)
	err := p.memory.Offer(ctx, held.grant, c.Ask, &m)
	unhook()
	cancel()

	s.mu.Lock()
	held.offering--
	held.offered = held.offered || err == nil
	// A claim that was answered before stays: its reader may be reading.
	if err != nil && !held.ended && !held.offered && held.offering == 0 {
		s.stats.Failed++
		p.keepForRetry()
		p.end(c.ID, true, true)
	}
	ended, last := held.ended, held.offering == 0
	s.mu.Unlock()
	if !ended {
		if err != nil {
			return nil, err
		}
		return &m, nil
	}
	if last {
		s.withdraw(p, held)
	}
	if err == nil {
		err = s.ended(c.Key)
	}
	return nil, err
}

// offer is what a claim's reader is told, without the descriptors.
func (p *payload) offer(c Claim) wire.Metadata {
	m := p.metadata
	m.Claim, m.Ferry = c.ID, nil
	if c.Owner == "" {
		return m
	}
	m.Ferry = &wire.FerryMetadata{LeaseMS: p.store.o.Transfer.Milliseconds()}
	if f := p.metadata.Ferry; f != nil {
		m.Ferry.Top, m.Ferry.Sum = f.Top, f.Sum
	}
	return m
}

// ended is the error for a claim that ended while it was being granted.
func (s *Store) ended(key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed(key)
}

// Done ends a claim whose reader has read: if no claim is left, the payload is released. held is false, and nothing changes, if
// there is no such claim of that generation and owner: it was never granted, or ended before (so what was read may not be what was
// put).
func (s *Store) Done(c Claim) (held bool) {
	return s.finish(c, func(p *payload) (keep bool) {
		s.stats.Done++
		p.consumed = true
		return false
	})
}

// Fail ends a claim whose reader did not get the payload: it stays for another claim, for RetryGrace at least. held is as in Done.
// The reader has no READ under way any more.
func (s *Store) Fail(c Claim) (held bool) {
	return s.finish(c, func(p *payload) (keep bool) {
		s.stats.Failed++
		p.keepForRetry()
		return true
	})
}

// finish ends a claim by its reader. outcome, called with the lock, says whether the payload is kept if no claim is left.
func (s *Store) finish(c Claim, outcome func(*payload) (keep bool)) bool {
	s.mu.Lock()
	p := s.payloads[c.Key]
	if p == nil || c.Generation != p.generation {
		s.mu.Unlock()
		return false
	}
	held := p.claims[c.ID]
	if held == nil || held.owner != c.Owner {
		s.mu.Unlock()
		return false
	}
	_, withdraw := p.end(c.ID, true, outcome(p))
	s.mu.Unlock()
	if withdraw {
		s.withdraw(p, held)
	}
	return true
}

// Drop ends all claims of an owner, whose connection was lost: its READs may still be under way and are stopped. The payloads stay
// for other claims.
func (s *Store) Drop(owner string) {
	if owner == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.live {
		for id, c := range p.claims {
			if c.owner == owner {
				s.lapse(p, id)
			}
		}
	}
}

// lapse ends a claim that its reader did not end. With the lock.
func (s *Store) lapse(p *payload, id wire.ID) {
	s.stats.Lapsed++
	p.keepForRetry()
	if c, withdraw := p.end(id, false, !p.consumed); withdraw {
		go s.withdraw(p, c) // s.tasks has it
	}
}

// watch is a key that somebody waits for.
type watch struct {
	changed chan struct{}
	users   int
}

// Watch gives a channel that is closed at the next Put or Abort of the key, or when the store closes; ask again with Claim then. stop
// ends the watching, and must be called. Watch before Claim, so that nothing between them is missed.
func (s *Store) Watch(key string) (changed <-chan struct{}, stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.watchers[key]
	if w == nil {
		w = &watch{changed: make(chan struct{})}
		s.watchers[key] = w
	}
	w.users++
	done := false
	return w.changed, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if done {
			return
		}
		done = true
		if w.users--; w.users == 0 && s.watchers[key] == w {
			delete(s.watchers, key)
		}
	}
}

// notify wakes who watches the key. With the lock.
func (s *Store) notify(key string) {
	if w := s.watchers[key]; w != nil {
		close(w.changed)
		delete(s.watchers, key)
	}
}
