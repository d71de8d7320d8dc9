package stage

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// session is one connection to a producer. It implements control.DealerHandler. Guarded by endpoint.mu, except what is set once.
type session struct {
	e     *endpoint
	conn  control.Conn
	local bool // by the producer's local socket

	up     bool
	down   bool // of a probe: it tries again by itself
	closed bool
	shared bool      // by all gets; the producer is one of ours
	refs   int       // of a shared one: gets with a question or a claim on it
	since  time.Time // when it was used last

	tries uint64
	calls map[uint64]*call // questions without an answer, by number
}

// errNoAnswer is what a question ends with whose connection was lost.
var errNoAnswer = errors.New("stage: the connection was lost before the answer")

// call is one question. The first group is set by who asks.
type call struct {
	s    *session
	box  chan answer   // where its answer goes, which has room for it; nil: nobody waits, and the answer only ends it
	held time.Duration // how long the producer may hold its answer back
	due  time.Time

	op         wire.Op
	key        string
	generation wire.ID // that was wanted
	claim      wire.ID
	try        uint64
	sent       time.Time
}

// answer is what came of a call.
type answer struct {
	call       *call
	own        bool // of a producer of ours, as far as is known
	reply      *wire.Reply
	inline     [][]byte // the tensors, if they are in the reply
	err        error    // instead of a reply: the connection was lost (errNoAnswer), or the reply cannot be used
	generation wire.ID  // that was granted, the zero ID if none was; also if the reply cannot be used
}

// send asks. The error wraps errNoAnswer.
func (c *call) send(q wire.Request) error {
	s, e := c.s, c.s.e
	c.op, c.key, c.generation, c.claim, c.sent = q.Op, q.Key, q.Generation, q.Claim, time.Now()
	e.mu.Lock()
	if s.closed || !s.up {
		e.mu.Unlock()
		return errNoAnswer
	}
	s.tries++
	c.try = s.tries
	s.calls[c.try] = c
	if !s.shared && e.speaks == speaksPlain {
		q.Ferry = nil
	}
	if c.box == nil {
		e.c.work.add()
	}
	e.mu.Unlock()
	if q.Ferry != nil {
		q.Ferry.Try = c.try
	}
	send := s.conn.Send
	if q.Op == wire.Done {
		send = s.conn.SendSoon // the payload is here
	}
	err := send(wire.AppendRequest(nil, &q))
	if err == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.calls[c.try] != c {
		return nil // its end was told already
	}
	s.forget(c)
	return fmt.Errorf("%w: %w", errNoAnswer, err)
}

// hurry asks again, so that a producer which holds the answer of c back gives one now: it answers the last question of a claim only.
// Nobody waits for either.
func (c *call) hurry() {
	q := wire.Request{Op: wire.Get, Key: c.key, Generation: c.generation, Claim: c.claim, Ferry: c.s.e.c.extension()}
	if (&call{s: c.s}).send(q) != nil {
		return
	}
	e := c.s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.s.calls[c.try] == c {
		c.s.forget(c)
	}
}

// forget takes a call off the table. With the lock.
func (s *session) forget(c *call) {
	delete(s.calls, c.try)
	if c.box == nil {
		s.e.c.work.done()
	}
}

// Up implements control.DealerHandler.
func (s *session) Up() {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	if s.closed {
		return
	}
	s.up, s.down = true, false
	s.e.stands(s)
}

// Down implements control.DealerHandler.
func (s *session) Down(err error) {
	e := s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.closed {
		return
	}
	s.up = false
	switch {
	case e.probe == s && s.local:
		e.localFailed = time.Now()
		e.drop(s)
	case e.probe == s:
		s.down = true
		e.downErr, e.downAt = err, time.Now()
		e.refuse(e.unreachable(), false)
	default:
		if s.local {
			e.localFailed = time.Now()
		}
		if e.own == nil { // another producer may come
			e.speaks = speaksUnknown
		}
		e.drop(s)
	}
	e.pump()
}

// abandon tells all calls that there will be no answer. With the lock.
func (s *session) abandon() {
	for _, c := range s.calls {
		s.forget(c)
		if c.box != nil {
			c.box <- answer{call: c, own: s.shared, err: errNoAnswer}
		}
	}
}

// giveUp forgets calls that nobody waits for and that were sent before a time. The producer may hold a claim that only the end of the
// connection ends: it is not used for anything new. With the lock.
func (s *session) giveUp(before time.Time) {
	for _, c := range s.calls {
		if c.box != nil || !c.sent.Before(before) {
			continue
		}
		s.e.c.stats.givenUp.Add(1)
		s.forget(c)
		s.e.retire(s)
	}
	s.e.settle(s)
}

// Message implements control.DealerHandler.
func (s *session) Message(body []byte) {
	e := s.e
	a := answer{}
	a.reply, a.err = wire.DecodeReply(body)
	var claim wire.ID
	if a.err != nil {
		a.generation, claim = wire.PeekClaim(body)
	} else if m := a.reply.Metadata; m != nil {
		a.generation, claim = m.Generation, m.Claim
		a.inline = inlineTensors(m)
	}

	e.mu.Lock()
	if s.closed {
		e.mu.Unlock()
		return
	}
	c := s.match(a.reply, claim)
	if c == nil && a.err == nil && s.shared && a.reply.Try > 0 && a.reply.Try <= s.tries {
		e.mu.Unlock()
		e.c.stats.late.Add(1) // the question was given up, or asked again in its place
		return
	}
	if c == nil {
		e.mu.Unlock()
		e.c.bad(e.addr, "an answer to no question was dropped", len(body), a.err)
		return
	}
	if a.err == nil {
		e.answers(s, a.reply.Try != 0 || a.reply.Metadata != nil && a.reply.Metadata.Ferry != nil)
	}
	a.call, a.own = c, s.shared
	if c.box != nil {
		s.forget(c)
		c.box <- a // it has room for the answer of every call
		e.mu.Unlock()
		return
	}
	if c.op == wire.Get && !a.generation.IsZero() {
		e.mu.Unlock()
		e.c.stats.late.Add(1)
		a.granted().tell(wire.Fail, "late")
		e.mu.Lock()
	}
	if s.calls[c.try] == c {
		s.forget(c)
	}
	e.settle(s)
	e.mu.Unlock()
}

// match finds the question that a reply answers. With the lock.
func (s *session) match(r *wire.Reply, claim wire.ID) *call {
	if r != nil && r.Try != 0 {
		return s.calls[r.Try]
	}
	for _, c := range s.calls {
		// A session that is lent has one question. An answer of ours without a number is one that cannot be read.
		if !s.shared || c.op == wire.Get && c.claim == claim && !claim.IsZero() {
			return c
		}
	}
	return nil
}

// inlineTensors copies the bytes that are in a reply: each tensor begins where it may be read as any dtype. Nil if they are not in it.
func inlineTensors(m *wire.Metadata) [][]byte {
	if m.Size > 0 && (m.Ferry == nil || m.Ferry.Inline == nil) {
		return nil
	}
	tensors := make([][]byte, len(m.Specs))
	if m.Size == 0 {
		return tensors
	}
	room := int64(0)
	for i := range m.Specs {
		room += (m.Specs[i].Size + slab.Align - 1) &^ (slab.Align - 1)
	}
	memory, from := alignedBytes(room), m.Ferry.Inline
	for i := range m.Specs {
		n := m.Specs[i].Size
		copy(memory, from[:n])
		tensors[i] = memory[:n:n]
		memory, from = memory[(n+slab.Align-1)&^(slab.Align-1):], from[n:]
	}
	m.Ferry.Inline = nil // it is a view over the frame
	return tensors
}

// alignedBytes makes n bytes that begin at a multiple of slab.Align.
func alignedBytes(n int64) []byte {
	b := make([]byte, n+slab.Align-1)
	off := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (slab.Align - 1)
	return b[off : int64(off)+n]
}

// bad counts an answer that makes no sense, and says so now and then.
func (c *Client) bad(addr, what string, bytes int, err error) {
	c.stats.bad.Add(1)
	c.badLog.Warn(c.o.Log, what, "producer", addr, "bytes", bytes, "error", err)
}
