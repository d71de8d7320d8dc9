package control

import (
	"errors"
	"fmt"
)

// addressShare is which part of Options.TotalBytes one address may use.
const addressShare = 4

// total is what waits for all destinations of a loop, or for those of a router at one address. Guarded by Loop.mu.
type total struct {
	whole *total // nil: this is all
	limit int64
	bytes int64 // in outlets
	flow  flow  // of libzmq
	peers int   // at the address
}

// errBudget comes with the ErrQueueFull of a body that there was no room for in a total.
var errBudget = errors.New("too much waits for peers that do not read")

// waiting is all of it. A body on its way from one to the other counts twice. Caller holds Loop.mu.
func (t *total) waiting() int64 { return t.bytes + t.flow.held() }

// add counts bytes in outlets. Caller holds Loop.mu.
func (t *total) add(bytes int64) {
	for ; t != nil; t = t.whole {
		t.bytes += bytes
	}
}

// fits says whether a body of that size may wait besides. Caller holds Loop.mu.
func (t *total) fits(size int64) error {
	if size < large {
		return nil
	}
	for ; t != nil; t = t.whole {
		if t.waiting()+size <= t.limit {
			continue
		}
		of := "all destinations"
		if t.whole != nil {
			of = "one address"
		}
		return fmt.Errorf("%w: %w: %d bytes more would be over %d for %s, see Options.TotalBytes", ErrQueueFull, errBudget, size, t.limit, of)
	}
	return nil
}

// join gives the total of the destinations at an address, which one more now counts for; leave is its end. Owner only; caller holds Loop.mu.
func (l *Loop) join(addr string) *total {
	t := l.addresses[addr]
	if t == nil {
		limit := max(l.opts.TotalBytes/addressShare, l.opts.QueueBytes)
		t = &total{whole: &l.total, limit: limit, flow: newFlow(l.total.flow)}
		l.addresses[addr] = t
	}
	t.peers++
	return t
}

func (l *Loop) leave(addr string, t *total) {
	if t.peers--; t.peers == 0 {
		delete(l.addresses, addr)
		t.flow.drop()
		t.flow = flow{}
	}
}

// crowd is what the log says when there is no room for a body.
type crowd struct {
	err     error
	count   int
	waiting int    // connections that something waits for
	most    string // address that most waits for
	bytes   int64  // there
}

// crowd says whether err is worth a line, and gives what it says. Caller holds Loop.mu.
func (r *Router) crowd(err error) (c crowd, due bool) {
	if !errors.Is(err, errBudget) {
		return c, false
	}
	if c.count, due = r.budgetLog.Due(); !due {
		return c, false
	}
	c.err = err
	for _, p := range r.peers {
		if p.q.n > 0 || p.q.flow.held() > 0 {
			c.waiting++
		}
	}
	for addr, t := range r.l.addresses {
		if n := t.waiting(); n > c.bytes {
			c.most, c.bytes = addr, n
		}
	}
	return c, true
}

func (c *crowd) warn(r *Router) {
	r.l.opts.Log.Warn("control: no room for large messages", "port", r.port, "error", c.err, "connections_waiting", c.waiting,
		"most_for", c.most, "bytes", c.bytes, "count", c.count)
}
