package stage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// firstRetry is the pause before a claim's end is tried again; it doubles up to longPause.
const firstRetry = 10 * time.Millisecond

// maxReason is how much of an error a producer is told, in bytes.
const maxReason = 256

// tell ends a claim at a producer of ours without waiting for the answer. If it cannot be sent the connection is lost, and the claim
// has ended with that.
func (gr granted) tell(op wire.Op, reason string) {
	_ = (&call{s: gr.s}).send(gr.request(op, reason))
}

// stands says that a claim at a producer of ours has not ended by itself: its connection is up, and its time, which began after it was
// asked for, is not over. A producer's Margin is for clocks that differ.
func (gr granted) stands() bool {
	f := gr.m.Ferry
	if gr.s == nil || f == nil || time.Since(gr.asked) >= time.Duration(f.LeaseMS)*time.Millisecond {
		return false
	}
	e := gr.s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	return gr.s.up && !gr.s.closed
}

// request is that which ends the claim at a producer of ours.
func (gr granted) request(op wire.Op, reason string) wire.Request {
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	return wire.Request{Op: op, Key: gr.key, Generation: gr.m.Generation, Claim: gr.claim, Ferry: &wire.FerryRequest{Reason: reason}}
}

// done ends the claim of a payload that was got, with nothing more to wait for.
func (g *get) done(gr granted) { g.finish(gr, wire.Done, "", nil) }

// giveBack ends the claim of a payload that was not got.
func (g *get) giveBack(gr granted, reason string) { g.finish(gr, wire.Fail, reason, nil) }

// finish ends a claim. idle, if not nil, is closed when no READ under the claim writes any more: it ends then, not before. A plain
// producer knows done only.
func (g *get) finish(gr granted, op wire.Op, reason string, idle <-chan struct{}) {
	c := g.c
	if idle != nil {
		select {
		case <-idle:
			idle = nil
		default:
		}
	}
	switch {
	case gr.claim.IsZero(): // legacy
	case gr.s == nil:
		c.endClaim(ending{e: g.e, key: gr.key, generation: gr.m.Generation, claim: gr.claim, after: idle})
	case idle == nil:
		gr.tell(op, reason)
		g.e.release(gr.s)
	default:
		c.background(func() {
			select {
			case <-idle:
				gr.tell(op, reason)
			case <-c.ctx.Done(): // closing the connection ends the claim
			}
			g.e.release(gr.s)
		})
	}
}

// ending is a claim to be ended by a done, at a producer that is plain or that nobody knows.
type ending struct {
	e          *endpoint
	key        string
	generation wire.ID // that was granted, or with recover the wanted one
	claim      wire.ID
	// recover: the claim may have been granted in an answer that was lost. It is asked for again, only to be ended.
	recover bool
	after   <-chan struct{} // closed when no READ under the claim writes any more; nil: none does
}

// endClaim ends a claim in the background.
func (c *Client) endClaim(x ending) {
	started := c.background(func() {
		if x.after != nil {
			select {
			case <-x.after:
			case <-c.ctx.Done():
				c.gaveUp(x, c.ctx.Err())
				return
			}
		}
		if n := c.stats.endings.Add(1); n > maxEndings {
			c.stats.endings.Add(-1)
			c.gaveUp(x, fmt.Errorf("%d others are being ended", n-1))
			return
		}
		defer c.stats.endings.Add(-1)
		ctx, cancel := context.WithTimeout(c.ctx, answersToEnd*c.o.Answer)
		defer cancel()
		e := c.endpointAt(x.e.addr)
		defer c.leave(e)
		if err := x.run(ctx, e); err != nil {
			c.gaveUp(x, err)
		}
	})
	if !started {
		c.gaveUp(x, ErrClosing)
	}
}

// background runs f on a goroutine that Close waits for. It is false after Close.
func (c *Client) background(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return false
	}
	c.work.add()
	c.tasks.Go(func() {
		defer c.work.done()
		f()
	})
	return true
}

func (c *Client) gaveUp(x ending, err error) {
	c.stats.givenUp.Add(1)
	c.endLog.Warn(c.o.Log, "a claim could not be ended; a plain producer keeps its payload until it is closed",
		"producer", x.e.addr, "key", clip(x.key), "claim", x.claim.String(), "error", err)
}

// errNotEnded says that an answer did not end the claim.
var errNotEnded = errors.New("stage: not the answer to that")

// run tries until ctx is done.
func (x ending) run(ctx context.Context, e *endpoint) error {
	if x.recover {
		e.c.stats.recoveries.Add(1)
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for pause := firstRetry; ; pause = min(2*pause, longPause) {
		over, err := x.step(ctx, e, timer)
		if over {
			return nil
		}
		timer.Reset(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w", ctx.Err(), err)
		}
	}
}

// step does one of recovering and ending, or both.
func (x *ending) step(ctx context.Context, e *endpoint, timer *time.Timer) (over bool, err error) {
	if x.recover {
		a, err := x.question(ctx, e, timer, wire.Get)
		if err != nil && a.generation.IsZero() {
			return false, err
		}
		if a.generation.IsZero() {
			e.release(a.call.s)
			return notGranted(a.reply.Status), errNotEnded
		}
		gr := a.granted()
		if gr.s != nil {
			gr.tell(wire.Fail, "not waited for")
			e.release(gr.s)
			return true, nil
		}
		e.release(a.call.s)
		x.generation, x.recover = a.generation, false
	}
	a, err := x.question(ctx, e, timer, wire.Done)
	if err != nil {
		return false, err
	}
	e.release(a.call.s)
	return a.reply.Status == wire.Acked, errNotEnded
}

// notGranted is true for what says that nothing is claimed.
func notGranted(s wire.Status) bool {
	return s == wire.NotFound || s == wire.Failed || s == wire.Closing || s == wire.GeometryMismatch
}

// question asks once. Without an error, or with a generation, the session is the caller's to release.
func (x *ending) question(ctx context.Context, e *endpoint, timer *time.Timer, op wire.Op) (answer, error) {
	l := e.acquire(ctx, nil, true)
	if l.err != nil {
		return answer{}, l.err
	}
	q := &call{s: l.s, box: make(chan answer, 1)}
	err := q.send(wire.Request{Op: op, Key: x.key, Generation: x.generation, Claim: x.claim, Ferry: e.c.extension()})
	if err != nil {
		e.spend(l.s)
		return answer{}, err
	}
	timer.Reset(e.c.o.Answer)
	select {
	case a := <-q.box:
		if a.err != nil && a.generation.IsZero() {
			e.spend(l.s)
		}
		return a, a.err
	case <-timer.C:
		err = errNoAnswer
	case <-ctx.Done():
		err = ctx.Err()
	}
	if e.leaveOpen(q) == answeredCall {
		a := <-q.box
		if a.err != nil && a.generation.IsZero() {
			e.spend(l.s)
		}
		return a, a.err
	}
	return answer{}, err
}

// settle ends a claim at a producer of ours by Verify or Fail and waits for the answer. A Verify whose answer does not come is repeated
// over other connections, for Options.Answer at most. The error wraps ErrLost if the claim did not hold until then, also if nobody can
// tell.
func (gr granted) settle(ctx context.Context, stop <-chan struct{}, op wire.Op, reason string) error {
	e := gr.s.e
	first := &call{s: gr.s, box: make(chan answer, 1)}
	a, sent, err := first.exchange(ctx, stop, gr.request(op, reason))
	if sent && op == wire.Verify && errors.Is(err, errNoAnswer) {
		again, cancel := context.WithTimeout(ctx, e.c.o.Answer)
		a, err = gr.verifyAgain(again, stop)
		cancel()
	}
	switch {
	case err == nil && a.own && a.reply.Status == wire.Held:
		return nil
	case err == nil:
		err = fmt.Errorf("the answer is %v", a.reply.Status)
	case ctx.Err() != nil:
		return fmt.Errorf("stage: key %.64q was read and not verified by %s: %w", gr.key, e.addr, ctx.Err())
	case errors.Is(err, ErrClosing):
		return err
	}
	return fmt.Errorf("%w: key %.64q at %s: %w", ErrLost, gr.key, e.addr, err)
}

// verifyAgain asks over other connections whether a claim held until a Verify that may have been lost.
func (gr granted) verifyAgain(ctx context.Context, stop <-chan struct{}) (answer, error) {
	e := gr.s.e
	for {
		e.c.stats.reverified.Add(1)
		l := e.acquire(ctx, stop, false)
		if l.err != nil {
			return answer{}, l.err
		}
		a, _, err := (&call{s: l.s, box: make(chan answer, 1)}).exchange(ctx, stop, gr.request(wire.Verify, ""))
		if err == nil && (!a.own || a.reply.Status != wire.NotFound) || err != nil && !errors.Is(err, errNoAnswer) {
			return a, err
		}
		// The claim still is the other connection's, or this one was lost too.
		select {
		case <-time.After(firstRetry):
		case <-ctx.Done():
			return answer{}, ctx.Err()
		case <-stop:
			return answer{}, ErrClosing
		}
	}
}

// exchange asks, waits Options.Answer at most for the answer, and gives the session back. The error wraps errNoAnswer, or it is ctx's,
// ErrClosing, or one of an answer that cannot be used. sent is false if the question surely never left.
func (c *call) exchange(ctx context.Context, stop <-chan struct{}, q wire.Request) (_ answer, sent bool, err error) {
	s, e := c.s, c.s.e
	if err := c.send(q); err != nil {
		e.spend(s)
		return answer{}, false, err
	}
	timer := time.NewTimer(e.c.o.Answer)
	defer timer.Stop()
	came := false
	select {
	case a := <-c.box:
		return c.took(a)
	case <-timer.C:
		err = fmt.Errorf("%w: it did not say in %v", errNoAnswer, e.c.o.Answer)
		came = !c.drop()
	case <-ctx.Done():
		err = ctx.Err()
		came = e.leaveOpen(c) == answeredCall
	case <-stop:
		err = ErrClosing
		came = e.leaveOpen(c) == answeredCall
	}
	if came {
		return c.took(<-c.box)
	}
	return answer{}, true, err
}

// drop lets go of a question whose answer is overdue, and of its session: the connection ends, and with it what was claimed by it, when
// nobody else needs it. It is false if the answer has come after all.
func (c *call) drop() bool {
	s, e := c.s, c.s.e
	e.mu.Lock()
	if s.calls[c.try] != c {
		e.mu.Unlock()
		return false
	}
	s.forget(c)
	e.mu.Unlock()
	e.spend(s)
	return true
}

// took gives the session of an answer back.
func (c *call) took(a answer) (answer, bool, error) {
	if e := c.s.e; a.err != nil {
		e.spend(c.s)
	} else {
		e.release(c.s)
	}
	return a, true, a.err
}
