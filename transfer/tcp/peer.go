package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// Pauses between attempts to connect to a peer that could not be reached: doubled from the first to the last.
const (
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 10 * time.Second
)

// peer is a registration of another process. It holds at most Options.Streams connections.
type peer struct {
	plane    *Plane
	location location
	slots    chan struct{} // one for each connection in use
	ctx      context.Context
	cancel   context.CancelCauseFunc
	reads    sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	idle     []*clientConn
	backoff  time.Duration
	notUntil time.Time // no attempt to connect before
	lastErr  error     // of the latest attempt
}

// clientConn is a greeted connection. It is used by one goroutine at a time.
type clientConn struct {
	tcp    *net.TCPConn
	raw    syscall.RawConn
	buf    []byte
	reused bool // it has served before: it may have died unseen since
}

// AddPeer implements transfer.Plane. It connects, so that an address that cannot be reached is known at once; the connection is
// kept for the first READ.
func (p *Plane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	l, err := decodeLocation(metadata)
	if err != nil {
		return nil, err
	}
	if p.opts.AllowHost != nil {
		if err := p.opts.AllowHost(l.host); err != nil {
			return nil, fmt.Errorf("%w: tcp: host %q: %w", transfer.ErrUnreachable, l.host, err)
		}
	}
	c := &peer{plane: p, location: l, slots: make(chan struct{}, p.opts.Streams)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", transfer.ErrUnreachable, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		abort(conn.tcp)
		return nil, fmt.Errorf("tcp: add peer: %w", transfer.ErrClosed)
	}
	c.idle = append(c.idle, conn)
	p.peers[c] = struct{}{}
	return c, nil
}

// Close implements transfer.Peer: READs in flight end with ErrClosed.
func (c *peer) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel(fmt.Errorf("tcp: peer closed: %w", transfer.ErrClosed))
	c.reads.Wait()
	c.mu.Lock()
	idle := c.idle
	c.idle = nil
	c.mu.Unlock()
	for _, conn := range idle {
		_ = conn.tcp.Close()
	}
	c.plane.mu.Lock()
	delete(c.plane.peers, c)
	c.plane.mu.Unlock()
	return nil
}

// get gives a connection to use, an idle one unless fresh is set. The caller holds a slot.
func (c *peer) get(ctx context.Context, fresh bool) (*clientConn, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 && !fresh {
		conn := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return conn, nil
	}
	wait, lastErr := time.Until(c.notUntil), c.lastErr
	c.mu.Unlock()
	if wait > 0 {
		return nil, fmt.Errorf("%w: tcp: %s: next attempt in %s: %w", transfer.ErrPeerLost, c.location.address(), wait.Round(time.Millisecond), lastErr)
	}
	conn, err := c.connect(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, err // says nothing about the peer
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lastErr = err; err == nil {
		c.backoff = 0
		return conn, nil
	}
	c.backoff = min(max(2*c.backoff, firstBackoff), lastBackoff)
	c.notUntil = time.Now().Add(c.backoff)
	return nil, fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
}

// put gives a connection back that has nothing outstanding.
func (c *peer) put(conn *clientConn) {
	conn.reused = true
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = conn.tcp.Close()
		return
	}
	c.idle = append(c.idle, conn)
}

// connect dials and greets.
func (c *peer) connect(ctx context.Context) (*clientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.plane.opts.DialTimeout)
	defer cancel()
	address := c.location.address()
	c.plane.dials.Add(1)
	t, err := dial(ctx, address, c.plane.opts.ProgressTimeout)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { abort(t) })
	conn := &clientConn{tcp: t}
	err = conn.greet(c.location.id)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		abort(t)
		return nil, fmt.Errorf("tcp: greeting %s: %w", address, err)
	}
	return conn, nil
}

// greet is ended by the closing of the connection.
func (c *clientConn) greet(id endpointID) (err error) {
	if c.raw, err = c.tcp.SyscallConn(); err != nil {
		return err
	}
	if _, err := c.tcp.Write(id.append(header{kind: kindHello, length: helloBytes}.append(nil))); err != nil {
		return err
	}
	h, err := readHeader(c.tcp)
	if err != nil {
		return err
	}
	if h.kind != kindWelcome {
		return errGarbage
	}
	return c.refusal(h)
}

// refusal turns the status of an answer into an error, after reading its text.
func (c *clientConn) refusal(h header) error {
	if h.status == statusOK {
		return nil
	}
	b, err := readBody(c.tcp, c.buf, h.length, maxText)
	if err != nil {
		return err
	}
	r := &refusedError{status: h.status, text: string(b)}
	return r
}

// refusedError is the peer's answer to a request; the connection is still good.
type refusedError struct {
	status status
	text   string
}

func (e *refusedError) Error() string { return fmt.Sprintf("refused by the peer: %q", e.text) }

// Unwrap gives the contract's error.
func (e *refusedError) Unwrap() error {
	switch e.status {
	case statusDenied:
		return transfer.ErrDenied
	case statusUnknown:
		return transfer.ErrPeerLost
	default:
		return transfer.ErrBadRequest
	}
}

// read fetches one part.
func (c *clientConn) read(q request, local [][]byte, total int64, progress time.Duration, slow func()) error {
	c.buf = q.append(kindRead, c.buf[:0])
	h, err := c.ask(kindData, progress, slow)
	if err != nil {
		return err
	}
	if h.length != total {
		return fmt.Errorf("%w: %d bytes for %d asked", errGarbage, h.length, total)
	}
	return receive(c.tcp, c.raw, local, progress, slow)
}

// commit asks whether all that was read under the token is good, and delivers the notification.
func (c *clientConn) commit(q request, progress time.Duration, slow func()) error {
	c.buf = q.append(kindCommit, c.buf[:0])
	h, err := c.ask(kindDone, progress, slow)
	if err == nil && h.length != 0 {
		return errGarbage
	}
	return err
}

// ask sends c.buf and reads the header of the answer.
func (c *clientConn) ask(want kind, progress time.Duration, slow func()) (header, error) {
	if err := c.tcp.SetWriteDeadline(time.Now().Add(progress)); err != nil {
		return header{}, err
	}
	if _, err := c.tcp.Write(c.buf); err != nil {
		return header{}, err
	}
	var b [headerBytes]byte
	if err := receive(c.tcp, c.raw, [][]byte{b[:]}, progress, slow); err != nil {
		return header{}, err
	}
	h, err := parseHeader(&b)
	if err != nil {
		return header{}, err
	}
	if h.kind != want {
		return header{}, fmt.Errorf("%w: answer of kind %d", errGarbage, h.kind)
	}
	return h, c.refusal(h)
}

// broken says whether err is the connection's end, so that a new connection may do better.
func broken(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ETIMEDOUT)
}
