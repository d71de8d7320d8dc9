package stage

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// Claim names one reader's claim of a payload.
type Claim struct {
	Key        string
	Generation wire.ID // the zero ID is any, in Claim only
	ID         wire.ID // chosen by the reader; the same again is the same claim
	// Owner is the connection of an own reader: the claim ends with it (see Drop), and nobody else can end it. "" is
	// a plain reader, who owns its claim by the id alone, over any connection.
	Owner  string
	Source string             // where the reader is, such as its address: see Options.MaxSourceClaims; "" is not counted
	Ask    *wire.FerryRequest // what an own reader can take; nil for a plain one
}

// Claim grants a claim and gives the metadata for its reader. The claim is recorded before Memory.Offer is asked for descriptors, so
// that none leaves without one. A claim that is held already is answered again, and its time starts anew.
//
// Errors: ErrNotFound (a plain reader is told so whatever the error), ErrFailed, ErrClosing, ErrFull, and those of Memory.Offer,
// which end a claim that was never answered.
func (s *Store) Claim(ctx context.Context, c Claim) (*wire.Metadata, error) {
	g, _, err := s.begin(c, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	unhook := context.AfterFunc(s.ctx, cancel)
	m, err := g.offer(ctx)
	unhook()
	cancel()
	if withdraw := g.settle(err == nil); withdraw != nil {
		withdraw()
	}
	return m, err
}

// grant is a claim that is being answered: offer, then settle, which has to be called.
type grant struct {
	Claim
	p    *payload
	held *claim
}

// begin records a claim. If there is nothing to claim yet, and wake is not nil, the key is watched as by await; stop is then not nil.
func (s *Store) begin(c Claim, wake func()) (g *grant, stop func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.payloads[c.Key]
	if c.ID.IsZero() {
		return nil, nil, fmt.Errorf("%w: a claim without an id", ErrNotFound)
	}
	at := time.Now()
	if p == nil {
		err = s.failed(c.Key)
	} else {
		err = p.claimable(c, at)
	}
	if err != nil {
		// A generation is known once it was put: if it is not there now, it will never be.
		if wake != nil && c.Generation.IsZero() && !s.closing && errors.Is(err, ErrNotFound) {
			stop = s.await(c.Key, wake)
		}
		return nil, stop, err
	}
	held := p.claims[c.ID]
	if held == nil {
		s.grants++
		s.stats.Granted++
		held = &claim{p: p, id: c.ID, owner: c.Owner, source: c.Source, grant: strconv.FormatUint(s.grants, 36)}
		s.file(held)
	}
	held.deadline = at.Add(s.o.Transfer + s.o.Margin)
	held.offering++
	s.lookAt(held.deadline)
	return &grant{c, p, held}, nil, nil
}

// offer asks the payload's memory for what the reader needs. It fails, too, if the claim ended meanwhile.
func (g *grant) offer(ctx context.Context) (*wire.Metadata, error) {
	m := g.p.offer(g.Claim)
	err := g.p.memory.Offer(ctx, g.held.grant, g.Ask, &m)
	s := g.p.store
	s.mu.Lock()
	defer s.mu.Unlock()
	g.held.granted = g.held.granted || err != nil || m.Ferry == nil || m.Ferry.Inline == nil
	if err == nil && g.held.ended {
		err = s.failed(g.p.key)
	}
	if err != nil {
		return nil, err
	}
	return &m, nil
}

// settle says whether what offer gave was handed to the reader. A claim that was never answered ends: nothing is read under it. One
// that was answered before stays, its reader may be reading. withdraw is as in done.
func (g *grant) settle(answered bool) (withdraw func()) {
	s, p, held := g.p.store, g.p, g.held
	s.mu.Lock()
	held.offering--
	held.answered = held.answered || answered
	if !held.ended && !held.answered && held.offering == 0 {
		s.stats.Failed++
		p.keepForRetry()
		p.end(held, true, true)
	}
	ended, last := held.ended, held.offering == 0
	first := answered && !p.answered
	p.answered = p.answered || answered
	s.mu.Unlock()
	if first && p.events.Claimed != nil {
		p.events.Claimed()
	}
	if ended && last {
		return func() { s.withdraw(p, held) }
	}
	return nil
}

// file records a new claim. With the lock.
func (s *Store) file(c *claim) {
	c.p.claims[c.id] = c
	s.verified.again(c.p.generation, c.id)
	if c.owner != "" {
		if s.owners[c.owner] == nil {
			s.owners[c.owner] = make(map[*claim]struct{})
		}
		s.owners[c.owner][c] = struct{}{}
	}
	if c.source != "" {
		s.sources[c.source]++
	}
}

// unfile undoes file. With the lock.
func (s *Store) unfile(c *claim) {
	delete(c.p.claims, c.id)
	if c.owner != "" {
		if delete(s.owners[c.owner], c); len(s.owners[c.owner]) == 0 {
			delete(s.owners, c.owner)
		}
	}
	if c.source != "" {
		if s.sources[c.source]--; s.sources[c.source] == 0 {
			delete(s.sources, c.source)
		}
	}
}

// Stat is what a claim would be told, without the claim and the descriptors. The zero generation is any. Errors: ErrNotFound, ErrFailed.
func (s *Store) Stat(key string, generation wire.ID) (*wire.Metadata, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.payloads[key]
	if p == nil {
		return nil, s.failed(key)
	}
	m := p.offer(Claim{Owner: "any"})
	if !generation.IsZero() && generation != m.Generation {
		return nil, fmt.Errorf("%w: key %.64q has another generation", ErrNotFound, key)
	}
	return &m, nil
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

// Done ends a claim whose reader has read: if all the readers that were wanted have, and no claim is left, the payload is released.
// held is false, and nothing changes, if there is no such claim of that generation and owner: it was never granted, or ended before
// (so what was read may not be what was put).
func (s *Store) Done(c Claim) (held bool) { return now(s.done(c)) }

// Fail ends a claim whose reader did not get the payload: it stays for another claim, for RetryGrace at least. held is as in Done.
// The reader has no READ under way any more.
func (s *Store) Fail(c Claim) (held bool) { return now(s.fail(c)) }

// Verify is Done for an own reader that has to know whether its claim held, and that may not hear the answer: asked again within
// RetryGrace, over any connection, it is held again. Nothing else about a claim that ended is remembered.
func (s *Store) Verify(c Claim) (held bool) {
	a, withdraw := s.verify(c)
	return now(a == wire.Held, withdraw)
}

// now withdraws what done, fail and verify leave to be withdrawn.
func now(held bool, withdraw func()) bool {
	if withdraw != nil {
		withdraw()
	}
	return held
}

// done is Done. withdraw, if not nil, has to be called by anybody, soon: it may wait for the memory, and releases the payload. It is
// nil, and done has done it, where nothing can wait: the reader got the bytes themselves.
func (s *Store) done(c Claim) (held bool, withdraw func()) {
	return s.finish(c, func(p *payload) (keep bool) { return p.consume(c.ID) })
}

// verify is Verify, with withdraw as in done. The answer is Held or Lost, or NotFound while the claim is another connection's: if
// its reader lost that one, what ends the claim is on its way.
func (s *Store) verify(c Claim) (answer wire.Status, withdraw func()) {
	held, withdraw := s.finish(c, func(p *payload) (keep bool) {
		s.lookAt(s.verified.add(c, time.Now()))
		return p.consume(c.ID)
	})
	if held {
		return wire.Held, withdraw
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.payloads[c.Key]
	switch {
	case s.verified.has(c, time.Now()):
		return wire.Held, nil
	case p != nil && p.generation == c.Generation && p.claims[c.ID] != nil:
		return wire.NotFound, nil
	}
	return wire.Lost, nil
}

// fail is Fail, with withdraw as in done.
func (s *Store) fail(c Claim) (held bool, withdraw func()) {
	return s.finish(c, func(p *payload) (keep bool) {
		s.stats.Failed++
		p.keepForRetry()
		return true
	})
}

// finish ends a claim by its reader. outcome, called with the lock, says whether the payload is kept if no claim is left.
func (s *Store) finish(c Claim, outcome func(*payload) (keep bool)) (held bool, withdraw func()) {
	s.mu.Lock()
	p := s.payloads[c.Key]
	if p == nil || c.Generation != p.generation {
		s.mu.Unlock()
		return false, nil
	}
	h := p.claims[c.ID]
	if h == nil || h.owner != c.Owner {
		s.mu.Unlock()
		return false, nil
	}
	over, quick := p.end(h, true, outcome(p)), !h.granted
	s.mu.Unlock()
	if !over {
		return true, nil
	}
	withdraw = func() { s.withdraw(p, h) }
	if quick {
		withdraw()
		withdraw = nil
	}
	return true, withdraw
}

// Drop ends all claims of an owner, whose connection was lost: its READs may still be under way and are stopped. The payloads stay
// for other claims.
func (s *Store) Drop(owner string) {
	if owner == "" {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.owners[owner] {
		s.lapse(c)
	}
}

// lapse ends a claim that its reader did not end. With the lock.
func (s *Store) lapse(c *claim) {
	s.stats.Lapsed++
	c.p.keepForRetry()
	if c.p.end(c, false, !c.p.consumed()) {
		go s.withdraw(c.p, c) // s.tasks has it
	}
}

// Watch gives a channel that is closed at the next Put or Abort of the key, or when the store closes; ask again with Claim then. stop
// ends the watching, and must be called. Watch before Claim, so that nothing between them is missed.
func (s *Store) Watch(key string) (changed <-chan struct{}, stop func()) {
	ch := make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	return ch, s.await(key, func() { close(ch) })
}

// await calls wake once, at the next Put or Abort of the key or when the store closes. wake is called with the lock. stop ends that,
// and must be called, also after wake was; without the lock. With the lock.
func (s *Store) await(key string, wake func()) (stop func()) {
	if s.watchers[key] == nil {
		s.watchers[key] = make(map[*func()]struct{})
	}
	s.watchers[key][&wake] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if delete(s.watchers[key], &wake); len(s.watchers[key]) == 0 {
			delete(s.watchers, key)
		}
	}
}

// notify wakes who watches the key. With the lock.
func (s *Store) notify(key string) {
	for wake := range s.watchers[key] {
		(*wake)()
	}
	delete(s.watchers, key)
}
