package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/node/internal/api"
)

// read receives until the connection is lost, and says why it is.
func (c *Client) read(l *link) error {
	for {
		l.reading.Lock()
		err := c.take(l)
		l.reading.Unlock()
		if err != nil {
			return err
		}
		_ = l.conn.Await() // the next take says it better
	}
}

// take carries out what has come. Called with l.reading held.
func (c *Client) take(l *link) error {
	for l.readErr == nil {
		m, ok, err := l.conn.Take()
		switch m := m.(type) {
		case nil:
			if err == nil && !ok {
				return nil
			}
		case *api.Reply:
			err = c.replied(l, m)
		case *api.Push:
			c.pushed(l, m)
		case *api.Refused:
			err = &api.Error{Code: m.Code, Message: m.Message}
		default:
			err = fmt.Errorf("%w: a %T from the node", ErrProtocol, m)
		}
		l.readErr = err
	}
	return l.readErr
}

func (c *Client) replied(l *link, m *api.Reply) error {
	c.mu.Lock()
	call := c.calls[m.ID]
	delete(c.calls, m.ID)
	c.mu.Unlock()
	select {
	case <-l.gone: // with what it was owed
		return l.err
	default:
	}
	switch {
	case call == nil || len(call.ops) != len(m.Results):
		return fmt.Errorf("%w: reply %d of %d results fits no request", ErrProtocol, m.ID, len(m.Results))
	case call.abandoned:
		c.giveBack(l, call.ops, m.Results)
	case call.reply != nil:
		call.reply(m.Results)
	}
	return nil
}

func (c *Client) pushed(l *link, m *api.Push) {
	c.mu.Lock()
	p := c.refs[m.Ref] // nil: canceled here while this was on its way
	if m.Last {
		delete(c.refs, m.Ref)
	}
	took := p != nil && p.push(m)
	c.mu.Unlock()
	if m.Handle != 0 && !took {
		c.post(l, []api.Op{{Kind: api.OpRelease, Handle: m.Handle}})
	}
}

// giveBack undoes what operations were granted that nobody waits for any more.
func (c *Client) giveBack(l *link, ops []api.Op, results []api.Result) {
	var undo []api.Op
	for i, r := range results {
		if r.Code != api.CodeOK {
			continue
		}
		switch ops[i].Kind {
		case api.OpReserve:
			undo = append(undo, api.Op{Kind: api.OpDiscard, Handle: r.Handle})
		case api.OpMap:
			undo = append(undo, api.Op{Kind: api.OpRelease, Handle: r.Handle})
		}
	}
	c.post(l, undo)
}

// post sends operations whose results nobody needs, if the connection still is. They are of handles and refs of that connection.
func (c *Client) post(l *link, ops []api.Op) {
	for len(ops) > 0 {
		n := chunk(ops)
		_, _ = c.send(l, ops[:n], false, nil)
		ops = ops[n:]
	}
}

// send makes one request of ops, which must fit one frame. reply, which may be nil and must not block, gets its results, unless the
// connection is lost; late: together with the first push, if all of it is fetches.
func (c *Client) send(l *link, ops []api.Op, late bool, reply func([]api.Result)) (id uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sendLocked(l, ops, late, reply)
}

func (c *Client) sendLocked(l *link, ops []api.Op, late bool, reply func([]api.Result)) (id uint64, err error) {
	if c.err != nil {
		return 0, c.err
	}
	select {
	case <-l.gone:
		return 0, l.err
	default:
	}
	c.nextID++
	id = c.nextID
	// Sending never waits, so the lock may stay; it keeps the request ahead of a reply to it.
	if err := l.conn.Send(api.MaxRequestFrame, &api.Request{ID: id, Ops: ops, Late: late}); err != nil {
		switch {
		case errors.Is(err, api.ErrLimit):
			return 0, err
		case c.o.Once:
			return 0, fmt.Errorf("%w: %w", ErrClosed, err)
		}
		err = fmt.Errorf("%w: %w", ErrDisconnected, err)
		if l == c.link {
			c.lose(err) // the reader, which connects again, learns of it by itself
		}
		return 0, err
	}
	c.calls[id] = &call{ops: ops, reply: reply}
	return id, nil
}

// roundTrip sends ops, which must fit one frame, and waits for their results. If ctx ends first, what they are granted later is
// given back.
func (c *Client) roundTrip(ctx context.Context, l *link, ops []api.Op) ([]api.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	reply := make(chan []api.Result, 1)
	id, err := c.send(l, ops, false, func(r []api.Result) { reply <- r })
	if err != nil {
		return nil, err
	}
	select {
	case r := <-reply:
		return r, nil
	case <-ctx.Done():
		c.mu.Lock()
		call := c.calls[id]
		if call != nil {
			call.abandoned = true
		}
		c.mu.Unlock()
		if call != nil {
			return nil, ctx.Err()
		}
	case <-l.gone:
	}
	// The reply has come all the same, or the connection was lost.
	select {
	case r := <-reply:
		return r, nil
	case <-l.gone:
		return nil, l.err
	}
}

const maxChunk = 4 << 20 // bytes of operations that one request carries, far below the frame's limit

// do carries out any number of operations on one connection, in as many requests as they need.
func (c *Client) do(ctx context.Context, l *link, ops []api.Op) ([]api.Result, error) {
	var all []api.Result
	for rest := ops; len(rest) > 0; {
		n := chunk(rest)
		r, err := c.roundTrip(ctx, l, rest[:n])
		if err != nil {
			c.giveBack(l, ops[:len(all)], all)
			return nil, err
		}
		if all == nil && n == len(ops) {
			return r, nil
		}
		all = append(all, r...)
		rest = rest[n:]
	}
	return all, nil
}

// chunk is how many of ops go into the next request: at least one.
func chunk(ops []api.Op) int {
	size := 0
	for i := range ops {
		o := &ops[i]
		size += 512 + len(o.Key) + len(o.Metadata) + len(o.Entry) + 5*len(o.ItemIndices)
		if i > 0 && (size > maxChunk || i == api.MaxOps) {
			return i
		}
	}
	return len(ops)
}

// register claims a ref for an operation that is about to be sent on the connection that it gives.
func (c *Client) register(p pushee) (l *link, ref uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, 0, c.err
	}
	select {
	case <-c.link.gone:
		return nil, 0, c.link.err
	default:
	}
	c.nextID++
	c.refs[c.nextID] = p
	return c.link, c.nextID, nil
}

// forget lets go of a ref; true if it was still there, so that no push of it is delivered any more.
func (c *Client) forget(ref uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.refs[ref]
	delete(c.refs, ref)
	return ok
}

// failure makes the error of a result, nil if it has none.
func failure(op api.Op, code api.Code, message string) error {
	if code == api.CodeOK {
		return nil
	}
	return &api.Error{Op: op.Kind.String(), Key: op.Key, Code: code, Message: message}
}
