package nixl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

const (
	takeOverTimeout = 5 * time.Second                 // for an agent to answer; it may see the end of its plane only now
	unreachableWait = successorGrace + 30*time.Second // for one that cannot be told to end
	formerPoll      = time.Millisecond
)

// former is a serve agent of a process that died, taken over.
type former struct {
	index int
	wire  *wire
	file  *os.File // the region's, to ask for its lock

	mu      sync.Mutex
	process *os.File // its pidfd; nil: it cannot be seen from here, or is over

	left   atomic.Bool
	ended  atomic.Bool // by us
	died   func()      // called if it was not, before it is over
	ending sync.Once
	isOver chan struct{} // closed when the process is gone
}

// takeOver goes on with the serve agents that a process which died left of the region in f, and ends those that do not answer. On its
// return no other ones serve the region. died is called for each that dies later and was neither ended nor left. The caller owns the region.
func takeOver(ctx context.Context, f *os.File, log *slog.Logger, died func()) (all []*former, err error) {
	defer func() {
		if err != nil {
			for _, a := range all {
				a.leave()
			}
			all = nil
		}
	}()
	for i := range region.Servers {
		free, err := serverGone(f, i)
		if err != nil {
			return all, err
		}
		if free {
			continue
		}
		a, err := claimFormer(ctx, f, i)
		if err == nil {
			a.died = died
			go a.watch()
			log.Info("nixl: a serve agent of the node before goes on serving peers that know it", "pid", a.pid())
			all = append(all, a)
			continue
		}
		log.Warn("nixl: a serve agent of the node before is not taken over, and waited for", "err", err)
		if err := waitForServer(ctx, f, i); err != nil {
			return all, err
		}
	}
	return all, nil
}

// EndServing ends the serve agents that a process which died left of the region in f: for an owner that serves it by another plane. On its
// return nothing can be read by them any more. The caller owns the region.
func EndServing(ctx context.Context, f *os.File, log *slog.Logger) error {
	all, err := takeOver(ctx, f, log, func() {})
	for _, a := range all {
		a.end()
	}
	return err
}

// claimFormer takes server number i over, which is to be watched then. If that does not answer, it is killed where it can be.
func claimFormer(ctx context.Context, f *os.File, i int) (*former, error) {
	name, err := socketName(f, i)
	if err != nil {
		return nil, err
	}
	c, err := net.DialUnix("unix", nil, name)
	if err != nil {
		return nil, fmt.Errorf("nixl: it cannot be reached: %w", err)
	}
	cred, err := peerOf(c)
	if err == nil && int(cred.Uid) != os.Geteuid() {
		err = fmt.Errorf("nixl: its socket is user %d's", cred.Uid)
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	a := &former{index: i, wire: wireOf(c), isOver: make(chan struct{})}
	if fd, err := unix.PidfdOpen(int(cred.Pid), 0); err == nil {
		a.process = os.NewFile(uintptr(fd), "agent")
		// Its pid was not another's yet when it was opened, if it lives after that.
		if !alive(c) {
			_ = a.process.Close()
			a.process = nil
		}
	}
	if a.file, err = reopen(f, unix.O_RDONLY); err == nil {
		err = a.claim(ctx)
	}
	if err != nil {
		a.kill()
		a.close()
		return nil, err
	}
	return a, nil
}

func (a *former) claim(ctx context.Context) error {
	deadline := time.Now().Add(takeOverTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := a.wire.conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	if err := a.wire.send(frameTakeOver, 1, a.file, nil); err != nil {
		return fmt.Errorf("nixl: it is not told: %w", err)
	}
	answer, err := a.wire.next()
	if err != nil {
		return fmt.Errorf("nixl: it does not answer: %w", err)
	}
	if _, err := parseReply(answer.body); err != nil {
		return err
	}
	return a.wire.conn.SetReadDeadline(time.Time{})
}

// watch sees its end.
func (a *former) watch() {
	defer a.close()
	for {
		if _, err := a.wire.next(); err != nil {
			break
		}
	}
	for !a.left.Load() {
		// The lock goes after the memory.
		if gone, err := serverGone(a.file, a.index); gone || err != nil {
			if !a.ended.Load() {
				a.died()
			}
			close(a.isOver)
			return
		}
		time.Sleep(formerPoll)
	}
}

func (a *former) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range []*os.File{a.process, a.file} {
		if f != nil {
			_ = f.Close()
		}
	}
	a.process = nil
	_ = a.wire.conn.Close()
}

func (a *former) pid() int {
	cred, err := peerOf(a.wire.conn)
	if err != nil {
		return 0
	}
	return int(cred.Pid)
}

// kill ends it where it can be seen, and asks it to end where not.
func (a *former) kill() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process != nil {
		_ = unix.PidfdSendSignal(int(a.process.Fd()), unix.SIGKILL, nil, 0) // it may have ended by itself
		return
	}
	_ = a.wire.send(frameEnd, 0, nil, nil) // fails if it is over
}

// end returns when nothing can be read by it any more.
func (a *former) end() {
	a.ending.Do(func() {
		a.ended.Store(true)
		a.kill()
	})
	<-a.isOver
}

// leave lets it go on for the next one who takes it over.
func (a *former) leave() {
	a.left.Store(true)
	_ = a.wire.conn.Close()
}

// serverGone says whether server number i is no more.
func serverGone(f *os.File, i int) (bool, error) {
	l := region.ServerLock(i, unix.F_WRLCK)
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, l); err != nil {
		return false, fmt.Errorf("%w: nixl: ask who serves the memory: %w", transfer.ErrBadRequest, err)
	}
	return l.Type == unix.F_UNLCK, nil
}

func waitForServer(ctx context.Context, f *os.File, i int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, unreachableWait,
		errors.New("it does not end: end the ferry nixl-agent processes of the node that was killed"))
	defer cancel()
	tick := time.NewTicker(formerPoll)
	defer tick.Stop()
	for {
		if gone, err := serverGone(f, i); gone || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("nixl: a serve agent of the node before: %w", context.Cause(ctx))
		}
	}
}
