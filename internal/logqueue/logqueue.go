// Package logqueue stands between a log and where it is written, so that a reader that has stopped reading cannot stop who logs.
package logqueue

import (
	"io"
	"slices"
	"sync"
	"time"
)

// Most is how many bytes of lines wait at most: minutes of an ordinary log.
const Most = 1 << 20

// Writer takes lines without ever waiting, and has one goroutine write them in their order. Lines that find no place are dropped, and
// counted in their place once lines are read again. Errors of what it writes to are ignored, as slog does. Safe for concurrent use.
type Writer struct {
	to     io.Writer
	notice func(dropped int) []byte

	mu      sync.Mutex
	lines   []line
	bytes   int           // in lines
	dropped int           // since the last of lines
	written chan struct{} // closed when nothing waits any more; nil: nothing waits, and there is no goroutine
}

type line struct {
	text   []byte
	before int // lines dropped before it
}

// New writes to to. notice makes the line that says how many were dropped; the goroutine calls it.
func New(to io.Writer, notice func(dropped int) []byte) *Writer {
	return &Writer{to: to, notice: notice}
}

// Write takes one line, or drops it. It never fails, and keeps nothing of p.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bytes+len(p) > Most {
		w.dropped++
		return len(p), nil
	}
	w.lines = append(w.lines, line{slices.Clone(p), w.dropped})
	w.bytes += len(p)
	w.dropped = 0
	if w.written == nil {
		w.written = make(chan struct{})
		go w.run()
	}
	return len(p), nil
}

// Flush waits until nothing waits to be written, but no longer than most, and says whether that is so.
func (w *Writer) Flush(most time.Duration) bool {
	w.mu.Lock()
	written := w.written
	w.mu.Unlock()
	if written == nil {
		return true
	}
	late := time.NewTimer(most)
	defer late.Stop()
	select {
	case <-written:
		return true
	case <-late.C:
		return false
	}
}

func (w *Writer) run() {
	for {
		l, ok := w.next()
		if !ok {
			return
		}
		if l.before > 0 {
			_, _ = w.to.Write(w.notice(l.before))
		}
		if len(l.text) > 0 {
			_, _ = w.to.Write(l.text)
		}
		w.mu.Lock()
		w.bytes -= len(l.text) // only now: what is being written takes memory too
		w.mu.Unlock()
	}
}

// next is the line to write, or one without text if some were dropped after the last. Without either the goroutine is to end.
func (w *Writer) next() (l line, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case len(w.lines) > 0:
		l = w.lines[0]
		w.lines[0] = line{}
		w.lines = w.lines[1:]
	case w.dropped > 0:
		l.before, w.dropped = w.dropped, 0
	default:
		w.lines = nil
		close(w.written)
		w.written = nil
		return l, false
	}
	return l, true
}
