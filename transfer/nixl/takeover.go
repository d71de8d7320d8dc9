package nixl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
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
	file  *os.File  // the region's, to ask for its lock
	since time.Time // see transfer.Former

	mu      sync.Mutex
	process *os.File // its pidfd; nil: it cannot be seen from here, or is over

	left   atomic.Bool
	ended  atomic.Bool // by us
	died   func()      // called if it was not, before it is over
	ending sync.Once
	isOver chan struct{} // closed when the process is gone
}

// takeOver goes on with the serve agents that a process which died left of the region in f, and ends those that do not answer. On its
// return no other ones serve the region; the oldest comes first. died is called for each that dies later and was neither ended nor left. The caller owns the region.
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
	slices.SortStableFunc(all, func(a, b *former) int { return a.since.Compare(b.since) })
	return all, nil
}

// Heirs are the serve agents that a process which died left of a region, for an owner that serves it by another plane.
type Heirs struct {
	all    []*former
	leaves bool
}

// TakeOver goes on with the serve agents that a process which died left of the region in f. The caller owns the region, changes nothing that
// was granted of it until they are over, and closes them.
func TakeOver(ctx context.Context, f *os.File, log *slog.Logger) (*Heirs, error) {
	all, err := takeOver(ctx, f, log, func() {})
	return &Heirs{all: all}, err
}

// Formers are the agents, the oldest first.
func (h *Heirs) Formers() []transfer.Former { return formersOf(h.all) }

// Leave has Close leave those that still serve to the next owner, as Registration.Leave does.
func (h *Heirs) Leave() bool {
	h.leaves = len(stillServing(h.all)) > 0
	return h.leaves
}

// Close ends them and returns when nothing can be read by them any more, unless they are left.
func (h *Heirs) Close() error {
	for _, a := range h.all {
		if h.leaves {
			a.leave()
			continue
		}
		a.end()
	}
	return nil
}

// stillServing are those that are not over.
func stillServing(all []*former) (live []*former) {
	for _, a := range all {
		select {
		case <-a.isOver:
		default:
			live = append(live, a)
		}
	}
	return live
}

func formersOf(all []*former) (fs []transfer.Former) {
	for _, a := range all {
		fs = append(fs, transfer.Former{Left: a.since, Gone: a.isOver, End: a.end})
	}
	return fs
}

// unixSockets lists the sockets of this network namespace.
const unixSockets = "/proc/net/unix"

// EndUnnamed ends the serve agents that go on with files which were made under a path and have no name any more, and says how many
// there were. It returns when their memory is free, or when ctx ends. It is for who needs that memory.
func EndUnnamed(ctx context.Context, path string) (ended int) {
	var dir, named unix.Stat_t
	if unix.Stat(filepath.Dir(path), &dir) != nil {
		return 0
	}
	_ = unix.Lstat(path, &named) // none: no file has that name
	prefix := socketPrefix(dir.Dev, filepath.Base(path))
	list, err := os.ReadFile(unixSockets)
	if err != nil {
		return 0
	}
	seen := map[string]bool{}
	for w := range strings.FieldsSeq(string(list)) { // a connection to a socket has its name too
		if ctx.Err() != nil {
			break
		}
		rest, ours := strings.CutPrefix(w, prefix)
		if ino, _, _ := strings.Cut(rest, "/"); !ours || seen[w] || ino == strconv.FormatUint(named.Ino, 10) {
			continue
		}
		seen[w] = true
		if endUnnamed(ctx, w) {
			ended++
		}
	}
	return ended
}

// endUnnamed ends the one that listens there.
func endUnnamed(ctx context.Context, name string) bool {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Net: "unix", Name: name})
	if err != nil {
		return false
	}
	cred, err := peerOf(c)
	if err != nil || int(cred.Uid) != os.Geteuid() {
		_ = c.Close()
		return false
	}
	a := &former{wire: wireOf(c)}
	a.seize(cred, c)
	defer a.close()
	// It is told, not killed: one whose plane lives does not listen, and one whose file has a name, in another directory, refuses.
	if err := a.wire.send(frameEnd, 0, nil, nil); err != nil {
		return false
	}
	deadline := time.Now().Add(takeOverTimeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	_ = c.SetReadDeadline(deadline) // fails only on a closed connection
	if _, err := a.wire.next(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	if a.process == nil {
		return true // it cannot be seen from here
	}
	for { // its files go after its sockets
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(a.process.Fd()), Events: unix.POLLIN}}, int(max(0, time.Until(deadline)).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return err == nil && n == 1
		}
	}
}

// seize notes the process at the other end of c, if it can be seen from here.
func (a *former) seize(cred *unix.Ucred, c *net.UnixConn) {
	fd, err := unix.PidfdOpen(int(cred.Pid), 0)
	if err != nil {
		return
	}
	a.process = os.NewFile(uintptr(fd), "agent")
	// Its pid was not another's yet when it was opened, if it lives after that.
	if !alive(c) {
		_ = a.process.Close()
		a.process = nil
	}
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
	a.seize(cred, c)
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
	r, err := parseReply(answer.body)
	if err != nil {
		return err
	}
	a.since = time.Now()
	if orphaned := int64(r.Uint64()); orphaned > 0 { // a ferry of before says nothing
		a.since = a.since.Add(-time.Duration(max(0, boottime.Now()-orphaned)))
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
