package tcp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// Sizes that were measured (bench/results): one connection is as fast as several up to a few MiB.
const (
	twoStreams  = 8 << 20  // from here on two connections
	allStreams  = 16 << 20 // from here on all that the peer may have
	maxPartSize = 64 << 20 // so that a slow connection holds up little
)

// read is a READ in flight.
type read struct {
	peer   *peer
	token  token
	id     uint64
	parts  []span.Part
	note   []byte
	ctx    context.Context
	cancel context.CancelCauseFunc

	next   atomic.Int64          // part that nobody has taken
	failed atomic.Pointer[error] // the first failure
	done   chan struct{}
	err    error // set before done is closed
}

// Read implements transfer.Peer.
func (c *peer) Read(ctx context.Context, r transfer.ReadRequest) (transfer.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	total, err := r.Check(c.location.length)
	if err != nil {
		return nil, err
	}
	if len(r.Token) != tokenBytes {
		return nil, fmt.Errorf("%w: tcp: a token of %d bytes", transfer.ErrDenied, len(r.Token))
	}
	streams := 1
	switch {
	case total >= allStreams:
		streams = c.plane.opts.Streams
	case total >= twoStreams:
		streams = min(2, c.plane.opts.Streams)
	}
	n := max(streams, int((total+maxPartSize-1)/maxPartSize))
	rd := &read{
		peer: c, token: token(r.Token), id: random(), note: append([]byte(nil), r.Notification...),
		parts: span.Split(slices.Clone(r.Remote), slices.Clone(r.Local), total, n), done: make(chan struct{}),
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("tcp: read: %w", transfer.ErrClosed)
	}
	rd.ctx, rd.cancel = context.WithCancelCause(c.ctx)
	c.reads.Go(func() { rd.run(streams) })
	return rd, nil
}

// Done implements transfer.Read.
func (r *read) Done() <-chan struct{} { return r.done }

// Err implements transfer.Read.
func (r *read) Err() error { return r.err }

// Cancel implements transfer.Read. It ends the connections that the READ uses.
func (r *read) Cancel() { r.cancel(fmt.Errorf("tcp: %w", transfer.ErrCanceled)) }

// run reads all parts, one connection at least and up to streams if they are free, and commits on the first.
func (r *read) run(streams int) {
	err := r.all(streams)
	if err != nil && r.ctx.Err() != nil {
		err = context.Cause(r.ctx)
	}
	r.cancel(nil)
	r.err = classify(err)
	close(r.done)
}

// fail stops the other streams: at their next part if the peer refused something, which leaves their connections usable, else at
// once.
func (r *read) fail(err error) {
	r.failed.CompareAndSwap(nil, &err)
	if !isRefusal(err) {
		r.cancel(err)
	}
}

func (r *read) all(streams int) error {
	queue := time.NewTimer(r.peer.plane.opts.QueueTimeout)
	defer queue.Stop()
	select {
	case r.peer.slots <- struct{}{}:
	case <-r.ctx.Done():
		return r.ctx.Err()
	case <-queue.C:
		return fmt.Errorf("%w: tcp: no connection to %s was free for %s", transfer.ErrPeerLost, r.peer.location.address(), r.peer.plane.opts.QueueTimeout)
	}
	var helpers sync.WaitGroup
	for range streams - 1 {
		select {
		case r.peer.slots <- struct{}{}:
			helpers.Go(func() {
				s := stream{read: r}
				defer s.close()
				// A helper that cannot connect leaves its part to the others.
				if err := s.open(false); err != nil {
					return
				}
				if err := s.work(); err != nil {
					r.fail(err)
				}
			})
		default: // other READs use it
		}
	}
	s := stream{read: r}
	defer s.close()
	err := s.open(false)
	if err == nil {
		err = s.work()
	}
	if err != nil {
		r.fail(err)
	}
	helpers.Wait()
	if err := r.failed.Load(); err != nil {
		return *err
	}
	return s.commit()
}

// stream is one connection of a READ, and the slot it takes.
type stream struct {
	read *read
	conn *clientConn
	stop func() bool // of the abort on cancel
}

// open takes a connection. Canceling the READ aborts it.
func (s *stream) open(fresh bool) error {
	conn, err := s.read.peer.get(s.read.ctx, fresh)
	if err != nil {
		return err
	}
	s.conn = conn
	s.stop = context.AfterFunc(s.read.ctx, func() { abort(conn.tcp) })
	return nil
}

// close gives the connection back, unless it was dropped, and the slot.
func (s *stream) close() {
	if s.conn != nil {
		if s.stop() {
			s.read.peer.put(s.conn)
		}
		s.conn = nil
	}
	<-s.read.peer.slots
}

// drop ends a connection that cannot be used again.
func (s *stream) drop() {
	s.stop()
	abort(s.conn.tcp)
	s.conn = nil
}

// work reads parts until none is left.
func (s *stream) work() error {
	r := s.read
	for r.failed.Load() == nil && r.ctx.Err() == nil {
		i := int(r.next.Add(1)) - 1
		if i >= len(r.parts) {
			return nil
		}
		p := r.parts[i]
		err := s.try(func(c *clientConn, progress time.Duration, slow func()) error {
			return c.read(request{token: r.token, readID: r.id, spans: p.Remote}, p.Local, p.Bytes, progress, slow)
		})
		if err != nil {
			return err
		}
	}
	return r.ctx.Err()
}

func (s *stream) commit() error {
	r := s.read
	return s.once(func(c *clientConn, progress time.Duration, slow func()) error {
		return c.commit(request{token: r.token, readID: r.id, message: r.note}, progress, slow)
	})
}

// try does f, and once more on a new connection if the connection ended: it may have died while it was idle, or the producer
// reset it because the grant ended, which the second answer then says.
func (s *stream) try(f func(*clientConn, time.Duration, func()) error) error {
	err := s.once(f)
	if err == nil || !broken(err) || s.read.ctx.Err() != nil {
		return err
	}
	if again := s.open(true); again != nil {
		return again
	}
	return s.once(f)
}

func (s *stream) once(f func(*clientConn, time.Duration, func()) error) error {
	plane, address := s.read.peer.plane, s.read.peer.location.address()
	slow := func() {
		plane.opts.Log.Warn("tcp: waiting for bytes", "peer", address, "for", patience)
	}
	err := f(s.conn, plane.opts.ProgressTimeout, slow)
	if err != nil && !isRefusal(err) {
		s.drop()
	}
	return err
}

func isRefusal(err error) bool {
	var refused *refusedError
	return errors.As(err, &refused)
}

// classify makes err one of the contract's.
func classify(err error) error {
	for _, known := range []error{transfer.ErrDenied, transfer.ErrBadRequest, transfer.ErrPeerLost, transfer.ErrCanceled, transfer.ErrClosed} {
		if err == nil || errors.Is(err, known) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
}
