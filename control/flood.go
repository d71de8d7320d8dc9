package control

import "golang.org/x/sys/unix"

const (
	// floodBytes is how much one connection to a router may have on its way, in the kernel and in libzmq: 40,000 requests of 200
	// bytes. Beyond, the connection is cut and the rest of its messages dropped.
	floodBytes = 8 << 20
	// floodCheck is how many messages of a connection pass between two looks at that.
	floodCheck = 1024
)

// intake notices a connection that sends faster than the handler works. libzmq could stop reading it, but must not: see the note at
// ZMQ_RCVHWM in socket.go. A dealer needs none of this: it asked for what comes. Owner only.
type intake struct {
	messages int
	bytes    int64 // of the wire, so far; handshake and PINGs, not counted, are little
}

// flood counts a message with a payload of size bytes that came by fd, and says whether too much is on its way behind it.
func (t *intake) flood(fd, size int) bool {
	t.bytes += int64(size) + 4 // two frames with short headers
	if size > 255 {
		t.bytes += 7
	}
	if t.messages++; t.messages%floodCheck != 0 {
		return false
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	return err == nil && int64(info.Bytes_received)-t.bytes > floodBytes // an error: closed meanwhile, so that no more comes
}

// dropFlood takes note of p if it floods us, and says whether the message in l.in, which p sent, is to be dropped.
func (r *Router) dropFlood(p *peer) bool {
	if !r.floods[p.src.ID] {
		if !p.intake.flood(r.l.in.fd(), len(r.l.in.part(2))) {
			return false
		}
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
	r.floodLog.warn(r.l.opts.Log, "control: cut off a peer that sends faster than it can be served, and dropped messages", "port", r.port, "peer", addr)
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
