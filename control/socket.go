package control

import (
	"encoding/binary"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/pebbe/zmq4"
)

// routerSendBuffer is what the kernel may hold for a peer of a router. libzmq's I/O thread fills it in one go, megabytes by default, before it
// turns to the next connection: beside 60 peers with 7.3 MB each to read, an answer to another waited until all were done, 120 ms, and
// 8 ms with this. With half of it a round trip of the loopback device may stall for 40 ms.
const routerSendBuffer = 128 << 10

// zsock is a libzmq socket, watched by the loop. Owner only.
type zsock struct {
	*zmq4.Socket
	raw unsafe.Pointer // for recv and send
	fd  int            // readable when libzmq has something to say, -1 while not watched
}

// socket is a zsock with the monitor of its connections. Owner only.
type socket struct {
	zsock
	mon zsock
}

// newSocket makes a socket with all options set, so that they hold from the first bind or connect on: libzmq copies heartbeats into
// a connection as it is made, and ignores what comes later.
func (l *Loop) newSocket(t zmq4.Type, v6 bool, maxMessage int64, events zmq4.Event, m member) (*socket, error) {
	s := &socket{zsock: zsock{fd: -1}, mon: zsock{fd: -1}}
	if err := s.open(l, t, v6, maxMessage, events, m); err != nil {
		s.close(l)
		return nil, fmt.Errorf("control: make a %v socket: %w", t, sysErr(err))
	}
	return s, nil
}

func (s *socket) open(l *Loop, t zmq4.Type, v6 bool, maxMessage int64, events zmq4.Event, m member) error {
	if err := s.zsock.open(l, t); err != nil {
		return err
	}
	o := &l.opts
	err := set(
		s.SetHeartbeatIvl(o.HeartbeatInterval),
		s.SetHeartbeatTimeout(o.HeartbeatTimeout),
		s.SetHeartbeatTtl(o.HeartbeatTTL),
		s.SetLinger(0),
		s.SetMaxmsgsize(o.maxMessage(maxMessage)),
		s.SetSndhwm(o.Queue),
		// No limit: libzmq 4.3 aborts the process when a connection that it stopped reading, at this limit, is reset while it owes
		// that peer an answer to a PING (its issues 4364, 4841; seen with 4.3.4). Any peer could bring that about. It also answers
		// no PING while it has stopped. So what comes in is limited by the owner being fast, which handlers that do not block are.
		s.SetRcvhwm(0),
		s.SetHandshakeIvl(o.ConnectTimeout),
		s.SetConnectTimeout(o.ConnectTimeout),
		s.SetIpv6(v6),
		// A peer without heartbeats (ZMTP 3.0) that loses power is noticed by the kernel, in a minute.
		s.SetTcpKeepalive(1),
		s.SetTcpKeepaliveIdle(30),
		s.SetTcpKeepaliveIntvl(10),
		s.SetTcpKeepaliveCnt(3),
		s.SetBacklog(1024),
		// The dealer reconnects itself, on a new socket: libzmq gives a peer up for good after a protocol error, and would keep on
		// sending into a queue of its own while nobody is there. Turning its reconnecting off (-1) is no way to have that: it would
		// end the endpoint while a message is being received, and then abort the process (its issue 3485). So, much later.
		s.SetReconnectIvl(24*time.Hour),
	)
	if err == nil && t == zmq4.ROUTER {
		err = set(
			s.SetRouterMandatory(1), // report an unknown or full destination instead of dropping
			s.SetSndbuf(routerSendBuffer),
		)
	}
	if err != nil {
		return err
	}

	l.monitors++
	name := fmt.Sprintf("inproc://monitor-%d", l.monitors)
	if err := s.Monitor(name, events); err != nil {
		return err
	}
	if err := s.mon.open(l, zmq4.PAIR); err != nil {
		return err
	}
	// No limit: libzmq's I/O thread would wait on a full monitor while it holds the lock that closing the monitor takes.
	if err := set(s.mon.SetRcvhwm(0), s.mon.SetLinger(0), s.mon.Connect(name)); err != nil {
		return err
	}
	if err := s.zsock.watch(l, m); err != nil {
		return err
	}
	return s.mon.watch(l, m)
}

// set returns the first error of a list of settings.
func set(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// close gives everything back. libzmq closes the connections soon after, on its own thread.
func (s *socket) close(l *Loop) {
	if s.Socket != nil {
		s.Monitor("", 0) // stop it first, or libzmq's I/O thread waits for a reader that is gone
	}
	s.mon.close(l)
	s.zsock.close(l)
}

// events hands the monitor's events to each, until that says no. It receives into a buffer of its own, as a message may be in the
// loop's at the time.
func (s *socket) events(l *Loop, each func(ev zmq4.Event, value int) (more bool)) error {
	for {
		parts, errno := l.inMon.recv(s.mon.raw)
		if errno == syscall.EAGAIN {
			return nil
		}
		if errno != 0 {
			return fmt.Errorf("control: read a socket's monitor: %w", errno)
		}
		// Two parts: the event with a value (an error number, a descriptor or a time), then the endpoint.
		p := l.inMon.part(0)
		if parts != 2 || len(p) != 6 {
			return fmt.Errorf("control: read a socket's monitor: an event of %d parts and %d bytes", parts, len(p))
		}
		if !each(zmq4.Event(binary.NativeEndian.Uint16(p)), int(int32(binary.NativeEndian.Uint32(p[2:])))) {
			return nil
		}
	}
}

func (z *zsock) open(l *Loop, t zmq4.Type) error {
	s, err := l.ctx.NewSocket(t)
	if err != nil {
		return err
	}
	z.Socket = s
	z.raw, err = handle(s)
	return err
}

// watch lets the loop take a turn of m whenever libzmq has something to say.
func (z *zsock) watch(l *Loop, m member) error {
	fd, err := z.GetFd()
	if err != nil {
		return err
	}
	if err := l.watch(fd, m); err != nil {
		return err
	}
	z.fd = fd
	return nil
}

func (z *zsock) close(l *Loop) {
	if z.fd >= 0 {
		l.unwatch(z.fd)
		z.fd = -1
	}
	if z.Socket != nil {
		z.Close()
	}
}
