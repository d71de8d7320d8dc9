package node

import (
	"log/slog"
	"sync"
	"time"
)

// logEvery is the least time between two log lines about connections that nobody needs to be an engine for.
const logEvery = 10 * time.Second

// logLimit spaces out the log lines of one cause. Safe for concurrent use.
type logLimit struct {
	mu    sync.Mutex
	next  time.Time
	count int // since the last line
}

// info logs msg and how often it was to be logged since the last time, or only counts it.
func (l *logLimit) info(log *slog.Logger, msg string, args ...any) {
	l.mu.Lock()
	l.count++
	now, count := time.Now(), l.count
	due := !now.Before(l.next)
	if due {
		l.next, l.count = now.Add(logEvery), 0
	}
	l.mu.Unlock()
	if due {
		log.Info(msg, append(args, "count", count)...)
	}
}
