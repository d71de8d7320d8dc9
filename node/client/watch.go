package client

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A thread that sleeps is woken in 10 to 70 us where the processor has nothing else to do, and a goroutine that waits for what another
// receives takes a second wake-up: together as much as a small pull. So whoever has sent a request that is likely to be answered at once
// looks for the answer itself for a while, and lets other threads have the processor after each look (sched_yield). What is not answered
// in that time is waited for in the usual way; and if that happens again and again, nobody looks any more but now and then.
const (
	watchFor   = 200 * time.Microsecond
	watchBytes = 1 << 20 // to be fetched: more takes longer
	watchTries = 4       // in a row without an answer, before it is given up
	watchAgain = 32      // requests between tries after that
)

// watch counts how often looking was in vain.
type watch struct {
	misses atomic.Int32
	skips  atomic.Int32
}

// lookOut receives until done, or for watchFor. Called without a lock.
func (c *Client) lookOut(l *link, done func() bool) {
	w := &c.watch
	if runtime.GOMAXPROCS(0) == 1 || w.misses.Load() >= watchTries && w.skips.Add(1)%watchAgain != 0 || !l.reading.TryLock() {
		return
	}
	defer l.reading.Unlock()
	for begin := time.Now(); ; {
		if err := c.take(l); err != nil {
			_ = l.conn.Close() // wakes the reader, which sees why
			return
		}
		if done() {
			w.misses.Store(0)
			return
		}
		if time.Since(begin) > watchFor {
			w.misses.Add(1)
			return
		}
		yield()
	}
}

// yield gives the processor to another thread that can run, of whatever process.
func yield() { _, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0) }
