package control

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/tensorferry/tensorferry/internal/sparselog"
)

const (
	// retryBudget is how many full destinations a router tries again before it receives.
	retryBudget = 64
	// retryPause is the least time between two tries of all full destinations, for each of them. A try takes about 0.1 us, so that
	// peers that do not read cost a hundredth of a core, however many.
	retryPause = 10 * time.Microsecond
	// retryAfter is when full destinations are tried again at the latest. libzmq wakes the loop as soon as one has room, but has no
	// way to ask which, and takes the wake-up back if it notices the room while it sends or receives something else.
	retryAfter = 100 * time.Millisecond
)

// Router is a bound ROUTER socket. It belongs to its loop, and ends with it.
type Router struct {
	standing
	l    *Loop
	h    RouterHandler
	left LeaveHandler // nil if h is none
	port int

	// Guarded by l.mu. Only the owner writes peers, so it reads them without.
	peers                            map[string]*peer
	dirty                            []*peer // with messages accepted, each once
	badFrames, fullQueue, unroutable uint64
	flooded, stalled                 uint64
	locals                           map[string]*localPeer // by id; only the owner writes it
	turnedAway                       uint64
	budgetLog                        sparselog.Cause

	// Owner only.
	s          *socket
	local      *acceptor // nil without ListenLocal
	spare      []*peer   // takes turns with dirty
	blocked    []*peer   // libzmq has no room for them
	retries    int       // how many of blocked to try before the next sleep
	retried    time.Time // when all were to be tried last
	early      bool      // it was too early to try again in this turn
	alarm      alarm
	conns      map[int]*conn   // by descriptor, as the monitor reports them
	floods     map[string]bool // ids of peers that were cut off, while messages of theirs may come
	badLog     sparselog.Cause
	owing      []*peer // something may wait for them in the kernel
	look       alarm   // next look at those
	meter      alarm   // next look at what is on its way by each connection
	places     places
	floodLog   sparselog.Cause
	stallLog   sparselog.Cause
	placeLog   sparselog.Cause
	refusedLog sparselog.Cause
}

// conn is a connection. The monitor knows it by its descriptor only, and a message says by which descriptor it came. If connections
// replace each other faster than their messages are read, ids of dead ones are filed here too: they leave late, with the live one.
type conn struct {
	peers  []*peer
	intake intake
	behind int64 // of the last look at what is on its way
	cut    bool  // it was reset
}

// peer is a sender of messages that the router can answer.
type peer struct {
	src    Source
	fd     int
	conn   *conn // nil if it has ended
	uptake uptake
	q      outlet
	queued bool // in dirty or blocked; guarded by Loop.mu
}

// Listen binds tcp://host:port; port 0 takes any free one. A bind that fails is an error here that names the address and the errno.
// host is a name, an address (an IPv6 one may be in brackets), or "*" for all IPv4 interfaces; what may be bound is the caller's
// policy. From a handler it must not be a name: looking it up would hold up the loop.
//
// h is called from now on, even before Listen returns; see ServeHandler and LeaveHandler for what else it may implement.
func (l *Loop) Listen(ctx context.Context, host string, port int, h RouterHandler) (*Router, error) {
	at, err := bindAddress(ctx, host, port)
	if err != nil {
		return nil, fmt.Errorf("control: listen on host %q, port %d: %w", host, port, err)
	}
	places, err := newPlaces()
	if err != nil {
		return nil, err
	}
	r := &Router{l: l, h: h, places: places, peers: map[string]*peer{}, conns: map[int]*conn{}, floods: map[string]bool{}, locals: map[string]*localPeer{}}
	r.left, _ = h.(LeaveHandler)
	r.alarm, r.look, r.meter = alarm{m: r, index: -1}, alarm{m: r, index: -1}, alarm{m: r, index: -1}
	if err := l.call(ctx, func() error { return r.bind(at) }); err != nil {
		return nil, err
	}
	return r, nil
}

func bindAddress(ctx context.Context, host string, port int) (address, error) {
	switch {
	case port < 0 || port > 65535:
		return address{}, errors.New("the port must be 0 to 65535")
	case host == "":
		return address{}, errors.New(`name an address of this machine, or "*" for all`)
	case host == "*":
		return address{any: true, port: port}, nil
	}
	return resolve(ctx, host, port)
}

func (r *Router) bind(at address) error {
	const events = zmq4.EVENT_ACCEPTED | zmq4.EVENT_ACCEPT_FAILED | zmq4.EVENT_DISCONNECTED
	s, err := r.l.newSocket(zmq4.ROUTER, at.v6(), DefaultRouterMessage, events, r)
	if err != nil {
		return err
	}
	if err := s.Bind(at.String()); err != nil {
		s.close(r.l)
		err = sysErr(err)
		return fmt.Errorf("control: listen on %s: %w%s", at, err, bindHint(err))
	}
	last, err := s.GetLastEndpoint()
	if err == nil {
		r.port, err = strconv.Atoi(last[strings.LastIndexByte(last, ':')+1:])
	}
	if err != nil {
		s.close(r.l)
		return fmt.Errorf("control: listen on %s: which port was bound: %q: %w", at, last, err)
	}
	r.s = s
	r.l.members[r] = struct{}{}
	if sh, ok := r.h.(ServeHandler); ok {
		sh.Serve(r)
	}
	return nil
}

// Port is the bound port.
func (r *Router) Port() int { return r.port }

// Send queues `[id, "", body]`; to a local peer it writes the message at once if there is room. body must not be changed afterwards.
// ErrGone if no such peer is connected (best effort), ErrQueueFull if its queue is full, or for a large body what may wait for its address
// or for all (Options.TotalBytes: a small one may still pass), ErrTooLarge if body is larger than a queue may be, ErrClosed after Close.
// A message that was accepted is dropped, and counted as unroutable, if its peer goes away first, or takes nothing for ten seconds and
// is cut for that.
func (r *Router) Send(id string, body []byte) error { return r.send(id, parcel{head: body}) }

// SendShared is Send for the body that is head and then tail, of which only head is copied, but for a local peer. Its errors are those of
// Send; what counts for the limits is the memory that it takes: head, 16 KiB, and 2 KiB for each MiB of tail.
func (r *Router) SendShared(id string, head []byte, tail *Shared) error {
	return r.send(id, parcel{head: head, tail: tail})
}

func (r *Router) send(id string, m parcel) error {
	l := r.l
	if r.ended(l) {
		return ErrClosed
	}
	l.mu.Lock()
	if p := r.locals[id]; p != nil {
		l.mu.Unlock()
		return p.send(m)
	}
	p := r.peers[id]
	if p == nil {
		r.unroutable++
		l.mu.Unlock()
		return ErrGone
	}
	if err := p.q.push(m, &l.opts); err != nil {
		r.fullQueue++
		crowd, due := r.crowd(err)
		l.mu.Unlock()
		if due {
			crowd.warn(r)
		}
		return err
	}
	wake := false
	if !p.queued {
		p.queued = true
		r.dirty = append(r.dirty, p)
		wake = l.readyLocked(r)
	}
	l.mu.Unlock()
	l.wake(wake)
	return nil
}

// Dropped counts messages dropped: wrong frame count, outgoing queue full (or body too large), unroutable.
func (r *Router) Dropped() (frames, full, unroutable uint64) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.badFrames, r.fullQueue, r.unroutable
}

// Close lets go of the socket and its connections, soon: the port is free for certain once the loop is closed. No handler call
// begins afterwards. Messages not yet sent are dropped. Idempotent; it does not wait, so it may be called from anywhere.
func (r *Router) Close() error {
	r.l.closeMember(r)
	return nil
}

// release implements member.
func (r *Router) release() {
	r.s.close(r.l)
	r.l.alarms.stop(&r.alarm)
	r.l.alarms.stop(&r.look)
	r.l.alarms.stop(&r.meter)
	delete(r.l.members, r)
	if r.local != nil {
		r.local.release()
	}
	for _, p := range r.locals {
		p.s.release()
		r.forget(p)
	}
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	for id, p := range r.peers {
		delete(r.peers, id) // a Send that is under way finds nobody
		p.q.clear()
		p.q.flow.drop()
		r.l.leave(p.src.Addr, p.q.total)
	}
}

// turn implements member.
func (r *Router) turn() bool {
	l := r.l
	if r.ended(l) || !r.watchPeers() {
		return false
	}
	r.cutStalled()
	r.cutEndless()
	r.early = false
	if len(r.blocked) > 0 && r.retries == 0 {
		if now := time.Now(); now.Before(r.nextRetry()) {
			r.early = true
		} else {
			r.retries, r.retried = len(r.blocked), now
		}
	}
	for budget := turnBudget; budget > 0; {
		tried := r.flush()
		got := 0
		for got < turnBudget {
			parts, errno := l.in.recv(r.s.raw)
			if errno == syscall.EAGAIN {
				r.forgetFloods()
				break
			}
			if errno != 0 {
				l.fail(fmt.Errorf("control: receive: %w", errno))
				return false
			}
			got++
			r.deliver(parts)
			if r.ended(l) {
				return false
			}
		}
		// Sending may take in what libzmq's descriptor had announced, so only a round that did nothing can be the last.
		if tried+got == 0 {
			return r.rest()
		}
		budget -= tried + got
	}
	return true
}

func (r *Router) nextRetry() time.Time {
	return r.retried.Add(time.Duration(len(r.blocked)) * retryPause)
}

// rest ends a turn that found nothing more to do, and says whether something came in between.
func (r *Router) rest() bool {
	switch {
	case len(r.blocked) == 0:
		r.l.alarms.stop(&r.alarm)
	case r.early:
		r.l.alarms.set(&r.alarm, r.nextRetry())
	default:
		r.l.alarms.set(&r.alarm, time.Now().Add(retryAfter))
	}
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	r.ready = len(r.dirty) > 0
	return r.ready
}

// deliver hands the message in l.in to the handler.
func (r *Router) deliver(parts int) {
	in := r.l.in
	if c := r.conns[in.fd()]; c != nil {
		c.intake.took(in.wire())
	}
	if parts != 3 || len(in.part(1)) != 0 {
		r.l.mu.Lock()
		r.badFrames++
		r.l.mu.Unlock()
		r.badLog.Warn(r.l.opts.Log, `control: dropped messages that are not ["", payload]`, "port", r.port, "frames", parts-1, "peer", in.peer())
		return
	}
	p := r.peers[string(in.part(0))]
	filed := true
	if p == nil && r.floods[string(in.part(0))] { // what is left of a connection that was cut
		r.countFlood(plainIP(in.peer()))
		return
	}
	if p == nil || p.fd != in.fd() {
		if p, filed = r.newPeer(); p == nil {
			return
		}
	}
	if r.dropFlood(p) {
		return
	}
	r.h.Message(p.src, in.part(2))
	if !filed && r.left != nil && !r.ended(r.l) {
		r.left.Left(p.src)
	}
}

// newPeer finds or files the sender of the message in l.in, which is not known by its id and descriptor. filed is false if its
// connection has ended already. The monitor is read first: what it reports of a connection up to now was written before the message.
func (r *Router) newPeer() (p *peer, filed bool) {
	in := r.l.in
	if !r.watchPeers() {
		return nil, false
	}
	if p := r.peers[string(in.part(0))]; p != nil {
		return p, true // an id that its owner chose, on a new connection: what is read is from the old one
	}
	p = &peer{src: Source{ID: string(in.part(0)), Addr: plainIP(in.peer())}, fd: in.fd()}
	c := r.conns[p.fd]
	if c == nil {
		return p, false
	}
	p.conn = c
	c.peers = append(c.peers, p)
	r.l.mu.Lock()
	p.q.total = r.l.join(p.src.Addr)
	p.q.flow = newFlow(p.q.total.flow)
	r.peers[p.src.ID] = p
	r.l.mu.Unlock()
	return p, true
}

// watchPeers takes in what the monitor has to say, and says whether the router goes on.
func (r *Router) watchPeers() bool {
	err := r.s.events(r.l, func(ev zmq4.Event, value int) bool {
		switch ev {
		case zmq4.EVENT_ACCEPTED:
			r.leave(r.conns[value])
			delete(r.conns, value)
			r.accepted(value)
		case zmq4.EVENT_DISCONNECTED:
			c := r.conns[value]
			delete(r.conns, value)
			r.leave(c)
		case zmq4.EVENT_ACCEPT_FAILED:
			r.refusedLog.Warn(r.l.opts.Log, "control: connections could not be accepted", "port", r.port, "error", syscall.Errno(value))
		}
		return !r.ended(r.l)
	})
	if err != nil {
		r.l.fail(err)
	}
	return !r.ended(r.l)
}

// leave forgets the peers of a connection that has ended; c may be nil.
func (r *Router) leave(c *conn) {
	if c == nil {
		return
	}
	for _, p := range c.peers {
		r.l.mu.Lock()
		delete(r.peers, p.src.ID)
		r.unroutable += uint64(p.q.clear())
		p.q.flow.drop() // nobody finds p any more
		r.l.leave(p.src.Addr, p.q.total)
		r.l.mu.Unlock()
		if r.left != nil && !r.ended(r.l) {
			r.left.Left(p.src)
		}
	}
}

// flush hands messages to libzmq, and returns how many destinations it tried.
func (r *Router) flush() (tried int) {
	for ; tried < retryBudget && r.retries > 0; tried++ {
		r.retries--
		p := r.blocked[0]
		r.blocked[0] = nil
		r.blocked = r.blocked[1:]
		r.drain(p)
	}
	r.l.mu.Lock()
	dirty := r.dirty
	r.dirty = r.spare[:0]
	r.l.mu.Unlock()
	for i, p := range dirty {
		r.drain(p)
		dirty[i] = nil
	}
	r.spare = dirty
	return tried + len(dirty)
}

// drain hands the messages of p to libzmq until there are none, or no room.
func (r *Router) drain(p *peer) {
	r.owe(p)
	_, errno := p.q.drain(r.l, r.s.raw, p.src.ID, func() { p.queued = false })
	switch errno {
	case 0:
	case syscall.EAGAIN:
		r.blocked = append(r.blocked, p)
	case syscall.EHOSTUNREACH: // gone; the monitor is about to say so
		r.l.mu.Lock()
		r.unroutable += uint64(p.q.clear())
		p.queued = false
		r.l.mu.Unlock()
	default:
		r.l.fail(fmt.Errorf("control: send: %w", errno))
	}
}

// plainIP writes an IPv4 address that came by an IPv6 socket as IPv4.
func plainIP(s string) string {
	if ip, err := netip.ParseAddr(s); err == nil && ip.Is4In6() {
		return ip.Unmap().String()
	}
	return s
}
