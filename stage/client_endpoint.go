package stage

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// Bounds of connections that nobody has needed to set.
const (
	// plainConnections is how many a plain producer gets: each carries one question at a time.
	plainConnections = 4
	// maxConnections is how many there may be before idle ones are closed early. Each takes about five descriptors.
	maxConnections = 128
	// idleFor is how long a connection is kept unused.
	idleFor = 30 * time.Second
	// redialAfter is how soon after a failed attempt a get that does not wait makes another.
	redialAfter = 100 * time.Millisecond
	// localAgain is how long the local socket of a producer is left alone after it could not be reached.
	localAgain = 10 * time.Second
)

// speaks says what an endpoint answers with. It is not known before the first answer, nor after a connection was lost: another
// producer may be there then.
type speaks uint8

const (
	speaksUnknown speaks = iota
	speaksPlain          // one question at a time on a connection, answers in order
	speaksOwn            // any number of questions on one connection, answers by number
)

// endpoint is where a producer answers claims, and the connections to it. One of our own has one connection, which all gets share.
// The connections to a plain one are each lent to one get for one question; until it is known which it is there is one, lent too.
//
// Lock order: Client.mu, then endpoint.mu, then tally.mu. The control goroutine takes endpoint.mu.
type endpoint struct {
	c     *Client
	addr  string
	users int // gets and endings; under Client.mu

	mu       sync.Mutex
	closed   bool
	speaks   speaks
	sessions map[*session]struct{} // all that are not closed
	own      *session              // shared
	free     []*session            // to lend; the last one was used last
	lent     int
	probe    *session // being connected, or down and trying again
	waiters  []*waiter

	downErr error // of the probe
	downAt  time.Time

	local       string // the producer's local socket, "" if none is known
	localFailed time.Time
}

// waiter waits for a session.
type waiter struct {
	ch   chan lease // takes one
	wait bool       // for a producer that is not there yet
}

// lease is a session that was given to a waiter, or why not.
type lease struct {
	s      *session
	shared bool // with others; the producer is one of ours
	err    error
}

func newEndpoint(c *Client, addr string) *endpoint {
	return &endpoint{c: c, addr: addr, sessions: map[*session]struct{}{}}
}

// connected says whether somebody can be asked without dialling.
func (e *endpoint) connected() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.own != nil || len(e.free) > 0
}

// acquire gives a connection that stands, until release or spend. wait says that a producer which is not there is waited for, until
// ctx is done or stop is closed; otherwise the error wraps ErrUnreachable.
func (e *endpoint) acquire(ctx context.Context, stop <-chan struct{}, wait bool) lease {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return lease{err: ErrClosing}
	}
	if s := e.own; s != nil {
		s.refs++
		e.mu.Unlock()
		return lease{s: s, shared: true}
	}
	if e.probe != nil && e.probe.down && !wait {
		if time.Since(e.downAt) < redialAfter {
			err := e.unreachable()
			e.mu.Unlock()
			return lease{err: err}
		}
		e.drop(e.probe) // its own next attempt may be seconds away
	}
	w := &waiter{ch: make(chan lease, 1), wait: wait}
	e.waiters = append(e.waiters, w)
	e.pump()
	e.mu.Unlock()

	select {
	case l := <-w.ch:
		return l
	case <-ctx.Done():
		return lease{err: e.forsake(w, ctx.Err())}
	case <-stop:
		return lease{err: e.forsake(w, ErrClosing)}
	}
}

// forsake takes a waiter back, and with it what it was given meanwhile. It gives err, or, if that came first, why there was no session.
func (e *endpoint) forsake(w *waiter, err error) error {
	e.mu.Lock()
	i := slices.Index(e.waiters, w)
	if i >= 0 {
		e.waiters = slices.Delete(e.waiters, i, i+1)
		if e.probe != nil && len(e.sessions) == 1 {
			err = fmt.Errorf("%w: %w", e.unreachable(), err)
		}
		e.mu.Unlock()
		return err
	}
	e.mu.Unlock()
	if l := <-w.ch; l.s != nil {
		e.release(l.s)
	} else {
		err = l.err
	}
	return err
}

// unreachable says why there is no connection. With the lock.
func (e *endpoint) unreachable() error {
	if e.downErr == nil {
		return fmt.Errorf("%w: still connecting to %s", ErrUnreachable, e.addr)
	}
	return fmt.Errorf("%w: %w", ErrUnreachable, e.downErr)
}

// pump gives sessions to waiters, and makes another if there is none for the first. With the lock.
func (e *endpoint) pump() {
	for len(e.waiters) > 0 {
		var s *session
		if n := len(e.free); e.own != nil {
			s = e.own
			s.refs++
		} else if n > 0 {
			s = e.free[n-1]
			e.free = slices.Delete(e.free, n-1, n)
			e.lent++
		} else {
			e.connect()
			return
		}
		w := e.waiters[0]
		e.waiters = slices.Delete(e.waiters, 0, 1)
		w.ch <- lease{s: s, shared: s.shared}
	}
}

// refuse answers waiters with err: all of them, or those only that do not wait for a producer. With the lock.
func (e *endpoint) refuse(err error, all bool) {
	e.waiters = slices.DeleteFunc(e.waiters, func(w *waiter) bool {
		if w.wait && !all {
			return false
		}
		w.ch <- lease{err: err}
		return true
	})
}

// connect begins a connection, if one more may be made. With the lock.
func (e *endpoint) connect() {
	limit := 1
	if e.speaks == speaksPlain {
		limit = plainConnections
	}
	if e.closed || e.probe != nil || e.lent >= limit {
		return
	}
	if e.local != "" && time.Since(e.localFailed) > localAgain {
		e.connectLocal()
		return
	}
	s := e.newSession()
	e.probe = s
	d, err := e.c.o.Loop.Dial(e.c.ctx, e.addr, s)
	if err != nil { // the loop has ended
		e.downErr, e.downAt = err, time.Now()
		e.drop(s)
		e.refuse(e.unreachable(), true)
		return
	}
	s.conn = d
}

// connectLocal does so by the producer's local socket. Dialling that waits for the control goroutine, which may wait for the lock. With
// the lock.
func (e *endpoint) connectLocal() {
	s, name := e.newSession(), e.local
	s.local = true
	e.probe = s
	e.c.tasks.Go(func() {
		d, err := e.c.o.Loop.DialLocal(e.c.ctx, name, s)
		if err != nil {
			s.Down(err)
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		if s.closed {
			_ = d.Close()
			return
		}
		s.conn = d
		e.stands(s)
	})
}

// learn takes in what an own producer says of itself: that it has a local socket is worth a try.
func (e *endpoint) learn(f *wire.FerryMetadata) {
	if f.Local == "" {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if f.Local != e.local {
		e.local, e.localFailed = f.Local, time.Time{}
	}
	if e.own != nil && !e.own.local && e.probe == nil && !e.closed && time.Since(e.localFailed) > localAgain {
		e.connectLocal()
	}
}

func (e *endpoint) newSession() *session {
	s := &session{e: e, calls: map[uint64]*call{}, since: time.Now()}
	e.sessions[s] = struct{}{}
	e.c.stats.connections.Add(1)
	return s
}

// stands puts a connection to use that was being made, once it is up and known. With the lock.
func (e *endpoint) stands(s *session) {
	if !s.up || s.conn == nil || e.probe != s {
		return
	}
	e.probe, e.downErr = nil, nil
	s.since = time.Now()
	if s.local {
		e.share(s)
	} else if e.speaks == speaksOwn {
		e.drop(s) // one was made meanwhile
	} else {
		e.free = append(e.free, s)
	}
	e.pump()
}

// share makes s the connection of all gets: its producer is one of ours. Unless it is the local one it is lent to the get that is
// about to hear of it. With the lock.
func (e *endpoint) share(s *session) {
	s.shared = true
	if !s.local {
		e.lent--
		s.refs++
	}
	before := e.own
	if before != nil && before.local {
		return // this one goes when it is given back
	}
	e.own, e.speaks = s, speaksOwn
	if before != nil {
		e.settle(before)
	}
	for len(e.free) > 0 {
		e.drop(e.free[0])
	}
	e.pump()
}

// answers takes note of who answered on s: the producer is one of ours, or plain. With the lock.
func (e *endpoint) answers(s *session, ours bool) {
	switch {
	case s.shared:
	case ours:
		e.share(s)
	case e.speaks == speaksUnknown:
		e.speaks = speaksPlain
		e.pump()
	}
}

// release gives back what acquire gave, after the answer or the end of the claim.
func (e *endpoint) release(s *session) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s.since = time.Now()
	switch {
	case s.shared:
		s.refs--
		e.settle(s)
	case s.closed:
		e.lent--
	case e.speaks == speaksOwn: // one too many
		e.lent--
		e.drop(s)
	default:
		e.lent--
		e.free = append(e.free, s)
	}
	e.pump()
}

// What became of a call that is not waited for any more.
const (
	answeredCall = iota // its answer is in the box
	orphanedCall        // its answer will be looked at, and what it grants given back
	lostCall            // it has no answer
)

// leaveOpen says that nobody waits for the answer of c, and gives its session back.
func (e *endpoint) leaveOpen(c *call) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := c.s
	switch {
	case s.calls[c.try] != c:
		return answeredCall
	case s.shared:
		c.box = nil
		e.c.work.add()
		if c.held > 0 {
			e.mu.Unlock()
			c.hurry()
			e.mu.Lock()
		}
		s.refs--
		return orphanedCall
	}
	// The next answer on this connection would be taken for that of another question.
	s.forget(c)
	e.lent--
	e.drop(s)
	e.pump()
	return lostCall
}

// overdue says that the answer of c did not come in time: the next question goes over another connection. On one that others use
// too the answer is still waited for.
func (e *endpoint) overdue(c *call) int {
	e.mu.Lock()
	if c.s.calls[c.try] == c && c.s.shared {
		e.retire(c.s)
		e.mu.Unlock()
		return orphanedCall
	}
	e.mu.Unlock()
	return e.leaveOpen(c)
}

// spend gives back a connection that is not to be used for anything new: an answer on it is overdue, or made no sense. It is closed
// when no claim needs it.
func (e *endpoint) spend(s *session) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.shared {
		e.retire(s)
		s.refs--
		e.settle(s)
	} else {
		e.lent--
		e.drop(s)
	}
	e.pump()
}

// retire makes the next get use another connection than s. With the lock.
func (e *endpoint) retire(s *session) {
	if e.own == s {
		e.own, e.speaks = nil, speaksUnknown
	}
}

// settle closes a shared connection that is neither wanted nor used. With the lock.
func (e *endpoint) settle(s *session) {
	if s.shared && s != e.own && s.refs == 0 && len(s.calls) == 0 {
		e.drop(s)
	}
}

// drop closes a connection; questions on it stay without an answer. With the lock.
func (e *endpoint) drop(s *session) {
	if s.closed {
		return
	}
	s.closed = true
	delete(e.sessions, s)
	e.c.stats.connections.Add(-1)
	e.retire(s)
	if e.probe == s {
		e.probe = nil
	}
	if i := slices.Index(e.free, s); i >= 0 {
		e.free = slices.Delete(e.free, i, i+1)
	}
	if s.conn != nil {
		_ = s.conn.Close()
	}
	s.abandon()
}

// rest is called when nobody uses the endpoint: a producer that is not there need not be tried again and again.
func (e *endpoint) rest() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.probe != nil && len(e.waiters) == 0 && e.probe.down {
		e.drop(e.probe)
	}
}

func (e *endpoint) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for s := range e.sessions {
		e.drop(s)
	}
	e.refuse(ErrClosing, true)
}

// idle lists the connections that nobody uses. With the lock.
func (e *endpoint) idle() []*session {
	v := slices.Clone(e.free)
	if s := e.own; s != nil && s.refs == 0 && len(s.calls) == 0 {
		v = append(v, s)
	}
	return v
}

// sweepLater arranges for the next look at idle connections. With Client.mu.
func (c *Client) sweepLater() {
	if c.sweep == nil {
		c.sweep = time.AfterFunc(idleFor/2, c.sweepIdle)
	} else if len(c.endpoints) == 1 {
		c.sweep.Reset(idleFor / 2)
	}
}

// sweepIdle closes connections that were not used for a while, forgets endpoints without any, and gives up answers that never come.
func (c *Client) sweepIdle() {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr, e := range c.endpoints {
		e.mu.Lock()
		for _, s := range e.idle() {
			if now.Sub(s.since) >= idleFor {
				e.drop(s)
			}
		}
		if e.users == 0 && e.probe != nil {
			e.drop(e.probe)
		}
		for s := range e.sessions {
			s.giveUp(now.Add(-answersToEnd * c.o.Answer))
		}
		if e.users == 0 && len(e.sessions) == 0 {
			e.closed = true
			delete(c.endpoints, addr)
		}
		e.mu.Unlock()
	}
	if len(c.endpoints) > 0 && !c.closing {
		c.sweep.Reset(idleFor / 2)
	}
}

// trim closes the idle connections that were used longest ago, down to half of maxConnections.
func (c *Client) trim() {
	c.mu.Lock()
	defer c.mu.Unlock()
	type candidate struct {
		s     *session
		since time.Time
	}
	var all []candidate
	for _, e := range c.endpoints {
		e.mu.Lock()
		for _, s := range e.idle() {
			all = append(all, candidate{s, s.since})
		}
		e.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.since.UnixNano(), b.since.UnixNano()) })
	for _, v := range all {
		if c.stats.connections.Load() <= maxConnections/2 {
			return
		}
		e := v.s.e
		e.mu.Lock()
		if slices.Contains(e.idle(), v.s) {
			e.drop(v.s)
		}
		e.mu.Unlock()
	}
}
