package ec

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Constants of a pull that nobody has needed to set.
const (
	firstPause  = 10 * time.Millisecond  // after the first NOT_READY or failure; doubles
	longPause   = 500 * time.Millisecond // the longest
	maxRetries  = 3                      // failed READs and verifications
	maxVerifies = 4                      // questions about one READ: its bytes are there, so asking is cheaper than another READ
	slowAfter   = 5 * time.Second        // a pull that takes longer says once what it waits for
	boxSize     = 8                      // messages for one key that have not been looked at; of more the newest stay
)

// errAbandoned is the cause of a flight that nobody waits for any more.
var errAbandoned = errors.New("ec: nobody waits for it any more")

// errBudget is the cause of a flight that took longer than Timeouts.Item, or than its callers had left of that.
var errBudget = errors.New("ec: the time for this item is over")

// flight is the pull of one key, on a goroutine of its own. What is not said to be shared is touched by that goroutine only.
type flight struct {
	c     *Consumer
	want  wanted
	owner uint64
	start time.Time
	until time.Time // its budget's end

	ctx     context.Context // ends with the budget, the last waiter, or the consumer; its cause says which
	cancel  context.CancelCauseFunc
	waiters int           // under Consumer.mu
	box     chan incoming // filled by the control goroutine
	done    chan struct{} // closed when result is set
	result  Result

	state   state
	entered time.Time // the state
	res     *Reservation
	peer    *peer
	timer   *time.Timer // of the state
	slow    *time.Timer
	renewal *time.Timer     // reading: of the grant's lease
	local   <-chan struct{} // queued: the filler's end
	moved   <-chan struct{} // connecting, asking: the connection's next change
	route   route           // opening to verifying
	link    *planeLink      // opening to verifying
	read    transfer.Read   // reading, verifying

	try, firstTry uint64          // of the last request, and of the first whose ack may be acted on
	offer         *granted        // that came with evGranted
	granted       *granted        // the one acted on
	failed        map[string]int  // failures by plane
	beyond        map[string]bool // planes that cannot reach the peer
	verifies      int             // sent for this READ
	sum           *uint64         // to be kept with the entry

	asked    int
	pauses   int
	failures int
	spoiled  int   // READs with a wrong checksum
	err      error // the last failure; what is returned if nothing better follows
}

func newFlight(c *Consumer, w wanted, owner uint64, until time.Time) *flight {
	ctx, cancel := context.WithCancelCause(c.ctx)
	return &flight{
		c:       c,
		want:    w,
		owner:   owner,
		start:   time.Now(),
		until:   until,
		ctx:     ctx,
		cancel:  cancel,
		waiters: 1,
		box:     make(chan incoming, boxSize),
		done:    make(chan struct{}),
		timer:   newStoppedTimer(),
		slow:    time.NewTimer(slowAfter),
		renewal: newStoppedTimer(),
		failed:  map[string]int{},
		beyond:  map[string]bool{},
	}
}

func newStoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// run drives the table from queued to done.
func (f *flight) run() {
	defer f.c.work.Done()
	f.c.stats.flights.Add(1)
	defer f.c.stats.flights.Add(-1)
	budget := time.AfterFunc(time.Until(f.until), func() { f.cancel(errBudget) })
	defer budget.Stop()
	defer f.slow.Stop()
	defer f.timer.Stop()
	defer f.renewal.Stop()

	ev := f.enter(queued)
	for {
		if ev == evNone {
			ev = f.wait()
		}
		m := table[f.state][ev]
		if m.kind != goes {
			f.ignore(ev)
			ev = evNone
			continue
		}
		if ev == evGranted {
			f.granted, f.err = f.offer, nil
		}
		if m.letGo {
			f.letGo()
		}
		if m.to == done {
			f.finish(ev, m.dest)
			return
		}
		ev = f.enter(m.to)
	}
}

// enter does what a state begins with. It returns an event if one follows at once.
func (f *flight) enter(s state) event {
	f.state, f.entered = s, time.Now()
	f.timer.Stop()
	f.renewal.Stop()
	f.local, f.moved = nil, nil
	switch s {
	case queued:
		return f.reserve()
	case connecting:
		return f.connect()
	case asking:
		return f.ask()
	case pausing:
		f.endRead()
		f.timer.Reset(f.pause())
	case opening:
		return f.open()
	case reading:
		return f.post()
	case verifying:
		return f.verify()
	}
	return evNone
}

// wait gives the next event of the present state.
func (f *flight) wait() event {
	var opened, read <-chan struct{}
	switch f.state {
	case opening:
		opened = f.link.ready
	case reading:
		read = f.read.Done()
	}
	for {
		select {
		case <-f.ctx.Done():
			return f.ended()
		case m := <-f.box:
			if ev := f.receive(m); ev != evNone {
				return ev
			}
		case <-f.local:
			return evChanged
		case <-f.moved:
			if ev := f.connMoved(); ev != evNone {
				return ev
			}
		case <-opened:
			return f.opened()
		case <-read:
			return f.readEnded()
		case <-f.timer.C:
			return f.timedOut()
		case <-f.renewal.C:
			_ = f.request(f.granted.via) // if it cannot be sent, the next may
			f.renewal.Reset(f.granted.renew)
		case <-f.slow.C:
			f.c.log.warn("slow", f.want.addr, "a fetch is slow", "waits_for", f.state.String(), "key", f.want.key,
				"since", time.Since(f.start).Round(time.Millisecond), "requests", f.asked, "not_ready", f.pauses, "last_error", f.err)
		}
	}
}

// ended tells why the flight's context is over.
func (f *flight) ended() event {
	if errors.Is(context.Cause(f.ctx), errBudget) {
		return evBudget
	}
	return evAbandoned
}

// reserve takes the destination, or finds out who else has the key.
func (f *flight) reserve() event {
	cache := f.c.o.Cache
	for {
		changed := cache.Watch(f.want.key)
		r, err := cache.Reserve(f.want.key, f.want.spec, f.owner)
		switch {
		case err == nil:
			f.res = r
			return evReserved
		case errors.Is(err, ErrPending):
			f.local, f.err = changed, err
			return evNone
		case errors.Is(err, ErrHeld):
			info, st := cache.Lookup(f.want.key)
			if st != Ready {
				continue // evicted in between
			}
			f.result = Result{Outcome: FetchReady, Info: info, Bytes: info.Spec.Bytes, Plane: PlaneLocal}
			return evLocal
		default:
			f.err = err
			return evRefused
		}
	}
}

// connect waits until the peer is connected.
func (f *flight) connect() event {
	if f.peer == nil {
		p, err := f.c.acquire(f.want.addr)
		if err != nil {
			f.err = err
			return evRefused
		}
		f.peer = p
		f.firstTry = p.nextTry()
		p.expect(f)
	}
	up, since, _, moved := f.peer.connState()
	if up {
		return evUp
	}
	f.moved = moved
	// A peer that has been gone for longer than that already still gets the time of a reconnect.
	f.timer.Reset(max(f.c.t.Connect-time.Since(since), f.c.t.Connect/5))
	return evNone
}

// connMoved is the connection's going up or down.
func (f *flight) connMoved() event {
	up, _, _, moved := f.peer.connState()
	switch {
	case f.state == asking:
		return evDown // also if it is up again: the answer may have been lost
	case up:
		return evUp
	}
	f.moved = moved
	return evNone
}

// ask sends a request.
func (f *flight) ask() event {
	up, _, _, moved := f.peer.connState()
	if !up {
		return evDown
	}
	f.moved = moved
	if err := f.request(f.peer.best()); err != nil {
		f.err = fmt.Errorf("%w: request to %s: %w", ErrPeer, f.want.addr, err)
		return evNotSent
	}
	f.timer.Reset(f.c.ackWait(f.want.addr))
	return evNone
}

// request asks for the entry by a path, or renews the grant that came by it.
func (f *flight) request(via *path) error {
	f.try = f.peer.nextTry()
	f.asked++
	f.c.stats.requests.Add(1)
	return f.peer.ask(via, f.want.key, wire.AppendRequest(nil, &wire.Request{
		Key:        f.want.key,
		CompatHash: f.c.hash,
		Session:    via.session,
		Version:    f.c.o.Generation,
		Ferry: &wire.FerryRequest{
			V: wire.ExtensionVersion, Node: f.c.o.Node, Epoch: f.c.o.Epoch, Planes: f.c.planes, Sum: f.c.o.Verify,
			Compat: f.c.o.Compat, Try: f.try,
		},
	}, f.c.o.Generation))
}

// pause is the wait before asking again: doubling, with jitter, so that many keys do not ask in step.
func (f *flight) pause() time.Duration {
	d := firstPause << min(f.pauses, 10)
	f.pauses++
	d = min(d, longPause)
	return d/2 + rand.N(d/2+1)
}

// receive looks at a message for this key.
func (f *flight) receive(in incoming) event {
	switch m := in.msg.(type) {
	case nil:
		if f.state != asking {
			return evNone
		}
		f.c.stats.badAcks.Add(1)
		f.err = fmt.Errorf("%w: %s for %q: %w", ErrBadAck, f.want.addr, f.want.key, in.bad)
		return evRefused
	case *wire.Ack:
		return f.judge(m, in)
	case *wire.Verified:
		if f.state != verifying || m.Grant != f.granted.grant {
			return evNone // the second answer to a verify that was sent twice
		}
		if !m.OK || m.Gen != f.granted.gen {
			f.c.stats.verifyFailed.Add(1)
			return f.again(fmt.Errorf("%w: %q at %s", ErrChanged, f.want.key, f.want.addr), evNotVerified)
		}
		return f.check()
	}
	return evNone
}

// ignore is what happens to an event that means nothing in this state. An ack that repeats the grant acted on is no news.
func (f *flight) ignore(ev event) {
	if ev == evGranted && (f.granted == nil || f.granted.grant != f.offer.grant) {
		f.peer.letGo(f.offer.ack)
	}
}

// timedOut is the end of the state's own wait.
func (f *flight) timedOut() event {
	switch f.state {
	case asking:
		f.c.stats.ackTimeouts.Add(1)
		f.err = fmt.Errorf("%w: no ack for %q from %s", ErrTimeout, f.want.key, f.want.addr)
	case connecting:
		_, _, down, _ := f.peer.connState()
		f.err = fmt.Errorf("%w: %s not connected within %v: %w", ErrUnreachable, f.want.addr, time.Since(f.entered).Round(time.Millisecond), orElse(down, ErrTimeout))
	case reading:
		f.err = fmt.Errorf("%w: READ of %q from %s took over %v", ErrTimeout, f.want.key, f.want.addr, f.c.t.Read)
	case opening:
		return f.readFailed(fmt.Errorf("%w: adding the peer took over %v", ErrTimeout, f.openWait()))
	case verifying:
		if f.verifies >= maxVerifies {
			return f.again(fmt.Errorf("%w: %s did not verify the READ of %q", ErrTimeout, f.want.addr, f.want.key), evNotVerified)
		}
	}
	return evTimeout
}

func orElse(err, other error) error {
	if err != nil {
		return err
	}
	return other
}

// again counts a failure. It gives ev, or evGaveUp after too many.
func (f *flight) again(err error, ev event) event {
	f.err = err
	f.failures++
	if f.failures > maxRetries {
		return evGaveUp
	}
	f.c.stats.retries.Add(1)
	return ev
}

// letGo gives the grant up. Acks of requests made until now can only bring the same grant again, so they are not acted on.
func (f *flight) letGo() {
	f.firstTry = f.try + 1
	if g := f.granted; g != nil && g.own {
		_ = f.peer.send(g.via, wire.AppendVerify(nil, &wire.Verify{Key: f.want.key, Session: g.via.session, Grant: g.grant, Gen: g.gen, Failed: true}))
	}
	f.granted = nil
}

// finish settles the destination and gives the result.
func (f *flight) finish(ev event, dest fate) {
	f.explain(ev)
	if f.peer != nil {
		f.peer.unexpect(f)
	}
	switch dest {
	case free:
		f.res.Discard()
	case quarantine:
		f.c.quarantine(f.want, f.res, f.read, f.peer, f.link)
	case commit:
		info, err := f.res.Commit(f.sum)
		if err != nil {
			f.err = err
			break
		}
		f.err = nil
		f.result = Result{Outcome: FetchReady, Info: info, Bytes: info.Spec.Bytes, Plane: f.link.name}
		f.c.stats.bytes.Add(uint64(info.Spec.Bytes))
	}
	if f.result.Outcome != FetchReady {
		f.result = Result{Outcome: outcomeOf(f.err), Err: f.err}
	}
	f.endRead()
	if f.peer != nil {
		f.c.release(f.peer)
	}
	f.c.mu.Lock()
	f.c.forget(f)
	f.c.mu.Unlock()
	f.cancel(nil)
	close(f.done)
}

// explain sets the error of those ends that are not an error of the state they come in.
func (f *flight) explain(ev event) {
	switch ev {
	case evBudget:
		f.err = fmt.Errorf("%w: %q from %s not here after %v, waiting for %s%s", f.budgetError(), f.want.key, f.want.addr, time.Since(f.start).Round(time.Millisecond), f.state, f.after())
	case evAbandoned:
		f.err = context.Cause(f.ctx)
		if errors.Is(f.err, context.Canceled) || errors.Is(f.err, errAbandoned) {
			f.err = fmt.Errorf("%w: %w", ErrClosed, f.err)
		}
	}
}

// budgetError is what kept the flight until its budget's end.
func (f *flight) budgetError() error {
	switch {
	case f.state == queued, errors.Is(f.err, ErrNotReady):
		return ErrNotReady
	case f.state == connecting:
		return ErrUnreachable
	}
	return ErrTimeout
}

func (f *flight) after() string {
	if f.err == nil {
		return ""
	}
	return fmt.Sprintf("; before that: %v", f.err)
}
