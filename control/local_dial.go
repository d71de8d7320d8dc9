package control

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Conn is what a DealerHandler's owner sends by: a Dealer or a LocalDealer.
type Conn interface {
	Send(body []byte) error
	// SendSoon is Send for a message that nobody waits for: it may go with the next one, or when the loop has nothing else to do.
	SendSoon(body []byte) error
	Close() error
}

// LocalDealer is the dialling end of a connection within this machine. It belongs to its loop, and ends with it.
type LocalDealer struct {
	s    stream
	h    DealerHandler
	name string
}

// DialLocal connects to the router that Router.ListenLocal gave name for. It fails at once, with ErrGone, if there is none: in this
// network namespace, with room in its backlog, and run by the same user or root. Then, or after Down, Dial may still reach it: the
// connection is not made again, as the name is gone with its process.
//
// h hears of Up when the router has accepted the connection, which may be before DialLocal returns, and of Down once, at its end. That
// is noticed at once when the router's process dies, and by heartbeats, as over ZeroMQ, when it is stopped.
func (l *Loop) DialLocal(ctx context.Context, name string, h DealerHandler) (*LocalDealer, error) {
	digits, ok := strings.CutPrefix(name, localPrefix)
	if _, err := hex.DecodeString(digits); !ok || err != nil || len(digits) != localDigits {
		return nil, fmt.Errorf("control: %.80q is not the name of a router's local socket: want %s and %d hexadecimal digits", name, localPrefix, localDigits)
	}
	d := &LocalDealer{h: h, name: name}
	d.s.l, d.s.user = l, d
	if err := l.call(ctx, d.connect); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *LocalDealer) connect() error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("control: make a unix socket: %w", err)
	}
	if err = unix.Connect(fd, abstract(d.name)); err == nil {
		err = checkUser(fd)
	}
	if err != nil {
		unix.Close(fd)
		return d.gone(err)
	}
	if err := d.s.start(fd, d.s.l.opts.maxMessage(DefaultDealerMessage), false); err != nil {
		return fmt.Errorf("control: watch a unix socket: %w", err)
	}
	return nil
}

func (d *LocalDealer) gone(err error) error {
	return fmt.Errorf("%w: unix:@%s: %w", ErrGone, d.name, err)
}

// Name is the name given to DialLocal.
func (d *LocalDealer) Name() string { return d.name }

// Send writes a message at once, or queues it if the kernel has no room. body must not be changed afterwards. ErrQueueFull if the
// queue is full, or all queues of the loop for a large body (Options.TotalBytes), ErrTooLarge if body is larger than the queue may
// be, ErrGone after the connection has ended, ErrClosed after Close. A message that was accepted reaches the peer, or the connection
// ends with Down.
func (d *LocalDealer) Send(body []byte) error {
	return d.send(body, false)
}

// SendSoon implements Conn. Errors are those of Send.
func (d *LocalDealer) SendSoon(body []byte) error { return d.send(body, true) }

func (d *LocalDealer) send(body []byte, soon bool) error {
	if d.s.ended(d.s.l) {
		return ErrClosed
	}
	return d.s.send(body, soon)
}

// Close lets go of the connection, soon. No handler call begins afterwards. Messages not yet written are dropped. Idempotent; it does
// not wait, so it may be called from anywhere.
func (d *LocalDealer) Close() error {
	d.s.l.closeMember(&d.s)
	return nil
}

func (d *LocalDealer) message(body []byte) { d.h.Message(body) }
func (d *LocalDealer) accepted()           { d.h.Up() }
func (d *LocalDealer) over() bool          { return false }
func (d *LocalDealer) lost(err error)      { d.h.Down(d.gone(err)) }
