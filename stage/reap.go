package stage

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Times of withdrawals that fail. A rotation of a serving agent takes seconds.
const (
	withdrawTimeout = time.Minute
	retryFirst      = 100 * time.Millisecond
	retryMost       = 10 * time.Second
)

// withdraw ends the grant of a claim that ended, then releases the payload if it was the last. It tries until it succeeds or the
// store is closed, the first time in the caller's goroutine: memory that may still be read is never freed.
func (s *Store) withdraw(p *payload, c *claim) {
	try := func() error {
		if c.idle { // waits for nobody
			return p.memory.Withdraw(s.ctx, c.grant, true)
		}
		ctx, cancel := context.WithTimeout(s.ctx, withdrawTimeout)
		defer cancel()
		return p.memory.Withdraw(ctx, c.grant, false)
	}
	err := try()
	if err == nil {
		s.withdrawn(p)
		return
	}
	s.o.Log.Warn("a reader could not be stopped; its memory stays out of use", "key", p.key, "bytes", p.metadata.Size, "error", err)
	go s.tryAgain(p, try)
}

// tryAgain withdraws until it works or the store is closed.
func (s *Store) tryAgain(p *payload, try func() error) {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			s.tasks.Done()
			return
		}
		if try() == nil {
			s.withdrawn(p)
			return
		}
	}
}

// withdrawn ends what payload.end began.
func (s *Store) withdrawn(p *payload) {
	defer s.tasks.Done()
	s.mu.Lock()
	p.withdrawing--
	free := p.settle(nil)
	s.mu.Unlock()
	release(free)
}

// reapEvery is the least time between two looks at everything there is: a look is longer than a put, and each claim has an end of its own.
const reapEvery = time.Second

// lookAt makes sure that reap looks again at t, or up to reapEvery later. With the lock.
func (s *Store) lookAt(t time.Time) {
	if soonest := s.looked.Add(reapEvery); t.Before(soonest) {
		t = soonest
	}
	if !s.next.IsZero() && !t.Before(s.next) {
		return
	}
	s.next = t
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// reap ends leases and claims in time, until the store is closed. Nothing depends on it being punctual: Claim looks at leases itself.
func (s *Store) reap() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-s.wake:
		case <-timer.C:
			s.expire(time.Now())
		case <-s.ctx.Done():
			return
		}
		s.mu.Lock()
		wait := time.Hour
		if !s.next.IsZero() {
			wait = time.Until(s.next)
		}
		s.mu.Unlock()
		timer.Reset(max(wait, 0))
	}
}

// expire ends what is over, and notes when the next is.
func (s *Store) expire(now time.Time) {
	var free []*payload
	defer func() { release(free) }()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next, s.looked = time.Time{}, now
	for p := range s.live {
		for _, c := range p.claims {
			if now.Before(c.deadline) {
				s.lookAt(c.deadline)
				continue
			}
			s.o.Log.Warn("a reader never said that it was done", "key", p.key, "claim", c.id, "bytes", p.metadata.Size)
			s.lapse(c)
		}
		if len(p.claims) > 0 || p.retired {
			continue
		}
		if now.Before(p.leaseEnd) {
			s.lookAt(p.leaseEnd)
			continue
		}
		if !p.consumed() {
			s.o.Log.Info("a payload was not claimed in time", "key", p.key, "bytes", p.metadata.Size)
			s.stats.Expired++
		}
		free = p.retire(free, Expired)
	}
	s.forgetFailures(now)
	if next := s.verified.forget(now); !next.IsZero() {
		s.lookAt(next)
	}
}

// forgetFailures drops those whose time is over. With the lock.
func (s *Store) forgetFailures(now time.Time) {
	maps.DeleteFunc(s.failures, func(_ string, f failure) bool {
		if now.Before(f.until) {
			s.lookAt(f.until)
			return false
		}
		return true
	})
}

// Close refuses new puts and claims at once, releases what nobody claimed, and waits for the readers that have a claim until ctx is
// done. Those left are then stopped, within grace; what cannot be stopped is never released: ErrBusy names one. After Close
// the store does nothing any more. Later calls return nil at once.
func (s *Store) Close(ctx context.Context, grace time.Duration) error {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		return nil
	}
	s.closing = true
	var free []*payload
	for _, p := range s.payloads {
		if len(p.claims) == 0 {
			free = p.retire(free, Closed)
		}
	}
	for key := range s.watchers {
		s.notify(key)
	}
	s.mu.Unlock()
	release(free)

	if !s.wait(ctx) {
		s.mu.Lock()
		for p := range s.live {
			for _, c := range p.claims {
				s.lapse(c)
			}
		}
		s.mu.Unlock()
		stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		s.wait(stopping)
	}
	s.stop()
	s.tasks.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	var busy []string
	for p := range s.live {
		busy = append(busy, p.key)
	}
	if len(busy) > 0 {
		slices.Sort(busy)
		return fmt.Errorf("%w: %d payloads, such as %.64q", ErrBusy, len(busy), busy[0])
	}
	return nil
}

// wait is false if ctx ends before all memory is released.
func (s *Store) wait(ctx context.Context) bool {
	for {
		s.mu.Lock()
		idle, none := s.idle, len(s.live) == 0 && s.freeing == 0
		s.mu.Unlock()
		if none {
			return true
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return false
		}
	}
}
