package stage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Bounds of a get that nobody has needed to set.
const (
	maxTries    = 2                      // of a whole get, where the first was spoilt
	maxOpen     = 4                      // questions without an answer; beyond, the answer of the oldest is not waited for
	maxBad      = 3                      // answers that make no sense
	leastWait   = 50 * time.Millisecond  // for an answer: it takes that long on a busy machine
	longestHeld = 10 * time.Second       // that a producer of ours is asked to hold an answer back
	longPause   = 500 * time.Millisecond // between questions to one that does not
)

// get is one call of Client.Get, on the caller's goroutine.
type get struct {
	c          *Client
	e          *endpoint
	r          *Request
	generation wire.ID // that is wanted; the zero ID is any
	deadline   time.Time
	timer      *time.Timer

	claim   wire.ID  // of this try
	owner   *session // of ours that was asked for it; such a claim belongs to its connection
	box     chan answer
	open    []*call // asked, and the answer not taken out of the box
	unsure  bool    // a plain producer may have granted the claim in an answer that was lost
	bad     int
	pause   time.Duration
	lastErr error // why there is no payload yet
}

// granted is a claim, to be ended.
type granted struct {
	key    string
	m      *wire.Metadata // of one that cannot be used only Generation
	claim  wire.ID
	s      *session // of an own producer; nil: plain, or nobody's
	inline [][]byte // the tensors, if they came with the claim
	asked  time.Time
}

func newGet(c *Client, e *endpoint, r *Request, h *wire.Handoff, deadline time.Time) *get {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &get{c: c, e: e, r: r, generation: h.Generation, deadline: deadline, timer: t, box: make(chan answer, maxOpen)}
}

func (g *get) run(ctx context.Context) (*Got, error) {
	for try := 1; ; try++ {
		got, err := g.once(ctx)
		var anew againError
		if err == nil || !errors.As(err, &anew) {
			return got, err
		}
		if try == maxTries || ctx.Err() != nil || g.c.stopping.Err() != nil {
			return nil, err
		}
		g.c.stats.retries.Add(1)
	}
}

// once claims, reads, and ends the claim.
func (g *get) once(ctx context.Context) (*Got, error) {
	gr, err := g.ask(ctx)
	if err != nil {
		return nil, err
	}
	if gr.inline != nil {
		return g.takeInline(gr)
	}
	if g.r.InPlace && gr.s != nil {
		got, err := g.view(ctx, gr)
		if got != nil || err != nil {
			return got, err
		}
	}
	return g.read(ctx, gr)
}

// end is what remains to be done when the get is over, however it ended: what an outstanding answer may grant is given back.
func (g *get) end() {
	g.timer.Stop()
	g.settleOpen()
	if g.unsure {
		g.c.endClaim(ending{e: g.e, key: g.r.Key, generation: g.generation, claim: g.claim, recover: true})
	}
}

// settleOpen lets go of the questions that have no answer yet, and of what came meanwhile.
func (g *get) settleOpen() {
	answered := 0
	for _, c := range g.open {
		switch g.e.leaveOpen(c) {
		case answeredCall:
			answered++
		case lostCall:
			g.unsure = g.unsure || c.op == wire.Get
		}
	}
	g.open = g.open[:0]
	for range answered {
		g.discard(<-g.box)
	}
}

// discard lets go of an answer that is not needed.
func (g *get) discard(a answer) {
	if a.call.op == wire.Stat || a.generation.IsZero() {
		g.unsure = g.unsure || a.mayHaveGranted() && errors.Is(a.err, errNoAnswer)
		g.e.release(a.call.s)
		return
	}
	g.c.stats.late.Add(1)
	g.refuse(a, "late")
}

// refuse gives back what an answer granted.
func (g *get) refuse(a answer, reason string) {
	gr := a.granted()
	if gr.s == nil {
		g.e.release(a.call.s)
	}
	g.giveBack(gr, reason)
}

// ask claims the payload: it repeats the question until an answer settles it.
func (g *get) ask(ctx context.Context) (granted, error) {
	g.claim, g.owner = wire.NewID(), nil
	var asked *call
	for wait := time.Duration(0); ; {
		if asked == nil && wait == 0 {
			var err error
			if asked, err = g.question(ctx); err != nil {
				return granted{}, g.failed(err)
			}
		}
		if asked != nil {
			wait = max(time.Until(asked.due), 1)
		}
		g.timer.Reset(wait)
		select {
		case a := <-g.box:
			if gr, err := g.take(a); err != nil || gr.m != nil {
				return gr, err
			}
			if a.call == asked {
				asked, wait = nil, g.pause
			}
		case <-g.timer.C:
			wait = 0
			if asked != nil && g.overdue(asked) {
				asked = nil
			}
		case <-ctx.Done():
			return granted{}, g.failed(ctx.Err())
		case <-g.c.stopping.Done():
			return granted{}, g.failed(ErrClosing)
		}
	}
}

// question asks for the claim. An error is final.
func (g *get) question(ctx context.Context) (*call, error) {
	for {
		l := g.e.acquire(ctx, g.c.stopping.Done(), g.r.Wait)
		if l.err != nil {
			return nil, l.err
		}
		if g.owner != nil && g.owner != l.s {
			g.claim = wire.NewID() // the other one belongs to the connection before
		}
		if g.owner = nil; l.shared {
			g.owner = l.s
		}
		left := time.Until(g.deadline)
		f := g.c.extension()
		f.Sum = true
		if !g.r.InPlace && !g.r.AllOnDevice {
			if f.Inline = g.c.o.Inline; l.s.local {
				f.Inline = g.c.o.inlineLocal
			}
		}
		// That a shared connection is lost heartbeats tell. It is not given up for a get that has little time.
		held, patience := time.Duration(0), g.c.o.Answer
		if !l.shared {
			patience = max(min(patience, left/2), leastWait)
		} else if g.r.Wait {
			held = max(min(left, longestHeld), 0).Truncate(time.Millisecond)
			f.WaitMS = held.Milliseconds()
		}
		if len(g.open) == maxOpen {
			g.forgetOldest()
		}
		// A plain producer's payload is used up by the end of a claim. Without a plane to it nothing is claimed before it is known to be
		// one of ours, which answers as such.
		op := wire.Get
		if !l.shared && !g.c.readsPlain {
			op = wire.Stat
		}
		g.c.stats.questions.Add(1)
		c := &call{s: l.s, box: g.box, held: held, due: time.Now().Add(held + patience)}
		err := c.send(wire.Request{Op: op, Key: g.r.Key, Generation: g.generation, Claim: g.claim, Ferry: f})
		if err == nil {
			g.open = append(g.open, c)
			return c, nil
		}
		g.e.spend(l.s)
		if !g.r.Wait {
			return nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
		}
		if err := g.sleep(ctx, g.c.o.Query); err != nil {
			return nil, err
		}
	}
}

// extension says to a producer of ours who asks, and by which planes its offer can be read.
func (c *Client) extension() *wire.FerryRequest {
	return &wire.FerryRequest{Node: c.o.Node, Planes: c.planes}
}

func (g *get) sleep(ctx context.Context, d time.Duration) error {
	g.timer.Reset(d)
	select {
	case <-g.timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-g.c.stopping.Done():
		return ErrClosing
	}
}

// overdue is the end of the wait for an answer. It is false if the answer has come after all.
func (g *get) overdue(c *call) bool {
	switch g.e.overdue(c) {
	case answeredCall:
		return false
	case lostCall:
		g.unsure = g.unsure || c.op == wire.Get
		g.forget(c)
	}
	g.c.stats.timeouts.Add(1)
	g.lastErr = fmt.Errorf("no answer from %s", g.e.addr)
	return true
}

func (g *get) forget(c *call) {
	g.open = slices.DeleteFunc(g.open, func(o *call) bool { return o == c })
}

// forgetOldest makes room in the box for one more answer. All open questions are those to producers of ours: to others there is one.
func (g *get) forgetOldest() {
	c := g.open[0]
	if g.e.leaveOpen(c) == answeredCall {
		a := <-g.box // if not its own that of another, which is as old
		c = a.call
		g.discard(a)
	}
	g.forget(c)
}

// take looks at an answer. It gives the claim, or an error that ends the get, or neither.
func (g *get) take(a answer) (granted, error) {
	g.forget(a.call)
	s := a.call.s
	switch {
	case a.err == nil:
	case errors.Is(a.err, errNoAnswer):
		g.e.release(s)
		g.unsure = g.unsure || a.mayHaveGranted()
		g.pause, g.lastErr = 0, fmt.Errorf("%w: %w", ErrUnreachable, a.err)
		return granted{}, nil
	default:
		// What cannot be used may have been granted all the same.
		g.unsure = a.mayHaveGranted()
		if g.unsure || a.call.op == wire.Stat {
			g.e.release(s)
		} else {
			g.refuse(a, a.err.Error())
		}
		return granted{}, fmt.Errorf("stage: what %s answered for key %.64q: %w", g.e.addr, g.r.Key, a.err)
	}

	if a.call.op == wire.Stat {
		return granted{}, g.met(a)
	}
	unsure := g.unsure
	g.unsure = false // this is the answer to all that was asked under this claim
	switch a.reply.Status {
	case wire.Found:
		return g.found(a)
	case wire.NotFound:
		g.e.release(s)
		if a.own && unsure {
			// A connection before had this claim, which then is another reader's until that connection has ended.
			g.claim, g.pause = wire.NewID(), 0
			return granted{}, nil
		}
		return granted{}, g.notFound(a)
	case wire.Failed:
		g.e.release(s)
		return granted{}, &FailedError{g.r.Key, a.reply.Reason}
	case wire.Closing:
		g.e.release(s)
		return granted{}, fmt.Errorf("%w: the producer %s", ErrClosing, g.e.addr)
	case wire.GeometryMismatch:
		g.e.release(s)
		return granted{}, fmt.Errorf("%w: %s has a paged payload under key %.64q", wire.ErrSchema, g.e.addr, g.r.Key)
	}
	return granted{}, g.nonsense(a, "status "+a.reply.Status.String())
}

// met looks at who answered a question that claims nothing: the claim follows at a producer of ours. A plain one gives an error.
func (g *get) met(a answer) error {
	g.e.release(a.call.s)
	g.pause = 0
	if a.own {
		if a.reply.Status == wire.NotFound {
			g.lastErr = g.absent()
		}
		return nil
	}
	return g.failed(fmt.Errorf("%w: this one needs %s, here are %s; nothing was taken", slab.ErrNoPlane, transfer.NIXL, strings.Join(g.c.planes, ", ")))
}

func (g *get) absent() error {
	return fmt.Errorf("%w: key %.64q at %s", ErrNotFound, g.r.Key, g.e.addr)
}

// mayHaveGranted is true of an answer that does not say whether it grants a claim, which then only a done ends.
func (a *answer) mayHaveGranted() bool {
	return !a.own && a.generation.IsZero() && a.call.op == wire.Get
}

// found checks that what was granted is what was asked for.
func (g *get) found(a answer) (granted, error) {
	m := a.reply.Metadata
	switch {
	case m.Claim != a.call.claim:
		return granted{}, g.nonsense(a, "another claim")
	case m.Legacy, !g.generation.IsZero() && m.Generation != g.generation:
		return granted{}, g.nonsense(a, "another generation")
	}
	g.settleOpen()
	gr := a.granted()
	if gr.s == nil {
		g.e.release(a.call.s)
	} else if m.Ferry != nil {
		g.e.learn(m.Ferry)
	}
	return gr, nil
}

// granted is the claim that an answer grants.
func (a *answer) granted() granted {
	gr := granted{key: a.call.key, claim: a.call.claim, inline: a.inline, asked: a.call.sent, m: &wire.Metadata{Generation: a.generation}}
	if a.reply != nil && a.reply.Metadata != nil {
		gr.m = a.reply.Metadata
	}
	if a.own {
		gr.s = a.call.s
	}
	return gr
}

// notFound is for an answer that there is no such payload: it is asked for again if the get waits.
func (g *get) notFound(a answer) error {
	g.lastErr = g.absent()
	if !g.r.Wait || !g.generation.IsZero() { // a generation that is gone does not come back
		return g.lastErr
	}
	switch {
	case !a.own:
		g.pause = g.c.o.Query
	case a.call.held > 0 && time.Since(a.call.sent) < a.call.held/2: // too many wait there
		g.pause = min(max(2*g.pause, g.c.o.Query), longPause)
	default:
		g.pause = 0
	}
	return nil
}

// nonsense is for an answer that is none to what was asked: nothing on that connection is believed any more.
func (g *get) nonsense(a answer, what string) error {
	g.c.bad(g.e.addr, "an answer that makes no sense", 0, errors.New(what))
	g.unsure = !a.own
	if a.own && !a.generation.IsZero() {
		a.granted().tell(wire.Fail, what)
	}
	g.e.spend(a.call.s)
	g.bad++
	g.pause, g.lastErr = g.c.o.Query, fmt.Errorf("%w: %s answered key %.64q with %s", wire.ErrMalformed, g.e.addr, g.r.Key, what)
	if g.bad == maxBad {
		return g.lastErr
	}
	return nil
}

// failed makes the error of a get that ended without an answer that settles it.
func (g *get) failed(err error) error {
	if g.lastErr != nil && errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", err, g.lastErr)
	}
	return fmt.Errorf("stage: get %.64q from %s: %w", g.r.Key, g.e.addr, err)
}
