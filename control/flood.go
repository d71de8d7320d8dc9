package control

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// floodBytes is how much one connection to a router may have on its way, in the kernel and in libzmq: 40,000 requests of 200
	// bytes. Beyond, the connection is cut and the rest of its messages dropped.
	floodBytes = 8 << 20
	// floodCheck is how many messages of a connection pass between two looks at that, and floodLook how much time between looks at all
	// connections: in that, libzmq's one thread can take in some 200 MB.
	floodCheck = 1024
	floodLook  = 250 * time.Millisecond
	// floodIdle is what the handshake, and in each second heartbeats, may have of a connection. It takes 8 to 16 bytes a second.
	floodIdle = 128
)

// intake notices a connection that sends faster than the handler works, or a message that never ends: libzmq counts no bytes of one
// that is not complete. It could stop reading the connection, but must not: see the note at ZMQ_RCVHWM in socket.go. A dealer needs
// none of this: it asked for what comes. Owner only.
type intake struct {
	since    time.Time
	messages int
	bytes    int64 // of the wire, in messages that have come so far
}

// took counts a message of size bytes.
func (t *intake) took(size int64) {
	t.messages++
	t.bytes += size
}

// flood says whether more than limit is on its way by fd behind what has come.
func (t *intake) flood(fd int, limit int64) bool { return t.behind(fd) > limit }

// behind is how many bytes are on their way by fd behind what has come.
func (t *intake) behind(fd int) int64 {
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return 0 // closed meanwhile, so that no more comes
	}
	idle := floodIdle * (1 + int64(time.Since(t.since)/time.Second))
	return max(int64(info.Bytes_received)-t.bytes-idle, 0)
}

// cutEndless looks at all connections, and ends those that have too much on its way. What the monitor has to say was read before.
func (r *Router) cutEndless() {
	if len(r.conns) == 0 && r.l.swell.busy.IsZero() || r.meter.index >= 0 {
		return
	}
	r.l.alarms.set(&r.meter, time.Now().Add(floodLook))
	limit := floodBytes + r.l.opts.maxMessage(DefaultRouterMessage)
	var most int64
	for _, c := range r.conns {
		c.behind = 0
	}
	for fd, c := range r.conns {
		if !c.cut {
			c.behind = c.intake.behind(fd)
			most = max(most, c.behind)
		}
	}
	if r.l.swell.grown(most) {
		limit = swellBytes
	}
	for fd, c := range r.conns {
		if c.behind <= limit {
			continue
		}
		addr, ours := r.remote(fd)
		if !ours {
			continue
		}
		c.cut = true
		for _, p := range c.peers {
			r.floods[p.src.ID] = true
		}
		r.countFlood(addr)
		reset(fd)
	}
}

// dropFlood takes note of p if it floods us, and says whether the message in l.in, which p sent, is to be dropped.
func (r *Router) dropFlood(p *peer) bool {
	if !r.floods[p.src.ID] {
		c := p.conn
		if c == nil || c.intake.messages%floodCheck != 0 || !c.intake.flood(p.fd, floodBytes) {
			return false
		}
		c.cut = true
		r.floods[p.src.ID] = true
		r.cut(p)
	}
	r.countFlood(p.src.Addr)
	return true
}

func (r *Router) countFlood(addr string) {
	r.l.mu.Lock()
	r.flooded++
	r.l.mu.Unlock()
	r.floodLog.Warn(r.l.opts.Log, "control: cut off a peer that sends faster than it can be served, and dropped messages", "port", r.port, "peer", addr)
}

// forgetFloods lets go of the ids whose connections have ended. It is called when nothing is left to receive.
func (r *Router) forgetFloods() {
	for id := range r.floods {
		if r.peers[id] == nil {
			delete(r.floods, id)
		}
	}
}

// Flooded counts messages dropped because their peer sent megabytes faster than it could be served.
func (r *Router) Flooded() uint64 {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.flooded
}

// floods looks at what is on its way to a dealer: no more than a message as large as one may be, and what a router may have.
func (d *Dealer) floods() bool {
	if d.fd == 0 || d.meter.index >= 0 {
		return false
	}
	d.l.alarms.set(&d.meter, time.Now().Add(floodLook))
	behind := d.intake.behind(d.fd)
	limit := floodBytes + d.l.opts.maxMessage(DefaultDealerMessage)
	if d.l.swell.grown(behind) {
		limit = swellBytes
	}
	return behind > limit
}
