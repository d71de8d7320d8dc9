package stage

import (
	"errors"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// parked is a get of an own reader that waits for its key to be put. It has a timer and a place in the store's list of watchers, no
// goroutine. It is in Server.waiting as long as it waits; whoever takes it out answers it, or lets it go.
type parked struct {
	from  control.Source
	c     Claim
	until time.Time   // zero if it does not wait
	timer *time.Timer // ends the waiting
	stop  func()      // ends the watching
}

func newParked(from control.Source, c Claim) *parked {
	w := &parked{from: from, c: c}
	if c.Ask != nil && c.Ask.WaitMS > 0 {
		w.until = time.Now().Add(time.Duration(c.Ask.WaitMS) * time.Millisecond)
	}
	return w
}

// claim claims for w, or parks it. With the lock: so a get is parked, claimed or neither for all others.
func (s *Server) claim(w *parked) (g *grant, waits bool, err error) {
	left := time.Until(w.until)
	full := s.waiters >= s.o.MaxWaiting || len(s.waiting[w.c.Owner]) >= max(1, s.o.MaxWaiting/waitingShare)
	var wake func()
	if left > 0 && !full && !s.closed {
		wake = func() { go s.woken(w) }
	}
	g, stop, err := s.store.begin(w.c, wake)
	if stop == nil {
		if left > 0 && full && errors.Is(err, ErrNotFound) {
			s.counts.waitRefused.Add(1)
		}
		return g, false, err
	}
	if s.waiting[w.c.Owner] == nil {
		s.waiting[w.c.Owner] = make(map[wire.ID]*parked)
	}
	s.waiting[w.c.Owner][w.c.ID] = w
	s.waiters++
	w.stop, w.timer = stop, time.AfterFunc(left, func() { s.late(w) })
	return nil, true, nil
}

// unpark takes w out of the list. It is false if it is not there; w may be nil. With the lock.
func (s *Server) unpark(w *parked) bool {
	if w == nil || s.waiting[w.c.Owner][w.c.ID] != w {
		return false
	}
	if delete(s.waiting[w.c.Owner], w.c.ID); len(s.waiting[w.c.Owner]) == 0 {
		delete(s.waiting, w.c.Owner)
	}
	s.waiters--
	w.timer.Stop()
	w.stop()
	return true
}

// unparkAll lets go of what waits on a connection. With the lock.
func (s *Server) unparkAll(conn string) {
	for _, w := range s.waiting[conn] {
		s.unpark(w)
	}
}

// woken tries again, after a put or an abort of the key, or when the store closes.
func (s *Server) woken(w *parked) {
	s.mu.Lock()
	if !s.unpark(w) {
		s.mu.Unlock()
		return
	}
	s.work.Add(1) // not closed: Close unparks all
	defer s.work.Done()
	g, waits, err := s.claim(w)
	s.mu.Unlock()
	switch {
	case g != nil:
		s.counts.woken.Add(1)
		s.grant(w.from, g)
	case !waits:
		s.refuse(w.from, w.c, err)
	}
}

// late answers a get whose time is over.
func (s *Server) late(w *parked) {
	s.mu.Lock()
	over := s.unpark(w)
	s.mu.Unlock()
	if over {
		s.refuse(w.from, w.c, ErrNotFound)
	}
}
