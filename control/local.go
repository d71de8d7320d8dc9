package control

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/sparselog"
)

const (
	// localPrefix and 32 hexadecimal digits are the name of a router's local socket.
	localPrefix = "tensorferry-"
	localDigits = 32
	// maxLocal is how many local connections a router has at most.
	maxLocal = 4096
	// acceptBudget is how many connections a router accepts in one turn, acceptPause how long it leaves them waiting when the process
	// has no descriptors left.
	acceptBudget = 64
	acceptPause  = 100 * time.Millisecond
	// localBacklog is how many connections may wait to be accepted; the kernel cuts it to net.core.somaxconn.
	localBacklog = 1024
)

// ListenLocal makes the router also accept connections of this machine by DialLocal, and returns the name to give there. It is that
// of an abstract unix socket, random, seen in this network namespace only, and gone with the router. A message that comes this way
// is handled as any other; its Source has Local set, and Send answers it by its ID.
//
// A peer must run as the same user as this process, or as root; others are turned away, counted and logged. There may be 4,096 at
// once, or a quarter of the descriptors that the process may open if that is less. Calling it again returns the same name.
func (r *Router) ListenLocal(ctx context.Context) (name string, err error) {
	err = r.l.call(ctx, func() error {
		if r.ended(r.l) {
			return ErrClosed
		}
		if r.local == nil {
			a, err := r.newAcceptor()
			if err != nil {
				return fmt.Errorf("control: listen on a unix socket for peers of this machine: %w", err)
			}
			r.local = a
		}
		name = r.local.name
		return nil
	})
	return name, err
}

// acceptor is a router's local socket. Owner only.
type acceptor struct {
	standing
	r     *Router
	name  string
	ids   string // first part of the ids of its connections: no peer that names itself can guess it
	made  uint64 // connections so far
	fd    int
	idle  bool // not watched, until the alarm
	alarm alarm
	log   sparselog.Cause
}

func (r *Router) newAcceptor() (*acceptor, error) {
	a := &acceptor{r: r, name: localPrefix + randomHex(), ids: "local-" + randomHex(), fd: -1}
	a.alarm = alarm{m: a, index: -1}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	a.fd = fd
	if err := set(unix.Bind(fd, abstract(a.name)), unix.Listen(fd, localBacklog), r.l.watch(fd, a)); err != nil {
		unix.Close(fd)
		return nil, err
	}
	r.l.members[a] = struct{}{}
	return a, nil
}

func randomHex() string {
	var b [localDigits / 2]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// abstract is the address of a socket that has a name and no file.
func abstract(name string) *unix.SockaddrUnix { return &unix.SockaddrUnix{Name: "@" + name} }

// release implements member. Idempotent: it ends with its router, or with the loop, which takes its members in any order.
func (a *acceptor) release() {
	if a.fd < 0 {
		return
	}
	a.r.l.unwatch(a.fd)
	unix.Close(a.fd)
	a.fd = -1
	a.r.l.alarms.stop(&a.alarm)
	delete(a.r.l.members, a)
}

// turn implements member.
func (a *acceptor) turn() bool {
	l := a.r.l
	if a.r.ended(l) {
		return false
	}
	if a.idle {
		if err := l.watch(a.fd, a); err != nil {
			a.pause(err)
			return false
		}
		a.idle = false
	}
	more := true
	for range acceptBudget {
		fd, _, err := unix.Accept4(a.fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		if errors.Is(err, syscall.EAGAIN) {
			more = false
			break
		}
		if errors.Is(err, syscall.EINTR) || errors.Is(err, syscall.ECONNABORTED) {
			continue
		}
		if err != nil { // EMFILE, ENFILE, ENOMEM: the connection stays where it is, and epoll would not sleep
			l.unwatch(a.fd)
			a.idle = true
			a.pause(err)
			return false
		}
		a.accept(fd)
		if a.r.ended(l) {
			return false
		}
	}
	l.mu.Lock()
	a.ready = more
	l.mu.Unlock()
	return more
}

func (a *acceptor) pause(err error) {
	l := a.r.l
	a.log.Warn(l.opts.Log, "control: local connections could not be accepted", "port", a.r.port, "error", err)
	l.alarms.set(&a.alarm, time.Now().Add(acceptPause))
	l.mu.Lock()
	a.ready = false
	l.mu.Unlock()
}

// accept takes in a connection, or turns it away.
func (a *acceptor) accept(fd int) {
	r := a.r
	err := checkUser(fd)
	if err == nil && len(r.locals) >= r.places.local {
		err = fmt.Errorf("%d are connected", len(r.locals))
	}
	if err != nil {
		unix.Close(fd)
		r.turnAway(err)
		return
	}
	a.made++
	p := &localPeer{r: r, src: Source{ID: fmt.Sprint(a.ids, "-", a.made), Local: true}}
	p.s = &stream{l: r.l, user: p}
	if err := p.s.start(fd, r.l.opts.maxMessage(DefaultRouterMessage), true); err != nil {
		r.turnAway(err)
		return
	}
	p.s.sign(signReady)
	r.l.mu.Lock()
	r.locals[p.src.ID] = p
	r.l.mu.Unlock()
}

func (r *Router) turnAway(err error) {
	r.l.mu.Lock()
	r.turnedAway++
	r.l.mu.Unlock()
	r.local.log.Warn(r.l.opts.Log, "control: turned away a local peer", "port", r.port, "error", err)
}

// TurnedAway counts connections that were closed at once: one too many, or a local one of another user.
func (r *Router) TurnedAway() uint64 {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.turnedAway
}

// checkUser says whether the process at the other end of a unix socket may be trusted: it is ours or root's, as it was when it connected or
// began to listen. A user that is not mapped in our user namespace has neither number.
func checkUser(fd int) error {
	cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("who is the peer: SO_PEERCRED: %w", err)
	}
	if own := os.Geteuid(); cred.Uid != 0 && int(cred.Uid) != own {
		return fmt.Errorf("%w: process %d runs as user %d, this one as %d: run both as one user", errUser, cred.Pid, cred.Uid, own)
	}
	return nil
}

var errUser = errors.New("a process of another user")

// localPeer is a router's end of a local connection.
type localPeer struct {
	r    *Router
	s    *stream
	src  Source
	sent bool // it has sent something; owner only
}

func (p *localPeer) message(body []byte) {
	p.sent = true
	p.r.h.Message(p.src, body)
}

func (p *localPeer) accepted()  {}
func (p *localPeer) over() bool { return p.r.ended(p.r.l) }

func (p *localPeer) lost(err error) {
	r := p.r
	r.forget(p)
	switch {
	case errors.Is(err, errStalled):
		r.countStalled("local")
	case errors.Is(err, errFrame):
		r.l.mu.Lock()
		r.badFrames++
		r.l.mu.Unlock()
		r.badLog.Warn(r.l.opts.Log, "control: ended a local connection", "port", r.port, "error", err)
	}
	if p.sent && r.left != nil && !r.ended(r.l) {
		r.left.Left(p.src)
	}
}

func (r *Router) forget(p *localPeer) {
	r.l.mu.Lock()
	delete(r.locals, p.src.ID)
	r.l.mu.Unlock()
}

// send is Router.Send for a local peer.
func (p *localPeer) send(m parcel) error {
	body, err := m.bytes()
	if err != nil {
		return err
	}
	err = p.s.send(body, false)
	if err == nil {
		return nil
	}
	r := p.r
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if errors.Is(err, ErrGone) {
		r.unroutable++
	} else {
		r.fullQueue++
	}
	return err
}
