package control

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/tensorferry/tensorferry/internal/sparselog"
)

// link is the state of a dealer's connection.
type link uint8

const (
	linkFirst link = iota // connecting, and no attempt has failed yet: messages wait
	linkUp
	linkDown // lost or refused; trying again
)

// Dealer is a DEALER socket connected to one peer. It belongs to its loop, and ends with it.
//
// Each attempt to connect is a new libzmq socket, so that nothing of a connection outlives it and the name is looked up anew.
type Dealer struct {
	standing
	l    *Loop
	h    DealerHandler
	addr string // as given to Dial
	host string
	port int

	// Guarded by l.mu.
	link      link
	q         outlet
	badFrames uint64

	// Owner only.
	s         *socket // nil between attempts
	connected bool
	resolving bool
	full      bool // libzmq has no room
	failures  int  // attempts since the last connection
	alarm     alarm
	meter     alarm // next look at what is on its way
	fd        int   // of the connection, as the monitor reports it; 0: none
	intake    intake
	badLog    sparselog.Cause
}

// Dial starts connecting to tcp://addr, "host:port" with an IPv6 host in brackets, and returns at once. An error here means that
// addr makes no sense, or that the loop is closed; everything else is reported to h. ctx is not used after Dial has returned.
func (l *Loop) Dial(ctx context.Context, addr string, h DealerHandler) (*Dealer, error) {
	host, port, err := splitAddr(addr)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d := &Dealer{l: l, h: h, addr: addr, host: host, port: port, q: outlet{total: &l.total}}
	d.alarm, d.meter = alarm{m: d, index: -1}, alarm{m: d, index: -1}
	err = l.post(func() {
		if d.ended(l) {
			return
		}
		l.members[d] = struct{}{}
		l.mu.Lock()
		d.q.flow = newFlow(l.total.flow)
		l.mu.Unlock()
		d.connect()
	})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// Addr is the address given to Dial.
func (d *Dealer) Addr() string { return d.addr }

// Send queues `["", body]`. body must not be changed afterwards. Between Dial and the first Up or Down it waits for the connection;
// after Down, and until Up, it is refused with ErrGone. ErrQueueFull if the queue is full, or all queues of the loop for a large body
// (Options.TotalBytes), ErrTooLarge if body is larger than the queue may be, ErrClosed after Close. A message that was accepted reaches
// the peer, or the connection ends with Down.
func (d *Dealer) Send(body []byte) error {
	l := d.l
	if d.ended(l) {
		return ErrClosed
	}
	l.mu.Lock()
	if d.link == linkDown {
		l.mu.Unlock()
		return ErrGone
	}
	if err := d.q.push(parcel{head: body}, &l.opts); err != nil {
		l.mu.Unlock()
		return err
	}
	wake := d.link == linkUp && l.readyLocked(d)
	l.mu.Unlock()
	l.wake(wake)
	return nil
}

// SendSoon implements Conn. It is Send: the loop takes what is queued at once.
func (d *Dealer) SendSoon(body []byte) error { return d.Send(body) }

// Dropped counts incoming messages dropped for their frame count.
func (d *Dealer) Dropped() (frames uint64) {
	d.l.mu.Lock()
	defer d.l.mu.Unlock()
	return d.badFrames
}

// Close lets go of the connection, soon. No handler call begins afterwards. Messages not yet sent are dropped. Idempotent; it does
// not wait, so it may be called from anywhere.
func (d *Dealer) Close() error {
	d.l.closeMember(d)
	return nil
}

// release implements member.
func (d *Dealer) release() {
	d.l.mu.Lock()
	d.link = linkDown // a Send that is under way touches the queue no more
	d.q.clear()
	d.l.mu.Unlock()
	if _, ok := d.l.members[d]; !ok {
		return // closed before it began
	}
	d.disconnect()
	d.l.alarms.stop(&d.alarm)
	d.l.alarms.stop(&d.meter)
	delete(d.l.members, d)
	d.q.flow.drop()
}

func (d *Dealer) disconnect() {
	if d.s != nil {
		d.s.close(d.l)
		d.s = nil
	}
	d.connected, d.full, d.fd = false, false, 0
}

// connect starts an attempt. A name is looked up on another goroutine, which can take seconds.
func (d *Dealer) connect() {
	if ip, ok := literal(d.host); ok {
		d.connectTo(address{ip: ip, port: d.port}, nil)
		return
	}
	d.resolving = true
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), d.l.opts.ConnectTimeout)
		defer cancel()
		at, err := resolve(ctx, d.host, d.port)
		d.l.post(func() { // refused if the loop has ended
			d.resolving = false
			if !d.ended(d.l) {
				d.connectTo(at, err)
			}
		})
	}()
}

func (d *Dealer) connectTo(at address, err error) {
	const events = zmq4.EVENT_CONNECTED | zmq4.EVENT_CLOSED | zmq4.EVENT_DISCONNECTED | zmq4.EVENT_HANDSHAKE_SUCCEEDED |
		zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq4.EVENT_HANDSHAKE_FAILED_AUTH
	if err == nil {
		d.s, err = d.l.newSocket(zmq4.DEALER, at.v6(), DefaultDealerMessage, events, d)
	}
	if err == nil {
		err = sysErr(d.s.Connect(at.String()))
	}
	if err != nil {
		d.failed(err.Error())
		return
	}
	// libzmq has a limit for each of the two, but 4.3.5 says nothing when a peer of another protocol answers.
	d.l.alarms.set(&d.alarm, time.Now().Add(2*d.l.opts.ConnectTimeout))
}

// failed ends an attempt or a connection, tells the handler if it does not know yet, and arranges the next attempt.
func (d *Dealer) failed(why string) {
	d.disconnect()
	l := d.l
	l.mu.Lock()
	first := d.link != linkDown
	d.link = linkDown
	d.q.clear()
	l.mu.Unlock()

	pause := min(l.opts.ReconnectMin<<min(d.failures, 20), l.opts.ReconnectMax)
	d.failures++
	pause -= rand.N(pause/4 + 1) // so that the peers of a node that restarts do not come all at once
	l.alarms.set(&d.alarm, time.Now().Add(pause))
	if first {
		d.h.Down(fmt.Errorf("%w: tcp://%s: %s", ErrGone, d.addr, why))
	}
}

// turn implements member.
func (d *Dealer) turn() bool {
	l := d.l
	if d.ended(l) {
		return false
	}
	if d.alarm.index < 0 { // it rang, unless it was not set
		switch {
		case d.s == nil && !d.resolving:
			d.connect() // the pause is over
		case d.s != nil && !d.connected:
			d.failed("no ZeroMQ ROUTER answered in time")
		}
	}
	if d.s == nil || !d.watchLink() {
		return d.rest()
	}
	if d.floods() {
		d.failed("it sends more than anybody asked for, or a message that does not end")
		return d.rest()
	}
	for budget := turnBudget; budget > 0; {
		sent := d.flush()
		got, more := d.receive()
		if !more {
			return false
		}
		if sent+got == 0 {
			// Receiving may have taken in that there is room again.
			if d.full && d.room() {
				d.full = false
				continue
			}
			return d.rest()
		}
		budget -= sent + got
	}
	return true
}

// rest ends a turn that found nothing more to do, and says whether something came in between.
func (d *Dealer) rest() bool {
	d.l.mu.Lock()
	defer d.l.mu.Unlock()
	d.ready = d.connected && !d.full && len(d.q.in) > 0
	return d.ready
}

// receive hands what has come to the handler, up to turnBudget messages.
func (d *Dealer) receive() (got int, more bool) {
	l := d.l
	for got < turnBudget {
		parts, errno := l.in.recv(d.s.raw)
		if errno == syscall.EAGAIN {
			break
		}
		if errno != 0 {
			l.fail(fmt.Errorf("control: receive: %w", errno))
			return got, false
		}
		got++
		d.intake.took(l.in.wire())
		if parts == 2 && len(l.in.part(0)) == 0 {
			d.h.Message(l.in.part(1))
		} else {
			l.mu.Lock()
			d.badFrames++
			l.mu.Unlock()
			d.badLog.Warn(l.opts.Log, `control: dropped messages that are not ["", payload]`, "peer", d.addr, "frames", parts)
		}
		if d.ended(l) {
			return got, false
		}
	}
	return got, true
}

// notARouter is why a connection may be accepted and no handshake follow. The kernel accepts for a process that is stopped, too.
const notARouter = "what listens there may be stopped or overloaded, or be no side channel (a ZeroMQ ROUTER)"

// watchLink takes in what the monitor has to say, and says whether there is a connection to work on.
func (d *Dealer) watchLink() bool {
	why := ""
	err := d.s.events(d.l, func(ev zmq4.Event, value int) bool {
		switch ev {
		case zmq4.EVENT_CONNECTED:
			d.fd, d.intake = value, intake{since: time.Now()}
		case zmq4.EVENT_HANDSHAKE_SUCCEEDED:
			d.up()
			return !d.ended(d.l)
		case zmq4.EVENT_CLOSED:
			why = "the connection was refused, or not made in time"
		case zmq4.EVENT_DISCONNECTED:
			why = "the connection was lost"
		case zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq4.EVENT_HANDSHAKE_FAILED_AUTH:
			why = fmt.Sprintf("the handshake failed, ZeroMQ's error 0x%x: %s", value, notARouter)
		case zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
			why = fmt.Sprintf("the handshake failed, %v: %s", syscall.Errno(value), notARouter)
		}
		return why == ""
	})
	if err != nil {
		d.l.fail(err)
	}
	if d.ended(d.l) {
		return false
	}
	if why == "" {
		return true
	}
	// What had come before is still good.
	for d.connected {
		got, more := d.receive()
		if !more {
			return false
		}
		if got == 0 {
			break
		}
	}
	d.failed(why)
	return false
}

func (d *Dealer) up() {
	d.connected, d.failures = true, 0
	d.l.alarms.stop(&d.alarm)
	d.l.mu.Lock()
	d.link = linkUp
	d.l.mu.Unlock()
	d.h.Up()
}

// room asks libzmq whether it takes messages again.
func (d *Dealer) room() bool {
	state, err := d.s.GetEvents()
	return err == nil && state&(zmq4.POLLOUT|zmq4.POLLIN) != 0
}

// flush hands messages to libzmq until there are none, or no room. It returns how many it handed over.
func (d *Dealer) flush() int {
	if !d.connected {
		return 0
	}
	sent, errno := d.q.drain(d.l, d.s.raw, "", nil)
	d.full = errno == syscall.EAGAIN
	if errno != 0 && !d.full {
		d.l.fail(fmt.Errorf("control: send: %w", errno))
	}
	return sent
}
