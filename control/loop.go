package control

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"
)

// turnBudget is how many messages one socket may take in before the others have their turn.
const turnBudget = 256

// maxSockets is libzmq's limit for one loop: a router or dealer takes three (itself and both ends of its monitor).
const maxSockets = 16384

// A loop that has yielded for yieldLong or longer does not do it again for yieldPauseMin, which doubles up to yieldPauseMax.
const (
	yieldLong     = 500 * time.Microsecond
	yieldPauseMin = 25 * time.Millisecond
	yieldPauseMax = 2 * time.Second
)

// member is a Router or Dealer of a loop.
type member interface {
	// turn does what there is to do, up to about turnBudget messages, and says whether it must be called again before the loop
	// sleeps; if not, ready is unset. It runs on the owner goroutine.
	turn() bool
	// release gives the sockets back. It is called once, on the owner goroutine.
	release()
	base() *standing
}

// standing is where a member stands with its loop.
type standing struct {
	ready  bool        // listed in Loop.ready, or in its turn; guarded by Loop.mu
	closed atomic.Bool // by its Close
}

func (s *standing) base() *standing { return s }

// ended says whether the member takes no more messages and makes no more calls.
func (s *standing) ended(l *Loop) bool { return s.closed.Load() || l.closing.Load() }

// Loop is one owner goroutine. It is locked to a thread while it works.
type Loop struct {
	opts  Options
	ctx   *zmq4.Context
	epoll int
	event int          // eventfd: wakes the owner
	tid   atomic.Int64 // the owner's thread while it works, else 0

	mu      sync.Mutex
	calls   []func()
	ready   []member
	late    []*stream   // to be flushed before the owner sleeps
	asleep  bool        // the owner sleeps, or is about to
	err     error       // why the loop ended, if not by Close
	closing atomic.Bool // no new members, no new calls; set under mu
	total   total
	// addresses are the totals of the addresses that peers of routers are at; only the owner writes it.
	addresses map[string]*total
	sleeps    int // so far; tests look at it

	done chan struct{}

	// Owner only.
	in, inMon  inbound
	read       []byte // where streams read
	events     [128]unix.EpollEvent
	found      int      // of events
	spareCalls []func() // take turns with calls and ready
	spareReady []member
	spareLate  []*stream
	yieldAt    time.Time // not before
	yieldPause time.Duration
	members    map[member]struct{} // not yet released
	watched    map[int]member      // by descriptor
	alarms     alarms
	swell      swell
	monitors   int // made so far: names them
}

// NewLoop starts a loop. The caller owns it and must Close it.
func NewLoop(o Options) (*Loop, error) {
	o = o.withDefaults()
	if err := o.check(); err != nil {
		return nil, err
	}
	l := &Loop{opts: o, swell: swell{room: o.swell}, epoll: -1, event: -1, done: make(chan struct{}), members: map[member]struct{}{}, watched: map[int]member{},
		addresses: map[string]*total{}}
	l.total.limit = o.TotalBytes
	if err := l.open(); err != nil {
		l.shut()
		return nil, fmt.Errorf("control: start a loop: %w", err)
	}
	l.in, l.inMon, l.read = newInbound(), newInbound(), make([]byte, readSize)
	l.yieldPause = yieldPauseMin
	l.total.flow = newFlow(flow{})
	go l.run()
	return l, nil
}

func (l *Loop) open() (err error) {
	if l.ctx, err = zmq4.NewContext(); err != nil {
		l.ctx = nil
		return err
	}
	if err := l.ctx.SetMaxSockets(maxSockets); err != nil {
		return err
	}
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if l.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	return unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, l.event, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(l.event)})
}

// shut gives back what open took.
func (l *Loop) shut() {
	if l.ctx != nil {
		l.ctx.Term() // waits for the sockets' connections to end: at once, they do not linger
	}
	if l.event >= 0 {
		unix.Close(l.event)
	}
	if l.epoll >= 0 {
		unix.Close(l.epoll)
	}
}

// Close ends all sockets of the loop and waits for the goroutine, and so for a handler that is running: do not hold a lock that a
// handler takes. Messages not yet sent are dropped. No handler is called afterwards. From a handler it only starts the end.
// Idempotent; it returns what Err returns.
func (l *Loop) Close() error {
	l.mu.Lock()
	l.closing.Store(true)
	wake := l.wakeLocked()
	l.mu.Unlock()
	l.wake(wake)
	if l.onOwner() {
		return nil
	}
	<-l.done
	return l.Err()
}

// Done is closed when the loop has ended, by Close or by an error.
func (l *Loop) Done() <-chan struct{} { return l.done }

// Err says why the loop ended: nil after Close, or while it runs.
func (l *Loop) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// onOwner says whether the caller is the owner goroutine: it alone runs on the owner's thread.
func (l *Loop) onOwner() bool { return int64(unix.Gettid()) == l.tid.Load() }

// wakeLocked says whether the caller has to wake the owner, once it has let go of mu.
func (l *Loop) wakeLocked() bool {
	asleep := l.asleep
	l.asleep = false
	return asleep
}

// one is what an eventfd takes: a count of 1 in the machine's byte order.
var one = binary.NativeEndian.AppendUint64(nil, 1)

func (l *Loop) wake(needed bool) {
	if needed {
		unix.Write(l.event, one) // fails only if the counter is full, and then the owner is awake
	}
}

// readyLocked gives m a turn. Caller holds mu, and passes the result to wake after that.
func (l *Loop) readyLocked(m member) bool {
	st := m.base()
	if st.ready {
		return false // its turn is to come, or ends with a look at what came meanwhile
	}
	st.ready = true
	l.ready = append(l.ready, m)
	return l.wakeLocked()
}

// post runs f on the owner goroutine, later.
func (l *Loop) post(f func()) error {
	l.mu.Lock()
	if l.closing.Load() {
		l.mu.Unlock()
		return ErrClosed
	}
	l.calls = append(l.calls, f)
	wake := l.wakeLocked()
	l.mu.Unlock()
	l.wake(wake)
	return nil
}

// call runs f on the owner goroutine and waits for it. If ctx ends first f does not run at all.
func (l *Loop) call(ctx context.Context, f func() error) error {
	if l.onOwner() {
		return f()
	}
	var claimed atomic.Bool
	result := make(chan error, 1)
	err := l.post(func() {
		if claimed.CompareAndSwap(false, true) {
			result <- f()
		}
	})
	if err != nil {
		return err
	}
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
		if claimed.CompareAndSwap(false, true) {
			return ctx.Err()
		}
	case <-l.done:
	}
	// f is running, or the loop ended: either has run f, or never will.
	select {
	case err := <-result:
		return err
	case <-l.done:
		return ErrClosed
	}
}

// closeMember starts the end of m.
func (l *Loop) closeMember(m member) {
	if !m.base().closed.Swap(true) {
		l.post(m.release) // if the loop ends it releases m itself
	}
}

// fail ends the loop. Owner only.
func (l *Loop) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closing.Load() {
		l.closing.Store(true)
		l.err = err
		l.opts.Log.Error("control loop ends", "error", err)
	}
}

func (l *Loop) run() {
	for l.work() {
		l.yield()
		n, err := unix.EpollWait(l.epoll, l.events[:], l.sleep())
		l.found = max(n, 0)
		if err != nil && !errors.Is(err, syscall.EINTR) {
			l.fail(fmt.Errorf("control: epoll_wait: %w", err))
		}
	}
	l.hold()
	l.end()
	l.let()
	close(l.done)
}

// hold keeps the owner on its thread until let, so that onOwner can tell.
func (l *Loop) hold() {
	runtime.LockOSThread()
	l.tid.Store(int64(unix.Gettid()))
}

func (l *Loop) let() {
	l.tid.Store(0)
	runtime.UnlockOSThread()
}

// work does what there is to do, and says whether the loop goes on.
func (l *Loop) work() bool {
	l.hold()
	defer l.let()
	for _, ev := range l.events[:l.found] {
		l.dispatch(int(ev.Fd))
	}
	l.found = 0
	l.ring()
	l.mu.Lock()
	l.asleep = false
	if l.closing.Load() {
		l.mu.Unlock()
		return false
	}
	calls, turns := l.calls, l.ready
	l.calls, l.ready = l.spareCalls[:0], l.spareReady[:0]
	l.mu.Unlock()
	for i, f := range calls {
		f()
		calls[i] = nil
	}
	for i, m := range turns {
		if m.turn() {
			l.again(m)
		}
		turns[i] = nil
	}
	l.spareCalls, l.spareReady = calls, turns
	return true
}

// yield lets the goroutines that handlers have woken run on this thread before it sleeps: Go would wake another thread for them, which
// takes as long as all else of a local round trip. But where others keep all of GOMAXPROCS busy, to yield costs one of their time
// slices, 10 ms; so after one that took long the next is a while away.
func (l *Loop) yield() {
	start := time.Now()
	if start.Before(l.yieldAt) {
		return
	}
	runtime.Gosched()
	took := time.Since(start)
	if took < yieldLong {
		l.yieldPause = yieldPauseMin
		return
	}
	l.yieldAt = start.Add(took + l.yieldPause)
	l.yieldPause = min(2*l.yieldPause, yieldPauseMax)
}

// again lists m for another turn. Its ready flag is still set.
func (l *Loop) again(m member) {
	l.mu.Lock()
	l.ready = append(l.ready, m)
	l.mu.Unlock()
}

// ring gives a turn to the members whose alarm is due.
func (l *Loop) ring() {
	if len(l.alarms) == 0 {
		return
	}
	for now := time.Now(); ; {
		al := l.alarms.due(now)
		if al == nil {
			return
		}
		l.mu.Lock()
		l.readyLocked(al.m)
		l.mu.Unlock()
	}
}

// sleep returns how long epoll may wait, in milliseconds: not at all if there is work, else until the next alarm.
func (l *Loop) sleep() int {
	l.mu.Lock()
	for len(l.late) > 0 {
		l.flushLate()
	}
	idle := len(l.calls) == 0 && len(l.ready) == 0 && !l.closing.Load()
	l.asleep = idle
	if idle {
		l.sleeps++
	}
	l.mu.Unlock()
	switch {
	case !idle:
		return 0
	case len(l.alarms) == 0:
		return -1
	}
	d := max(time.Until(l.alarms[0].at), 0)
	return int(min((d+time.Millisecond-1)/time.Millisecond, 1<<30))
}

// flushLater lets s be flushed before the owner sleeps. It is false if it sleeps, and would have to be woken.
func (l *Loop) flushLater(s *stream) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.asleep {
		return false
	}
	if !s.late {
		s.late = true
		l.late = append(l.late, s)
	}
	return true
}

// flushLate lets go of mu meanwhile, which the caller holds.
func (l *Loop) flushLate() {
	late := l.late
	for _, s := range late {
		s.late = false
	}
	l.late = l.spareLate[:0]
	l.mu.Unlock()
	for i, s := range late {
		s.flush()
		late[i] = nil
	}
	l.spareLate = late
	l.mu.Lock()
}

// dispatch gives a turn to the member that watches fd.
func (l *Loop) dispatch(fd int) {
	if fd == l.event {
		var buf [8]byte
		unix.Read(l.event, buf[:])
		return
	}
	if m, ok := l.watched[fd]; ok {
		l.mu.Lock()
		l.readyLocked(m)
		l.mu.Unlock()
	}
}

// watch lets the loop take a turn of m whenever there is something to read from fd.
func (l *Loop) watch(fd int, m member) error {
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}); err != nil {
		return err
	}
	l.watched[fd] = m
	return nil
}

// unwatch is the end of watch. It comes before fd is closed.
func (l *Loop) unwatch(fd int) {
	delete(l.watched, fd)
	unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil) // fails only if it is not there
}

// end closes everything. Calls that were posted and did not run never will: who waits for one waits for done too.
func (l *Loop) end() {
	for m := range l.members {
		m.release()
	}
	l.in.free()
	l.inMon.free()
	l.shut()
	l.mu.Lock()
	l.total.flow.drop()
	l.total.flow = flow{} // for a Send that is under way
	l.mu.Unlock()
}
