package ec

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// peer is one producer's address: the connection to it, shared by all keys, and what is open to it on data planes.
//
// Lock order: Consumer.mu before peer.mu. The control goroutine takes peer.mu, so nothing that waits for that goroutine (dialling,
// closing a connection) is done under it.
type peer struct {
	c       *Consumer
	addr    string
	dialled sync.Once

	// Under Consumer.mu.
	refs int         // flights that use it
	idle *time.Timer // closes it when nobody has for a while

	mu      sync.Mutex
	first   path // its session outlives reconnects, so that asking again renews a grant
	dialErr error
	closed  bool
	up      bool
	reached bool          // it has been up
	changed chan struct{} // closed, and replaced, when up changes or the local connection is lost
	since   time.Time     // when it was up last, or dialled
	downErr error         // why it is not up
	tries   uint64
	flights map[string]*flight    // by key: those that expect messages
	links   map[string]*planeLink // by name of plane

	local        *localLink // nil: there is none
	localName    string     // of the one that is, or was not to be had
	localSession string     // of the last one

	untold     untold
	asked      map[string][]time.Time // by key: requests without an answer
	unanswered int                    // of all keys
}

// acquire gives the peer of an address, connecting if need be, until release.
func (c *Consumer) acquire(addr string) (*peer, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	p := c.peers[addr]
	if p == nil {
		p = &peer{
			c:       c,
			addr:    addr,
			first:   path{session: newSession()},
			changed: make(chan struct{}),
			since:   time.Now(),
			flights: map[string]*flight{},
			asked:   map[string][]time.Time{},
			links:   map[string]*planeLink{},
		}
		c.peers[addr] = p
	}
	c.use(p)
	c.mu.Unlock()

	p.dialled.Do(p.dial)
	p.mu.Lock()
	err := p.dialErr
	p.mu.Unlock()
	if err != nil {
		c.release(p)
		return nil, fmt.Errorf("%w: %s: %w", ErrUnreachable, addr, err)
	}
	return p, nil
}

// use counts a user of a peer, whom release ends. Called with the lock held.
func (c *Consumer) use(p *peer) {
	p.refs++
	if p.idle != nil {
		p.idle.Stop()
		p.idle = nil
	}
}

func (p *peer) dial() {
	conn, err := p.c.dial(p.c.ctx, p.addr, p)
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.first.conn, p.dialErr = conn, err
	}
	p.mu.Unlock()
	if closed && err == nil {
		_ = conn.Close()
	}
}

// keptUnreached is up to how many peers one that was never reached is kept for, so that who asks next need not wait for as long. Each has
// a few descriptors, and announcements can name any number of hosts.
const keptUnreached = 64

// release is the end of acquire.
func (c *Consumer) release(p *peer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.refs--
	if p.refs > 0 || c.peers[p.addr] != p {
		return
	}
	wait := c.t.Idle
	p.mu.Lock()
	if p.dialErr != nil || !p.reached && len(c.peers) > keptUnreached {
		wait = 0
	}
	p.mu.Unlock()
	p.idle = time.AfterFunc(wait, func() {
		c.mu.Lock()
		if p.refs > 0 || c.peers[p.addr] != p {
			c.mu.Unlock()
			return
		}
		delete(c.peers, p.addr)
		c.work.Add(1)
		c.mu.Unlock()
		defer c.work.Done()
		p.close()
	})
}

// close ends the connection and everything on data planes. Idempotent.
func (p *peer) close() {
	p.mu.Lock()
	conn := p.first.conn
	p.first.conn, p.closed = nil, true
	p.setUp(false, ErrClosed)
	for _, l := range p.links {
		p.dropLocked(l)
	}
	local := p.dropLocal()
	p.mu.Unlock()
	if conn != nil {
		_ = conn.Close()
	}
	if local != nil {
		_ = local.Close()
	}
}

// Up implements control.DealerHandler.
func (p *peer) Up() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.setUp(true, nil)
	}
}

// Down implements control.DealerHandler. What is open on data planes goes with the connection, as soon as no READ uses it: a
// peer that died, or was replaced at the same address, leaves nothing behind. What was asked will have no answer: the next connection
// is another socket, and brings nothing of this one.
func (p *peer) Down(err error) {
	p.mu.Lock()
	p.setUp(false, err)
	clear(p.asked)
	p.unanswered = 0
	for _, l := range p.links {
		p.retireLocked(l)
	}
	local := p.dropLocal()
	p.mu.Unlock()
	if local != nil {
		_ = local.Close()
	}
}

func (p *peer) setUp(up bool, err error) {
	p.downErr = err
	if p.up == up {
		return
	}
	p.up, p.since = up, time.Now()
	p.reached = p.reached || up
	p.signal()
}

// signal tells those who wait for a change of the connection. Called with the lock held.
func (p *peer) signal() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// connState tells whether the connection is up, when it was last (or was dialled), why it is not, and gives a channel that is closed at the next
// change.
func (p *peer) connState() (up bool, since time.Time, downErr error, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up, p.since, p.downErr, p.changed
}

// Message implements control.DealerHandler.
func (p *peer) Message(body []byte) { p.message(body, &p.first) }

// message takes what came by a path.
func (p *peer) message(body []byte, via *path) {
	m, err := wire.DecodeAtConsumer(body)
	if err != nil {
		p.c.stats.badFrames.Add(1)
		p.c.log.warn("bad frame", p.addr, "a frame was dropped", "bytes", len(body), "err", err)
		p.spoilt(err)
		return
	}
	var key string
	var ack *wire.Ack
	// Under one lock from here on: a flight that comes from now on asks after an old grant was let go, not before.
	p.mu.Lock()
	defer p.mu.Unlock()
	foreign := false
	switch m := m.(type) {
	case *wire.Ack:
		key, ack = m.Key, m
		foreign = m.Session != via.session && (m.Status == wire.OK || m.Session != "") // a NACK names none
	case *wire.Verified:
		key = m.Key
		foreign = m.Session != p.first.session && m.Session != p.localSession
	}
	if foreign {
		p.c.stats.badFrames.Add(1)
		p.c.log.warn("foreign", p.addr, "an answer for another session was dropped", "key", key)
		return
	}
	in := incoming{msg: m, via: via}
	if ack != nil {
		in.asked = p.answered(key)
		if ack.Ferry != nil && ack.Ferry.Local != "" {
			p.useLocal(ack.Ferry.Local)
		}
	}
	if f := p.flights[key]; f != nil {
		p.deliver(f, in)
		return
	}
	if ack != nil {
		p.letGoLocked(ack)
	}
}

// incoming is a message for one flight.
type incoming struct {
	msg   wire.Message // nil: an ack that makes no sense
	bad   error        // why not
	via   *path
	asked time.Time // ack: not later than the request that it answers; zero if that is not known
}

// deliver puts a message into a flight's box. Where there are more than were asked for, the newest stay: what comes later answers what
// was asked later. Called with the lock held.
func (p *peer) deliver(f *flight, in incoming) {
	for {
		select {
		case f.box <- in:
			return
		default:
		}
		select {
		case <-f.box:
			p.c.stats.lateAcks.Add(1)
		default: // the flight has just taken one
		}
	}
}

// spoilt tells the flight that an undecodable ack was for, where that can be seen, so that it need not wait for another.
func (p *peer) spoilt(err error) {
	var frame *wire.FrameError
	if !errors.As(err, &frame) || frame.Key == "" {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answered(frame.Key)
	if f := p.flights[frame.Key]; f != nil {
		p.deliver(f, incoming{bad: err})
	}
}

// maxUnanswered bounds what is remembered of requests that were never answered; beyond, answers have no known age.
const maxUnanswered = 1 << 16

// ask sends a request for a key, and remembers when. Acks of one session come in the order of its requests and, from a plain peer, name
// nothing else, so the age of what an ack grants can only be bounded by the oldest request for its key that has had no answer.
func (p *peer) ask(via *path, key string, body []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endGrants()
	at := time.Now()
	if err := p.sendLocked(via, body); err != nil {
		return err
	}
	if p.unanswered < maxUnanswered {
		p.asked[key] = append(p.asked[key], at)
		p.unanswered++
	}
	return nil
}

// answered takes the oldest such request.
func (p *peer) answered(key string) time.Time {
	times := p.asked[key]
	if len(times) == 0 {
		return time.Time{}
	}
	if len(times) == 1 {
		delete(p.asked, key)
	} else {
		p.asked[key] = times[1:]
	}
	p.unanswered--
	return times[0]
}

// expect and unexpect say that a flight wants the messages of its key. There is one flight a key and address at a time: a new
// one gets as far as its peer only when the old one has let go of the entry.
func (p *peer) expect(f *flight) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.flights[f.want.key] = f
}

// unexpect lets go of what came too late.
func (p *peer) unexpect(f *flight) {
	p.mu.Lock()
	if p.flights[f.want.key] == f {
		delete(p.flights, f.want.key)
	}
	p.mu.Unlock()
	for {
		select {
		case m := <-f.box:
			if a, ok := m.msg.(*wire.Ack); ok {
				p.letGo(a)
			}
		default:
			return
		}
	}
}

// letGo answers an ack that nobody waits for any more, so that the producer need not wait for the lease.
func (p *peer) letGo(a *wire.Ack) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.letGoLocked(a)
}

func (p *peer) letGoLocked(a *wire.Ack) {
	if a.Status != wire.OK {
		return
	}
	p.c.stats.lateAcks.Add(1)
	if a.Ferry == nil || a.Ferry.Grant == "" {
		return
	}
	// If it cannot be sent, the lease ends the grant.
	via := &p.first
	if l := p.local; l != nil && l.session == a.Session {
		via = &l.path
	}
	_ = p.sendLocked(via, wire.AppendVerify(nil, &wire.Verify{Key: a.Key, Session: a.Session, Grant: a.Ferry.Grant, Gen: a.Ferry.Gen, Failed: true}))
}

// nextTry numbers a request.
func (p *peer) nextTry() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tries++
	return p.tries
}

// planeLink is a peer's registration on one data plane, opened once and shared.
type planeLink struct {
	name     string
	metadata []byte
	ready    chan struct{} // closed when peer, err and at are set
	peer     transfer.Peer
	err      error
	at       time.Time

	// Under peer.mu.
	refs    int
	retired bool // not found any more; closed when refs is 0
	closing bool
}

// open gives the link of a name, adding it if there is none with that metadata. Whether that worked is known when its ready is
// closed. The caller gives it back with unlink.
func (p *peer) open(name string, metadata []byte, add func(context.Context) (transfer.Peer, error)) (*planeLink, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	l := p.links[name]
	if l != nil && (!bytes.Equal(l.metadata, metadata) || l.stale(p.c.t.Connect)) {
		p.retireLocked(l)
		l = nil
	}
	if l == nil {
		l = &planeLink{name: name, metadata: bytes.Clone(metadata), ready: make(chan struct{}), refs: 1}
		p.links[name] = l
		p.c.work.Add(1)
		go p.add(l, add)
	}
	l.refs++
	return l, nil
}

// add opens a link for whoever waits for it; it is not the first asker's context that bounds it.
func (p *peer) add(l *planeLink, add func(context.Context) (transfer.Peer, error)) {
	defer p.c.work.Done()
	ctx, cancel := context.WithTimeout(p.c.ctx, p.c.t.Connect)
	defer cancel()
	l.peer, l.err = add(ctx)
	l.at = time.Now()
	close(l.ready)
	p.unlink(l)
}

// stale tells that adding failed, unless it did a moment ago because this plane cannot reach the peer: that need not be tried
// again by every fetch.
func (l *planeLink) stale(keep time.Duration) bool {
	select {
	case <-l.ready:
		return l.err != nil && !(errors.Is(l.err, transfer.ErrUnreachable) && time.Since(l.at) < keep)
	default:
		return false
	}
}

// link takes another reference of a link that the caller has one of.
func (p *peer) link(l *planeLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.refs++
}

func (p *peer) unlink(l *planeLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.refs--
	if l.retired && l.refs == 0 {
		p.closeLocked(l)
	}
}

// retire makes the next asker open a new link; this one is closed when no READ uses it.
func (p *peer) retire(l *planeLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.retireLocked(l)
}

func (p *peer) retireLocked(l *planeLink) {
	l.retired = true
	if p.links[l.name] == l {
		delete(p.links, l.name)
	}
	if l.refs == 0 {
		p.closeLocked(l)
	}
}

// drop closes a link under its READs, which asks the plane to give them up.
func (p *peer) drop(l *planeLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(l)
}

func (p *peer) dropLocked(l *planeLink) {
	p.retireLocked(l)
	select {
	case <-l.ready:
		p.closeLocked(l)
	default: // add is under way and will close it
	}
}

// closeLocked closes once; closing may wait for READs, so not here.
func (p *peer) closeLocked(l *planeLink) {
	if l.closing || l.peer == nil {
		return
	}
	l.closing = true
	p.c.work.Add(1)
	go func() {
		defer p.c.work.Done()
		if err := l.peer.Close(); err != nil {
			p.c.log.warn("close", p.addr, "closing a peer's data plane failed", "plane", l.name, "err", err)
		}
	}()
}

// newSession is a random UUID: session ids hold no colon, and no two connections have the same.
func newSession() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
