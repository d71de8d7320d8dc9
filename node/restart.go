package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// A node that died, however, leaves its regions, its socket's file and its port to the next node of its instance: entries, what
// engines have of them, and the address that announcements name. A region waits for that until timeouts.adopt after the owner's last
// sign of life.

// portTries and portPause bound the wait for the port of the node before: the kernel may still be taking its sockets down.
const (
	portTries = 20
	portPause = 100 * time.Millisecond
)

// removes says whether a pool's file goes with the node. One that was adopted by a start that failed waits for the next try.
func (n *Node) removes(p *pool) bool {
	if !n.serving {
		return !p.region.Adopted()
	}
	return !n.s.KeepRegion
}

// keepRegions begins the sign of life: it moves the time until which the regions wait for a restart, until end is called.
func (n *Node) keepRegions() (end func(context.Context) error) {
	tick := time.NewTicker(max(n.s.Timeouts.Adopt/4, time.Millisecond))
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				for _, p := range n.pools {
					p.region.KeepFor(n.s.Timeouts.Adopt)
				}
			case <-stop:
				return
			}
		}
	}()
	return func(context.Context) error {
		close(stop)
		<-ended
		return nil
	}
}

// listen opens the side channel. Announcements name the port, so a node that was given none goes on with that of the node before;
// one that was given a port takes that.
func (n *Node) listen(ctx context.Context, h control.RouterHandler) (*control.Router, error) {
	port := 0
	for _, p := range n.pools {
		if p.region.Adopted() && p.region.Port() != 0 {
			port = p.region.Port()
			break
		}
	}
	if n.s.port != 0 && port != 0 && port != n.s.port {
		n.log.Warn("side_channel has changed: announcements made before lead nowhere", "port", n.s.port, "before", port)
	}
	if n.s.port != 0 || port == 0 {
		r, err := n.loop.Listen(ctx, n.s.host, n.s.port, h)
		if err != nil {
			return nil, badSideChannel(n.s, err)
		}
		return r, nil
	}
	for try := 1; ; try++ {
		r, err := n.loop.Listen(ctx, n.s.host, port, h)
		if err == nil {
			return r, nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, badSideChannel(n.s, err)
		}
		if try == portTries {
			// It was any free port, from the range that outgoing connections use too: to serve under another one is better than not at all.
			n.log.Warn("another process has the port of before: a new one is taken, and announcements made before lead nowhere; give side_channel a port outside of the ephemeral range to keep it",
				"before", port, "err", err)
			if r, err = n.loop.Listen(ctx, n.s.host, 0, h); err != nil {
				return nil, badSideChannel(n.s, err)
			}
			return r, nil
		}
		select {
		case <-time.After(portPause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func badSideChannel(s *settings, err error) error {
	return bad("side_channel", s.SideChannel, "%w; %s", err, listenFix(err, "use a free port, or 0 for any"))
}

// readWait is how long a clean end waits for plain peers to READ what they were acked. An engine that is not busy does in its next step.
const readWait = 3 * time.Second

// settle ends granting, and has the agents left that a plain peer may still READ by: a vLLM engine that acts on an ack and finds the agent
// dead ends. With keep_region they are left as by a node that is killed.
func (n *Node) settle(ctx context.Context) {
	n.producer.Stop()
	if !n.s.KeepRegion {
		ctx, cancel := context.WithTimeout(ctx, readWait)
		defer cancel()
		n.producer.Settle(ctx)
	}
	for _, p := range n.pools {
		unread := n.producer.Unread(p.cache)
		if unread == 0 && !n.s.KeepRegion {
			continue
		}
		if p.left = n.producer.Leave(p.cache); p.left && unread > 0 {
			n.log.Info("plain peers have not READ all that they were acked: the agents that serve them go on without the node, and keep the pool's memory",
				"unread", unread, "at_most", n.s.Timeouts.Adopt, "region", p.region.Path())
		}
	}
}

// leaveFormers says whether the end of a plane leaves agents that outlived the node before to the node that comes next.
func leaveFormers(p transfer.Plane, leave bool) {
	if p, ok := p.(interface{ LeaveFormers(bool) }); ok {
		p.LeaveFormers(leave)
	}
}

// handBack leaves an adopted region to the next try of a start that failed, with the agents of the node before and what they may still be
// asked for. Nothing of this node works on it any more.
func (p *pool) handBack(ctx context.Context, log *slog.Logger) {
	for _, g := range p.grantedBefore {
		// The producer let go of it at its end, and nobody has asked for room since.
		if pin, err := p.cache.Pin(g.Key); err == nil && pin.Info().Gen == g.Gen {
			pin.KeepGranted()
		}
	}
	f, err := p.region.Reopen(false)
	if err == nil {
		defer f.Close()
		err = nixl.HandBack(ctx, f)
	}
	if err != nil {
		log.Warn("agents of the node before may end before the next start", "region", p.region.Path(), "error", err)
	}
}

// logStart says what a pool starts with.
func (p *pool) logStart(a *ec.Adopted, took time.Duration, log *slog.Logger) {
	replaced, why := p.region.Replaced()
	switch {
	case p.region.Adopted():
		log.Info("region adopted from the node before", "region", p.region.Path(), "epoch", p.region.Epoch(), "entries", a.Entries,
			"bytes", a.Bytes, "verified", a.Verified, "dropped", a.Dropped+len(a.Corrupt), "fetches_freed", a.Freed,
			"reservations_kept", len(a.Filling), "pinned", len(a.Pinned), "granted", len(a.Granted), "took", took)
	case why != "":
		log.Warn("region of the node before reaped, not adopted", "region", p.region.Path(), "pid", replaced, "because", why)
	}
	if len(a.Corrupt) > 0 {
		log.Error("adopted entries whose bytes did not match their checksum were dropped", "keys", a.Corrupt)
	}
}

// sweepRegions reaps what other nodes, long dead, left in the directory.
func sweepRegions(dir string, log *slog.Logger) {
	swept, err := region.Sweep(region.SweepOptions{Dir: dir})
	if err != nil {
		log.Warn("cannot look for files of dead nodes", "error", err)
	}
	for _, s := range swept {
		if s.Reaped {
			log.Info("file of a dead node reaped", "file", s.Path, "bytes", s.Bytes, "because", s.Reason)
		}
	}
}

// SweepSocket takes away the engine socket's file of a node that is dead, and says whether there is, or would be in a dry run, such
// a file. Anything else at the path, a live node's socket above all, stays, and the error says why (ErrSocketInUse).
func SweepSocket(ctx context.Context, path string, dryRun bool) (stale bool, err error) {
	if stale, err = staleSocket(path); err != nil || !stale || dryRun {
		return stale, err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil || int(st.Uid) != os.Geteuid() {
		return false, fmt.Errorf("socket %s: of uid %d, this process is uid %d: left to its owner", path, st.Uid, os.Geteuid())
	}
	lock, err := lockPath(ctx, path)
	if err != nil {
		return false, err
	}
	return true, errors.Join(removeStale(path), lock.release()) // it looks again, now that no node can bind there
}
