package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/node/internal/api"
)

// Pauses between attempts to connect again.
const (
	firstPause = 5 * time.Millisecond
	maxPause   = time.Second
)

// run is the one goroutine that receives, and that connects again.
func (c *Client) run(l *link) {
	for l != nil {
		err := c.read(l)
		if errors.Is(err, io.EOF) {
			err = errors.New("the node closed it")
		}
		if c.o.Once || final(err) {
			c.end(fmt.Errorf("%w: %w", ErrClosed, err))
			return
		}
		c.mu.Lock()
		c.lose(fmt.Errorf("%w: %w", ErrDisconnected, err))
		over := c.err != nil
		c.mu.Unlock()
		if over {
			return
		}
		c.o.Log.Warn("connection to the node is lost: connecting again", "socket", c.socket, "error", err)
		l = c.reconnect()
	}
}

// final says that connecting again would not help.
func final(err error) bool {
	for _, e := range []error{ErrProtocol, ErrLimit, ErrVersion, ErrNoPool, ErrDenied, ErrBadRequest} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// reconnect gives the next connection, all restated; nil when the client is over.
func (c *Client) reconnect() *link {
	start, pause := time.Now(), firstPause
	for {
		c.shed() // before: it may wait for a node that cannot start for want of that memory
		l, lost, err := c.tryAgain()
		if err == nil {
			c.o.Log.Info("connected to the node again", "socket", c.socket, "epoch", c.Pool().Epoch, "after", time.Since(start).Round(time.Millisecond),
				"lost", lost)
			return l
		}
		// A limit can be one that passes: rows of dead engines, an earlier connection that is still ending.
		if final(err) && !errors.Is(err, ErrLimit) {
			c.end(fmt.Errorf("%w: %w", ErrClosed, err))
			return nil
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)/2):
		case <-c.ctx.Done():
			return nil
		}
		pause = min(2*pause, maxPause)
	}
}

// tryAgain connects and restates; lost counts what could not be restated.
func (c *Client) tryAgain() (l *link, lost int, err error) {
	ctx, cancel := context.WithTimeout(c.ctx, handshakeTimeout)
	defer cancel()
	before := c.Pool()
	c.mu.Lock()
	token := c.token
	c.mu.Unlock()
	conn, welcome, file, err := connect(ctx, c.socket, &api.Hello{Name: c.o.Name, Pool: before.Group, Token: token, Epoch: before.Epoch})
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = file.Close() }()

	c.memory.RLock()
	have := c.mapping
	closed, unmapped := have == nil, have != nil && have.bytes == nil
	c.memory.RUnlock()
	if closed {
		_ = conn.Close()
		return nil, 0, ErrClosed
	}
	if unmapped {
		have = nil
	}
	m, err := mapPool(welcome, file, have)
	if err != nil {
		_ = conn.Close()
		return nil, 0, err
	}
	l = &link{conn: conn, mapping: m, gone: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReceiveDeadline(time.Unix(1, 0)) })
	r := c.restatement(m == have)
	if err = r.send(conn); err == nil && !stop() {
		err = ctx.Err()
	}
	if err == nil && m != have {
		err = c.remap(m)
	}
	if err != nil {
		_ = conn.Close()
		if m != have {
			c.memory.Lock()
			_ = m.unmap()
			c.memory.Unlock()
		}
		return nil, 0, err
	}
	lost = c.install(l, welcome, r)
	return l, lost, nil
}

// remap makes another file the one that is reserved and mapped in from now on.
func (c *Client) remap(m *mapping) error {
	c.memory.Lock()
	defer c.memory.Unlock()
	if c.mapping == nil {
		return ErrClosed
	}
	if c.mapping.bytes != nil {
		c.earlier = append(c.earlier, c.mapping)
	}
	c.mapping = m
	return nil
}

// shed unmaps what no node will go on with, where nothing is reserved or mapped any more.
func (c *Client) shed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shedLocked()
}

// shedLocked is shed with the lock held. What has no name and is still used stays, and is said once: the node that comes next may need the
// memory.
func (c *Client) shedLocked() {
	c.memory.Lock()
	defer c.memory.Unlock()
	c.earlier = slices.DeleteFunc(c.earlier, func(m *mapping) bool {
		if m.uses > 0 {
			c.kept(m)
			return false
		}
		_ = m.unmap()
		return true
	})
	select {
	case <-c.link.gone:
	default:
		return
	}
	switch m := c.mapping; {
	case m == nil || m.bytes == nil:
	case m.uses > 0:
		c.kept(m)
	case c.err != nil || m.orphaned(): // there will be no other connection, or none to this file
		_ = m.unmap()
	}
}

// kept says once what keeps a file that no node will go on with.
func (c *Client) kept(m *mapping) {
	if m.said || !m.orphaned() {
		return
	}
	m.said = true
	c.o.Log.Warn("memory of a node that is gone is kept: release what is mapped or reserved in it", "socket", c.socket, "bytes", len(m.bytes), "in_use", m.uses)
}

// unused is the end of a Reservation or a Mapped. Called with the lock held; shed follows, without it, if it says so.
func (c *Client) unused(m *mapping) (shed bool) {
	m.uses--
	return m.uses == 0 && (m != c.link.mapping || c.err != nil)
}

// restatement is what a client says that it has, and what the node answers.
type restatement struct {
	ops     []api.Op
	filled  []*Reservation // of the first ops
	pinned  []*Mapped      // of those behind
	results []api.Result
}

// restatement collects what the client has. Of another file it has nothing: its blocks are nobody's there.
func (c *Client) restatement(sameFile bool) *restatement {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &restatement{}
	for res := range c.filled {
		if sameFile && res.link != nil {
			r.filled = append(r.filled, res)
			r.ops = append(r.ops, api.Op{Kind: api.OpResume, Key: res.info.Key, Gen: res.info.Gen})
		}
	}
	for m := range c.pinned {
		if sameFile && m.link != nil {
			r.pinned = append(r.pinned, m)
			r.ops = append(r.ops, api.Op{Kind: api.OpRepin, Key: m.info.Key, Gen: m.info.Gen})
		}
	}
	r.ops = append(r.ops, api.Op{Kind: api.OpRestated})
	return r
}

// send takes the round trips on a connection that nobody else uses yet.
func (r *restatement) send(conn *api.Conn) error {
	for rest := r.ops; len(rest) > 0; {
		n := chunk(rest)
		if err := conn.Send(api.MaxRequestFrame, &api.Request{ID: 1, Ops: rest[:n]}); err != nil {
			return err
		}
		m, err := conn.Receive()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *api.Reply:
			if len(m.Results) != n {
				return fmt.Errorf("%w: %d results of %d operations", ErrProtocol, len(m.Results), n)
			}
			r.results = append(r.results, m.Results...)
		case *api.Refused:
			return &api.Error{Code: m.Code, Message: m.Message}
		default:
			return fmt.Errorf("%w: a %T while restating", ErrProtocol, m)
		}
		rest = rest[n:]
	}
	return nil
}

// install makes l the connection. What could not be restated is stale; lost counts it.
func (c *Client) install(l *link, w *api.Welcome, r *restatement) (lost int) {
	c.mu.Lock()
	if c.err != nil { // Close has come: it said bye on the old one
		c.mu.Unlock()
		_ = l.conn.Send(api.MaxRequestFrame, &api.Bye{})
		_ = l.conn.Close()
		return 0
	}
	results := r.results
	var undo []api.Op
	for _, res := range r.filled {
		got := results[0]
		results = results[1:]
		res.link, res.handle = nil, 0
		_, wanted := c.filled[res]
		switch {
		case got.Code == api.CodeOK && !wanted: // given up meanwhile
			undo = append(undo, api.Op{Kind: api.OpDiscard, Key: res.key, Handle: got.Handle})
		case got.Code == api.CodeOK:
			res.link, res.handle = l, got.Handle
		case got.Code == api.CodeHeld:
			res.committed = true
			if got.Info != nil {
				res.info = *got.Info
			}
		default:
			lost++
		}
	}
	for _, m := range r.pinned {
		got := results[0]
		results = results[1:]
		m.link, m.handle = nil, 0
		_, wanted := c.pinned[m]
		switch {
		case got.Code != api.CodeOK:
			delete(c.pinned, m)
			lost++
		case !wanted: // released meanwhile
			undo = append(undo, api.Op{Kind: api.OpRelease, Handle: got.Handle})
		default:
			m.link, m.handle = l, got.Handle
		}
	}
	for res := range c.filled { // of a file that is gone
		if res.link != l {
			res.link = nil
		}
	}
	for m := range c.pinned {
		if m.link != l {
			m.link = nil
			delete(c.pinned, m)
			lost++
		}
	}
	c.welcomed(w)
	c.link = l
	up := c.up
	c.up = make(chan struct{})
	close(up)
	c.mu.Unlock()
	c.post(l, undo)
	c.shed()
	return lost
}

// again says, after a call on a connection that is lost, whether to make the call again: nil, and there is another connection. Else
// the error is the call's.
func (c *Client) again(ctx context.Context, err error) error {
	if !errors.Is(err, ErrDisconnected) || c.o.Wait < 0 {
		return err
	}
	deadline := time.NewTimer(c.o.Wait)
	defer deadline.Stop()
	c.mu.Lock()
	up, l := c.up, c.link
	c.mu.Unlock()
	select {
	case <-l.gone:
	default:
		return nil // it is there already
	}
	select {
	case <-up:
		return nil
	case <-deadline.C:
		return fmt.Errorf("%w (waited %v)", err, c.o.Wait)
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return c.Err()
	}
}
