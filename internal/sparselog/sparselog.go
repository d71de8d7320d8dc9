// Package sparselog keeps what a peer can provoke again and again from filling the log: a line now and then, with how often it was.
package sparselog

import (
	"log/slog"
	"sync"
	"time"
)

// Every is the least time between two lines of one cause, once those that may come together have.
const Every = 10 * time.Second

// Cause is one thing that is worth a line. The zero value is ready for use. Safe for concurrent use.
type Cause struct {
	Burst int // lines that may come together, before they are spaced out; 0 is 1

	mu    sync.Mutex
	next  time.Time // when all of Burst may come again, less Every for each that may come sooner
	count int       // since the last line
}

// Due counts one, and says whether a line is due, and for how many since the last.
func (c *Cause) Due() (count int, due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	now := time.Now()
	if now.Add(time.Duration(max(c.Burst, 1)-1) * Every).Before(c.next) {
		return 0, false
	}
	if c.next.Before(now) {
		c.next = now
	}
	count = c.count
	c.next, c.count = c.next.Add(Every), 0
	return count, true
}

// Idle says that the next one gets a line for itself alone.
func (c *Cause) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count == 0 && !time.Now().Before(c.next)
}

// Warn logs msg and, as "count", how often it was to be logged since the last time, or only counts it.
func (c *Cause) Warn(log *slog.Logger, msg string, args ...any) {
	if count, due := c.Due(); due {
		log.Warn(msg, append(args, "count", count)...)
	}
}

// Info is Warn of what is no fault.
func (c *Cause) Info(log *slog.Logger, msg string, args ...any) {
	if count, due := c.Due(); due {
		log.Info(msg, append(args, "count", count)...)
	}
}
