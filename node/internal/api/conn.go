package api

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is one connection with frames on it. One goroutine at a time receives; any may send.
type Conn struct {
	sock *net.UnixConn
	raw  syscall.RawConn
	o    ConnOptions

	// The receiver's.
	in   *bufio.Reader
	poll bool   // in does not wait
	buf  []byte // reused: messages do not refer to it
	part []byte // Take: what has come of a frame that is larger than in's buffer
	left int    // Take: bytes that part waits for
	rest int    // bytes that are still read once sending is over

	over atomic.Bool // nothing can be sent any more, see fail

	mu       sync.Mutex
	held     []byte // goes with the next Send
	backlog  []byte // what the socket did not take yet
	flushing bool   // a goroutine drains backlog
	drained  chan struct{}
	err      error // why nothing can be sent any more
}

const (
	inBuffer   = 64 << 10
	keepBuffer = 1 << 20   // bytes of a receive buffer that is kept from frame to frame
	flushPiece = 256 << 10 // bytes of one write of a backlog, so that WriteStall bounds the wait and not the whole

	// What is still received once nothing can be sent any more. The other end's socket has less than that on the way, if it is closed.
	restBytes = 16 << 20
	restTime  = time.Second
)

// ConnOptions of a Conn.
type ConnOptions struct {
	InLimit    int           // bytes of a frame received
	Backlog    int           // bytes that may wait for the other end to read
	WriteStall time.Duration // the other end may leave the backlog untouched that long; 0: for ever
}

// NewConn takes sock over.
func NewConn(sock *net.UnixConn, o ConnOptions) (*Conn, error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("engine api: %w", err)
	}
	c := &Conn{sock: sock, raw: raw, o: o, rest: restBytes}
	c.in = bufio.NewReaderSize(source{c}, inBuffer)
	return c, nil
}

// source is what a Conn reads from.
type source struct{ c *Conn }

// errWouldBlock is what a Conn that does not wait reads where there is nothing.
var errWouldBlock = errors.New("engine api: nothing to read")

func (s source) Read(b []byte) (n int, err error) {
	c := s.c
	if c.rest == 0 {
		return 0, io.EOF
	}
	n, err = s.read(b[:min(len(b), c.rest)])
	if c.over.Load() {
		c.rest -= n
		if errors.Is(err, errWouldBlock) || errors.Is(err, os.ErrDeadlineExceeded) {
			err = io.EOF
		}
	}
	return n, err
}

func (s source) read(b []byte) (n int, err error) {
	c := s.c
	if !c.poll {
		return c.sock.Read(b)
	}
	// Not by raw.Read, which waits for whoever is in it.
	ctl := c.raw.Control(func(fd uintptr) {
		for {
			if n, err = unix.Read(int(fd), b); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	switch {
	case ctl != nil:
		return 0, ctl
	case errors.Is(err, unix.EAGAIN):
		return 0, errWouldBlock
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// Close ends the connection. Receive and Send fail from then on.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.err == nil {
		c.err = ErrClosed
	}
	c.mu.Unlock()
	return c.sock.Close()
}

// Err says why nothing can be sent any more: ErrClosed after Close, ErrBacklog if the other end did not read; nil while it can.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// SetReceiveDeadline bounds Receive.
func (c *Conn) SetReceiveDeadline(t time.Time) error { return c.sock.SetReadDeadline(t) }

// Receive waits for the next message. io.EOF: the other end closed between two frames. After ErrMalformed and ErrLimit the
// stream cannot be followed any more. After an error of Send, what the other end had sent until then is still received, 16 MiB and for
// 1 s at most: its last frame may be among it.
func (c *Conn) Receive() (Message, error) {
	var head [4]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return nil, err
	}
	return c.payload(head)
}

// Take is Receive for a receiver that does not wait: false if no whole message is there. A connection's first message cannot be taken, and after Take comes
// no Receive.
func (c *Conn) Take() (Message, bool, error) {
	c.poll = true
	m, err := c.take()
	if errors.Is(err, errWouldBlock) {
		return nil, false, nil
	}
	return m, err == nil, err
}

func (c *Conn) take() (Message, error) {
	if c.left == 0 {
		head, err := c.in.Peek(4)
		if err != nil {
			if errors.Is(err, io.EOF) && len(head) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		size, err := c.size(head)
		if err != nil {
			return nil, err
		}
		if 4+size <= inBuffer {
			frame, err := c.in.Peek(4 + size)
			if err != nil {
				return nil, orUnexpected(err)
			}
			m, err := Decode(frame[4:])
			_, _ = c.in.Discard(4 + size) // it is there
			return m, err
		}
		_, _ = c.in.Discard(4)
		c.part, c.left = c.buf[:0], size
	}
	for c.left > 0 { // as in payload
		at := len(c.part)
		b := slices.Grow(c.part, min(c.left, max(at, inBuffer)))
		n, err := c.in.Read(b[at : at+min(c.left, cap(b)-at)])
		c.part, c.left = b[:at+n], c.left-n
		if err != nil {
			return nil, orUnexpected(err)
		}
	}
	if cap(c.part) <= keepBuffer {
		c.buf = c.part
	}
	b := c.part
	c.part = nil
	return Decode(b)
}

// orUnexpected is err within a frame.
func orUnexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Await waits until there is something to take, or until the connection is over, which Take then says. Others may take meanwhile.
func (c *Conn) Await() error {
	return c.raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n != 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
}

func (c *Conn) size(head []byte) (int, error) {
	size := int64(binary.BigEndian.Uint32(head))
	if size > int64(c.o.InLimit) {
		return 0, fmt.Errorf("%w: a frame of %d bytes, at most %d", ErrLimit, size, c.o.InLimit)
	}
	return int(size), nil
}

func (c *Conn) payload(head [4]byte) (Message, error) {
	size, err := c.size(head[:])
	if err != nil {
		return nil, err
	}
	// A length is only a promise: memory grows with the bytes that come.
	buf := c.buf[:0]
	for at := 0; at < size; at = len(buf) {
		n := min(size-at, max(at, inBuffer))
		buf = slices.Grow(buf, n)[:at+n]
		if _, err := io.ReadFull(c.in, buf[at:]); err != nil {
			return nil, orUnexpected(err)
		}
	}
	if cap(buf) <= keepBuffer {
		c.buf = buf
	}
	return Decode(buf)
}

// Send queues messages and never waits: what the socket takes goes out at once, from the caller's goroutine and together, the rest
// as the other end reads. ErrLimit: one of them is larger than limit, nothing was sent. ErrBacklog, ErrClosed or the socket's error:
// the connection is over, but for what Receive still brings. The caller closes it.
func (c *Conn) Send(limit int, ms ...Message) error {
	var frame []byte
	for _, m := range ms {
		var err error
		if frame, err = AppendFrame(frame, m, limit); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	if len(c.held) > 0 {
		frame, c.held = append(c.held, frame...), nil
	}
	if !c.flushing {
		n, err := c.writeNow(frame)
		if err != nil {
			return c.fail(err)
		}
		frame = frame[n:]
		if len(frame) == 0 {
			return nil
		}
	}
	if len(c.backlog)+len(frame) > c.o.Backlog {
		return c.fail(ErrBacklog)
	}
	c.backlog = append(c.backlog, frame...)
	if !c.flushing {
		c.flushing = true
		c.drained = make(chan struct{})
		go c.flush()
	}
	return nil
}

// Hold keeps a message back until the next Send, which then sends it first. Errors as of Send.
func (c *Conn) Hold(limit int, m Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	held, err := AppendFrame(c.held, m, limit)
	if err != nil {
		return err
	}
	c.held = held
	return nil
}

// Room waits until less than half the backlog is in use, so that a long listing does not take the connection down.
func (c *Conn) Room(done <-chan struct{}) error {
	for {
		c.mu.Lock()
		err, used, drained := c.err, len(c.backlog), c.drained
		c.mu.Unlock()
		if err != nil || used < c.o.Backlog/2 {
			return err
		}
		select {
		case <-drained:
		case <-done:
			return ErrClosed
		}
	}
}

// fail is called with mu held. It ends the sending. The other end may have closed behind a last frame of its own, which the receiver gets
// before it learns that the connection is over.
func (c *Conn) fail(err error) error {
	if c.err == nil {
		c.err = err
		c.over.Store(true)
		_ = c.sock.CloseWrite() // who lives, but does not read, learns of it here
		_ = c.sock.SetReadDeadline(time.Now().Add(restTime))
	}
	return c.err
}

// Flush waits until all that was sent is with the socket, for timeout at most.
func (c *Conn) Flush(timeout time.Duration) error {
	c.mu.Lock()
	flushing, drained := c.flushing, c.drained
	c.mu.Unlock()
	if flushing {
		select {
		case <-drained:
		case <-time.After(timeout):
			return os.ErrDeadlineExceeded
		}
	}
	return c.Err()
}

// writeNow writes what the socket takes without waiting.
func (c *Conn) writeNow(b []byte) (n int, err error) {
	ctl := c.raw.Write(func(fd uintptr) bool {
		for {
			n, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if !errors.Is(err, unix.EINTR) {
				return true
			}
		}
	})
	if ctl != nil {
		return 0, ctl
	}
	if errors.Is(err, unix.EAGAIN) {
		return 0, nil
	}
	return max(n, 0), err
}

// flush drains the backlog and ends.
func (c *Conn) flush() {
	for {
		c.mu.Lock()
		if len(c.backlog) == 0 || c.err != nil {
			// writeNow must not meet the deadline of the last piece.
			_ = c.sock.SetWriteDeadline(time.Time{})
			c.backlog, c.flushing = nil, false
			close(c.drained)
			c.mu.Unlock()
			return
		}
		out := c.backlog[:min(len(c.backlog), flushPiece)]
		c.mu.Unlock()

		if c.o.WriteStall > 0 {
			_ = c.sock.SetWriteDeadline(time.Now().Add(c.o.WriteStall))
		}
		n, err := c.sock.Write(out)

		c.mu.Lock()
		c.backlog = c.backlog[n:]
		if errors.Is(err, os.ErrDeadlineExceeded) && n == 0 {
			_ = c.fail(ErrBacklog)
		} else if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			_ = c.fail(err)
		}
		c.mu.Unlock()
	}
}

// SendWithFile sends m with a descriptor of f on its first byte. It may wait, for at most the time given, and must come before
// any Send. f stays the caller's.
func (c *Conn) SendWithFile(m Message, limit int, f *os.File, timeout time.Duration) error {
	frame, err := AppendFrame(nil, m, limit)
	if err != nil {
		return err
	}
	if err := c.sock.SetWriteDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	n, _, err := c.sock.WriteMsgUnix(frame, unix.UnixRights(int(f.Fd())), nil)
	if err == nil && n < len(frame) {
		_, err = c.sock.Write(frame[n:])
	}
	if err != nil {
		return fmt.Errorf("engine api: %w", err)
	}
	return c.sock.SetWriteDeadline(time.Time{})
}

// ReceiveWithFile is Receive for the first frame of a connection, which brings a descriptor. f is nil if none came; else it is
// the caller's to close, also when err is set.
func (c *Conn) ReceiveWithFile() (m Message, f *os.File, err error) {
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	for got := 0; got < len(head); {
		n, oobn, _, _, err := c.sock.ReadMsgUnix(head[got:], oob)
		if oobn > 0 {
			f = oneFile(oob[:oobn], f)
		}
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil {
			return nil, f, err
		}
		got += n
	}
	m, err = c.payload(head)
	return m, f, err
}

// oneFile gives the first descriptor of a control message, after one already there, and closes all others.
func oneFile(oob []byte, f *os.File) *os.File {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return f
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if f != nil {
				_ = unix.Close(fd)
				continue
			}
			f = os.NewFile(uintptr(fd), "pool")
		}
	}
	return f
}
