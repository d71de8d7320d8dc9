package control

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// stallTimeout is how long a peer may take nothing off its connection while something waits for it. A peer that does not read
	// answers no PING either, but none is sent to it: it would wait behind the rest.
	stallTimeout = 10 * time.Second
	// stallLooks is how often a connection is looked at in that time.
	stallLooks = 5
)

// uptake is how far a peer has come with what it is sent, as the kernel sees it. Owner only.
type uptake struct {
	listed bool      // in Router.owing
	acked  uint64    // bytes that its kernel has acknowledged
	since  time.Time // when that was last seen to grow, or nothing waited; zero before the first look
}

// owe makes the router look at p now and then, as long as something waits for it.
func (r *Router) owe(p *peer) {
	if p.uptake.listed {
		return
	}
	p.uptake = uptake{listed: true}
	r.owing = append(r.owing, p)
	if r.look.index < 0 {
		r.l.alarms.set(&r.look, time.Now().Add(r.l.opts.stall/stallLooks))
	}
}

// cutStalled looks at the connections of peers that something waits for, and ends those that have stalled. What the monitor has to say
// was read before, so that the descriptors are theirs.
func (r *Router) cutStalled() {
	if len(r.owing) == 0 || r.look.index >= 0 {
		return
	}
	now := time.Now()
	kept := r.owing[:0]
	for _, p := range r.owing {
		if r.peers[p.src.ID] == p && r.waits(p, now) {
			kept = append(kept, p)
		} else {
			p.uptake.listed = false
		}
	}
	clear(r.owing[len(kept):])
	if r.owing = kept; len(kept) > 0 {
		r.l.alarms.set(&r.look, now.Add(r.l.opts.stall/stallLooks))
	}
}

// waits says whether to look at p again. It cuts the connection if the kernel has had something for it all the time, and it took nothing.
func (r *Router) waits(p *peer, now time.Time) bool {
	info, err := unix.GetsockoptTCPInfo(p.fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return false // closed just now
	}
	u := &p.uptake
	inKernel := info.Unacked > 0 || info.Notsent_bytes > 0
	if !inKernel || u.since.IsZero() || info.Bytes_acked != u.acked {
		u.acked, u.since = info.Bytes_acked, now
		return inKernel || r.l.holds(&p.q)
	}
	if now.Sub(u.since) < r.l.opts.stall {
		return true
	}
	r.cut(p)
	r.countStalled(p.src.Addr)
	return false
}

func (r *Router) countStalled(addr string) {
	r.l.mu.Lock()
	r.stalled++
	r.l.mu.Unlock()
	r.stallLog.warn(r.l.opts.Log, "control: cut off a peer that took nothing of what waits for it", "port", r.port, "peer", addr,
		"for", r.l.opts.stall)
}

// Stalled counts connections, local ones too, that were ended because their peer took nothing for ten seconds while something waited.
func (r *Router) Stalled() uint64 {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.stalled
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
	if c.count, due = r.budgetLog.due(); !due {
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
