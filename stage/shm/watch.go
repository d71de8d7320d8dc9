package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"golang.org/x/sys/unix"
)

const (
	// tick is how often all that is unread is looked at, whatever the kernel told: events can be lost.
	tick = time.Second
	// pollFast takes the place of events where the kernel gives none.
	pollFast = 10 * time.Millisecond
	// pollFirst and pollSlow are the pauses of who waits for a key, without an event: locks are held for microseconds, usually, and
	// their end gives no event in all cases.
	pollFirst = 100 * time.Microsecond
	pollSlow  = 100 * time.Millisecond
	// lingerTime is how long a plain reader may take for decoding, between the removal of a segment and of its lock file.
	lingerTime = 5 * time.Second
	maxLinger  = 4096

	watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_CLOSE_WRITE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_ONLYDIR
)

// watcher tells of what happens in the directory. One goroutine a connector, from the first put or wait on.
type watcher struct {
	c    *Connector
	f    *os.File // inotify; nil: there is none to be had
	stop chan struct{}
	done chan struct{}

	mu        sync.Mutex // after Connector.mu, if both
	waiters   map[string]map[*waiter]struct{}
	next      time.Time // of the next look; zero: nothing to look at
	lingering []lingering
}

// lingering is the lock file of a segment that has gone.
type lingering struct {
	key   string
	inode inode
	since time.Time
}

// startWatching starts the watcher if there is none. The caller holds c.mu.
func (c *Connector) startWatching() *watcher {
	if c.watcher != nil {
		return c.watcher
	}
	w := &watcher{c: c, stop: make(chan struct{}), done: make(chan struct{}), waiters: make(map[string]map[*waiter]struct{})}
	c.watcher = w
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err == nil {
		if _, err = unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", c.dir.fd), watchMask); err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		c.o.Log.Warn("the kernel gives no events of the directory (fs.inotify.max_user_instances?); it is looked at 100 times a second", "error", err)
		go w.poll()
		return w
	}
	w.f = os.NewFile(uintptr(fd), "inotify")
	go w.run()
	return w
}

func (w *watcher) close() error {
	close(w.stop)
	var err error
	if w.f != nil {
		err = w.f.Close()
	}
	<-w.done
	return err
}

func (w *watcher) poll() {
	defer close(w.done)
	for t := time.NewTicker(pollFast); ; {
		select {
		case <-w.stop:
			t.Stop()
			return
		case <-t.C:
			w.wakeAll()
			w.look()
		}
	}
}

func (w *watcher) run() {
	defer close(w.done)
	b := make([]byte, 64<<10)
	for {
		n, err := w.f.Read(b)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		w.events(b[:n])
		w.mu.Lock()
		due := !w.next.IsZero() && !time.Now().Before(w.next)
		w.mu.Unlock()
		if due {
			w.look()
		}
	}
}

// events takes what inotify(7) says: watch, mask, cookie and length of the name, 4 bytes each, and the name.
func (w *watcher) events(b []byte) {
	for len(b) >= unix.SizeofInotifyEvent {
		mask := binary.NativeEndian.Uint32(b[4:])
		end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
		if end > len(b) {
			return
		}
		name := strings.TrimRight(string(b[unix.SizeofInotifyEvent:end]), "\x00")
		b = b[end:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			w.wakeAll()
			w.look()
			continue
		}
		key, _ := keyOf(name)
		w.wake(key)
		if mask&(unix.IN_DELETE|unix.IN_MOVED_FROM) != 0 {
			w.c.mu.Lock()
			e := w.c.entries[key]
			w.c.mu.Unlock()
			if e != nil {
				w.c.check(e)
			}
		}
	}
}

// arm sees to it that there is a look by then.
func (w *watcher) arm(by time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if t := time.Now().Add(tick); t.Before(by) {
		by = t
	}
	if w.next.IsZero() || by.Before(w.next) {
		w.setNext(by)
	}
}

func (w *watcher) setNext(t time.Time) {
	w.next = t
	if w.f != nil {
		_ = w.f.SetReadDeadline(t) // of a closed file: the goroutine ends
	}
}

// look checks all that is unread, ends leases, and removes lock files that were left.
func (w *watcher) look() {
	now := time.Now()
	next := now.Add(tick)
	w.mu.Lock()
	w.next = time.Time{} // what is armed from here on is kept
	w.mu.Unlock()
	entries := w.c.snapshot()
	for _, e := range entries {
		if now.Before(e.end) {
			w.c.check(e)
			if e.end.Before(next) {
				next = e.end
			}
			continue
		}
		// If it is being read it is not over yet.
		if err := w.c.drop(e, stage.Expired); err != nil {
			w.c.o.Log.Debug("a payload whose lease is over is still there", "key", e.key, "error", err)
		}
	}
	lingering := w.sweepLocks(now)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lingering = append(w.lingering, lingering...)
	if len(entries) == 0 && len(w.lingering) == 0 || !w.next.IsZero() && w.next.Before(next) {
		next = w.next
	}
	w.setNext(next)
}

// linger notes the lock file of a segment that has gone, for who removed that may have been killed before it removed this.
func (w *watcher) linger(key string, lock inode) {
	w.mu.Lock()
	if len(w.lingering) < maxLinger {
		w.lingering = append(w.lingering, lingering{key, lock, time.Now()})
	}
	w.mu.Unlock()
}

// sweepLocks removes lock files that have stayed too long, and gives those that may still.
func (w *watcher) sweepLocks(now time.Time) []lingering {
	w.mu.Lock()
	all := w.lingering
	w.lingering = nil
	w.mu.Unlock()
	d := w.c.dir
	var kept []lingering
	for _, x := range all {
		if st, err := d.stat(lockName(x.key)); err != nil || st.inode != x.inode {
			continue
		}
		if _, err := d.stat(x.key); !gone(err) {
			continue // it serves another payload
		}
		if now.Sub(x.since) < lingerTime {
			kept = append(kept, x)
			continue
		}
		w.c.o.Log.Info("a payload was deleted and its lock file was not: its reader was killed over it, or it was no reader", "key", x.key)
		if l, err := d.tryLock(x.key); err == nil {
			d.free(x.key, l)
		}
	}
	return kept
}

func (w *watcher) wake(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for x := range w.waiters[key] {
		x.wake()
	}
}

func (w *watcher) wakeAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, all := range w.waiters {
		for x := range all {
			x.wake()
		}
	}
}

// waiter waits for something to happen to a key: to its segment or its lock file.
type waiter struct {
	w     *watcher
	key   string
	event chan struct{}
	pause time.Duration
}

// watch makes a waiter, whose caller looks at the key after it, and closes it.
func (c *Connector) watch(key string) *waiter {
	c.mu.Lock()
	w := c.startWatching()
	c.mu.Unlock()
	x := &waiter{w, key, make(chan struct{}, 1), pollFirst}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiters[key] == nil {
		w.waiters[key] = make(map[*waiter]struct{})
	}
	w.waiters[key][x] = struct{}{}
	return x
}

func (x *waiter) close() {
	x.w.mu.Lock()
	defer x.w.mu.Unlock()
	delete(x.w.waiters[x.key], x)
	if len(x.w.waiters[x.key]) == 0 {
		delete(x.w.waiters, x.key)
	}
}

func (x *waiter) wake() {
	select {
	case x.event <- struct{}{}:
	default:
	}
}

// wait returns when something happened, or after a pause that grows as long as nothing does. False: ctx is done.
func (x *waiter) wait(ctx context.Context) bool {
	t := time.NewTimer(x.pause)
	defer t.Stop()
	select {
	case <-x.event:
		x.pause = pollFirst
	case <-t.C:
		x.pause = min(2*x.pause, pollSlow)
	case <-ctx.Done():
		return false
	}
	return true
}
