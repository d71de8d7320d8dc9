package control

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// places is how many connections a router may have: of peers elsewhere half of the descriptors that the process may open, and of peers
// of this machine a quarter, so that there are some left for all else that it does. libzmq knows no such limit: it accepts until there
// is no descriptor left, and then tries again without a pause, on a thread that it never leaves.
type places struct{ far, local int }

func newPlaces() (places, error) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return places{}, fmt.Errorf("control: how many descriptors may be open: %w", err)
	}
	files := int(min(r.Cur, 1<<30)) // it may be infinite
	return places{far: max(files/2, 1), local: min(max(files/4, 1), maxLocal)}, nil
}

// accepted files the connection that libzmq has accepted, or ends it if it is one too many: what it sends meanwhile is handled as that
// of a connection that has ended.
func (r *Router) accepted(fd int) {
	if len(r.conns) < r.places.far {
		r.conns[fd] = &conn{intake: intake{since: time.Now()}}
		return
	}
	addr, ours := r.remote(fd)
	if !ours {
		return
	}
	reset(fd)
	r.l.mu.Lock()
	r.turnedAway++
	r.l.mu.Unlock()
	r.placeLog.Warn(r.l.opts.Log, "control: turned away a peer: too many are connected; more descriptors allow for more (ulimit -n, LimitNOFILE=)",
		"port", r.port, "peer", addr, "connected", len(r.conns))
}
