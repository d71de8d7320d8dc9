package control

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

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

// cut ends the connection of p. libzmq has no call for that, but its descriptor does, if it still is the one: libzmq may have closed
// it just now.
func (r *Router) cut(p *peer) {
	if addr, ours := r.remote(p.fd); ours && addr == p.src.Addr {
		reset(p.fd)
	}
}

// remote is the address at the other end of fd, if that is a connection to this router.
func (r *Router) remote(fd int) (addr string, ours bool) {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return "", false
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return "", false
	}
	_, port := ipPort(local)
	ip, _ := ipPort(remote)
	return ip.String(), port == r.port
}

// reset ends a connection that libzmq has, which then closes it. The kernel is not to keep what the peer has not taken.
func reset(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Shutdown(fd, unix.SHUT_RDWR)
}

func ipPort(sa unix.Sockaddr) (netip.Addr, int) {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(sa.Addr), sa.Port
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(sa.Addr).Unmap(), sa.Port
	}
	return netip.Addr{}, 0
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
