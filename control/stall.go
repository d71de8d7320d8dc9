package control

import (
	"time"

	"golang.org/x/sys/unix"
)

const (
	// stallTimeout is how long a peer may take nothing off its connection while something waits for it. A peer that does not read
	// answers no PING either, but none is sent to it: it would wait behind the rest.
	stallTimeout = 10 * time.Second
	// stallLooks is how often a connection is looked at in that time. The looks are counted, and not the time: if this process was
	// stopped the peers may have been too.
	stallLooks = 5
)

// uptake is how far a peer has come with what it is sent, as the kernel sees it. Owner only.
type uptake struct {
	listed bool   // in Router.owing
	acked  uint64 // bytes that its kernel has acknowledged
	looks  int    // since that grew, or nothing waited; 0 before the first
}

// owe makes the router look at p now and then, as long as something waits for it.
func (r *Router) owe(p *peer) {
	if p.uptake.listed {
		return
	}
	p.uptake = uptake{listed: true}
	r.owing = append(r.owing, p)
	if r.look.index < 0 {
		r.lookAgain()
	}
}

func (r *Router) lookAgain() { r.l.alarms.set(&r.look, time.Now().Add(r.l.opts.stall/stallLooks)) }

// cutStalled looks at the connections of peers that something waits for, and ends those that have stalled. What the monitor has to say
// was read before, so that the descriptors are theirs.
func (r *Router) cutStalled() {
	if len(r.owing) == 0 || r.look.index >= 0 {
		return
	}
	kept := r.owing[:0]
	for _, p := range r.owing {
		if r.peers[p.src.ID] == p && r.waits(p) {
			kept = append(kept, p)
		} else {
			p.uptake.listed = false
		}
	}
	clear(r.owing[len(kept):])
	if r.owing = kept; len(kept) > 0 {
		r.lookAgain()
	}
}

// waits says whether to look at p again. It cuts the connection if the kernel has had something for it all the time, and it took nothing.
func (r *Router) waits(p *peer) bool {
	info, err := unix.GetsockoptTCPInfo(p.fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return false // closed just now
	}
	u := &p.uptake
	inKernel := info.Unacked > 0 || info.Notsent_bytes > 0
	if !inKernel || u.looks == 0 || info.Bytes_acked != u.acked {
		u.acked, u.looks = info.Bytes_acked, 1
		return inKernel || r.l.holds(&p.q)
	}
	if u.looks++; u.looks <= stallLooks {
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
	r.stallLog.Warn(r.l.opts.Log, "control: cut off a peer that took nothing of what waits for it", "port", r.port, "peer", addr,
		"for", r.l.opts.stall)
}

// Stalled counts connections, local ones too, that were ended because their peer took nothing for ten seconds while something waited.
func (r *Router) Stalled() uint64 {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	return r.stalled
}
