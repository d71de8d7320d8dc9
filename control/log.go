package control

import (
	"log/slog"
	"net/netip"
	"time"
)

// logEvery is the least time between two log lines of one cause that a peer can provoke.
const logEvery = 10 * time.Second

// logLimit spaces out the log lines of one cause. It needs a lock, or belongs to one goroutine.
type logLimit struct {
	next  time.Time
	count int // since the last line
}

// warn logs msg and how often it was to be logged since the last time, or only counts it.
func (l *logLimit) warn(log *slog.Logger, msg string, args ...any) {
	if count, due := l.due(); due {
		log.Warn(msg, append(args, "count", count)...)
	}
}

// due counts one, and says whether a line is due, and for how many.
func (l *logLimit) due() (count int, due bool) {
	l.count++
	now := time.Now()
	if now.Before(l.next) {
		return 0, false
	}
	count = l.count
	l.next, l.count = now.Add(logEvery), 0
	return count, true
}

// plainIP writes an IPv4 address that came by an IPv6 socket as IPv4.
func plainIP(s string) string {
	if ip, err := netip.ParseAddr(s); err == nil && ip.Is4In6() {
		return ip.Unmap().String()
	}
	return s
}
