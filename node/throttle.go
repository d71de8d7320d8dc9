package node

import (
	"log/slog"
	"sync"
	"time"
)

// logEvery is the least time between two log lines about connections, once those that may come together have.
const logEvery = 10 * time.Second

// logLimit spaces out the log lines of one cause. Safe for concurrent use.
type logLimit struct {
	burst int // lines that may come together, before they are spaced out; 0 is 1

	mu    sync.Mutex
	next  time.Time // when all of burst may come again, less logEvery for each that may come sooner
	count int       // since the last line
}

// info logs msg and how often it was to be logged since the last time, or only counts it.
func (l *logLimit) info(log *slog.Logger, msg string, args ...any) {
	l.mu.Lock()
	l.count++
	now, count := time.Now(), l.count
	due := !now.Add(time.Duration(max(l.burst, 1)-1) * logEvery).Before(l.next)
	if due {
		if l.next.Before(now) {
			l.next = now
		}
		l.next, l.count = l.next.Add(logEvery), 0
	}
	l.mu.Unlock()
	if due {
		log.Info(msg, append(args, "count", count)...)
	}
}
